"""The mean of a metric over seeds: its interval, its null band, and its paired difference between two methods.

Accuracy, Brier score and ECE are all `(1/N) sum_m |sum over rows i of part[i, m]|`: accuracy with the one column `z`,
Brier with `(c - z)^2`, ECE with `z - c` in the column of the row's bin. So every resample of rows is a row of weights,
all of them one matrix product. AUROC takes the same weights, by cumulative sums over rows in the order of confidence.
Questions are the unit: where seeds share test questions, a question is drawn, or swapped, in all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike

from catto.metrics.binning import Bools, Floats, Ints, bin_edges, bin_index, checked, checked_confidence
from catto.metrics.statistics import ALPHA, Comparison, Interval, NullBand

__all__ = ["Ranked", "Scored", "mean_difference", "mean_interval", "mean_null", "scored"]

Name = Literal["accuracy", "ece", "brier", "auroc", "gap"]
# Resamples a product: 100 x 5,000 questions of weights are 4 MB.
CHUNK = 100


@dataclass(frozen=True)
class Scored:
    """The rows of one seed, for a metric that is a sum. question: N distinct ids; parts: (N, M).

    `signed` leaves out the absolute value: the mean of the one column.
    """

    question: Sequence[str]
    parts: Floats
    signed: bool = False

    def values(self, weights: Floats) -> Floats:
        """The metric under each row of weights; nan where all are 0. (R, N) -> (R,)."""
        rows, sums = weights.sum(axis=1), weights @ self.parts
        found = (sums if self.signed else np.abs(sums)).sum(axis=1)
        return _ratio(found, rows)

    def picked(self, rows: Sequence[int]) -> Scored:
        """The given rows in their order."""
        return Scored([self.question[row] for row in rows], self.parts[list(rows)], self.signed)

    def joined(self, other: Scored) -> Scored:
        """These rows and another method's after them."""
        return Scored([*self.question, *other.question], np.vstack([self.parts, other.parts]), self.signed)

    def value(self) -> float:
        """The metric of these rows."""
        return float(self.values(np.ones((1, len(self.question))))[0])


@dataclass(frozen=True)
class Ranked:
    """The rows of one seed, for AUROC. question: N distinct ids; confidence, correct: (N,)."""

    question: Sequence[str]
    confidence: Floats
    correct: Bools

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """The rows by rising confidence, and where each group of equal ones starts."""
        order = np.argsort(self.confidence, kind="stable")
        c = self.confidence[order]
        return order, np.flatnonzero(np.append(True, c[1:] != c[:-1]))

    def values(self, weights: Floats) -> Floats:
        """AUROC, ties half, under each row of weights; nan where all rows are right or all wrong. (R, N) -> (R,)."""
        order, starts = self._order
        w, z = weights[:, order], self.correct[order]
        right, wrong = (np.add.reduceat(w * side, starts, axis=1) for side in (z, ~z))
        below = np.cumsum(wrong, axis=1) - wrong
        return _ratio((right * (below + 0.5 * wrong)).sum(axis=1), right.sum(axis=1) * wrong.sum(axis=1))

    def picked(self, rows: Sequence[int]) -> Ranked:
        """The given rows in their order."""
        return Ranked([self.question[row] for row in rows], self.confidence[list(rows)], self.correct[list(rows)])

    def joined(self, other: Ranked) -> Ranked:
        """These rows and another method's after them."""
        return Ranked(
            [*self.question, *other.question],
            np.append(self.confidence, other.confidence),
            np.append(self.correct, other.correct),
        )

    def value(self) -> float:
        """AUROC of these rows."""
        return float(self.values(np.ones((1, len(self.question))))[0])


Seed = Scored | Ranked


def scored(name: Name, question: Sequence[str], confidence: ArrayLike, correct: ArrayLike, bins: int = 20) -> Seed:
    """Prepare one seed's answers, one a question. (N,), (N,)."""
    c, z = checked(confidence, correct)
    if name == "auroc":
        return Ranked(question, c, z)
    if name == "gap":
        return Scored(question, (c - z)[:, None], signed=True)
    if name == "accuracy":
        return Scored(question, z.astype(np.float64)[:, None])
    if name == "brier":
        return Scored(question, ((c - z) ** 2)[:, None])
    return Scored(question, _binned(c, bins) * (z - c)[:, None])


def _binned(c: Floats, bins: int) -> Floats:
    return np.eye(bins)[bin_index(c, bin_edges(c, bins))]


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.asarray(np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0))


def _codes(seeds: Sequence[Seed]) -> tuple[list[Ints], int]:
    """The number of each row's question among all questions of all seeds."""
    known: dict[str, int] = {}
    codes = [
        np.array([known.setdefault(question, len(known)) for question in seed.question], dtype=np.intp)
        for seed in seeds
    ]
    return codes, len(known)


def _chunks(resamples: int) -> Iterator[int]:
    return (min(CHUNK, resamples - start) for start in range(0, resamples, CHUNK))


def _drawn(questions: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each question is drawn, in blocks of (R, Q)."""
    rng, share = default_rng(seed), np.full(questions, 1.0 / questions)
    return (rng.multinomial(questions, share, size=size).astype(np.float64) for size in _chunks(resamples))


def _quantiles(draws: Floats, level: float) -> tuple[float, float]:
    defined = draws[~np.isnan(draws)]
    if len(defined) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(defined, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def mean_interval(seeds: Sequence[Seed], resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean over seeds and its percentile bootstrap interval over questions."""
    codes, questions = _codes(seeds)
    blocks = [
        np.mean([one.values(weights[:, code]) for code, one in zip(codes, seeds, strict=True)], axis=0)
        for weights in _drawn(questions, resamples, seed)
    ]
    low, high = _quantiles(np.concatenate(blocks), level)
    return Interval(float(np.mean([one.value() for one in seeds])), low, high, level)


def mean_null(
    confidences: Sequence[ArrayLike], bins: int = 20, simulations: int = 1000, level: float = 0.95, seed: int = 0
) -> NullBand:
    """The mean ECE over seeds of perfectly calibrated models with these confidences; seeds are drawn independently.

    For one seed this is `null_band`, draw by draw.
    """
    draws = np.zeros(simulations)
    for place, confidence in enumerate(confidences):
        c = checked_confidence(confidence)
        rng, columns = default_rng(seed + place), _binned(c, bins)
        found = [np.abs(((rng.random((size, len(c))) < c) - c) @ columns).sum(axis=1) for size in _chunks(simulations)]
        draws += np.concatenate(found) / (len(c) * len(confidences))
    low, high = _quantiles(draws, level)
    return NullBand(float(draws.mean()), low, high, level)


def mean_difference(
    a: Sequence[Seed],
    b: Sequence[Seed],
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    swaps: int | None = None,
) -> Comparison:
    """Compare two methods seed by seed on the same questions; the statistic is the mean over seeds of a less b.

    Interval: bootstrap over questions. p-value: swap test over questions; for one seed it is `compare`'s to the digit.
    Where the difference is undefined, so is the p-value. Where as many swaps as resamples give a p-value below ALPHA,
    it is taken from `swaps` of them if those are more: a correction for many comparisons needs small p-values, and only
    a test that may still show something needs the work. Stopping the others early can only lose differences.
    """
    joined, codes, questions = _joined(a, b)
    value_a, value_b = (float(np.mean([one.value() for one in side])) for side in (a, b))
    drawn = _drawn(questions, resamples, seed)
    draws = np.concatenate([_differences(joined, codes, times, np.ones_like(times)) for times in drawn])
    low, high = _quantiles(draws, level)
    p_value = _swap_test(joined, codes, questions, abs(value_a - value_b), (resamples, swaps or 0), seed)
    return Comparison(value_a, value_b, value_a - value_b, low, high, level, p_value)


def _differences(joined: Sequence[Seed], codes: list[Ints], drawn: Floats, stay: Floats) -> Floats:
    """Mean over seeds of metric a less metric b; `stay` is 0 for a question whose answers change places. (R,)."""
    total = np.zeros(len(drawn))
    for both, code in zip(joined, codes, strict=True):
        rows, stays = drawn[:, code], stay[:, code]
        kept, swapped = rows * stays, rows * (1.0 - stays)
        total += both.values(np.hstack([kept, swapped])) - both.values(np.hstack([swapped, kept]))
    return total / len(joined)


def _swap_test(
    joined: Sequence[Seed], codes: list[Ints], questions: int, observed: float, swaps: tuple[int, int], seed: int
) -> float:
    """swaps: of every test, and of one that is below ALPHA after so many."""
    if np.isnan(observed):
        return float("nan")
    rng, far, done = default_rng(seed), 0, 0
    for size in (*_chunks(swaps[0]), *_chunks(max(0, swaps[1] - swaps[0]))):
        if done >= swaps[0] and (1 + far) / (1 + done) >= ALPHA:
            break
        stay = (rng.random((size, questions)) >= 0.5).astype(np.float64)
        found = np.abs(_differences(joined, codes, np.ones((size, questions)), stay))
        far += int(np.sum(~(found < observed - 1e-12)))  # rounding must not break a tie; undefined counts as far
        done += size
    return (1 + far) / (1 + done)


def _joined(a: Sequence[Seed], b: Sequence[Seed]) -> tuple[list[Seed], list[Ints], int]:
    """Put each seed's rows of b, in the order of a's, after those of a; with the number of each question of a."""
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} seeds and b has {len(b)}, expected the same, at least one")
    joined: list[Seed] = []
    for first, second in zip(a, b, strict=True):
        place = {question: row for row, question in enumerate(second.question)}
        if set(place) != set(first.question) or len(place) != len(first.question):
            raise ValueError("a and b answer different questions")
        ordered = second.picked([place[question] for question in first.question])
        joined.append(first.joined(ordered))  # type: ignore[arg-type]  # both sides are of one metric
    return joined, *_codes(a)
