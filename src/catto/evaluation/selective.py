"""Ranking and selective prediction: how well confidence orders right answers before wrong ones.

Rows of equal confidence have no order among themselves. Every number here is the mean over all orders of such rows (in
closed form), so it does not depend on the order in which the rows were written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from catto.evaluation.binning import Floats, Ints, checked

__all__ = [
    "RiskCoverage",
    "accuracy_at_coverage",
    "aurc",
    "auroc",
    "coverage_at_risk",
    "e_aurc",
    "risk_coverage",
]


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
