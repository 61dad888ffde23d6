"""Resampling by weights: how often each question is drawn, and metrics of rows that count as often.

A resample is a weight: how often each row counts. So a metric is called as `metric(confidence, correct, weight=...)`
with the weights of many resamples at once, (R, N). A metric without the parameter `weight` is called on the rows of
each resample in turn, which is slower.
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

# A function of confidence and correct, also a row of METRICS or `partial(metric, bins=...)`.
MetricFunction = Callable[..., float]
Tick = Callable[[], object]  # called once per step of a progress bar


Weights = NDArray[Any]  # (R, Q): how often each of Q questions counts in each of R resamples


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
class ScoredAnswers:
    """The answers of one run, with a score for each.

    Attributes:
        answers: The answers.
        scores: (N,) finite numbers of at least 0, such as the loss of each answer.
    """

    answers: Answers
    scores: ArrayLike


class BootstrapOptions(TypedDict, total=False):
    """How often, how wide, from which seed; `tick` is called once per resample, simulation and swap."""

    resamples: int  # 1000
    level: float  # 0.95
    seed: int  # 0
    tick: Tick


class ResamplingOptions(NamedTuple):
    """Checked options with the defaults filled in."""

    resamples: int
    level: float
    seed: int
    tick: Tick


def ignore_tick() -> None:
    """Count nothing."""


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
    """The rows of one run, for which weights of questions become weights of rows.

    Rows are kept by rising value. Rows that agree in value and correctness are merged into one, whose weight is the sum
    of theirs.

    Attributes:
        value: What metrics read of each distinct row: its confidence, a rank, or a score of at least 0.
        correct: Whether the distinct row is right.
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
        of_rows = weights.take(self._question, axis=1).astype(np.float64)
        if len(self._starts) == len(self._question):
            return of_rows
        return np.add.reduceat(of_rows, self._starts, axis=1)


def evaluate_runs(
    metrics: Sequence[MetricFunction],
    runs: Sequence[WeightedRun],
    weights: Weights,
) -> Floats:
    """Return the mean over runs of each metric under each weighting of the questions. (R, Q) -> (metrics, R)."""
    values = np.empty((len(runs), len(metrics), len(weights)))
    for place, run in enumerate(runs):
        of_rows = run.weigh_rows(weights)
        for number, metric in enumerate(metrics):
            values[place, number] = evaluate_metric(metric, run.value, run.correct, of_rows)
    return np.asarray(values.mean(axis=0))


def evaluate_metric(
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
            values[has_rows] = evaluate_metric(metric, confidence, correct, weights[has_rows])
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


class Numbering(NamedTuple):
    """The number of each row's question, (N,) for every run, and how many questions there are."""

    of_rows: list[Ints]
    questions: int


def number_questions(ids: Sequence[Sequence[object] | None], confidences: Sequence[Floats]) -> Numbering:
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
    return Numbering(of_rows, highest + 1)


def cut_into_batches(
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


def draw_question_counts(
    questions: int,
    resamples: int,
    seed: int,
    tick: Tick = ignore_tick,
) -> Iterator[Weights]:
    """Draw as many questions as there are, with replacement, `resamples` times.

    Args:
        questions: Number of questions Q.
        resamples: Number of resamples.
        seed: Of the random numbers.
        tick: Called once per resample.

    Yields:
        How often each question was drawn, in batches of (R, Q).

    >>> [batch.sum(axis=1).tolist() for batch in draw_question_counts(5, 3, seed=0)]
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
    for size in cut_into_batches(resamples, questions, ignore_tick):
        counts = np.empty((size, questions), dtype=np.uint16)  # small, so that gathering from it stays in the cache
        for row in counts:
            draws_of_block = rng.multinomial(questions, lengths / questions)
            for start, length, times in zip(starts, lengths, draws_of_block, strict=True):
                drawn = rng.integers(0, length, size=times)
                row[start : start + length] = np.bincount(drawn, minlength=length)
        yield counts
