"""`catto calibrate`: fit on one file, apply to another, and be told when the two are the same."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, write_lines
from scipy.special import log_softmax

from catto import calibrate as recalibration
from catto.answer_columns import read_confidences, read_graded
from catto.calibrate import Fitted, read_labels
from catto.formats.columns import ColumnNames
from catto.io.record_files import manifest_path, write_record
from catto.metrics.calibrators import CALIBRATORS, Temperature, VectorScaling, read_calibrator
from catto.metrics.errors import brier, ece, nll

Capture = pytest.CaptureFixture[str]

RNG = np.random.default_rng(1)
CONFIDENCE = RNG.beta(6, 1, 300)
CORRECT = RNG.random(300) < CONFIDENCE**2


def rows(start: int = 0, **more: Any) -> list[dict[str, Any]]:
    pairs = enumerate(zip(CONFIDENCE.tolist(), CORRECT.tolist(), strict=True), start)
    return [{"question": f"q{i}", "confidence": c, "correct": z, "note": "é", **more} for i, (c, z) in pairs]


def labelled() -> list[dict[str, Any]]:
    """Labels A to C, every other row without C, log-probabilities that leave some mass to the rest."""
    scores = log_softmax(3 * RNG.normal(size=(60, 3)), axis=1) - 0.1
    made = []
    for i, score in enumerate(scores.tolist()):
        known = dict(zip("ABC", score, strict=True)) if i % 2 else dict(zip("AB", score[:2], strict=True))
        made.append({"id": i, "label_logprobs": known, "gold": "AB"[int(RNG.random() < 0.5)]})
    return made


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("method", list(CALIBRATORS))
def test_fit_and_apply_are_the_library(tmp_path: Path, capsys: Capture, method: str) -> None:
    fit_on = write_lines(tmp_path / "validation.jsonl", rows())
    other = write_lines(tmp_path / "test.jsonl", rows(start=1000))
    done = run(capsys, "calibrate", "fit", fit_on, "--method", method, "--out", tmp_path / "c.json")
    assert (done.code, done.err) == (0, "")
    expected = CALIBRATORS[method].fit(CONFIDENCE, CORRECT)
    assert read_calibrator(tmp_path / "c.json") == expected
    done = run(capsys, "calibrate", "apply", tmp_path / "c.json", other, "--out", tmp_path / "new.jsonl")
    assert (done.code, done.err) == (0, "")
    written = read(tmp_path / "new.jsonl")
    assert [row["confidence"] for row in written] == expected.apply(CONFIDENCE).tolist()
    assert [row["confidence_raw"] for row in written] == CONFIDENCE.tolist()
    restored = [{name: row[name] for name in row if name != "confidence_raw"} for row in written]
    restored = [row | {"confidence": c} for row, c in zip(restored, CONFIDENCE.tolist(), strict=True)]
    assert restored == rows(start=1000)


def test_before_and_after_are_shown(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows())
    shown = run(capsys, "calibrate", "fit", path, "--out", tmp_path / "c.json").out
    after = Temperature.fit(CONFIDENCE, CORRECT).apply(CONFIDENCE)
    for metric, scale, digits in ((ece, 100, 1), (nll, 1, 4), (brier, 1, 4)):
        for confidence in (CONFIDENCE, after):
            assert f"{scale * metric(confidence, CORRECT):.{digits}f}" in shown


def test_shared_questions_are_warned_about(tmp_path: Path, capsys: Capture) -> None:
    fit_on = write_lines(tmp_path / "validation.jsonl", rows())
    run(capsys, "calibrate", "fit", fit_on, "--out", tmp_path / "c.json")
    half = write_lines(tmp_path / "test.jsonl", rows(start=150))
    done = run(capsys, "calibrate", "apply", tmp_path / "c.json", half, "--out", tmp_path / "n.jsonl")
    assert done.code == 0
    assert "contains 150 of the questions the calibrator was fitted on" in done.err


def test_a_sample_of_many_fit_questions_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalibration, "MANY_QUESTIONS", 40)
    path = write_lines(tmp_path / "a.jsonl", rows())
    names = ColumnNames()
    fitted, answers = recalibration.fit_file(path, "temperature", "confidence", names, "fallback", tmp_path / "c.json")
    assert fitted.count_fit_questions(answers.question) == 40
    assert recalibration.open_fitted(tmp_path / "c.json") == fitted


def test_labels_of_unequal_number_fit_the_same_tau(tmp_path: Path, capsys: Capture) -> None:
    """A row with two labels among rows with three counts as a softmax over two: NLL by hand at tau and around it."""
    data = labelled()
    path = write_lines(tmp_path / "a.jsonl", data)
    run(capsys, "calibrate", "fit", path, "--on", "labels", "--out", tmp_path / "c.json")
    found = read_calibrator(tmp_path / "c.json")
    assert isinstance(found, Temperature)

    def loss(tau: float) -> float:
        parts = [log_softmax(np.array(list(row["label_logprobs"].values())) / tau) for row in data]
        golds = [list(row["label_logprobs"]).index(row["gold"]) for row in data]
        return -float(np.mean([part[gold] for part, gold in zip(parts, golds, strict=True)]))

    assert loss(found.tau) < min(loss(found.tau * 1.001), loss(found.tau / 1.001))
    run(capsys, "calibrate", "apply", tmp_path / "c.json", path, "--out", tmp_path / "n.jsonl")
    written = read(tmp_path / "n.jsonl")
    for row in written:
        scores = np.array(list(row["label_logprobs"].values()))
        assert row["confidence"] == pytest.approx(np.exp(log_softmax(scores / found.tau)).max(), abs=1e-12)
        assert row["confidence_raw"] == pytest.approx(np.exp(scores.max()), abs=1e-12)
    assert read_graded(tmp_path / "n.jsonl").confidence.tolist() == [row["confidence"] for row in written]


def test_vector_scaling_is_fitted_on_the_labels_and_applied(tmp_path: Path, capsys: Capture) -> None:
    data = [row for row in labelled() if len(row["label_logprobs"]) == 3]
    path = write_lines(tmp_path / "a.jsonl", data)
    done = run(capsys, "calibrate", "fit", path, "--method", "vector", "--out", tmp_path / "c.json")
    assert done.code == 0
    found = read_calibrator(tmp_path / "c.json")
    assert isinstance(found, VectorScaling)
    assert all(f"{label}: weight" in done.out for label in found.labels)
    run(capsys, "calibrate", "apply", tmp_path / "c.json", path, "--out", tmp_path / "n.jsonl")
    for row in read(tmp_path / "n.jsonl"):
        answer = max(row["label_logprobs"], key=row["label_logprobs"].get)
        assert row["confidence"] == pytest.approx(found.probability(row["label_logprobs"], answer), abs=1e-12)


def test_vector_scaling_refuses_rows_of_other_labels(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", labelled())
    done = run(capsys, "calibrate", "fit", path, "--method", "vector", "--out", tmp_path / "c.json")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "all rows need the same labels" in done.err


def test_an_answer_that_was_not_parsed_has_no_confidence(tmp_path: Path) -> None:
    data = [
        {"label_logprobs": {"B": -2.0, "A": -0.2}, "label": "B", "gold": "A"},
        {"label_logprobs": {"A": -0.3, "B": -2.0, "C": -3.0}, "label": None, "gold": "C"},
    ]
    labels = list(read_labels(write_lines(tmp_path / "a.jsonl", data), ColumnNames()))
    assert [(answer, gold) for _, answer, gold in labels] == [("B", "A"), (None, "C")]
    assert [logprobs for logprobs, _, _ in labels] == [row["label_logprobs"] for row in data]
    rows = [{**row, "confidence": 0.1 if row["label"] else 0.0, "correct": False} for row in data]
    answers = read_confidences(write_lines(tmp_path / "b.jsonl", rows), ColumnNames())
    calibrated = Fitted(Temperature(tau=2.0), "labels").calibrate_answers(answers, ColumnNames())
    assert calibrated.tolist() == [pytest.approx(1 / (1 + exp(0.9)), abs=1e-12), 0.0]


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.csv", "confidence,correct\n")])
def test_a_file_without_answers_is_one_line(tmp_path: Path, capsys: Capture, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    done = run(capsys, "calibrate", "fit", tmp_path / name, "--out", tmp_path / "c.json")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith(f"catto: {tmp_path / name}: ")


def test_unlabelled_answers_can_be_calibrated(tmp_path: Path, capsys: Capture) -> None:
    write_record(tmp_path / "c.json", Temperature(tau=2.0))
    path = write_lines(tmp_path / "a.jsonl", [{"confidence": 0.8}])
    options = ("--on", "confidence", "--out", tmp_path / "n.jsonl")
    assert run(capsys, "calibrate", "apply", tmp_path / "c.json", path, *options).code == 0
    # sigmoid(logit(0.8) / 2) = 2 / (2 + 1), since the odds 4 become their root 2.
    assert read(tmp_path / "n.jsonl") == [{"confidence": pytest.approx(2 / 3, abs=1e-12), "confidence_raw": 0.8}]


def test_csv_rows_become_json_lines(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.csv").write_text("p,correct\n0.8,yes\n0.6,no\n", encoding="utf-8")
    write_record(tmp_path / "c.json", Temperature(tau=1.0))
    options = ("--on", "confidence", "--confidence", "p", "--out", tmp_path / "n.jsonl")
    assert run(capsys, "calibrate", "apply", tmp_path / "c.json", tmp_path / "a.csv", *options).code == 0
    written = read(tmp_path / "n.jsonl")
    assert [row["p_raw"] for row in written] == [0.8, 0.6]
    assert read_graded(tmp_path / "n.jsonl", ColumnNames("p")).correct.tolist() == [True, False]


def test_a_file_is_calibrated_once_and_never_in_place(tmp_path: Path, capsys: Capture) -> None:
    write_record(tmp_path / "c.json", Temperature(tau=2.0))
    path = write_lines(tmp_path / "a.jsonl", [{"confidence": 0.8, "confidence_raw": None}])
    (tmp_path / "link.jsonl").symlink_to(path)
    kept = path.read_bytes()
    options = (tmp_path / "c.json", path, "--on", "confidence", "--out")
    for same in (path, tmp_path / "link.jsonl"):
        done = run(capsys, "calibrate", "apply", *options, same)
        assert done.code == 2
        assert f"{same}: is the input" in done.err
        assert path.read_bytes() == kept
    assert run(capsys, "calibrate", "apply", *options, tmp_path / "new.jsonl").code == 0
    again = (tmp_path / "c.json", tmp_path / "new.jsonl", "--on", "confidence", "--out", tmp_path / "twice.jsonl")
    done = run(capsys, "calibrate", "apply", *again)
    assert done.code == 2
    assert "new.jsonl row 1: confidence_raw: already there" in done.err
    assert not (tmp_path / "twice.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("fit", "one.jsonl", "--method", "platt", "--out", "c.json"), "one.jsonl: Platt needs right and wrong rows"),
        (("fit", "one.jsonl", "--method", "platt", "--on", "labels", "--out", "c.json"), "--on labels: works with"),
        (
            ("fit", "one.jsonl", "--method", "vector", "--on", "confidence", "--out", "c.json"),
            "--on confidence: vector",
        ),
        (("fit", "one.jsonl", "--on", "labels", "--out", "c.json"), "one.jsonl row 1: label_logprobs: missing"),
        (("fit", "one.jsonl", "--out", "one.jsonl/c.json"), "one.jsonl: "),
        (("fit", "one.jsonl", "--out", "c.pkl"), "--out: c.pkl must end in .json"),
        (("apply", "alone.json", "one.jsonl", "--out", "n.jsonl"), "copy it next to the calibrator too"),
        (("apply", "alone.json", "one.jsonl", "--out", "n.csv"), "must end in .jsonl"),
        (("apply", "broken.json", "one.jsonl", "--out", "n.jsonl"), "broken.json: "),
        (("apply", "none.json", "one.jsonl", "--out", "n.jsonl"), "none.json: No such file"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("one.jsonl"), [{"confidence": 0.5, "correct": True}])
    write_record(Path("alone.json"), Temperature(tau=2.0))
    Path("broken.json").write_text("{", encoding="utf-8")
    done = run(capsys, "calibrate", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert told in done.err


def test_a_fit_on_few_rows_or_at_the_end_of_its_range_is_warned_about(tmp_path: Path, capsys: Capture) -> None:
    """Sure and wrong, unsure and right: no temperature helps, and the fit ends at the largest one."""
    upside_down = [{"confidence": 0.9, "correct": False}, {"confidence": 0.1, "correct": True}] * 10
    path = write_lines(tmp_path / "few.jsonl", upside_down)
    done = run(capsys, "calibrate", "fit", path, "--out", tmp_path / "c.json")
    assert done.code == 0
    few, edge = done.err.splitlines()
    assert "few.jsonl: only 20 answers; below 30" in few
    assert "tau 100 is at the end of its range" in edge
    enough = write_lines(tmp_path / "enough.jsonl", rows()[:30])
    assert run(capsys, "calibrate", "fit", enough, "--out", tmp_path / "c.json").err == ""


def test_manifest_says_what_the_calibrator_reads(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", labelled())
    run(capsys, "calibrate", "fit", path, "--on", "labels", "--out", tmp_path / "c.json")
    notes = json.loads(manifest_path(tmp_path / "c.json").read_text(encoding="utf-8"))["notes"]
    assert (notes["on"], notes["fitted_on"], len(notes["questions"])) == ("labels", "a.jsonl", 60)


def test_named_columns_are_those_of_the_labels_too(tmp_path: Path, capsys: Capture) -> None:
    own = labelled()
    likeliest = [max(row["label_logprobs"], key=row["label_logprobs"].get) for row in own]
    given = {
        "own": own,
        "named": [
            {"id": row["id"], "label_logprobs": row["label_logprobs"], "gold": "A", "truth": row["gold"], "said": label}
            for row, label in zip(own, likeliest, strict=True)
        ],
    }
    taus = {}
    for name, options in (("own", ()), ("named", ("--gold", "truth", "--prediction", "said"))):
        path = write_lines(tmp_path / f"{name}.jsonl", given[name])
        done = run(capsys, "calibrate", "fit", path, "--on", "labels", *options, "--out", tmp_path / "t.json")
        assert done.code == 0
        taus[name] = read_calibrator(tmp_path / "t.json")
    assert taus["own"] == taus["named"]
    names = ColumnNames(gold="truth", prediction="said")
    found = [(answer, gold) for _, answer, gold in read_labels(tmp_path / "named.jsonl", names)]
    assert found == [(label, row["gold"]) for row, label in zip(own, likeliest, strict=True)]


def test_applying_leaves_no_manifest_of_the_file_before(tmp_path: Path, capsys: Capture) -> None:
    fit_on = write_lines(tmp_path / "validation.jsonl", rows())
    run(capsys, "calibrate", "fit", fit_on, "--out", tmp_path / "c.json")
    out = tmp_path / "final.jsonl"
    manifest_path(out).write_text("{}")
    other = write_lines(tmp_path / "test.jsonl", rows(start=1000))
    assert run(capsys, "calibrate", "apply", tmp_path / "c.json", other, "--out", out).code == 0
    assert not manifest_path(out).exists()


def test_a_next_command_is_named_where_it_needs_no_column(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "own.jsonl", rows())
    run(capsys, "calibrate", "fit", path, "--out", tmp_path / "c.json")
    done = run(capsys, "calibrate", "apply", tmp_path / "c.json", path, "--out", tmp_path / "new.jsonl")
    assert f"Next: catto measure {tmp_path}/new.jsonl" in done.out
    renamed = [{"id": n, "p": row["confidence"], "right": row["correct"]} for n, row in enumerate(rows())]
    path, names = write_lines(tmp_path / "a.jsonl", renamed), ("--confidence", "p", "--correct", "right")
    done = run(capsys, "calibrate", "apply", tmp_path / "c.json", path, *names, "--out", tmp_path / "new.jsonl")
    assert (done.code, "Next" in done.out) == (0, False)
