"""What one command writes the next one reads: every chain that a user would type, on a real tiny model."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, write_lines
from experiment_world import write_recipe
from tiny import tiny_model, tiny_tokenizer

from catto import measure as summary
from catto.cli import main
from catto.io.record_files import read_records
from catto.metrics.calibrators import CALIBRATORS, read_calibrator
from catto.prompts import render_messages
from catto.records import Prediction
from catto.tasks import load_questions

COUNT = 40


def catto(*arguments: str | Path) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return Done(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def succeeded(*arguments: str | Path) -> Done:
    done = catto(*arguments)
    assert done.code == 0, done.err
    return done


def refused(*arguments: str | Path) -> str:
    done = catto(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    return done.err


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    """Intervals are not what is looked at here; `eval` and `calibrate` have no option for their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "RESAMPLES", 20)
        yield


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and three evals of it: validation, test, and four samples a test question."""
    folder = tmp_path_factory.mktemp("chain")
    asked = [q for split in ("validation", "test") for q in load_questions("witnesses", split, limit=COUNT)]  # type: ignore[arg-type]
    words = tiny_tokenizer([message.content for question in asked for message in render_messages(question)])
    tiny_model(1, vocab_size=len(words)).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    task = ("--task", "witnesses", "--n", str(COUNT), "--max-tokens", "4")
    for name, options in {
        "validation": ("--split", "validation"),
        "test": (),
        "samples": ("--k", "4", "--temperature", "1"),
    }.items():
        done = succeeded("eval", folder / "model", *task, *options, "--out", folder / name)
        assert "ECE" in done.out
        assert f"Predictions: {folder / name / 'predictions.jsonl'}" in done.out
    return folder


def predictions(folder: Path, name: str) -> Path:
    return folder / name / "predictions.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("method", list(CALIBRATORS))
def test_eval_fit_apply_measure(evaluated: Path, tmp_path: Path, method: str) -> None:
    """The README's flow, on catto's own predictions: their `confidence_raw` is there, and null."""
    assert all(row["confidence_raw"] is None for row in lines(predictions(evaluated, "test")))
    fitted, calibrated = tmp_path / "c.json", tmp_path / "calibrated.jsonl"
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--method", method, "--out", fitted)
    succeeded("calibrate", "apply", fitted, predictions(evaluated, "test"), "--out", calibrated)
    before, after = lines(predictions(evaluated, "test")), lines(calibrated)
    expected = read_calibrator(fitted).apply([row["confidence"] for row in before])
    assert [row["confidence"] for row in after] == expected.tolist()
    assert [row["confidence_raw"] for row in after] == [row["confidence"] for row in before]
    assert len(list(read_records(calibrated, Prediction))) == COUNT
    told = succeeded("measure", calibrated, "--json").json
    assert told["rows"] == COUNT
    assert told["accuracy"] == sum(row["label"] == row["gold"] for row in before) / COUNT


def test_fit_on_labels_apply_and_measure(evaluated: Path, tmp_path: Path) -> None:
    fitted, calibrated = tmp_path / "c.json", tmp_path / "calibrated.jsonl"
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--on", "labels", "--out", fitted)
    succeeded("calibrate", "apply", fitted, predictions(evaluated, "test"), "--out", calibrated)
    assert succeeded("measure", calibrated, "--json").json["rows"] == COUNT


def test_apply_then_apply_is_refused(evaluated: Path, tmp_path: Path) -> None:
    fitted, calibrated = tmp_path / "c.json", tmp_path / "calibrated.jsonl"
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--out", fitted)
    succeeded("calibrate", "apply", fitted, predictions(evaluated, "test"), "--out", calibrated)
    told = refused("calibrate", "apply", fitted, calibrated, "--out", tmp_path / "twice.jsonl")
    assert "calibrated.jsonl row 1: confidence_raw: already there" in told
    assert "is the input" in refused("calibrate", "apply", fitted, calibrated, "--out", calibrated)


def test_applying_to_what_was_fitted_on_is_warned_about(evaluated: Path, tmp_path: Path) -> None:
    fitted, validation = tmp_path / "c.json", predictions(evaluated, "validation")
    succeeded("calibrate", "fit", validation, "--out", fitted)
    done = succeeded("calibrate", "apply", fitted, validation, "--out", tmp_path / "same.jsonl")
    assert f"contains {COUNT} of the questions the calibrator was fitted on" in done.err


def test_eval_measure_compare_with_the_calibrated_ones(evaluated: Path, tmp_path: Path) -> None:
    fitted, calibrated = tmp_path / "c.json", tmp_path / "calibrated.jsonl"
    test = predictions(evaluated, "test")
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--out", fitted)
    succeeded("calibrate", "apply", fitted, test, "--out", calibrated)
    told = succeeded("measure", calibrated, "--compare", test, "--metrics", "accuracy,brier", "--json").json
    assert told["compare"]["metrics"]["accuracy"]["difference"] == 0
    validation = predictions(evaluated, "validation")
    assert f"{COUNT} questions of" in refused("measure", test, "--compare", validation)
    samples = predictions(evaluated, "samples")
    assert "is in several rows" in refused("measure", test, "--compare", samples)


def test_eval_measure_by_task_with_a_figure(evaluated: Path, tmp_path: Path) -> None:
    figure = tmp_path / "reliability.svg"
    options = ("--by", "task", "--unparsed", "wrong", "--figure", figure)
    succeeded("measure", predictions(evaluated, "test"), *options)
    assert figure.read_text(encoding="utf-8").startswith("<?xml")


def test_eval_select(evaluated: Path) -> None:
    rows = succeeded("select", predictions(evaluated, "samples"), "--k", "2", "4", "--json").json
    assert {row["k"] for row in rows} == {2, 4}
    assert {row["questions"] for row in rows} == {COUNT}
    assert "k is 2, there are 1 samples" in refused("select", predictions(evaluated, "test"), "--k", "2")


def test_eval_apply_select(evaluated: Path, tmp_path: Path) -> None:
    """Selection ranks by the calibrated confidence; a temperature keeps its order, so its choices stay."""
    fitted, calibrated = tmp_path / "c.json", tmp_path / "calibrated.jsonl"
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--out", fitted)
    succeeded("calibrate", "apply", fitted, predictions(evaluated, "samples"), "--out", calibrated)
    before, after = (
        succeeded("select", path, "--k", "2", "--json").json for path in (predictions(evaluated, "samples"), calibrated)
    )
    chosen, again = ({row["rule"]: row for row in rows}["most confident"] for rows in (before, after))
    assert chosen["ece"] != again["ece"]
    assert {**chosen, "ece": None} == {**again, "ece": None}


def test_eval_again_reads_and_with_other_settings_is_refused(evaluated: Path) -> None:
    again = ("eval", evaluated / "model", "--task", "witnesses", "--n", str(COUNT), "--max-tokens", "4")
    kept = predictions(evaluated, "test").read_bytes()
    succeeded(*again, "--out", evaluated / "test")
    told = refused(*again, "--k", "2", "--temperature", "1", "--out", evaluated / "test")
    assert "predictions.jsonl: was made with k 1, not 2" in told
    assert predictions(evaluated, "test").read_bytes() == kept


def test_the_files_of_a_calibrator_are_not_answers(evaluated: Path, tmp_path: Path) -> None:
    fitted = tmp_path / "c.json"
    succeeded("calibrate", "fit", predictions(evaluated, "validation"), "--out", fitted)
    assert "c.json: expected a JSON list of rows" in refused("measure", fitted)
    swapped = refused("calibrate", "apply", predictions(evaluated, "test"), fitted, "--out", tmp_path / "n.jsonl")
    assert "predictions.jsonl: not JSON" in swapped


def test_teach_train_eval_measure(tmp_path: Path) -> None:
    """Data to teacher to model to numbers; then the stored responses teach another run."""
    run = tmp_path / "run"
    recipe = write_recipe(tmp_path, methods=["sft"])
    assert "witnesses" in succeeded("data", "witnesses", "--n", "1").out
    assert "requests for 40 questions" in succeeded("teach", recipe, "--out", run, "--dry-run").out
    taught = succeeded("teach", recipe, "--out", run)
    folder = Path(taught.out.splitlines()[0].partition(": ")[2])
    assert "0 requests for 40 questions" in succeeded("teach", recipe, "--out", run, "--dry-run").out
    model = Path(succeeded("train", recipe, "--method", "sft", "--out", run).out.splitlines()[-1])
    task = ("--task", "witnesses", "--n", "8", "--max-tokens", "24", "--out", tmp_path / "eval")
    succeeded("eval", model, *task)
    assert succeeded("measure", tmp_path / "eval" / "predictions.jsonl", "--json").json["rows"] == 8
    stored = {"source": "responses", "responses": str(folder / "responses.jsonl"), "n": 10}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "name": "other", "teacher": stored}))
    again = succeeded("teach", other, "--out", tmp_path / "again")
    assert again.out.splitlines()[1:] == taught.out.splitlines()[1:]


def test_a_file_of_ones_own_from_data_to_teach(tmp_path: Path) -> None:
    """What `catto data` shows of a file is what a recipe asks of it; responses to it come from a file too."""
    rows = [{"stem": f"Question {i}?", "choices": ["red", "blue"], "key": "AB"[i % 2]} for i in range(60)]
    file = write_lines(tmp_path / "mine.jsonl", rows)
    shown = succeeded(
        "data", "mine", "--file", file, "--fields", "question=stem,options=choices,answer=key", "--n", "60", "--json"
    ).json
    asked = [question["id"] for question in shown["questions"]]
    given = [
        {"question": name, "text": f"<think>\nx\n</think>\n<answer>\n{label}\n</answer>"}
        for name in asked
        for label in "AABBBB"
    ]
    responses = write_lines(tmp_path / "responses.jsonl", given)
    block = {"path": str(file), "fields": {"question": "stem", "options": "choices", "answer": "key"}}
    teacher = {"source": "responses", "responses": str(responses), "n": 6, "min_wrong": 1}
    recipe = write_recipe(tmp_path, tasks={"mine": block}, teacher=teacher, methods=["sft"])
    assert (
        f"requests for {len(asked)} questions" in succeeded("teach", recipe, "--out", tmp_path / "r", "--dry-run").out
    )
    named = write_lines(tmp_path / "😀.jsonl", rows)  # a name beyond the basic plane
    fields = ("--fields", "question=stem,options=choices,answer=key")
    told = succeeded("teach", recipe, "--file", named, *fields, "--out", tmp_path / "named", "--dry-run").out
    assert f"requests for {len(asked)} questions" in told
    taught = succeeded("teach", recipe, "--out", tmp_path / "r")
    folder = Path(taught.out.splitlines()[0].partition(": ")[2])
    assert {row["question"] for row in lines(folder / "preferences.jsonl")} == set(asked)


def test_a_copied_recipe_is_the_shipped_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    succeeded("recipe", "copy", "quickstart", mine)
    plans = [succeeded("plan", name, "--out", tmp_path / "run", "--json").json for name in ("quickstart", mine)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("model.safetensors", b"\xff" * 100, "cannot be loaded: "),
        ("config.json", b'{"model_type": "nonesuch"}', "model type `nonesuch`"),
        ("tokenizer.json", b"{", "cannot be loaded: "),
    ],
)
def test_a_damaged_model_is_named(evaluated: Path, tmp_path: Path, file: str, content: bytes, told: str) -> None:
    shutil.copytree(evaluated / "model", tmp_path / "model")
    (tmp_path / "model" / file).write_bytes(content)
    done = catto("eval", tmp_path / "model", "--task", "witnesses", "--n", "2", "--out", tmp_path / "eval")
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith(f"catto: {tmp_path / 'model'}: cannot be loaded: ")
    assert told in done.err
    assert not (tmp_path / "eval").exists()
