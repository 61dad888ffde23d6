"""How certain a measured number is: bootstrap intervals, null bands, paired comparisons, spread over seeds.

A number belongs to one run of a model, or is the mean over several runs (seeds). Questions are the unit: all rows of a
question are drawn together, and where runs share questions, a question is drawn, or swapped, in all of them together.

A resample is a weight: how often each row counts. So a metric is called as `metric(confidence, correct, weight=...)`
with the weights of many resamples at once, (R, N). A metric without the parameter `weight` is called on the rows of
each resample in turn, which is slower.

A metric may be undefined on a resample (AUROC of rows that are all right is nan). Such resamples are left out and
counted in `undefined`; where the value itself is undefined, the interval is nan. A small ECE can lie outside its own
percentile interval, since resampling only adds to it: `drop_invalid_interval` removes such an interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from itertools import chain
from math import isnan, nan
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike, NDArray

from catto.errors import DataError
from catto.metrics.binning import (
    Bools,
    Floats,
    Ints,
    checked,
    checked_confidence,
    rank_shares,
    run_starts,
    sort_keys,
    total_weight,
)
from catto.metrics.sharing import share_results

# A function of confidence and correct, also a row of METRICS or `partial(metric, bins=...)`.
MetricFunction = Callable[..., float]
Method = Literal["percentile", "bca"]
Tick = Callable[[], object]  # called once per step of a progress bar
Weights = NDArray[Any]  # (R, Q): how often each of Q questions counts in each of R resamples

H = TypeVar("H", "Interval", "Comparison")

# A difference is marked where its corrected p-value lies below.
ALPHA = 0.05
OUTSIDE = "the value lies outside its own bootstrap interval"
# Means of equal numbers in another order differ by less.
ROUNDING = 1e-12
# Parts of the grouped jackknife: the acceleration is a skewness, and 200 leave-one-part-out values estimate it well.
JACKKNIFE_PARTS = 200
# Questions per block of the draw; the counts of a block fit the cache.
BLOCK = 1 << 14
# Resamples computed at once: at most so many, and at most so many weights.
MOST_AT_ONCE = 100
WEIGHTS_AT_ONCE = 1 << 17
# Counts that are kept for the next number of the same questions, two bytes each.
KEPT_COUNTS = 1 << 23


@dataclass(frozen=True)
class Answers:
    """The answers of one run.

    Attributes:
        question: N ids, or None where each row is a question.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        source: What an error names, such as the file.
    """

    question: Sequence[object] | None
    confidence: ArrayLike
    correct: ArrayLike
    source: str | Path | None = None


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


class BootstrapOptions(TypedDict, total=False):
    """How often, how wide, from which seed; `tick` is called once per resample, simulation and swap."""

    resamples: int  # 1000
    level: float  # 0.95
    seed: int  # 0
    tick: Tick


class _Options(NamedTuple):
    """Checked options with the defaults filled in."""

    resamples: int
    level: float
    seed: int
    tick: Tick


def _do_nothing() -> None:
    pass


def _fill_options(options: BootstrapOptions) -> _Options:
    filled = _Options(
        resamples=options.get("resamples", 1000),
        level=options.get("level", 0.95),
        seed=options.get("seed", 0),
        tick=options.get("tick", _do_nothing),
    )
    if filled.resamples < 1:
        raise ValueError(f"resamples is {filled.resamples}, expected at least 1")
    if not 0.0 < filled.level < 1.0:
        raise ValueError(f"level is {filled.level}, expected a number between 0 and 1")
    return filled


# ---- metrics of weighted rows


class _WeightedRun:
    """The rows of one run, for which weights of questions become weights of rows.

    Rows are kept by rising confidence. Rows that agree in confidence and correctness are merged into one, whose weight
    is the sum of theirs.
    """

    def __init__(
        self,
        confidence: Floats,
        correct: Bools,
        question: Ints,
    ) -> None:
        keys = sort_keys(confidence, correct)
        order = np.argsort(keys)
        self._starts = run_starts(keys[order])
        self._question = question[order]
        distinct = order[self._starts]
        self.confidence = confidence[distinct]
        self.correct = correct[distinct]

    def weigh_rows(self, weights: Weights) -> Floats:
        """Return the weight of each distinct row. (R, Q) -> (R, rows)."""
        of_rows = weights.take(self._question, axis=1).astype(np.float64)
        if len(self._starts) == len(self._question):
            return of_rows
        return np.add.reduceat(of_rows, self._starts, axis=1)


def _evaluate_runs(
    metrics: Sequence[MetricFunction],
    runs: Sequence[_WeightedRun],
    weights: Weights,
) -> Floats:
    """Return the mean over runs of each metric under each weighting of the questions. (R, Q) -> (metrics, R)."""
    values = np.empty((len(runs), len(metrics), len(weights)))
    for place, run in enumerate(runs):
        of_rows = run.weigh_rows(weights)
        for number, metric in enumerate(metrics):
            values[place, number] = _evaluate_metric(metric, run.confidence, run.correct, of_rows)
    return np.asarray(values.mean(axis=0))


def _evaluate_metric(
    metric: MetricFunction,
    confidence: Floats,
    correct: Bools,
    weights: Floats,
) -> Floats:
    """Return the metric under each weighting, nan where all weights are 0. (N,), (N,), (R, N) -> (R,)."""
    has_rows = total_weight(weights) > 0.0
    if not has_rows.all():
        values: Floats = np.full(len(weights), np.nan)
        if has_rows.any():
            values[has_rows] = _evaluate_metric(metric, confidence, correct, weights[has_rows])
        return values
    if _takes_weight(metric):
        return np.asarray(metric(confidence, correct, weight=weights))
    return np.array([_evaluate_on_copies(metric, confidence, correct, row) for row in weights])


def _takes_weight(metric: MetricFunction) -> bool:
    function = getattr(metric, "function", metric)  # of a row of METRICS
    return "weight" in signature(function).parameters


def _evaluate_on_copies(
    metric: MetricFunction,
    confidence: Floats,
    correct: Bools,
    weight: Floats,
) -> float:
    """Return the metric of rows that are repeated as often as they count."""
    times = weight.astype(np.intp)
    return metric(np.repeat(confidence, times), np.repeat(correct, times))


# ---- bootstrap


def bootstrap(
    metric: MetricFunction,
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    questions: Sequence[object] | None = None,
    method: Method = "percentile",
    **options: Unpack[BootstrapOptions],
) -> Interval:
    """Return the metric and its bootstrap interval.

    The interval is of the *estimator*. Measured coverage of the 95 % percentile interval (1,000 simulated sets of 300
    rows, 500 resamples): accuracy 94.8 to 95.4 %, Brier 94.4 to 95.8 %, NLL 94.6 to 95.4 %. That of ECE depends on the
    world: over eight worlds that are off by 14 to 15 points it is 48 to 95 % (2,000 rows: 89 to 96 %), off by 5 points
    23 %, calibrated 0 %. Chance only ever adds to ECE, so its interval lies above the truth. Read it next to
    its null band, and print it after `drop_invalid_interval`.
    A single row, or rows that are all equal, give an interval of no width.

    Args:
        metric: A function of confidence and correct; with a parameter `weight` it is computed for many resamples at
            once.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        questions: N ids. With them, whole questions are drawn, so that candidates of one question stay together.
        method: `percentile`, or `bca`, which leaves out single questions up to 200 of them, above that 200 random parts
            of the questions.
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import accuracy
    >>> interval = bootstrap(accuracy, [0.9, 0.8, 0.7, 0.6], [True, True, False, True], resamples=100)
    >>> interval.value, interval.high
    (0.75, 1.0)
    """
    run = Answers(questions, confidence, correct)
    return bootstrap_table({"metric": metric}, [run], method=method, **options)["metric"]


def bootstrap_table(
    metrics: Mapping[str, MetricFunction],
    runs: Sequence[Answers],
    *,
    method: Method = "percentile",
    **options: Unpack[BootstrapOptions],
) -> dict[str, Interval]:
    """Return the interval of each metric, of its mean over runs where there are several; all on the same resamples.

    Args:
        metrics: Name -> metric.
        runs: One or more runs. Of one run, each interval equals `bootstrap` of that metric alone.
        method: See `bootstrap`.
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import accuracy, brier
    >>> run = Answers(None, [0.9, 0.8], [True, True])
    >>> table = bootstrap_table({"accuracy": accuracy, "brier": brier}, [run], resamples=10)
    >>> table["accuracy"].value, round(table["brier"].value, 4)
    (1.0, 0.025)
    """
    filled = _fill_options(options)
    if method not in ("percentile", "bca"):
        raise ValueError(f"method is {method!r}, expected 'percentile' or 'bca'")
    columns = [checked(run.confidence, run.correct) for run in runs]
    numbering = _number_questions([run.question for run in runs], [c for c, _ in columns])
    weighted_runs = []
    for (c, z), question in zip(columns, numbering.of_rows, strict=True):
        weighted_runs.append(_WeightedRun(c, z, question))

    functions = list(metrics.values())
    batches = []
    with share_results():
        for weights in question_counts(numbering.questions, filled.resamples, filled.seed, filled.tick):
            batches.append(_evaluate_runs(functions, weighted_runs, weights))
    draws = np.hstack(batches)
    left_out = None
    if method == "bca":
        left_out = _leave_parts_out(functions, weighted_runs, numbering.questions)

    intervals = {}
    for place, (name, metric) in enumerate(metrics.items()):
        value = float(np.mean([metric(c, z) for c, z in columns]))
        tails = _central_tails(filled.level)
        if left_out is not None:
            tails = _shift_tails(tails, value, draws[place], left_out[place])
        band = _summarise_draws(draws[place], filled.level, tails)
        if isnan(value):
            band = replace(band, low=nan, high=nan)
        intervals[name] = Interval(value, band.low, band.high, filled.level, band.undefined)
    return intervals


def _leave_parts_out(
    functions: Sequence[MetricFunction],
    runs: Sequence[_WeightedRun],
    questions: int,
) -> Floats:
    """Return each metric without one part of the questions at a time; a single question stays. (metrics, parts)."""
    parts = min(questions, JACKKNIFE_PARTS)
    part_of_question = default_rng(0).permutation(np.arange(questions) % parts)
    values = []
    for part in range(parts):
        stays = part_of_question != part
        if parts == 1:
            stays = np.ones(questions, dtype=np.bool_)
        values.append(_evaluate_runs(functions, runs, stays[None]))
    return np.hstack(values)


def _central_tails(level: float) -> Floats:
    return np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])


def _summarise_draws(
    draws: Floats,
    level: float,
    tails: Floats | None = None,
) -> NullBand:
    """Return mean and band of the draws that are defined. (R,)."""
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return NullBand(nan, nan, nan, level, undefined=len(draws))
    if tails is None:
        tails = _central_tails(level)
    low, high = np.quantile(defined, tails).tolist()
    return NullBand(float(defined.mean()), low, high, level, undefined=len(draws) - len(defined))


def _shift_tails(
    tails: Floats,
    value: float,
    draws: Floats,
    left_out: Floats,
) -> Floats:
    """Shift the tail probabilities by bias and acceleration (Efron, 1987). (2,) -> (2,)."""
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return tails
    normal = NormalDist()
    below = float(np.mean(defined < value) + 0.5 * np.mean(defined == value))
    # All draws on one side would make the shift infinite; one draw in B + 1 is the least that B draws can show.
    least = 1.0 / (len(defined) + 1)
    most = len(defined) / (len(defined) + 1)
    bias = normal.inv_cdf(min(max(below, least), most))
    acceleration = _estimate_acceleration(left_out[~np.isnan(left_out)])
    shifted = []
    for tail in tails:
        quantile = bias + normal.inv_cdf(tail)
        shifted.append(normal.cdf(bias + quantile / (1.0 - acceleration * quantile)))
    return np.array(shifted)


def _estimate_acceleration(left_out: Floats) -> float:
    """Return a sixth of the skewness of the leave-one-out values, 0 where they do not differ."""
    if not len(left_out):
        return 0.0
    offset = left_out.mean() - left_out
    squares = float(np.sum(offset**2))
    if squares == 0.0:
        return 0.0
    cubes = float(np.sum(offset**3))
    return cubes / (6.0 * float(squares**1.5))


def ratio_interval(
    numerator: Floats,
    denominator: Floats,
    **options: Unpack[BootstrapOptions],
) -> Interval:
    """Return `sum(numerator) / sum(denominator)` and its percentile bootstrap interval over questions.

    Args:
        numerator: (Q,), one number per question.
        denominator: (Q,), above 0.
        options: See `BootstrapOptions`.

    >>> ratio_interval(np.array([1.0, 1.0]), np.array([2.0, 2.0]), resamples=10).value
    0.5
    """
    filled = _fill_options(options)
    batches = []
    for weights in question_counts(len(numerator), filled.resamples, filled.seed, filled.tick):
        batches.append((weights @ numerator) / (weights @ denominator))
    band = _summarise_draws(np.concatenate(batches), filled.level)
    value = float(numerator.sum() / denominator.sum())
    return Interval(value, band.low, band.high, filled.level)


# ---- draws of questions


class _Numbering(NamedTuple):
    """The number of each row's question, (N,) for every run, and how many questions there are."""

    of_rows: list[Ints]
    questions: int


def _number_questions(ids: Sequence[Sequence[object] | None], confidences: Sequence[Floats]) -> _Numbering:
    """Number the questions of all runs together; without ids, each row is a question."""
    number_of: dict[object, int] = {}
    of_rows: list[Ints] = []
    for names, c in zip(ids, confidences, strict=True):
        numbers = np.arange(len(c))
        if names is not None:
            if len(names) != len(c):
                raise ValueError(f"questions has {len(names)} rows, confidence has {len(c)}")
            numbers = np.array([number_of.setdefault(name, len(number_of)) for name in names], dtype=np.intp)
        elif len(c) > BLOCK:
            # By rising confidence, so that weights are read in the order of memory.
            numbers[np.argsort(c, kind="stable")] = np.arange(len(c))
        of_rows.append(numbers)
    highest = max(int(numbers.max()) for numbers in of_rows)
    return _Numbering(of_rows, highest + 1)


def _batch_sizes(
    total: int,
    units: int,
    tick: Tick,
) -> Iterator[int]:
    """Cut so many resamples of so many units into batches that are computed at once."""
    # Freeing a block of 31 MB makes glibc keep freed memory up to twice that (mallopt(3), M_MMAP_THRESHOLD). Without it
    # the arrays of each resample of a million rows were mapped afresh, which took as long as the sums over them.
    np.empty(31 << 17)
    most = min(MOST_AT_ONCE, max(1, WEIGHTS_AT_ONCE // units))
    for start in range(0, total, most):
        size = min(most, total - start)
        yield size
        for _ in range(size):
            tick()


def question_counts(
    questions: int,
    resamples: int,
    seed: int,
    tick: Tick = _do_nothing,
) -> Iterator[Weights]:
    """Draw as many questions as there are, with replacement, `resamples` times.

    Args:
        questions: Number of questions Q.
        resamples: Number of resamples.
        seed: Of the random numbers.
        tick: Called once per resample.

    Yields:
        How often each question was drawn, in batches of (R, Q).

    >>> [batch.sum(axis=1).tolist() for batch in question_counts(5, 3, seed=0)]
    [[5, 5, 5]]
    """
    draw = _draw_and_keep_counts if questions * resamples <= KEPT_COUNTS else _draw_counts
    for counts in draw(questions, resamples, seed):
        yield counts
        for _ in counts:
            tick()


@lru_cache(maxsize=2)
def _draw_and_keep_counts(
    questions: int,
    resamples: int,
    seed: int,
) -> tuple[Weights, ...]:
    """Keep the last draws: a report resamples the same questions for hundreds of numbers."""
    return tuple(_draw_counts(questions, resamples, seed))


def _draw_counts(
    questions: int,
    resamples: int,
    seed: int,
) -> Iterator[Weights]:
    """Draw block by block, in the order in which memory is read.

    How many draws fall into each block of questions is multinomial, and within a block they are uniform: the same
    distribution as one draw over all.
    """
    rng = default_rng(seed)
    starts = np.arange(0, questions, BLOCK)
    lengths = np.diff(starts, append=questions)
    for size in _batch_sizes(resamples, questions, _do_nothing):
        counts = np.empty((size, questions), dtype=np.uint16)  # small, so that gathering from it stays in the cache
        for row in counts:
            draws_of_block = rng.multinomial(questions, lengths / questions)
            for start, length, times in zip(starts, lengths, draws_of_block, strict=True):
                drawn = rng.integers(0, length, size=times)
                row[start : start + length] = np.bincount(drawn, minlength=length)
        yield counts


# ---- null bands


def null_band(
    metric: MetricFunction,
    confidence: ArrayLike,
    **options: Unpack[BootstrapOptions],
) -> NullBand:
    """Simulate the metric under `correct ~ Bernoulli(confidence)`, `resamples` times.

    Args:
        metric: A function of confidence and correct.
        confidence: (N,) in [0, 1].
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import ece
    >>> null_band(ece, [0.0, 1.0], resamples=10).high
    0.0
    """
    return null_table({"metric": metric}, [Answers(None, confidence, ())], **options)["metric"]


def null_table(
    metrics: Mapping[str, MetricFunction],
    runs: Sequence[Answers],
    **options: Unpack[BootstrapOptions],
) -> dict[str, NullBand]:
    """Return the null band of each metric, of its mean over runs where there are several.

    Several answers to a question, in one run or in several, agree as far as their confidences allow: one number is
    drawn for all of them. Where they agree less, the band is too wide.

    Args:
        metrics: Name -> metric.
        runs: One or more runs; `correct` is not read. Of one run, each band equals `null_band` of that metric alone.
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import accuracy
    >>> null_table({"accuracy": accuracy}, [Answers(None, [1.0, 1.0], ())], resamples=10)["accuracy"].mean
    1.0
    """
    filled = _fill_options(options)
    confidences = [checked_confidence(run.confidence) for run in runs]
    numbering = _number_questions([run.question for run in runs], confidences)
    functions = list(metrics.values())
    draws = np.zeros((len(metrics), filled.resamples))
    for place, (c, question) in enumerate(zip(confidences, numbering.of_rows, strict=True)):
        options_of_run = filled if place == 0 else filled._replace(tick=_do_nothing)
        rows_are_questions = len(runs) == 1 and numbering.questions >= len(c)
        question_of_row = None if rows_are_questions else question
        with share_results():
            simulated = _simulate_run(functions, c, question_of_row, numbering.questions, options_of_run)
        draws += simulated / len(runs)
    return {name: _summarise_draws(row, filled.level) for name, row in zip(metrics, draws, strict=True)}


def _simulate_run(
    functions: Sequence[MetricFunction],
    confidence: Floats,
    question: Ints | None,
    questions: int,
    options: _Options,
) -> Floats:
    """Return each metric of simulated correctness. question None: each row has a number of its own. (metrics, R)."""
    order = np.argsort(confidence, kind="stable")
    c = confidence[order]
    starts = run_starts(c)
    count = np.diff(starts, append=len(c)).astype(np.float64)
    value = c[starts]
    # Many rows are drawn in the order in which they are counted.
    in_rising_order = len(c) > BLOCK
    rng = default_rng(options.seed)  # the same numbers for every run
    once = np.ones((1, len(c)))
    batches = []
    for size in _batch_sizes(options.resamples, max(questions, len(c)), options.tick):
        uniform = rng.random((size, questions))
        if question is not None:
            uniform = uniform.take(question[order], axis=1)
        elif not in_rising_order:
            uniform = uniform.take(order, axis=1)
        is_right = uniform < c
        if size == 1 and len(starts) == len(c):
            # One simulation of distinct confidences needs no counting: this halves the rows of large files.
            outcomes = _Outcomes(c, is_right[0], once)
        else:
            right = np.add.reduceat(is_right.astype(np.float64), starts, axis=1)
            outcomes = _count_outcomes(value, count, right)
        batches.append(np.array([_evaluate_metric(metric, *outcomes) for metric in functions]))
    return np.hstack(batches)


class _Outcomes(NamedTuple):
    """Simulated rows and how often each occurs. (N,), (N,), (R, N)."""

    confidence: Floats
    correct: Bools
    weights: Floats


def _count_outcomes(
    value: Floats,
    count: Floats,
    right: Floats,
) -> _Outcomes:
    """Return a wrong and a right row for each confidence, weighted by how many are. (G,), (G,), (R, G) -> 2 G rows."""
    wrong = count - right
    weights = np.stack([wrong, right], axis=-1).reshape(len(right), -1)
    correct = np.tile([False, True], len(value))
    return _Outcomes(np.repeat(value, 2), correct, weights)


# ---- comparisons


def compare(
    metric: MetricFunction,
    a: Answers,
    b: Answers,
    **options: Unpack[BootstrapOptions],
) -> Comparison:
    """Compare two methods on the same questions, aligned by id; see `compare_table`.

    Args:
        metric: A function of confidence and correct.
        a: Answers of the first method, one per question.
        b: Answers of the second method to the same questions, in any order.
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import accuracy
    >>> a, b = Answers("xyz", [0.9, 0.8, 0.7], [1, 1, 1]), Answers("zyx", [0.9, 0.8, 0.7], [1, 0, 0])
    >>> round(compare(accuracy, a, b, resamples=100).difference, 4)
    0.6667
    """
    return compare_table({"metric": metric}, [a], [b], **options)["metric"]


def compare_table(
    metrics: Mapping[str, MetricFunction],
    a: Sequence[Answers],
    b: Sequence[Answers],
    *,
    swaps: int = 0,
    **options: Unpack[BootstrapOptions],
) -> dict[str, Comparison]:
    """Compare two methods run by run on the same questions: each metric's mean over runs of a less that of b.

    Interval: percentile bootstrap over questions, both methods on the same draw. p-value: swap test, where each
    question's two answers change places with probability 1/2; `(1 + swaps at least as far from 0) / (1 + swaps)`.
    A swap on which the metric is undefined counts as far from 0. Where the difference itself is undefined, so is the
    p-value. A metric of the order alone (AUROC) is swapped on ranks within each method, whose scales may differ.

    There are as many swaps as resamples. If those give a p-value below ALPHA and `swaps` is larger, the test continues
    to `swaps`: a correction for many comparisons needs small p-values, and only a test that may still show something
    needs the work. Stopping the others early can only lose differences.

    Args:
        metrics: Name -> metric.
        a: Runs of the first method, one answer per question each.
        b: As many runs of the second method; each answers the questions of the run of a in the same place.
        swaps: Largest number of swaps, see above.
        options: See `BootstrapOptions`.

    >>> from catto.metrics.errors import accuracy
    >>> a, b = Answers("xy", [0.9, 0.8], [1, 1]), Answers("xy", [0.9, 0.8], [1, 0])
    >>> compare_table({"accuracy": accuracy}, [a], [b], resamples=10)["accuracy"].difference
    0.5
    """
    filled = _fill_options(options)
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} runs and b has {len(b)}, expected the same number, at least one")
    pairs = [_align_answers(first, second) for first, second in zip(a, b, strict=True)]
    numbering = _number_questions([run.question for run in a], [pair.confidence_a for pair in pairs])
    paired = _PairedRuns(list(metrics.values()), pairs, numbering)

    with share_results():
        batches = []
        for weights in question_counts(numbering.questions, filled.resamples, filled.seed, filled.tick):
            nobody = np.zeros_like(weights)
            batches.append(paired.evaluate_differences(weights, nobody))
        draws = np.hstack(batches)
        p_values = _test_by_swaps(paired, numbering.questions, swaps, filled)

    comparisons = {}
    for place, name in enumerate(metrics):
        value_a, value_b = paired.values[place].tolist()
        band = _summarise_draws(draws[place], filled.level)
        comparisons[name] = Comparison(
            a=value_a,
            b=value_b,
            difference=value_a - value_b,
            low=band.low,
            high=band.high,
            level=filled.level,
            p_value=float(p_values[place]),
            undefined=band.undefined,
        )
    return comparisons


class _Pair(NamedTuple):
    """One run of two methods, row by row on the same questions. (N,) each."""

    confidence_a: Floats
    correct_a: Bools
    confidence_b: Floats
    correct_b: Bools


class _PairedRuns:
    """Metrics of two methods under weights that say how often each of the two answers a question.

    Attributes:
        values: (metrics, 2), the mean over runs of each metric of a and of b.
    """

    def __init__(
        self,
        functions: Sequence[MetricFunction],
        pairs: Sequence[_Pair],
        numbering: _Numbering,
    ) -> None:
        ranked_pairs = [_rank_confidences(pair) for pair in pairs]
        self.values = _measure_both(functions, pairs)
        values_of_ranks = _measure_both(functions, ranked_pairs)
        is_equal = np.isclose(self.values, values_of_ranks, rtol=0.0, atol=ROUNDING, equal_nan=True)
        reads_order_only = is_equal.all(axis=1)
        # Places of metrics, these metrics, and the runs that they read.
        self._parts: list[tuple[Ints, list[MetricFunction], list[_WeightedRun]]] = []
        for chosen, chosen_pairs in ((~reads_order_only, pairs), (reads_order_only, ranked_pairs)):
            places = np.flatnonzero(chosen)
            if len(places):
                runs = _join_pairs(chosen_pairs, numbering)
                self._parts.append((places, [functions[int(place)] for place in places], runs))

    def evaluate_differences(self, first: Weights, second: Weights) -> Floats:
        """Return each metric of one method less that of the other, (metrics, R).

        The one method gives a's answers as often as `first` says and b's as often as `second` says; the other one the
        other way round. Both (R, Q).
        """
        one = np.hstack([first, second])
        other = np.hstack([second, first])
        differences = np.empty((len(self.values), len(first)))
        for places, functions, runs in self._parts:
            differences[places] = _evaluate_runs(functions, runs, one) - _evaluate_runs(functions, runs, other)
        return differences


def _rank_confidences(pair: _Pair) -> _Pair:
    return pair._replace(confidence_a=rank_shares(pair.confidence_a), confidence_b=rank_shares(pair.confidence_b))


def _measure_both(functions: Sequence[MetricFunction], pairs: Sequence[_Pair]) -> Floats:
    """Return the mean over runs of each metric of a and of b. (metrics, 2)."""
    values = np.empty((len(functions), 2))
    for place, metric in enumerate(functions):
        values[place, 0] = np.mean([metric(pair.confidence_a, pair.correct_a) for pair in pairs])
        values[place, 1] = np.mean([metric(pair.confidence_b, pair.correct_b) for pair in pairs])
    return values


def _join_pairs(pairs: Sequence[_Pair], numbering: _Numbering) -> list[_WeightedRun]:
    """Put the rows of b after those of a, and number its questions after a's."""
    runs = []
    for pair, question in zip(pairs, numbering.of_rows, strict=True):
        confidence = np.append(pair.confidence_a, pair.confidence_b)
        correct = np.append(pair.correct_a, pair.correct_b)
        runs.append(_WeightedRun(confidence, correct, np.append(question, question + numbering.questions)))
    return runs


def _test_by_swaps(
    paired: _PairedRuns,
    questions: int,
    swaps: int,
    options: _Options,
) -> Floats:
    """Return the p-value of each metric, nan where its difference is undefined. (metrics,)."""
    observed = np.abs(paired.values[:, 0] - paired.values[:, 1])
    is_running = ~np.isnan(observed)
    p_values: Floats = np.full(len(observed), np.nan)
    far = np.zeros(len(observed))
    done = 0
    rng = default_rng(options.seed)
    first_swaps = _batch_sizes(options.resamples, questions, options.tick)
    further_swaps = _batch_sizes(max(0, swaps - options.resamples), questions, options.tick)
    for size in chain(first_swaps, further_swaps):
        if done >= options.resamples:
            is_running &= p_values < ALPHA
        if not is_running.any():
            break
        stays = rng.random((size, questions)) >= 0.5
        differences = paired.evaluate_differences(stays, ~stays)
        # Rounding must not break a tie. A comparison with nan is False, so undefined counts as far.
        is_close = np.abs(differences) < observed[:, None] - ROUNDING
        far += np.sum(~is_close, axis=1)
        done += size
        p_values = np.where(is_running, (1.0 + far) / (1.0 + done), p_values)
    return p_values


def _align_answers(a: Answers, b: Answers) -> _Pair:
    """Bring the rows of b into the order of a's questions.

    DataError where they do not answer the same questions, each once.
    """
    name_a = a.source or "a"
    name_b = b.source or "b"
    rows_a = _index_questions(a, name_a)
    rows_b = _index_questions(b, name_b)
    _require_questions(rows_a, name_a, rows_b, name_b)
    _require_questions(rows_b, name_b, rows_a, name_a)
    confidence_a, correct_a = checked(a.confidence, a.correct)
    confidence_b, correct_b = checked(b.confidence, b.correct)
    order = np.array([rows_b[question] for question in rows_a], dtype=np.intp)
    return _Pair(confidence_a, correct_a, confidence_b[order], correct_b[order])


def _index_questions(answers: Answers, name: str | Path) -> dict[object, int]:
    """Return the row of each question, in the order of the rows; DataError where a question has several rows."""
    if answers.question is None:
        raise DataError(name, None, "no column 'question' or 'id' that names the question to pair the answers by")
    row_of = {question: row for row, question in enumerate(answers.question)}
    if len(row_of) < len(answers.question):
        most_frequent = Counter(answers.question).most_common(1)[0][0]
        raise DataError(name, None, f"question {most_frequent!r} is in several rows; pairing needs one")
    if len(row_of) != np.size(answers.confidence):
        raise DataError(name, None, f"{len(row_of)} questions and {np.size(answers.confidence)} confidences")
    return row_of


def _require_questions(
    wanted: Mapping[object, int],
    name: str | Path,
    present: Mapping[object, int],
    present_name: str | Path,
) -> None:
    missing = [question for question in wanted if question not in present]
    if missing:
        raise DataError(present_name, None, f"{len(missing)} questions of {name} are missing, first {missing[0]!r}")


# ---- seeds


@dataclass(frozen=True)
class SeedSummary:
    """Mean and sample standard deviation (n - 1) over n seeds; no deviation of a single one."""

    mean: float
    std: float | None
    n: int


def summarise_seeds(values: Sequence[float]) -> SeedSummary:
    """Summarise one number per seed.

    >>> summarise_seeds([1.0, 3.0]).mean
    2.0
    """
    if len(values) == 0:
        raise ValueError("values is empty")
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 1:
        return SeedSummary(float(array.mean()), None, 1)
    return SeedSummary(float(array.mean()), float(array.std(ddof=1)), len(array))
