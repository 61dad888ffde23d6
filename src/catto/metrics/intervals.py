"""What resampling gives: values with intervals, null bands and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import TypeVar

import numpy as np

from catto.metrics.binning import (
    Floats,
)

H = TypeVar("H", "Interval", "Comparison")


OUTSIDE = "the value lies outside its own bootstrap interval"
# Means of equal numbers in another order differ by less.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval.

    Attributes:
        value: The metric of all rows.
        low: Lower end, nan where there is no interval.
        high: Upper end, nan where there is no interval.
        level: Nominal coverage, such as 0.95.
        undefined: Number of resamples without a value; they are left out.
        reason: Why `drop_invalid_interval` removed the interval.
    """

    value: float
    low: float
    high: float
    level: float
    undefined: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class NullBand:
    """What a perfectly calibrated model with the same confidences would score: mean and central band."""

    mean: float
    low: float
    high: float
    level: float
    undefined: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same questions.

    Attributes:
        a: Metric of the first.
        b: Metric of the second.
        difference: a - b.
        low: Lower end of the difference's bootstrap interval.
        high: Upper end of that interval.
        level: Nominal coverage of the interval.
        p_value: Of the two-sided swap test.
        undefined: Number of resamples without a value; they are left out.
        reason: Why `drop_invalid_interval` removed the interval.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    level: float
    p_value: float
    undefined: int = 0
    reason: str | None = None


def drop_invalid_interval(result: H) -> H:
    """Drop the interval if it does not contain the estimate, and record why.

    >>> drop_invalid_interval(Interval(0.0, 0.018, 0.064, 0.95)).reason
    'the value lies outside its own bootstrap interval'
    """
    estimate = result.value if isinstance(result, Interval) else result.difference
    # A comparison with nan is False.
    is_outside = estimate < result.low - ROUNDING or estimate > result.high + ROUNDING
    if is_outside:
        return replace(result, low=nan, high=nan, reason=OUTSIDE)
    return result


def central_tails(level: float) -> Floats:
    """Return the probabilities between which the central part of this level lies. (2,)."""
    return np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])


def summarise_draws(
    draws: Floats,
    level: float,
    tails: Floats | None = None,
) -> NullBand:
    """Return mean and band of the draws that are defined. (R,)."""
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return NullBand(nan, nan, nan, level, undefined=len(draws))
    if tails is None:
        tails = central_tails(level)
    low, high = np.quantile(defined, tails).tolist()
    return NullBand(float(defined.mean()), low, high, level, undefined=len(draws) - len(defined))
