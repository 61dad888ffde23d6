"""Questions without options through the commands: three schemas, each kind of confidence."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run
from open_world import model, sums, tokenizer

from catto.io.record_files import read_records
from catto.records import FinalAnswer, Prediction

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k(folder: Path, count: int) -> list[str]:
    rows = []
    for question in sums(count):
        solution = f"It is <<{question.gold}={question.gold}>>{question.gold}.\n#### {question.gold}"
        rows.append({"question": question.fields["question"], "answer": solution})
    path = write_rows(folder / "gsm8k.jsonl", rows)
    return ["--file", f"test={path}", "--fields", "question=question,answer=answer", "--grade", "number"]


def trivia_qa(folder: Path, count: int) -> list[str]:
    rows = []
    for question in sums(count):
        accepted = [f"the {question.gold}", question.gold]
        rows.append({"question": question.fields["question"], "question_id": question.id, "answer": accepted})
    path = write_rows(folder / "trivia.jsonl", rows)
    return ["--file", f"test={path}", "--fields", "question=question,answer=answer,id=question_id"]


def plain_csv(folder: Path, count: int) -> list[str]:
    path = folder / "sums.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        for question in sums(count):
            writer.writerow([question.fields["question"], question.gold])
    return ["--file", f"test={path}", "--fields", "question=question,answer=answer"]


SCHEMAS = {"gsm8k": gsm8k, "trivia_qa": trivia_qa, "csv": plain_csv}
KINDS = ("ptrue", "agreement", "verbal")


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_schema_goes_through_the_commands_with_each_kind(
    schema: str, kind: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    source = SCHEMAS[schema](tmp_path, 25)
    shown = run(capsys, "data", *source, "--split", "test", "--n", "1")
    assert (shown.code, shown.err) == (0, "")
    assert "test 25" in shown.out
    out = tmp_path / "eval"
    sampling = ["--k", "4", "--temperature", "1", "--max-tokens", "24"]
    shown = run(capsys, "eval", folder, *source, *sampling, "--confidence-kind", kind, "--out", out)
    assert shown.code == 0, shown.err
    assert "The same answers, by kind of confidence" in shown.out
    assert "had to be forced" not in shown.out
    assert "generated tokens" in shown.out
    predictions = list(read_records(out / "predictions.jsonl", Prediction))
    assert len(predictions) == 100
    assert {row.confidence_kind for row in predictions} == {kind}
    shown = run(capsys, "measure", out / "predictions.jsonl")
    assert shown.code == 0, shown.err
    assert "ECE" in shown.out
    final = tmp_path / "final.jsonl"
    choice = ["--k", "4", "--rule", "majority vote", "--out", final]
    shown = run(capsys, "select", out / "predictions.jsonl", *choice)
    assert shown.code == 0, shown.err
    answers = list(read_records(final, FinalAnswer))
    assert len(answers) == 25
    assert all(answer.label is None for answer in answers)
    calibrator = tmp_path / "calibrator.json"
    shown = run(capsys, "calibrate", "fit", out / "predictions.jsonl", "--method", "platt", "--out", calibrator)
    assert shown.code == 0, shown.err
    # A judge of the user's own: it accepts every answer.
    final.write_text(final.read_text().replace('"correct":false', '"correct":true'))
    threshold = tmp_path / "threshold.json"
    shown = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.9", "--out", threshold)
    assert shown.code == 0, shown.err
    assert json.loads(threshold.read_text())["protocol"]["confidence_kind"] == kind


@pytest.mark.slow
def test_kinds_side_by_side_and_equivalent_answers(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    source = gsm8k(tmp_path, 10)
    program = tmp_path / "same.py"
    program.write_text("import sys\nfor line in sys.stdin:\n    print('true', flush=True)\n")
    kinds = [part for kind in KINDS for part in ("--confidence-kind", kind)]
    out = tmp_path / "eval"
    arguments = [folder, *source, "--k", "4", "--temperature", "1", "--max-tokens", "24", "--out", out]
    equivalent = ["--equivalent", f"{sys.executable} {program}"]
    shown = run(capsys, "eval", *arguments, *kinds, *equivalent)
    assert shown.code == 0, shown.err
    assert all(kind in shown.out for kind in KINDS)
    for row in read_records(out / "predictions.jsonl", Prediction):
        assert row.confidences is not None
        assert set(row.confidences) == set(KINDS)
    shown = run(capsys, "select", out / "predictions.jsonl", "--k", "4", "--confidence-kind", "agreement", *equivalent)
    assert shown.code == 0, shown.err
    calibrator = tmp_path / "calibrator.json"
    fit = ["calibrate", "fit", out / "predictions.jsonl", "--method", "platt", "--out", calibrator]
    assert run(capsys, *fit).code == 0
    other = ["--confidence", "confidences.agreement", "--out", tmp_path / "calibrated.jsonl"]
    shown = run(capsys, "calibrate", "apply", calibrator, out / "predictions.jsonl", *other)
    assert shown.code == 2
    assert "fitted on the confidence kind ptrue, but these confidences are of the kind agreement" in shown.err


def test_fields_and_grade_are_proposed(tmp_path: Path, capsys: Capture) -> None:
    for schema, proposal in (
        (gsm8k, "--fields question=question,answer=answer --grade number\n"),
        (trivia_qa, "--fields question=question,answer=answer\n"),
    ):
        shown = run(capsys, "data", *schema(tmp_path, 3)[:2], "--split", "test")
        assert shown.code == 0, shown.err
        assert f"Proposed from the file's first rows: {proposal}" in shown.out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--confidence-kind", "label"], "has no options, expected agreement, ptrue, verbal"),
        (["--confidence-kind", "sure"], "'sure' is not one of label, agreement, ptrue, verbal"),
        (["--confidence-kind", "agreement"], "k is 1, expected at least 2"),
    ],
)
def test_kinds_that_do_not_fit_are_one_line(
    folder: Path, tmp_path: Path, capsys: Capture, options: list[str], problem: str
) -> None:
    shown = run(capsys, "eval", folder, *gsm8k(tmp_path, 3), *options, "--out", tmp_path / "eval")
    assert shown.code == 2
    assert problem in shown.err
    assert shown.err.count("\n") == 1


def test_a_program_for_labels_is_refused(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["--task", "witnesses", "--n", "2", "--equivalent", "cat", "--out", tmp_path / "eval"]
    shown = run(capsys, "eval", folder, *arguments)
    assert shown.code == 2
    assert "--equivalent: only for questions without options" in shown.err
