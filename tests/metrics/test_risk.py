"""Thresholds for a target risk: the guarantee by simulation in worlds whose true risk is known."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binom

from catto.metrics.ranking import THRESHOLDS, risk_coverage, threshold_for_risk, upper_bound
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


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows", [150, 600])
def test_the_risk_is_exceeded_no_more_often_than_delta(world: str, rows: int) -> None:
    """1,000 draws; the true risk at each threshold comes from a million. delta = 0.1 allows 100 +- 3 sd = 129."""
    shape, chance = WORLDS[world]
    rng = np.random.default_rng(len(world))
    c = shape(rng.random(1_000_000))
    order = np.argsort(-c)
    wrong = np.cumsum(1 - chance(c[order]))
    counts = np.searchsorted(-c[order], -np.array(THRESHOLDS), side="right")
    true = {t: wrong[n - 1] / n if n else 0.0 for t, n in zip(THRESHOLDS, counts, strict=True)}
    violations = 0
    for _ in range(1000):
        c = shape(rng.random(rows))
        found = threshold_for_risk(c, rng.random(rows) < chance(c), risk=0.1, delta=0.1)
        violations += found.threshold is not None and true[found.threshold] > 0.1
    assert violations <= 129


def test_a_good_model_gets_a_threshold_that_answers_most() -> None:
    rng = np.random.default_rng(0)
    c = 1 - 0.3 * rng.random(2000)
    found = threshold_for_risk(c, rng.random(2000) < c + 0.1, risk=0.1)
    assert found.threshold is not None
    assert found.coverage > 0.8
    assert found.errors / found.answered <= found.bound <= 0.1


def test_the_lowest_threshold_that_passes_by_hand() -> None:
    """100 right at 1.0 and 10 wrong at 0.5: at 0.52 no error in 100; (1 - 0.1)^100 = 2.7e-5 < 0.05 / 76 = 6.6e-4."""
    assert len(THRESHOLDS) == 76
    found = threshold_for_risk([1.0] * 100 + [0.5] * 10, [1] * 100 + [0] * 10)
    assert (found.threshold, found.answered, found.errors) == (0.52, 100, 0)
    assert found.coverage == pytest.approx(100 / 110)
    assert found.bound == pytest.approx(1 - (0.05 / 76) ** (1 / 100))


def test_too_few_rows_give_no_threshold() -> None:
    """0.9^69 = 7.0e-4 is still above 0.05 / 76 = 6.6e-4; one row more is enough."""
    assert threshold_for_risk([1.0] * 69, [1] * 69).threshold is None
    assert threshold_for_risk([1.0] * 70, [1] * 70).threshold == 0.0
    nothing = threshold_for_risk([1.0] * 69, [1] * 69)
    assert (nothing.coverage, nothing.answered, nothing.bound) == (0.0, 0, 1.0)


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
