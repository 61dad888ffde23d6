"""Check columns, and sort their rows into confidence bins and groups of equal confidence: the basis of every metric.

As in the paper, `c` is the confidence of a row, and `z` says whether the row is right.

Bins are right-closed, `(edge[k], edge[k+1]]`, and confidence 0 belongs to the first one. Equal-width edges are `k / M`
as float64 computes it, so a confidence written as `k / M` is the upper edge of the k-th of the M bins, and belongs to
it.

Every metric accepts an optional `weight`: how often each row counts, like scikit-learn's `sample_weight`. A weight of
shape (N,) gives one number. A weight of shape (R, N) contains R weightings of the rows and gives R numbers. This is how
the bootstrap and the null band compute many resamples in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from catto.metrics.sharing import reuse_last_result

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.intp]
Strategy = Literal["width", "mass"]
# The result of a metric: a float, or (R,) float64 if its weight has shape (R, N). Static types do not see shapes.
Score = Any

# Maximum number of columns of an array that `split_blocks` puts into one block. Temporary arrays of this length fit the
# cache, and the allocator reuses their memory.
BLOCK = 1 << 14

# Values of `dtype.kind` that a column may have, one letter each: b for booleans, f for floats, i and u for signed and
# unsigned integers.
NUMBERS = "fiu"
NUMBERS_OR_BOOLEANS = "bfiu"


@reuse_last_result  # several metrics of the same rows check the columns only once
def check_columns(confidence: ArrayLike, correct: ArrayLike) -> tuple[Floats, Bools]:
    """Check the columns of a metric, and return them as arrays.

    Args:
        confidence: (N,) numbers in [0, 1], N >= 1.
        correct: (N,) booleans or 0/1.

    Returns:
        The confidences as float64, (N,), and the correctness as booleans, (N,).

    Raises:
        ValueError: A column is empty, the lengths differ, or a value is outside its range. The message names the row of
            such a value.

    >>> check_columns([0.5, 1], [1, 0])[1].tolist()
    [True, False]
    """
    c = check_confidence(confidence)
    z = _as_column(correct, "correct", kinds=NUMBERS_OR_BOOLEANS, expected="booleans or 0/1")
    is_boolean = z.dtype.kind == "b"
    if not is_boolean:
        is_bad = (z != 0) & (z != 1)
        if is_bad.any():
            row = int(np.flatnonzero(is_bad)[0])
            raise ValueError(f"correct[{row}] is {z[row]}, expected 0 or 1")
    if len(c) != len(z):
        raise ValueError(f"confidence has {len(c)} rows and correct has {len(z)}, expected the same number")
    return c, z.astype(np.bool_, copy=False)


def check_confidence(confidence: ArrayLike) -> Floats:
    """Check the confidences, and return them as an array of float64.

    Args:
        confidence: (N,) numbers in [0, 1], N >= 1.

    Returns:
        The confidences, (N,).

    Raises:
        ValueError: The column is empty, or not all of its values are numbers in [0, 1]; the message names the first
            bad row.

    >>> check_confidence([0, 1]).tolist()
    [0.0, 1.0]
    """
    column = _as_column(confidence, "confidence", kinds=NUMBERS, expected="numbers in [0, 1]")
    c = column.astype(np.float64, copy=False)
    # If a value is nan, so are the minimum and the maximum, and both comparisons are False.
    all_in_range = c.min() >= 0.0 and c.max() <= 1.0
    if not all_in_range:
        is_in_range = (c >= 0.0) & (c <= 1.0)
        row = int(np.flatnonzero(~is_in_range)[0])
        raise ValueError(f"confidence[{row}] is {c[row]}, expected a number in [0, 1]")
    return c


@reuse_last_result
def check_weight(weight: ArrayLike, rows: int) -> Floats:
    """Check the weights, and return them as float64.

    Args:
        weight: (N,), or (R, N) for R weightings: finite numbers of at least 0. No weighting may be 0 in every row.
        rows: Number of rows N.

    Returns:
        The weights, in the same shape.

    Raises:
        ValueError: The weights have a different shape, are not such numbers, or are all 0 in one weighting.

    >>> check_weight([2, 0], rows=2).tolist()
    [2.0, 0.0]
    """
    w = np.asarray(weight)
    has_valid_shape = w.ndim in (1, 2) and w.shape[-1] == rows and w.size > 0
    if not has_valid_shape:
        raise ValueError(f"weight has shape {w.shape}, expected ({rows},) or (R, {rows})")
    if w.dtype.kind not in NUMBERS_OR_BOOLEANS:
        raise ValueError(f"weight has dtype {w.dtype}, expected numbers")
    w = w.astype(np.float64, copy=False)
    total = total_weight(w)
    # If a weight is nan, so are the minimum and the total of its weighting, and the check fails.
    is_valid = w.min() >= 0.0 and np.isfinite(total).all()
    if not is_valid:
        raise ValueError("weight must be finite numbers of at least 0")
    if not np.all(total > 0.0):
        raise ValueError("weight is 0 in every row")
    return w


@reuse_last_result
def total_weight(weight: Floats) -> Floats:
    """Return the sum over the rows of each weighting. (..., N) -> (...)."""
    return np.asarray(weight.sum(axis=-1))


def _as_column(
    values: ArrayLike,
    name: str,
    *,
    kinds: str,
    expected: str,
) -> NDArray[np.generic]:
    """Check that a column has one dimension, at least one value and an allowed dtype, and return it as an array.

    Args:
        values: The column.
        name: Name of the column, for error messages.
        kinds: The allowed values of `dtype.kind`: NUMBERS or NUMBERS_OR_BOOLEANS.
        expected: Description of the allowed values, for error messages.

    Returns:
        The column, (N,), with the dtype that it has in NumPy.

    Raises:
        ValueError: One of the checks fails.
    """
    column = np.asarray(values)
    if column.ndim != 1:
        raise ValueError(f"{name} has shape {column.shape}, expected one dimension")
    if column.size == 0:
        raise ValueError(f"{name} is empty")
    if column.dtype.kind not in kinds:
        raise ValueError(f"{name} has dtype {column.dtype}, expected {expected}")
    return column


def to_score(value: Floats | np.float64) -> Score:
    """Return a float for one weighting of the rows, and the array for several."""
    if np.ndim(value) == 0:
        return float(value)
    return value


def mean_score(score: Floats | Bools, weight: ArrayLike | None) -> Score:
    """Return the weighted mean of one number per row.

    Args:
        score: (N,).
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        The mean; an array of R means for R weightings.

    >>> mean_score(np.array([1.0, 4.0]), weight=[2, 1])
    2.0
    """
    if weight is None:
        return float(score.mean())
    w = check_weight(weight, len(score))
    return to_score((w @ score) / total_weight(w))


def split_blocks(length: int) -> Iterator[slice]:
    """Yield slices of at most BLOCK columns that together cover `length` columns."""
    for start in range(0, length, BLOCK):
        yield slice(start, min(start + BLOCK, length))


# ---- bins


def bin_edges(
    confidence: Floats,
    bins: int,
    strategy: Strategy = "width",
    weight: Floats | None = None,
) -> Floats:
    """Return the edges of the bins, from 0 to 1.

    Args:
        confidence: (N,), from `check_columns`. Only `mass` reads it.
        bins: Number of bins M.
        strategy: `width` gives M + 1 edges `k / M`. `mass` gives the k/M quantiles of the confidences. Equal quantiles
            are merged, so equal confidences are never split, and there may be fewer than M bins.
        weight: (N,), from `check_weight`; None counts each row once. Only `mass` reads it.

    Returns:
        At most M + 1 numbers in increasing order. With `mass`, the first two may both be 0; the first bin then contains
        only the rows with confidence 0.

    Raises:
        ValueError: `bins` is not a whole number of at least 1, or `strategy` is unknown.

    >>> bin_edges(np.array([0.1, 0.2, 0.6]), 2).tolist()
    [0.0, 0.5, 1.0]
    """
    is_whole = isinstance(bins, int | np.integer) and not isinstance(bins, bool)  # in Python, a bool is an int
    if not is_whole or bins < 1:
        raise ValueError(f"bins is {bins!r}, expected a whole number of at least 1")
    if strategy == "width":
        return np.arange(bins + 1) / bins
    if strategy != "mass":
        raise ValueError(f"strategy is {strategy!r}, expected 'width' or 'mass'")
    inner = np.unique(_inner_quantiles(confidence, bins, weight))
    below_last_edge = inner[inner < 1.0]  # a quantile of 1 would add an empty bin at the end
    return np.concatenate(([0.0], below_last_edge, [1.0]))


def _inner_quantiles(
    confidence: Floats,
    bins: int,
    weight: Floats | None,
) -> Floats:
    """Return the M - 1 inner quantiles of M bins, some of which may be equal.

    The k-th quantile is the smallest confidence such that at least k / M of the rows are at or below it.
    """
    if bins == 1:
        return confidence[:0]  # no inner quantiles
    k = np.arange(1, bins)
    if weight is None:
        # The k-th quantile is the ceil(k N / M)-th smallest confidence. Integers avoid rounding: -(-a // b) is
        # ceil(a / b).
        rank_from_one = -(-k * len(confidence) // bins)
        rank = rank_from_one - 1
        partitioned = np.partition(confidence, np.unique(rank))  # sorted only as far as needed for these ranks
        return np.asarray(partitioned[rank])
    order = np.argsort(confidence, kind="stable")
    weight_up_to = np.cumsum(weight[order])
    total = weight_up_to[-1]
    # The first row with weight_up_to >= (k / M) total. Both sides are multiplied by M, which keeps whole numbers whole.
    rank = np.searchsorted(bins * weight_up_to, k * total, side="left")
    return np.asarray(confidence[order[rank]])


def bin_index(confidence: Floats, edges: Floats) -> Ints:
    """Return the index of each confidence's bin, from 0 to M - 1: the first k with `confidence <= edges[k + 1]`.

    Args:
        confidence: (N,), from `check_columns`.
        edges: (M + 1,), from `bin_edges`. A faster method is used for edges of equal width.

    Returns:
        (N,) indices.

    >>> bin_index(np.array([0.0, 0.5, 0.6]), np.array([0.0, 0.5, 1.0])).tolist()
    [0, 0, 1]
    """
    bins = len(edges) - 1
    equal_width_edges = np.arange(bins + 1) / bins
    has_equal_width = np.array_equal(edges, equal_width_edges)
    if not has_equal_width:
        return np.searchsorted(edges[1:], confidence, side="left")
    # The whole part of c * M is the index of c's bin or of the next one. It is that of the next one if c equals an edge
    # k / M, because bins are right-closed, or if the product was rounded up. In both cases, c does not exceed the lower
    # edge of the next bin.
    lower_edges = equal_width_edges.copy()
    lower_edges[0] = -1.0  # confidence 0 belongs to the first bin
    index = (confidence * bins).astype(np.intp)
    is_one_too_high = confidence <= lower_edges.take(index)
    index -= is_one_too_high
    return index


@dataclass(frozen=True)
class Reliability:
    """The number of rows in each confidence bin, and the sums of their columns.

    Attributes:
        edges: (M + 1,), increasing from 0 to 1.
        count: (M,) number of rows in each bin, or their weight; (R, M) for R weightings.
        confidence_sum: Sum of the confidences in each bin, in the shape of `count`.
        correct_sum: Number of right rows in each bin, or their weight, in the shape of `count`.
    """

    edges: Floats
    count: Ints | Floats
    confidence_sum: Floats
    correct_sum: Floats

    @property
    def rows(self) -> int:
        """Number of rows in all bins."""
        return int(self.count.sum())

    @property
    def share(self) -> Floats:
        """Share of the rows in each bin. (..., M)."""
        return np.asarray(self.count / self.count.sum(axis=-1, keepdims=True))

    @property
    def confidence(self) -> Floats:
        """Mean confidence of each bin, nan for empty bins. (..., M)."""
        return self._divide_by_count(self.confidence_sum, empty=np.nan)

    @property
    def accuracy(self) -> Floats:
        """Accuracy of each bin, nan for empty bins. (..., M)."""
        return self._divide_by_count(self.correct_sum, empty=np.nan)

    @property
    def gap(self) -> Floats:
        """Accuracy minus mean confidence of each bin, 0 for empty bins. (..., M)."""
        return self._divide_by_count(self.correct_sum - self.confidence_sum, empty=0.0)

    def _divide_by_count(self, sums: Floats, empty: float) -> Floats:
        out: Floats = np.full(sums.shape, empty)
        return np.divide(sums, self.count, out=out, where=self.count > 0)


@reuse_last_result  # several metrics need the same bins
def reliability(
    confidence: ArrayLike,
    correct: ArrayLike,
    bins: int = 20,
    strategy: Strategy = "width",
    weight: ArrayLike | None = None,
) -> Reliability:
    """Sort rows into confidence bins, for reliability diagrams and binned metrics.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        strategy: `width` for bins of equal width, `mass` for bins with equally many rows, see `bin_edges`.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once. Bins of
            equal mass accept (N,) only.

    Returns:
        The count and the sums of each bin, (M,) each, or (R, M) for R weightings.

    Raises:
        ValueError: A column, the weight or `bins` is out of range, or bins of equal mass get a weight of shape (R, N).

    >>> reliability([0.2, 0.4, 0.9], [False, True, True], bins=2).count.tolist()
    [2, 1]
    """
    if weight is None:
        # Without weights, the rows need not be sorted into groups first, which is faster.
        c, z = check_columns(confidence, correct)
        return _count_bins(c, z, bin_edges(c, bins, strategy))
    groups = group_rows(confidence, correct, weight)
    if strategy == "mass" and groups.count.ndim > 1:
        raise ValueError("bins of equal mass need a weight of shape (N,), since their edges depend on it")
    return _sum_bins(groups, bin_edges(groups.value, bins, strategy, groups.count))


def _count_bins(
    confidence: Floats,
    correct: Bools,
    edges: Floats,
) -> Reliability:
    """Count rows and sum confidence and correctness per bin. The rows, (N,), may be in any order."""
    bins = len(edges) - 1
    wrong_and_right = np.zeros((bins, 2), dtype=np.intp)
    confidence_sum = np.zeros(bins)
    for block in split_blocks(len(confidence)):
        c = confidence[block]
        index = bin_index(c, edges)
        confidence_sum += np.bincount(index, weights=c, minlength=bins)
        # Entry 2 * bin + correct of the counts: the wrong rows of a bin, followed by its right rows.
        index *= 2
        index += correct[block]
        wrong_and_right += np.bincount(index, minlength=2 * bins).reshape(bins, 2)
    right = wrong_and_right[:, 1].astype(np.float64)
    return Reliability(edges, count=wrong_and_right.sum(axis=1), confidence_sum=confidence_sum, correct_sum=right)


def _sum_bins(groups: Groups, edges: Floats) -> Reliability:
    """Sum the weights of the groups in each bin, for all weightings at once.

    Groups are in increasing order of confidence, so a bin consists of those from its start to its end.
    """
    # Bins are right-closed: a group whose confidence equals an edge belongs to the bin below the edge.
    inner_starts = np.searchsorted(groups.value, edges[1:-1], side="right")
    starts = np.concatenate(([0], inner_starts))
    ends = np.append(inner_starts, len(groups.value))
    has_groups = starts < ends

    def sum_per_bin(column: Floats) -> Floats:
        # (..., G) -> (..., M)
        sums = np.zeros((*column.shape[:-1], len(starts)))
        # `reduceat` sums from each start to the next. Empty bins are left out: for them, it would return the value at
        # their start instead of 0.
        sums[..., has_groups] = np.add.reduceat(column, starts[has_groups], axis=-1)
        return sums

    return Reliability(
        edges,
        count=sum_per_bin(groups.count),
        confidence_sum=sum_per_bin(confidence_sums(groups.count, groups.value)),
        correct_sum=sum_per_bin(groups.right),
    )


@reuse_last_result
def confidence_sums(count: Floats, value: Floats) -> Floats:
    """Return the sum of the confidences of each group. (..., G), (G,) -> (..., G)."""
    return count * value


# ---- groups of equal confidence


@dataclass(frozen=True)
class Groups:
    """Rows grouped by equal confidence.

    Attributes:
        value: (G,) distinct confidences, in increasing order.
        count: (G,) number of rows in each group, or their weight; (R, G) for R weightings.
        right: Number of right rows in each group, or their weight, in the shape of `count`.
    """

    value: Floats
    count: Floats
    right: Floats


@reuse_last_result  # several metrics need the same groups
def group_rows(
    confidence: ArrayLike,
    correct: ArrayLike,
    weight: ArrayLike | None = None,
) -> Groups:
    """Group the rows by confidence, in increasing order.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        G <= N groups. Their fields `count` and `right` are (R, G) for R weightings.

    >>> group_rows([0.5, 0.9, 0.5], [True, True, False]).right.tolist()
    [1.0, 1.0]
    """
    c, z = check_columns(confidence, correct)
    if weight is None:
        return _group_counts(c, z)
    w = check_weight(weight, len(c))
    if not _is_sorted(c):  # in a bootstrap, they are already sorted
        order = np.argsort(c, kind="stable")
        c = c[order]
        z = z[order]
        w = w[..., order]
    right = w * z
    starts = run_starts(c)
    all_distinct = len(starts) == len(c)
    if all_distinct:
        return Groups(c, w, right)
    count = np.add.reduceat(w, starts, axis=-1)
    return Groups(c[starts], count, np.add.reduceat(right, starts, axis=-1))


@reuse_last_result
def _is_sorted(values: Floats) -> bool:
    return bool(np.all(values[1:] >= values[:-1]))


def _group_counts(confidence: Floats, correct: Bools) -> Groups:
    """Group rows that each count once."""
    # Each key contains the confidence and the correctness of a row. Sorting the keys is 3x faster than argsort.
    keys = sort_keys(confidence, correct)
    keys.sort()
    right = (keys & np.uint64(1)).astype(np.float64)  # the lowest bit is the correctness
    keys >>= np.uint64(1)  # the other bits are the confidence
    value = keys.view(np.float64)
    starts = run_starts(value)
    all_distinct = len(starts) == len(keys)
    if all_distinct:
        return Groups(value, np.ones_like(right), right)
    count = np.diff(starts, append=len(keys)).astype(np.float64)
    return Groups(value[starts], count, np.add.reduceat(right, starts))


def sort_keys(confidence: Floats, correct: Bools) -> NDArray[np.uint64]:
    """Return one integer per row; the integers sort by confidence, then by correctness. (N,), (N,) -> (N,).

    The bits of a float of at least 0, read as an integer, sort like the float. Their top bit, the sign, is 0. It is
    dropped, and the correctness becomes the lowest bit.
    """
    keys = (confidence + 0.0).view(np.uint64)  # adding 0 turns -0 into 0 and makes a copy
    keys <<= np.uint64(1)
    keys |= correct
    return keys


@reuse_last_result
def run_starts(values: NDArray[Any]) -> Ints:
    """Return the index at which each run of equal values begins. (N,) -> (G,).

    >>> run_starts(np.array([1, 1, 2])).tolist()
    [0, 2]
    """
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))


def rank_shares(confidence: Floats) -> Floats:
    """Return the share of rows below each row, plus half of the share with the same confidence. (N,) -> (N,).

    >>> rank_shares(np.array([0.9, 0.2])).tolist()
    [0.75, 0.25]
    """
    in_order = np.sort(confidence)
    below = np.searchsorted(in_order, confidence, side="left")
    up_to = np.searchsorted(in_order, confidence, side="right")
    return np.asarray((below + up_to) / (2.0 * len(confidence)))
