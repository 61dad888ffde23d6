"""A recipe that starts from a given model: no SFT, the model as its own teacher, adapters, votes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiment_world import ENVIRONMENT, catto
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from catto.io.record_files import read_records
from catto.pipeline.plan import Graph
from catto.records import Prediction, Response, SftRow
from study import probe

pytestmark = pytest.mark.slow

FIRST: dict[str, Any] = {
    "name": "first",
    "tasks": {"witnesses": {"train": 120, "validation": 8, "test": 10}},
    "model": {"scratch": {"layers": 1, "width": 48, "heads": 2, "intermediate": 64}},
    "methods": ["sft"],
    "budgets": ["matched"],
    "seeds": [0],
    "keep": "last",
    "context": 256,
    "teacher": {"source": "witnesses", "n": 10},
    "sft": {"learning_rates": [5e-3], "epochs": 1, "batch_size": 16, "checkpoint_steps": 500},
    "evaluation": {"max_tokens": 64, "batch_size": 16, "k": [], "resamples": 20},
}
METHODS = ["base", "base+vs", "dpo", "dpo+decoupled", "dpo+decoupled+sft"]
TRAIN = 24


class Experiment:
    """A model that answers, and a finished experiment that starts from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.given = folder / "model"
        (folder / "first.yaml").write_text(yaml.safe_dump(FIRST))
        done = catto("train", "first.yaml", "--method", "sft", cwd=folder)
        assert done.returncode == 0, done.stderr
        Path(folder / done.stdout.splitlines()[-1]).rename(self.given)
        second = {
            **FIRST,
            "name": "second",
            "start": "base",
            "tasks": {"witnesses": {"train": TRAIN, "validation": 8, "test": 10}},
            "model": {"path": "model", "peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
            "methods": METHODS,
            "small_pairs": 8,
            "teacher": {"source": "transformers", "n": 6, "min_wrong": 1, "max_tokens": 64},
            "preference": {"learning_rates": [1e-2], "checkpoint_steps": 500},
            "outcome": {"source": "teacher"},
        }
        (folder / "second.yaml").write_text(yaml.safe_dump(second))
        self.done = catto("run", "second.yaml", cwd=folder)

    def stage(self, pattern: str) -> Path:
        (found,) = (self.folder / "runs" / "second" / "stages").glob(pattern)
        return found


@pytest.fixture(scope="module", name="experiment")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(tmp_path_factory.mktemp("start-base"))


def test_every_method_starts_from_the_given_model(experiment: Experiment) -> None:
    assert experiment.done.returncode == 0, experiment.done.stderr
    assert "Base model" in experiment.done.stdout
    given = load_file(experiment.given / "model.safetensors")
    base = load_file(experiment.stage("base-model-*") / "model" / "model.safetensors")
    assert all(base[name].equal(given[name]) for name in given)
    names = [path.name for path in (experiment.folder / "runs" / "second" / "stages").iterdir()]
    assert not [name for name in names if name.startswith(("sft-", "traces-"))]


@pytest.mark.parametrize("method", METHODS[2:])
def test_an_adapter_moves_its_own_weights_and_no_others(experiment: Experiment, method: str) -> None:
    given = load_file(experiment.given / "model.safetensors")
    trained = load_file(experiment.stage(f"{method}-*lr*") / "model" / "model.safetensors")
    moved = {name for name in given if not trained[name].equal(given[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj"}


def test_the_report_has_the_untouched_model_as_a_row_without_a_training(experiment: Experiment) -> None:
    results = json.loads((experiment.stage("report-*") / "results.json").read_text())
    cells = {cell["method"]: cell for cell in results["cells"]}
    assert set(cells) == set(METHODS)
    assert cells["base"]["training"] is None
    assert cells["dpo"]["training"]["steps"] > 0
    assert cells["base+vs"]["vector"]["labels"] == ["A", "B", "C", "D"]


def test_the_stream_is_the_first_response_of_the_model_to_every_question(experiment: Experiment) -> None:
    responses: dict[str, list[Response]] = {}
    for response in read_records(experiment.stage("teacher-witnesses-*") / "responses.jsonl", Response):
        responses.setdefault(response.question, []).append(response)
    rows = list(read_records(experiment.stage("stream-teacher-*") / "stream.jsonl", SftRow))
    assert len(rows) == TRAIN == len(responses)
    for row in rows:
        own = responses[row.question]
        assert row.label == own[0].label
        readable = [response.label for response in own if response.label is not None]
        if readable:
            assert row.votes == {label: readable.count(label) / len(readable) for label in row.labels}
        else:
            assert row.votes is None


def test_what_is_not_trained_is_refused_by_train(experiment: Experiment) -> None:
    done = catto("train", "second.yaml", "--method", "base", cwd=experiment.folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "base is the given model itself, which is not trained" in done.stderr
    done = catto("train", "second.yaml", "--method", "sft", cwd=experiment.folder)
    assert "sft needs start: sft" in done.stderr


# ---- the linear probe of the study ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_probe_keeps_the_answers_and_states_a_confidence_that_measure_reads(experiment: Experiment) -> None:
    command = [sys.executable, "-m", "study.probe", "runs/second"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), ENVIRONMENT.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=experiment.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = (experiment.folder / "runs" / "second" / "probe").glob("dpo-*/predictions.jsonl")
    probed = list(read_records(written, Prediction))
    own = list(read_records(experiment.stage("test-dpo-matched-*") / "predictions.jsonl", Prediction))
    assert [row.label for row in probed] == [row.label for row in own]
    assert [row.confidence_raw for row in probed] == [row.confidence for row in own]
    assert [row.confidence for row in probed] != [row.confidence for row in own]
    assert catto("measure", written, cwd=experiment.folder).returncode == 0


def test_the_probe_reads_the_state_that_predicts_the_label(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own head on these states gives the label probabilities that the evaluation has stored."""
    monkeypatch.chdir(experiment.folder)
    root = Path("runs/second")
    recipe = probe.read_newest_recipe(root)
    graph = Graph(recipe)
    (cell,) = [cell for cell in graph.list_cells() if cell.place.method == "dpo"]
    inputs = probe.read_inputs(root, graph, cell)
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    for row in inputs.predictions:
        context = probe.make_label_context(tokenizer, inputs, row, reasoning=True)
        state = torch.tensor(probe.compute_hidden_states(model.model.eval(), [context])[0])
        with torch.inference_mode():
            logprobs = model.lm_head(state).log_softmax(-1)
        for label, path in probe.find_label_position(tokenizer, inputs, row).paths.items():
            assert logprobs[path[0]].item() == pytest.approx(row.label_logprobs[label], abs=1e-3)
