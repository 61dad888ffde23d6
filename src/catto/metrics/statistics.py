"""How certain a measured number is: bootstrap intervals, null bands, spread over seeds.

A number belongs to one run of a model, or is the mean over several runs (seeds). Questions are the sampling unit: all
rows of a question are drawn together. If runs share a question, it is drawn, or swapped, in all of them together.

A metric may be undefined on a resample (AUROC of rows that are all right is nan). Such resamples are left out and
counted in `undefined`; if the value itself is undefined, the interval is nan. A small ECE can lie outside its own
percentile interval, since resampling only adds to it: `drop_invalid_interval` removes such an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from statistics import NormalDist
from typing import Literal, NamedTuple, Unpack

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike

from catto.metrics.binning import (
    Bools,
    Floats,
    Ints,
    check_columns,
    check_confidence,
    run_starts,
)
from catto.metrics.intervals import (
    Interval,
    NullBand,
    central_tails,
    summarise_draws,
)
from catto.metrics.resampling import (
    BLOCK,
    Answers,
    BootstrapOptions,
    MetricFunction,
    ResamplingOptions,
    WeightedRun,
    cut_into_batches,
    draw_question_counts,
    evaluate_metric,
    evaluate_runs,
    fill_options,
    ignore_tick,
    number_questions,
)
from catto.metrics.sharing import share_results

Method = Literal["percentile", "bca"]
# Parts of the grouped jackknife: the acceleration is a skewness, and 200 leave-one-part-out values estimate it well.
JACKKNIFE_PARTS = 200


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

    The coverage of the 95 % percentile interval was measured on 1,000 simulated sets of 300 rows, with 500 resamples:
    accuracy 94.8 to 95.4 %, Brier 94.4 to 95.8 %, NLL 94.6 to 95.4 %. For ECE, it depends on the simulated model. With
    a true ECE of 14 to 15 points, it is 48 to 95 % over eight models (2,000 rows: 89 to 96 %). With a true ECE of 5
    points it is 23 %, and for a calibrated model 0 %. Chance only ever adds to ECE, so its interval lies above the true
    value. Therefore read it next to its null band (`null_band`), and print it after `drop_invalid_interval`.

    A single row, or rows that are all equal, give an interval of zero width.

    Args:
        metric: A function of confidence and correct; with a parameter `weight` it is computed for many resamples at
            once.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        questions: N ids. With them, whole questions are drawn, so that candidates of one question stay together.
        method: `percentile` or `bca`. The jackknife of `bca` leaves out one question at a time; with more than 200
            questions, it leaves out one of 200 random parts of the questions at a time.
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
    """Return the interval of each metric, or of its mean over several runs; all metrics use the same resamples.

    Args:
        metrics: Name -> metric.
        runs: One or more runs. For a single run, each interval equals `bootstrap` of that metric alone.
        method: See `bootstrap`.
        options: See `BootstrapOptions`.

    Returns:
        Name -> interval. Its ends are nan if the metric of all rows is undefined.

    Raises:
        ValueError: An option or a column is out of range, or a run does not have one question id per row.

    >>> from catto.metrics.errors import accuracy, brier
    >>> run = Answers(None, [0.9, 0.8], [True, True])
    >>> table = bootstrap_table({"accuracy": accuracy, "brier": brier}, [run], resamples=10)
    >>> table["accuracy"].value, round(table["brier"].value, 4)
    (1.0, 0.025)
    """
    filled = fill_options(options)
    if method not in ("percentile", "bca"):
        raise ValueError(f"method is {method!r}, expected 'percentile' or 'bca'")
    columns = [check_columns(run.confidence, run.correct) for run in runs]
    numbering = number_questions([run.question for run in runs], [c for c, _ in columns])
    weighted_runs = []
    for (c, z), question in zip(columns, numbering.of_rows, strict=True):
        weighted_runs.append(WeightedRun(c, z, question))

    functions = list(metrics.values())
    batches = []
    with share_results():
        for weights in draw_question_counts(numbering.questions, filled.resamples, filled.seed, filled.tick):
            batches.append(evaluate_runs(functions, weighted_runs, weights))
    draws = np.hstack(batches)
    jackknife = None
    if method == "bca":
        jackknife = _leave_parts_out(functions, weighted_runs, numbering.questions)

    intervals = {}
    for index, (name, metric) in enumerate(metrics.items()):
        estimate = float(np.mean([metric(c, z) for c, z in columns]))
        tails = central_tails(filled.level)
        if jackknife is not None:
            tails = _shift_tails(tails, estimate=estimate, draws=draws[index], jackknife=jackknife[index])
        band = summarise_draws(draws[index], filled.level, tails)
        if isnan(estimate):
            band = replace(band, low=nan, high=nan)
        intervals[name] = Interval(estimate, band.low, band.high, filled.level, band.undefined)
    return intervals


def _leave_parts_out(
    functions: Sequence[MetricFunction],
    runs: Sequence[WeightedRun],
    questions: int,
) -> Floats:
    """Return each metric without one part of the questions at a time: the grouped jackknife. (metrics, parts).

    A single question is not left out, because no rows would remain.
    """
    parts = min(questions, JACKKNIFE_PARTS)
    part_of_question = default_rng(0).permutation(np.arange(questions) % parts)
    values = []
    for part in range(parts):
        stays = part_of_question != part
        if parts == 1:
            stays = np.ones(questions, dtype=np.bool_)
        values.append(evaluate_runs(functions, runs, stays[None]))
    return np.hstack(values)


def _shift_tails(
    tails: Floats,
    *,
    estimate: float,
    draws: Floats,
    jackknife: Floats,
) -> Floats:
    """Return the tail probabilities of the BCa interval, shifted by bias and acceleration (Efron, 1987).

    Args:
        tails: (2,) probabilities strictly between 0 and 1, as `central_tails` gives them.
        estimate: The metric of all rows.
        draws: (R,) values of the metric on the resamples; undefined values (nan) are ignored.
        jackknife: (parts,) values of the metric without one part each; undefined values (nan) are ignored.

    Returns:
        (2,) probabilities; `tails` unchanged if no draw is defined.
    """
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return tails
    normal = NormalDist()
    share_below = float(np.mean(defined < estimate) + 0.5 * np.mean(defined == estimate))
    # If all draws were on one side, the bias would be infinite. n draws cannot show a share below one in n + 1.
    smallest_share = 1.0 / (len(defined) + 1)
    largest_share = len(defined) / (len(defined) + 1)
    bias = normal.inv_cdf(min(max(share_below, smallest_share), largest_share))
    acceleration = _estimate_acceleration(jackknife[~np.isnan(jackknife)])
    shifted = []
    for tail in tails:
        biased_score = bias + normal.inv_cdf(tail)
        shifted_score = bias + biased_score / (1.0 - acceleration * biased_score)
        shifted.append(normal.cdf(shifted_score))
    return np.array(shifted)


def _estimate_acceleration(jackknife: Floats) -> float:
    """Return the skewness of the n leave-one-out values divided by 6 sqrt(n); 0 if all values are equal."""
    if not len(jackknife):
        return 0.0
    offset = jackknife.mean() - jackknife
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
    filled = fill_options(options)
    batches = []
    for weights in draw_question_counts(len(numerator), filled.resamples, filled.seed, filled.tick):
        batches.append((weights @ numerator) / (weights @ denominator))
    band = summarise_draws(np.concatenate(batches), filled.level)
    value = float(numerator.sum() / denominator.sum())
    return Interval(value, band.low, band.high, filled.level)


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
    """Return the null band of each metric, or of its mean over several runs.

    The null band is what a perfectly calibrated model with the same confidences would score. Each simulation draws one
    random number per question. All answers to a question, in one run or in several, therefore agree as far as their
    confidences allow. If the real answers agree less, the band is too wide.

    Args:
        metrics: Name -> metric.
        runs: One or more runs; `correct` is not read. For a single run, each band equals `null_band` of that metric
            alone.
        options: See `BootstrapOptions`.

    Returns:
        Name -> band.

    Raises:
        ValueError: An option or a confidence is out of range, or a run does not have one question id per row.

    >>> from catto.metrics.errors import accuracy
    >>> null_table({"accuracy": accuracy}, [Answers(None, [1.0, 1.0], ())], resamples=10)["accuracy"].mean
    1.0
    """
    filled = fill_options(options)
    confidences = [check_confidence(run.confidence) for run in runs]
    numbering = number_questions([run.question for run in runs], confidences)
    functions = list(metrics.values())
    mean_draws = np.zeros((len(metrics), filled.resamples))
    for run_index, (c, question) in enumerate(zip(confidences, numbering.of_rows, strict=True)):
        is_first_run = run_index == 0
        # One tick per simulation, however many runs it covers.
        options_of_run = filled if is_first_run else filled._replace(tick=ignore_tick)
        # A single run whose questions do not repeat may be simulated in the fastest order. Several runs must use the
        # same number for the same question.
        rows_are_questions = len(runs) == 1 and numbering.questions >= len(c)
        question_of_row = None if rows_are_questions else question
        with share_results():
            draws = _simulate_run(functions, c, question_of_row, numbering.questions, options_of_run)
        mean_draws += draws / len(runs)
    return {name: summarise_draws(row, filled.level) for name, row in zip(metrics, mean_draws, strict=True)}


def _simulate_run(
    functions: Sequence[MetricFunction],
    confidence: Floats,
    question_of_row: Ints | None,
    questions: int,
    options: ResamplingOptions,
) -> Floats:
    """Return each metric under simulated correctness, (metrics, R).

    A row is right if the uniform random number of its question is below the confidence of the row.

    Args:
        functions: The metrics.
        confidence: (N,) in [0, 1].
        question_of_row: (N,) number of each row's question; None if each row is a question of its own.
        questions: Number of questions.
        options: Number of simulations, seed and tick.
    """
    order = np.argsort(confidence, kind="stable")
    c = confidence[order]
    starts = run_starts(c)
    count = np.diff(starts, append=len(c)).astype(np.float64)
    value = c[starts]
    number_of_row: Ints | None = order
    if question_of_row is not None:
        number_of_row = question_of_row[order]
    elif len(c) > BLOCK:
        # The sorted rows use the random numbers in the order in which they are drawn, so memory is read in order.
        number_of_row = None
    has_distinct_confidences = len(starts) == len(c)
    rng = default_rng(options.seed)  # the same numbers for every run
    count_each_once = np.ones((1, len(c)))
    batches = []
    for size in cut_into_batches(options.resamples, max(questions, len(c)), options.tick):
        uniform = rng.random((size, questions))
        if number_of_row is not None:
            uniform = uniform.take(number_of_row, axis=1)
        is_right = uniform < c
        if size == 1 and has_distinct_confidences:
            # Large files are simulated one at a time. If no two rows are equal, the metrics read N rows instead of the
            # 2 N of `_count_outcomes`.
            outcomes = _Outcomes(c, is_right[0], count_each_once)
        else:
            right = np.add.reduceat(is_right.astype(np.float64), starts, axis=1)
            outcomes = _count_outcomes(value, count, right)
        batches.append(np.array([evaluate_metric(metric, *outcomes) for metric in functions]))
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
    """Return a wrong and a right row for each confidence, weighted by how many there are of each.

    Args:
        value: (G,) distinct confidences.
        count: (G,) number of rows with each confidence.
        right: (R, G) number of right rows with each confidence, per simulation.

    Returns:
        2 G rows.
    """
    wrong = count - right
    weights = np.stack([wrong, right], axis=-1).reshape(len(right), -1)
    correct = np.tile([False, True], len(value))
    return _Outcomes(np.repeat(value, 2), correct, weights)


# ---- seeds


@dataclass(frozen=True)
class SeedSummary:
    """Mean and sample standard deviation (n - 1) over n seeds; the deviation is None for a single seed."""

    mean: float
    std: float | None
    n: int


def summarise_seeds(values: Sequence[float]) -> SeedSummary:
    """Summarise one number per seed; an empty list raises a ValueError.

    >>> summarise_seeds([1.0, 3.0]).mean
    2.0
    """
    if len(values) == 0:
        raise ValueError("values is empty")
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 1:
        return SeedSummary(float(array.mean()), None, 1)
    return SeedSummary(float(array.mean()), float(array.std(ddof=1)), len(array))
