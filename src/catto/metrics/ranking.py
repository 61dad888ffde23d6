"""How well confidence ranks answers, and the error rate of the answers above each confidence.

Rows of equal confidence have no order. Every number here is the mean over all orders of such rows (in closed form), so
it does not depend on the order in which the rows were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import (
    Bools,
    Floats,
    Groups,
    Ints,
    Score,
    check_columns,
    group_rows,
    split_blocks,
    to_score,
    total_weight,
)
from catto.metrics.resampling import BootstrapOptions
from catto.metrics.sharing import reuse_last_result
from catto.metrics.statistics import ratio_interval


def auroc(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return P(confidence of a right row > confidence of a wrong row); ties count half.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1], nan if all rows are right or all are wrong; an array of R such numbers for R weightings.

    >>> auroc([0.9, 0.4, 0.6], [True, False, False])
    1.0
    """
    groups = group_rows(confidence, correct, weight)
    total = total_weight(groups.count)
    right_total = groups.right.sum(axis=-1)
    at_least_as_confident = _count_from_above(groups.count)
    # Compare each right row with all rows, itself included: right_total * total comparisons. It loses those with the
    # rows above it and, because ties count half, half of those with its own group.
    lost = np.zeros(np.shape(total))
    # Block by block, so that temporary arrays fit the cache.
    for block in split_blocks(len(groups.value)):
        lost_per_right_row = at_least_as_confident[..., block] - 0.5 * groups.count[..., block]
        lost += np.vecdot(groups.right[..., block], lost_per_right_row)
    # The AUROC compares right rows with wrong rows only. Among themselves, R right rows win half of their R^2
    # comparisons. So of all N rows, right rows win R N - lost - R^2 / 2 comparisons with wrong ones.
    won = right_total * (total - 0.5 * right_total) - lost
    pairs = right_total * (total - right_total)
    undefined = np.full(np.shape(pairs), np.nan)
    return to_score(np.divide(won, pairs, out=undefined, where=pairs > 0))


def aurc(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the area under the risk-coverage curve, `mean over i of (errors among the i most confident) / i`.

    i runs from 1 to N. Rows of equal confidence count as if they were in random order.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) whole numbers, how often each row counts, or (R, N) for R such weightings. None counts each row
            once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

    >>> round(aurc([0.9, 0.4, 0.6], [True, False, False]), 4)
    0.3889
    """
    return to_score(_area_of_groups(group_rows(confidence, correct, weight)))


def e_aurc(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the excess AURC: AURC minus that of the same answers in the best order, with all errors last.

    It is 0 if every right row is more confident than every wrong row.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) whole numbers, how often each row counts, or (R, N) for R such weightings. None counts each row
            once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

    >>> e_aurc([0.9, 0.4, 0.6], [True, False, False])
    0.0
    """
    groups = group_rows(confidence, correct, weight)
    right = groups.right.sum(axis=-1)
    wrong = groups.count.sum(axis=-1) - right
    no_rows = np.zeros_like(right)
    # All wrong rows at confidence 0, and all right rows at confidence 1.
    best_order = Groups(
        value=np.array([0.0, 1.0]),
        count=np.stack([wrong, right], axis=-1),
        right=np.stack([no_rows, right], axis=-1),
    )
    excess = _area_of_groups(groups) - _area_of_groups(best_order)
    return to_score(np.maximum(0.0, excess))  # rounding may give less than 0


@reuse_last_result
def _count_from_above(count: Floats) -> Ints | Floats:
    """Return the number of rows in each group and all more confident groups, followed by a 0. (..., G) -> (..., G + 1).

    Groups are in increasing order of confidence: counts of 2, 1 and 3 give 6, 4, 3 and 0. The result has integers if
    all counts are whole numbers, because sums of integers are 3x as fast, and floats otherwise.
    """
    below = _count_below(count, np.intp)
    # The integer sums drop the fractions of all counts. If their totals are correct, there are no fractions.
    has_whole_counts = np.array_equal(below[..., -1], total_weight(count))
    if not has_whole_counts:
        below = _count_below(count, np.float64)
    all_rows = below[..., -1:]
    return np.asarray(all_rows - below)


def _count_below(count: Floats, dtype: type[np.intp | np.float64]) -> Ints | Floats:
    """Return the number of rows in the groups before each group, followed by the total. (..., G) -> (..., G + 1)."""
    *weightings, groups = count.shape
    below = np.zeros((*weightings, groups + 1), dtype)
    np.cumsum(count, axis=-1, dtype=dtype, out=below[..., 1:])
    return below


def _area_of_groups(groups: Groups) -> Floats:
    """Return the AURC. The risk at rank i is the number of errors among the i most confident rows, divided by i.

    The AURC is the mean of the risks at ranks 1 to N. Their sum is computed error by error. An error at rank j is among
    the i most confident rows for i = j, ..., N. It therefore adds 1/j + ... + 1/N to the sum, which is H_N - H_(j-1)
    with H_j = 1 + ... + 1/j. Each rank of a group has the error rate of the group. Over the n_g ranks of a group, from
    first to last, the terms H_N - H_(j-1) sum to n_g H_N - (S_last - S_(first-1)), where S_j is
    H_0 + ... + H_(j-1) = j H_j - j.
    """
    at_least_as_confident = _count_from_above(groups.count)
    has_whole_counts = at_least_as_confident.dtype == np.intp  # it has integers if all weights are whole
    if not has_whole_counts:
        raise ValueError("weight must be whole numbers: AURC is a mean over ranks")
    # The number of rows from a group upwards is the last rank of the group. The entry after it belongs to the next,
    # more confident group, so it is the rank before the group's first.
    last_rank = at_least_as_confident.astype(np.intp, copy=False)
    total = total_weight(groups.count)
    harmonic, harmonic_sum = _sum_harmonic_numbers(int(total.max()))
    risk_sum = np.zeros(np.shape(total))
    # Block by block, so that temporary arrays fit the cache.
    for block in split_blocks(len(groups.value)):
        count = np.maximum(groups.count[..., block], 1.0)  # a group of weight 0 adds nothing, whatever its error rate
        error_rate = 1.0 - groups.right[..., block] / count
        sums = harmonic_sum.take(last_rank[..., block.start : block.stop + 1])
        sum_before_minus_last = sums[..., 1:] - sums[..., :-1]
        risk_sum += np.vecdot(error_rate, sum_before_minus_last)
    # The terms error_rate * n_g * H_N of all groups together.
    wrong = total - groups.right.sum(axis=-1)
    harmonic_of_total = harmonic.take(last_rank[..., 0])  # the last rank of the least confident group is N
    risk_sum += wrong * harmonic_of_total
    return np.asarray(risk_sum / total)


@lru_cache(maxsize=2)
def _sum_harmonic_numbers(rows: int) -> tuple[Floats, Floats]:
    """Return H_j and S_j of `_area_of_groups` for j from 0 to the number of rows. (rows + 1,) each."""
    rank = np.arange(rows + 1.0)
    harmonic = np.append(0.0, np.cumsum(1.0 / rank[1:]))
    return harmonic, rank * harmonic - rank


# ---- within questions


@dataclass(frozen=True)
class Within:
    """AUROC of confidence within questions, its bootstrap interval over questions, and the data it is based on.

    Attributes:
        value: The AUROC; nan if there is no pair.
        low: Lower end of the interval; nan if there is no pair.
        high: Upper end of the interval; nan if there is no pair.
        questions: Number of questions that have a right and a wrong row.
        pairs: Number of pairs of a right and a wrong row of the same question.
    """

    value: float
    low: float
    high: float
    questions: int
    pairs: int


def auroc_within(
    question: Sequence[object],
    confidence: ArrayLike,
    correct: ArrayLike,
    **options: Unpack[BootstrapOptions],
) -> Within:
    """Return the AUROC among rows *of the same question*, pooled over all pairs of a right and a wrong row.

    It is the share of these pairs in which the right row is more confident; ties count half. Questions whose rows are
    all right or all wrong have no pair and do not count. Choosing the most confident of several answers helps only if
    the result is above a half. AUROC over all rows also rises when easy questions are answered more confidently, which
    does not help to choose among answers.

    Args:
        question: N question ids, one per row.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        options: Options of the bootstrap, see `BootstrapOptions`.

    Returns:
        The AUROC with its interval over questions, and the numbers of questions and pairs that it is based on. If there
        is no pair, the AUROC is nan.

    Raises:
        ValueError: A column or an option is out of range, or the lengths differ.

    >>> auroc_within(["q", "q", "q", "r"], [0.9, 0.4, 0.9, 0.8], [True, False, False, True]).value
    0.75
    """
    c, z = check_columns(confidence, correct)
    if len(question) != len(c):
        raise ValueError(f"question has {len(question)} rows and confidence has {len(c)}, expected the same number")
    rows_of: dict[object, list[int]] = {}
    for row, question_id in enumerate(question):
        rows_of.setdefault(question_id, []).append(row)
    # One entry for each question that has a pair.
    won: list[float] = []
    pairs: list[float] = []
    for rows in rows_of.values():
        counts = _count_pairs(c[rows], z[rows])
        if counts.pairs > 0:
            won.append(counts.won)
            pairs.append(float(counts.pairs))
    if not pairs:
        return Within(nan, nan, nan, questions=0, pairs=0)
    interval = ratio_interval(np.array(won), np.array(pairs), **options)
    return Within(interval.value, interval.low, interval.high, questions=len(pairs), pairs=int(sum(pairs)))


class _PairCounts(NamedTuple):
    """The pairs of a right and a wrong row.

    Attributes:
        won: Number of pairs in which the right row is more confident; ties count half.
        pairs: Number of pairs.
    """

    won: float
    pairs: int


def _count_pairs(confidence: Floats, correct: Bools) -> _PairCounts:
    right = confidence[correct]
    wrong = np.sort(confidence[~correct])
    # Summed over the right rows: the number of wrong rows with lower confidence, and with lower or equal confidence.
    lower = np.searchsorted(wrong, right, side="left").sum()
    lower_or_equal = np.searchsorted(wrong, right, side="right").sum()
    return _PairCounts(won=(lower + lower_or_equal) / 2, pairs=len(right) * len(wrong))


# ---- thresholds


@dataclass(frozen=True)
class RiskCoverage:
    """The coverage and the risk if only rows with `confidence >= threshold` are answered.

    Attributes:
        threshold: (G,) distinct confidences, decreasing.
        coverage: (G,) share of the rows that are answered, increasing to 1.
        risk: (G,) share of the answered rows that are wrong.
    """

    threshold: Floats
    coverage: Floats
    risk: Floats


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Return the risk-coverage curve at every distinct confidence, from the strictest threshold to full coverage.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.

    Returns:
        The coverage and the risk at each of the G distinct confidences.

    >>> risk_coverage([0.9, 0.6], [True, False]).risk.tolist()
    [0.0, 0.5]
    """
    groups = group_rows(confidence, correct)
    # Groups are in increasing order of confidence; the strictest threshold comes first in the result.
    threshold = groups.value[::-1]
    count = groups.count[::-1]
    right = groups.right[::-1]
    answered = np.cumsum(count)
    errors = np.cumsum(count - right)
    rows = answered[-1]
    return RiskCoverage(threshold, coverage=answered / rows, risk=errors / answered)
