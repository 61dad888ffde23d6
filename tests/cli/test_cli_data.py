"""`catto data`: questions, prompts, sizes, what was left out and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import run, write_lines

from catto.prompts import render_messages
from catto.records import Question
from catto.tasks import load_questions

Capture = pytest.CaptureFixture[str]
FIELDS = "question=stem,options=choices,answer=key"


def own(folder: Path, count: int = 60, **more: Any) -> Path:
    rows = [{"stem": f"Question {i}?", "choices": ["red", "blue"], "key": "A", **more} for i in range(count)]
    return write_lines(folder / "mine.jsonl", rows)


def nli(folder: Path) -> Path:
    """Train: four pairs, one without a label, one that stands in test; validation and test: one each."""
    pair = {"premise": "A dog sleeps.", "hypothesis": "An animal rests.", "label": 0}
    train = [{**pair, "premise": f"Dog {i} sleeps.", "label": i % 3} for i in range(3)]
    write_lines(folder / "train.jsonl", [*train, {**pair, "label": -1, "premise": "Nobody agreed."}, pair])
    write_lines(folder / "validation.jsonl", [{**pair, "premise": "A cat sleeps."}])
    write_lines(folder / "test.jsonl", [pair])
    return folder


def test_it_shows_questions_as_they_are_put(capsys: Capture) -> None:
    shown = run(capsys, "data", "witnesses", "--n", "2", "--split", "validation", "--seed", "3")
    assert shown.code == 0
    assert "questions: train 6,000, validation 500, test 1,000" in shown.out
    first, second, third = (
        next(it) for it in [iter(load_questions("witnesses", "validation", seed=3))] for _ in range(3)
    )
    for question in (first, second):
        assert f"--- {question.id} (validation), gold {question.gold}" in shown.out
        for message in render_messages(question):
            assert f"[{message.role}]\n{message.content}\n" in shown.out
    assert third.id not in shown.out


def test_json_holds_questions_that_read_back(capsys: Capture) -> None:
    told = run(capsys, "data", "witnesses", "--n", "1", "--json").json
    (question,) = told["questions"]
    put = question.pop("messages")
    assert [message.model_dump() for message in render_messages(Question.model_validate(question))] == put
    assert told["splits"]["test"]["questions"] == sum(told["splits"]["test"]["gold"].values()) == 1000
    assert told["licence"].startswith("Apache-2.0")


def test_stats_count_labels_drops_and_leaks(tmp_path: Path, capsys: Capture) -> None:
    splits = run(capsys, "data", "snli", "--data-dir", nli(tmp_path), "--json").json["splits"]
    assert splits["train"]["gold"] == {"contradiction": 1, "entailment": 1, "neutral": 1}
    assert splits["train"]["read"] == 5
    assert splits["train"]["leaks"] == 1
    assert splits["train"]["dropped"]["content_in_test"] == 1
    assert sum(splits["train"]["dropped"].values()) == 2
    assert splits["validation"]["questions"] == splits["test"]["questions"] == 1
    shown = run(capsys, "data", "snli", "--data-dir", tmp_path, "--stats").out
    assert "train: gold labels contradiction 33.3 %, entailment 33.3 %, neutral 33.3 %\n" in shown
    assert "train: left out 1 content in test, 1 " in shown
    assert "test: left out nothing\n" in shown
    assert "licence: " in shown


def test_a_file_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    told = run(capsys, "data", "mine", "--file", own(tmp_path), "--fields", FIELDS, "--json").json
    assert told["task"] == "mine"
    sizes = [told["splits"][split]["questions"] for split in ("train", "validation", "test")]
    assert sizes == [48, 6, 6]


def test_options_in_columns(tmp_path: Path, capsys: Capture) -> None:
    rows = [{"stem": f"Q{i}", "a": "red", "b": "blue", "key": 1} for i in range(60)]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    fields = "question=stem,options=a+b,answer=key"
    told = run(capsys, "data", "mine", "--file", file, "--fields", fields, "--answer", "index", "--json").json
    for question in told["questions"]:
        assert {option["label"]: option["text"] for option in question["options"]}[question["gold"]] == "blue"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["snl"], "task 'snl' is not one of mmlu, snli,"),
        (["snl"], "did you mean snli?"),
        (["snli", "--data-dir", "nowhere"], "nowhere: no such folder"),
        (["snli", "--fields", FIELDS], "--fields: needs --file"),
        (["witnesses", "--data-dir", "."], "witnesses is generated: it accepts neither files nor data_dir"),
        (["snli", "--seed", "9", "--data-dir", "."], "seed 9 is not one of snli's split seeds 0, 1, 2, 3, 4"),
        (["mine", "--file", "none.jsonl", "--fields", FIELDS], "none.jsonl: no such file"),
        (["mine", "--file", "none.jsonl"], "none.jsonl: no such file"),
        (["mine", "--file", "none.jsonl", "--fields", "question"], "--fields: question: expected name=column"),
        (["mine", "--file", "none.jsonl", "--fields", f"{FIELDS},x=y"], "fields: 'x' is not one of question,"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: Capture, arguments: list[str], expected: str) -> None:
    told = run(capsys, "data", *arguments)
    assert told.code == 2
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert expected in told.err


def test_a_bad_row_is_named(tmp_path: Path, capsys: Capture) -> None:
    file = own(tmp_path, 3, key="C")
    told = run(capsys, "data", "mine", "--file", file, "--fields", FIELDS)
    assert (told.code, told.err) == (
        2,
        f"catto: {file} row 1: key 'C' is not one of A, B, nor an option's text or index\n",
    )
