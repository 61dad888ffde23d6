"""How certain a measured number is: bootstrap intervals, null bands, paired comparisons, spread over seeds.

A number belongs to one run of a model, or is the mean over several runs (seeds). Questions are the unit: all rows of a
question are drawn together, and where runs share questions, a question is drawn, or swapped, in all of them together.

A metric may be undefined on a resample (AUROC of rows that are all right is nan). Such resamples are left out and
counted in `undefined`; where the value itself is undefined, the interval is nan. A small ECE can lie outside its own
percentile interval, since resampling only adds to it: `held` removes such an interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, compress, permutations
from math import isnan, nan
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike, NDArray

from catto.metrics import binning
from catto.metrics.binning import Bools, Floats, Groups, Ints, by_confidence, checked, checked_confidence, on_counts
from catto.problems import DataError

# A function of confidence and correct, also a row of METRICS or `partial(metric, bins=...)`.
MetricFunction = Callable[..., float]
Method = Literal["percentile", "bca"]
Tick = Callable[[], object]  # called once per step of a progress bar
Weights = NDArray[Any]  # (R, Q): how often each of Q questions counts in each of R resamples
Run = tuple[Floats, Bools, Ints]  # confidence, correct and number of the question of each row, (N,)

H = TypeVar("H", "Interval", "Comparison")

# A difference is marked where its corrected p-value lies below.
ALPHA = 0.05
OUTSIDE = "the value lies outside its own bootstrap interval"
# Parts of the grouped jackknife: the acceleration is a skewness, and 200 leave-one-part-out values estimate it well.
JACKKNIFE_PARTS = 200
# Questions per block of the draw; the counts of a block fit the cache.
BLOCK = 1 << 14
# Resamples computed at once: at most so many, and at most so many weights.
MOST_AT_ONCE, WEIGHTS_AT_ONCE = 100, 1 << 17
# Counts that are kept for the next number of the same questions, two bytes each.
KEPT_COUNTS = 1 << 23


@dataclass(frozen=True)
class Answers:
    """The answers of one run. question: N ids, or None where each row is a question; confidence, correct: (N,).

    source: what an error names, such as the file.
    """

    question: Sequence[object] | None
    confidence: ArrayLike
    correct: ArrayLike
    source: str | Path | None = None


@dataclass(frozen=True)
class Interval:
    """A value with its bootstrap interval; `undefined` resamples had no value and are left out."""

    value: float
    low: float
    high: float
    level: float
    undefined: int = 0
    reason: str | None = None  # why low and high are nan, where `held` removed them


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
    """Metric of a less that of b on the same questions, its bootstrap interval, and the two-sided p-value."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    level: float
    p_value: float
    undefined: int = 0
    reason: str | None = None  # why low and high are nan, where `held` removed them


def held(result: H) -> H:
    """Return the same without ends, and with a reason, where they do not hold the value, or the difference.

    >>> held(Interval(0.0, 0.018, 0.064, 0.95)).reason
    'the value lies outside its own bootstrap interval'
    """
    value = result.value if isinstance(result, Interval) else result.difference
    # Means of equal confidences differ by rounding. A comparison with nan is False.
    if value < result.low - 1e-12 or value > result.high + 1e-12:
        return replace(result, low=nan, high=nan, reason=OUTSIDE)
    return result


def _resampler(metrics: Sequence[MetricFunction], runs: Iterable[Run]) -> Callable[[Weights], Floats]:
    """Return what computes the mean over runs of each metric under weights of questions. (R, Q) -> (metrics, R).

    Each run is kept in rising order of confidence, so a resample is how often each distinct confidence occurs, and how
    often with a right answer: no row is copied or sorted again.
    """
    ready = []
    for c, z, question in runs:
        order, starts, value = by_confidence(c)
        ready.append((question[order], z[order], starts, value, [on_counts(metric)(value) for metric in metrics]))

    def values(weights: Weights) -> Floats:
        means = []
        for question, correct, starts, value, prepared in ready:
            count = weights.take(question, axis=1).astype(np.float64)
            right = count * correct
            if len(starts) < len(question):
                count, right = (np.add.reduceat(rows, starts, axis=1) for rows in (count, right))
            rows = Groups(value, count, right)
            means.append([metric(rows) for metric in prepared])
        return np.asarray(np.mean(means, axis=0))

    return values


class BootstrapOptions(TypedDict, total=False):
    """How often, how wide, from which seed; `tick` is called once per resample, simulation and swap."""

    resamples: int  # 1000
    level: float  # 0.95
    seed: int  # 0
    tick: Tick


def bootstrap(
    metric: MetricFunction,
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    questions: Sequence[object] | None = None,
    method: Method = "percentile",
    **options: Unpack[BootstrapOptions],
) -> Interval:
    """Return the metric and its bootstrap interval. (N,), (N,), questions: N ids.

    With `questions`, whole questions are drawn, so that candidates of one question stay together. Memory is that of
    one resample. `bca` leaves out single questions up to 200 of them, above that 200 random parts of the questions.
    The interval is of the *estimator*. Measured coverage of the 95 % percentile interval (1,000 simulated sets of 300
    rows, 500 resamples): accuracy 94.8 to 95.4 %, Brier 94.4 to 95.8 %, NLL 94.6 to 95.4 %. That of ECE depends on the
    world: over eight worlds that are off by 14 to 15 points it is 48 to 95 % (2,000 rows: 89 to 96 %), off by 5 points
    23 %, calibrated 0 %. Chance only ever adds to ECE, so its interval lies above the truth. Read it beside
    its null band, and print it `held`: without ends that do not hold the value.
    A single row, or rows that are all equal, give an interval of no width.

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

    Of one run, each equals `bootstrap` of that metric alone.
    """
    resamples, level, seed, tick = _filled(options)
    if method not in ("percentile", "bca"):
        raise ValueError(f"method is {method!r}, expected 'percentile' or 'bca'")
    columns = [checked(run.confidence, run.correct) for run in runs]
    codes, questions = _numbered([run.question for run in runs], [c for c, _ in columns])
    resampled = _resampler([*metrics.values()], [(*column, code) for column, code in zip(columns, codes, strict=True)])
    draws = left_out = np.hstack(list(map(resampled, question_counts(questions, resamples, seed, tick))))
    if method == "bca":  # leave out one part of the questions at a time; a single question stays
        parts = min(questions, JACKKNIFE_PARTS)
        part = default_rng(0).permutation(np.arange(questions) % parts)[None]
        left_out = np.hstack([resampled(part != (place if parts > 1 else -1)) for place in range(parts)])
    intervals = {}
    for (name, metric), row, left in zip(metrics.items(), draws, left_out, strict=True):
        value = float(np.mean([metric(c, z) for c, z in columns]))
        band = _band(row, level, partial(_bca_tails, value, left) if method == "bca" else None)
        low, high = (nan, nan) if isnan(value) else (band.low, band.high)
        intervals[name] = Interval(value, low, high, level, band.undefined)
    return intervals


def _filled(options: BootstrapOptions) -> tuple[int, float, int, Tick]:
    resamples, level = options.get("resamples", 1000), options.get("level", 0.95)
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, expected at least 1")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}, expected a number between 0 and 1")
    return resamples, level, options.get("seed", 0), options.get("tick", lambda: None)


def _band(draws: Floats, level: float, shift: Callable[[Floats, Floats], Floats] | None = None) -> NullBand:
    """Return mean and central band of the draws that are defined; `shift` moves the tails, given these draws. (R,)."""
    defined, tails = draws[~np.isnan(draws)], np.array([(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    if not len(defined):
        return NullBand(nan, nan, nan, level, len(draws))
    low, high = np.quantile(defined, tails if shift is None else shift(defined, tails)).tolist()
    return NullBand(float(defined.mean()), low, high, level, len(draws) - len(defined))


def _numbered(questions: Sequence[Sequence[object] | None], confidences: Sequence[Floats]) -> tuple[list[Ints], int]:
    """Number the questions of all runs; return the number of each row's question, and how many there are."""
    numbers: dict[object, int] = {}
    codes = []
    for ids, c in zip(questions, confidences, strict=True):
        code = np.arange(len(c))
        if ids is not None:
            if len(ids) != len(c):
                raise ValueError(f"questions has {len(ids)} rows, confidence has {len(c)}")
            code = np.array([numbers.setdefault(name, len(numbers)) for name in ids], dtype=np.intp)
        elif len(c) > BLOCK:  # by rising confidence, so that weights are read in the order of memory
            code[np.argsort(c, kind="stable")] = np.arange(len(c))
        codes.append(code)
    return codes, max(int(code.max()) for code in codes) + 1


def _parts(total: int, units: int, tick: Tick) -> Iterator[int]:
    """Cut so many resamples of so many units into parts that are computed at once."""
    # Freeing a block of 31 MB makes glibc keep freed memory up to twice that (mallopt(3), M_MMAP_THRESHOLD). Without it
    # the arrays of each resample of a million rows were mapped afresh, which took as long as the sums over them.
    np.empty(31 << 17)
    most = min(MOST_AT_ONCE, max(1, WEIGHTS_AT_ONCE // units))
    for start in range(0, total, most):
        size = min(most, total - start)
        yield size
        for _ in range(size):
            tick()


def question_counts(questions: int, resamples: int, seed: int, tick: Tick = lambda: None) -> Iterator[Weights]:
    """Draw as many questions as there are, with replacement: yield how often each was drawn, in parts of (R, Q).

    >>> [part.sum(axis=1).tolist() for part in question_counts(5, 3, seed=0)]
    [[5, 5, 5]]
    """
    kept = questions * resamples <= KEPT_COUNTS
    for counts in (_kept_counts if kept else _drawn_counts)(questions, resamples, seed):
        yield counts
        for _ in counts:
            tick()


@lru_cache(maxsize=2)
def _kept_counts(questions: int, resamples: int, seed: int) -> tuple[Weights, ...]:
    """Keep the last draws: a report resamples the same questions for hundreds of numbers."""
    return tuple(_drawn_counts(questions, resamples, seed))


def _drawn_counts(questions: int, resamples: int, seed: int) -> Iterator[Weights]:
    """Draw block by block, in the order in which memory is read.

    How many draws fall into each block of questions is multinomial, and within a block they are uniform: the same
    distribution as one draw over all.
    """
    rng, starts = default_rng(seed), np.arange(0, questions, BLOCK)
    lengths = np.diff(starts, append=questions)
    for size in _parts(resamples, questions, lambda: None):
        counts = np.empty((size, questions), dtype=np.uint16)  # small, so that gathering from it stays in the cache
        for row in counts:
            drawn = rng.multinomial(questions, lengths / questions)
            for start, length, times in zip(starts, lengths, drawn, strict=True):
                row[start : start + length] = np.bincount(rng.integers(0, length, size=times), minlength=length)
        yield counts


def _bca_tails(value: float, left_out: Floats, draws: Floats, tails: Floats) -> Floats:
    """Shift the tail probabilities by bias and acceleration (Efron, 1987). (2,) -> (2,)."""
    normal = NormalDist()
    below = float(np.mean(draws < value) + 0.5 * np.mean(draws == value))
    # All draws on one side would make the shift infinite; one draw in B + 1 is the least that B draws can show.
    bias = normal.inv_cdf(min(max(below, 1.0 / (len(draws) + 1)), len(draws) / (len(draws) + 1)))
    defined = left_out[~np.isnan(left_out)]
    offset = defined.mean() - defined if len(defined) else np.zeros(1)
    squares = float(np.sum(offset**2))
    acceleration = float(np.sum(offset**3)) / (6.0 * squares**1.5) if squares > 0.0 else 0.0
    shifted = [bias + normal.inv_cdf(tail) for tail in tails]
    return np.array([normal.cdf(bias + shift / (1.0 - acceleration * shift)) for shift in shifted])


def ratio_interval(numerator: Floats, denominator: Floats, **options: Unpack[BootstrapOptions]) -> Interval:
    """Return `sum(numerator) / sum(denominator)` and its percentile bootstrap interval over questions. (Q,), (Q,)."""
    resamples, level, seed, tick = _filled(options)
    parts = question_counts(len(numerator), resamples, seed, tick)
    band = _band(np.concatenate([(weights @ numerator) / (weights @ denominator) for weights in parts]), level)
    return Interval(float(numerator.sum() / denominator.sum()), band.low, band.high, level)


def null_band(metric: MetricFunction, confidence: ArrayLike, **options: Unpack[BootstrapOptions]) -> NullBand:
    """Simulate the metric under `correct ~ Bernoulli(confidence)`, `resamples` times. (N,).

    >>> from catto.metrics.errors import ece
    >>> null_band(ece, [0.0, 1.0], resamples=10).high
    0.0
    """
    return null_table({"metric": metric}, [Answers(None, confidence, ())], **options)["metric"]


def null_table(
    metrics: Mapping[str, MetricFunction], runs: Sequence[Answers], **options: Unpack[BootstrapOptions]
) -> dict[str, NullBand]:
    """Return the null band of each metric, of its mean over runs where there are several.

    Of one run, each equals `null_band` of that metric alone. Several answers to a question, in one run or in several,
    agree as far as their confidences allow: one number is drawn for all of them. Where they agree less, the band is
    too wide.
    """
    simulations, level, seed, tick = _filled(options)
    draws = np.zeros((len(metrics), simulations))
    columns = [checked_confidence(run.confidence) for run in runs]
    codes, units = _numbered([run.question for run in runs], columns)
    for place, (c, code) in enumerate(zip(columns, codes, strict=True)):
        rng = default_rng(seed)  # the same numbers for every run
        rising = np.argsort(c, kind="stable") if len(c) > BLOCK else np.arange(len(c))
        c, code = c[rising], code[rising]  # many are drawn in the order in which they are counted
        order, starts, value = by_confidence(c)
        count = np.diff(starts, append=len(c)).astype(np.float64)
        confidence_sum = count * value
        prepared = [on_counts(metric)(value) for metric in metrics.values()]
        values = []
        for size in _parts(simulations, max(units, len(c)), tick if place == 0 else lambda: None):
            uniform = rng.random((size, units))
            drawn = (uniform.take(code, axis=1) if units < len(c) or len(runs) > 1 else uniform) < c
            right = (drawn if len(c) > BLOCK else drawn.take(order, axis=1)).astype(np.float64)
            if len(starts) < len(c):
                right = np.add.reduceat(right, starts, axis=1)
            rows = Groups(value, np.broadcast_to(count, right.shape), right)
            vars(rows)["confidence_sum"] = np.broadcast_to(confidence_sum, right.shape)  # of every simulation the same
            values.append(np.array([metric(rows) for metric in prepared]))
        draws += np.hstack(values) / len(runs)
    return {name: _band(row, level) for name, row in zip(metrics, draws, strict=True)}


def compare(metric: MetricFunction, a: Answers, b: Answers, **options: Unpack[BootstrapOptions]) -> Comparison:
    """Compare two methods on the same questions, aligned by id; see `compare_table`.

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
    """
    resamples, level, seed, tick = _filled(options)
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} runs and b has {len(b)}, expected the same number, at least one")
    pairs = [_aligned(first, second) for first, second in zip(a, b, strict=True)]
    codes, questions = _numbered([run.question for run in a], [c for (c, _), _ in pairs])
    ranked = [tuple((binning.ranks(c), z) for c, z in pair) for pair in pairs]
    values, on_ranks = (
        np.array([[np.mean([metric(*pair[side]) for pair in given]) for side in (0, 1)] for metric in metrics.values()])
        for given in (pairs, ranked)
    )
    ordinal = np.isclose(values, on_ranks, rtol=0.0, atol=1e-12, equal_nan=True).all(axis=1)
    # The rows of b follow those of a, and its questions are numbered after a's: their weights say who answers what.
    parts = []
    for chosen, given in ((~ordinal, pairs), (ordinal, ranked)):
        runs = [
            (np.append(c_a, c_b), np.append(z_a, z_b), np.append(code, code + questions))
            for ((c_a, z_a), (c_b, z_b)), code in zip(given, codes, strict=True)
        ]
        if chosen.any():
            parts.append((chosen, _resampler([*compress(metrics.values(), chosen)], runs)))

    def differences(first: Weights, second: Weights) -> Floats:
        difference = np.empty((len(metrics), len(first)))
        for chosen, resampled in parts:
            difference[chosen] = resampled(np.hstack([first, second])) - resampled(np.hstack([second, first]))
        return difference

    drawn = question_counts(questions, resamples, seed, tick)
    draws = np.hstack([differences(weights, np.zeros_like(weights)) for weights in drawn])
    observed = np.abs(values[:, 0] - values[:, 1])
    rng, done, far, p_values = default_rng(seed), 0, np.zeros(len(metrics)), np.full(len(metrics), np.nan)
    running = ~np.isnan(observed)
    for size in chain(_parts(resamples, questions, tick), _parts(max(0, swaps - resamples), questions, tick)):
        if done >= resamples:
            running &= p_values < ALPHA
        if not running.any():
            break
        stay = rng.random((size, questions)) >= 0.5
        # Rounding must not break a tie; undefined counts as far.
        close = np.abs(differences(stay, ~stay)) < observed[:, None] - 1e-12
        far, done = far + np.sum(~close, axis=1), done + size
        p_values = np.where(running, (1.0 + far) / (1.0 + done), p_values)
    comparisons = {}
    for name, (value_a, value_b), row, p_value in zip(metrics, values.tolist(), draws, p_values.tolist(), strict=True):
        band = _band(row, level)
        ends = (band.low, band.high, level, p_value, band.undefined)
        comparisons[name] = Comparison(value_a, value_b, value_a - value_b, *ends)
    return comparisons


def _aligned(a: Answers, b: Answers) -> tuple[tuple[Floats, Bools], tuple[Floats, Bools]]:
    """Return confidence and correct of both, b in the order of a's questions.

    DataError where they do not answer the same questions, each once.
    """
    places: list[tuple[str | Path, dict[object, int]]] = []
    for answers, name in ((a, a.source or "a"), (b, b.source or "b")):
        if answers.question is None:
            raise DataError(name, None, "no column 'question' or 'id' that names the question to pair the answers by")
        place = {question: row for row, question in enumerate(answers.question)}
        if len(place) < len(answers.question):
            question = Counter(answers.question).most_common(1)[0][0]
            raise DataError(name, None, f"question {question!r} is in several rows; pairing needs one")
        if len(place) != np.size(answers.confidence):
            raise DataError(name, None, f"{len(place)} questions and {np.size(answers.confidence)} confidences")
        places.append((name, place))
    for (here, ours), (there, theirs) in permutations(places, 2):
        if missing := [question for question in ours if question not in theirs]:
            raise DataError(there, None, f"{len(missing)} questions of {here} are missing, first {missing[0]!r}")
    c, z = checked(b.confidence, b.correct)
    rows = np.array([place[question] for question in a.question or ()], dtype=np.intp)
    return checked(a.confidence, a.correct), (c[rows], z[rows])


@dataclass(frozen=True)
class SeedSummary:
    """Mean and sample standard deviation (n - 1) over n seeds; no deviation of a single one."""

    mean: float
    std: float | None
    n: int


def over_seeds(values: Sequence[float]) -> SeedSummary:
    """Summarise one number per seed.

    >>> over_seeds([1.0, 3.0]).mean
    2.0
    """
    if len(values) == 0:
        raise ValueError("values is empty")
    array = np.asarray(values, dtype=np.float64)
    return SeedSummary(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))
