"""The results of resampling: values with intervals, null bands and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import TypeVar

import numpy as np

from catto.metrics.binning import Floats

WithInterval = TypeVar("WithInterval", "Interval", "Comparison")

OUTSIDE = "the value lies outside its own bootstrap interval"
# Metrics of the same rows differ by less than this if the rows are summed in a different order.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval.

    Attributes:
        value: The metric of all rows.
        low: Lower end, nan if there is no interval.
        high: Upper end, nan if there is no interval.
        level: Nominal coverage, such as 0.95.
        undefined: Number of resamples on which the metric is undefined; they are left out.
        reason: Why `drop_invalid_interval` removed the interval; None if it did not.
    """

    value: float
    low: float
    high: float
    level: float
    undefined: int = 0
    reason: str | None = None


@dataclass(frozen=True)
class NullBand:
    """What a perfectly calibrated model with the same confidences would score: mean and central band.

    Attributes:
        mean: Mean over the simulations.
        low: Lower end of the band.
        high: Upper end of the band.
        level: Share of the simulations inside the band.
        undefined: Number of simulations on which the metric is undefined; they are left out.
    """

    mean: float
    low: float
    high: float
    level: float
    undefined: int = 0


@dataclass(frozen=True)
class Comparison:
    """A comparison of two methods on the same questions.

    Attributes:
        a: Metric of the first method.
        b: Metric of the second method.
        difference: a - b.
        low: Lower end of the difference's bootstrap interval.
        high: Upper end of that interval.
        level: Nominal coverage of the interval.
        p_value: p-value of the two-sided swap test.
        undefined: Number of resamples on which the difference is undefined; they are left out.
        reason: Why `drop_invalid_interval` removed the interval; None if it did not.
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


def drop_invalid_interval(result: WithInterval) -> WithInterval:
    """Drop the interval if it does not contain the estimate, and record the reason.

    Args:
        result: An interval or a comparison.

    Returns:
        A copy with `low` and `high` set to nan and a `reason`, or the result itself if its interval contains the
        estimate or is already nan.

    >>> drop_invalid_interval(Interval(0.0, 0.018, 0.064, 0.95)).reason
    'the value lies outside its own bootstrap interval'
    """
    estimate = result.value if isinstance(result, Interval) else result.difference
    # Comparisons with nan are False, so a missing interval is not outside.
    is_outside = estimate < result.low - ROUNDING or estimate > result.high + ROUNDING
    if is_outside:
        return replace(result, low=nan, high=nan, reason=OUTSIDE)
    return result


def central_tails(level: float) -> Floats:
    """Return the two tail probabilities that enclose the central part of a distribution. (2,)."""
    return np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])


def summarise_draws(
    draws: Floats,
    level: float,
    tails: Floats | None = None,
) -> NullBand:
    """Return the mean and the band of the values that a metric has on resamples or simulations.

    Args:
        draws: (R,) values. Undefined ones (nan) are left out and counted.
        level: Level of the band.
        tails: (2,), the probabilities of the quantiles that bound the band; None means those of the central band. If
            they are given, `level` is only recorded.

    Returns:
        The mean and the band; nan if no draw is defined.
    """
    defined = draws[~np.isnan(draws)]
    if len(defined) == 0:
        return NullBand(nan, nan, nan, level, undefined=len(draws))
    if tails is None:
        tails = central_tails(level)
    low, high = np.quantile(defined, tails).tolist()
    return NullBand(float(defined.mean()), low, high, level, undefined=len(draws) - len(defined))
