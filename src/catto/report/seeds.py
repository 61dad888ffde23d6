"""The mean of a metric over seeds: its interval, its null band, and its paired difference between two methods.

Accuracy and ECE are both `(1/N) sum_m |sum over rows i of part[i, m]|`: accuracy with the one column `z`, ECE with
`z - c` in the column of the row's bin. So every resample of rows is a row of weights, all of them one matrix product.
Questions are the unit: where seeds share test questions, a question is drawn, or swapped, in all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import default_rng
from numpy.typing import ArrayLike

from catto.evaluation.binning import Floats, Ints, bin_edges, bin_index, checked, checked_confidence
from catto.evaluation.statistics import Comparison, Interval, NullBand

__all__ = ["Scored", "mean_difference", "mean_interval", "mean_null", "scored"]

Name = Literal["accuracy", "ece"]
# Resamples a product: 100 x 5,000 questions of weights are 4 MB.
CHUNK = 100


@dataclass(frozen=True)
class Scored:
    """The rows of one seed. question: N distinct ids; parts: (N, M)."""

    question: Sequence[str]
    parts: Floats

    def value(self) -> float:
        """The metric of these rows."""
        return float(_values(np.ones((1, len(self.parts))), self.parts)[0])


def scored(name: Name, question: Sequence[str], confidence: ArrayLike, correct: ArrayLike, bins: int = 20) -> Scored:
    """Prepare one seed's answers, one a question. (N,), (N,)."""
    c, z = checked(confidence, correct)
    if name == "accuracy":
        return Scored(question, z.astype(np.float64)[:, None])
    return Scored(question, _binned(c, bins) * (z - c)[:, None])


def _binned(c: Floats, bins: int) -> Floats:
    return np.eye(bins)[bin_index(c, bin_edges(c, bins))]


def _values(weights: Floats, parts: Floats) -> Floats:
    """The metric under each row of weights; nan where all are 0. (R, N), (N, M) -> (R,)."""
    rows = weights.sum(axis=1)
    found = np.abs(weights @ parts).sum(axis=1)
    return np.asarray(np.divide(found, rows, out=np.full(len(rows), np.nan), where=rows > 0))


def _codes(seeds: Sequence[Scored]) -> tuple[list[Ints], int]:
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
    low, high = np.quantile(draws[~np.isnan(draws)], [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def mean_interval(seeds: Sequence[Scored], resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    """The mean over seeds and its percentile bootstrap interval over questions."""
    codes, questions = _codes(seeds)
    blocks = [
        np.mean([_values(weights[:, code], one.parts) for code, one in zip(codes, seeds, strict=True)], axis=0)
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
    a: Sequence[Scored], b: Sequence[Scored], resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> Comparison:
    """Compare two methods seed by seed on the same questions; the statistic is the mean over seeds of a less b.

    Interval: bootstrap over questions. p-value: swap test over questions; for one seed it is `compare`'s to the digit.
    """
    a, b = _aligned(a, b)
    codes, questions = _codes(a)
    value_a, value_b = (float(np.mean([one.value() for one in side])) for side in (a, b))
    draws = np.concatenate([_differences(a, b, codes, w, np.ones_like(w)) for w in _drawn(questions, resamples, seed)])
    low, high = _quantiles(draws, level)
    p_value = _swap_test(a, b, codes, questions, abs(value_a - value_b), resamples, seed)
    return Comparison(value_a, value_b, value_a - value_b, low, high, level, p_value)


def _differences(a: Sequence[Scored], b: Sequence[Scored], codes: list[Ints], drawn: Floats, stay: Floats) -> Floats:
    """Mean over seeds of metric a less metric b; `stay` is 0 for a question whose answers change places. (R,)."""
    total = np.zeros(len(drawn))
    for first, second, code in zip(a, b, codes, strict=True):
        both, rows = np.hstack([first.parts, second.parts]), drawn[:, code]
        kept, swapped = rows * stay[:, code], rows * (1.0 - stay[:, code])
        width, size = first.parts.shape[1], np.maximum(rows.sum(axis=1), 1.0)
        sums, crossed = kept @ both, swapped @ both
        of_a = np.abs(sums[:, :width] + crossed[:, width:]).sum(axis=1) / size
        of_b = np.abs(sums[:, width:] + crossed[:, :width]).sum(axis=1) / size
        total += of_a - of_b
    return total / len(a)


def _swap_test(
    a: Sequence[Scored], b: Sequence[Scored], codes: list[Ints], questions: int, observed: float, swaps: int, seed: int
) -> float:
    rng, far = default_rng(seed), 0
    for size in _chunks(swaps):
        stay = (rng.random((size, questions)) >= 0.5).astype(np.float64)
        found = np.abs(_differences(a, b, codes, np.ones((size, questions)), stay))
        far += int(np.sum(found >= observed - 1e-12))  # rounding must not break a tie
    return (1 + far) / (1 + swaps)


def _aligned(a: Sequence[Scored], b: Sequence[Scored]) -> tuple[list[Scored], list[Scored]]:
    """Bring each seed's rows of b into the order of a's."""
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} seeds and b has {len(b)}, expected the same, at least one")
    ordered = []
    for first, second in zip(a, b, strict=True):
        place = {question: row for row, question in enumerate(second.question)}
        if set(place) != set(first.question) or len(place) != len(first.question):
            raise ValueError("a and b answer different questions")
        ordered.append(Scored(first.question, second.parts[[place[question] for question in first.question]]))
    return list(a), ordered
