"""Thresholds for a target risk: the guarantee by simulation in worlds whose true risk is known."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binom

from catto.metrics.ranking import risk_coverage
from catto.metrics.risk import estimate_rows_needed, threshold_for_risk, upper_bound
from catto.report.figures import choose_looks, draw_risk

# world -> (confidence of a uniform number, chance of being right at that confidence)
WORLDS = {
    "calibrated": (lambda u: 0.4 + 0.6 * u, lambda c: c),
    "overconfident": (lambda u: 1 - 0.3 * u**3, lambda c: np.clip(c - 0.12, 0, 1)),
    "in lumps": (lambda u: np.array([0.5, 0.9, 0.99, 1.0])[(4 * u).astype(int)], lambda c: 0.35 + 0.57 * c),
    # Every threshold is just too risky: the many looks of a search without a union bound find one that seems good.
    "confidence says nothing": (lambda u: u, lambda c: np.full_like(c, 0.897)),
    "confidence misleads": (lambda u: 0.5 + 0.5 * u, lambda c: 0.93 - 0.1 * (c - 0.5)),
}


class TrueRisk:
    """The error rate of a world above any threshold, from a million answers."""

    def __init__(self, world: str) -> None:
        shape, chance = WORLDS[world]
        confidence = shape(np.random.default_rng(0).random(1_000_000))
        self.falling = np.sort(confidence)[::-1]
        self.errors = np.cumsum(1 - chance(self.falling))

    def above(self, threshold: float) -> float:
        answered = int(np.searchsorted(-self.falling, -threshold, side="right"))
        return float(self.errors[answered - 1] / answered) if answered else 0.0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows", [150, 600])
def test_the_risk_is_exceeded_no_more_often_than_delta(world: str, rows: int) -> None:
    """1,000 draws; delta = 0.1 allows 100, and more than 123 have a probability below 1 %."""
    shape, chance = WORLDS[world]
    true_risk = TrueRisk(world)
    rng = np.random.default_rng(len(world))
    violations = 0
    for _ in range(1000):
        c = shape(rng.random(rows))
        found = threshold_for_risk(c, rng.random(rows) < chance(c), risk=0.1, delta=0.1)
        violations += found.threshold is not None and true_risk.above(found.threshold) > 0.1
    assert violations <= 123


def test_a_few_hundred_answers_are_enough_where_the_error_is_well_below_the_target() -> None:
    """With 7 % wrong, 400 answers and a target of 10 %, a threshold is found in at least half of the draws."""
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(300):
        confidence = 0.8 + 0.2 * rng.random(400)
        found += threshold_for_risk(confidence, rng.random(400) < 0.93).threshold is not None
    assert found > 150


def test_the_estimated_number_of_rows_is_enough_in_most_draws() -> None:
    rng = np.random.default_rng(3)
    confidence = 0.8 + 0.2 * rng.random(4000)
    correct = rng.random(4000) < 0.93
    needed = estimate_rows_needed(confidence, correct)
    assert needed is not None
    found = 0
    for _ in range(200):
        c = 0.8 + 0.2 * rng.random(needed)
        found += threshold_for_risk(c, rng.random(needed) < 0.93).threshold is not None
    assert found >= 140


def test_more_rows_do_not_help_where_even_the_most_confident_are_too_often_wrong() -> None:
    rng = np.random.default_rng(0)
    assert estimate_rows_needed(rng.random(500), rng.random(500) < 0.5) is None


def test_a_good_model_gets_a_threshold_that_answers_most() -> None:
    rng = np.random.default_rng(0)
    c = 1 - 0.3 * rng.random(2000)
    found = threshold_for_risk(c, rng.random(2000) < c + 0.1, risk=0.1)
    assert found.threshold is not None
    assert found.coverage > 0.8
    assert found.errors / found.answered <= found.bound <= 0.1


def test_the_lowest_threshold_that_passes_by_hand() -> None:
    """100 right at 1.0 and 10 wrong at 0.5: no error in the 100 above 0.5; 10 of 110 is too close to one in ten.

    The 100 are tested at half of delta: the shares of the starts at an eighth, a quarter and half of the rows.
    """
    found = threshold_for_risk([1.0] * 100 + [0.5] * 10, [1] * 100 + [0] * 10)
    assert (found.threshold, found.answered, found.errors) == (np.nextafter(0.5, 1), 100, 0)
    assert found.coverage == pytest.approx(100 / 110)
    assert found.bound == pytest.approx(1 - (0.05 / 2) ** (1 / 100))


def test_too_few_rows_give_no_threshold() -> None:
    """0.9^35 = 0.02503 is still above 0.05 / 2 = 0.025, the share of all rows; one row more is enough."""
    assert threshold_for_risk([1.0] * 36, [1] * 36).threshold == 0.0
    nothing = threshold_for_risk([1.0] * 35, [1] * 35)
    assert (nothing.threshold, nothing.coverage, nothing.answered, nothing.bound) == (None, 0.0, 0, 1.0)


def test_a_candidate_that_passes_hands_its_level_on() -> None:
    """29 errors in the lower half of 400 rows have probability 0.036 at one in ten.

    All rows pass at 0.05, the level once every stricter candidate has passed, and fail at 0.025, their own share, if
    the errors are in the upper half.
    """
    confidence = np.linspace(1, 0.5, 400)
    correct = np.ones(400, dtype=bool)
    correct[201:400:7] = False
    assert (~correct).sum() == 29
    assert 0.025 < binom.cdf(29, 400, 0.1) < 0.05
    assert threshold_for_risk(confidence, correct).answered == 400
    assert threshold_for_risk(confidence[::-1], correct).answered < 400


def test_the_labels_do_not_choose_the_candidates() -> None:
    """A sequence ends at its first failure, even if a lower threshold would pass."""
    confidence = np.linspace(1, 0.5, 400)
    correct = np.ones(400, dtype=bool)
    correct[100:140] = False
    found = threshold_for_risk(confidence, correct)
    assert found.answered == 100


def test_the_upper_bound_is_clopper_pearsons() -> None:
    for errors, rows in ((0, 10), (3, 40), (39, 40)):
        assert binom.cdf(errors, rows, upper_bound(errors, rows, 0.05)) == pytest.approx(0.05, abs=1e-9)
    assert upper_bound(5, 5, 0.05) == 1.0


def test_bad_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="risk is 0"):
        threshold_for_risk([1.0], [1], risk=0)
    with pytest.raises(ValueError, match="delta is 1"):
        threshold_for_risk([1.0], [1], delta=1)


def test_the_figure_draws_the_curve() -> None:
    rng = np.random.default_rng(1)
    c = 1 - 0.3 * rng.random(500)
    curve = risk_coverage(c, rng.random(500) < c + 0.1)
    axes = Figure().subplots()
    draw_risk(axes, {"sft": curve}, choose_looks(["sft"]))
    (line,) = axes.lines
    assert line.get_xdata() == pytest.approx(curve.coverage)
    assert axes.get_legend_handles_labels()[1] == ["SFT"]
