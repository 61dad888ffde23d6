"""Two processes that share a tiny model by `fully_shard`, beside one that holds it whole.

Every layout takes two steps of SGD, with a pass without gradient and validation before each, compares every gradient
and, at the end, the weights that rank 0 would save. Run by the two processes of `train_run.share`.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pairs
import torch
import torch.distributed as dist
from tiny import tiny_model, tiny_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from catto.pipeline.training_job import gather_weights
from catto.training import forward
from catto.training.batches import Batch, Query, lay_out_rows
from catto.training.examples import Example, make_examples
from catto.training.monitor import compute_label_logprobs

UNITS: dict[str, Any] = {
    "root holds the head": lambda model: [],
    "layers apart": lambda model: [[layer] for layer in model.model.layers],
    "head alone": lambda model: [[model.lm_head]],
    "norm and head": lambda model: [[model.model.norm, model.lm_head]],
    "embedding and head": lambda model: [[model.model.embed_tokens, model.lm_head]],
}
# torch refuses a tied weight whose two modules lie in different units
UNTIED = ("root holds the head", "layers apart", "head alone", "norm and head")
TIED = ("root holds the head", "layers apart", "embedding and head")
BF16 = {
    # Accelerate's policies: rounding the outputs would round the statistics
    "outputs in bf16": MixedPrecisionPolicy(output_dtype=torch.bfloat16),
    "all in bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16),
}


def layouts() -> Iterator[dict[str, Any]]:
    for tied in (False, True):
        for units in TIED if tied else UNTIED:
            for sharing, reshard in itertools.product((False, True), (False, True)):
                yield {"units": units, "tied": tied, "sharing": sharing, "reshard": reshard, "precision": "fp32"}
    for units, precision in itertools.product(("root holds the head", "head alone"), BF16):
        yield {"units": units, "tied": False, "sharing": False, "reshard": True, "precision": precision}


def name(layout: dict[str, Any]) -> str:
    return ", ".join(
        [
            layout["units"],
            "tied" if layout["tied"] else "untied",
            "shared" if layout["sharing"] else "padded",
            "resharded" if layout["reshard"] else "kept whole",
            layout["precision"],
        ]
    )


@cache
def _template(tied: bool) -> Any:
    return tiny_model(tie_word_embeddings=tied).train()


def _whole(layout: dict[str, Any]) -> Any:
    model = copy.deepcopy(_template(layout["tied"]))
    forward.install_head(model)
    return model


def _sharded(layout: dict[str, Any]) -> Any:
    model = _whole(layout)
    mesh = init_device_mesh("cpu", (2,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": layout["reshard"]}
    if layout["precision"] in BF16:
        options["mp_policy"] = BF16[layout["precision"]]
    for unit in UNITS[layout["units"]](model):
        fully_shard(unit if len(unit) > 1 else unit[0], **options)
    return fully_shard(model, **options)


@cache
def _examples(rank: int) -> list[Example]:
    return make_examples(tiny_tokenizer(), pairs.sft_rows(8))[4 * rank : 4 * rank + 4]


@cache
def _batch(rank: int, shared: bool) -> Batch:
    some = _examples(rank)
    some = [*some, *some[:1]]  # a prompt of two responses
    queries = [Query(n, example.label.at, example.label.candidates) for n, example in enumerate(some)]
    return lay_out_rows([example.row for example in some], queries, len(some), 0, shared=shared)


def _loss(model: Any, rank: int, shared: bool) -> Any:
    """A mean over this rank's rows in which every kind of statistic has a gradient."""
    output = forward.run_head(model, _batch(rank, shared), ("entropy",))
    stats, labels = output.stats, output.labels
    assert labels is not None
    assert stats.entropy is not None
    assert stats.target.dtype == labels.dtype == torch.float32, f"statistics in {stats.target.dtype}"
    return stats.confidence.mean() - stats.target.mean() + stats.entropy.mean() + labels.exp().square().sum()


def _distance(sharded: Any, whole: Any) -> float:
    """Largest difference of a gradient, relative to the largest entry of any."""
    scale = max(float(p.grad.abs().max()) for p in whole.parameters())
    assert scale > 1e-3
    wholes = dict(whole.named_parameters())
    found = 0.0
    for key, p in sharded.named_parameters():
        assert isinstance(p, DTensor), f"{key} was not resharded"
        found = max(found, float((p.grad.full_tensor() - wholes[key].grad).abs().max()) / scale)
    return found


def compare(layout: dict[str, Any]) -> dict[str, float]:
    """Distances of the gradients and of the loss after two steps, the larger of both steps."""
    rank, shared = dist.get_rank(), layout["sharing"]
    sharded, whole = _sharded(layout), _whole(layout)
    gradient = loss = validation = 0.0
    for _ in range(2):
        with torch.no_grad():
            before = _loss(sharded, rank, shared).item()
        validated = [compute_label_logprobs(model, _examples(0), 0) for model in (sharded, whole)]
        ours = _loss(sharded, rank, shared)
        ours.backward()
        parts = [_loss(whole, other, shared) for other in (0, 1)]
        (sum(parts) / 2).backward()
        gradient = max(gradient, _distance(sharded, whole))
        loss = max(loss, abs(ours.item() - parts[rank].item()), abs(before - ours.item()))
        validation = max(validation, float(abs(validated[0] - validated[1]).max()))
        for model in (sharded, whole):
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            model.zero_grad()
    weights = gather_weights(SimpleNamespace(model=sharded, is_fsdp_enabled=True, is_deepspeed_enabled=False))
    assert weights is not None
    assert len(weights) == (0 if rank else len(whole.state_dict()))
    saved = max((float((value - whole.state_dict()[key]).abs().max()) for key, value in weights.items()), default=0.0)
    return {"gradient": gradient, "loss": loss, "validation": validation, "saved": saved}


def _compared(layout: dict[str, Any]) -> dict[str, Any]:
    """What `compare` finds; a failed assertion, which both ranks see at the same place, is one layout's finding."""
    try:
        return compare(layout)
    except AssertionError as error:
        return {"error": str(error)}


def run(path: str) -> None:
    """Compare every layout and leave what both ranks found in `path`."""
    found = {name(layout): _compared(layout) for layout in layouts()}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(gathered))
