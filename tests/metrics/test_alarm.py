"""The alarm on an error rate: hand-worked numbers, the martingale law, false alarms and delays by simulation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scipy.stats import beta, binom

from catto.metrics.alarm import ALARM_LIMIT, FALSE_ALARM_RATE, ODDS_RATIOS, ErrorRateAlarm, bound_error_rate


def watch(wrong: np.ndarray, allowed_rate: float) -> ErrorRateAlarm:
    alarm = ErrorRateAlarm()
    for is_wrong in wrong.tolist():
        alarm.add_answer(is_wrong=is_wrong, allowed_rate=allowed_rate)
    return alarm


def test_the_first_answer_by_hand() -> None:
    """At a rate of 0.2, odds ratio h multiplies by h / (0.8 + 0.2 h) or 1 / (0.8 + 0.2 h); the evidence is the mean."""
    denominators = [0.8 + 0.2 * ratio for ratio in ODDS_RATIOS]
    if_wrong = np.mean([ratio / below for ratio, below in zip(ODDS_RATIOS, denominators, strict=True)])
    if_right = np.mean([1 / below for below in denominators])
    assert watch(np.array([True]), 0.2).evidence == pytest.approx(if_wrong)
    assert watch(np.array([False]), 0.2).evidence == pytest.approx(if_right)
    assert 0.2 * if_wrong + 0.8 * if_right == pytest.approx(1.0)


@pytest.mark.parametrize("allowed_rate", [0.01, 0.1, 0.5])
def test_the_expected_evidence_stays_the_same_at_the_allowed_rate_and_falls_below_it(allowed_rate: float) -> None:
    rng = np.random.default_rng(0)
    alarm = ErrorRateAlarm()
    for is_wrong in rng.random(200) < allowed_rate:
        branches = {}
        for outcome in (True, False):
            branch = copy.deepcopy(alarm)
            branch.add_answer(is_wrong=outcome, allowed_rate=allowed_rate)
            branches[outcome] = branch.evidence
        expected = allowed_rate * branches[True] + (1 - allowed_rate) * branches[False]
        assert expected == pytest.approx(alarm.evidence, rel=1e-12)
        assert branches[True] > branches[False]
        alarm.add_answer(is_wrong=bool(is_wrong), allowed_rate=allowed_rate)


def test_false_alarms_are_not_significantly_above_the_stated_rate() -> None:
    """1,000 streams at exactly the allowed rate; the limit allows 1 in 200, and 12 or more have probability 0.5 %."""
    rng = np.random.default_rng(1)
    alarms = sum(watch(rng.random(1000) < 0.1, 0.1).is_raised for _ in range(1000))
    assert binom.sf(11, 1000, 1 / ALARM_LIMIT) < 0.01
    assert alarms < 12


@pytest.mark.parametrize("answers_before", [0, 2000])
def test_an_error_rate_that_rises_by_ten_points_is_noticed(answers_before: int) -> None:
    rng = np.random.default_rng(2)
    noticed = 0
    for _ in range(20):
        before = rng.random(answers_before) < 0.02
        after = rng.random(600) < 0.12
        noticed += watch(np.concatenate([before, after]), 0.05).is_raised
    assert noticed >= 18


def test_it_does_not_die_of_a_hundred_thousand_right_answers() -> None:
    alarm = ErrorRateAlarm()
    for _ in range(100_000):
        alarm.add_answer(is_wrong=False, allowed_rate=0.1)
    assert alarm.evidence > 1e-6
    for _ in range(40):
        alarm.add_answer(is_wrong=True, allowed_rate=0.1)
    assert alarm.is_raised


def test_a_raised_alarm_stays_raised() -> None:
    alarm = watch(np.ones(20, dtype=bool), 0.1)
    evidence = alarm.evidence
    for _ in range(1000):
        alarm.add_answer(is_wrong=False, allowed_rate=0.1)
    assert (alarm.is_raised, alarm.evidence, alarm.answers) == (True, evidence, 1020)


def test_the_rate_is_bounded_by_the_calibration_answers_or_by_the_risk() -> None:
    """Clopper and Pearson's bound is a quantile of a Beta distribution."""
    level = 1 - FALSE_ALARM_RATE / 2
    assert bound_error_rate(5, 1000, 0.1) == pytest.approx(beta.ppf(level, 6, 995))
    assert bound_error_rate(70, 1000, 0.08) == 0.08
