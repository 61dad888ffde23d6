"""Compare two methods on the same questions: differences with intervals, and a test that swaps their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
from numpy.random import default_rng

from catto.errors import DataError
from catto.metrics.binning import (
    Bools,
    Floats,
    Ints,
    Score,
    check_columns,
    mean_score,
    rank_shares,
)
from catto.metrics.intervals import ROUNDING, Comparison, summarise_draws
from catto.metrics.resampling import (
    Answers,
    BootstrapOptions,
    MetricFunction,
    Numbering,
    ResamplingOptions,
    ScoredAnswers,
    WeightedRun,
    Weights,
    cut_into_batches,
    draw_question_counts,
    evaluate_runs,
    fill_options,
    number_questions,
)
from catto.metrics.sharing import share_results

# A difference is marked if its corrected p-value is below this level.
ALPHA = 0.05


def compare(
    metric: MetricFunction,
    a: Answers,
    b: Answers,
    **options: Unpack[BootstrapOptions],
) -> Comparison:
    """Compare two methods on the same questions by one metric, with one run each; see `compare_table`.

    Args:
        metric: A function of confidence and correct.
        a: Answers of the first method, one per question. Question ids are required.
        b: Answers of the second method to the same questions, in any order.
        options: See `BootstrapOptions`.

    Returns:
        The metric of a minus that of b, with its interval and p-value.

    Raises:
        ValueError: An option or a column is out of range.
        DataError: There are no question ids, the two methods answer different questions, or a method answers a
            question twice.

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
    """Compare two methods on the same questions, metric by metric.

    A difference is the metric of a, averaged over its runs, minus that of b.

    The interval is a percentile bootstrap over questions, with the same draws for both methods.

    The p-value is that of a swap test. One swap exchanges the two answers to each question with probability 1/2, and
    computes the difference again. The p-value is `(1 + number of extreme swaps) / (1 + number of swaps)`. A swap is
    extreme if its difference is at least as far from 0 as the observed one, or undefined. If the observed difference is
    undefined, the p-value is nan. A metric that depends only on the order of the confidences (AUROC) is swapped on
    their ranks within each method, because the scales of the methods may differ.

    There are as many swaps as resamples. If these give a p-value below ALPHA and `swaps` is larger, the test continues
    up to `swaps`, because a correction for many comparisons needs small p-values. It stops as soon as the p-value is no
    longer below ALPHA: such a metric is not marked, so stopping may miss a difference but never adds one.

    Args:
        metrics: Name -> metric.
        a: Runs of the first method, with one answer per question each. Question ids are required.
        b: Equally many runs of the second method. Each answers the same questions as the run of a at the same index.
        swaps: The swap test draws at most this many swaps, or as many as there are resamples if that is more.
        options: See `BootstrapOptions`.

    Returns:
        Name -> comparison.

    Raises:
        ValueError: An option or a column is out of range, the numbers of runs differ, or there are no runs.
        DataError: A run has no question ids, two runs answer different questions, or a run answers a question twice.

    >>> from catto.metrics.errors import accuracy
    >>> a, b = Answers("xy", [0.9, 0.8], [1, 1]), Answers("xy", [0.9, 0.8], [1, 0])
    >>> compare_table({"accuracy": accuracy}, [a], [b], resamples=10)["accuracy"].difference
    0.5
    """
    filled = fill_options(options)
    _require_same_number(a, b)
    pairs = [_align_answers(first, second) for first, second in zip(a, b, strict=True)]
    questions = [run.question for run in a]
    return _compare_pairs(metrics, pairs, questions=questions, swaps=swaps, options=filled)


def compare_mean_scores(
    a: Sequence[ScoredAnswers],
    b: Sequence[ScoredAnswers],
    *,
    swaps: int = 0,
    **options: Unpack[BootstrapOptions],
) -> Comparison:
    """Compare the mean scores of two methods on the same questions, such as their mean losses.

    The interval and the p-value are computed as in `compare_table`.

    Args:
        a: Runs of the first method, with one answer per question each. Question ids are required.
        b: Equally many runs of the second method. Each answers the same questions as the run of a at the same index.
        swaps: The swap test draws at most this many swaps, or as many as there are resamples if that is more.
        options: See `BootstrapOptions`.

    Returns:
        The mean score of a minus that of b, each averaged over runs, with its interval and p-value.

    Raises:
        ValueError: An option, a column or a score is out of range, the numbers of runs differ, or there are no runs.
        DataError: A run has no question ids, two runs answer different questions, or a run answers a question twice.

    >>> answers = Answers("xy", [0.9, 0.8], [1, 1])
    >>> a, b = ScoredAnswers(answers, [0.75, 0.5]), ScoredAnswers(answers, [0.25, 0.5])
    >>> compare_mean_scores([a], [b], resamples=10).difference
    0.25
    """
    filled = fill_options(options)
    _require_same_number(a, b)
    pairs = [_align_scores(first, second) for first, second in zip(a, b, strict=True)]
    questions = [run.answers.question for run in a]
    return _compare_pairs({"mean": _mean_value}, pairs, questions=questions, swaps=swaps, options=filled)["mean"]


def _mean_value(value: Floats, _correct: Bools, *, weight: Floats | None = None) -> Score:
    return mean_score(value, weight)


def _require_same_number(a: Sequence[object], b: Sequence[object]) -> None:
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} runs and b has {len(b)}, expected the same number, at least one")


def _compare_pairs(
    metrics: Mapping[str, MetricFunction],
    pairs: Sequence[_Pair],
    *,
    questions: Sequence[Sequence[object] | None],
    swaps: int,
    options: ResamplingOptions,
) -> dict[str, Comparison]:
    """Compare two methods by the mean of each metric over their runs.

    Args:
        metrics: Name -> metric.
        pairs: One run of each method per pair, aligned by question.
        questions: For each pair, the question ids of its rows. None is only in the type: runs without ids were refused
            when they were aligned.
        swaps: The swap test draws at most this many swaps, or as many as there are resamples if that is more.
        options: Options of the bootstrap.

    Returns:
        Name -> comparison.
    """
    numbering = number_questions(questions, [pair.value_a for pair in pairs])
    question_count = numbering.question_count
    paired = _PairedRuns(list(metrics.values()), pairs, numbering)

    with share_results():  # several metrics need the same sums over bins
        batches = []
        for counts in draw_question_counts(question_count, options.resamples, options.seed, options.tick):
            # A resample counts the answers of both methods as they are; only the test below swaps them.
            nothing_swapped = np.zeros_like(counts)
            batches.append(paired.evaluate_differences(kept=counts, swapped=nothing_swapped))
        draws = np.hstack(batches)  # (metrics, resamples)
        p_values = _test_by_swaps(paired, question_count, swaps, options)

    comparisons = {}
    for index, name in enumerate(metrics):
        value_a, value_b = paired.values[index].tolist()  # the metric of all answers of a, and of b
        band = summarise_draws(draws[index], options.level)
        comparisons[name] = Comparison(
            a=value_a,
            b=value_b,
            difference=value_a - value_b,
            low=band.low,
            high=band.high,
            level=options.level,
            p_value=float(p_values[index]),
            undefined=band.undefined,
        )
    return comparisons


class _Pair(NamedTuple):
    """One run of each method, a and b; row i is the same question in both. (N,) each.

    The values are the input of the metrics: confidences, their ranks within the method, or scores.
    """

    value_a: Floats
    correct_a: Bools
    value_b: Floats
    correct_b: Bools


class _MetricGroup(NamedTuple):
    """Metrics that are evaluated on the same values: on confidences and scores, or on ranks.

    Attributes:
        indices: The index of each metric among all metrics.
        functions: The metrics.
        runs: The runs of both methods; see `_join_pairs`.
    """

    indices: Ints
    functions: list[MetricFunction]
    runs: list[WeightedRun]


class _PairedRuns:
    """Evaluate metrics of two methods, a and b, whose answers can be weighted and exchanged question by question.

    Args:
        functions: The metrics.
        pairs: The runs of both methods.
        numbering: The numbers of their questions.

    Attributes:
        values: (metrics, 2), the mean over runs of each metric of a and of b.
    """

    def __init__(
        self,
        functions: Sequence[MetricFunction],
        pairs: Sequence[_Pair],
        numbering: Numbering,
    ) -> None:
        ranked_pairs = [_rank_values(pair) for pair in pairs]
        self.values = _measure_both(functions, pairs)
        # A metric depends only on the order of the confidences if ranks give the same value. Squared ranks are compared
        # too, because a mean confidence of 0.5 happens to be the mean of the ranks.
        depends_on_order_only = np.full(len(functions), True)
        for rescaled_pairs in (ranked_pairs, [_square_values(pair) for pair in ranked_pairs]):
            values = _measure_both(functions, rescaled_pairs)
            is_equal = np.isclose(self.values, values, rtol=0.0, atol=ROUNDING, equal_nan=True)
            depends_on_order_only &= is_equal.all(axis=1)
        # Metrics that depend only on the order are swapped on ranks, because the scales of the two methods may differ.
        self._groups: list[_MetricGroup] = []
        for is_in_group, pairs_of_group in ((~depends_on_order_only, pairs), (depends_on_order_only, ranked_pairs)):
            indices = np.flatnonzero(is_in_group)
            if len(indices) > 0:
                functions_of_group = [functions[int(index)] for index in indices]
                joined_runs = _join_pairs(pairs_of_group, numbering)
                self._groups.append(_MetricGroup(indices, functions_of_group, joined_runs))

    def evaluate_differences(self, kept: Weights, swapped: Weights) -> Floats:
        """Return each metric of a minus that of b, where some answers of a and b are swapped. (metrics, R).

        Args:
            kept: (R, Q), how often each question counts with its answers as they are.
            swapped: (R, Q), how often each question counts with its answers swapped: the metric of a gets the answer
                of b, and the metric of b that of a.
        """
        # The question numbers of a's rows come before those of b's rows, see `_join_pairs`.
        weights_for_a = np.hstack([kept, swapped])
        weights_for_b = np.hstack([swapped, kept])
        differences = np.empty((len(self.values), len(kept)))
        for group in self._groups:
            values_a = evaluate_runs(group.functions, group.runs, weights_for_a)
            values_b = evaluate_runs(group.functions, group.runs, weights_for_b)
            differences[group.indices] = values_a - values_b
        return differences


def _rank_values(pair: _Pair) -> _Pair:
    return pair._replace(value_a=rank_shares(pair.value_a), value_b=rank_shares(pair.value_b))


def _square_values(pair: _Pair) -> _Pair:
    return pair._replace(value_a=pair.value_a**2, value_b=pair.value_b**2)


def _measure_both(functions: Sequence[MetricFunction], pairs: Sequence[_Pair]) -> Floats:
    """Return the mean over runs of each metric of a and of b. (metrics, 2)."""
    values = np.empty((len(functions), 2))
    for index, metric in enumerate(functions):
        values[index, 0] = np.mean([metric(pair.value_a, pair.correct_a) for pair in pairs])
        values[index, 1] = np.mean([metric(pair.value_b, pair.correct_b) for pair in pairs])
    return values


def _join_pairs(pairs: Sequence[_Pair], numbering: Numbering) -> list[WeightedRun]:
    """Join the two runs of each pair into one: the rows of a, followed by the rows of b.

    With Q questions, the rows of a keep the question numbers 0 to Q - 1, and those of b get Q to 2 Q - 1. A weight of
    the 2 Q numbers can thus count the two answers to a question differently.
    """
    runs = []
    for pair, question_a in zip(pairs, numbering.question_of_row, strict=True):
        question_b = question_a + numbering.question_count
        value = np.append(pair.value_a, pair.value_b)
        correct = np.append(pair.correct_a, pair.correct_b)
        question = np.append(question_a, question_b)
        runs.append(WeightedRun(value, correct, question))
    return runs


def _test_by_swaps(
    paired: _PairedRuns,
    questions: int,
    swaps: int,
    options: ResamplingOptions,
) -> Floats:
    """Return the p-value of each metric by the swap test that `compare_table` describes.

    Args:
        paired: The metrics of both methods.
        questions: Number of questions.
        swaps: The swap test draws at most this many swaps, or as many as there are resamples if that is more.
        options: Number of resamples, seed and tick.

    Returns:
        (metrics,) p-values, nan if the difference is undefined.
    """
    observed = np.abs(paired.values[:, 0] - paired.values[:, 1])
    is_running = ~np.isnan(observed)
    p_values: Floats = np.full(len(observed), np.nan)
    extreme_swaps = np.zeros(len(observed))
    swaps_done = 0
    rng = default_rng(options.seed)
    first_swaps = cut_into_batches(options.resamples, questions, options.tick)
    further_swaps = cut_into_batches(max(0, swaps - options.resamples), questions, options.tick)
    for size in chain(first_swaps, further_swaps):
        if swaps_done >= options.resamples:
            # Further swaps are only for metrics whose p-value is small so far.
            is_running &= p_values < ALPHA
        if not is_running.any():
            break
        is_kept = rng.random((size, questions)) >= 0.5
        differences = paired.evaluate_differences(kept=is_kept, swapped=~is_kept)
        # A swap is also extreme if its difference equals the observed one up to rounding, or is undefined: comparisons
        # with nan are False.
        is_closer_to_0 = np.abs(differences) < observed[:, None] - ROUNDING
        extreme_swaps += np.sum(~is_closer_to_0, axis=1)
        swaps_done += size
        p_values = np.where(is_running, (1.0 + extreme_swaps) / (1.0 + swaps_done), p_values)
    return p_values


def _align_answers(a: Answers, b: Answers) -> _Pair:
    """Pair the confidences, with the rows of b in the order of a's questions; DataError if they cannot be paired."""
    order = _find_rows_of_b(a, b)
    confidence_a, correct_a = check_columns(a.confidence, a.correct)
    confidence_b, correct_b = check_columns(b.confidence, b.correct)
    return _Pair(confidence_a, correct_a, confidence_b[order], correct_b[order])


def _align_scores(a: ScoredAnswers, b: ScoredAnswers) -> _Pair:
    """Pair the scores, with the rows of b in the order of a's questions; DataError if they cannot be paired."""
    order = _find_rows_of_b(a.answers, b.answers)
    scores_a, correct_a = _check_scores(a)
    scores_b, correct_b = _check_scores(b)
    return _Pair(scores_a, correct_a, scores_b[order], correct_b[order])


def _check_scores(run: ScoredAnswers) -> tuple[Floats, Bools]:
    """Return the columns `scores` and `correct`, or raise ValueError."""
    confidence, correct = check_columns(run.answers.confidence, run.answers.correct)
    scores = np.asarray(run.scores, dtype=np.float64)
    if scores.shape != confidence.shape:
        raise ValueError(f"scores has shape {scores.shape}, expected {confidence.shape}")
    in_range = np.isfinite(scores) & (scores >= 0.0)  # `sort_keys` does not sort negative numbers
    if not in_range.all():
        raise ValueError("scores must be finite numbers of at least 0")
    return scores, correct


def _find_rows_of_b(a: Answers, b: Answers) -> Ints:
    """Return the row of b for each of a's questions, in the order of a's rows.

    Raises:
        DataError: A method has no question ids or answers a question twice, or the two methods answer different
            questions.
    """
    name_a = a.source or "a"
    name_b = b.source or "b"
    rows_a = _index_questions(a, name_a)
    rows_b = _index_questions(b, name_b)
    _require_questions(rows_a, name_a, rows_b, name_b)
    _require_questions(rows_b, name_b, rows_a, name_a)
    return np.array([rows_b[question] for question in rows_a], dtype=np.intp)


def _index_questions(answers: Answers, name: str | Path) -> dict[object, int]:
    """Return the row of each question, in the order of the rows.

    Raises:
        DataError: There are no question ids, a question has several rows, or there is not one id per confidence.
    """
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
    """Raise DataError if a question of the data `name` is missing from the data `present_name`."""
    missing = [question for question in wanted if question not in present]
    if missing:
        raise DataError(present_name, None, f"{len(missing)} questions of {name} are missing, first {missing[0]!r}")
