"""Thresholds that keep the error rate of the answers above them below a target, with a stated probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import Bools, Floats, check_columns

# Number of candidate thresholds; candidate i keeps the most confident i/40 of the rows.
CANDIDATES = 40
# Starting points: number of a candidate -> its own share of delta. They keep an eighth, a quarter, half and all of the
# rows. If the confidence does not rank the answers, these shares found a threshold in 59 % of simulated sets of 400
# answers, and equal shares in 45 %.
SHARE_OF_DELTA = {5: 0.125, 10: 0.125, 20: 0.25, 40: 0.5}

# `estimate_rows_needed` searches for a number of rows that succeeds with this probability, up to the maximum.
SUCCESS_PROBABILITY = 0.8
MAX_ROWS = 10_000_000


@dataclass(frozen=True)
class Threshold:
    """A threshold with a guaranteed error rate: rows with `confidence >= threshold` are answered.

    Attributes:
        threshold: None if no candidate passed its test; then nothing is answered.
        risk: Requested maximum error rate of the answers.
        delta: Maximum probability that the error rate above the threshold exceeds `risk`.
        coverage: Share of the given rows that are answered.
        answered: Number of the given rows that are answered.
        errors: Number of answered rows that are wrong.
        bound: Clopper and Pearson's upper confidence bound on the error rate of the answers, at most `risk`. Its error
            probability is the level of the threshold's test, which is at most `delta`. 1 if there is no threshold.
    """

    threshold: float | None
    risk: float
    delta: float
    coverage: float
    answered: int
    errors: int
    bound: float


class Candidate(NamedTuple):
    """A threshold to be tested.

    Attributes:
        threshold: Rows with `confidence >= threshold` are answered.
        answered: Number of these rows.
        errors: Number of answered rows that are wrong.
    """

    threshold: float
    answered: int
    errors: int


def threshold_for_risk(
    confidence: ArrayLike,
    correct: ArrayLike,
    risk: float = 0.1,
    delta: float = 0.05,
) -> Threshold:
    """Find a threshold above which the error rate is at most `risk`, with probability at least 1 - delta.

    Rows with `confidence >= threshold` are answered. They must come from the same distribution as later answers, and
    must not have been used to fit the confidence.

    There are 40 candidate thresholds. Candidate i keeps the most confident i/40 of the rows, and with them all rows
    that have the same confidence as the last of these. Candidates are tested from the highest threshold to the lowest,
    and the result is the lowest one that passes ("learn then test" with the fallback procedure of Wiens and
    Dmitrienko).

    A candidate passes if its binomial p-value is at most its level. The p-value is the probability of this few errors
    or fewer among the answered rows at an error rate of `risk`. Four candidates start with a level:
    - 1/8 of delta for the candidate that keeps an eighth of the rows,
    - 1/8 of delta for a quarter,
    - 1/4 of delta for half,
    - 1/2 of delta for all rows.
    If a candidate passes, its level is added to that of the next one. If it fails, its level is lost. A candidate
    whose level is 0 is not tested.

    That all tests together err with a probability of at most delta is proved for thresholds chosen in advance. These
    thresholds are chosen from the confidences of the same rows, but not from their correctness. For them, the
    guarantee was checked by simulation.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Maximum error rate of the answers, in (0, 1).
        delta: Maximum probability that the error rate exceeds `risk`, in (0, 1).

    Returns:
        The threshold; its field `threshold` is None if no candidate passes.

    Raises:
        ValueError: A column, `risk` or `delta` is out of range.

    In the example, the 100 rows at confidence 1 have no error, and their p-value is 0.9^100 = 0.00003. All 110 rows
    have 10 errors and a p-value of 0.45, so the threshold is between 0.5 and 1.

    >>> found = threshold_for_risk([1.0] * 100 + [0.5] * 10, [True] * 100 + [False] * 10, risk=0.1, delta=0.05)
    >>> found.answered, found.errors
    (100, 0)
    """
    c, z = check_columns(confidence, correct)
    _check_share("risk", risk)
    _check_share("delta", delta)
    candidates = _list_candidates(c, z)
    passed = _find_lowest_passing(candidates, risk, delta)
    if passed is None:
        return Threshold(None, risk, delta, coverage=0.0, answered=0, errors=0, bound=1.0)
    lowest, level = passed
    return Threshold(
        lowest.threshold,
        risk,
        delta,
        coverage=lowest.answered / len(c),
        answered=lowest.answered,
        errors=lowest.errors,
        # At the level of the test, the bound is at most `risk` if and only if the candidate passes.
        bound=upper_bound(lowest.errors, lowest.answered, level),
    )


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, expected a number between 0 and 1")


def _list_candidates(confidence: Floats, correct: Bools) -> list[Candidate]:
    """Return all candidates, from the highest threshold to the lowest.

    Only the confidences determine the thresholds, not the correctness of the rows. Each threshold is the lowest one
    that answers these rows and no others: the smallest number above the confidence of the first row that is not
    answered, or 0 if all rows are answered.
    """
    order = np.argsort(-confidence, kind="stable")
    falling = confidence[order]
    errors_so_far = np.concatenate([[0], np.cumsum(~correct[order])])
    rows = len(falling)
    candidates = []
    for number in range(1, CANDIDATES + 1):
        rows_to_keep = max(round(rows * number / CANDIDATES), 1)
        last_kept = falling[rows_to_keep - 1]
        # No threshold separates rows of equal confidence, so all rows that are equal to the last one are answered.
        answered = int(np.searchsorted(-falling, -last_kept, side="right"))
        threshold = 0.0
        if answered < rows:
            first_left_out = falling[answered]
            threshold = float(np.nextafter(first_left_out, 2.0))
        candidates.append(Candidate(threshold, answered, int(errors_so_far[answered])))
    return candidates


def _find_lowest_passing(candidates: list[Candidate], risk: float, delta: float) -> tuple[Candidate, float] | None:
    """Return the lowest candidate that passes its test, and the level of this test; None if no candidate passes.

    The level of a candidate is its own share of delta, which most candidates do not have, plus the level of the
    candidate before it if that one passed.

    Args:
        candidates: From the highest threshold to the lowest.
        risk: Error rate under which p-values are computed.
        delta: The level that the starting points share.
    """
    from scipy.special import bdtr  # the binomial cumulative distribution

    lowest = None
    level = 0.0
    for number, candidate in enumerate(candidates, 1):
        level += delta * SHARE_OF_DELTA.get(number, 0.0)
        if level == 0.0:  # neither a share of its own nor an inherited level: not tested
            continue
        p_value = bdtr(candidate.errors, candidate.answered, risk)
        if p_value <= level:
            lowest = (candidate, level)  # the next candidate inherits the level
        else:
            level = 0.0
    return lowest


def upper_bound(errors: int, rows: int, delta: float) -> float:
    """Return Clopper and Pearson's upper confidence bound on an error rate; 1 if all rows are errors.

    It is the error rate at which this number of errors or fewer has probability delta.

    Args:
        errors: Number of errors.
        rows: Number of rows.
        delta: Maximum probability that the true error rate exceeds the bound, in (0, 1).

    >>> round(upper_bound(0, 10, 0.05), 4)
    0.2589
    """
    from scipy.special import betaincinv

    if errors >= rows:
        return 1.0
    return float(betaincinv(errors + 1, rows - errors, 1.0 - delta))


def estimate_rows_needed(
    confidence: ArrayLike,
    correct: ArrayLike,
    risk: float = 0.1,
    delta: float = 0.05,
) -> int | None:
    """Estimate how many rows `threshold_for_risk` needs to find a threshold with a probability of 0.8.

    Four candidates are considered: those that keep an eighth, a quarter, half and all of the rows. Each is tested at
    its own share of delta, see `threshold_for_risk`. The estimate assumes that a larger sample has the same error rate
    in each of these parts as the given rows.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Maximum error rate of the answers, in (0, 1).
        delta: Maximum probability that the error rate exceeds `risk`, in (0, 1).

    Returns:
        The smallest number of rows that is enough for one of the four candidates. None if more rows would probably not
        help: for each candidate, the error rate is at least `risk`, or so close to it that more than 10 million rows
        would be needed.

    Raises:
        ValueError: A column is out of range.

    >>> estimate_rows_needed([0.9] * 20, [True] * 20)
    39
    """
    c, z = check_columns(confidence, correct)
    candidates = _list_candidates(c, z)
    row_counts = []
    for number, share in SHARE_OF_DELTA.items():
        candidate = candidates[number - 1]  # candidates are numbered from 1
        error_rate = candidate.errors / candidate.answered
        coverage = candidate.answered / len(c)
        rows = _find_row_count(error_rate, coverage=coverage, risk=risk, level=delta * share)
        if rows is not None:
            row_counts.append(rows)
    return min(row_counts, default=None)


def _find_row_count(error_rate: float, *, coverage: float, risk: float, level: float) -> int | None:
    """Return how many rows a candidate needs to pass its test with SUCCESS_PROBABILITY.

    The numbers tried are 20, 22, 24.2 and so on, each 10 % above the last; the first one that is enough is rounded.

    Args:
        error_rate: True error rate of the rows that the candidate answers.
        coverage: Share of all rows that it answers.
        risk: Error rate under which its p-value is computed.
        level: Level of its test.

    Returns:
        The number of rows; None if the error rate is not below `risk`, or MAX_ROWS rows are not enough.
    """
    from scipy.stats import binom

    if error_rate >= risk:
        return None
    rows = 20.0
    while rows <= MAX_ROWS:
        answered = round(rows * coverage)
        # `ppf` returns the smallest number of errors whose p-value reaches the level. One error fewer passes the test.
        max_errors = int(binom.ppf(level, answered, risk)) - 1
        if binom.cdf(max_errors, answered, error_rate) >= SUCCESS_PROBABILITY:
            return round(rows)
        rows *= 1.1
    return None
