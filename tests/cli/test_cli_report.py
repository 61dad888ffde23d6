"""`catto report`: the page from files of answers, with the numbers that `catto measure` has of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from command import run, write_lines

from catto.answer_columns import read_graded
from catto.formats.columns import ColumnNames
from catto.measure import summarise_answers

Capture = pytest.CaptureFixture[str]


def table(path: Path, seed: int) -> Path:
    """A CSV file of somebody's own: 60 questions of two labels, with a text that is no HTML."""
    draw = random.Random(seed)
    rows = [f"q{i},{draw.uniform(0.4, 1)},{draw.choice('AB')},{draw.choice('AB')},<b>{i}</b>" for i in range(60)]
    path.write_text("\n".join(["item,p,answer,truth,text", *rows]) + "\n", encoding="utf-8")
    return path


COLUMNS = ("--confidence", "p", "--prediction", "answer", "--gold", "truth", "--question", "item")


def test_the_page_of_tables_has_the_numbers_of_measure(tmp_path: Path, capsys: Capture) -> None:
    paths = [table(tmp_path / f"model-{seed}.csv", seed) for seed in (1, 2)]
    out = tmp_path / "page"
    shown = run(capsys, "report", paths[0], f"second={paths[1]}", "--out", out, *COLUMNS)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.replace("\n", "") == f"Wrote {out / 'report.html'}."
    names = ColumnNames("p", prediction="answer", gold="truth", question="item")
    cells = json.loads((out / "numbers.json").read_text(encoding="utf-8"))["cells"]
    assert [cell["method"] for cell in cells] == ["model-1", "second"]
    for cell, path in zip(cells, paths, strict=True):
        whole = summarise_answers(read_graded(path, names))
        assert (cell["n"], cell["metrics"]["accuracy"]["value"]) == (60, whole.accuracy)
        assert cell["metrics"]["ece"]["value"] == pytest.approx(whole.metrics["ece"].interval.value, abs=1e-12)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "second" in page
    assert "<b>7</b>" not in page
    assert "Trained" not in page  # a file of answers does not say on what


def test_models_are_named_by_their_folders_where_files_are_alike(tmp_path: Path, capsys: Capture) -> None:
    paths = []
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        rows = [{"id": i, "confidence": 0.5 + i / 100, "correct": (i + len(name)) % 2} for i in range(40)]
        paths.append(write_lines(tmp_path / name / "predictions.jsonl", rows))
    assert run(capsys, "report", *paths, "--out", tmp_path / "page", "--task", "own").code == 0
    cells = json.loads((tmp_path / "page" / "numbers.json").read_text(encoding="utf-8"))["cells"]
    assert {(cell["method"], cell["task"]) for cell in cells} == {("before", "own"), ("after", "own")}
    [row, *_] = (tmp_path / "page" / "predictions" / "own-before.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(row)["label"], json.loads(row)["gold"]) == ("wrong", "right")


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    nameless = write_lines(tmp_path / "a.jsonl", [{"confidence": 0.5, "correct": True}] * 2)
    twice = write_lines(tmp_path / "b.jsonl", [{"id": 1, "confidence": 0.5, "correct": True}] * 2)
    spaced = write_lines(tmp_path / "s.jsonl", [{"id": 1, "confidence": 0.5, "correct": True, "task": "high school"}])
    out = ("--out", tmp_path / "page")
    told: dict[tuple[str | Path, ...], str] = {
        (nameless, twice): "a.jsonl: no question column to pair the files by: name one with --question",
        (twice,): "b.jsonl: expected one answer per question, got several",
        (f"x={twice}", f"x={nameless}"): "two models are named x: give them different names with NAME=FILE",
        (f"../x={twice}",): "model name '../x': expected letters, digits and ._-+",
        (tmp_path / "none.jsonl",): "none.jsonl: No such file",
        (spaced,): "s.jsonl: task name 'high school': expected letters, digits and ._-",
    }
    for files, message in told.items():
        shown = run(capsys, "report", *files, *out)
        assert (shown.code, shown.out) == (2, "")
        assert message in shown.err
        assert shown.err.count("\n") == 1


def test_different_questions_are_refused_with_both_files_and_nothing_is_written(
    tmp_path: Path, capsys: Capture
) -> None:
    """By the names of the files, not of the models; an earlier page in the folder stays as it was."""
    kept, out = tmp_path / "page" / "predictions" / "answers-a.jsonl", tmp_path / "page"
    paths = {}
    for name, first in (("a", 0), ("b", 10)):
        rows = [{"id": f"q{i}", "confidence": 0.5 + i / 200, "correct": i % 2} for i in range(first, first + 40)]
        paths[name] = write_lines(tmp_path / f"{name}-answers.jsonl", rows)
    shown = run(capsys, "report", f"a={paths['a']}", f"b={paths['b']}", "--out", out)
    assert shown.code == 2
    assert shown.err.startswith(
        f"catto: {paths['b']}: does not answer 10 of the questions in {paths['a']}, such as 'q0'"
    )
    assert not out.exists()
    assert run(capsys, "report", f"a={paths['a']}", "--out", out).code == 0
    before = kept.read_bytes()
    assert run(capsys, "report", f"b={paths['a']}", f"a={paths['b']}", "--out", out).code == 2
    assert kept.read_bytes() == before
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
