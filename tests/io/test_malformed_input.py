"""Every command refuses malformed input in one short line that names the place, with exit code 2 and at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from malformed import CASES, Case

from catto.errors import MAX_DEPTH, DataError, parse_json, shorten_text

Capture = pytest.CaptureFixture[str]
# The longest line: `catto: `, a path or two, a message.
LONGEST = 1250


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_there_are_enough_of_them_and_each_is_named_once() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_malformed_input_is_one_line_and_exit_code_2(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    case.write(tmp_path)
    before, began = listing(tmp_path), time.process_time()
    done = run(capsys, *case.arguments)
    assert time.process_time() - began < 10
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("catto: ")
    assert done.err.count("\n") == 1
    assert len(done.err) <= LONGEST
    assert "Traceback" not in done.err
    for word in case.told:
        assert word in done.err, done.err
    assert listing(tmp_path) == before


# One of each kind as a process of its own: what the interpreter prints at its end counts too.
PROCESSES = (
    "eval: no such folder",
    "eval: other settings",
    "measure: deep line",
    "measure --bins 1000000000",
    "recipe: 5,000 levels",
    "train --seed",
)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_refuses_it_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    case.write(tmp_path)
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('HEAVY', sorted({'torch', 'transformers', 'trl'} & set(sys.modules))))\n"
        "from catto.cli import main\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *case.arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "HEAVY []\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in case.told)


NEEDING_A_PLACE = (
    ("eval", "empty.model", "--task", "witnesses", "--n", "2", "--out", "shut/eval"),
    ("run", "one.yaml", "--out", "shut/run"),
    ("teach", "one.yaml", "--out", "shut/run"),
    ("train", "one.yaml", "--method", "sft", "--out", "shut/run"),
    ("calibrate", "fit", "good.jsonl", "--out", "shut/c.json"),
    ("calibrate", "apply", "tau.json", "good.jsonl", "--on", "confidence", "--out", "shut/n.jsonl"),
    ("measure", "good.jsonl", "--figure", "shut/f.svg"),
)


@pytest.mark.parametrize("arguments", NEEDING_A_PLACE, ids=lambda arguments: " ".join(arguments[:2]))
def test_a_folder_without_permission_is_told_before_anything_is_done(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The superuser may write everywhere, so that the system's answer is put in its mouth."""
    monkeypatch.chdir(tmp_path)
    CASES[0].write(tmp_path)
    (tmp_path / "shut").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "shut" and access(path, mode))
    done = run(capsys, *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "shut: no permission to write " in done.err
    assert listing(tmp_path / "shut") == []


def test_every_message_is_short_whatever_it_quotes() -> None:
    error = DataError("f" * 10**6, 3, "x" * 10**7)
    assert len(str(error)) < 1100
    assert "\n" not in str(DataError("a\nb", 1, "c\n\x1b[2Jd"))
    assert "\x1b" not in str(DataError("a\nb", 1, "c\n\x1b[2Jd"))


@example("a b" * 30, 82)
@example("x" * 57 + " " + "y" * 40, 82)
@given(st.text(), st.integers(20, 200))
def test_a_shortened_text_is_one_printable_line(text: str, most: int) -> None:
    line = shorten_text(text, most)
    assert len(line) <= most
    assert line.isprintable()
    assert shorten_text(line, most) == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_sound_json_is_read_as_it_is(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


# Texts that are nearly JSON: tokens of every kind in any order, and white space where few put it.
NUMBERS = ["1", "-0", "-0.0", "1.5e3", "1E400", "01", "1.", ".5", "+1", "NaN", "-Infinity", "9" * 30]
STRINGS = ['"a"', '"b"', '": "', '"\\":"', '"\\u00e9"', '"\\ud800"', '"\\ud83d\\ude00"']
TOKENS = st.sampled_from([*"{}[]:, \t\r\n-", *NUMBERS, *STRINGS, "true", "null", "nul", "\ufeff", "\x0b"])
SPACE = st.sampled_from(["", " ", "\t", "\n", "\r\n"])
KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"a:"', '":"', '""'])
VALUES = st.sampled_from(["1", "-0", "2.5", "1e400", "NaN", "null", '"x"', '": x"', '"\\":"', '" :"', '"a\\\\"'])
OBJECTS = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(st.tuples(SPACE, KEYS, SPACE, SPACE, inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f"{a}{key}{b}:{c}{value}" for a, key, b, c, value in pairs) + "}"
        )
        | st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
    ),
    max_leaves=6,
)


@settings(max_examples=500)
@example('{"a": 1, "a" : 2}')
@example('{"a": {"b": 1, "b": 2}}')
@example('[{"a":1},{"a":1,"\\u0061":2}]')
@given(OBJECTS | st.lists(TOKENS, max_size=8).map("".join))
def test_the_quick_parser_takes_what_the_strict_one_takes_and_gives_the_same(text: str) -> None:
    """The strict one is Python's, asked for the pairs of every object; values are compared with their types."""

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    try:
        expected = repr(json.loads(text, object_pairs_hook=distinct))
        expected.encode()
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except (ValueError, AssertionError):
        with pytest.raises(ValueError):
            parse_json(text)
    else:
        assert repr(parse_json(text)) == expected


def test_a_number_of_more_digits_than_python_reads_is_refused() -> None:
    assert parse_json("9" * 4300) == int("9" * 4300)
    for text in ("9" * 4301, '{"a": -' + "9" * 5000 + "}"):
        with pytest.raises(ValueError, match="more digits than can be read"):
            parse_json(text)


def test_depth_is_counted_and_not_the_number_of_brackets() -> None:
    wide = json.dumps([[[]] * 1000] * 3)
    assert parse_json(wide) == json.loads(wide)
    parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="more than 64 deep"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
