"""Resamples of rows or of whole questions, and the corrections of the BCa interval.

How sure a measured number is: bootstrap intervals, null bands, paired comparisons, spread over seeds.

A metric may be undefined on a resample (AUROC of rows that are all right is nan). Such resamples are left out and
counted in `undefined`; where the value itself is undefined, the interval is nan. A small ECE can lie outside its own
percentile interval, since resampling only adds to it: `held` withholds such an interval from what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from catto.metrics.binning import Bools, Floats, Ints, checked, checked_confidence

# ---- resampling


MetricFunction = Callable[[Floats, Bools], float]

# Parts of the grouped jackknife: the acceleration is a skewness, and 200 leave-one-part-out values estimate it well.
JACKKNIFE_PARTS = 200
# Questions a block of the draw; the rows of a block fit the cache.
BLOCK = 1 << 14


@dataclass(frozen=True)
class Clusters:
    """Rows in the order of their questions; question q owns `order[start[q] : start[q] + size[q]]`."""

    order: Ints | None
    start: Ints
    size: Ints

    @classmethod
    def of(cls, questions: Sequence[object] | None, rows: int) -> Clusters:
        """Group the rows by question; without questions each row stands alone."""
        if questions is None:
            return cls(None, np.arange(rows), np.ones(rows, dtype=np.intp))
        if len(questions) != rows:
            raise ValueError(f"questions has {len(questions)} rows, confidence has {rows}")
        codes: dict[object, int] = {}
        code = np.array([codes.setdefault(question, len(codes)) for question in questions], dtype=np.intp)
        size = np.bincount(code)
        return cls(np.argsort(code, kind="stable"), np.cumsum(size) - size, size)

    def rows(self, drawn: Ints) -> Ints:
        """Return the rows of the drawn questions, one after the other."""
        if self.order is None:
            return drawn
        size = self.size[drawn]
        before = np.cumsum(size) - size
        place: Ints = np.repeat(self.start[drawn] - before, size) + np.arange(size.sum())
        return self.order[place]


def resampled(clusters: Clusters, resamples: int, rng: Generator) -> Iterator[Ints]:
    """Yield the rows of each resample: as many questions as there are, drawn with replacement.

    How many draws fall into each block of questions is multinomial, and within a block they are uniform: the same
    distribution as one draw over all, in an order that reads memory block by block.
    """
    count = len(clusters.size)
    bounds = np.append(np.arange(0, count, BLOCK), count)
    share = np.diff(bounds) / count
    for _ in range(resamples):
        sizes = rng.multinomial(count, share)
        blocks = zip(bounds[:-1], bounds[1:], sizes, strict=True)
        yield clusters.rows(np.concatenate([rng.integers(low, high, size=size) for low, high, size in blocks]))


def bca_tails(tails: Floats, value: float, draws: Floats, jackknife: Floats) -> Floats:
    """Shift the tail probabilities by bias and acceleration (Efron, 1987). (2,) -> (2,)."""
    below = np.mean(draws < value) + 0.5 * np.mean(draws == value)
    # All draws on one side would make the shift infinite; one draw in B + 1 is the least that B draws can tell.
    share = np.clip(below, 1.0 / (len(draws) + 1), len(draws) / (len(draws) + 1))
    bias = ndtri(share)
    offset = jackknife.mean() - jackknife
    squares = float(np.sum(offset**2))
    acceleration = float(np.sum(offset**3)) / (6.0 * squares**1.5) if squares > 0.0 else 0.0
    shifted = bias + ndtri(tails)
    return np.asarray(ndtr(bias + shifted / (1.0 - acceleration * shifted)), dtype=np.float64)


def jackknife_values(metric: MetricFunction, c: Floats, z: Bools, clusters: Clusters) -> Floats:
    """Return the defined values with one part of the questions left out; the parts are single questions up to 200."""
    count = len(clusters.size)
    part = default_rng(0).permutation(np.arange(count) % min(count, JACKKNIFE_PARTS))
    values = []
    for left_out in range(int(part.max()) + 1 if count > 1 else 0):
        rows = clusters.rows(np.flatnonzero(part != left_out))
        values.append(metric(c[rows], z[rows]))
    found = np.array(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    return found if len(found) else np.zeros(1)


# ---- statistics


Method = Literal["percentile", "bca"]
Mark = Literal["", "*", "†"]
Rows = tuple[Floats, Bools]

# A difference is marked where its corrected p-value lies below.
ALPHA = 0.05
OUTSIDE = "the value lies outside its own bootstrap interval"


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval; `undefined` resamples had no value and are left out."""

    value: float
    low: float
    high: float
    level: float
    undefined: int = 0
    reason: str | None = None  # why low and high are nan, where `held` withheld them

    def held(self) -> Interval:
        """The same, without ends and with a reason where they do not hold the value.

        >>> Interval(0.0, 0.018, 0.064, 0.95).held().reason
        'the value lies outside its own bootstrap interval'
        """
        if _inside(self.value, self.low, self.high):
            return self
        return replace(self, low=float("nan"), high=float("nan"), reason=OUTSIDE)


def _inside(value: float, low: float, high: float) -> bool:
    """Whether an interval holds its value; means of equal confidences differ by rounding. True where one is nan."""
    return not (value < low - 1e-12 or value > high + 1e-12)


def bootstrap(
    metric: MetricFunction,
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    questions: Sequence[object] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    method: Method = "percentile",
    seed: int = 0,
) -> Interval:
    """Return the metric and its bootstrap interval. (N,), (N,), questions: N ids.

    With `questions`, whole questions are drawn, so that candidates of one question stay together. Memory is that of
    one resample. `bca` leaves out single questions up to 200 of them, above that 200 random parts of the questions.
    The interval is of the *estimator*. Measured coverage of the 95 % percentile interval (1,000 simulated sets of 300
    rows, 500 resamples): accuracy 94.8 to 95.4 %, Brier 94.4 to 95.8 %, NLL 94.6 to 95.4 %. ECE where the model is
    off by 15 points 95.2 %, by 5 points 23.2 %, calibrated 0 %: chance only ever adds to ECE, so near zero its interval
    lies above the truth. Read it beside its null band, and print it `held`: without ends that do not hold the value.
    A single row, or rows that are all equal, give an interval of no width.
    """
    named = {"metric": metric}
    table = bootstrap_table(
        named, confidence, correct, questions=questions, resamples=resamples, level=level, method=method, seed=seed
    )
    return table["metric"]


def bootstrap_table(
    metrics: Mapping[str, MetricFunction],
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    questions: Sequence[object] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    method: Method = "percentile",
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the interval of each metric, all on the same resamples; each equals `bootstrap` of that metric alone."""
    c, z = checked(confidence, correct)
    _check_options(resamples, level, method)
    clusters = Clusters.of(questions, len(c))
    draws = np.empty((len(metrics), resamples))
    for column, rows in enumerate(resampled(clusters, resamples, default_rng(seed))):
        drawn = c.take(rows), z.take(rows)
        draws[:, column] = [metric(*drawn) for metric in metrics.values()]
    return {
        name: _interval(metric, c, z, clusters, row, level, method)
        for (name, metric), row in zip(metrics.items(), draws, strict=True)
    }


def _check_options(resamples: int, level: float, method: str = "percentile") -> None:
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, expected at least 1")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}, expected a number between 0 and 1")
    if method not in ("percentile", "bca"):
        raise ValueError(f"method is {method!r}, expected 'percentile' or 'bca'")


def _interval(
    metric: MetricFunction, c: Floats, z: Bools, clusters: Clusters, draws: Floats, level: float, method: Method
) -> Interval:
    value, defined = metric(c, z), draws[~np.isnan(draws)]
    if np.isnan(value) or len(defined) == 0:
        return Interval(value, float("nan"), float("nan"), level, len(draws) - len(defined))
    tails = np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    if method == "bca":
        tails = bca_tails(tails, value, defined, jackknife_values(metric, c, z, clusters))
    low, high = np.quantile(defined, tails)
    return Interval(value, float(low), float(high), level, len(draws) - len(defined))


@dataclass(frozen=True)
class NullBand:
    """What a perfectly calibrated model with the same confidences would score: mean and central band."""

    mean: float
    low: float
    high: float
    level: float
    undefined: int = 0


def null_band(
    metric: MetricFunction, confidence: ArrayLike, *, simulations: int = 1000, level: float = 0.95, seed: int = 0
) -> NullBand:
    """Simulate the metric under `correct ~ Bernoulli(confidence)`. (N,)."""
    c = checked_confidence(confidence)
    _check_options(simulations, level)
    rng = default_rng(seed)
    return _band(np.array([metric(c, rng.random(len(c)) < c) for _ in range(simulations)]), level)


def _band(draws: Floats, level: float) -> NullBand:
    defined = draws[~np.isnan(draws)]
    if len(defined) == 0:
        return NullBand(float("nan"), float("nan"), float("nan"), level, len(draws))
    low, high = np.quantile(defined, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return NullBand(float(defined.mean()), float(low), float(high), level, len(draws) - len(defined))


@dataclass(frozen=True)
class Answers:
    """The rows of one method: one answer a question. question: N distinct ids; confidence, correct: (N,)."""

    question: Sequence[object]
    confidence: ArrayLike
    correct: ArrayLike


@dataclass(frozen=True)
class Comparison:
    """Metric of a less that of b on the same questions, its bootstrap interval, and the two-sided p-value."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    level: float
    p_value: float
    undefined: int = 0
    reason: str | None = None  # why low and high are nan, where `held` withheld them

    def held(self) -> Comparison:
        """The same, without ends and with a reason where they do not hold the difference."""
        if _inside(self.difference, self.low, self.high):
            return self
        return replace(self, low=float("nan"), high=float("nan"), reason=OUTSIDE)


def compare(
    metric: MetricFunction, a: Answers, b: Answers, *, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Comparison:
    """Compare two methods on the same questions, aligned by id.

    Interval: percentile bootstrap over questions, both methods on the same draw. p-value: swap test, where each
    question's two answers change places with probability 1/2; `(1 + swaps at least as far from 0) / (1 + resamples)`.
    A swap on which the metric is undefined counts as far from 0. Where the difference itself is undefined, so is the
    p-value.
    """
    _check_options(resamples, level)
    rows_a, rows_b = _aligned(a, b)
    value_a, value_b = metric(*rows_a), metric(*rows_b)
    draws = _paired_draws(metric, rows_a, rows_b, resamples, seed)
    found = _band(draws, level)
    p_value = _swap_test(metric, rows_a, rows_b, resamples, seed)
    return Comparison(value_a, value_b, value_a - value_b, found.low, found.high, level, p_value, found.undefined)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979); an undefined one stays nan and does not count.

    The i-th smallest of m becomes `max over j <= i of (m - j + 1) p_j`, at most 1. Calling everything below alpha a
    difference is then wrong even once in at most alpha of all tables.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")[: int(np.sum(~np.isnan(p)))]  # nan sorts last
    corrected = np.full(len(p), np.nan)
    factors = np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1.0)
    return [float(value) for value in corrected]


def mark(
    difference: float, interval: tuple[float, float], corrected: float, better: str | None, least: float = 0.005
) -> Mark:
    """Return `*` for a difference to the better, a dagger for one to the worse, nothing where neither is shown.

    Three things have to agree: the corrected p-value is below ALPHA, the interval lies on the difference's side of 0,
    and the difference is at least as large as the smallest one of interest. Of two nearly equal models the swap test
    notices a shift of every confidence by 0.001, whatever that does to the metric on other questions, or for anybody.

    >>> mark(-0.03, (-0.05, -0.01), 0.004, "lower")
    '*'
    >>> mark(-0.0008, (-0.0012, -0.0004), 0.004, "lower")
    ''
    """
    # A comparison with nan is False: an undefined p-value or a withheld interval gives no mark.
    if better is None or not (corrected < ALPHA and abs(difference) >= least):
        return ""
    more, (low, high) = difference > 0, interval
    if not (low > 0 if more else high < 0):
        return ""
    return "*" if more == (better == "higher") else "†"


def _paired_draws(metric: MetricFunction, a: Rows, b: Rows, resamples: int, seed: int) -> Floats:
    draws = np.empty(resamples)
    for column, rows in enumerate(resampled(Clusters.of(None, len(a[0])), resamples, default_rng(seed))):
        draws[column] = metric(a[0].take(rows), a[1].take(rows)) - metric(b[0].take(rows), b[1].take(rows))
    return draws


def _swap_test(metric: MetricFunction, a: Rows, b: Rows, swaps: int, seed: int) -> float:
    observed = abs(metric(*a) - metric(*b))
    if np.isnan(observed):
        return float("nan")
    rng, far = default_rng(seed), 0
    for _ in range(swaps):
        swap = rng.random(len(a[0])) < 0.5
        first = np.where(swap, b[0], a[0]), np.where(swap, b[1], a[1])
        second = np.where(swap, a[0], b[0]), np.where(swap, a[1], b[1])
        far += not abs(metric(*first) - metric(*second)) < observed - 1e-12  # rounding must not break a tie
    return (1 + far) / (1 + swaps)


def _aligned(a: Answers, b: Answers) -> tuple[Rows, Rows]:
    place_a, place_b = _places(a, "a"), _places(b, "b")
    for here, there, name in ((place_a, place_b, "b"), (place_b, place_a, "a")):
        missing = [question for question in here if question not in there]
        if missing:
            raise ValueError(f"{len(missing)} questions are missing from {name}, the first is {missing[0]!r}")
    (c_a, z_a), (c_b, z_b) = checked(a.confidence, a.correct), checked(b.confidence, b.correct)
    rows = np.array([place_b[question] for question in a.question], dtype=np.intp)
    return (c_a, z_a), (c_b[rows], z_b[rows])


def _places(answers: Answers, name: str) -> dict[object, int]:
    places: dict[object, int] = {}
    for row, question in enumerate(answers.question):
        if question in places:
            raise ValueError(f"question {question!r} appears twice in {name}, rows {places[question]} and {row}")
        places[question] = row
    if len(places) != np.size(answers.confidence):
        raise ValueError(f"{name} has {len(places)} questions and {np.size(answers.confidence)} confidences")
    return places


@dataclass(frozen=True)
class SeedSummary:
    """Mean and sample standard deviation (n - 1) over n seeds; no deviation of a single one."""

    mean: float
    std: float | None
    n: int


def over_seeds(values: Sequence[float]) -> SeedSummary:
    """Summarise one number a seed."""
    if len(values) == 0:
        raise ValueError("values is empty")
    array = np.asarray(values, dtype=np.float64)
    return SeedSummary(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))
