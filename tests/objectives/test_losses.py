from __future__ import annotations

import math

import dense
import pytest
import torch
from torch import Tensor

from catto.objectives import (
    TokenStats,
    bce_loss,
    brier_loss,
    catto_loss,
    l1_loss,
    outcome_loss,
    rcft_loss,
    smoothed_nll,
    token_stats,
)
from catto.objectives.losses import confidence_bin, spread_targets

LOSSES = {"catto": catto_loss, "bce": bce_loss, "l1": l1_loss, "brier": brier_loss}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def stats_of(probabilities: list[list[float]], targets: list[int]) -> TokenStats:
    """One response: a row of probabilities a token."""
    z = torch.tensor([probabilities], dtype=torch.float64).log()
    return token_stats(z, None, torch.tensor([targets]))


def test_catto_on_a_three_token_vocabulary() -> None:
    """p = (0.6, 0.3, 0.1).
    Target 0: z~ = sigmoid(0.3) = 0.5744425, l = z~ 0.4 + (1 - z~) 0.6 = 0.6 - 0.2 z~ = 0.4851115.
    Target 1: z~ = sigmoid(-0.3) = 0.4255575, c stays 0.6,  l = 0.6 - 0.2 z~ = 0.5148885.
    Target 2: z~ = sigmoid(-0.5) = 0.3775407,               l = 0.6 - 0.2 z~ = 0.5244919.
    The response's loss is their mean, 0.5081640; dispreferred: 1 - that."""
    p = [0.6, 0.3, 0.1]
    expected = [0.6 - 0.2 * sigmoid(m) for m in (0.3, -0.3, -0.5)]
    assert expected == pytest.approx([0.4851115, 0.5148885, 0.5244919], abs=1e-7)
    stats, mask = stats_of([p, p, p], [0, 1, 2]), torch.ones(1, 3)
    assert catto_loss(stats, mask).item() == pytest.approx(0.5081640, abs=1e-7)
    assert catto_loss(stats, mask, preferred=False).item() == pytest.approx(1 - 0.5081640, abs=1e-7)


def test_bce_l1_and_brier_on_a_three_token_vocabulary() -> None:
    """p = (0.6, 0.3, 0.1), target 0: c = 0.6, s = sigmoid(0.3)."""
    s, stats, mask = sigmoid(0.3), stats_of([[0.6, 0.3, 0.1]], [0]), torch.ones(1, 1)
    assert bce_loss(stats, mask).item() == pytest.approx(-s * math.log(0.6) - (1 - s) * math.log(0.4), abs=1e-12)
    assert l1_loss(stats, mask).item() == pytest.approx(0.6 - s, abs=1e-12)
    assert brier_loss(stats, mask, preferred=False).item() == pytest.approx((0.6 - (1 - s)) ** 2, abs=1e-12)


def test_bce_sums_and_the_others_average() -> None:
    p = [0.6, 0.3, 0.1]
    one, two = stats_of([p], [0]), stats_of([p, p], [0, 0])
    single, double = torch.ones(1, 1), torch.ones(1, 2)
    assert bce_loss(two, double).item() == pytest.approx(2 * bce_loss(one, single).item())
    assert bce_loss(two, double, reduce="mean").item() == pytest.approx(bce_loss(one, single).item())
    assert catto_loss(two, double).item() == pytest.approx(catto_loss(one, single).item())


def reference(name: str, z: Tensor, targets: Tensor, mask: Tensor, preferred: bool, detach: bool) -> Tensor:
    """The losses from full probabilities, written apart from the product's code."""
    p = torch.softmax(z, -1)
    p_t = p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    p_r = p.scatter(-1, targets.unsqueeze(-1), 0.0).amax(-1)
    c, s = p.amax(-1), torch.sigmoid(p_t - p_r)
    s = s.detach() if detach else s
    s = s if preferred else 1 - s
    token = {
        "catto": s * (1 - c) + (1 - s) * c,
        "bce": -(s * c.log() + (1 - s) * (1 - c).log()),
        "l1": (c - s).abs(),
        "brier": (c - s) ** 2,
    }[name]
    total = (token * mask).sum(-1)
    return total if name == "bce" else total / mask.sum(-1)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("preferred", [True, False])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("tile", [1, 3, 7, 100])
def test_loss_and_gradient_equal_the_dense_reference(name: str, preferred: bool, detach: bool, tile: int) -> None:
    torch.manual_seed(3)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (3, 5))
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    ignored = targets.masked_fill(~mask, -100)
    stats = token_stats(hidden, weight, ignored, tile=tile)
    ours = LOSSES[name](stats, mask, preferred=preferred, detach_surrogate=detach)
    theirs = reference(name, dense.logits(hidden, weight), targets, mask, preferred, detach)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    each = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    got = torch.autograd.grad((each * ours).sum(), (hidden, weight))
    want = torch.autograd.grad((each * theirs).sum(), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck_of_every_loss(name: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    targets, mask = torch.randint(6, (2, 3)), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert torch.autograd.gradcheck(
        lambda h, w: LOSSES[name](token_stats(h, w, targets, tile=4), mask), (hidden, weight)
    )


def test_mean_is_per_response_and_never_over_the_batch() -> None:
    """Responses of 1 and 3 tokens with token losses a and b: (a + b) / 2, not (a + 3 b) / 4."""
    low, high = [0.9, 0.05, 0.05], [0.4, 0.35, 0.25]
    z = torch.tensor([[low, low, low], [high, high, high]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss = catto_loss(token_stats(z, None, torch.zeros(2, 3, dtype=torch.long)), mask)
    a = catto_loss(stats_of([low], [0]), torch.ones(1, 1))
    b = catto_loss(stats_of([high], [0]), torch.ones(1, 1))
    torch.testing.assert_close(loss, torch.cat([a, b]), rtol=0, atol=1e-12)


def test_response_without_tokens_costs_nothing() -> None:
    stats = stats_of([[0.6, 0.3, 0.1]], [0])
    assert all(loss(stats, torch.zeros(1, 1)).item() == 0 for loss in LOSSES.values())


def test_bce_is_finite_and_clamped_where_confidence_rounds_to_one() -> None:
    """At a gap of 300 in fp32 log(1 - c) is -298.9 by value and counts as -100; its gradient is 0 there."""
    z = torch.tensor([[[300.0, 0.0, 0.0, 0.0]]], requires_grad=True)
    loss = bce_loss(token_stats(z, None, torch.tensor([[0]])), torch.ones(1, 1))
    assert loss.item() == pytest.approx((1 - sigmoid(1.0)) * 100, rel=1e-6)
    loss.backward()
    assert torch.isfinite(z.grad).all()


def test_bce_says_which_extra_it_misses() -> None:
    stats = token_stats(torch.zeros(1, 1, 3), None, torch.tensor([[0]]), extras=())
    with pytest.raises(ValueError, match="log_doubt"):
        bce_loss(stats, torch.ones(1, 1))


def test_outcome_brier_and_log_by_hand() -> None:
    """P = (0.5, 0.2, 0.1), gold 1: 0.25 + 0.64 + 0.01 = 0.90; log: -ln 0.2. The missing 0.2 is on other tokens."""
    log_p = torch.tensor([[0.5, 0.2, 0.1]], dtype=torch.float64).log()
    gold = torch.tensor([1])
    assert outcome_loss(log_p, gold, score="brier").item() == pytest.approx(0.90, abs=1e-12)
    assert outcome_loss(log_p, gold).item() == pytest.approx(-math.log(0.2), abs=1e-12)
    weighted = outcome_loss(log_p, gold, score="brier", weights=torch.tensor([0.25]))
    assert weighted.item() == pytest.approx(0.225, abs=1e-12)


@pytest.mark.parametrize("score", ["brier", "log"])
def test_outcome_ignores_padded_labels_in_value_and_gradient(score: str) -> None:
    short = torch.tensor([[0.5, 0.3]], dtype=torch.float64).log().requires_grad_()
    padded = torch.cat([short, torch.full((1, 2), -torch.inf, dtype=torch.float64)], -1)
    gold = torch.tensor([0])
    loss = outcome_loss(padded, gold, score=score)
    torch.testing.assert_close(loss, outcome_loss(short, gold, score=score))
    assert torch.isfinite(torch.autograd.grad(loss.sum(), short)[0]).all()


def test_only_the_log_score_moves_a_wrong_answer_that_is_nearly_certain() -> None:
    """Logits (0, 20), gold 0: log's slope in the gold logit is P_0 - 1, brier's is about -4 P_0, where P_0 is 2e-9."""
    slopes = {}
    for score in ("log", "brier"):
        logits = torch.tensor([[0.0, 20.0]], dtype=torch.float64, requires_grad=True)
        outcome_loss(logits.log_softmax(-1), torch.tensor([0]), score=score).sum().backward()
        assert logits.grad is not None
        slopes[score] = logits.grad[0, 0].item()
    gold = math.exp(-20) / (1 + math.exp(-20))
    assert slopes["log"] == pytest.approx(gold - 1, abs=1e-12)
    assert slopes["brier"] == pytest.approx(-4 * gold, rel=1e-6)


@pytest.mark.parametrize("score", ["brier", "log"])
def test_outcome_is_least_at_the_true_probabilities(score: str) -> None:
    """Both scores are proper: under gold ~ truth no other distribution has a lower mean."""
    truth = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def mean(p: Tensor) -> float:
        losses = [outcome_loss(p.log().unsqueeze(0), torch.tensor([k]), score=score) for k in range(3)]
        return (truth * torch.cat(losses)).sum().item()

    torch.manual_seed(0)
    for p in torch.softmax(torch.randn(200, 3, dtype=torch.float64), -1):
        assert mean(p) > mean(truth) - 1e-12


@pytest.mark.parametrize("score", ["log", "brier"])
def test_outcome_of_a_distribution_by_hand_and_with_its_gradient(score: str) -> None:
    """P = (0.5, 0.3), the rest of the vocabulary has 0.2; t = (0.75, 0.25); the third label is not one of this row.

    log: -0.75 ln 0.5 - 0.25 ln 0.3, gradient -t. brier: 0.25^2 + 0.05^2, gradient 2 (P - t) P.
    """
    p = torch.tensor([[0.5, 0.3, 0.0]], dtype=torch.float64)
    t = torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64)
    log_p = p.log().requires_grad_()
    loss = outcome_loss(log_p, t, score=score)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss.sum(), log_p)
    if score == "log":
        assert loss.item() == pytest.approx(-0.75 * math.log(0.5) - 0.25 * math.log(0.3), abs=1e-12)
        torch.testing.assert_close(gradient, -t)
    else:
        assert loss.item() == pytest.approx(0.25**2 + 0.05**2, abs=1e-12)
        torch.testing.assert_close(gradient, 2 * (p - t) * p)


@pytest.mark.parametrize("score", ["log", "brier"])
def test_outcome_of_a_distribution_equals_that_of_the_index_and_is_its_mean(score: str) -> None:
    """One-hot is the index; the log score of a distribution is the mean of the scores of its labels."""
    torch.manual_seed(0)
    log_p = torch.randn(5, 4, dtype=torch.float64).log_softmax(-1) - 0.1
    gold = torch.tensor([0, 1, 2, 3, 1])
    one_hot = torch.nn.functional.one_hot(gold, 4).double()
    by_index = outcome_loss(log_p, gold, score=score)  # type: ignore[arg-type]
    torch.testing.assert_close(outcome_loss(log_p, one_hot, score=score), by_index)  # type: ignore[arg-type]
    t = torch.softmax(torch.randn(5, 4, dtype=torch.float64), -1)
    mean = sum(t[:, k] * outcome_loss(log_p, torch.full((5,), k), score=score) for k in range(4))  # type: ignore[arg-type]
    spread = 0 if score == "log" else 1 - (t**2).sum(-1)  # what the Brier score of a draw has beyond the distance
    torch.testing.assert_close(outcome_loss(log_p, t, score=score) + spread, mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", ["log", "brier"])
def test_outcome_of_a_distribution_is_least_at_that_distribution(score: str) -> None:
    """Among all probabilities of the labels whose sum is at most 1: the vocabulary has other tokens too."""
    torch.manual_seed(0)
    for t in torch.softmax(torch.randn(20, 3, dtype=torch.float64), -1):
        least = outcome_loss(t.log()[None], t[None], score=score)  # type: ignore[arg-type]
        others = torch.softmax(2 * torch.randn(200, 4, dtype=torch.float64), -1)[:, :3]  # the fourth is the rest
        nearby = torch.softmax(torch.cat([t, t.new_tensor([1e-3])]).log() + 0.05 * torch.randn(200, 4), -1)[:, :3]
        for p in (others, nearby):
            losses = outcome_loss(p.log(), t.expand(200, 3), score=score)  # type: ignore[arg-type]
            assert (losses > least).all()


def test_rcft_by_hand() -> None:
    """q = (0.7, 0.2, 0.1), bin 7 of ten (0.6, 0.7], a = 0.5, K = 3.
    g = ln 2 / (0.2 x 0.5) = 6.931472; tanh(g 0.2) = tanh(1.386294) = 15/17, tanh(g 0.1) = tanh(0.693147) = 3/5.
    t = 0.5 (1 + 15/17) / (2 + 15/17 + 3/5) and 0.5 (1 + 3/5) / (the same)."""
    log_q = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    accuracy = torch.full((10,), torch.nan, dtype=torch.float64)
    accuracy[6] = 0.5
    whole = 2 + 15 / 17 + 3 / 5
    t1, t2 = 0.5 * (1 + 15 / 17) / whole, 0.5 * (1 + 3 / 5) / whole
    assert t1 + t2 == pytest.approx(0.5)
    expected = 0.2**2 + (0.2 - t1) ** 2 + (0.1 - t2) ** 2
    assert rcft_loss(log_q, accuracy).item() == pytest.approx(expected, abs=1e-12)


def test_rcft_reads_the_label_restricted_softmax() -> None:
    log_q = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    accuracy = torch.linspace(0.0, 0.9, 10, dtype=torch.float64)
    torch.testing.assert_close(rcft_loss(log_q - 5.0, accuracy), rcft_loss(log_q, accuracy))


def test_rcft_edges() -> None:
    """a = 1 leaves nothing to spread; q_1 = 0 spreads evenly; K = 2 gives the other label everything."""
    others = torch.tensor([[False, True, True]])
    q = torch.tensor([[0.8, 0.15, 0.05]])
    assert spread_targets(q, others, torch.tensor([1.0])).tolist() == [[0.0, 0.0, 0.0]]
    even = spread_targets(torch.tensor([[1.0, 0.0, 0.0]]), others, torch.tensor([0.4]))
    torch.testing.assert_close(even, torch.tensor([[0.0, 0.3, 0.3]]))
    two = spread_targets(torch.tensor([[0.9, 0.1]]), torch.tensor([[False, True]]), torch.tensor([0.25]))
    torch.testing.assert_close(two, torch.tensor([[0.0, 0.75]]))


def test_rcft_empty_bin_gives_no_loss_and_no_gradient() -> None:
    log_q = torch.tensor([[0.95, 0.05]], dtype=torch.float64).log().requires_grad_()
    loss = rcft_loss(log_q, torch.full((10,), torch.nan))
    loss.sum().backward()
    assert loss.item() == 0
    assert log_q.grad.abs().sum() == 0


def test_rcft_overconfident_top_bin_lowers_confidence() -> None:
    z = torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    accuracy = torch.full((10,), 0.6, dtype=torch.float64)
    rcft_loss(torch.log_softmax(z, -1), accuracy).sum().backward()
    stepped = torch.softmax(z.detach() - 0.5 * z.grad, -1)
    assert z.grad[0, 0] > 0
    assert stepped[0, 0] < torch.softmax(z.detach(), -1)[0, 0]


def test_rcft_padded_labels_count_for_nothing() -> None:
    log_q = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log().requires_grad_()
    padded = torch.cat([log_q, torch.full((1, 2), -torch.inf, dtype=torch.float64)], -1)
    accuracy = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    torch.testing.assert_close(rcft_loss(padded, accuracy), rcft_loss(log_q, accuracy))
    assert torch.isfinite(torch.autograd.grad(rcft_loss(padded, accuracy).sum(), log_q)[0]).all()


@pytest.mark.parametrize("bins", [3, 10, 20])
def test_confidence_bins_are_right_closed_at_every_edge(bins: int) -> None:
    edges = torch.tensor([k / bins for k in range(bins + 1)], dtype=torch.float64)
    expected = [0, *range(bins)]
    assert confidence_bin(edges, bins).tolist() == expected


def test_smoothed_nll_by_hand_and_by_torch() -> None:
    """p = (0.6, 0.3, 0.1), target 0, epsilon 0.3: -(0.7 + 0.1) ln 0.6 - 0.1 ln 0.3 - 0.1 ln 0.1."""
    stats = stats_of([[0.6, 0.3, 0.1]], [0])
    expected = -0.8 * math.log(0.6) - 0.1 * math.log(0.3) - 0.1 * math.log(0.1)
    assert smoothed_nll(stats, 0.3).item() == pytest.approx(expected, abs=1e-12)
    torch.manual_seed(0)
    z, targets = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (7,))
    ours = smoothed_nll(token_stats(z, None, targets, tile=2), 0.1).mean()
    theirs = torch.nn.functional.cross_entropy(z, targets, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, z), torch.autograd.grad(theirs, z), rtol=0, atol=1e-12)


def test_smoothed_nll_is_zero_where_masked() -> None:
    stats = token_stats(torch.randn(3, 4), None, torch.tensor([0, -100, 2]))
    assert smoothed_nll(stats, 0.1)[1] == 0
