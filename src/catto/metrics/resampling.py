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
Tick = Callable[[], object]  # called once per step of a progress bar
Weights = NDArray[Any]  # (R, Q): how often each of Q questions counts in each of R resamples

# Number of questions drawn per block; the counts of a block fit the cache.
BLOCK = 1 << 14
# Maximum number of resamples computed at once, and of their weights.
MOST_AT_ONCE = 100
WEIGHTS_AT_ONCE = 1 << 17
# Maximum number of counts that are kept for later metrics of the same questions, at two bytes each.
KEPT_COUNTS = 1 << 23


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
        tick: Called once per resample, simulation and swap.
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


def ignore_tick() -> None:
    """Do nothing: the `tick` of a caller without a progress bar."""


def fill_options(options: BootstrapOptions) -> ResamplingOptions:
    """Fill in the defaults, and raise ValueError for an option out of range."""
    filled = ResamplingOptions(
        resamples=options.get("resamples", 1000),
        level=options.get("level", 0.95),
        seed=options.get("seed", 0),
        tick=options.get("tick", ignore_tick),
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
        question: (N,) number of each row's question.

    Attributes:
        value: The value of each distinct row.
        correct: Whether each distinct row is right.
    """

    def __init__(
        self,
        value: Floats,
        correct: Bools,
        question: Ints,
    ) -> None:
        keys = sort_keys(value, correct)
        order = np.argsort(keys)
        self._starts = run_starts(keys[order])
        self._question = question[order]
        distinct = order[self._starts]
        self.value = value[distinct]
        self.correct = correct[distinct]

    def weigh_rows(self, weights: Weights) -> Floats:
        """Return the weight of each distinct row. (R, Q) -> (R, rows)."""
        row_weights = weights.take(self._question, axis=1).astype(np.float64)
        all_distinct = len(self._starts) == len(self._question)
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
    """Return the metric under each weighting, nan if all its weights are 0. (N,), (N,), (R, N) -> (R,)."""
    has_rows = total_weight(weights) > 0.0
    if not has_rows.all():
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
    times = weight.astype(np.intp)
    return metric(np.repeat(confidence, times), np.repeat(correct, times))


class Numbering(NamedTuple):
    """The numbers of the questions of several runs.

    Attributes:
        of_rows: For each run, the number of each row's question, (N,).
        questions: Number of questions in all runs.
    """

    of_rows: list[Ints]
    questions: int


def number_questions(ids: Sequence[Sequence[object] | None], confidences: Sequence[Floats]) -> Numbering:
    """Number the questions of all runs together.

    Args:
        ids: For each run, the question id of each row; an id has the same number in all runs. Without ids, each row of
            a single run is a question of its own, and row i of several runs is the same question.
        confidences: For each run, the confidence of each row, (N,).

    Returns:
        The numbers, from 0.

    Raises:
        ValueError: A run does not have one id per row, or some runs have ids and others do not.
    """
    lacks_ids = [run_ids is None for run_ids in ids]
    if all(lacks_ids):
        return _number_by_row(confidences)
    if any(lacks_ids):
        raise ValueError("some runs have question ids and others do not: give the ids of all runs or of none")

    number_of_id: dict[object, int] = {}
    of_rows: list[Ints] = []
    for run_ids, c in zip(ids, confidences, strict=True):
        if run_ids is None:
            continue
        if len(run_ids) != len(c):
            raise ValueError(f"questions has {len(run_ids)} rows and confidence has {len(c)}, expected the same number")
        numbers = []
        for question_id in run_ids:
            next_number = len(number_of_id)
            numbers.append(number_of_id.setdefault(question_id, next_number))
        of_rows.append(np.array(numbers, dtype=np.intp))
    return Numbering(of_rows, len(number_of_id))


def _number_by_row(confidences: Sequence[Floats]) -> Numbering:
    """Number the questions of runs without ids by the position of their rows."""
    of_rows = [np.arange(len(confidence)) for confidence in confidences]
    questions = max(len(confidence) for confidence in confidences)
    if len(confidences) == 1 and questions > BLOCK:
        # Any order will do for a single run. In order of confidence, like the rows of a `WeightedRun`, the weights are
        # read in the order of memory.
        by_confidence = np.argsort(confidences[0], kind="stable")
        of_rows[0][by_confidence] = np.arange(questions)
    return Numbering(of_rows, questions)


def cut_into_batches(
    total: int,
    units: int,
    tick: Tick,
) -> Iterator[int]:
    """Cut resamples into batches that are computed at once.

    Args:
        total: Number of resamples.
        units: Number of questions or rows that are weighted in each resample.
        tick: Called once per resample, after its batch.

    Yields:
        The number of resamples in each batch.
    """
    # Allocating and freeing 31 MB makes glibc keep up to twice as much freed memory for later arrays (mallopt(3),
    # M_MMAP_THRESHOLD). Without this, new memory was mapped for each resample of a million rows, which took as long as
    # the sums over them.
    np.empty(31 << 20, dtype=np.uint8)
    largest_size = min(MOST_AT_ONCE, max(1, WEIGHTS_AT_ONCE // units))
    for start in range(0, total, largest_size):
        size = min(largest_size, total - start)
        yield size
        for _ in range(size):
            tick()


def draw_question_counts(
    questions: int,
    resamples: int,
    seed: int,
    tick: Tick = ignore_tick,
) -> Iterator[Weights]:
    """Draw bootstrap resamples of the questions: each draws as many questions as there are, with replacement.

    Args:
        questions: Number of questions Q.
        resamples: Number of resamples.
        seed: Seed of the random numbers.
        tick: Called once per resample.

    Yields:
        How often each question was drawn, in batches of (R, Q).

    >>> [batch.sum(axis=1).tolist() for batch in draw_question_counts(5, 3, seed=0)]
    [[5, 5, 5]]
    """
    # Many metrics of the same questions are resampled in turn, with the same counts.
    can_be_kept = questions * resamples <= KEPT_COUNTS
    draw = _draw_and_keep_counts if can_be_kept else _draw_counts
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
    """Draw counts and keep the last draws: a report resamples the same questions for hundreds of numbers."""
    return tuple(_draw_counts(questions, resamples, seed))


def _draw_counts(
    questions: int,
    resamples: int,
    seed: int,
) -> Iterator[Weights]:
    """Draw the counts of one block of questions at a time, so that memory is accessed in order.

    The number of draws in each block is multinomial, and draws within a block are uniform. The distribution is the same
    as that of one draw over all questions.
    """
    rng = default_rng(seed)
    starts = np.arange(0, questions, BLOCK)
    lengths = np.diff(starts, append=questions)
    for size in cut_into_batches(resamples, questions, ignore_tick):  # `draw_question_counts` ticks
        counts = np.empty((size, questions), dtype=np.uint16)  # small, so that gathering from it stays in the cache
        for row in counts:
            draws_of_block = rng.multinomial(questions, lengths / questions)
            for start, length, times in zip(starts, lengths, draws_of_block, strict=True):
                drawn = rng.integers(0, length, size=times)
                row[start : start + length] = np.bincount(drawn, minlength=length)
        yield counts
