"""A recipe on a task without options: the stream, the predictions and the report are of P(True)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiment_world import RECIPE, catto, write_recipe

from catto.errors import DataError
from catto.io.record_files import read_records
from catto.pipeline.plan import Graph, open_recipe
from catto.prompts import JUDGEMENT_LABELS
from catto.recipe.settings import Recipe
from catto.records import Prediction, Question, SftRow

BLOCKS: dict[str, Any] = {
    "tasks": {"readings": {"train": 80, "validation": 20, "test": 40}},
    "teacher": {"source": "readings", "n": 10},
    "methods": ["sft", "dpo+outcome"],
    # As many steps as a model of one layer needs to answer in the right form.
    "sft": {"learning_rates": [1e-2], "epochs": 3, "batch_size": 16, "rows": 1600, "checkpoint_steps": 300},
    "evaluation": {"max_tokens": 40, "batch_size": 16, "k": [], "resamples": 20},
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"methods": ["sft", "sft+ts"]},
            "methods: sft+ts reads the labels of answers, but answers to readings have none",
        ),
        ({"methods": ["sft", "dpo+decoupled"]}, "methods: dpo+decoupled reads the labels"),
        ({"methods": ["sft", "dpo", "rcft"]}, "methods: rcft reads the labels"),
        ({"methods": ["sft", "dpo+outcome-pairs"]}, "methods: dpo+outcome-pairs reads the labels"),
        ({"evaluation": {"k": [4]}}, "evaluation.k: the ranking of candidates reads the labels"),
        ({"outcome": {"target": "votes"}}, "outcome.target: votes reads the labels"),
    ],
)
def test_what_reads_the_labels_of_answers_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    recipe = write_recipe(tmp_path, **{**BLOCKS, **changes})
    with pytest.raises(DataError) as caught:
        open_recipe(str(recipe))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"witnesses": 3}, "tasks.readings.witnesses: not read for this task"),
        ({"data_dir": "."}, "tasks.readings.data_dir: not read for this task"),
    ],
)
def test_settings_of_other_tasks_are_refused(tmp_path: Path, setting: dict[str, Any], problem: str) -> None:
    recipe = write_recipe(tmp_path, **{**BLOCKS, "tasks": {"readings": setting}})
    with pytest.raises(DataError, match=problem):
        open_recipe(str(recipe))


def test_another_wording_or_grading_changes_the_keys_of_its_own_stages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"readings": {"train": 80}, "witnesses": {"train": 80}}
    recipe = Recipe.model_validate({**RECIPE, **BLOCKS, "tasks": tasks, "teacher": {"source": "server", **SERVER}})

    def find_keys() -> dict[str, str]:
        graph = Graph(recipe)
        keys = {}
        for task in tasks:
            keys[f"responses {task}"] = graph.plan_responses(task).key
            keys[f"teacher {task}"] = graph.plan_teacher_rows(task).key
        return keys

    before = find_keys()
    monkeypatch.setattr("catto.answer.grading.VERSION", 1000)
    regraded = {name for name, key in find_keys().items() if key != before[name]}
    assert regraded == {"teacher readings"}
    monkeypatch.setattr("catto.prompts.open_fingerprint", lambda: "other")
    changed = {name for name, key in find_keys().items() if key != before[name]}
    assert changed == {"responses readings", "teacher readings"}


SERVER = {"model": "m", "base_url": "http://localhost:1/v1"}


@pytest.mark.slow
def test_a_recipe_trains_and_measures_p_true(tmp_path: Path) -> None:
    write_recipe(tmp_path, **BLOCKS)
    done = catto("run", "tiny.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "True error" in done.stdout.replace("\n", " ")
    stages = tmp_path / "runs" / "tiny" / "stages"

    (stream,) = stages.glob("stream-sft-readings-*/outcome.jsonl")
    rows = list(read_records(stream, SftRow))
    assert rows
    assert all(row.labels == JUDGEMENT_LABELS for row in rows)
    assert all(len(row.prompt) == 4 for row in rows)  # system, question, answer, and whether it is right

    (questions_file,) = stages.glob("test-questions-*/test.jsonl")
    gold_of = {question.id: question.gold for question in read_records(questions_file, Question)}
    for method in ("sft", "dpo+outcome"):
        (file,) = stages.glob(f"test-{method}-readings-*/predictions.jsonl")
        predictions = list(read_records(file, Prediction))
        assert len(predictions) == 40
        answered = [prediction for prediction in predictions if prediction.answer is not None]
        assert len(answered) > 20
        for prediction in answered:
            assert prediction.label is None
            assert prediction.confidence_kind == "ptrue"
            assert 0 < prediction.confidence < 1
            assert prediction.is_correct == (prediction.answer == gold_of[prediction.question])

    (training,) = stages.glob("dpo+outcome-readings-*/training.json")
    assert "val_ece" in json.loads(training.read_text())["history"][-1]
    again = catto("run", "tiny.yaml", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
