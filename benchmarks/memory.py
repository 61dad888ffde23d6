"""Compare the memory that `benchmarks/capacity.py` states with the bytes that training steps hold.

A step is the forward pass through our head, the calibration term and the backward pass, as on a GPU: bf16 products,
gradient checkpointing, packed rows, tiles of an eighth of the vocabulary, attention as one kernel. The tensors of small
models are real; those of Qwen3-4B are fake, with shapes and no values. AdamW's two moments are added. FSDP2 runs as one
rank of n whose partners are pretended. Nothing here has run on a GPU. The last line is one JSON object with the largest
deviation of a small model.

    python benchmarks/memory.py
    python benchmarks/memory.py --small    # without Qwen3-4B
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config

import roofline
from capacity import KNOWN_NETWORKS, Memory, Network, memory
from catto.objectives import tiles
from catto.training import forward
from catto.training.batches import Row, lay_out_rows
from catto.training.terms import surrogate_term
from catto.training.trl_compat import TRL_EXTRAS

BF16 = torch.bfloat16
SMALL = {
    "narrow": Network(4, 64, 192, 64, 32, 1024, True),
    "deep": Network(12, 64, 192, 64, 64, 1024, True),
    "wide": Network(4, 128, 384, 128, 64, 1024, True),
    "untied": Network(4, 96, 256, 96, 96, 2048, False),
}


class Case(NamedTuple):
    """One training step."""

    net: Network
    rows: list[Row]
    shared: bool = True
    width: int = 4
    rank: int | None = None
    gpus: int = 1


class Held(roofline.Count):
    """Bytes of all tensors after every operation; FSDP2 empties storages and fills them again."""

    def hold(self, storages: Iterable[Any]) -> None:
        """Count again."""
        for storage in storages:
            self.born.setdefault(storage, 0)
        self.history.append(sum(storage.nbytes() for storage in self.born))


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """One kernel of 16-bit inputs."""
    inputs = [tensor.to(BF16) for tensor in (query, key, value)]
    return roofline._Attention.apply(*inputs), None  # type: ignore[no-untyped-call]


AttentionInterface.register("counted", attention)


def model_of(case: Case) -> Any:
    net, head = case.net, 16 if case.net.width < 1024 else 128
    config = Qwen3Config(
        num_hidden_layers=net.layers,
        hidden_size=net.width,
        intermediate_size=net.intermediate,
        num_attention_heads=net.queries // head,
        num_key_value_heads=net.keys // head,
        head_dim=head,
        vocab_size=net.vocabulary,
        tie_word_embeddings=net.tied,
    )
    dtype = BF16 if case.width == 2 else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="counted")
    if case.rank is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward.install_head(model.train())
    if case.gpus > 1:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)  # as Accelerate's for bf16
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=policy)
    return model


@contextmanager
def partners(gpus: int) -> Iterator[None]:
    """Be the first of so many processes; the others are pretended."""
    if gpus > 1:
        dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    yield
    if gpus > 1:
        dist.destroy_process_group()


def counted(case: Case, *, fake: bool = False) -> float:
    """Return the peak of a step in bytes: weights, AdamW's moments, and the most that the step holds."""
    batch = lay_out_rows(case.rows, [], len(case.rows), 0, shared=case.shared, packed=True)
    with ExitStack() as stack:
        stack.enter_context(partners(case.gpus))
        stack.enter_context(mock.patch.object(forward, "dense_mask", return_value=None))
        stack.enter_context(mock.patch.object(tiles, "DEFAULT_ROWS", len(batch.targets)))
        stack.enter_context(mock.patch.object(tiles, "DEFAULT_COLUMNS", case.net.vocabulary // 8))
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            stack.enter_context(mock.patch.object(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"}))
            stack.enter_context(mock.patch.object(tiles, "device_memory", return_value=80 * 10**9))
            batch = batch.map(mode.from_tensor)
        model = model_of(case)
        local = [(getattr(p, "_local_tensor", p), p.requires_grad) for p in model.parameters()]
        held = sum(roofline.elements(p) * (3 if trained else 1) for p, trained in local)
        with roofline.current(Held()) as count:
            with torch.autocast("cpu", BF16):
                stats = forward.run_head(model, batch, TRL_EXTRAS).stats
            length = max(len(row.prompt) + len(row.completion) for row in case.rows) - 1
            zeros, where = stats.target.new_zeros(len(case.rows), length), tuple(batch.place.unbind(-1))
            laid = stats.map(lambda values: zeros.index_put(where, values))
            loss = laid.target.sum() + 0.1 * surrogate_term(laid, laid.target != 0, roofline.CONFIG).loss
            del stats, laid
            loss.backward()
    return held + max(count.history)


def stated(case: Case) -> Memory:
    """What the formula says of the same step."""
    batch = lay_out_rows(case.rows, [], len(case.rows), 0, shared=case.shared, packed=True)
    options = {"width": case.width, "rank": case.rank, "gpus": case.gpus}
    return memory(case.net, batch.input_ids.numel(), len(batch.targets), **options)  # type: ignore[arg-type]


def small() -> dict[str, Case]:
    """Small models, full and with adapters, prompts shared and not, weights of two precisions, one GPU and several."""
    rows, cases = roofline.pairs(64, 64, 64), {}
    kinds = {"full": {}, "bf16": {"width": 2}, "LoRA": {"rank": 8}, "LoRA bf16": {"rank": 8, "width": 2}}
    kinds |= {f"FSDP2 x{n}": {"gpus": n} for n in (2, 8)}
    for (name, net), (kind, options), shared in product(SMALL.items(), kinds.items(), (True, False)):
        cases[f"{name}, {kind}{', shared' if shared else ''}"] = Case(net, rows, shared, **options)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="leave Qwen3-4B out, which takes a minute")
    options, worst = parser.parse_args(), 0.0
    print(f"{'step':34}{'counted MB':>12}{'stated MB':>12}{'ratio':>8}")
    rows = roofline.pairs(1024, 1024, 1024)
    large = {
        f"Qwen3-4B{', shared' if on else ''}": Case(KNOWN_NETWORKS["Qwen/Qwen3-4B"], rows, on) for on in (True, False)
    }
    for name, case in (small() | ({} if options.small else large)).items():
        peak, formula = counted(case, fake=name in large), stated(case).peak
        print(f"{name:34}{peak / 1e6:12.2f}{formula / 1e6:12.2f}{formula / peak:8.3f}", flush=True)
        worst = max(worst, abs(formula / peak - 1)) if name not in large else worst
    print(json.dumps({"largest_deviation": round(worst, 4)}))


if __name__ == "__main__":
    main()
