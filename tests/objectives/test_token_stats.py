from __future__ import annotations

import sys
import types
from typing import ClassVar

import dense
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from catto.objectives import label_logprobs, tiles, token_stats
from catto.objectives.fused_head import EXTRAS

NAMES = ("target", "rival", "logsumexp", *EXTRAS)
TILES = (1, 3, 7, 1000)
HEADS = (
    {},
    {"softcap": 1.5},
    {"temperature": 0.6},
    {"scale": 0.25},
    {"softcap": 2.0, "scale": 1.7, "temperature": 1.9},
)


def problem(n: int, h: int, v: int, *, bias: bool, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Leaves (hidden, weight, bias?) in float64 and targets."""
    torch.manual_seed(seed)
    shapes = [(n, h), (v, h), (v,)][: 3 if bias else 2]
    leaves = [(2 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    return leaves, torch.randint(v, (n,))


def weighted(values: list[Tensor]) -> Tensor:
    """A loss with another random gradient for every statistic of every token."""
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randn(x.shape, dtype=x.dtype, generator=generator) * x for x in values if x.requires_grad)
    return torch.stack([part.sum() for part in parts]).sum()


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "h", "v", "bias"), [(5, 3, 11, False), (1, 1, 2, True), (9, 8, 23, True)])
def test_values_and_gradients_equal_the_dense_reference(
    n: int, h: int, v: int, bias: bool, tile: int, options: dict[str, float]
) -> None:
    leaves, targets = problem(n, h, v, bias=bias)
    ours = token_stats(*leaves[:2], targets, bias=leaves[2] if bias else None, tile=tile, **options)
    theirs = dense.stats(dense.logits(*leaves, **options), targets)
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name), theirs[name], rtol=0, atol=1e-9, msg=name)
    names = [name for name in NAMES if name != "log_sum_sq"]
    got = torch.autograd.grad(weighted([getattr(ours, name) for name in names]), leaves)
    want = torch.autograd.grad(weighted([theirs[name] for name in names]), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "log_sum_sq"])
def test_gradcheck_of_every_statistic(name: str) -> None:
    leaves, targets = problem(4, 3, 7, bias=True)

    def statistic(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return getattr(token_stats(hidden, weight, targets, bias=bias, tile=3, softcap=3.0), name)

    assert torch.autograd.gradcheck(statistic, leaves, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("tile", TILES)
def test_ready_logits_give_the_same_statistics_and_gradients(tile: int) -> None:
    (hidden, weight), targets = problem(6, 4, 13, bias=False)
    z = (hidden @ weight.T).detach().requires_grad_()
    ours = token_stats(z, None, targets, tile=tile, temperature=0.7)
    theirs = dense.stats(z / 0.7, targets)
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name), theirs[name], rtol=0, atol=1e-9)
    names = [name for name in NAMES if name != "log_sum_sq"]
    got = torch.autograd.grad(weighted([getattr(ours, name) for name in names]), z)
    want = torch.autograd.grad(weighted([theirs[name] for name in names]), z)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_slices_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, targets = problem(7, 4, 11, bias=True)
    results = []
    for tokens in (1024, 2):
        monkeypatch.setattr(tiles, "DEFAULT_ROWS", tokens)
        stats = token_stats(*leaves[:2], targets, bias=leaves[2], tile=5)
        results.append([stats.rival, *torch.autograd.grad(stats.rival.exp().sum() + stats.target.sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_masked_positions_are_not_computed() -> None:
    """Poison in a masked position's hidden state reaches nothing; its statistics are 0 and its gradient too."""
    (hidden, weight), targets = problem(6, 4, 9, bias=False)
    hidden = hidden.detach().view(2, 3, 4).clone()
    targets = targets.view(2, 3).clone()
    targets[0, 1] = targets[1, 2] = -100
    hidden[0, 1] = hidden[1, 2] = torch.nan
    hidden.requires_grad_()
    stats = token_stats(hidden, weight, targets, tile=4)
    kept = targets != -100
    torch.testing.assert_close(stats.target[kept], token_stats(hidden[kept], weight, targets[kept]).target)
    assert stats.target[~kept].tolist() == stats.rival[~kept].tolist() == [0.0, 0.0]
    (stats.target.sum() + stats.rival.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad[~kept].abs().sum() == 0
    assert torch.isfinite(weight.grad).all()


def test_targets_known_to_be_unmasked_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at them on the host would wait for the device."""
    (hidden, weight), targets = problem(6, 4, 9, bias=False)
    expected = token_stats(hidden, weight, targets, tile=4)
    monkeypatch.setattr(Tensor, "__bool__", lambda _: pytest.fail("a tensor was read on the host"))
    ours = token_stats(hidden.view(2, 3, 4), weight, targets.view(2, 3), tile=4, masked=False)
    monkeypatch.undo()
    for name in NAMES:
        assert torch.equal(getattr(ours, name), getattr(expected, name).view(2, 3)), name


def test_all_masked_batch_has_zero_loss_and_a_live_graph() -> None:
    leaves, targets = problem(4, 3, 5, bias=True)
    stats = token_stats(*leaves[:2], torch.full_like(targets, -100), bias=leaves[2], tile=2)
    loss = stats.target.sum() + stats.rival.sum()
    loss.backward()
    assert loss.item() == 0.0
    assert all(leaf.grad is not None and leaf.grad.abs().sum() == 0 for leaf in leaves)


def test_tied_weights_receive_both_gradients() -> None:
    torch.manual_seed(0)
    table = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    inputs, targets = torch.tensor([1, 2, 6, 1]), torch.tensor([2, 6, 1, 0])
    got = torch.autograd.grad(token_stats(table[inputs], table, targets, tile=3).target.sum(), table)
    want = torch.autograd.grad(dense.stats(table[inputs] @ table.T, targets)["target"].sum(), table)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_frozen_weight_gets_no_gradient() -> None:
    (hidden, weight), targets = problem(4, 3, 5, bias=False)
    token_stats(hidden, weight.detach(), targets, tile=2).target.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("gap", [5.0, 17.0, 30.0, 60.0, 90.0])
@pytest.mark.parametrize("target", [0, 1])
def test_log_doubt_keeps_its_digits_where_confidence_rounds_to_one(gap: float, target: int) -> None:
    """From log c in fp32 it would be -inf past a gap of 17; both when the target is on top and when the rival is."""
    z = torch.zeros(1, 6)
    z[0, 0] = gap
    stats = token_stats(z, None, torch.tensor([target]), tile=4)
    want = dense.stats(z.double(), torch.tensor([target]))["log_doubt"]
    torch.testing.assert_close(stats.log_doubt, want.float(), rtol=3e-7, atol=0)


def test_bf16_inputs_equal_fp32_on_the_same_numbers() -> None:
    """bf16 hidden states and weights are exact fp32 numbers, so only the summation order may differ: 1e-5.
    Their gradients are rounded once, at the end: one part in 2^8."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(33, 64).bfloat16(), torch.randn(501, 64).bfloat16()
    targets = torch.randint(501, (33,))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        stats = token_stats(*leaves, targets, tile=100)
        loss = stats.target.sum() + stats.rival.exp().sum() + stats.entropy.sum()
        results.append((stats, torch.autograd.grad(loss, leaves)))
    (low, low_grads), (full, full_grads) = results
    assert low.target.dtype == torch.float32
    for name in NAMES:
        torch.testing.assert_close(getattr(low, name), getattr(full, name), rtol=1e-5, atol=1e-5)
    for a, b in zip(low_grads, full_grads, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=1e-6)


def test_fp32_stays_close_to_float64() -> None:
    """Logits reach 40 here, where fp32 numbers lie 4e-6 apart: a few roundings make 1e-5."""
    leaves, targets = problem(9, 8, 23, bias=False)
    single = [leaf.detach().float() for leaf in leaves]
    exact = token_stats(*(leaf.double() for leaf in single), targets)
    ours = token_stats(*single, targets, tile=5)
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name).double(), getattr(exact, name), rtol=1e-6, atol=1e-5)


def test_tie_goes_to_the_rival_and_the_lowest_id() -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    for target in (1, 2, 3):
        stats = token_stats(z, None, torch.tensor([target]), tile=2)
        assert stats.target == stats.rival
        assert not stats.right
    z = z.clone().requires_grad_()
    token_stats(z, None, torch.tensor([0]), tile=2).rival.sum().backward()
    p = torch.softmax(z.detach(), -1)
    torch.testing.assert_close(z.grad, torch.tensor([[0.0, 1.0, 0.0, 0.0]]) - p)
    z.grad = None
    doubt = token_stats(z, None, torch.tensor([1]), tile=2).log_doubt
    assert doubt is not None
    doubt.sum().backward()  # of all tokens but the rival, which is token 2
    torch.testing.assert_close(z.grad, torch.softmax(z.detach() - torch.tensor([0, 0, torch.inf, 0]), -1) - p)


class LargestTensor(TorchDispatchMode):
    """Remember the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_logits_are_never_held() -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargestTensor() as largest:
        stats = token_stats(hidden, weight, torch.randint(1000, (64,)), tile=50)
        (stats.target + stats.rival + stats.log_doubt + stats.mean_logit + stats.entropy).sum().backward()
    assert largest.elements == weight.numel() < 64 * 1000


@pytest.mark.parametrize("ready", [False, True])
def test_label_logprobs_equal_a_dense_gather(ready: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    positions, labels = torch.tensor([4, 0, 2]), torch.tensor([[1, 2, 3], [7, 1, 0], [10, 9, 8]])
    z = dense.logits(hidden, weight, bias, softcap=2.0, temperature=0.5)
    want = torch.log_softmax(z[torch.arange(3), positions], -1).gather(-1, labels)
    if ready:
        got = label_logprobs(z, None, positions, labels, tile=3)
    else:
        got = label_logprobs(hidden, weight, positions, labels, bias=bias, tile=3, softcap=2.0, temperature=0.5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    weights = torch.rand(3, 3, dtype=torch.float64)
    a = torch.autograd.grad((weights * got.exp()).sum(), (hidden, weight, bias), retain_graph=True)
    b = torch.autograd.grad((weights * want.exp()).sum(), (hidden, weight, bias))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_padded_labels_have_no_probability_and_no_gradient() -> None:
    hidden, weight = torch.randn(2, 1, 3, requires_grad=True), torch.randn(6, 3)
    labels = torch.tensor([[1, 2, -100], [3, 4, 5]])
    got = label_logprobs(hidden, weight, torch.tensor([0, 0]), labels)
    assert got[0, 2] == -torch.inf
    got.exp().sum().backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(5, dtype=torch.long)}, "do not match"),
        ({"weight": torch.zeros(7, 5)}, "do not match"),
        ({"bias": torch.zeros(3)}, r"expected \(7,\)"),
        ({"tile": 0}, "tile >= 1"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"softcap": 0.0}, "softcap > 0"),
        ({"weight": torch.zeros(1, 4)}, "at least 2"),
        ({"extras": ("entropie",)}, "entropie"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"hidden": torch.zeros(4, 4), "weight": torch.zeros(7, 4), "targets": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        token_stats(**(arguments | change))


def test_label_probabilities_sum_to_one_inside_autocast() -> None:
    """Over the whole vocabulary, at logits up to 40: to a few parts in 10^7, with the gradient of fp32 numbers."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 1, 64), 0.7 * torch.randn(50, 64)
    labels, first = torch.arange(50).expand(6, 50), torch.zeros(6, dtype=torch.long)
    results = []
    for mixed in (False, True):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            got = label_logprobs(*leaves, first, labels)
            (got.exp() ** 2).sum().backward()
        results.append((got.detach(), *(leaf.grad for leaf in leaves)))
    assert float((hidden[:, 0] @ weight.T).abs().max()) > 15
    for plain, mixed in zip(*results, strict=True):
        assert torch.equal(plain, mixed)
    total = results[1][0].double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=5e-7)


class _Pieces:
    """DeepSpeed's `GatheredParameters`, in little: a parameter is empty outside of the context and whole inside."""

    AVAILABLE, NOT_AVAILABLE = "available", "not available"
    wholes: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters

    @classmethod
    def cut(cls, parameter: Tensor) -> None:
        cls.wholes[id(parameter)] = parameter.data
        parameter.data, parameter.ds_status = parameter.data.new_empty(0), cls.NOT_AVAILABLE

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.data, parameter.ds_status = self.wholes[id(parameter)], self.AVAILABLE

    def __exit__(self, *_: object) -> None:
        for parameter in self.parameters:
            self.cut(parameter)


@pytest.mark.parametrize("labels", [False, True], ids=["tokens", "labels"])
def test_a_head_in_pieces_is_gathered_in_both_passes(labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of DeepSpeed ZeRO-3; `zero3_run.py` runs the real thing."""
    stand_in = types.SimpleNamespace(GatheredParameters=_Pieces, ZeroParamStatus=_Pieces)
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", stand_in)
    results = []
    for pieces in (False, True):
        leaves, targets = problem(5, 4, 9, bias=True)
        hidden, weight, bias = leaves
        if pieces:
            _Pieces.cut(weight)
            _Pieces.cut(bias)
        if labels:
            ids = torch.stack([targets, (targets + 1) % 9], -1)
            first = torch.zeros(5, dtype=torch.long)
            loss = label_logprobs(hidden.unsqueeze(1), weight, first, ids, bias=bias, tile=4).exp().sum()
        else:
            loss = token_stats(hidden, weight, targets, bias=bias, tile=4).rival.exp().sum()
        if pieces:
            assert weight.numel() == bias.numel() == 0
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for whole, gathered in zip(*results, strict=True):
        assert torch.equal(whole, gathered)
