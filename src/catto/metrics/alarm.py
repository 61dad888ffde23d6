"""An alarm for an error rate that is higher than promised, with a stated probability of a false alarm.

The alarm is a test martingale: the capital of a gambler who bets against the promise, answer by answer. While the
promise holds, the capital does not grow on average, so the probability that it ever reaches 200 is at most 1/200
(Ville's inequality), however long the answers are watched.
"""

from __future__ import annotations

from catto.metrics.risk import upper_bound

# Probability that the alarm is ever raised while answers are like the calibration answers. One half is for the bets,
# the other half for the bound on the error rate of the calibration answers.
FALSE_ALARM_RATE = 0.01
ALARM_LIMIT = 2.0 / FALSE_ALARM_RATE
# Each bet assumes that the odds of an error are this many times the promised odds. At 1, the bet keeps its capital.
ODDS_RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0)
# After n answers, 1 / (n + 1000) of the capital is spread over all bets again, so that late changes are detected too.
# Without this step, an accuracy that fell after 2,000 answers was missed in most simulated streams.
SPREAD_AFTER = 1000


class ErrorRateAlarm:
    """Watch whether answers are wrong more often than promised.

    The capital of each bet is multiplied by the likelihood ratio of every answer: with r the promised error rate and h
    the odds ratio of the bet, by h / (1 - r + h r) for a wrong answer and by 1 / (1 - r + h r) for a right one. The
    evidence is the capital of all bets together, 1 at the start.

    Attributes:
        answers: Number of answers so far.
        evidence: The total capital; it no longer changes once the alarm is raised.

    >>> alarm = ErrorRateAlarm()
    >>> for _ in range(20):
    ...     alarm.add_answer(is_wrong=True, allowed_rate=0.1)
    >>> alarm.is_raised
    True
    """

    def __init__(self) -> None:
        self.answers = 0
        self.evidence = 1.0
        self._capital = [1.0 / len(ODDS_RATIOS)] * len(ODDS_RATIOS)

    @property
    def is_raised(self) -> bool:
        """Whether the evidence has reached the limit. An alarm that was raised stays raised."""
        return self.evidence >= ALARM_LIMIT

    def add_answer(self, *, is_wrong: bool, allowed_rate: float) -> None:
        """Count one answer, and update the capital of all bets unless the alarm is already raised.

        Args:
            is_wrong: Whether the answer turned out to be wrong.
            allowed_rate: Largest probability of an error that is promised for this answer, in (0, 1].
        """
        self.answers += 1
        if self.is_raised:
            return
        spread_share = 1.0 / (self.answers + SPREAD_AFTER)
        spread_capital_per_bet = spread_share * self.evidence / len(ODDS_RATIOS)
        for bet, odds_ratio in enumerate(ODDS_RATIOS):
            # r is `allowed_rate`, and h is `odds_ratio`: h / (1 - r + h r) if wrong, 1 / (1 - r + h r) if right.
            numerator = odds_ratio if is_wrong else 1.0
            likelihood_ratio = numerator / (1.0 - allowed_rate + odds_ratio * allowed_rate)
            own_capital = (1.0 - spread_share) * self._capital[bet]
            self._capital[bet] = likelihood_ratio * (own_capital + spread_capital_per_bet)
        self.evidence = sum(self._capital)


def bound_error_rate(errors: int, answered: int, risk: float) -> float:
    """Return an upper confidence bound on the error rate of answers that are like the calibration answers.

    Args:
        errors: Number of wrong calibration answers at or above the threshold.
        answered: Number of calibration answers at or above the threshold.
        risk: The promised error rate.

    Returns:
        `risk`, or Clopper and Pearson's bound if it is smaller. The true error rate exceeds that bound with a
        probability of at most FALSE_ALARM_RATE / 2.

    >>> bound_error_rate(5, 1000, 0.05) < 0.02
    True
    """
    return min(risk, upper_bound(errors, answered, FALSE_ALARM_RATE / 2.0))
