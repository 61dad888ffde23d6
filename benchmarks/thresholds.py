"""How often `catto calibrate threshold` finds a threshold, how much it answers and how often its promise fails.

    python benchmarks/thresholds.py --draws 1000
    python benchmarks/thresholds.py --draws 200 --mapie      # pip install mapie

Every world has a known error rate above each threshold, so a failed promise can be counted. The method of catto is
compared with the one before it: 76 thresholds fixed in advance, each with 1/76 of delta.
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

RISK = 0.1
DELTA = 0.05
SIZES = (400, 3000)
# A rate of broken promises with a smaller probability, given delta, would be significantly above delta.
SIGNIFICANCE = 0.01

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


class Outcome(NamedTuple):
    """What a method did on many samples of one world; coverage counts as 0 without a threshold."""

    found: float
    coverage: float
    broken: float


def find_with_union_bound(confidence: Floats, correct: Bools) -> float | None:
    """Return the lowest of 76 fixed thresholds that passes the exact binomial test at delta / 76."""
    thresholds = np.array(STOPS)
    wrong = np.sort(confidence[~correct])
    answered = len(confidence) - np.searchsorted(np.sort(confidence), thresholds)
    errors = len(wrong) - np.searchsorted(wrong, thresholds)
    chance_of_so_few = bdtr(errors, np.maximum(answered, 1), RISK)
    passed = thresholds[(answered > 0) & (chance_of_so_few <= DELTA / len(thresholds))]
    return float(passed[0]) if len(passed) else None


def find_in_sequence(confidence: Floats, correct: Bools) -> float | None:
    """Return catto's threshold."""
    return threshold_for_risk(confidence, correct, RISK, DELTA).threshold


METHODS: dict[str, Method] = {"before": find_with_union_bound, "now": find_in_sequence}


def make_mapie_method(starts: int | None) -> Method:
    """Return MAPIE's risk control: Bonferroni-Holm, its default, or fixed sequences with this many starts."""
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
    """Print one line per world and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
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
    for number in Outcome._fields:
        titles += [f"{number} {name}" for name in methods]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for world in WORLDS:
        for rows in SIZES:
            outcomes = [simulate(world, rows, draws, method) for method in methods.values()]
            cells = [world, f"{rows:,}"]
            for shares in zip(*outcomes, strict=True):
                cells += [f"{100 * share:.1f}" for share in shares]
            print(f"| {' | '.join(cells)} |", flush=True)


def simulate(world: str, rows: int, draws: int, method: Method) -> Outcome:
    """Fit thresholds on many samples of one world, the same samples for every method."""
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
        threshold = method(confidence, correct)
        if threshold is None:
            continue
        answered = int(np.searchsorted(-falling, -threshold, side="right"))
        found += 1
        coverage += answered / len(falling)
        broken += bool(answered and errors[answered - 1] / answered > RISK)
    return Outcome(found / draws, coverage / draws, broken / draws)


if __name__ == "__main__":
    main()
