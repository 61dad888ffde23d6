"""A calibrator and a threshold in the model's folder: fitted, stored, found by Python and by `catto eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, write_lines
from scipy.special import expit, log_softmax, logit

import catto
from catto.errors import DataError
from catto.metrics.calibrators import Temperature
from catto.metrics.risk import threshold_for_risk
from catto.model_calibration import CALIBRATOR_FILE, THRESHOLD_FILE, has_calibrator

Capture = pytest.CaptureFixture[str]
COUNT = 800
SHARP = 2.0
PROTOCOL = {"rule": "most confident", "k": 1, "temperature": 0.0, "fallback": "answer", "stop": None}


def predictions(seed: int = 0, count: int = COUNT) -> list[dict[str, Any]]:
    """Predictions of `catto eval` that are too sharp: the true logit is half of the stated one."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, chance in enumerate(0.8 + 0.2 * rng.random(count)):
        is_right = rng.random() < chance
        stated = float(expit(SHARP * logit(min(chance, 1 - 1e-6))))
        rows.append(
            {
                "question": f"s{seed}-q{number}",
                "task": "own",
                "split": "validation",
                "gold": "A" if is_right else "B",
                "sample": 0,
                "text": "",
                "label": "A",
                "source": "fallback",
                "confidence": stated,
                "label_logprobs": {"A": float(np.log(stated)), "B": float(np.log1p(-stated))},
                "temperature": 0.0,
                "seed": 0,
                "engine": "server",
                "model": "my-model",
            }
        )
    return rows


def log_rows(rows: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """The same answers as a gateway's log has them, with a calibrated confidence that nothing may read."""
    made = []
    for number, row in enumerate(rows):
        answer = {"id": f"chatcmpl-{number}", "confidence": 0.5, "confidence_raw": row["confidence"]}
        graded = {"correct": row["label"] == row["gold"], "model": row["model"], "protocol": PROTOCOL}
        made.append({**answer, **graded, "label": row["label"], "source": "free", **more})
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# My model\n", encoding="utf-8")
    return folder


def fit(capsys: Capture, file: Path, model: Path, *more: str) -> Any:
    return run(capsys, "calibrate", "fit", file, "--model", model, *more)


def test_one_half_fits_the_calibrator_and_the_other_the_threshold(tmp_path: Path, model: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "a.jsonl", predictions())
    done = fit(capsys, file, model, "--target-risk", "0.1")
    assert (done.code, done.err) == (0, "")
    calibration = catto.load_calibrator(model)
    fitted, threshold = calibration.fitted, calibration.threshold
    assert fitted.rows == COUNT // 2
    assert fitted.questions is not None
    assert len(fitted.questions) == COUNT // 2
    assert isinstance(fitted.calibrator, Temperature)
    assert fitted.calibrator.tau == pytest.approx(SHARP, rel=0.25)
    assert threshold is not None
    assert threshold.protocol.model_dump() == PROTOCOL
    assert (threshold.rows, threshold.models, threshold.calibrator) == (COUNT // 2, ("my-model",), fitted.digest)

    held = [row for row in predictions() if not fitted.count_fit_questions([row["question"]])]
    assert len(held) == COUNT // 2
    confidence = fitted.calibrator.apply([row["confidence"] for row in held])
    expected = threshold_for_risk(confidence, [row["label"] == row["gold"] for row in held], 0.1, 0.05)
    assert (threshold.threshold, threshold.errors) == (expected.threshold, expected.errors)


def test_the_card_has_one_section_and_keeps_the_rest(tmp_path: Path, model: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "a.jsonl", predictions())
    fit(capsys, file, model, "--target-risk", "0.1")
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "at most\n10 % are wrong, with 95 % confidence" in card
    (model / "README.md").write_text(card + "\nMore of the author.\n", encoding="utf-8")
    fit(capsys, file, model)  # without a target there is no threshold any more
    card = (model / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\n---\n\n# My model\n")
    assert card.endswith("More of the author.\n")
    assert card.count("## Calibrated confidence") == 1
    assert "are wrong" not in card
    assert not (model / THRESHOLD_FILE).exists()
    assert catto.load_calibrator(model).threshold is None


def test_nothing_is_written_where_no_threshold_exists(tmp_path: Path, model: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "a.jsonl", predictions(count=60))
    done = fit(capsys, file, model, "--target-risk", "0.01")
    assert (done.code, "no threshold can promise" in done.err) == (2, True)
    assert sorted(path.name for path in model.iterdir()) == ["README.md"]
    assert not has_calibrator(model)


def test_a_gateways_log_is_fitted_on_its_answers_since_the_last_alarm(
    tmp_path: Path, model: Path, capsys: Capture
) -> None:
    """The raw confidences count. Older answers are all wrong and would show; so would those of another protocol."""
    old = [{**row, "gold": "B"} for row in predictions(seed=1, count=100)]
    before = log_rows(old, evidence=1.0)
    before[-1]["evidence"] = 250.0
    after = log_rows(predictions())
    other = log_rows(old, protocol={**PROTOCOL, "temperature": 1.0})
    fit(capsys, write_lines(tmp_path / "log.jsonl", [*before, *after, *other]), model)
    from_log = catto.load_calibrator(model).fitted
    fit(capsys, write_lines(tmp_path / "a.jsonl", predictions()), model)
    assert from_log.calibrator == catto.load_calibrator(model).fitted.calibrator
    assert from_log.rows == COUNT

    done = fit(capsys, write_lines(tmp_path / "log.jsonl", [*before, *after]), model, "--target-risk", "0.1")
    assert (done.code, done.err) == (0, "")
    threshold = catto.load_calibrator(model).threshold
    assert threshold is not None
    assert (threshold.protocol.model_dump(), threshold.models) == (PROTOCOL, ("my-model",))

    done = fit(capsys, write_lines(tmp_path / "log.jsonl", before), model)
    assert (done.code, "no answers with feedback since the last alarm" in done.err) == (2, True)
    voted = log_rows(predictions(), protocol={**PROTOCOL, "k": 4, "temperature": 1.0})
    done = fit(capsys, write_lines(tmp_path / "log.jsonl", voted), model)
    assert (done.code, "chosen among 4 samples" in done.err) == (2, True)


def test_what_cannot_be_fitted_is_refused(tmp_path: Path, model: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "a.jsonl", predictions())
    rows = [{"confidence": 0.9, "correct": number % 4 > 0, "question": str(number)} for number in range(80)]
    plain = write_lines(tmp_path / "plain.jsonl", rows)
    twice = write_lines(tmp_path / "twice.jsonl", [*predictions(), *[{**row, "sample": 1} for row in predictions()]])
    cases = [
        (("calibrate", "fit", file), "--out or --model"),
        (("calibrate", "fit", file, "--model", model, "--out", tmp_path / "c.json"), "give only one of the two"),
        (("calibrate", "fit", file, "--out", tmp_path / "c.json", "--target-risk", "0.1"), "needs --model"),
        (("calibrate", "fit", file, "--model", tmp_path / "none"), "is not a folder"),
        (
            ("calibrate", "fit", plain, "--model", model, "--target-risk", "0.1"),
            "does not say how its answers were made",
        ),
        (("calibrate", "fit", twice, "--model", model, "--target-risk", "0.1"), "several answers per question"),
    ]
    for command, said in cases:
        done = run(capsys, *command)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert said in done.err
    assert fit(capsys, plain, model).code == 0  # without a threshold any answers will do


def test_logits_become_a_calibrated_confidence(tmp_path: Path, model: Path, capsys: Capture) -> None:
    """`confidence` reads the probability among all tokens, `labels` that among the labels."""
    file = write_lines(tmp_path / "a.jsonl", predictions())
    logits = np.array([1.0, 3.0, 2.0, -1.0])
    label_ids = {"A": 2, "B": 0}
    logprobs = log_softmax(logits)
    fit(capsys, file, model, "--target-risk", "0.1")
    calibration = catto.load_calibrator(model)
    tau = calibration.fitted.calibrator.tau  # type: ignore[union-attr]
    found = calibration.read_logits(logits, label_ids)
    assert found.label == "A"
    assert found.confidence == pytest.approx(expit(logit(np.exp(logprobs[2])) / tau))
    assert found.abstains
    assert not calibration.read_logits(np.array([0.0, 0.0, 30.0, 0.0]), label_ids).abstains

    fit(capsys, file, model, "--on", "labels")
    calibration = catto.load_calibrator(model)
    tau = calibration.fitted.calibrator.tau  # type: ignore[union-attr]
    assert calibration.read_logits(logits, label_ids).confidence == pytest.approx(expit((2.0 - 1.0) / tau))
    with pytest.raises(ValueError, match=r"shape \(1, 4\)"):
        calibration.read_logits(logits[None], label_ids)


def test_logits_may_be_a_tensor_in_bfloat16_with_a_gradient(tmp_path: Path, model: Path, capsys: Capture) -> None:
    torch = pytest.importorskip("torch")
    fit(capsys, write_lines(tmp_path / "a.jsonl", predictions()), model)
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    calibration = catto.load_calibrator(model)
    label_ids = {"A": 2, "B": 0}
    assert calibration.read_logits(logits, label_ids) == calibration.read_logits([1.0, 3.0, 2.0, -1.0], label_ids)


def test_a_threshold_of_another_calibrator_is_refused(tmp_path: Path, model: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "a.jsonl", predictions())
    fit(capsys, file, model, "--target-risk", "0.1")
    threshold = (model / THRESHOLD_FILE).read_text()
    fit(capsys, file, model)
    (model / THRESHOLD_FILE).write_text(threshold)
    with pytest.raises(DataError, match="was fitted with a different calibrator"):
        catto.load_calibrator(model)
    with pytest.raises(DataError, match=CALIBRATOR_FILE):
        catto.load_calibrator(tmp_path)


@pytest.mark.slow
def test_eval_applies_the_calibrator_in_the_models_folder(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("torch")
    from tiny import tiny_model, tiny_tokenizer

    from catto.prompts import render_messages
    from catto.tasks import load_questions

    folder = tmp_path / "model"
    asked = [*load_questions("witnesses", "validation", limit=40), *load_questions("witnesses", "test", limit=40)]
    words = tiny_tokenizer([message.content for question in asked for message in render_messages(question)])
    tiny_model(1, vocab_size=len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    options = ("--task", "witnesses", "--n", "40", "--max-tokens", "4")
    plain = run(capsys, "eval", folder, *options, "--split", "validation", "--out", tmp_path / "fit")
    assert "calibrator" not in plain.out
    fitted = fit(capsys, tmp_path / "fit" / "predictions.jsonl", folder, "--on", "labels")
    assert fitted.code == 0
    done = run(capsys, "eval", folder, *options, "--out", tmp_path / "test")
    assert done.code == 0
    assert f"With the calibrator of {folder}:" in done.out
    calibration = catto.load_calibrator(folder)
    rows = [json.loads(line) for line in (tmp_path / "test" / "calibrated.jsonl").read_text().splitlines()]
    for row in rows:
        expected = calibration.fitted.find_label_confidence(row["label_logprobs"], row["label"])
        assert row["confidence"] == pytest.approx(expected, abs=1e-12)
    assert len(rows) == 40


@pytest.mark.slow
def test_logits_give_the_confidence_of_eval() -> None:
    """A model's own logits where its response states the label, read in Python and by `catto.predict`."""
    pytest.importorskip("torch")
    from evaluation_world import Recording, before, dense_logits, model, questions, tokenizer

    from catto.calibrate import Fitted
    from catto.model_calibration import ModelCalibration
    from catto.predict import evaluate

    asked = questions(20)
    engine = Recording(model(), tokenizer())
    calibration = ModelCalibration(Fitted(Temperature(tau=2.0)))
    compared = 0
    for question, prediction in zip(asked, evaluate(engine, asked, max_tokens=24), strict=True):
        if prediction.source != "free" or prediction.label is None:
            continue
        ids = engine.ids[(question.id, 0)]
        tokens = tokenizer().convert_ids_to_tokens(ids)
        text = "".join(tokens)
        answer_start = text.rindex("<answer>") + len("<answer>")
        response = before(ids, text.index(prediction.label, answer_start))
        written = tokens[len(response)]  # the label, or the label after a space
        label_ids = {}
        for label in question.labels:
            label_ids[label] = tokenizer().convert_tokens_to_ids(written.replace(prediction.label, label))
        found = calibration.read_logits(dense_logits(question, response), label_ids)
        expected = expit(logit(prediction.confidence) / 2.0)
        assert (found.label, found.confidence) == (prediction.label, pytest.approx(expected, abs=1e-5))
        compared += 1
    assert compared >= 5
