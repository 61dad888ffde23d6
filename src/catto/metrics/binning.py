"""Checked inputs and confidence bins: every metric reads its rows through this module.

Bins are right-closed, `(edge[k], edge[k+1]]`, and confidence 0 belongs to the first one. Equal-width edges are `k / M`
as float64 computes it, so a confidence written as `k / M` lies in bin k exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Reliability", "Strategy", "bin_edges", "bin_index", "checked", "checked_confidence", "reliability"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]
Strategy = Literal["width", "mass"]

# Rows a pass: temporaries of this length stay in the cache and are never mapped afresh by the allocator.
BLOCK = 1 << 14


def checked(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Bools]:
    """Return both columns as float64 and bool, or raise one line that names the first bad row."""
    c = checked_confidence(confidence)
    z = _checked_correct(correct)
    if len(c) != len(z):
        raise ValueError(f"confidence has {len(c)} rows, correct has {len(z)}")
    return c, z


def checked_confidence(confidence: ArrayLike, name: str = "confidence") -> Floats:
    """Return (N,) float64 in [0, 1], N >= 1, or raise."""
    c = _column(confidence, name, kinds="fiu", expected="numbers in [0, 1]").astype(np.float64, copy=False)
    if not (c.min() >= 0.0 and c.max() <= 1.0):  # a nan makes both comparisons false
        row = int(np.flatnonzero(~((c >= 0.0) & (c <= 1.0)))[0])
        raise ValueError(f"{name}[{row}] is {c[row]}, expected a number in [0, 1]")
    return c


def _checked_correct(correct: ArrayLike) -> Bools:
    z = _column(correct, "correct", kinds="bfiu", expected="booleans or 0/1")
    if z.dtype.kind != "b":
        bad = (z != 0) & (z != 1)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(f"correct[{row}] is {z[row]}, expected 0 or 1")
    return z.astype(np.bool_, copy=False)


def _column(values: ArrayLike, name: str, kinds: str, expected: str) -> NDArray[np.generic]:
    column = np.asarray(values)
    if column.ndim != 1:
        raise ValueError(f"{name} has shape {column.shape}, expected one dimension")
    if column.size == 0:
        raise ValueError(f"{name} is empty")
    if column.dtype.kind not in kinds:
        raise ValueError(f"{name} has dtype {column.dtype}, expected {expected}")
    return column


def checked_bins(bins: int) -> int:
    """Return the number of bins, or raise when it is not a whole number of at least 1."""
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or bins < 1:
        raise ValueError(f"bins is {bins!r}, expected a whole number of at least 1")
    return int(bins)


def bin_edges(confidence: Floats, bins: int, strategy: Strategy = "width") -> Floats:
    """Return the edges, from 0 to 1. confidence: (N,), checked.

    `width`: M + 1 edges `k / M`. `mass`: the confidences of order k/M; equal ones collapse, so equal confidences are
    never split and there may be fewer than M bins.
    """
    bins = checked_bins(bins)
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
    return _locator(edges)(confidence)


def _locator(edges: Floats) -> Callable[[Floats], Ints]:
    bins = len(edges) - 1
    lower = np.arange(bins + 1) / bins
    if not np.array_equal(edges, lower):
        return lambda confidence: np.searchsorted(edges[1:], confidence, side="left")
    lower[0] = -1.0

    def locate(confidence: Floats) -> Ints:
        # trunc(c * M) is the bin or, where c does not exceed that bin's lower edge, the one after it: rounding of the
        # product never moves it by more, so one comparison with the edge itself makes every k / M exact.
        above = (confidence * bins).astype(np.intp)
        above -= confidence <= lower.take(above)
        return above

    return locate


@dataclass(frozen=True)
class Reliability:
    """Rows a bin and their sums. edges: (M + 1,); count, confidence_sum, correct_sum: (M,)."""

    edges: Floats
    count: Ints
    confidence_sum: Floats
    correct_sum: Floats

    @property
    def rows(self) -> int:
        """Number of rows over all bins."""
        return int(self.count.sum())

    @property
    def weight(self) -> Floats:
        """Share of the rows in each bin. (M,)."""
        return self.count / self.rows

    @property
    def confidence(self) -> Floats:
        """Mean confidence of each bin, nan where the bin is empty. (M,)."""
        return _ratio(self.confidence_sum, self.count)

    @property
    def accuracy(self) -> Floats:
        """Accuracy of each bin, nan where the bin is empty. (M,)."""
        return _ratio(self.correct_sum, self.count)

    @property
    def gap(self) -> Floats:
        """Accuracy less mean confidence of each bin, 0 where the bin is empty. (M,)."""
        gap: Floats = (self.correct_sum - self.confidence_sum) / np.maximum(self.count, 1)
        return gap


def _ratio(total: Floats, count: Ints) -> Floats:
    return np.asarray(np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0), dtype=np.float64)


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = 20, strategy: Strategy = "width") -> Reliability:
    """Sort rows into confidence bins: what a reliability diagram draws and binned metrics read. (N,), (N,)."""
    c, z = checked(confidence, correct)
    return tally(c, z, bin_edges(c, bins, strategy))


def tally(confidence: Floats, correct: Bools, edges: Floats) -> Reliability:
    """Count rows and sum confidence and correctness a bin, in one pass. Checked (N,), (N,)."""
    bins, locate = len(edges) - 1, _locator(edges)
    count = np.zeros((bins, 2), dtype=np.intp)
    total = np.zeros(bins)
    for start in range(0, len(confidence), BLOCK):
        c = confidence[start : start + BLOCK]
        index = locate(c)
        total += np.bincount(index, weights=c, minlength=bins)
        index *= 2
        index += correct[start : start + BLOCK]
        count += np.bincount(index, minlength=2 * bins).reshape(bins, 2)
    return Reliability(edges, count.sum(axis=1), total, count[:, 1].astype(np.float64))
