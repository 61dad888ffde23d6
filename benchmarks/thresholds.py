"""How often `catto calibrate threshold` finds a threshold, how much it answers and how often its promise fails.

    python benchmarks/thresholds.py --draws 1000

Every world has a known error rate above each threshold, so a failed promise can be counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from catto.metrics.risk import threshold_for_risk

Floats = NDArray[np.float64]

RISK = 0.1
DELTA = 0.05
SIZES = (400, 3000)

# World -> (confidence of a uniform number, probability of being right at a confidence).
WORLDS: dict[str, tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]] = {
    "7 % wrong at every confidence": (lambda u: 0.8 + 0.2 * u, lambda c: np.full_like(c, 0.93)),
    "calibrated, 30 % wrong": (lambda u: 0.4 + 0.6 * u, lambda c: c),
    "sharp: sure answers are right": (lambda u: 0.3 + 0.7 * u, lambda c: 1 / (1 + np.exp(-12 * (c - 0.45)))),
    "four confidences": (lambda u: np.array([0.5, 0.9, 0.99, 1.0])[(4 * u).astype(int)], lambda c: 0.35 + 0.57 * c),
    "10.05 % wrong, half of it good": (lambda u: u, lambda c: np.where(c > 0.5, 0.97, 0.829)),
    "10.3 % wrong at every confidence": (lambda u: u, lambda c: np.full_like(c, 0.897)),
    "sure answers are wrong more often": (lambda u: 0.5 + 0.5 * u, lambda c: 0.93 - 0.1 * (c - 0.5)),
}


def main() -> None:
    """Print one line per world and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    draws = parser.parse_args().draws
    print(f"target risk {RISK}, delta {DELTA}, {draws} draws")
    print(f"{'world':36s} {'rows':>5s} {'found':>6s} {'coverage':>9s} {'broken':>7s}")
    for world in WORLDS:
        for rows in SIZES:
            found, coverage, broken = simulate(world, rows, draws)
            print(f"{world:36s} {rows:5d} {found:6.1%} {coverage:9.1%} {broken:7.1%}", flush=True)


def simulate(world: str, rows: int, draws: int) -> tuple[float, float, float]:
    """Fit thresholds on many samples of one world.

    Returns:
        The share of samples with a threshold, the mean coverage (0 without a threshold), and the share of samples whose
        threshold has a true error rate above RISK.
    """
    draw_confidence, chance = WORLDS[world]
    rng = np.random.default_rng(0)
    falling = np.sort(draw_confidence(rng.random(1_000_000)))[::-1]
    errors = np.cumsum(1 - chance(falling))
    found = 0
    coverage = 0.0
    broken = 0
    for _ in range(draws):
        confidence = draw_confidence(rng.random(rows))
        correct = rng.random(rows) < chance(confidence)
        threshold = threshold_for_risk(confidence, correct, RISK, DELTA).threshold
        if threshold is None:
            continue
        answered = int(np.searchsorted(-falling, -threshold, side="right"))
        found += 1
        coverage += answered / len(falling)
        broken += bool(answered and errors[answered - 1] / answered > RISK)
    return found / draws, coverage / draws, broken / draws


if __name__ == "__main__":
    main()
