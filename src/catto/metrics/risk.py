"""Thresholds that keep the error rate of the answers above them below a target, with a stated probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import Bools, Floats, check_columns

# Thresholds are tried in steps of 1/40 of the answers, the most confident first. Testing starts at an eighth, a
# quarter, half and all of the answers, each with its share of delta. If the confidence does not rank the answers,
# these shares found a threshold in 59 % of simulated sets of 400 answers, and equal shares in 45 %.
STEPS = 40
SHARE_OF_DELTA = {5: 0.125, 10: 0.125, 20: 0.25, 40: 0.5}

# `estimate_rows_needed` searches for a size that succeeds with this probability, up to the largest size.
PROBABLE = 0.8
LARGEST_SIZE = 10_000_000


@dataclass(frozen=True)
class Threshold:
    """Answer at `confidence >= threshold`.

    Attributes:
        threshold: None if no threshold is good enough; then nothing is answered.
        risk: The requested maximum share of wrong answers.
        delta: Probability with which the guarantee may fail.
        coverage: Share of the given rows that are answered.
        answered: Number of the given rows that are answered.
        errors: Number of those that are wrong.
        bound: Clopper and Pearson's bound on the error rate, at the level at which this threshold passed its test.
    """

    threshold: float | None
    risk: float
    delta: float
    coverage: float
    answered: int
    errors: int
    bound: float


class Candidate(NamedTuple):
    """A threshold, and the rows at or above it."""

    threshold: float
    answered: int
    errors: int


def threshold_for_risk(
    confidence: ArrayLike,
    correct: ArrayLike,
    risk: float = 0.1,
    delta: float = 0.05,
) -> Threshold:
    """Find a low threshold above which at most a share `risk` of the answers is wrong, with probability 1 - delta.

    Candidate thresholds answer the most confident 1/40, 2/40, ... of the rows. They are tested in this order, and the
    result is the lowest one that passes ("learn then test" with the fallback procedure of Wiens and Dmitrienko).

    A candidate passes if an error rate of `risk` would lead to so few errors with a probability of at most its level
    (exact binomial test). Four candidates, the starting points, have a level of their own, a share of delta:
    - 1/8 of delta for the candidate that answers an eighth of the rows,
    - 1/8 of delta for a quarter,
    - 1/4 of delta for half,
    - 1/2 of delta for all rows.
    A candidate that passes also hands its level on to the next, lower candidate, where it is added to that candidate's
    own. A candidate that fails hands on nothing. A candidate without a level is not tested.

    A candidate lies just above the confidence of the first row that it leaves out. Given that confidence, the answered
    rows are independent draws, so each test is exact. The guarantee of the whole sequence is exact for thresholds
    chosen in advance; for these thresholds, it was checked by simulation.

    The rows must come from the same distribution as later answers, and must not have been used to fit the confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Maximum share of wrong answers, in (0, 1).
        delta: Probability with which the guarantee may fail, in (0, 1).

    Returns:
        The threshold; its field `threshold` is None if no candidate passes.

    Raises:
        ValueError: A column, `risk` or `delta` is out of range.

    >>> found = threshold_for_risk([1.0] * 100 + [0.5] * 10, [True] * 100 + [False] * 10)
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
    best, level = passed
    return Threshold(
        best.threshold,
        risk,
        delta,
        coverage=best.answered / len(c),
        answered=best.answered,
        errors=best.errors,
        bound=upper_bound(best.errors, best.answered, level),
    )


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, expected a number between 0 and 1")


def _list_candidates(confidence: Floats, correct: Bools) -> list[Candidate]:
    """Return the candidate of each step, the strictest first. The labels do not influence the thresholds."""
    order = np.argsort(-confidence, kind="stable")
    falling = confidence[order]
    errors_so_far = np.concatenate([[0], np.cumsum(~correct[order])])
    rows = len(falling)
    candidates = []
    for step in range(1, STEPS + 1):
        wanted = max(round(rows * step / STEPS), 1)
        # Rows of equal confidence are answered together.
        answered = int(np.searchsorted(-falling, -falling[wanted - 1], side="right"))
        threshold = 0.0
        if answered < rows:
            first_left_out = falling[answered]
            threshold = float(np.nextafter(first_left_out, 2.0))
        candidates.append(Candidate(threshold, answered, int(errors_so_far[answered])))
    return candidates


def _find_lowest_passing(candidates: list[Candidate], risk: float, delta: float) -> tuple[Candidate, float] | None:
    """Return the lowest candidate that passes its test, and the level of the test; None if all fail."""
    from scipy.special import bdtr

    lowest = None
    level = 0.0
    for step, candidate in enumerate(candidates, 1):
        level += delta * SHARE_OF_DELTA.get(step, 0.0)
        if level == 0.0:
            continue
        chance_of_so_few = bdtr(candidate.errors, candidate.answered, risk)
        if chance_of_so_few <= level:
            lowest = (candidate, level)
        else:
            level = 0.0
    return lowest


def upper_bound(errors: int, rows: int, delta: float) -> float:
    """Return Clopper and Pearson's bound: the error rate at which so few errors have probability delta.

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
    """Estimate how many rows with the same error rates are enough to find a threshold in four of five cases.

    The estimate is for the starting points of `threshold_for_risk`, each at its own share of delta.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Maximum share of wrong answers, in (0, 1).
        delta: Probability with which the guarantee may fail, in (0, 1).

    Returns:
        The number of rows. None if more rows would probably not help: at every starting point, the error rate is at
        least `risk`, or so close to it that more than LARGEST_SIZE rows would be needed.

    >>> estimate_rows_needed([0.9] * 20, [True] * 20)
    39
    """
    c, z = check_columns(confidence, correct)
    candidates = _list_candidates(c, z)
    sizes = []
    for step, share in SHARE_OF_DELTA.items():
        candidate = candidates[step - 1]
        error_rate = candidate.errors / candidate.answered
        size = _find_size(error_rate, coverage=candidate.answered / len(c), risk=risk, level=delta * share)
        if size is not None:
            sizes.append(size)
    return min(sizes, default=None)


def _find_size(error_rate: float, *, coverage: float, risk: float, level: float) -> int | None:
    """Return the smallest size tried at which a candidate with this coverage probably passes; None if none does."""
    from scipy.stats import binom

    if error_rate >= risk:
        return None
    size = 20.0
    while size <= LARGEST_SIZE:
        answered = round(size * coverage)
        # The most errors that pass: one fewer than the smallest number whose cumulative probability exceeds the level.
        most_errors = int(binom.ppf(level, answered, risk)) - 1
        if binom.cdf(most_errors, answered, error_rate) >= PROBABLE:
            return round(size)
        size *= 1.1
    return None
