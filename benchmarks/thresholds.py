"""Measure how often `catto calibrate threshold` finds a threshold, its coverage, and how often its promise is broken.

    python benchmarks/thresholds.py --draws 1000
    python benchmarks/thresholds.py --draws 200 --mapie      # pip install mapie

In every world the error rate above each threshold is known, so broken promises can be counted. The method of catto is
compared with its predecessor: 76 thresholds fixed in advance, each tested at 1/76 of delta.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr
from scipy.stats import binom

from catto.metrics.risk import threshold_for_risk
from catto.metrics.selection import STOPS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Method = Callable[[Floats, Bools], float | None]

# The promised error rate, and the accepted probability of breaking the promise.
RISK = 0.1
DELTA = 0.05
# Numbers of calibration answers.
SIZES = (400, 3000)
# Significance level at which a rate of broken promises counts as above delta.
SIGNIFICANCE = 0.01


class World(NamedTuple):
    """A distribution of answers.

    Attributes:
        draw_confidence: Turns uniform random numbers into confidences, (N,) -> (N,).
        chance_of_right: Probability of a right answer at each confidence, (N,) -> (N,).
    """

    draw_confidence: Callable[[Floats], Floats]
    chance_of_right: Callable[[Floats], Floats]


# `u` is uniform in [0, 1), and `c` is the confidence.
WORLDS: dict[str, World] = {
    "7 % wrong at every confidence": World(lambda u: 0.8 + 0.2 * u, lambda c: np.full_like(c, 0.93)),
    "calibrated, 30 % wrong": World(lambda u: 0.4 + 0.6 * u, lambda c: c),
    "sharp: sure answers are right": World(lambda u: 0.3 + 0.7 * u, lambda c: 1 / (1 + np.exp(-12 * (c - 0.45)))),
    "four confidences": World(
        lambda u: np.array([0.5, 0.9, 0.99, 1.0])[(4 * u).astype(int)], lambda c: 0.35 + 0.57 * c
    ),
    "10.05 % wrong, half of it good": World(lambda u: u, lambda c: np.where(c > 0.5, 0.97, 0.829)),
    "10.3 % wrong at every confidence": World(lambda u: u, lambda c: np.full_like(c, 0.897)),
    "sure answers are wrong more often": World(lambda u: 0.5 + 0.5 * u, lambda c: 0.93 - 0.1 * (c - 0.5)),
}


class Outcome(NamedTuple):
    """The results of a method on many samples of one world.

    Attributes:
        found: Share of the samples with a threshold.
        coverage: Mean share of answers above the threshold; 0 for samples without one.
        broken: Share of the samples whose threshold has a true error rate above the promised one.
    """

    found: float
    coverage: float
    broken: float


def find_with_union_bound(confidence: Floats, correct: Bools) -> float | None:
    """Return the lowest of 76 fixed thresholds that passes the exact binomial test at delta / 76."""
    thresholds = np.array(STOPS)
    sorted_confidence = np.sort(confidence)
    sorted_wrong = np.sort(confidence[~correct])
    answered = len(sorted_confidence) - np.searchsorted(sorted_confidence, thresholds)
    errors = len(sorted_wrong) - np.searchsorted(sorted_wrong, thresholds)
    p_value = bdtr(errors, np.maximum(answered, 1), RISK)
    passes = (answered > 0) & (p_value <= DELTA / len(thresholds))
    passed = thresholds[passes]
    return float(passed[0]) if len(passed) else None


def find_in_sequence(confidence: Floats, correct: Bools) -> float | None:
    """Return the threshold that catto finds."""
    return threshold_for_risk(confidence, correct, RISK, DELTA).threshold


METHODS: dict[str, Method] = {"before": find_with_union_bound, "now": find_in_sequence}


def make_mapie_method(starts: int | None) -> Method:
    """Return MAPIE's risk control as a method.

    Args:
        starts: Number of starts of the fixed sequences; None uses Bonferroni-Holm, MAPIE's default.
    """
    from mapie.risk_control import BinaryClassificationController, FWERFixedSequenceTesting, precision

    correction = "bonferroni_holm" if starts is None else FWERFixedSequenceTesting(n_starts=starts)

    def find_with_mapie(confidence: Floats, correct: Bools) -> float | None:
        controller = BinaryClassificationController(
            lambda rows: np.column_stack([1 - rows[:, 0], rows[:, 0]]),
            precision,
            target_level=1 - RISK,
            confidence_level=1 - DELTA,
            fwer_method=correction,
        )
        controller.calibrate(confidence[:, None], correct.astype(int))
        valid = controller.valid_predict_params
        return float(np.min(valid)) if len(valid) else None

    return find_with_mapie


def main() -> None:
    """Print one table row per world and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="number of samples per world and size")
    parser.add_argument("--mapie", action="store_true", help="compare with MAPIE's risk control instead")
    arguments = parser.parse_args()
    draws = arguments.draws
    methods = METHODS
    if arguments.mapie:
        warnings.filterwarnings("ignore")
        methods = {"holm": make_mapie_method(None), "4 starts": make_mapie_method(4), "catto": find_in_sequence}
    largest = binom.ppf(1 - SIGNIFICANCE, draws, DELTA) / draws
    print(f"target risk {RISK}, delta {DELTA}, {draws} draws; broken above {largest:.1%} is significantly above delta")
    titles = ["world", "rows"]
    for quantity in Outcome._fields:
        titles += [f"{quantity} {name}" for name in methods]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for world in WORLDS:
        for rows in SIZES:
            outcomes = [simulate(world, rows, draws, method) for method in methods.values()]
            cells = [world, f"{rows:,}"]
            for shares_of_methods in zip(*outcomes, strict=True):
                cells += [f"{100 * share:.1f}" for share in shares_of_methods]
            print(f"| {' | '.join(cells)} |", flush=True)


def simulate(world: str, rows: int, draws: int, method: Method) -> Outcome:
    """Apply a method to many samples of one world. Every method gets the same samples.

    Args:
        world: Name of the world.
        rows: Number of answers in a sample.
        draws: Number of samples.
        method: The method.
    """
    draw_confidence, chance_of_right = WORLDS[world]
    rng = np.random.default_rng(0)
    # The true error rate above a threshold is computed from a large population of confidences in descending order.
    population = np.sort(draw_confidence(rng.random(1_000_000)))[::-1]
    expected_errors = np.cumsum(1 - chance_of_right(population))
    found = 0
    coverage = 0.0
    broken = 0
    for _ in range(draws):
        confidence = draw_confidence(rng.random(rows))
        correct = rng.random(rows) < chance_of_right(confidence)
        threshold = method(confidence, correct)
        if threshold is None:
            continue
        found += 1
        answered = int(np.searchsorted(-population, -threshold, side="right"))
        coverage += answered / len(population)
        if answered and expected_errors[answered - 1] / answered > RISK:
            broken += 1
    return Outcome(found / draws, coverage / draws, broken / draws)


if __name__ == "__main__":
    main()
