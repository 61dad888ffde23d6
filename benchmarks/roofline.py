"""Project a training step on a GPU from what it computes, on a machine without one.

Every operation of a step runs on fake tensors, which have shapes and dtypes but no values, and is counted: FLOPs by the
dtype of the inputs, bytes read and written, launches. Its time is the largest of FLOPs over the card's published peak,
bytes over its bandwidth, and the cost of a launch. Arms: TRL's DPO step, ours, ours with shared prompts, ours packed.
TRL's head is costed by its Triton kernels, which score only the responses. Synchronisations are counted in a real step
of a tiny model, by the package whose code asked for them. Nothing here has run on a GPU. The last line is one JSON
object: projected ratios of Qwen3-4B on an A100, and counts.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --check    # the ranking of the arms against measured CPU time, on a small model
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
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

BF16, FP32 = torch.bfloat16, torch.float32
DPO_OUTPUTS, CHUNK = ("entropy", "mean_logits", "is_top1"), 32_768  # what TRL's DPOTrainer asks its head for
ARMS = ("dpo", "catto", "shared", "packed")


class Card(NamedTuple):
    """Published peaks: dense FLOP/s of 16-bit products with fp32 sums and of fp32 products, bytes/s, bytes."""

    low: float
    full: float
    bandwidth: float
    memory: int


CARDS = {
    "A100": Card(312e12, 19.5e12, 2.04e12, 80 * 10**9),
    "H100": Card(989e12, 67e12, 3.35e12, 80 * 10**9),
    "RTX 4090": Card(165e12, 82.6e12, 1.01e12, 24 * 10**9),
}
PRODUCTS, BANDWIDTH, LAUNCH, SYNC = 0.7, 0.8, 5e-6, 20e-6
ASSUMED = f"""\
Assumed: products reach {PRODUCTS:.0%} of the peak and the rest {BANDWIDTH:.0%} of the bandwidth; a launch takes at
least {LAUNCH * 1e6:.0f} us and a synchronisation {SYNC * 1e6:.0f} us; bf16 weights; gradient checkpointing (every
layer's forward runs twice), the reference precomputed, 4 pairs. Attention computes half of the square of a row
without padding, the whole square of a padded one, and with shared prompts or packed rows the blocks of 128 x 128 that
FlexAttention does not skip; its backward costs 2.5 times its forward. Left out, since every arm has it: the optimizer,
TRL's loss and its logs."""

QWEN: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}


def pairs(prompt: int, shortest: int, longest: int, vocabulary: int = 1000) -> list[Row]:
    """4 prompts with a chosen response each, then the same with the rejected ones."""
    draw = random.Random(0)
    prompts = [draw.choices(range(vocabulary), k=prompt) for _ in range(4)]
    return [Row(p, draw.choices(range(vocabulary), k=draw.randint(shortest, longest))) for _ in "+-" for p in prompts]


SHAPES = {"160 + 64": pairs(160, 64, 64), "300 + 400 to 1200": pairs(300, 400, 1200)}


# ---- counting --------------------------------------------------------------------------------------------------------

NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view", "set_", "is_same_size")
TAKES = ("gather", "index", "index_select", "embedding")  # read as much as they write, whatever they choose from
PUTS = ("scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_", "_index_put_impl_")
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Operation(NamedTuple):
    """What one kernel computes and moves."""

    name: str
    flops: float
    bytes: float
    dtype: torch.dtype


@dataclass
class Cost:
    """Operations with how often each runs."""

    operations: Counter[Operation] = field(default_factory=Counter)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.operations - other.operations)

    def __mul__(self, times: int) -> Cost:
        return Cost(Counter({operation: n * times for operation, n in self.operations.items()}))

    def seconds(self, card: Card) -> float:
        """Time on a card."""

        def one(operation: Operation) -> float:
            peak = card.full if operation.dtype == FP32 else card.low
            moved = operation.bytes / (BANDWIDTH * card.bandwidth)
            return max(operation.flops / (PRODUCTS * peak), moved, LAUNCH)

        return sum(n * one(operation) for operation, n in self.operations.items())

    def total(self, of: str) -> float:
        """Sum of a field."""
        return sum(n * getattr(operation, of) for operation, n in self.operations.items())

    def flops(self, dtype: torch.dtype) -> float:
        """FLOPs of products of this dtype."""
        return sum(n * operation.flops for operation, n in self.operations.items() if operation.dtype == dtype)

    @property
    def launches(self) -> int:
        """Kernels."""
        return self.operations.total()

    @property
    def fp32_products(self) -> int:
        """Products whose inputs are fp32."""
        return sum(n for operation, n in self.operations.items() if operation.flops and operation.dtype == FP32)


def elements(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.itemsize


def size(tensor: Tensor) -> int:
    """Bytes that reading it moves: an expanded tensor has less memory than elements."""
    return min(elements(tensor), tensor.untyped_storage().nbytes())


class Count(TorchDispatchMode):
    """Counts every operation; `record` adds a kernel that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.cost, self.syncs = Cost(), Counter[str]()
        self.live, self.history = 0, [0]  # bytes of the tensors made and not freed, after every operation
        self.born: Any = WeakIdKeyDictionary()  # storage -> how long the history was

    def record(self, name: str, flops: float, bytes_: float, dtype: torch.dtype) -> None:
        """Add a kernel."""
        self.cost.operations[Operation(name, flops, bytes_, dtype)] += 1

    def hold(self, storages: Iterable[Any]) -> None:
        """Follow new tensors until they are freed."""
        for storage in storages:
            if storage not in self.born:
                self.born[storage] = len(self.history)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.history.append(self.live)

    def free(self, bytes_: int) -> None:
        """A tensor is gone."""
        self.live -= bytes_

    def peak(self, *gradients: Tensor) -> int:
        """Bytes held at most, beyond what was there before and the gradients that stay."""
        stay = [(self.born[g.untyped_storage()], g.untyped_storage().nbytes()) for g in gradients]
        return max(live - sum(n for born, n in stay if at >= born) for at, live in enumerate(self.history))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        read = [x for x in tree_leaves((args, {k: v for k, v in kwargs.items() if k != "out"})) if _is_tensor(x)]
        written = [x for x in tree_leaves(out) if _is_tensor(x)]
        if name in SYNCS or (name == "index" and any(x.dtype == torch.bool for x in read[1:])):
            self.syncs[owner()] += 1
        if not func.is_view:
            self.hold(tensor.untyped_storage() for tensor in written)
        if func.is_view or name.startswith(NO_KERNEL) or not any(x.numel() for x in written):
            return out
        counts = flop_registry.get(func.overloadpacket)
        flops = float(counts(*[x for x in args if not isinstance(x, torch.dtype)], out_val=out)) if counts else 0.0
        if name in TAKES:
            moved = 2 * sum(map(size, written))
        elif name in PUTS:
            moved = 3 * sum(map(size, read[1:]))
        else:
            moved = sum(map(size, read)) + sum(map(size, written))
        self.record(name, flops, moved, read[-1].dtype if flops else FP32)
        return out


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def owner() -> str:
    """The package whose code is running: the innermost frame of one that we know."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for package in ("catto", "trl", "transformers", "accelerate"):
            if package in parts[-4:-1]:
                return package
        frame = frame.f_back
    return "other"


# ---- the model -------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """One fused kernel in each direction, of the pairs (query, key) that are computed."""

    pairs = 0.0  # of all lines together

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        out = torch.empty_like(query).transpose(1, 2)
        _Attention.note("attention", 4.0, query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors
        _Attention.note("attention backward", 10.0, query, key, value)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    @staticmethod
    def note(name: str, products: float, query: Tensor, key: Tensor, value: Tensor) -> None:
        heads, width = query.shape[1], query.shape[3]
        moved = products / 2 * sum(map(size, (query, query, key, value))) / 2
        CURRENT[-1].record(name, products * _Attention.pairs * heads * width, moved, query.dtype)


CURRENT: list[Count] = []


@contextmanager
def current(count: Count) -> Iterator[Count]:
    """Count, also the kernels that torch does not know."""
    CURRENT.append(count)
    with count:
        yield count
    CURRENT.pop()


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None  # type: ignore[no-untyped-call]


AttentionInterface.register("counted", attention)
AttentionMaskInterface.register("counted", lambda *_, **__: None)


def attended(batch: Batch, sparse: bool) -> float:
    """Pairs (query, key) that are computed, of all lines together. sparse: whether masked blocks are skipped."""
    lines, length = batch.input_ids.shape
    if (batch.shared or batch.packed) and sparse:
        mask = block_mask(batch)
        blocks = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
        return float(blocks) * 128**2
    masked = batch.shared or batch.packed or int(batch.attention_mask.min()) == 0
    return lines * length**2 * (1.0 if masked else 0.5)


def backbone(config: Any, batch: Batch, dtype: torch.dtype, *, gpu: bool) -> Cost:
    """Forward and backward of all layers; one layer's cost is the difference of two models.

    gpu: with FlexAttention and gradient checkpointing.
    """
    _Attention.pairs = attended(batch, gpu)
    directions = []
    for layers in (1, 2):
        small = copy.deepcopy(config)
        small.num_hidden_layers, small.layer_types = layers, ["full_attention"] * layers
        with FakeTensorMode() as fake:
            model = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation="counted").base_model
            ids, positions = fake.from_tensor(batch.input_ids), fake.from_tensor(batch.position_ids)
            with current(Count()) as forward:
                hidden = model(ids, position_ids=positions, use_cache=False).last_hidden_state
            with current(Count()) as backward:
                hidden.backward(torch.empty_like(hidden))
        directions.append((forward.cost, backward.cost))
    (forward_1, backward_1), (forward_2, backward_2) = directions
    forwards, backwards, layers = forward_2 - forward_1, backward_2 - backward_1, config.num_hidden_layers
    again = forwards * layers if gpu else Cost()
    return forward_1 + backward_1 + (forwards + backwards) * (layers - 1) + again


# ---- the heads -------------------------------------------------------------------------------------------------------


def head(arm: str, config: Any, batch: Batch, dtype: torch.dtype) -> tuple[Cost, int]:
    """The LM head, forward and backward, and the bytes that it needs beyond its inputs and their gradients."""
    with FakeTensorMode() as fake:
        hidden = torch.empty(len(batch.targets), config.hidden_size, dtype=dtype, requires_grad=True)
        weight = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, requires_grad=True)
        targets, place = fake.from_tensor(batch.targets), fake.from_tensor(batch.place)
        with current(Count()) as count:
            if arm == "dpo":
                options = (1.0, CHUNK, None, 1.0, DPO_OUTPUTS)
                loss = chunked_logprob.ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)[0].sum()
            elif arm == "dense":
                log_p, index = (hidden @ weight.T).float().log_softmax(-1), targets.unsqueeze(-1)
                loss = log_p.gather(-1, index).sum() + log_p.scatter(-1, index, -torch.inf).amax(-1).exp().sum()
                del log_p
            else:
                stats = token_stats(hidden, weight, targets, extras=TRL_EXTRAS, masked=False)
                length = max(len(row.prompt) + len(row.completion) for row in batch.rows) - 1
                zeros, where = stats.target.new_zeros(len(batch.rows), length), tuple(place.unbind(-1))
                laid = stats.map(lambda values: zeros.index_put(where, values))
                loss = laid.target.sum() + 0.1 * surrogate_term(laid, laid.target != 0, CONFIG).loss
            loss.backward()
    return count.cost, count.peak(hidden.grad, weight.grad)  # type: ignore[arg-type]


CONFIG = CATTOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to="none")


@contextmanager
def triton_kernels() -> Iterator[None]:
    """TRL's head as it runs on a GPU: one kernel reads a tile, in the backward pass it also overwrites it."""

    def forward(tile: Tensor, *_: Any, **__: Any) -> None:
        CURRENT[-1].record("triton forward", 0.0, elements(tile), FP32)

    def backward(tile: Tensor, *_: Any, **__: Any) -> None:
        CURRENT[-1].record("triton backward", 0.0, 2 * elements(tile), FP32)

    def addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
        torch.addmm(total, a, b, out_dtype=FP32, out=total)

    names = {"_forward_tile": forward, "_backward_tile": backward, "_addmm_fp32": addmm}
    with mock.patch.multiple(chunked_logprob, **names):
        yield


LAYOUTS: dict[str, dict[str, bool]] = {
    "dpo": {"shared": False},
    "catto": {"shared": False},
    "shared": {"shared": True, "packed": True},
    "packed": {"shared": False, "packed": True},
}


@cache
def qwen(name: str) -> Qwen3Config:
    return Qwen3Config(**QWEN[name], **COMMON)


@cache
def layers_of(name: str, shape: str, arm: str) -> Cost:
    rows = SHAPES[shape]
    return backbone(qwen(name), lay_out_rows(rows, [], len(rows), 0, **LAYOUTS[arm]), BF16, gpu=True)


@cache
def head_of(arm: str, name: str, shape: str, memory: int) -> tuple[Cost, int]:
    """Fake tensors of the CPU follow the policy of a GPU that has this much memory."""
    devices = mock.patch.object(tiles, "MIXED_PRODUCTS", {"cpu"})
    rows = SHAPES[shape]
    with devices, mock.patch.object(tiles, "device_memory", return_value=memory), triton_kernels():
        return head(arm, qwen(name), lay_out_rows(rows, [], len(rows), 0, shared=False), BF16)


def step_of(arm: str, name: str, shape: str, memory: int) -> Cost:
    layers = layers_of(name, shape, "dpo" if arm == "catto" else arm)
    return layers + head_of("dpo" if arm == "dpo" else "catto", name, shape, memory)[0]


# ---- synchronisations ------------------------------------------------------------------------------------------------


def synchronisations(arm: str) -> Counter[str]:
    """Of a real step of a tiny model, by package. TRL scores only the responses, as it does where Triton runs."""
    with mock.patch.object(trl.trainer.utils, "_use_triton", return_value=True):
        made = step.trainer(8, 64, 1)
        batch = step.batch_of(made, arm)
        with Count() as count:
            step.take_step(made, arm, batch)
    return count.syncs


# ---- against measured time -------------------------------------------------------------------------------------------


def check(repeats: int = 3) -> bool:
    """Whether arms that the projection separates by a tenth rank alike in measured CPU time, of a small fp32 model."""
    prompt, vocabulary, layers = 160, 8192, 2
    torch.set_num_threads(1)
    with mock.patch.object(trl.trainer.utils, "_use_triton", return_value=True):
        made = step.trainer(prompt, vocabulary, layers)
        batches = {arm: step.batch_of(made, arm) for arm in ARMS}
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(repeats + 1):
            for arm in ARMS:
                start = time.process_time()
                step.take_step(made, arm, batches[arm])
                times[arm].append(time.process_time() - start)
    measured = {arm: statistics.median(values[1:]) for arm, values in times.items()}
    a, flops = torch.randn(1024, 1024), 2 * 1024**3
    start = time.process_time()
    for _ in range(5):
        a = a @ a / 32
    peak = 5 * flops / (time.process_time() - start)
    card = Card(peak / PRODUCTS, peak / PRODUCTS, 8e9, 0)
    projected = {}
    for arm in ARMS:
        layout = batches[arm]["catto"]["layout"]
        cost, _ = head("dpo" if arm == "dpo" else "catto", made.model.config, layout, FP32)
        cost = cost + backbone(made.model.config, layout, FP32, gpu=False)
        projected[arm] = cost.seconds(card)
    print(f"{'arm':8}{'projected s':>12}{'measured s':>12}   (one core, {peak / 1e9:.0f} GFLOP/s, {layers} layers)")
    for arm in ARMS:
        print(f"{arm:8}{projected[arm]:12.3f}{measured[arm]:12.3f}")
    apart = [(x, y) for x in ARMS for y in ARMS if projected[x] < 0.9 * projected[y]]
    wrong = [f"{x} < {y}" for x, y in apart if measured[x] >= measured[y]]
    print(f"{len(apart) - len(wrong)} of {len(apart)} orders agree" + (f"; not {', '.join(wrong)}" if wrong else ""))
    return not wrong


# ---- the report ------------------------------------------------------------------------------------------------------


def show(name: str, shape: str, cards: Iterable[str]) -> None:
    memory = CARDS["A100"].memory
    dense = head_of("dense", name, shape, memory)[1]
    print(f"\n{name}, 4 pairs of {shape} tokens")
    titles = "".join(f"{card + ' ms':>15}{'ratio':>7}" for card in cards)
    print(f"{'arm':8}{'bf16 TFLOP':>11}{'fp32':>6}{'GB':>7}{'launches':>10}{'head MB':>9}{'dense':>7}{titles}")
    for arm in ARMS:
        cost = step_of(arm, name, shape, memory)
        extra = head_of("dpo" if arm == "dpo" else "catto", name, shape, memory)[1]
        line = f"{arm:8}{cost.flops(BF16) / 1e12:11.1f}{cost.flops(FP32) / 1e12:6.1f}{cost.total('bytes') / 1e9:7.0f}"
        line += f"{cost.launches:10}{extra / 1e6:9.0f}{extra / dense:7.3f}"
        for card in cards:
            line += f"{1e3 * seconds(arm, name, shape, card):15.0f}{ratio(arm, name, shape, card):7.3f}"
        print(line, flush=True)


def seconds(arm: str, name: str, shape: str, card: str) -> float:
    waits = sum(SYNCHRONISATIONS[arm].values()) * SYNC
    return step_of(arm, name, shape, CARDS[card].memory).seconds(CARDS[card]) + waits


def ratio(arm: str, name: str, shape: str, card: str) -> float:
    return seconds(arm, name, shape, card) / seconds("dpo", name, shape, card)


SYNCHRONISATIONS: dict[str, Counter[str]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the ranking of the arms with measured CPU time")
    parser.add_argument("--model", choices=QWEN, help="one model only")
    if (options := parser.parse_args()).check:
        sys.exit(not check())
    SYNCHRONISATIONS.update({arm: synchronisations(arm) for arm in ARMS})
    print(ASSUMED)
    print("Synchronisations a step: " + "; ".join(f"{arm} {dict(found)}" for arm, found in SYNCHRONISATIONS.items()))
    for name in [options.model] if options.model else QWEN:
        for shape in SHAPES:
            show(name, shape, [card for card in CARDS if name == "Qwen3-0.6B" or card != "RTX 4090"])
    name, memory = options.model or "Qwen3-4B", CARDS["A100"].memory
    short, long = SHAPES
    with mock.patch.object(tiles, "MIXED_PRODUCTS", set()):
        rows = SHAPES[short]
        before, _ = head("catto", qwen(name), lay_out_rows(rows, [], len(rows), 0, shared=False), BF16)
    ours = head_of("catto", name, short, memory)[0]
    print(
        f"\n{name}'s head, {short}, on an A100: with a CPU's tiles and fp32 products {before.launches} launches and "
        f"{1e3 * before.seconds(CARDS['A100']):.0f} ms, with a GPU's {ours.launches} and "
        f"{1e3 * ours.seconds(CARDS['A100']):.0f} ms"
    )
    summary = {
        "catto_vs_dpo": max(ratio("catto", name, shape, "A100") for shape in SHAPES),
        "shared_vs_dpo": ratio("shared", name, short, "A100"),
        "shared_vs_dpo_long": ratio("shared", name, long, "A100"),
        "packed_vs_dpo_long": ratio("packed", name, long, "A100"),
        "head_memory_vs_dense": max(
            head_of("catto", name, shape, memory)[1] / head_of("dense", name, shape, memory)[1] for shape in SHAPES
        ),
        "head_launches": ours.launches,
        "head_launches_before": before.launches,
        "fp32_vocabulary_products": ours.fp32_products,
        "data_dependent_ops": max(found["catto"] for found in SYNCHRONISATIONS.values()),
    }
    print(json.dumps({key: round(value, 4) for key, value in summary.items()}))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    datasets.disable_progress_bars()
    main()
