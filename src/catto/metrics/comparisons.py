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
    """Compare two methods on the same questions, metric by metric.

    A difference is the metric of a, averaged over its runs, minus that of b.

    The interval is a percentile bootstrap over questions, with the same draws for both methods. The p-value is that of
    a swap test, in which the two answers to each question change places with probability 1/2. It is
    `(1 + swaps at least as far from 0) / (1 + swaps)`. A swap on which the metric is undefined counts as far from 0. If
    the difference itself is undefined, so is the p-value. A metric that reads only the order (AUROC) is swapped on
    ranks within each method, because the scales of the methods may differ.

    There are as many swaps as resamples. If these give a p-value below ALPHA and `swaps` is larger, the test continues
    up to `swaps`, because a correction for many comparisons needs small p-values. A test that stops early can only miss
    a difference.

    Args:
        metrics: Name -> metric.
        a: Runs of the first method, with one answer per question each.
        b: Equally many runs of the second method. Each answers the same questions as the run of a at the same index.
        swaps: Maximum number of swaps, see above.
        options: See `BootstrapOptions`.

    Returns:
        Name -> comparison.

    Raises:
        ValueError: An option or a column is out of range, or the numbers of runs differ.
        DataError: Two runs do not answer the same questions, or one answers a question twice.

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

    Pairing, interval and p-value are those of `compare_table`.

    Args:
        a: Runs of the first method, with one answer per question each.
        b: Equally many runs of the second method. Each answers the same questions as the run of a at the same index.
        swaps: Maximum number of swaps, see `compare_table`.
        options: See `BootstrapOptions`.

    Returns:
        The comparison of the means.

    Raises:
        ValueError: As in `compare_table`, or a score is out of range.
        DataError: As in `compare_table`.

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
    """Return the comparison of each metric. `questions` are the ids of the rows of each pair."""
    numbering = number_questions(questions, [pair.value_a for pair in pairs])
    paired = _PairedRuns(list(metrics.values()), pairs, numbering)

    with share_results():
        batches = []
        for weights in draw_question_counts(numbering.questions, options.resamples, options.seed, options.tick):
            no_swaps = np.zeros_like(weights)
            batches.append(paired.evaluate_differences(weights, no_swaps))
        draws = np.hstack(batches)
        p_values = _test_by_swaps(paired, numbering.questions, swaps, options)

    comparisons = {}
    for place, name in enumerate(metrics):
        value_a, value_b = paired.values[place].tolist()
        band = summarise_draws(draws[place], options.level)
        comparisons[name] = Comparison(
            a=value_a,
            b=value_b,
            difference=value_a - value_b,
            low=band.low,
            high=band.high,
            level=options.level,
            p_value=float(p_values[place]),
            undefined=band.undefined,
        )
    return comparisons


class _Pair(NamedTuple):
    """One run of two methods; each row is the same question in both. (N,) each.

    The values are the input of the metrics: confidences, their ranks within the method, or scores.
    """

    value_a: Floats
    correct_a: Bools
    value_b: Floats
    correct_b: Bools


class _MetricGroup(NamedTuple):
    """Metrics that are evaluated on the same runs.

    Attributes:
        indices: The position of each metric among all metrics.
        functions: The metrics.
        runs: The runs of both methods; see `_join_pairs`.
    """

    indices: Ints
    functions: list[MetricFunction]
    runs: list[WeightedRun]


class _PairedRuns:
    """The metrics of two methods, under weights that say how often each of their answers to a question counts.

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
        values_of_ranks = _measure_both(functions, ranked_pairs)
        is_equal = np.isclose(self.values, values_of_ranks, rtol=0.0, atol=ROUNDING, equal_nan=True)
        reads_order_only = is_equal.all(axis=1)
        self._groups: list[_MetricGroup] = []
        for is_in_group, pairs_of_group in ((~reads_order_only, pairs), (reads_order_only, ranked_pairs)):
            indices = np.flatnonzero(is_in_group)
            if len(indices):
                functions_of_group = [functions[int(index)] for index in indices]
                self._groups.append(_MetricGroup(indices, functions_of_group, _join_pairs(pairs_of_group, numbering)))

    def evaluate_differences(self, kept: Weights, swapped: Weights) -> Floats:
        """Return each metric of the first method minus that of the second, (metrics, R).

        Args:
            kept: (R, Q), how often each question counts with the answer of a for the first method and that of b for the
                second.
            swapped: (R, Q), how often it counts with the two answers swapped.
        """
        # The questions of a are numbered before those of b, see `_join_pairs`.
        weights_of_first = np.hstack([kept, swapped])
        weights_of_second = np.hstack([swapped, kept])
        differences = np.empty((len(self.values), len(kept)))
        for group in self._groups:
            values_of_first = evaluate_runs(group.functions, group.runs, weights_of_first)
            values_of_second = evaluate_runs(group.functions, group.runs, weights_of_second)
            differences[group.indices] = values_of_first - values_of_second
        return differences


def _rank_values(pair: _Pair) -> _Pair:
    return pair._replace(value_a=rank_shares(pair.value_a), value_b=rank_shares(pair.value_b))


def _measure_both(functions: Sequence[MetricFunction], pairs: Sequence[_Pair]) -> Floats:
    """Return the mean over runs of each metric of a and of b. (metrics, 2)."""
    values = np.empty((len(functions), 2))
    for index, metric in enumerate(functions):
        values[index, 0] = np.mean([metric(pair.value_a, pair.correct_a) for pair in pairs])
        values[index, 1] = np.mean([metric(pair.value_b, pair.correct_b) for pair in pairs])
    return values


def _join_pairs(pairs: Sequence[_Pair], numbering: Numbering) -> list[WeightedRun]:
    """Append the rows of b to those of a, with question numbers that continue those of a."""
    runs = []
    for pair, question in zip(pairs, numbering.of_rows, strict=True):
        value = np.append(pair.value_a, pair.value_b)
        correct = np.append(pair.correct_a, pair.correct_b)
        runs.append(WeightedRun(value, correct, np.append(question, question + numbering.questions)))
    return runs


def _test_by_swaps(
    paired: _PairedRuns,
    questions: int,
    swaps: int,
    options: ResamplingOptions,
) -> Floats:
    """Return the p-value of each metric by the swap test of `compare_table`.

    Args:
        paired: The metrics of both methods.
        questions: Number of questions.
        swaps: Maximum number of swaps, if larger than the number of resamples.
        options: Number of resamples, seed and tick.

    Returns:
        (metrics,) p-values, nan if the difference is undefined.
    """
    observed = np.abs(paired.values[:, 0] - paired.values[:, 1])
    is_running = ~np.isnan(observed)
    p_values: Floats = np.full(len(observed), np.nan)
    far_swaps = np.zeros(len(observed))
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
        stays = rng.random((size, questions)) >= 0.5
        differences = paired.evaluate_differences(stays, ~stays)
        # A difference that equals the observed one, except for rounding, counts as far. So does an undefined one,
        # because comparisons with nan are False.
        is_close = np.abs(differences) < observed[:, None] - ROUNDING
        far_swaps += np.sum(~is_close, axis=1)
        swaps_done += size
        p_values = np.where(is_running, (1.0 + far_swaps) / (1.0 + swaps_done), p_values)
    return p_values


def _align_answers(a: Answers, b: Answers) -> _Pair:
    """Pair the confidences, with the rows of b in the order of a's questions. Raises what `_find_rows_of_b` raises."""
    order = _find_rows_of_b(a, b)
    confidence_a, correct_a = check_columns(a.confidence, a.correct)
    confidence_b, correct_b = check_columns(b.confidence, b.correct)
    return _Pair(confidence_a, correct_a, confidence_b[order], correct_b[order])


def _align_scores(a: ScoredAnswers, b: ScoredAnswers) -> _Pair:
    """Pair the scores, with the rows of b in the order of a's questions. Raises what `_find_rows_of_b` raises."""
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
        DataError: The two methods do not answer the same questions, or one answers a question twice.
    """
    name_a = a.source or "a"
    name_b = b.source or "b"
    rows_a = _index_questions(a, name_a)
    rows_b = _index_questions(b, name_b)
    _require_questions(rows_a, name_a, rows_b, name_b)
    _require_questions(rows_b, name_b, rows_a, name_a)
    return np.array([rows_b[question] for question in rows_a], dtype=np.intp)


def _index_questions(answers: Answers, name: str | Path) -> dict[object, int]:
    """Return the row of each question, in the order of the rows; DataError if a question has several rows."""
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
    """Raise DataError if a wanted question, which is in the data `name`, is missing from those present."""
    missing = [question for question in wanted if question not in present]
    if missing:
        raise DataError(present_name, None, f"{len(missing)} questions of {name} are missing, first {missing[0]!r}")
