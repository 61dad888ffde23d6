"""Compare the memory that `benchmarks/capacity.py` states with the bytes that training steps hold.

A step is the forward pass through our head, the calibration term and the backward pass. As on a GPU, it has bf16
products, gradient checkpointing, packed rows, tiles of an eighth of the vocabulary, and attention as one kernel. The
tensors of small models are real; those of Qwen3-4B are fake, with shapes and no values. AdamW's two moments are added.
FSDP2 runs as one rank of n, without the other processes. Nothing here has run on a GPU. The last line is a JSON object
with the largest deviation of a small model.

    python benchmarks/memory.py
    python benchmarks/memory.py --small    # without Qwen3-4B
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from catto.training.batches import Batch, Row, lay_out_rows
from catto.training.terms import surrogate_term
from catto.training.trl_compat import TRL_EXTRAS

BF16 = torch.bfloat16
SMALL_NETWORKS = {
    "narrow": Network(4, 64, 192, 64, 32, 1024, True),
    "deep": Network(12, 64, 192, 64, 64, 1024, True),
    "wide": Network(4, 128, 384, 128, 64, 1024, True),
    "untied": Network(4, 96, 256, 96, 96, 2048, False),
}
# How a small model is trained -> fields of `Case`.
SMALL_KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16": {"bytes_per_weight": 2},
    "LoRA": {"rank": 8},
    "LoRA bf16": {"rank": 8, "bytes_per_weight": 2},
    "FSDP2 x2": {"gpus": 2},
    "FSDP2 x8": {"gpus": 8},
}


class Case(NamedTuple):
    """One training step.

    Attributes:
        network: The sizes of the model.
        rows: The rows of the batch.
        shared: Whether the two responses to a prompt share it.
        bytes_per_weight: 4 for fp32 weights, 2 for bf16.
        rank: Rank of the LoRA adapter; None for full fine-tuning.
        gpus: Number of GPUs that the model is split over.
    """

    network: Network
    rows: list[Row]
    shared: bool = True
    bytes_per_weight: int = 4
    rank: int | None = None
    gpus: int = 1


class HeldBytesCounter(roofline.OperationCounter):
    """Records the bytes of all living tensors after every operation.

    FSDP2 empties storages and fills them again, so the bytes are summed afresh each time.
    """

    def follow_memory(self, storages: Iterable[Any]) -> None:
        """Add new storages, and record the bytes of all storages."""
        for storage in storages:
            self.born.setdefault(storage, 0)
        self.history.append(sum(storage.nbytes() for storage in self.born))


def run_16_bit_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Run attention as one kernel with 16-bit inputs."""
    inputs = [tensor.to(BF16) for tensor in (query, key, value)]
    return roofline.CountedAttention.apply(*inputs), None  # type: ignore[no-untyped-call]


AttentionInterface.register("counted", run_16_bit_attention)


def make_model(case: Case) -> Any:
    """Make the model of a case, ready for training: with its adapter, our head and FSDP2 if it has them."""
    network = case.network
    head_dim = 16 if network.width < 1024 else 128
    config = Qwen3Config(
        num_hidden_layers=network.layers,
        hidden_size=network.width,
        intermediate_size=network.intermediate,
        num_attention_heads=network.queries // head_dim,
        num_key_value_heads=network.keys // head_dim,
        head_dim=head_dim,
        vocab_size=network.vocabulary,
        tie_word_embeddings=network.tied,
    )
    dtype = BF16 if case.bytes_per_weight == 2 else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="counted")
    if case.rank is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=case.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward.install_head(model.train())
    if case.gpus > 1:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)  # as Accelerate's for bf16
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)
    return model


@contextmanager
def join_fake_group(gpus: int) -> Iterator[None]:
    """Make this process the first of several; the others do not exist. With one GPU, this does nothing."""
    if gpus > 1:
        dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    yield
    if gpus > 1:
        dist.destroy_process_group()


def lay_out_case(case: Case) -> Batch:
    """Return the batch of a case, packed."""
    return lay_out_rows(case.rows, [], len(case.rows), 0, shared=case.shared, packed=True)


def count_peak_bytes(case: Case, *, fake: bool = False) -> float:
    """Return the peak memory of a step in bytes: weights, AdamW's moments, and the most that the step holds.

    Args:
        case: The step.
        fake: Whether the tensors have shapes but no values.
    """
    batch = lay_out_case(case)
    with ExitStack() as stack:
        stack.enter_context(join_fake_group(case.gpus))
        stack.enter_context(mock.patch.object(forward, "dense_mask", return_value=None))
        stack.enter_context(mock.patch.object(tiles, "DEFAULT_ROWS", len(batch.targets)))
        stack.enter_context(mock.patch.object(tiles, "DEFAULT_COLUMNS", case.network.vocabulary // 8))
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            stack.enter_context(mock.patch.object(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"}))
            stack.enter_context(mock.patch.object(tiles, "device_memory", return_value=80 * 10**9))
            batch = batch.map(mode.from_tensor)
        model = make_model(case)
        parameter_bytes = count_parameter_bytes(model)
        with roofline.count_with(HeldBytesCounter()) as counter:
            compute_loss(model, batch, case.rows).backward()
    return parameter_bytes + max(counter.history)


def count_parameter_bytes(model: Any) -> int:
    """Return the bytes of this process's weights, three times for trained ones: AdamW has two moments for each."""
    total = 0
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)  # the part of a parameter that FSDP2 has split
        copies = 3 if parameter.requires_grad else 1
        total += copies * roofline.count_bytes(local)
    return total


def compute_loss(model: Any, batch: Batch, rows: Sequence[Row]) -> Tensor:
    """Return the sum of the log-probabilities and the calibration term of a batch."""
    with torch.autocast("cpu", BF16):
        stats = forward.run_head(model, batch, TRL_EXTRAS).stats
    longest_row = max(len(row.prompt) + len(row.completion) for row in rows)
    zeros = stats.target.new_zeros(len(rows), longest_row - 1)
    where = tuple(batch.trl_index.unbind(-1))
    in_rows = stats.map(lambda values: zeros.index_put(where, values))
    return in_rows.target.sum() + 0.1 * surrogate_term(in_rows, in_rows.target != 0, roofline.CONFIG).loss


def state_memory(case: Case) -> Memory:
    """Return what the formula of `benchmarks/capacity.py` states for the same step."""
    batch = lay_out_case(case)
    return memory(
        case.network,
        batch.input_ids.numel(),
        len(batch.targets),
        width=case.bytes_per_weight,
        rank=case.rank,
        gpus=case.gpus,
    )


def make_small_cases() -> dict[str, Case]:
    """Return steps of small models: every network, trained in every way, with prompts shared and not."""
    rows = roofline.make_rows(64, 64, 64)
    cases = {}
    for network_name, network in SMALL_NETWORKS.items():
        for kind, fields in SMALL_KINDS.items():
            name = f"{network_name}, {kind}"
            cases[f"{name}, shared"] = Case(network, rows, shared=True, **fields)
            cases[name] = Case(network, rows, shared=False, **fields)
    return cases


def make_large_cases() -> dict[str, Case]:
    """Return steps of Qwen3-4B with prompts shared and not."""
    rows = roofline.make_rows(1024, 1024, 1024)
    network = KNOWN_NETWORKS["Qwen/Qwen3-4B"]
    return {"Qwen3-4B, shared": Case(network, rows, shared=True), "Qwen3-4B": Case(network, rows, shared=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="leave Qwen3-4B out, which takes a minute")
    options = parser.parse_args()
    print(f"{'step':34}{'counted MB':>12}{'stated MB':>12}{'ratio':>8}")
    largest_deviation = 0.0
    for name, case in make_small_cases().items():
        ratio = compare_case(name, case, fake=False)
        largest_deviation = max(largest_deviation, abs(ratio - 1))
    if not options.small:
        for name, case in make_large_cases().items():
            compare_case(name, case, fake=True)
    print(json.dumps({"largest_deviation": round(largest_deviation, 4)}))


def compare_case(name: str, case: Case, *, fake: bool) -> float:
    """Print the counted and the stated bytes of a step, and return the stated over the counted ones."""
    counted = count_peak_bytes(case, fake=fake)
    stated = state_memory(case).peak
    ratio = stated / counted
    print(f"{name:34}{counted / 1e6:12.2f}{stated / 1e6:12.2f}{ratio:8.3f}", flush=True)
    return ratio


if __name__ == "__main__":
    main()
