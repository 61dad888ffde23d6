"""`examples/catto_loop.py` computes the loss and the gradients of `CATTOTrainer`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from datasets import Dataset
from steps import distance, step
from tiny import tiny_model, tiny_tokenizer

from catto import CATTOConfig, CATTOTrainer
from catto.training.examples import make_examples, preference_columns

EXAMPLE = Path(__file__).parents[2] / "examples" / "catto_loop.py"
PAIRS = 4
STREAM_ROWS = 8  # two for each pair


@pytest.fixture(scope="module")
def loop() -> Any:
    spec = importlib.util.spec_from_file_location("catto_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["catto_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def encode(loop: Any, row: Any, side: str) -> Any:
    fields = row.model_dump(mode="json")
    text = fields[side][-1]["content"]
    return loop.encode_response(tiny_tokenizer(), fields["prompt"], text, fields["labels"], fields["gold"])


@pytest.mark.parametrize("objective", ["catto", "decoupled"])
def test_the_loop_computes_the_trainers_loss_and_gradients(loop: Any, objective: str) -> None:
    rows = pairs.preference_rows(PAIRS)
    stream = pairs.sft_rows(STREAM_ROWS)
    settings: dict[str, Any] = {"calibration": "catto"}
    if objective == "decoupled":
        settings = {
            "calibration": "outcome",
            "preference_tokens": "reasoning",
            "outcome_examples": make_examples(tiny_tokenizer(), stream),
        }
    columns = [preference_columns(tiny_tokenizer(), row) for row in rows]
    trained = step(CATTOTrainer, CATTOConfig, rows=Dataset.from_list(columns), **settings)

    model = tiny_model()
    responses = [encode(loop, row, "chosen") for row in rows] + [encode(loop, row, "rejected") for row in rows]
    scored = [encode(loop, row, "completion") for row in stream]
    loss = loop.compute_loss(model, tiny_model(seed=1).eval(), responses, scored, objective)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert loss.item() == pytest.approx(trained.loss.item(), rel=1e-5)
    assert distance(gradients, trained.gradients) < 1e-5


def test_the_loop_trains_and_saves_a_model(loop: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    files = {"preferences": pairs.preference_rows(6), "outcome": pairs.sft_rows(5)}
    for name, rows in files.items():
        lines = [row.model_dump_json() for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    loop.main(str(folder), str(tmp_path / "preferences.jsonl"), str(tmp_path / "outcome.jsonl"))

    assert "pairs 6 of 6: loss" in capsys.readouterr().out
    before = tiny_model().state_dict()
    after = type(tiny_model()).from_pretrained(f"{folder}-decoupled").state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
