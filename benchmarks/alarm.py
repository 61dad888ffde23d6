"""How often the gateway's alarm is false, and how many answers it needs after the accuracy drops by 10 points.

    python benchmarks/alarm.py --streams 1000

Every stream begins with calibration answers of its own, on which the threshold is fitted. Answers above the threshold
get feedback. A false alarm is one while the answers are drawn like the calibration answers and the promised error rate
is not exceeded; thresholds that break their promise are not counted.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from catto.metrics.alarm import FALSE_ALARM_RATE, ErrorRateAlarm, bound_error_rate
from catto.metrics.risk import Threshold, threshold_for_risk
from thresholds import SIGNIFICANCE, WORLDS

Floats = NDArray[np.float64]

RISK = 0.1
SIZES = (400, 3000)
STREAM_LENGTH = 3000
DROP = 0.1
DROP_AFTER = (0, 500, 2000)
# World -> promised risk; true error rate of the calibration answers and of the first served ones.
DROPS = {"5 % wrong, at most 10 % promised": (0.1, 0.05), "2 % wrong, at most 5 % promised": (0.05, 0.02)}


def main() -> None:
    """Print one line per world and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    streams = parser.parse_args().streams
    print(f"{streams} streams of {STREAM_LENGTH} answers")
    print("| world | calibration answers | promises kept | false alarms | significantly above 1 % from |")
    print("|---|---|---|---|---|")
    for world in WORLDS:
        for rows in SIZES:
            promises, alarms = count_false_alarms(world, rows, streams)
            limit = int(binom.ppf(1 - SIGNIFICANCE, promises, FALSE_ALARM_RATE)) + 1
            print(f"| {world} | {rows:,} | {promises:,} | {alarms} | {limit} |", flush=True)
    print()
    print("| world | calibration answers | drop after | median delay | 90 % quantile |")
    print("|---|---|---|---|---|")
    for world in DROPS:
        for rows in SIZES:
            for drop_after in DROP_AFTER:
                delays = measure_delays(world, rows, drop_after, streams)
                cells = f"{drop_after:,} | {np.median(delays):.0f} | {np.quantile(delays, 0.9):.0f}"
                print(f"| {world} | {rows:,} | {cells} |", flush=True)


def count_false_alarms(world: str, rows: int, streams: int) -> tuple[int, int]:
    """Draw streams whose promise holds, at most `streams` of 20 times as many; return their number and their alarms."""
    draw_confidence, chance = WORLDS[world]
    rng = np.random.default_rng(1)
    falling = np.sort(draw_confidence(rng.random(200_000)))[::-1]
    error_rate = np.cumsum(1 - chance(falling)) / np.arange(1, len(falling) + 1)

    def draw_answers(count: int) -> tuple[Floats, NDArray[np.bool_]]:
        confidence = draw_confidence(rng.random(count))
        return confidence, rng.random(count) < chance(confidence)

    promises = 0
    alarms = 0
    for _ in range(20 * streams):
        if promises == streams:
            break
        found = threshold_for_risk(*draw_answers(rows), RISK)
        if found.threshold is None:
            continue
        answered = int(np.searchsorted(-falling, -found.threshold, side="right"))
        if answered == 0 or error_rate[answered - 1] > RISK:
            continue
        promises += 1
        confidence, correct = draw_answers(STREAM_LENGTH)
        is_wrong = ~correct[confidence >= found.threshold]
        alarms += find_alarm(is_wrong, found) is not None
    return promises, alarms


def measure_delays(world: str, rows: int, drop_after: int, streams: int) -> Floats:
    """Return after how many answers that follow the drop the alarm is raised, of every stream; infinity for never."""
    risk, error_rate = DROPS[world]
    rng = np.random.default_rng(2)
    delays = []
    while len(delays) < streams:
        found = threshold_for_risk(rng.random(rows), rng.random(rows) >= error_rate, risk)
        if found.threshold is None:
            continue
        rates = np.full(drop_after + STREAM_LENGTH, error_rate)
        rates[drop_after:] += DROP
        raised_at = find_alarm(rng.random(len(rates)) < rates, found)
        delay = np.inf if raised_at is None else raised_at - drop_after
        delays.append(max(delay, 0.0))
    return np.array(delays)


def find_alarm(is_wrong: NDArray[np.bool_], found: Threshold) -> int | None:
    """Return after how many answers the alarm is raised; None for never."""
    allowed_rate = bound_error_rate(found.errors, found.answered, found.risk)
    alarm = ErrorRateAlarm()
    for wrong in is_wrong.tolist():
        alarm.add_answer(is_wrong=wrong, allowed_rate=allowed_rate)
        if alarm.is_raised:
            return alarm.answers
    return None


if __name__ == "__main__":
    main()
