"""What a file holds cannot drive the terminal: its control characters are printed as escapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import run as command

# Clear the screen, in seven bits and in eight; ring; overwrite the line; reverse what follows.
HOSTILE = "x\x1b[2J\x9b2J\x07\rno\u202etxt"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def answers(path: Path) -> Path:
    """Forty answers in two groups, one with a hostile name."""
    rows = [{"confidence": 0.5 + n / 100, "correct": n % 3 > 0, "group": HOSTILE if n % 2 else "a"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_question_is_printed_without_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"q": f"{n} {HOSTILE}", "o": ["red", "blue"], "a": "red"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    told = command(capsys, "data", "--file", path, "--fields", "question=q,options=o,answer=a", "--n", "1")
    assert told.code == 0
    assert r"\u001b[2J" in told.out
    assert not CONTROLS.search(told.out + told.err)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_group_is_printed_without_its_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    told = command(capsys, "measure", answers(tmp_path / "answers.jsonl"), "--by", "group", *options)
    assert told.code == 0
    assert not CONTROLS.search(told.out + told.err)
    if options:  # what a program reads is the name itself
        assert json.dumps(HOSTILE) in json.dumps(told.json)
