"""How well confidence ranks answers, and the threshold above which they can be trusted.

Rows of equal confidence have no order. Every number here is the mean over all orders of such rows (in closed form), so
it does not depend on the order in which the rows were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import Floats, Groups, blocks, checked, grouped_metric, groups
from catto.metrics.statistics import BootstrapOptions, ratio_interval


@grouped_metric
def auroc(rows: Groups) -> Floats:
    """Return P(confidence of a right row > of a wrong row), ties half; nan when all rows are right or all wrong.

    >>> auroc([0.9, 0.4, 0.6], [True, False, False])
    1.0
    """
    # A right row loses to the rows above it and to half of its group; the pairs of right rows are half won, half lost.
    right_total, lost = rows.right.sum(axis=-1), np.zeros(len(rows.rows))
    for part in blocks(len(rows.value)):
        lost += np.vecdot(rows.right[:, part], rows.at_least[:, part] - 0.5 * rows.count[:, part])
    won = right_total * (rows.rows - 0.5 * right_total) - lost
    pairs = right_total * (rows.rows - right_total)
    return np.asarray(np.divide(won, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0))


@grouped_metric
def aurc(rows: Groups) -> Floats:
    """Return the area under the risk-coverage curve, `mean over i of (errors among the i most confident) / i`."""
    return _aurc(rows)


@grouped_metric
def e_aurc(rows: Groups) -> Floats:
    """Return AURC above that of the best order of the same answers (all errors last); 0 for a perfect order."""
    right = rows.right.sum(axis=-1, keepdims=True)
    best = Groups(np.arange(2.0), np.hstack([rows.rows[:, None] - right, right]), right * [0.0, 1.0])
    return np.asarray(np.maximum(0.0, _aurc(rows) - _aurc(best)))


def _aurc(rows: Groups) -> Floats:
    """Sum over errors instead of ranks: one at rank j is in every mean from j to N, in all 1/j + ... + 1/N times.

    Over a group of ranks these sum to n_g H_N - (S_last - S_before), where H_j = 1 + ... + 1/j and, by parts,
    S_j = H_0 + ... + H_(j-1) = j H_j - j.
    """
    harmonic, summed = _harmonic(int(rows.rows.max()))
    area = np.zeros(len(rows.rows))
    for part in blocks(len(rows.value)):
        error_rate = 1.0 - rows.right[:, part] / np.maximum(rows.count[:, part], 1.0)
        sums = summed.take(rows.at_least[:, part.start : part.stop + 1])
        area += np.vecdot(error_rate, sums[:, 1:] - sums[:, :-1])
    wrong = rows.rows - rows.right.sum(axis=-1)
    return np.asarray((area + wrong * harmonic.take(rows.rows.astype(np.intp))) / rows.rows)


@lru_cache(maxsize=2)
def _harmonic(rows: int) -> tuple[Floats, Floats]:
    """Return H_j and j H_j - j for j up to the number of rows."""
    rank = np.arange(rows + 1.0)
    harmonic = np.append(0.0, np.cumsum(1.0 / rank[1:]))
    return harmonic, rank * harmonic - rank


@dataclass(frozen=True)
class Within:
    """AUROC of confidence within questions, its bootstrap interval over questions, and the data it is based on.

    questions: those that have a right and a wrong row; pairs: right and wrong rows of the same question. Without any
    pair the value is nan.
    """

    value: float
    low: float
    high: float
    questions: int
    pairs: int


def auroc_within(
    question: Sequence[object], confidence: ArrayLike, correct: ArrayLike, **options: Unpack[BootstrapOptions]
) -> Within:
    """Return P(confidence of a right row > of a wrong row *of the same question*), ties half, pooled over the pairs.

    question: N ids; (N,), (N,). Picking the most confident of several answers can win only where this is above a half:
    AUROC over all rows also rises when easy questions are answered more confidently, which does not help to pick one.
    Questions whose rows are all right or all wrong have no pair and do not count.

    >>> auroc_within(["q", "q", "q", "r"], [0.9, 0.4, 0.9, 0.8], [True, False, False, True]).value
    0.75
    """
    c, z = checked(confidence, correct)
    if len(question) != len(c):
        raise ValueError(f"question has {len(question)} rows, confidence has {len(c)}")
    places: dict[object, list[int]] = {}
    for place, name in enumerate(question):
        places.setdefault(name, []).append(place)
    won, pairs = [], []
    for rows in places.values():
        right, wrong = c[rows][z[rows]], np.sort(c[rows][~z[rows]])
        if len(right) and len(wrong):
            below, up_to = (np.searchsorted(wrong, right, side).sum() for side in ("left", "right"))
            won.append((below + up_to) / 2)
            pairs.append(float(len(right) * len(wrong)))
    if not pairs:
        return Within(nan, nan, nan, 0, 0)
    interval = ratio_interval(np.array(won), np.array(pairs), **options)
    return Within(interval.value, interval.low, interval.high, len(pairs), int(sum(pairs)))


@dataclass(frozen=True)
class RiskCoverage:
    """Answer only at `confidence >= threshold`: share answered and share wrong of those. All (G,), coverage rising."""

    threshold: Floats
    coverage: Floats
    risk: Floats


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Return the curve at every distinct confidence, from the strictest threshold to full coverage.

    >>> risk_coverage([0.9, 0.6], [True, False]).risk.tolist()
    [0.0, 0.5]
    """
    rows = groups(confidence, correct)
    answered = np.cumsum(rows.count[0, ::-1])
    wrong = np.cumsum((rows.count - rows.right)[0, ::-1])
    return RiskCoverage(rows.value[::-1], answered / answered[-1], wrong / answered)


def accuracy_at_coverage(confidence: ArrayLike, correct: ArrayLike, coverage: float) -> float:
    """Return the accuracy of the `ceil(coverage * N)` most confident rows. coverage in (0, 1].

    Where the cut falls among rows of equal confidence, they count with their mean.
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage is {coverage}, expected a number in (0, 1]")
    rows = groups(confidence, correct)
    count, right = rows.count[0, ::-1], rows.right[0, ::-1]
    kept = float(np.ceil(round(coverage * count.sum(), 9)))  # 0.07 * 100 is 7.000000000000001
    taken = np.clip(kept - (np.cumsum(count) - count), 0, count)
    return float(taken @ (right / count)) / kept


def coverage_at_risk(confidence: ArrayLike, correct: ArrayLike, risk: float) -> float:
    """Return the largest share that a threshold can answer with at most `risk` wrong, 0 where none can."""
    if not 0.0 <= risk <= 1.0:
        raise ValueError(f"risk is {risk}, expected a number in [0, 1]")
    curve = risk_coverage(confidence, correct)
    return float(np.max(curve.coverage, where=curve.risk <= risk, initial=0.0))


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

    >>> threshold_for_risk([1.0] * 100 + [0.5] * 10, [True] * 100 + [False] * 10).threshold
    0.52
    """
    from scipy.special import bdtr

    c, z = checked(confidence, correct)
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name} is {value}, expected a number between 0 and 1")
    share = delta / len(THRESHOLDS)
    answered = len(c) - np.searchsorted(np.sort(c), THRESHOLDS)
    errors = np.sum(~z) - np.searchsorted(np.sort(c[~z]), THRESHOLDS)
    chance_of_so_few = bdtr(errors, np.maximum(answered, 1), risk)
    passed = np.flatnonzero((answered > 0) & (chance_of_so_few <= share))
    if not len(passed):
        return Threshold(None, risk, delta, 0.0, 0, 0, 1.0)
    first = int(passed[0])
    m, wrong = int(answered[first]), int(errors[first])
    return Threshold(THRESHOLDS[first], risk, delta, m / len(c), m, wrong, upper_bound(wrong, m, share))


def upper_bound(errors: int, rows: int, delta: float) -> float:
    """Return Clopper and Pearson's bound: the error rate at which so few errors have probability delta."""
    from scipy.special import betaincinv

    return 1.0 if errors >= rows else float(betaincinv(errors + 1, rows - errors, 1.0 - delta))
