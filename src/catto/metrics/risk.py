"""Thresholds that keep the error rate of the answers above them below a target, with a stated probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import Bools, Floats, checked

# Thresholds are tried in steps of 1/40 of the answers, the most confident first. Each sequence of tests starts at one
# of these steps: an eighth, a quarter, half and all of the answers. Four starts found at least as many thresholds as 76
# fixed candidates in every simulated world (tests/metrics/test_risk.py); more starts leave each one less of delta.
STEPS = 40
STARTS = (5, 10, 20, 40)

# `estimate_rows_needed` looks for a size that succeeds this often, and gives up above the largest size.
PROBABLE = 0.8
LARGEST_SIZE = 10_000_000


@dataclass(frozen=True)
class Threshold:
    """Answer at `confidence >= threshold`.

    Attributes:
        threshold: None where no threshold is good enough: answer nothing.
        risk: Largest share of wrong answers that was asked for.
        delta: Probability with which the promise may fail.
        coverage: Share of the given rows that are answered.
        answered: Number of the given rows that are answered.
        errors: Number of those that are wrong.
        bound: The error rate is below it with probability 1 - delta.
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

    Candidates answer the most confident 1/40, 2/40, ... of the rows. A candidate passes if an error rate of `risk`
    would lead to so few errors with probability at most delta / 4 (exact binomial test). Four sequences of tests start
    at an eighth, a quarter, half and all of the rows. Each goes on to lower thresholds until a candidate fails. The
    lowest candidate that passed is taken ("learn then test" with fixed sequences).

    A candidate lies just above the confidence of the first row that it leaves out. Given that confidence, the answered
    rows are independent draws, so the test of each start is exact. The guarantee for the whole sequences is exact for
    thresholds chosen in advance; for these it was checked by simulation.

    The rows must be drawn like those that are answered later, and must not have been used to fit the confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Largest share of wrong answers, in (0, 1).
        delta: Probability with which the promise may fail, in (0, 1).

    >>> found = threshold_for_risk([1.0] * 100 + [0.5] * 10, [True] * 100 + [False] * 10)
    >>> found.answered, found.errors
    (100, 0)
    """
    c, z = checked(confidence, correct)
    _check_share("risk", risk)
    _check_share("delta", delta)
    level = delta / len(STARTS)
    candidates = _list_candidates(c, z)
    passes = [_passes_test(candidate, risk, level) for candidate in candidates]
    lowest = _follow_sequences(passes)
    if lowest is None:
        return Threshold(None, risk, delta, coverage=0.0, answered=0, errors=0, bound=1.0)
    best = candidates[lowest]
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
        place = max(round(rows * step / STEPS), 1)
        # Rows of equal confidence are answered together.
        answered = int(np.searchsorted(-falling, -falling[place - 1], side="right"))
        threshold = 0.0
        if answered < rows:
            threshold = float(np.nextafter(falling[answered], 2.0))
        candidates.append(Candidate(threshold, answered, int(errors_so_far[answered])))
    return candidates


def _passes_test(candidate: Candidate, risk: float, level: float) -> bool:
    from scipy.special import bdtr

    chance_of_so_few = bdtr(candidate.errors, candidate.answered, risk)
    return bool(chance_of_so_few <= level)


def _follow_sequences(passes: list[bool]) -> int | None:
    """Return the last candidate that any sequence reaches before its first failure; None if all starts fail."""
    lowest = None
    for start in STARTS:
        index = start - 1
        while index < STEPS and passes[index]:
            lowest = index if lowest is None else max(lowest, index)
            index += 1
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
    """Estimate how many rows like these are enough to find a threshold in four of five cases.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        risk: Largest share of wrong answers, in (0, 1).
        delta: Probability with which the promise may fail, in (0, 1).

    Returns:
        The number of rows, or None where the error rate of the most confident rows is not below `risk`: more rows
        would probably not help.

    >>> estimate_rows_needed([0.9] * 20, [True] * 20)
    43
    """
    c, z = checked(confidence, correct)
    candidates = _list_candidates(c, z)
    sizes = []
    for start in STARTS:
        candidate = candidates[start - 1]
        error_rate = candidate.errors / candidate.answered
        size = _find_size(error_rate, coverage=candidate.answered / len(c), risk=risk, level=delta / len(STARTS))
        if size is not None:
            sizes.append(size)
    return min(sizes, default=None)


def _find_size(error_rate: float, *, coverage: float, risk: float, level: float) -> int | None:
    """Return the smallest tried number of rows with which a candidate of that coverage probably passes its test."""
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
