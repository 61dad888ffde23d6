"""The collator lays out batches of pairs, so that the training step only moves tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from steps import Step, distance, made, step
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from catto.training import trainer as preference
from catto.training.batches import KEY, Batch, lay_out_pairs
from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "catto": {"calibration": "catto"},
    "label": {"calibration": "catto", "calibrate_tokens": "label"},
    "outcome": {"calibration": "outcome"},
}
SHARING = pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])


def _assert_same(one: Step, other: Step) -> None:
    assert torch.equal(one.loss, other.loss)
    assert distance(one.gradients, other.gradients) == 0
    assert one.metrics == other.metrics


@SHARING
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_step_lays_out_nothing(objective: str, sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("laid out inside the step")

    for name in ("lay_out_pairs", "lay_out_rows"):
        monkeypatch.setattr(preference, name, refuse)
    result = step(CATTOTrainer, CATTOConfig, prefix_sharing=sharing, **OBJECTIVES[objective])
    assert result.batch[KEY]["layout"].shared is sharing


@SHARING
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_without_a_layout_gives_the_same_step(objective: str, sharing: bool) -> None:
    """As Accelerate leaves it where it dispatches batches by rows."""
    options = {"prefix_sharing": sharing, **OBJECTIVES[objective]}
    collated = step(CATTOTrainer, CATTOConfig, **options)
    dispatched = step(CATTOTrainer, CATTOConfig, accelerator_config={"dispatch_batches": True}, **options)
    assert "layout" not in dispatched.batch[KEY]
    _assert_same(dispatched, collated)


@SHARING
def test_workers_lay_out_the_same_batch(sharing: bool) -> None:
    here = step(CATTOTrainer, CATTOConfig, prefix_sharing=sharing)
    worker = step(CATTOTrainer, CATTOConfig, prefix_sharing=sharing, dataloader_num_workers=1)
    assert isinstance(worker.batch[KEY]["layout"], Batch)
    _assert_same(worker, here)


@SHARING
def test_rows_survive_the_way_from_a_worker(sharing: bool, tmp_path: Path) -> None:
    """The queue of a worker moves tensors to shared memory and frees them, before it pickles what points into them."""
    options = {"prefix_sharing": sharing, "dataloader_num_workers": 1, "per_device_train_batch_size": 3}
    trainer = pairs.trainer(
        CATTOTrainer, CATTOConfig, tmp_path, rows=pairs.dataset(pairs.preference_rows(8)), **options
    )
    for batch in trainer.get_train_dataloader():
        lengths = batch["attention_mask"].sum(-1).tolist()
        expected = [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)]
        assert [[*row.prompt, *row.completion] for row in batch[KEY]["layout"].rows] == expected


def test_a_streamed_dataset_has_no_layout_and_gives_the_same_step(tmp_path: Path) -> None:
    rows = pairs.dataset(pairs.preference_rows(4))
    losses = []
    for given in (rows, rows.to_iterable_dataset()):
        trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=given, prefix_sharing=True)
        batch = next(iter(trainer.get_eval_dataloader(trainer.train_dataset)))
        assert ("layout" in batch[KEY]) == (given is rows)
        losses.append(trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch)).detach())
    assert torch.equal(*losses)


def test_a_loader_of_a_streamed_dataset_leaves_the_training_loader_alone(tmp_path: Path) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path)
    training = trainer.get_train_dataloader()
    streamed = trainer.train_dataset.to_iterable_dataset()
    assert "layout" not in next(iter(trainer.get_eval_dataloader(streamed)))[KEY]
    assert "layout" in next(iter(training))[KEY]


def test_the_layout_is_that_of_trl_tensors() -> None:
    batch = step(CATTOTrainer, CATTOConfig).batch
    layout: Batch = batch[KEY]["layout"]
    assert torch.equal(layout.input_ids, batch["input_ids"])
    assert torch.equal(layout.attention_mask, batch["attention_mask"])
    rows, columns = layout.trl_index.unbind(-1)
    assert torch.equal(layout.targets, batch["input_ids"][rows, columns + 1])
    expected = batch["completion_mask"][:, 1:].bool()
    assert torch.equal(torch.zeros_like(expected).index_put((rows, columns), torch.tensor(True)), expected)


def test_every_tensor_of_a_layout_moves_and_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = step(CATTOTrainer, CATTOConfig, calibration="outcome").batch
    layout = lay_out_pairs(batch, batch[KEY], 0, shared=True)
    moved = layout.to(torch.device("meta"), non_blocking=True)
    tensors = [name for name, value in vars(layout).items() if isinstance(value, Tensor)]
    assert len(tensors) == 11
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)
    assert moved.rows is layout.rows
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)  # needs an accelerator
    pinned = pin_memory({KEY: {"layout": layout}})[KEY]["layout"]
    assert all(torch.equal(getattr(pinned, name), getattr(layout, name) + 1) for name in tensors)
