"""One training step of a tiny trainer, taken apart: the loss and every gradient."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pairs
import torch
from peft import LoraConfig
from torch import Tensor

from catto.training.batches import KEY, Row, lay_out_pairs

os.environ["TQDM_DISABLE"] = "1"
datasets.disable_progress_bars()

_salt = itertools.count()
_folder = tempfile.TemporaryDirectory(prefix="catto-steps-")  # of this process: two may run the suite side by side


class Step(NamedTuple):
    """What one call of `compute_loss` gave, and the trainer and batch it came from."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    trainer: Any
    batch: dict[str, Any]


def lora() -> LoraConfig:
    """An adapter that differs from zero, so that disabling it matters."""
    modules = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")


def made(kind: Any, config: Any, **options: Any) -> Any:
    """A trainer on rows that no other has, so that no cached reference log-probabilities are read."""
    rows = options.pop("rows", None)
    rows = pairs.dataset(pairs.preference_rows()) if rows is None else rows
    rows = rows.add_column("salt", [next(_salt)] * len(rows))
    folder = options.pop("folder", None) or Path(_folder.name)
    torch.manual_seed(0)  # adapters are initialised before the trainer sets its own seed
    return pairs.trainer(kind, config, folder, rows=rows, **options)


def step(kind: Any, config: Any, **options: Any) -> Step:
    """Loss and gradients of the first batch."""
    trainer = made(kind, config, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {name: float(sum(values) / len(values)) for name, values in trainer._metrics["train"].items()}
    return Step(loss.detach(), gradients, metrics, trainer, batch)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference between gradients, relative to the largest entry of `theirs`."""
    assert ours.keys() == theirs.keys()
    assert ours
    scale = max(float(value.abs().max()) for value in theirs.values())
    assert scale > 0
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / scale


def facts(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """What a batch says of each pair."""
    known = {name: value.tolist() for name, value in batch[KEY].items() if isinstance(value, Tensor)}
    size = len(known["row"]) // 2
    if "label_at" not in known:
        return [{"row": row} for row in known["row"][:size]]
    found = []
    for pair in range(size):
        fact = {name: known[name][pair] for name in ("row", "gold_index", "correctness_rate")}
        for side, row in (("chosen", pair), ("rejected", pair + size)):
            fact[f"{side}_label_at"] = known["label_at"][row]
            fact[f"{side}_candidates"] = [token for token in known["candidates"][row] if token >= 0]
        found.append(fact)
    return found


def rows(batch: dict[str, Any]) -> list[Row]:
    """The token ids of a batch's rows, all chosen, then all rejected."""
    return list(lay_out_pairs(batch, batch[KEY], 0, shared=False).rows)
