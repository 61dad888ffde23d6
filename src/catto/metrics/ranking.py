"""Ranking and selective prediction: how well confidence orders right answers before wrong ones.

Rows of equal confidence have no order among themselves. Every number here is the mean over all orders of such rows (in
closed form), so it does not depend on the order in which the rows were written.

Answer only when confident enough: a threshold whose error rate is bounded with a finite-sample guarantee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike

from catto.metrics.binning import Floats, Ints, checked

# ---- selective


@dataclass(frozen=True)
class Groups:
    """Rows of equal confidence together, confidence falling. value, count, right: (G,)."""

    value: Floats
    count: Ints
    right: Ints


def groups(confidence: ArrayLike, correct: ArrayLike) -> Groups:
    """Group the rows by confidence, most confident first. (N,), (N,) -> G <= N groups."""
    c, z = checked(confidence, correct)
    # The bits of a float in [0, 1] sort as it does and leave the top bit free: one sort of whole numbers carries both
    # columns, 3x faster than argsort. Adding 0 turns -0 into 0.
    keys = (c + 0.0).view(np.uint64)
    keys <<= np.uint64(1)
    keys |= z
    keys.sort()
    right = (keys & np.uint64(1)).view(np.intp)
    keys >>= np.uint64(1)
    ends = np.append(np.flatnonzero(keys[1:] != keys[:-1]), len(keys) - 1)
    value = keys.view(np.float64)
    if len(ends) == len(keys):  # no ties: nothing to add up
        return Groups(value[::-1], np.ones(len(keys), dtype=np.intp), right[::-1])
    right_sum = np.diff(np.cumsum(right)[ends], prepend=0)
    return Groups(value[ends][::-1], np.diff(ends, prepend=-1)[::-1], right_sum[::-1])


def auroc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return P(confidence of a right row > of a wrong row), ties half; nan when all rows are right or all wrong."""
    found = groups(confidence, correct)
    wrong = found.count - found.right
    pairs = float(found.right.sum()) * float(wrong.sum())
    if pairs == 0.0:
        return float("nan")
    below = wrong.sum() - np.cumsum(wrong)
    return float(np.sum(found.right * (below + 0.5 * wrong))) / pairs


@dataclass(frozen=True)
class Within:
    """AUROC of confidence within questions, its bootstrap interval over questions, and on how much it rests.

    questions: those that have a right and a wrong row; pairs: right and wrong rows of the same question. Without any
    pair the value is nan.
    """

    value: float
    low: float
    high: float
    questions: int
    pairs: int


def auroc_within(
    question: Sequence[object],
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Within:
    """Return P(confidence of a right row > of a wrong row *of the same question*), ties half, pooled over the pairs.

    question: N ids; (N,), (N,). Picking the most confident of several answers can win only where this is above a half:
    AUROC over all rows also rises when easy questions are answered more surely, which tells nothing about which answer
    to pick. Questions whose rows are all right or all wrong have no pair and do not count.

    >>> auroc_within(["q", "q", "q", "r"], [0.9, 0.4, 0.9, 0.8], [True, False, False, True]).value
    0.75
    """
    c, z = checked(confidence, correct)
    if len(question) != len(c):
        raise ValueError(f"question has {len(question)} rows, confidence has {len(c)}")
    codes: dict[object, int] = {}
    code = np.array([codes.setdefault(name, len(codes)) for name in question], dtype=np.intp)
    # Sorted by question, then confidence: each question is a run, and a run of equal confidences inside it a tie.
    order = np.lexsort((c, code))
    code, c, z = code[order], c[order], z[order]
    starts = np.flatnonzero(np.append(True, (code[1:] != code[:-1]) | (c[1:] != c[:-1])))
    right = np.add.reduceat(z.astype(np.int64), starts)
    wrong = np.add.reduceat((~z).astype(np.int64), starts)
    of = code[starts]
    total: Floats = np.bincount(of, wrong, len(codes)).astype(np.float64)
    below = np.cumsum(wrong) - wrong - (np.cumsum(total) - total)[of]
    won: Floats = np.bincount(of, right * (below + 0.5 * wrong), len(codes)).astype(np.float64)
    pairs: Floats = np.bincount(of, right, len(codes)) * total
    mixed = pairs > 0
    if not mixed.any():
        return Within(float("nan"), float("nan"), float("nan"), 0, 0)
    low, high = _ratio_interval(won[mixed], pairs[mixed], resamples, level, seed)
    return Within(float(won.sum() / pairs.sum()), low, high, int(mixed.sum()), int(pairs.sum()))


def _ratio_interval(won: Floats, pairs: Floats, resamples: int, level: float, seed: int) -> tuple[float, float]:
    """Percentile bootstrap of `sum(won) / sum(pairs)` over questions that have pairs."""
    drawn = default_rng(seed).multinomial(len(won), np.full(len(won), 1.0 / len(won)), size=resamples)
    low, high = np.quantile((drawn @ won) / (drawn @ pairs), [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the area under the risk-coverage curve, `mean over i of (errors among the i most confident) / i`."""
    found = groups(confidence, correct)
    rate = (found.count - found.right) / found.count
    errors = np.repeat(rate, found.count)
    np.cumsum(errors, out=errors)
    errors /= np.arange(1, len(errors) + 1)
    return float(errors.mean())


def e_aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return AURC above that of the best order of the same answers (all errors last); 0 for a perfect order."""
    _, z = checked(confidence, correct)
    right = int(z.sum())
    best = float(np.sum(np.arange(1, len(z) - right + 1) / np.arange(right + 1, len(z) + 1))) / len(z)
    return max(0.0, aurc(confidence, correct) - best)


@dataclass(frozen=True)
class RiskCoverage:
    """Answer only at `confidence >= threshold`: share answered and share wrong of those. All (G,), coverage rising."""

    threshold: Floats
    coverage: Floats
    risk: Floats


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Return the curve at every distinct confidence, from the strictest threshold to full coverage."""
    found = groups(confidence, correct)
    answered = np.cumsum(found.count)
    return RiskCoverage(found.value, answered / answered[-1], np.cumsum(found.count - found.right) / answered)


def accuracy_at_coverage(confidence: ArrayLike, correct: ArrayLike, coverage: float) -> float:
    """Return the accuracy of the `ceil(coverage * N)` most confident rows. coverage in (0, 1].

    Where the cut falls among rows of equal confidence, they count with their mean.
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage is {coverage}, expected a number in (0, 1]")
    found = groups(confidence, correct)
    rows = int(found.count.sum())
    kept = int(np.ceil(round(coverage * rows, 9)))  # 0.07 * 100 is 7.000000000000001
    before = np.cumsum(found.count) - found.count
    taken = np.clip(kept - before, 0, found.count)
    return float(taken @ (found.right / found.count)) / kept


def coverage_at_risk(confidence: ArrayLike, correct: ArrayLike, risk: float) -> float:
    """Return the largest share that a threshold can answer with at most `risk` wrong, 0 where none can."""
    if not 0.0 <= risk <= 1.0:
        raise ValueError(f"risk is {risk}, expected a number in [0, 1]")
    curve = risk_coverage(confidence, correct)
    return float(np.max(curve.coverage, where=curve.risk <= risk, initial=0.0))


# ---- risk


# Fixed before any data is seen, which is what makes the guarantee exact. Confidences pile up at 1, so the steps shrink
# towards it: 0, 0.02, ..., 0.98, then 1 - 10^-2, 1 - 10^-2.25, ..., 1 - 10^-8, and 1.
THRESHOLDS: tuple[float, ...] = (
    *(round(0.02 * step, 2) for step in range(50)),
    *(1.0 - 10.0 ** -(2.0 + step / 4.0) for step in range(25)),
    1.0,
)


@dataclass(frozen=True)
class Threshold:
    """Answer at `confidence >= threshold`; None: no threshold is good enough, answer nothing.

    coverage: share of the given rows that are answered; bound: the error rate is below it with probability 1 - delta.
    """

    threshold: float | None
    risk: float
    delta: float
    coverage: float
    answered: int
    errors: int
    bound: float


def threshold_for_risk(confidence: ArrayLike, correct: ArrayLike, risk: float = 0.1, delta: float = 0.05) -> Threshold:
    """Find the lowest threshold whose error rate among the answered is at most `risk`, wrong with probability <= delta.

    For a fixed threshold with m answered rows the errors are Binomial(m, error rate), so that the exact
    (Clopper-Pearson) upper bound at level delta / M fails with probability at most delta / M; by the union bound over
    the M fixed THRESHOLDS, whichever is taken fails with probability at most delta. The rows must be drawn like those
    that are answered later, and must not have been used to fit the confidence.
    """
    from scipy.stats import binom  # a second to import, which `measure` need not wait for

    c, z = checked(confidence, correct)
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} is {value}, expected a number between 0 and 1")
    share = delta / len(THRESHOLDS)
    order = np.sort(c)
    wrong = np.sort(c[~z])
    answered = len(order) - np.searchsorted(order, THRESHOLDS)
    errors = len(wrong) - np.searchsorted(wrong, THRESHOLDS)
    passed = np.flatnonzero((answered > 0) & (binom.cdf(errors, np.maximum(answered, 1), risk) <= share))
    if not len(passed):
        return Threshold(None, risk, delta, 0.0, 0, 0, 1.0)
    first = int(passed[0])
    m, bad = int(answered[first]), int(errors[first])
    return Threshold(THRESHOLDS[first], risk, delta, m / len(c), m, bad, upper_bound(bad, m, share))


def upper_bound(errors: int, rows: int, delta: float) -> float:
    """Clopper-Pearson: the error rate at which so few errors have probability delta."""
    from scipy.stats import beta

    return 1.0 if errors >= rows else float(beta.ppf(1.0 - delta, errors + 1, rows - errors))
