"""How certain a measured number is: bootstrap intervals, null bands, spread over seeds.

A number belongs to one run of a model, or is the mean over several runs (seeds). Questions are the sampling unit: all
rows of a question are drawn together. If runs share a question, it is drawn, or swapped, in all of them together.

A metric may be undefined on a resample (AUROC of rows that are all right is nan). Such resamples are left out and
counted in `undefined`; if the value itself is undefined, the interval is nan. A small ECE can lie outside its own
percentile interval, because the ECE of a resample tends to be larger: `drop_invalid_interval` removes such an interval.
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
    number_questions,
    show_no_progress,
)
from catto.metrics.sharing import share_results

Method = Literal["percentile", "bca"]
# Maximum number of parts of the grouped jackknife. It estimates only a skewness, for which 200 values are enough.
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

    The coverage of the 95 % percentile interval was measured on 1,000 simulated sets of 300 rows, with 500 resamples.
    It was 94.8 to 95.4 % for accuracy, 94.4 to 95.8 % for the Brier score and 94.6 to 95.4 % for the NLL.

    For ECE, the coverage depends on the simulated model. With a true ECE of 14 to 15 points, it was 48 to 95 % over
    eight models (2,000 rows: 89 to 96 %). With a true ECE of 5 points it was 23 %, and for a calibrated model 0 %. The
    reason is that chance adds to ECE, so its interval tends to lie above the true value. Therefore read it next to its
    null band (`null_band`), and print it after `drop_invalid_interval`.

    A single row, or rows that are all equal, give an interval of zero width.

    Args:
        metric: A function of confidence and correct. If it has a parameter `weight`, it is computed for many resamples
            at once.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        questions: N question ids. All rows of a question are drawn together. None means that each row is a question.
        method: `percentile`, or `bca` for the bias-corrected and accelerated interval. The jackknife of `bca` leaves
            out one question at a time; with more than 200 questions, it leaves out one of 200 random parts of the
            questions at a time.
        options: See `BootstrapOptions`.

    Returns:
        The metric of all rows with its interval, whose ends are nan if the metric is undefined.

    Raises:
        ValueError: An option or a column is out of range, or there is not one question id per row.

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
        method: `percentile` or `bca`, see `bootstrap`.
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
    for (c, z), question_of_row in zip(columns, numbering.question_of_row, strict=True):
        weighted_runs.append(WeightedRun(c, z, question_of_row))

    functions = list(metrics.values())
    batches = []
    with share_results():  # several metrics need the same sums over bins
        for counts in draw_question_counts(numbering.question_count, filled.resamples, filled.seed, filled.tick):
            batches.append(evaluate_runs(functions, weighted_runs, counts))
    draws = np.hstack(batches)  # (metrics, resamples)
    jackknife = None
    if method == "bca":
        jackknife = _leave_parts_out(functions, weighted_runs, numbering.question_count)

    intervals = {}
    for index, (name, metric) in enumerate(metrics.items()):
        estimate = float(np.mean([metric(c, z) for c, z in columns]))
        tails = central_tails(filled.level)
        if jackknife is not None:
            tails = _shift_tails(tails, estimate=estimate, draws=draws[index], jackknife=jackknife[index])
        band = summarise_draws(draws[index], filled.level, tails)
        if isnan(estimate):  # the metric may be defined on some resamples even so
            band = replace(band, low=nan, high=nan)
        intervals[name] = Interval(estimate, band.low, band.high, filled.level, band.undefined)
    return intervals


def _leave_parts_out(
    functions: Sequence[MetricFunction],
    runs: Sequence[WeightedRun],
    questions: int,
) -> Floats:
    """Return the values of the grouped jackknife, (metrics, parts): each metric without one part of the questions.

    There are JACKKNIFE_PARTS random parts, or one part per question if there are fewer questions. A single question is
    not left out, because no rows would remain.
    """
    parts = min(questions, JACKKNIFE_PARTS)
    part_of_question = default_rng(0).permutation(np.arange(questions) % parts)
    values = []
    for part in range(parts):
        is_kept = part_of_question != part
        if parts == 1:
            is_kept = np.ones(questions, dtype=np.bool_)
        weights = is_kept[None]  # (1, Q): a single weighting
        values.append(evaluate_runs(functions, runs, weights))
    return np.hstack(values)


def _shift_tails(
    tails: Floats,
    *,
    estimate: float,
    draws: Floats,
    jackknife: Floats,
) -> Floats:
    """Return the tail probabilities of the BCa interval, shifted by bias and acceleration (Efron, 1987).

    A tail t becomes Phi(b + s / (1 - a s)) with s = b + Phi^-1(t), where Phi is the normal distribution function. The
    acceleration a is that of `_estimate_acceleration`. The bias is b = Phi^-1(share of the draws below the estimate);
    draws that equal it count half.

    Args:
        tails: (2,) probabilities strictly between 0 and 1, as `central_tails` gives them.
        estimate: The metric of all rows.
        draws: (R,) values of the metric on the resamples; undefined values (nan) are ignored.
        jackknife: (parts,) values of the metric without each part of the questions, see `_leave_parts_out`; undefined
            values (nan) are ignored.

    Returns:
        (2,) probabilities; `tails` unchanged if no draw is defined.
    """
    defined = draws[~np.isnan(draws)]
    if len(defined) == 0:
        return tails
    normal = NormalDist()
    share_below = float(np.mean(defined < estimate) + 0.5 * np.mean(defined == estimate))
    # A share of 0 or 1 would make the bias infinite. n draws cannot distinguish it from 1 / (n + 1) or n / (n + 1).
    smallest_share = 1.0 / (len(defined) + 1)
    largest_share = len(defined) / (len(defined) + 1)
    limited_share = min(max(share_below, smallest_share), largest_share)
    bias = normal.inv_cdf(limited_share)
    acceleration = _estimate_acceleration(jackknife[~np.isnan(jackknife)])
    shifted = []
    for tail in tails:
        biased_score = bias + normal.inv_cdf(tail)
        shifted_score = bias + biased_score / (1.0 - acceleration * biased_score)
        shifted.append(normal.cdf(shifted_score))
    return np.array(shifted)


def _estimate_acceleration(jackknife: Floats) -> float:
    """Return the acceleration of the BCa interval: `sum d^3 / (6 (sum d^2)^1.5)`.

    d is the mean of the jackknife values minus each value. If there are no values, or all are equal, the result is 0.
    """
    if len(jackknife) == 0:
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

    Returns:
        The ratio and its interval.

    >>> ratio_interval(np.array([1.0, 1.0]), np.array([2.0, 2.0]), resamples=10).value
    0.5
    """
    filled = fill_options(options)
    ratios = []
    for counts in draw_question_counts(len(numerator), filled.resamples, filled.seed, filled.tick):
        # counts: (R, Q), how often each question was drawn in each of R resamples.
        ratios.append((counts @ numerator) / (counts @ denominator))
    band = summarise_draws(np.concatenate(ratios), filled.level)
    value = float(numerator.sum() / denominator.sum())
    return Interval(value, band.low, band.high, filled.level)


# ---- null bands


def null_band(
    metric: MetricFunction,
    confidence: ArrayLike,
    **options: Unpack[BootstrapOptions],
) -> NullBand:
    """Return what the metric would be for a perfectly calibrated model with these confidences.

    In each simulation, a row with confidence c is right with probability c.

    Args:
        metric: A function of confidence and correct.
        confidence: (N,) in [0, 1].
        options: See `BootstrapOptions`; `resamples` is the number of simulations.

    Returns:
        The mean and the central band of the metric over the simulations.

    Raises:
        ValueError: An option or a confidence is out of range.

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

    The null band is what the metric would be for a perfectly calibrated model with the same confidences. Each
    simulation draws one uniform random number per question. An answer to this question is right if the number is below
    its confidence. Several answers to a question, in one run or in several, are thus right or wrong together as far as
    their confidences allow. If the real answers agree less, the band is too wide.

    Args:
        metrics: Name -> metric.
        runs: One or more runs; `correct` is not read. For a single run without question ids, each band equals
            `null_band` of that metric alone.
        options: See `BootstrapOptions`; `resamples` is the number of simulations.

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
    mean_draws = np.zeros((len(metrics), filled.resamples))  # means over the runs
    for run_index, c in enumerate(confidences):
        # The progress bar has one step per simulation, however many runs are simulated.
        is_first_run = run_index == 0
        options_of_run = filled if is_first_run else filled._replace(tick=show_no_progress)
        # In a single run, question numbers matter only if a question has several rows. Several runs must use the same
        # random number for the same question.
        each_row_is_a_question = len(runs) == 1 and numbering.question_count == len(c)
        question_of_row = None if each_row_is_a_question else numbering.question_of_row[run_index]
        with share_results():  # several metrics need the same sums over bins
            draws = _simulate_run(functions, c, question_of_row, numbering.question_count, options_of_run)
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
        options: Number R of simulations, seed and tick.
    """
    # Rows are sorted, so that rows of equal confidence can be counted together.
    order = np.argsort(confidence, kind="stable")
    c = confidence[order]
    starts = run_starts(c)
    value = c[starts]
    count = np.diff(starts, append=len(c)).astype(np.float64)
    has_distinct_confidences = len(starts) == len(c)

    question_of_sorted_row: Ints | None = order
    if question_of_row is not None:
        question_of_sorted_row = question_of_row[order]
    elif len(c) > BLOCK:
        # It does not matter which random number a row gets. Row i of the sorted rows gets the i-th one, so that a long
        # array is read in sequence.
        question_of_sorted_row = None

    rng = default_rng(options.seed)  # the same numbers for every run
    count_each_once = np.ones((1, len(c)))
    batches = []
    for size in cut_into_batches(options.resamples, max(questions, len(c)), options.tick):
        uniform = rng.random((size, questions))
        if question_of_sorted_row is not None:
            uniform = uniform.take(question_of_sorted_row, axis=1)
        is_right = uniform < c
        if size == 1 and has_distinct_confidences:
            # A faster case, for large files, which are simulated one at a time: the metrics read N rows instead of the
            # 2 N rows of `_count_outcomes`.
            outcomes = _Outcomes(c, is_right[0], count_each_once)
        else:
            right = np.add.reduceat(is_right.astype(np.float64), starts, axis=1)
            outcomes = _count_outcomes(value, count, right)
        batches.append(np.array([evaluate_metric(metric, *outcomes) for metric in functions]))
    return np.hstack(batches)


class _Outcomes(NamedTuple):
    """The rows of R simulations.

    Attributes:
        confidence: (N,).
        correct: (N,).
        weights: (R, N), how often each row occurs in each simulation.
    """

    confidence: Floats
    correct: Bools
    weights: Floats


def _count_outcomes(
    value: Floats,
    count: Floats,
    right: Floats,
) -> _Outcomes:
    """Return a wrong and a right row for each distinct confidence, weighted by their numbers in each simulation.

    Args:
        value: (G,) distinct confidences.
        count: (G,) number of rows with each confidence.
        right: (R, G) number of right rows with each confidence, per simulation.

    Returns:
        2 G rows: for each confidence, the wrong row is followed by the right one.
    """
    wrong = count - right
    simulations = len(right)
    weights = np.stack([wrong, right], axis=-1).reshape(simulations, -1)
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
    """Return the mean and the standard deviation of one number per seed; an empty list raises a ValueError.

    >>> summarise_seeds([1.0, 3.0]).mean
    2.0
    """
    if len(values) == 0:
        raise ValueError("values is empty")
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 1:
        return SeedSummary(float(array.mean()), None, 1)
    return SeedSummary(float(array.mean()), float(array.std(ddof=1)), len(array))
