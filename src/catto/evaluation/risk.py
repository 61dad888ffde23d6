"""Answer only when confident enough: a threshold whose error rate is bounded with a finite-sample guarantee."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, binom

from catto.evaluation.binning import checked
from catto.evaluation.selective import RiskCoverage, risk_coverage

__all__ = ["THRESHOLDS", "RiskCoverage", "Threshold", "risk_coverage", "threshold_for_risk"]

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
    return 1.0 if errors >= rows else float(beta.ppf(1.0 - delta, errors + 1, rows - errors))
