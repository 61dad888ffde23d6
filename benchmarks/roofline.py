"""Project the time of a training step on a GPU from its operations, on a machine without one.

Every operation of a step runs on fake tensors, which have shapes and dtypes but no values, and is counted: FLOPs by the
dtype of the inputs, bytes read and written, launches. Its time is the largest of three numbers: FLOPs over the card's
published peak, bytes over its bandwidth, and the cost of a launch. The arms are TRL's DPO step, ours, ours with shared
prompts, and ours with packed rows. The cost of TRL's head is that of its Triton kernels, which score only the
responses. Synchronisations are counted in a real step of a tiny model, by the package whose code causes them. Nothing
here has run on a GPU. The last line is a JSON object: projected ratios for Qwen3-4B on an A100, and counts.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --check    # compare the ranking of the arms with CPU times of a small model
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import textwrap
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import torch
import trl.trainer.utils
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen3Config
from trl.kernels import chunked_logprob

import step
from catto.objectives import tiles, token_stats
from catto.training.batches import Batch, Row, block_mask, lay_out_rows
from catto.training.config import CATTOConfig
from catto.training.terms import surrogate_term
from catto.training.trl_compat import TRL_EXTRAS

BF16 = torch.bfloat16
FP32 = torch.float32
# The outputs that TRL's DPOTrainer requests from its head, and the tile size that it uses.
DPO_OUTPUTS = ("entropy", "mean_logits", "is_top1")
CHUNK = 32_768
ARMS = ("dpo", "catto", "shared", "packed")
# Number of pairs in a step.
PAIRS = 4
# Side of the blocks that FlexAttention computes or skips.
ATTENTION_BLOCK = 128


class Card(NamedTuple):
    """Published peaks of a GPU.

    Attributes:
        bf16_flops: Dense FLOP/s of 16-bit products with fp32 sums.
        fp32_flops: FLOP/s of fp32 products.
        bandwidth: Bytes per second.
        memory: Bytes.
    """

    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    memory: int


CARDS = {
    "A100": Card(312e12, 19.5e12, 2.04e12, 80 * 10**9),
    "H100": Card(989e12, 67e12, 3.35e12, 80 * 10**9),
    "RTX 4090": Card(165e12, 82.6e12, 1.01e12, 24 * 10**9),
}
# Assumed shares of the published peaks, and assumed seconds.
PRODUCT_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.8
LAUNCH_SECONDS = 5e-6
SYNC_SECONDS = 20e-6
ASSUMPTIONS = textwrap.fill(
    f"Assumed: products reach {PRODUCT_EFFICIENCY:.0%} of the peak and all other operations "
    f"{BANDWIDTH_EFFICIENCY:.0%} of the bandwidth; a launch takes at least {LAUNCH_SECONDS * 1e6:.0f} us and a "
    f"synchronisation {SYNC_SECONDS * 1e6:.0f} us; bf16 weights; gradient checkpointing (the forward pass of every "
    f"layer runs twice); a precomputed reference; {PAIRS} pairs. Attention computes half of the square of a row "
    "without padding and the whole square of a padded row. With shared prompts or packed rows, it computes the blocks "
    f"of {ATTENTION_BLOCK} x {ATTENTION_BLOCK} that FlexAttention does not skip. Its backward pass costs 2.5 times its "
    "forward pass. The optimizer, TRL's loss and its logs are left out, since every arm has them.",
    width=120,
)

QWEN: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
QWEN_COMMON = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}


def make_rows(prompt: int, shortest: int, longest: int, vocabulary: int = 1000) -> list[Row]:
    """Return the rows of four pairs with random tokens: all chosen responses, then all rejected ones.

    Args:
        prompt: Number of tokens of a prompt.
        shortest: Minimum number of tokens of a response.
        longest: Maximum number of tokens of a response.
        vocabulary: Number of different tokens.
    """
    generator = random.Random(0)
    prompts = [generator.choices(range(vocabulary), k=prompt) for _ in range(PAIRS)]
    rows = []
    for _ in ("chosen", "rejected"):
        for prompt_ids in prompts:
            length = generator.randint(shortest, longest)
            rows.append(Row(prompt_ids, generator.choices(range(vocabulary), k=length)))
    return rows


SHORT_SHAPE = "160 + 64"
LONG_SHAPE = "300 + 400 to 1200"
# Tokens of prompt and response -> rows.
SHAPES = {SHORT_SHAPE: make_rows(160, 64, 64), LONG_SHAPE: make_rows(300, 400, 1200)}


# ---- counting --------------------------------------------------------------------------------------------------------

# Starts of the names of operations that launch no kernel.
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view", "set_", "is_same_size")
# Operations that read only as many elements as they write, not their whole input.
GATHERS = ("gather", "index", "index_select", "embedding")
# Operations that read and change only some elements of their target, as many as their other inputs have.
SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_", "_index_put_impl_")
# Operations whose result the host has to wait for.
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Operation(NamedTuple):
    """A kernel: the FLOPs of its products, the bytes that it moves, and the dtype of the products (else fp32)."""

    name: str
    flops: float
    bytes: float
    dtype: torch.dtype

    def seconds(self, card: Card) -> float:
        """Return the time on a card."""
        peak = card.fp32_flops if self.dtype == FP32 else card.bf16_flops
        product_seconds = self.flops / (PRODUCT_EFFICIENCY * peak)
        memory_seconds = self.bytes / (BANDWIDTH_EFFICIENCY * card.bandwidth)
        return max(product_seconds, memory_seconds, LAUNCH_SECONDS)


@dataclass
class Cost:
    """Operation -> how often it runs."""

    operations: Counter[Operation] = field(default_factory=Counter)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.operations - other.operations)

    def __mul__(self, times: int) -> Cost:
        return Cost(Counter({operation: count * times for operation, count in self.operations.items()}))

    def seconds(self, card: Card) -> float:
        """Return the time of all operations on a card."""
        return sum(count * operation.seconds(card) for operation, count in self.operations.items())

    @property
    def bytes(self) -> float:
        """Bytes that all operations move."""
        return sum(count * operation.bytes for operation, count in self.operations.items())

    def flops(self, dtype: torch.dtype) -> float:
        """Return the FLOPs of the products of a dtype."""
        return sum(count * operation.flops for operation, count in self.operations.items() if operation.dtype == dtype)

    @property
    def launches(self) -> int:
        """Number of kernels."""
        return self.operations.total()

    @property
    def fp32_products(self) -> int:
        """Number of products of fp32 inputs."""
        return sum(count for operation, count in self.operations.items() if operation.flops and operation.dtype == FP32)


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return tensor.numel() * tensor.itemsize


def count_stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor moves. An expanded tensor has less memory than elements."""
    return min(count_bytes(tensor), tensor.untyped_storage().nbytes())


class OperationCounter(TorchDispatchMode):
    """Counts every operation of torch in a `with` block, and follows the memory of the tensors that are made.

    Attributes:
        cost: The operations so far.
        syncs: Package -> number of synchronisations that its code caused.
        live: Bytes of the tensors that were made and not freed.
        history: The value of `live` after every operation.
        born: Storage -> length of the history when it was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()
        self.syncs = Counter[str]()
        self.live = 0
        self.history = [0]
        self.born: Any = WeakIdKeyDictionary()

    def record(self, name: str, flops: float, bytes_: float, dtype: torch.dtype) -> None:
        """Add a kernel. Called directly for kernels that torch does not know."""
        self.cost.operations[Operation(name, flops, bytes_, dtype)] += 1

    def follow_memory(self, storages: Iterable[Any]) -> None:
        """Count the memory of new storages until they are freed."""
        for storage in storages:
            if storage not in self.born:
                self.born[storage] = len(self.history)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.history.append(self.live)

    def _free(self, bytes_: int) -> None:
        self.live -= bytes_

    def find_peak(self, *gradients: Tensor) -> int:
        """Return the peak memory in bytes, without memory from before the block and without the given gradients."""
        gradient_births = []
        for gradient in gradients:
            storage = gradient.untyped_storage()
            gradient_births.append((self.born[storage], storage.nbytes()))
        peak = 0
        for moment, live in enumerate(self.history):
            gradient_bytes = sum(bytes_ for born, bytes_ in gradient_births if moment >= born)
            peak = max(peak, live - gradient_bytes)
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        # An `out` tensor is written, not read.
        inputs = (args, {key: value for key, value in kwargs.items() if key != "out"})
        read = _list_tensors(inputs)
        written = _list_tensors(out)
        indexes_with_mask = name == "index" and any(tensor.dtype == torch.bool for tensor in read[1:])
        if name in SYNCHRONISING or indexes_with_mask:
            self.syncs[find_running_package()] += 1
        if not func.is_view:
            self.follow_memory(tensor.untyped_storage() for tensor in written)
        writes_elements = any(tensor.numel() for tensor in written)
        if func.is_view or name.startswith(NO_KERNEL) or not writes_elements:
            return out
        flops = _count_flops(func, args, out)
        self.record(name, flops, _count_moved_bytes(name, read, written), read[-1].dtype if flops else FP32)
        return out


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _count_flops(func: Any, args: Any, out: Any) -> float:
    """Return the FLOPs of a product; 0 for other operations."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    # The formulas do not accept a dtype, which products with an `out_dtype` have as an argument.
    formula_args = [arg for arg in args if not isinstance(arg, torch.dtype)]
    return float(formula(*formula_args, out_val=out))


def _count_moved_bytes(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in GATHERS:
        return 2 * sum(map(count_stored_bytes, written))
    if name in SCATTERS:
        return 3 * sum(map(count_stored_bytes, read[1:]))
    return sum(map(count_stored_bytes, read)) + sum(map(count_stored_bytes, written))


def find_running_package() -> str:
    """Return the package whose code is running: that of the innermost frame that belongs to a known package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for package in ("catto", "trl", "transformers", "accelerate"):
            if package in parts[-4:-1]:
                return package
        frame = frame.f_back
    return "other"


# The active counters; the last one records the kernels that torch does not know.
ACTIVE_COUNTERS: list[OperationCounter] = []


@contextmanager
def count_with(counter: OperationCounter) -> Iterator[OperationCounter]:
    """Count all operations of the block, including the kernels that torch does not know."""
    ACTIVE_COUNTERS.append(counter)
    with counter:
        yield counter
    ACTIVE_COUNTERS.pop()


# ---- the model -------------------------------------------------------------------------------------------------------


class CountedAttention(torch.autograd.Function):
    """Attention as one fused kernel in each direction.

    Attributes:
        computed_pairs: Number of pairs (query, key) that are computed in a batch. Set before the model runs.
    """

    computed_pairs = 0.0

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Record the forward kernel and return an empty output."""
        ctx.save_for_backward(query, key, value)
        out = torch.empty_like(query).transpose(1, 2)
        CountedAttention.record_kernel("attention", 4.0, query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Record the backward kernel and return empty gradients."""
        query, key, value = ctx.saved_tensors
        CountedAttention.record_kernel("attention backward", 10.0, query, key, value)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    @staticmethod
    def record_kernel(name: str, flops_per_pair: float, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record the kernel of one direction.

        Args:
            name: Name of the kernel.
            flops_per_pair: FLOPs per pair, head and dimension: 4 forward for two products, 10 backward for five.
            query: (B, heads, L, head width).
            key: (B, key heads, L, head width).
            value: As `key`.
        """
        heads = query.shape[1]
        head_width = query.shape[3]
        flops = flops_per_pair * CountedAttention.computed_pairs * heads * head_width
        # The forward pass reads query, key and value, and writes an output of the query's size. Bytes grow with FLOPs.
        forward_bytes = sum(map(count_stored_bytes, (query, query, key, value)))
        moved = flops_per_pair / 4.0 * forward_bytes
        ACTIVE_COUNTERS[-1].record(name, flops, moved, query.dtype)


def run_counted_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Run `CountedAttention` with the signature that transformers expects."""
    return CountedAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]


AttentionInterface.register("counted", run_counted_attention)
AttentionMaskInterface.register("counted", lambda *_, **__: None)


def count_computed_pairs(batch: Batch, *, skips_blocks: bool) -> float:
    """Return the number of pairs (query, key) that attention computes in a batch.

    Args:
        batch: The batch.
        skips_blocks: Whether masked blocks are skipped, as FlexAttention does.
    """
    lines, length = batch.input_ids.shape
    has_block_mask = batch.shared or batch.packed
    if has_block_mask and skips_blocks:
        mask = block_mask(batch)
        blocks = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
        return float(blocks) * ATTENTION_BLOCK**2
    has_padding = int(batch.attention_mask.min()) == 0
    # Only the kernel for causal attention without another mask leaves out the pairs above the diagonal.
    computed_share = 1.0 if has_block_mask or has_padding else 0.5
    return lines * length**2 * computed_share


def count_layers(config: Any, batch: Batch, dtype: torch.dtype, *, gpu: bool) -> Cost:
    """Count the forward and backward pass through the embedding and all layers.

    Args:
        config: Configuration of the model.
        batch: The batch.
        dtype: Dtype of the weights.
        gpu: Whether to count as on a GPU, with FlexAttention and gradient checkpointing.
    """
    CountedAttention.computed_pairs = count_computed_pairs(batch, skips_blocks=gpu)
    one_layer_forward, one_layer_backward = count_model(config, batch, dtype, layers=1)
    two_layers_forward, two_layers_backward = count_model(config, batch, dtype, layers=2)
    # The cost of one layer is the difference of two models.
    layer_forward = two_layers_forward - one_layer_forward
    layer_backward = two_layers_backward - one_layer_backward
    layers = config.num_hidden_layers
    recomputed = layer_forward * layers if gpu else Cost()
    one_layer_model = one_layer_forward + one_layer_backward
    return one_layer_model + (layer_forward + layer_backward) * (layers - 1) + recomputed


def count_model(config: Any, batch: Batch, dtype: torch.dtype, *, layers: int) -> tuple[Cost, Cost]:
    """Count the forward and the backward pass of a model with this number of layers, without its head."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = layers
    small.layer_types = ["full_attention"] * layers
    with FakeTensorMode() as fake:
        model = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation="counted").base_model
        ids = fake.from_tensor(batch.input_ids)
        positions = fake.from_tensor(batch.position_ids)
        with count_with(OperationCounter()) as forward:
            hidden = model(ids, position_ids=positions, use_cache=False).last_hidden_state
        with count_with(OperationCounter()) as backward:
            hidden.backward(torch.empty_like(hidden))
    return forward.cost, backward.cost


# ---- the heads -------------------------------------------------------------------------------------------------------


class HeadCost(NamedTuple):
    """The operations of a head, and its peak memory in bytes beyond its inputs and their gradients."""

    cost: Cost
    memory: int


def count_head(head: str, config: Any, batch: Batch, dtype: torch.dtype) -> HeadCost:
    """Count the forward and backward pass through an LM head.

    Args:
        head: `dpo` for TRL's, `catto` for ours with the calibration term, or `dense` for one with all logits.
        config: Configuration of the model.
        batch: The batch.
        dtype: Dtype of the hidden states and the weight.
    """
    with FakeTensorMode() as fake:
        hidden = torch.empty(len(batch.targets), config.hidden_size, dtype=dtype, requires_grad=True)
        weight = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, requires_grad=True)
        targets = fake.from_tensor(batch.targets)
        place = fake.from_tensor(batch.trl_index)
        with count_with(OperationCounter()) as counter:
            if head == "dpo":
                options = (1.0, CHUNK, None, 1.0, DPO_OUTPUTS)
                loss = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)[0].sum()
            elif head == "dense":
                loss = compute_dense_loss(hidden, weight, targets)
            else:
                # The statistics stay in memory during the backward pass, so this is not a function of its own.
                stats = token_stats(hidden, weight, targets, extras=TRL_EXTRAS, masked=False)
                zeros = stats.target.new_zeros(len(batch.rows), find_row_length(batch.rows))
                where = tuple(place.unbind(-1))
                row_stats = stats.map(lambda values: zeros.index_put(where, values))
                loss = row_stats.target.sum() + 0.1 * surrogate_term(row_stats, row_stats.target != 0, CONFIG).loss
            loss.backward()
    return HeadCost(counter.cost, counter.find_peak(hidden.grad, weight.grad))  # type: ignore[arg-type]


def compute_dense_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of the log-probabilities of target and rival, from all logits."""
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    index = targets.unsqueeze(-1)
    return logprobs.gather(-1, index).sum() + logprobs.scatter(-1, index, -torch.inf).amax(-1).exp().sum()


def find_row_length(rows: Sequence[Row]) -> int:
    """Return the number of predicted positions in the longest row."""
    return max(len(row.prompt) + len(row.completion) for row in rows) - 1


CONFIG = CATTOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to="none")


@contextmanager
def triton_kernels() -> Iterator[None]:
    """Count TRL's head as it runs on a GPU: one kernel reads a tile, and in the backward pass also overwrites it."""

    def forward(tile: Tensor, *_: Any, **__: Any) -> None:
        ACTIVE_COUNTERS[-1].record("triton forward", 0.0, count_bytes(tile), FP32)

    def backward(tile: Tensor, *_: Any, **__: Any) -> None:
        ACTIVE_COUNTERS[-1].record("triton backward", 0.0, 2 * count_bytes(tile), FP32)

    def addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
        torch.addmm(total, a, b, out_dtype=FP32, out=total)

    replacements = {"_forward_tile": forward, "_backward_tile": backward, "_addmm_fp32": addmm}
    with mock.patch.multiple(chunked_logprob, **replacements):
        yield


# ---- steps of Qwen3 --------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, bool]] = {
    "dpo": {"shared": False},
    "catto": {"shared": False},
    "shared": {"shared": True, "packed": True},
    "packed": {"shared": False, "packed": True},
}
# Arm -> its head.
HEADS = {"dpo": "dpo", "catto": "catto", "shared": "catto", "packed": "catto"}


@cache
def make_qwen_config(model: str) -> Qwen3Config:
    return Qwen3Config(**QWEN[model], **QWEN_COMMON)


@cache
def count_qwen_layers(model: str, shape: str, arm: str) -> Cost:
    """Count the layers of a step on a GPU."""
    rows = SHAPES[shape]
    batch = lay_out_rows(rows, [], len(rows), 0, **LAYOUTS[arm])
    return count_layers(make_qwen_config(model), batch, BF16, gpu=True)


@cache
def count_qwen_head(head: str, model: str, shape: str, memory: int) -> HeadCost:
    """Count a head on a GPU with this many bytes of memory, which determine the size of our tiles.

    The fake tensors are on the CPU, so our head is told to choose its dtypes and tiles for a GPU.
    """
    rows = SHAPES[shape]
    batch = lay_out_rows(rows, [], len(rows), 0, shared=False)
    mixed_products = mock.patch.object(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"})
    device_memory = mock.patch.object(tiles, "device_memory", return_value=memory)
    with mixed_products, device_memory, triton_kernels():
        return count_head(head, make_qwen_config(model), batch, BF16)


def count_qwen_step(arm: str, model: str, shape: str, memory: int) -> Cost:
    """Count a whole step: layers and head."""
    # `catto` has the same layout as `dpo`, whose count is cached.
    layers = count_qwen_layers(model, shape, "dpo" if arm == "catto" else arm)
    return layers + count_qwen_head(HEADS[arm], model, shape, memory).cost


# ---- synchronisations ------------------------------------------------------------------------------------------------


def score_responses_only() -> Any:
    """Return a patch that lets TRL score only the responses, as it does where Triton runs."""
    return mock.patch.object(trl.trainer.utils, "_use_triton", return_value=True)


def count_synchronisations(arm: str) -> Counter[str]:
    """Count the synchronisations of a real step of a tiny model, by package."""
    with score_responses_only():
        trainer = step.make_trainer(step.Shape(prompt=8, vocabulary=64, layers=1))
        batch = step.make_batch(trainer, arm)
        with OperationCounter() as counter:
            step.take_step(trainer, arm, batch)
    return counter.syncs


# ---- against measured time -------------------------------------------------------------------------------------------


CHECKED_SHAPE = step.Shape(prompt=160, vocabulary=8192, layers=2)
# Bandwidth of the CPU that the projection assumes.
CPU_BANDWIDTH = 8e9


def check_ranking(repeats: int = 3) -> bool:
    """Compare the projected ranking of the arms with CPU times of a small fp32 model.

    Returns:
        Whether all pairs of arms whose projected times differ by more than a tenth are measured in the same order.
    """
    torch.set_num_threads(1)
    with score_responses_only():
        trainer = step.make_trainer(CHECKED_SHAPE)
        batches = {arm: step.make_batch(trainer, arm) for arm in ARMS}
        measured = measure_cpu_seconds(trainer, batches, repeats)
    peak = measure_cpu_flops()
    card = Card(peak / PRODUCT_EFFICIENCY, peak / PRODUCT_EFFICIENCY, CPU_BANDWIDTH, 0)
    projected = {}
    for arm in ARMS:
        batch = batches[arm]["catto"]["layout"]
        config = trainer.model.config
        head_cost = count_head(HEADS[arm], config, batch, FP32).cost
        projected[arm] = (head_cost + count_layers(config, batch, FP32, gpu=False)).seconds(card)
    machine = f"one core, {peak / 1e9:.0f} GFLOP/s, {CHECKED_SHAPE.layers} layers"
    print(f"{'arm':8}{'projected s':>12}{'measured s':>12}   ({machine})")
    for arm in ARMS:
        print(f"{arm:8}{projected[arm]:12.3f}{measured[arm]:12.3f}")
    compared = 0
    wrong = []
    for faster in ARMS:
        for slower in ARMS:
            if projected[faster] < 0.9 * projected[slower]:
                compared += 1
                if measured[faster] >= measured[slower]:
                    wrong.append(f"{faster} < {slower}")
    wrong_text = f"; not {', '.join(wrong)}" if wrong else ""
    print(f"{compared - len(wrong)} of {compared} orders agree{wrong_text}")
    return not wrong


def measure_cpu_seconds(trainer: Any, batches: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """Return arm -> median processor seconds of a step, after one warm-up round."""
    times: dict[str, list[float]] = {arm: [] for arm in batches}
    for _ in range(repeats + 1):
        for arm, batch in batches.items():
            start = time.process_time()
            step.take_step(trainer, arm, batch)
            times[arm].append(time.process_time() - start)
    return {arm: statistics.median(seconds[1:]) for arm, seconds in times.items()}


def measure_cpu_flops() -> float:
    """Return the FLOP/s that fp32 products reach on this machine."""
    size = 1024
    products = 5
    matrix = torch.randn(size, size)
    start = time.process_time()
    for _ in range(products):
        matrix = matrix @ matrix / 32
    return products * 2 * size**3 / (time.process_time() - start)


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """The projected times of the steps of a model.

    Attributes:
        model: A name of QWEN.
        synchronisations: Arm -> package -> number of synchronisations in a step.
    """

    model: str
    synchronisations: Mapping[str, Counter[str]]

    def seconds(self, arm: str, shape: str, card: str) -> float:
        """Return the projected time of a step."""
        waiting = self.synchronisations[arm].total() * SYNC_SECONDS
        return count_qwen_step(arm, self.model, shape, CARDS[card].memory).seconds(CARDS[card]) + waiting

    def ratio(self, arm: str, shape: str, card: str) -> float:
        """Return the projected time of a step divided by that of TRL's DPO."""
        return self.seconds(arm, shape, card) / self.seconds("dpo", shape, card)

    def print_table(self, shape: str, cards: Sequence[str]) -> None:
        """Print one line per arm; head MB and its ratio to the dense head are for an A100."""
        memory = CARDS["A100"].memory
        dense_memory = count_qwen_head("dense", self.model, shape, memory).memory
        print(f"\n{self.model}, {PAIRS} pairs of {shape} tokens")
        card_heads = "".join(f"{card + ' ms':>15}{'ratio':>7}" for card in cards)
        print(f"{'arm':8}{'bf16 TFLOP':>11}{'fp32':>6}{'GB':>7}{'launches':>10}{'head MB':>9}{'dense':>7}{card_heads}")
        for arm in ARMS:
            cost = count_qwen_step(arm, self.model, shape, memory)
            head_memory = count_qwen_head(HEADS[arm], self.model, shape, memory).memory
            line = f"{arm:8}{cost.flops(BF16) / 1e12:11.1f}{cost.flops(FP32) / 1e12:6.1f}{cost.bytes / 1e9:7.0f}"
            line += f"{cost.launches:10}{head_memory / 1e6:9.0f}{head_memory / dense_memory:7.3f}"
            for card in cards:
                line += f"{1e3 * self.seconds(arm, shape, card):15.0f}{self.ratio(arm, shape, card):7.3f}"
            print(line, flush=True)


def count_head_with_cpu_tiles(model: str) -> Cost:
    """Count our head with the tiles and the fp32 products that it uses on a CPU."""
    rows = SHAPES[SHORT_SHAPE]
    batch = lay_out_rows(rows, [], len(rows), 0, shared=False)
    with mock.patch.object(tiles, "MIXED_PRODUCT_DEVICES", set()):
        return count_head("catto", make_qwen_config(model), batch, BF16).cost


def summarize(projection: Projection, head: Cost, cpu_head: Cost) -> dict[str, float]:
    """Return the numbers of the last line, for an A100.

    Args:
        projection: The projection of a model.
        head: The operations of our head.
        cpu_head: The operations of our head with a CPU's tiles.
    """
    memory = CARDS["A100"].memory
    head_memory_ratios = []
    for shape in SHAPES:
        ours = count_qwen_head("catto", projection.model, shape, memory).memory
        dense = count_qwen_head("dense", projection.model, shape, memory).memory
        head_memory_ratios.append(ours / dense)
    return {
        "catto_vs_dpo": max(projection.ratio("catto", shape, "A100") for shape in SHAPES),
        "shared_vs_dpo": projection.ratio("shared", SHORT_SHAPE, "A100"),
        "shared_vs_dpo_long": projection.ratio("shared", LONG_SHAPE, "A100"),
        "packed_vs_dpo_long": projection.ratio("packed", LONG_SHAPE, "A100"),
        "head_memory_vs_dense": max(head_memory_ratios),
        "head_launches": head.launches,
        "head_launches_before": cpu_head.launches,
        "fp32_vocabulary_products": head.fp32_products,
        "data_dependent_ops": max(syncs["catto"] for syncs in projection.synchronisations.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the ranking of the arms with measured CPU times")
    parser.add_argument("--model", choices=QWEN, help="project only this model")
    options = parser.parse_args()
    if options.check:
        sys.exit(not check_ranking())
    synchronisations = {arm: count_synchronisations(arm) for arm in ARMS}
    print(ASSUMPTIONS)
    sync_texts = [f"{arm} {dict(syncs)}" for arm, syncs in synchronisations.items()]
    print("Synchronisations per step: " + "; ".join(sync_texts))
    models = [options.model] if options.model else list(QWEN)
    for model in models:
        # The larger models do not fit on an RTX 4090.
        cards = [card for card in CARDS if model == "Qwen3-0.6B" or card != "RTX 4090"]
        for shape in SHAPES:
            Projection(model, synchronisations).print_table(shape, cards)
    projection = Projection(options.model or "Qwen3-4B", synchronisations)
    card = CARDS["A100"]
    head = count_qwen_head("catto", projection.model, SHORT_SHAPE, card.memory).cost
    cpu_head = count_head_with_cpu_tiles(projection.model)
    cpu_text = f"{cpu_head.launches} launches and {1e3 * cpu_head.seconds(card):.0f} ms"
    gpu_text = f"{head.launches} and {1e3 * head.seconds(card):.0f} ms"
    print(
        f"\n{projection.model}'s head, {SHORT_SHAPE}, on an A100: with a CPU's tiles and fp32 products {cpu_text}, "
        f"with a GPU's {gpu_text}"
    )
    summary = summarize(projection, head, cpu_head)
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    datasets.disable_progress_bars()
    main()
