"""How well confidence ranks answers, and the threshold above which they can be trusted.

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
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1], nan if all rows are right or all are wrong; (R,) for a weight of shape (R, N).

    >>> auroc([0.9, 0.4, 0.6], [True, False, False])
    1.0
    """
    groups = group_rows(confidence, correct, weight)
    total = total_weight(groups.count)
    right_total = groups.right.sum(axis=-1)
    at_least_as_confident = _sum_from_above(groups.count)
    # Compare each right row with all rows, including itself. It loses to the rows above it and, because ties count
    # half, to half of its group. `lost` is the sum over the right rows.
    lost = np.zeros(np.shape(total))
    for block in split_blocks(len(groups.value)):
        lost_per_row = at_least_as_confident[..., block] - 0.5 * groups.count[..., block]
        lost += np.vecdot(groups.right[..., block], lost_per_row)
    # Only comparisons with wrong rows count. Right rows win half of the comparisons among themselves, in any order:
    # 0.5 * right_total ** 2.
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

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N) whole numbers, how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

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
    """Return AURC minus that of the best order of the same answers (all errors last); 0 for a perfect order.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N) whole numbers, how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> e_aurc([0.9, 0.4, 0.6], [True, False, False])
    0.0
    """
    groups = group_rows(confidence, correct, weight)
    right = groups.right.sum(axis=-1)
    wrong = groups.count.sum(axis=-1) - right
    no_rows = np.zeros_like(right)
    best_order = Groups(
        value=np.array([0.0, 1.0]),
        count=np.stack([wrong, right], axis=-1),
        right=np.stack([no_rows, right], axis=-1),
    )
    excess = _area_of_groups(groups) - _area_of_groups(best_order)
    return to_score(np.maximum(0.0, excess))


@reuse_last_result
def _sum_from_above(count: Floats) -> Ints | Floats:
    """Return the number of rows that are at least as confident as each group, and 0 at the end. (..., G + 1).

    If all counts are whole numbers, so are the results: sums of integers are 3x as fast.
    """
    *weightings, groups = count.shape
    below: Ints = np.zeros((*weightings, groups + 1), dtype=np.intp)
    np.cumsum(count, axis=-1, dtype=np.intp, out=below[..., 1:])
    # An integer sum drops the fractions of counts that are not whole.
    has_whole_counts = np.array_equal(below[..., -1], total_weight(count))
    if has_whole_counts:
        return np.asarray(below[..., -1:] - below)
    below_exactly = np.zeros(below.shape)
    np.cumsum(count, axis=-1, out=below_exactly[..., 1:])
    return np.asarray(below_exactly[..., -1:] - below_exactly)


def _area_of_groups(groups: Groups) -> Floats:
    """Return the AURC, as a sum over errors instead of ranks.

    An error at rank j is part of every mean from j to N, so it counts 1/j + ... + 1/N times. Over a group of n_g ranks,
    these numbers sum to n_g H_N - (S_last - S_before), where H_j = 1 + ... + 1/j and, by summation by parts,
    S_j = H_0 + ... + H_(j-1) = j H_j - j.
    """
    at_least_as_confident = _sum_from_above(groups.count)
    has_whole_counts = at_least_as_confident.dtype == np.intp
    if not has_whole_counts:
        raise ValueError("weight must be whole numbers: AURC is a mean over ranks")
    # The last rank of each group. Groups are in increasing order of confidence, and the most confident row has rank 1,
    # so the next entry is the rank before the group.
    last_rank = at_least_as_confident.astype(np.intp, copy=False)
    total = total_weight(groups.count)
    harmonic, harmonic_sum = _harmonic_numbers(int(total.max()))
    area = np.zeros(np.shape(total))
    for block in split_blocks(len(groups.value)):
        # A group of weight 0 has no ranks, so any error rate will do.
        count = np.maximum(groups.count[..., block], 1.0)
        error_rate = 1.0 - groups.right[..., block] / count
        sums = harmonic_sum.take(last_rank[..., block.start : block.stop + 1])
        before_minus_last = sums[..., 1:] - sums[..., :-1]
        area += np.vecdot(error_rate, before_minus_last)
    wrong = total - groups.right.sum(axis=-1)
    last_harmonic = harmonic.take(last_rank[..., 0])
    return np.asarray((area + wrong * last_harmonic) / total)


@lru_cache(maxsize=2)
def _harmonic_numbers(rows: int) -> tuple[Floats, Floats]:
    """Return H_j and j H_j - j for j up to the number of rows."""
    rank = np.arange(rows + 1.0)
    harmonic = np.append(0.0, np.cumsum(1.0 / rank[1:]))
    return harmonic, rank * harmonic - rank


# ---- within questions


@dataclass(frozen=True)
class Within:
    """AUROC of confidence within questions, its bootstrap interval over questions, and the data it is based on.

    Attributes:
        value: The AUROC; nan if there is no pair, as are `low` and `high`.
        low: Lower end of the interval.
        high: Upper end of the interval.
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

    Choosing the most confident of several answers helps only if this is above a half. AUROC over all rows also rises
    when easy questions are answered more confidently, which does not help to choose among answers. Questions whose rows
    are all right or all wrong have no pair and do not count.

    Args:
        question: N ids.
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        options: Options of the bootstrap, see `BootstrapOptions`.

    Returns:
        The AUROC with its interval over questions, and the numbers of questions and pairs that it is based on.

    Raises:
        ValueError: A column or an option is out of range, or the lengths differ.

    >>> auroc_within(["q", "q", "q", "r"], [0.9, 0.4, 0.9, 0.8], [True, False, False, True]).value
    0.75
    """
    c, z = check_columns(confidence, correct)
    if len(question) != len(c):
        raise ValueError(f"question has {len(question)} rows and confidence has {len(c)}, expected the same number")
    rows_of: dict[object, list[int]] = {}
    for row, name in enumerate(question):
        rows_of.setdefault(name, []).append(row)
    won: list[float] = []
    pairs: list[float] = []
    for rows in rows_of.values():
        duels = _count_duels(c[rows], z[rows])
        if duels.pairs:
            won.append(duels.won)
            pairs.append(float(duels.pairs))
    if not pairs:
        return Within(nan, nan, nan, questions=0, pairs=0)
    interval = ratio_interval(np.array(won), np.array(pairs), **options)
    return Within(interval.value, interval.low, interval.high, questions=len(pairs), pairs=int(sum(pairs)))


class _Duels(NamedTuple):
    """The number of pairs of a right and a wrong row, and how many the right row wins; ties count half."""

    won: float
    pairs: int


def _count_duels(confidence: Floats, correct: Bools) -> _Duels:
    right = confidence[correct]
    wrong = np.sort(confidence[~correct])
    below = np.searchsorted(wrong, right, side="left").sum()
    up_to = np.searchsorted(wrong, right, side="right").sum()
    return _Duels((below + up_to) / 2, len(right) * len(wrong))


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

    >>> risk_coverage([0.9, 0.6], [True, False]).risk.tolist()
    [0.0, 0.5]
    """
    groups = group_rows(confidence, correct)
    wrong_of_group = groups.count - groups.right
    answered = np.cumsum(groups.count[::-1])
    wrong = np.cumsum(wrong_of_group[::-1])
    return RiskCoverage(groups.value[::-1], answered / answered[-1], wrong / answered)
