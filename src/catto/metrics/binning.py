"""Checked columns, confidence bins, and the three forms in which a metric is written.

Bins are right-closed, `(edge[k], edge[k+1]]`, and confidence 0 belongs to the first one. Equal-width edges are `k / M`
as float64 computes it, so a confidence written as `k / M` lies in bin k exactly.

A metric is a mean over rows (`mean_metric`), a formula of bin sums (`binned_metric`) or a formula of groups of equal
confidence (`grouped_metric`). The decorator makes it a function of the columns `confidence` and `correct`, and enters
in ON_COUNTS how it is computed for many resamples at once, without drawing or sorting rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]
Strategy = Literal["width", "mass"]
M = TypeVar("M", bound=Callable[..., float])
# Metric -> what prepares it for given confidences, which rise and are distinct; (G,) -> CountMetric.
ON_COUNTS: dict[Callable[..., float], Callable[..., CountMetric]] = {}

# Columns per pass: temporaries of this length stay in the cache and are never mapped afresh by the allocator.
BLOCK = 1 << 14


def checked(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Bools]:
    """Return both columns as float64 and bool, or raise a ValueError that names the first bad row."""
    c = checked_confidence(confidence)
    z = _column(correct, "correct", kinds="bfiu", expected="booleans or 0/1")
    if z.dtype.kind != "b" and (bad := (z != 0) & (z != 1)).any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"correct[{row}] is {z[row]}, expected 0 or 1")
    if len(c) != len(z):
        raise ValueError(f"confidence has {len(c)} rows, correct has {len(z)}")
    return c, z.astype(np.bool_, copy=False)


def checked_confidence(confidence: ArrayLike) -> Floats:
    """Return (N,) float64 in [0, 1], N >= 1, or raise a ValueError that names the first bad row."""
    c = _column(confidence, "confidence", kinds="fiu", expected="numbers in [0, 1]").astype(np.float64, copy=False)
    if not (c.min() >= 0.0 and c.max() <= 1.0):  # a nan makes both comparisons false
        row = int(np.flatnonzero(~((c >= 0.0) & (c <= 1.0)))[0])
        raise ValueError(f"confidence[{row}] is {c[row]}, expected a number in [0, 1]")
    return c


def _column(values: ArrayLike, name: str, kinds: str, expected: str) -> NDArray[np.generic]:
    column = np.asarray(values)
    if column.ndim != 1:
        raise ValueError(f"{name} has shape {column.shape}, expected one dimension")
    if column.size == 0:
        raise ValueError(f"{name} is empty")
    if column.dtype.kind not in kinds:
        raise ValueError(f"{name} has dtype {column.dtype}, expected {expected}")
    return column


def blocks(length: int) -> Iterator[slice]:
    """Cut so many columns into parts of at most BLOCK."""
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def bin_edges(confidence: Floats, bins: int, strategy: Strategy = "width") -> Floats:
    """Return the edges, from 0 to 1. confidence: (N,), checked.

    `width`: M + 1 edges `k / M`. `mass`: the confidences of order k/M; equal ones collapse, so equal confidences are
    never split and there may be fewer than M bins.

    >>> bin_edges(np.array([0.1, 0.2, 0.6]), 2).tolist()
    [0.0, 0.5, 1.0]
    """
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or bins < 1:
        raise ValueError(f"bins is {bins!r}, expected a whole number of at least 1")
    if strategy == "width":
        return np.arange(bins + 1) / bins
    if strategy != "mass":
        raise ValueError(f"strategy is {strategy!r}, expected 'width' or 'mass'")
    # The k-th quantile is the ceil(kN/M)-th smallest value, in whole numbers: no interpolation, no rounding.
    order = -(-np.arange(1, bins) * len(confidence) // bins) - 1
    inner = np.unique(np.partition(confidence, np.unique(order))[order]) if bins > 1 else confidence[:0]
    return np.concatenate(([0.0], inner[inner < 1.0], [1.0]))


def bin_index(confidence: Floats, edges: Floats) -> Ints:
    """Return the bin of each confidence, 0 to M - 1: the first k with `confidence <= edges[k + 1]`. (N,) -> (N,)."""
    bins = len(edges) - 1
    lower = np.arange(bins + 1) / bins
    if not np.array_equal(edges, lower):
        return np.searchsorted(edges[1:], confidence, side="left")
    # trunc(c * M) is the bin or, where c does not exceed that bin's lower edge, the one after it. Rounding of the
    # product never moves it by more, so one comparison with the edge itself makes every k / M exact.
    lower[0] = -1.0
    index = (confidence * bins).astype(np.intp)
    index -= confidence <= lower.take(index)
    return index


@dataclass(frozen=True)
class Reliability:
    """Rows per bin and their sums. edges: (M + 1,); count and sums: (M,), or (R, M) of R resamples."""

    edges: Floats
    count: Ints | Floats
    confidence_sum: Floats
    correct_sum: Floats

    @property
    def rows(self) -> int:
        """Number of rows in all bins."""
        return int(self.count.sum())

    @property
    def weight(self) -> Floats:
        """Share of the rows in each bin. (M,)."""
        return np.asarray(self.count / self.count.sum(axis=-1, keepdims=True))

    @property
    def confidence(self) -> Floats:
        """Mean confidence of each bin, nan where the bin is empty. (M,)."""
        return np.where(self.count > 0, self.confidence_sum / np.maximum(self.count, 1), np.nan)

    @property
    def accuracy(self) -> Floats:
        """Accuracy of each bin, nan where the bin is empty. (M,)."""
        return np.where(self.count > 0, self.correct_sum / np.maximum(self.count, 1), np.nan)

    @property
    def gap(self) -> Floats:
        """Accuracy less mean confidence of each bin, 0 where the bin is empty. (M,)."""
        return np.asarray((self.correct_sum - self.confidence_sum) / np.maximum(self.count, 1))


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = 20, strategy: Strategy = "width") -> Reliability:
    """Sort rows into confidence bins: what a reliability diagram draws and binned metrics read. (N,), (N,).

    >>> reliability([0.2, 0.4, 0.9], [False, True, True], bins=2).count.tolist()
    [2, 1]
    """
    c, z = checked(confidence, correct)
    return tally(c, z, bin_edges(c, bins, strategy))


def tally(confidence: Floats, correct: Bools, edges: Floats) -> Reliability:
    """Count rows and sum confidence and correctness per bin, in one pass. Checked (N,), (N,)."""
    bins = len(edges) - 1
    count = np.zeros((bins, 2), dtype=np.intp)
    total = np.zeros(bins)
    for part in blocks(len(confidence)):
        c = confidence[part]
        index = bin_index(c, edges)
        total += np.bincount(index, weights=c, minlength=bins)
        index *= 2
        index += correct[part]
        count += np.bincount(index, minlength=2 * bins).reshape(bins, 2)
    return Reliability(edges, count.sum(axis=1), total, count[:, 1].astype(np.float64))


@dataclass(frozen=True)
class Groups:
    """Rows of equal confidence together, by rising confidence, in R resamples. value: (G,); count, right: (R, G)."""

    value: Floats
    count: Floats
    right: Floats
    _tallies: dict[int, Reliability] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def rows(self) -> Floats:
        """Number of rows of each resample. (R,)."""
        return np.asarray(self.count.sum(axis=-1))

    @cached_property
    def confidence_sum(self) -> Floats:
        """Sum of the confidence of each group. (R, G)."""
        return self.count * self.value

    @cached_property
    def at_least(self) -> Ints:
        """Number of rows that are at least as confident as each group, and 0 at the end. (R, G + 1)."""
        ranks = np.zeros((len(self.count), len(self.value) + 1), dtype=np.intp)
        np.cumsum(self.count, axis=-1, dtype=np.intp, out=ranks[:, 1:])  # 3x as fast as a sum of floats
        return np.subtract(ranks[:, -1:].copy(), ranks, out=ranks)

    def tally(self, bins: int) -> Reliability:
        """Return the sums of the bins of equal width that hold any of the confidences. (R, M)."""
        if bins not in self._tallies:
            edges = bin_edges(self.value, bins)
            # Confidences rise, so each bin is a run of them.
            ends = np.searchsorted(self.value, edges[1:-1], side="right")
            starts = np.unique(np.append(0, ends[ends < len(self.value)]))
            columns = (self.count, self.confidence_sum, self.right)
            sums = (np.add.reduceat(column, starts, axis=-1) for column in columns)
            self._tallies[bins] = Reliability(edges, *sums)
        return self._tallies[bins]


# A metric of R resamples. -> (R,).
CountMetric = Callable[[Groups], Floats]


def groups(confidence: ArrayLike, correct: ArrayLike) -> Groups:
    """Group the rows by confidence. (N,), (N,) -> G <= N groups of one resample.

    >>> groups([0.5, 0.9, 0.5], [True, True, False]).right.tolist()
    [[1.0, 1.0]]
    """
    c, z = checked(confidence, correct)
    # The bits of a float in [0, 1] sort as it does and leave the top bit free: one sort of whole numbers carries both
    # columns, 3x faster than argsort. Adding 0 turns -0 into 0.
    keys = (c + 0.0).view(np.uint64)
    keys <<= np.uint64(1)
    keys |= z
    keys.sort()
    right = (keys & np.uint64(1)).astype(np.float64)[None]
    keys >>= np.uint64(1)
    value = keys.view(np.float64)
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    if len(starts) == len(keys):  # no ties: nothing to add up
        return Groups(value, np.ones_like(right), right)
    count = np.diff(starts, append=len(keys)).astype(np.float64)[None]
    return Groups(value[starts], count, np.add.reduceat(right, starts, axis=-1))


# A metric of the columns confidence, (N,) in [0, 1], and correct, (N,) of booleans or 0/1; bad ones raise ValueError.
RowMetric = Callable[[ArrayLike, ArrayLike], float]


class BinnedMetric(Protocol):
    """A metric of the same columns over confidence bins."""

    def __call__(
        self, confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20, strategy: Strategy = "width"
    ) -> float:
        """Compute the metric; bad columns raise ValueError."""


def mean_metric(score: Callable[[Floats, Bools], Floats | Bools]) -> RowMetric:
    """Make a metric of the score of each row: its mean. score: (N,), (N,) -> (N,)."""

    def metric(confidence: ArrayLike, correct: ArrayLike) -> float:
        return float(score(*checked(confidence, correct)).mean())

    def on_counts(c: Floats) -> CountMetric:
        of_wrong = np.asarray(score(c, np.zeros(len(c), dtype=np.bool_)), dtype=np.float64)
        gain = score(c, np.ones(len(c), dtype=np.bool_)) - of_wrong
        # Accuracy and mean confidence need one of the two sums.
        sums = [(name, weight) for name, weight in (("count", of_wrong), ("right", gain)) if weight.any()]
        return lambda rows: np.asarray(sum(getattr(rows, name) @ weight for name, weight in sums) / rows.rows)

    return _registered(metric, score, on_counts)


def binned_metric(formula: Callable[[Reliability], Floats]) -> BinnedMetric:
    """Make a metric of a formula of the bins' sums, which have shape (..., M) -> (...)."""

    def metric(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20, strategy: Strategy = "width") -> float:
        return float(formula(reliability(confidence, correct, bins, strategy)))

    def on_counts(c: Floats, *, bins: int = 20) -> CountMetric:
        return lambda rows: formula(rows.tally(bins))

    return _registered(metric, formula, on_counts)


def grouped_metric(formula: Callable[[Groups], Floats]) -> RowMetric:
    """Make a metric of a formula of groups of equal confidence: R resamples -> (R,)."""

    def metric(confidence: ArrayLike, correct: ArrayLike) -> float:
        return float(formula(groups(confidence, correct))[0])

    return _registered(metric, formula, lambda c: formula)


def _registered(metric: M, written: Callable[..., object], on_counts: Callable[..., CountMetric]) -> M:
    """Give the metric the name and docstring of the function it was written as, and enter it in ON_COUNTS."""
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # not the signature, which is the metric's own
        setattr(metric, name, getattr(written, name))
    ON_COUNTS[metric] = on_counts
    return metric


def by_confidence(confidence: Floats) -> tuple[Ints, Ints, Floats]:
    """Return the rows in rising order, where each group of equal confidences starts in it, and their confidences."""
    order = np.argsort(confidence)
    c = confidence[order] + 0.0  # turns -0 into 0
    starts = np.flatnonzero(np.append(True, c[1:] != c[:-1]))
    return order, starts, c[starts]


def ranks(confidence: Floats) -> Floats:
    """Return the share of rows below each row, and half of those of the same confidence. (N,) -> (N,)."""
    rising = np.sort(confidence)
    below, up_to = np.searchsorted(rising, confidence, "left"), np.searchsorted(rising, confidence, "right")
    return np.asarray((below + up_to) / (2.0 * len(confidence)))


def on_counts(metric: Callable[..., float]) -> Callable[[Floats], CountMetric]:
    """Return how the metric is computed from counts; one that is not in ON_COUNTS is called on rows."""
    function, options = (metric.func, metric.keywords) if isinstance(metric, partial) else (metric, {})
    prepare = ON_COUNTS.get(getattr(function, "function", function))
    if prepare is not None and set(options) <= {"bins"}:
        return partial(prepare, **options)

    def on_rows(groups: Groups) -> Floats:
        count, right = groups.count.astype(np.intp), groups.right.astype(np.intp)
        twice = np.append(groups.value, groups.value)
        confidences = (np.repeat(twice, row) for row in np.hstack([right, count - right]))
        firsts = right.sum(axis=-1)  # the right rows come first
        return np.array([metric(x, np.arange(len(x)) < first) for x, first in zip(confidences, firsts, strict=True)])

    return lambda c: on_rows
