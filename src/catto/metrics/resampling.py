"""Resample questions by weights, and evaluate metrics under these weights.

A resample is represented by a weight: how often each row counts. A metric is called as `metric(confidence, correct,
weight=...)` with the weights of many resamples at once, (R, N). A metric without the parameter `weight` is called on
the rows of each resample in turn, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike, NDArray

from catto.metrics.binning import (
    Bools,
    Floats,
    Ints,
    run_starts,
    sort_keys,
    total_weight,
)

# A function of confidence and correct, such as an entry of METRICS or `partial(metric, bins=...)`.
MetricFunction = Callable[..., float]
Tick = Callable[[], object]  # moves a progress bar on by one step
Weights = NDArray[Any]  # (R, Q): how often each of Q questions counts in each of R resamples

# Number of questions drawn per block; the counts of a block fit the cache.
BLOCK = 1 << 14
# Maximum number of resamples computed at once, and of the weights in all of them together.
MAX_RESAMPLES_AT_ONCE = 100
MAX_WEIGHTS_AT_ONCE = 1 << 17
# Maximum number of counts that `draw_question_counts` keeps for later calls, at two bytes each.
MAX_KEPT_COUNTS = 1 << 23


@dataclass(frozen=True)
class Answers:
    """The answers of one run.

    Attributes:
        question: N ids, or None if each row is a question of its own.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        source: Where the answers come from, such as a file, for error messages.
    """

    question: Sequence[object] | None
    confidence: ArrayLike
    correct: ArrayLike
    source: str | Path | None = None


@dataclass(frozen=True)
class ScoredAnswers:
    """The answers of one run, with a score for each.

    Attributes:
        answers: The answers.
        scores: (N,) finite numbers of at least 0, such as the loss of each answer.
    """

    answers: Answers
    scores: ArrayLike


class BootstrapOptions(TypedDict, total=False):
    """Options of every function that resamples; each may be left out.

    Attributes:
        resamples: Number of resamples or simulations, 1000 by default.
        level: Level of the interval or band, 0.95 by default.
        seed: Seed of the random numbers, 0 by default.
        tick: Called once per resample, simulation and swap, to move a progress bar; by default, it does nothing.
    """

    resamples: int
    level: float
    seed: int
    tick: Tick


class ResamplingOptions(NamedTuple):
    """Checked options with the defaults filled in."""

    resamples: int
    level: float
    seed: int
    tick: Tick


def show_no_progress() -> None:
    """Do nothing: the `tick` of a caller without a progress bar."""


def fill_options(options: BootstrapOptions) -> ResamplingOptions:
    """Fill in the defaults, and raise ValueError for an option out of range."""
    filled = ResamplingOptions(
        resamples=options.get("resamples", 1000),
        level=options.get("level", 0.95),
        seed=options.get("seed", 0),
        tick=options.get("tick", show_no_progress),
    )
    if filled.resamples < 1:
        raise ValueError(f"resamples is {filled.resamples}, expected at least 1")
    if not 0.0 < filled.level < 1.0:
        raise ValueError(f"level is {filled.level}, expected a number between 0 and 1")
    return filled


class WeightedRun:
    """The rows of one run, prepared to turn weights of questions into weights of rows.

    Rows are sorted by value. Rows with the same value and correctness are merged into one distinct row, whose weight is
    the sum of theirs.

    Args:
        value: (N,) input of the metrics: confidences, ranks, or scores of at least 0.
        correct: (N,) booleans.
        question: (N,) number of each row's question, from 0.

    Attributes:
        value: The value of each distinct row, (D,), in increasing order.
        correct: Whether each distinct row is right, (D,).
    """

    def __init__(
        self,
        value: Floats,
        correct: Bools,
        question: Ints,
    ) -> None:
        keys = sort_keys(value, correct)
        order = np.argsort(keys)
        self._starts = run_starts(keys[order])  # of the distinct rows, among the sorted rows
        self._question_of_sorted_row = question[order]
        first_rows = order[self._starts]
        self.value = value[first_rows]
        self.correct = correct[first_rows]

    def weigh_rows(self, weights: Weights) -> Floats:
        """Turn the weights of Q questions into the weights of the D distinct rows. (R, Q) -> (R, D)."""
        row_weights = weights.take(self._question_of_sorted_row, axis=1).astype(np.float64)
        all_distinct = len(self._starts) == len(self._question_of_sorted_row)
        if all_distinct:
            return row_weights
        return np.add.reduceat(row_weights, self._starts, axis=1)


def evaluate_runs(
    metrics: Sequence[MetricFunction],
    runs: Sequence[WeightedRun],
    weights: Weights,
) -> Floats:
    """Return the mean over runs of each metric under each weighting of the questions. (R, Q) -> (metrics, R)."""
    values = np.empty((len(runs), len(metrics), len(weights)))
    for run_index, run in enumerate(runs):
        row_weights = run.weigh_rows(weights)
        for metric_index, metric in enumerate(metrics):
            values[run_index, metric_index] = evaluate_metric(metric, run.value, run.correct, row_weights)
    return np.asarray(values.mean(axis=0))


def evaluate_metric(
    metric: MetricFunction,
    confidence: Floats,
    correct: Bools,
    weights: Floats,
) -> Floats:
    """Return the metric under each weighting; nan for a weighting that is 0 everywhere. (N,), (N,), (R, N) -> (R,)."""
    has_rows = total_weight(weights) > 0.0
    if not has_rows.all():
        # Metrics reject such a weighting, so it is left out.
        values: Floats = np.full(len(weights), np.nan)
        if has_rows.any():
            values[has_rows] = evaluate_metric(metric, confidence, correct, weights[has_rows])
        return values
    if _accepts_weight(metric):
        return np.asarray(metric(confidence, correct, weight=weights))
    return np.array([_evaluate_on_copies(metric, confidence, correct, row) for row in weights])


def _accepts_weight(metric: MetricFunction) -> bool:
    function = getattr(metric, "function", metric)  # an entry of METRICS wraps its function
    return "weight" in signature(function).parameters


def _evaluate_on_copies(
    metric: MetricFunction,
    confidence: Floats,
    correct: Bools,
    weight: Floats,
) -> float:
    """Return the metric of the rows, each repeated as often as it counts."""
    copies = weight.astype(np.intp)
    return metric(np.repeat(confidence, copies), np.repeat(correct, copies))


class Numbering(NamedTuple):
    """The numbers that the questions of several runs have been given, from 0 to `question_count` - 1.

    Attributes:
        question_of_row: For each run, the number of each row's question, (N,).
        question_count: Number of different questions in all runs together.
    """

    question_of_row: list[Ints]
    question_count: int


def number_questions(ids: Sequence[Sequence[object] | None], confidences: Sequence[Floats]) -> Numbering:
    """Give each question a number, which is the same in all runs.

    Args:
        ids: For each run, the question id of each row, or None for a run without ids. If no run has ids, each row of a
            single run is a question of its own, and row i is the same question in several runs.
        confidences: For each run, the confidence of each row, (N,). With ids, only the number of rows is read. A long
            single run without ids is numbered in order of confidence, which is faster to resample.

    Returns:
        The number of each row's question, and how many questions there are.

    Raises:
        ValueError: A run does not have one id per row, or some runs have ids and others do not.
    """
    known_ids = [run_ids for run_ids in ids if run_ids is not None]
    if not known_ids:
        return _number_by_row(confidences)
    if len(known_ids) < len(ids):
        raise ValueError("some runs have question ids and others do not: give the ids of all runs or of none")

    number_of_id: dict[object, int] = {}
    question_of_row: list[Ints] = []
    for run_ids, c in zip(known_ids, confidences, strict=True):
        if len(run_ids) != len(c):
            raise ValueError(f"questions has {len(run_ids)} rows and confidence has {len(c)}, expected the same number")
        numbers = []
        for question_id in run_ids:
            next_number = len(number_of_id)
            numbers.append(number_of_id.setdefault(question_id, next_number))
        question_of_row.append(np.array(numbers, dtype=np.intp))
    return Numbering(question_of_row, question_count=len(number_of_id))


def _number_by_row(confidences: Sequence[Floats]) -> Numbering:
    """Number the questions of runs without ids by the position of their rows."""
    question_of_row = [np.arange(len(confidence)) for confidence in confidences]
    question_count = max(len(confidence) for confidence in confidences)
    if len(confidences) == 1 and question_count > BLOCK:
        # The questions of a single run may have any numbers. A `WeightedRun` sorts its rows by confidence; with numbers
        # in the same order, it reads the weights of the questions from memory in sequence.
        by_confidence = np.argsort(confidences[0], kind="stable")
        question_of_row[0][by_confidence] = np.arange(question_count)
    return Numbering(question_of_row, question_count)


def cut_into_batches(
    total: int,
    units: int,
    tick: Tick,
) -> Iterator[int]:
    """Cut resamples into batches that are computed at once and fit the cache.

    Args:
        total: Number of resamples; 0 gives no batches.
        units: Number of questions or rows that are weighted in each resample.
        tick: Called once per resample, when the caller asks for the next batch.

    Yields:
        The number of resamples in each batch.
    """
    # This array is freed at once. Allocating and freeing 31 MB makes glibc keep up to twice as much freed memory for
    # later arrays (mallopt(3), M_MMAP_THRESHOLD). Otherwise, new memory would be mapped for each resample of a million
    # rows, which took as long as the sums over them.
    np.empty(31 << 20, dtype=np.uint8)
    resamples_that_fit = max(1, MAX_WEIGHTS_AT_ONCE // units)
    max_size = min(MAX_RESAMPLES_AT_ONCE, resamples_that_fit)
    for start in range(0, total, max_size):
        size = min(max_size, total - start)
        yield size
        # The caller has now computed these resamples.
        for _ in range(size):
            tick()


def draw_question_counts(
    questions: int,
    resamples: int,
    seed: int,
    tick: Tick = show_no_progress,
) -> Iterator[Weights]:
    """Draw bootstrap resamples of Q questions: each resample draws Q questions with replacement.

    The same arguments always give the same resamples. A report needs those of the same questions for hundreds of
    numbers, so they are kept in memory for later calls, unless they are too large. They must not be changed in place.

    Args:
        questions: Number of questions Q.
        resamples: Number of resamples.
        seed: Seed of the random numbers.
        tick: Called once per resample, when the caller asks for the next batch.

    Yields:
        Batches of R resamples, (R, Q): how often each question was drawn.

    >>> [batch.sum(axis=1).tolist() for batch in draw_question_counts(5, 3, seed=0)]
    [[5, 5, 5]]
    """
    fits_in_memory = questions * resamples <= MAX_KEPT_COUNTS
    # Both functions draw the same numbers.
    draw = _draw_and_keep_counts if fits_in_memory else _draw_counts
    for counts in draw(questions, resamples, seed):
        yield counts
        # The caller has now used the batch, which is the work that the progress bar shows.
        for _ in range(len(counts)):
            tick()


@lru_cache(maxsize=2)
def _draw_and_keep_counts(
    questions: int,
    resamples: int,
    seed: int,
) -> tuple[Weights, ...]:
    """Draw the same counts as `_draw_counts`, and keep them for the next call with the same arguments."""
    return tuple(_draw_counts(questions, resamples, seed))


def _draw_counts(
    questions: int,
    resamples: int,
    seed: int,
) -> Iterator[Weights]:
    """Draw as `draw_question_counts` does, one block of questions at a time, whose counts fit the cache.

    First, the number of draws that fall into each block is drawn from a multinomial distribution. Then, the draws in
    each block are uniform over its questions. The result has the same distribution as uniform draws over all questions.
    """
    rng = default_rng(seed)
    starts = np.arange(0, questions, BLOCK)
    lengths = np.diff(starts, append=questions)
    for size in cut_into_batches(resamples, questions, show_no_progress):  # `draw_question_counts` shows the progress
        counts = np.empty((size, questions), dtype=np.uint16)  # two bytes each, so that more of them fit the cache
        for counts_of_resample in counts:
            draws_per_block = rng.multinomial(questions, lengths / questions)
            for start, length, draws in zip(starts, lengths, draws_per_block, strict=True):
                drawn = rng.integers(0, length, size=draws)
                counts_of_resample[start : start + length] = np.bincount(drawn, minlength=length)
        yield counts
