"""The head as a GPU runs it, on a machine without one.

Values: a CPU has no product of 16-bit numbers with an fp32 result, so one is registered here that widens its inputs.
Counts: `gpu_run.py` takes steps on a pretended device.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pairs
import pytest
import torch
from gpu_run import STEPS, VOCABULARY
from steps import made
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from catto.objectives import fused_head, label_logprobs, tiles, token_stats
from catto.training import forward, monitor
from catto.training.batches import Batch, lay_out_rows
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

NAMES = ("target", "rival", "logsumexp", *fused_head.EXTRAS)
BF16 = torch.bfloat16


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU follow the policy of a GPU."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype != out_dtype == out.dtype  # as cuBLAS requires
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: Any) -> Tensor:
        assert a.dtype == b.dtype != out_dtype == out.dtype == total.dtype
        return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"})
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    yield
    library._destroy()


def problem(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(33, 64), 0.3 * torch.randn(3001, 64)]
    return [leaf.to(dtype).requires_grad_() for leaf in leaves], torch.randint(3001, (33,))


def loss_of(stats: Any) -> Tensor:
    return stats.target.sum() + stats.rival.exp().sum() + stats.entropy.sum()


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("tile", [None, 700])
@pytest.mark.parametrize(("dtype", "autocast"), [(BF16, False), (BF16, True), (torch.float32, True)])
def test_products_of_16_bit_inputs_equal_fp32_products_of_the_same_inputs(
    dtype: torch.dtype, autocast: bool, tile: int | None
) -> None:
    """Statistics to 1e-6 of logits up to 20; gradients to the rounding of the logits' gradient, one part in 2^8."""
    leaves, targets = problem(dtype)
    with torch.autocast("cpu", BF16, enabled=autocast):
        ours = token_stats(*leaves, targets, tile=tile)
    got = torch.autograd.grad(loss_of(ours), leaves)
    rounded = [leaf.detach().bfloat16().float().requires_grad_() for leaf in leaves]
    full = token_stats(*rounded, targets, tile=tile, precision="fp32")
    want = torch.autograd.grad(loss_of(full), rounded)
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name), getattr(full, name), rtol=1e-6, atol=1e-6)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert float((a.float() - b).norm() / b.norm()) < 2**-8


@pytest.mark.usefixtures("mixed")
def test_rounding_fp32_inputs_in_autocast_moves_log_probabilities_little() -> None:
    """The distance that mixed precision costs at all: inputs lose what bf16 cannot hold. Off with `fp32`."""
    leaves, targets = problem(torch.float32)
    exact = token_stats(*leaves, targets, tile=700, precision="fp32")
    with torch.autocast("cpu", BF16):
        ours, fp32 = (token_stats(*leaves, targets, tile=700, precision=p) for p in ("auto", "fp32"))
    for name in NAMES:
        assert torch.equal(getattr(fp32, name), getattr(exact, name))
    distance = float((ours.target - exact.target).detach().abs().max())
    assert 1e-4 < distance < 0.05
    print(f"largest change of a log-probability by rounding the inputs to bf16: {distance:.4f}")


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_label_log_probabilities_come_from_the_same_rounded_inputs(dtype: torch.dtype) -> None:
    (hidden, weight), _ = problem(dtype)
    first, labels = torch.zeros(33, dtype=torch.long), torch.arange(3001).expand(33, 3001)
    with torch.autocast("cpu", BF16):
        ours = label_logprobs(hidden.unsqueeze(1), weight, first, labels)
    want = (hidden.bfloat16().float() @ weight.bfloat16().float().T).log_softmax(-1)
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(ours.double().exp().sum(-1), torch.ones(33).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("devices", "hidden", "weight", "autocast", "precision", "expected"),
    [
        (("cpu",), BF16, BF16, None, "auto", BF16),
        (("cpu",), torch.float32, BF16, None, "auto", BF16),
        (("cpu",), torch.float16, torch.float16, None, "auto", torch.float16),
        (("cpu",), torch.float32, torch.float32, BF16, "auto", BF16),
        (("cpu",), torch.float32, torch.float32, None, "auto", torch.float32),
        (("cpu",), torch.float64, torch.float64, BF16, "auto", torch.float64),
        (("cpu",), BF16, BF16, BF16, "fp32", torch.float32),
        (("cpu",), BF16, None, None, "auto", torch.float32),  # ready logits
        ((), BF16, BF16, BF16, "auto", torch.float32),
        ((), torch.float32, torch.float32, BF16, "auto", torch.float32),
    ],
)
def test_policy(
    devices: tuple[str, ...],
    hidden: torch.dtype,
    weight: torch.dtype | None,
    autocast: torch.dtype | None,
    precision: tiles.Precision,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "MIXED_PRODUCT_DEVICES", set(devices))
    matrix = None if weight is None else torch.zeros(2, 2, dtype=weight)
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        assert tiles.product_dtype(torch.zeros(2, 2, dtype=hidden), matrix, precision) == expected


def test_a_cpu_keeps_fp32_products() -> None:
    assert sorted(tiles.MIXED_PRODUCT_DEVICES) == ["cuda"]


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("precision", ["auto", "fp32"])
@pytest.mark.parametrize("weights", [torch.float32, BF16], ids=["fp32 weights", "bf16 weights"])
def test_policy_and_reference_use_the_same_products(
    weights: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal models have a margin of exactly 0, in each precision; and the option reaches the head."""
    seen, original = [], fused_head.product_dtype

    def watched(*arguments: Any) -> torch.dtype:
        seen.append(original(*arguments))
        return seen[-1]

    monkeypatch.setattr(fused_head, "product_dtype", watched)
    models = {"model": tiny_model(seed=1).to(weights), "ref_model": tiny_model(seed=1).to(weights)}
    trainer = made(CATTOTrainer, CATTOConfig, bf16=True, max_steps=1, head_precision=precision, **models)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/margins"] == 0.0
    assert seen == [BF16 if precision == "auto" else torch.float32] * 2  # the reference's and the policy's


def test_validation_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engines do that score labels after training."""
    seen = []

    def watched(*arguments: Any, precision: tiles.Precision, **rest: Any) -> Tensor:
        seen.append(precision)
        return label_logprobs(*arguments, precision=precision, **rest)

    monkeypatch.setattr(forward, "label_logprobs", watched)
    held_out = make_examples(tiny_tokenizer(), pairs.sft_rows())
    assert np.isfinite(monitor.compute_label_logprobs(tiny_model(), held_out, 0)).all()
    assert seen == ["fp32"]


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "columns"), [(512, 151_936, 19_072), (6_400, 151_936, 12_288), (65_536, 151_936, 1280)]
)
def test_tiles_of_a_gpu_hold_all_tokens_and_little_memory(
    tokens: int, vocabulary: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    assert tiles.tile_shape(tokens, vocabulary, device) == (tiles.DEFAULT_ROWS, tiles.DEFAULT_COLUMNS)
    monkeypatch.setattr(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"})
    monkeypatch.setattr(tiles, "device_memory", lambda _: 80 * 10**9)
    assert tiles.tile_shape(tokens, vocabulary, device) == (tokens, columns)


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    """What `gpu_run.py` counted in a step of every kind; a new interpreter, since autograd's devices are set once."""
    script = Path(__file__).with_name("gpu_run.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_ours_never_makes_the_host_wait_for_the_device(name: str, counted: dict[str, Any]) -> None:
    """No value is read on the host, nothing crosses but the batch, and no product is fp32."""
    step = counted[name]
    assert "error" not in step, step
    batch = [field.name for field in dataclasses.fields(Batch) if field.type == "Tensor"]
    assert step["copies"] == (["_to_copy"] * len(batch) if "stream" in name else [])
    heads, parts = 1 + ("stream" in name or name == "labels"), VOCABULARY // 1024
    assert step["products"] == ["torch.bfloat16"] * heads * parts * 4  # forward, again in the backward, 2 gradients
    # 4 tiles, forward and backward, of one head or two; the term and the layout take the rest.
    assert step["launches"] <= (510 if heads == 1 else 670)


def test_the_projection_counts_what_the_heads_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `benchmarks/roofline.py`: FLOPs by hand, no fp32 product, little memory, the time of one product."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    roofline = importlib.import_module("roofline")
    batch = lay_out_rows(roofline.make_rows(8, 4, 4), [], 8, 0, shared=False)
    config = SimpleNamespace(hidden_size=64, vocab_size=32_768)
    monkeypatch.setattr(tiles, "MIXED_PRODUCT_DEVICES", {"cpu"})
    with roofline.triton_kernels():
        ours, memory = roofline.count_head("catto", config, batch, BF16)
        theirs, _ = roofline.count_head("dpo", config, batch, BF16)
        _, dense = roofline.count_head("dense", config, batch, BF16)
    products = 4 * 2 * 32 * 64 * 32_768  # forward, again in the backward, and two gradients, of 8 x 4 tokens
    assert ours.flops(BF16) == theirs.flops(BF16) == products
    assert ours.fp32_products == theirs.fp32_products == 0
    assert memory < 0.1 * dense
    cost = roofline.Cost(Counter({roofline.Operation("mm", 312e12, 1.0, BF16): 3}))
    assert cost.seconds(roofline.CARDS["A100"]) == pytest.approx(3 / roofline.PRODUCT_EFFICIENCY)
