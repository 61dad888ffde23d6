"""How often intervals hold and how far debiasing goes, by simulation: the numbers that the docstrings quote."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.stats import binom

from catto.metrics.errors import accuracy, brier, debiased_ece, ece, nll
from catto.metrics.resampling import Answers
from catto.metrics.statistics import bootstrap_table, null_band

pytestmark = pytest.mark.slow

MEASURED = {"accuracy": accuracy, "brier": brier, "nll": nll, "ece": ece}
# Confidence is uniform on (0.5, 1) and right with probability c - shift; all expectations are integrals over it.
GRID = 0.5 + 0.5 * (np.arange(200_000) + 0.5) / 200_000


def truth(shift: float) -> dict[str, float]:
    """Return the population value of each metric."""
    c, p = GRID, GRID - shift
    return {
        "accuracy": float(p.mean()),
        "brier": float(np.mean(p * (1 - c) ** 2 + (1 - p) * c**2)),
        "nll": float(-np.mean(p * np.log(c) + (1 - p) * np.log(1 - c))),
        "ece": shift,
    }


@cache
def coverage(shift: float, sets: int, resamples: int, rows: int = 300) -> dict[str, float]:
    """Return the share of simulated data sets whose 95 % interval holds the population value."""
    rng, expected = np.random.default_rng(round(1000 * shift)), truth(shift)
    held = dict.fromkeys(MEASURED, 0)
    for number in range(sets):
        c = 0.5 + 0.5 * rng.random(rows)
        z = rng.random(rows) < c - shift
        found = bootstrap_table(MEASURED, [Answers(None, c, z)], resamples=resamples, seed=number)
        for name, interval in found.items():
            held[name] += interval.low <= expected[name] <= interval.high
    return {name: count / sets for name, count in held.items()}


@pytest.mark.parametrize("shift", [0.0, 0.15])
@pytest.mark.parametrize("name", ["accuracy", "brier", "nll"])
def test_percentile_intervals_of_means_are_nominal(name: str, shift: float) -> None:
    """An interval that truly covers 94 % (percentile ones are a little short at N=300) passes 99.9 times in 100."""
    sets = 200
    low, high = binom.ppf([0.0005, 0.9995], sets, 0.94) / sets
    assert low <= coverage(shift, sets, 150)[name] <= high


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.0, 0.02), (0.05, 0.12, 0.36), (0.15, 0.88, 1.0)])
def test_interval_of_ece_covers_as_documented(shift: float, low: float, high: float) -> None:
    assert low <= coverage(shift, 200, 150)["ece"] <= high


@pytest.mark.parametrize(("rows", "low", "high"), [(300, 0.35, 0.62), (2000, 0.80, 0.97)])
def test_the_interval_of_ece_covers_less_where_all_bins_are_filled(rows: int, low: float, high: float) -> None:
    """Confidence uniform on (0, 1), its log-odds three times too large: the true ECE is 14 points, in all 20 bins.

    Measured with 600 sets: 48 % of 300 rows, 89 % of 2,000. The bands are for 150 sets, at 99.9 %.
    """
    rng, sets, held = np.random.default_rng(7), 150, 0
    grid = (np.arange(200_000) + 0.5) / 200_000

    def true_probability(c: np.ndarray) -> np.ndarray:
        return 1 / (1 + ((1 - c) / c) ** (1 / 3))

    gaps = (grid - true_probability(grid)).reshape(20, -1).mean(axis=1)
    true_ece = float(np.abs(gaps).mean())
    for number in range(sets):
        c = rng.uniform(1e-4, 1 - 1e-4, rows)
        z = rng.random(rows) < true_probability(c)
        interval = bootstrap_table({"ece": ece}, [Answers(None, c, z)], resamples=150, seed=number)["ece"]
        held += interval.low <= true_ece <= interval.high
    assert low <= held / sets <= high


def test_the_null_band_holds_its_level() -> None:
    """A calibrated model falls outside the 95 % band in about 5 of 100 data sets; band for 400 sets at 99.9 %."""
    rng, sets, outside = np.random.default_rng(1), 400, 0
    c = 0.5 + 0.5 * rng.random(300)
    band = null_band(ece, c, resamples=4000, seed=2)
    for _ in range(sets):
        value = ece(c, rng.random(300) < c)
        outside += not band.low <= value <= band.high
    low, high = binom.ppf([0.0005, 0.9995], sets, 0.05)
    assert low <= outside <= high


@pytest.mark.parametrize("n", [187, 500, 2000])
def test_debiasing_lowers_the_bias_of_a_calibrated_model(n: int) -> None:
    """The true ECE is 0. Plain bias is about 0.8 of a bin's deviation, the debiased one 0.47: at most 0.75 of plain."""
    rng = np.random.default_rng(n)
    plain, debiased = [], []
    for _ in range(150):
        c = rng.random(n)
        z = rng.random(n) < c
        plain.append(ece(c, z))
        debiased.append(debiased_ece(c, z))
    assert 0.0 < np.mean(debiased) < 0.75 * np.mean(plain)


def test_debiasing_lowers_the_bias_of_an_overconfident_model() -> None:
    """c in (0.5, 1), right with probability c - 0.1: the true binned ECE is 0.1. It errs to the other side, by less."""
    rng = np.random.default_rng(5)
    draws = []
    for _ in range(400):
        c = 0.5 + 0.5 * rng.random(300)
        z = rng.random(300) < c - 0.1
        draws.append((ece(c, z), debiased_ece(c, z)))
    plain, debiased = np.mean(draws, axis=0) - 0.1
    assert abs(debiased) < 0.9 * plain
