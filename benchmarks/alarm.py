"""Measure the false alarms of the gateway, and its delay after the accuracy drops by 10 points.

    python benchmarks/alarm.py --streams 1000

Every stream starts with its own calibration answers, on which the threshold is fitted. All answers above the threshold
get feedback. An alarm is false if the answers have the same distribution as the calibration answers and the true error
rate is at most the promised one. Streams whose threshold breaks the promise are not counted.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from catto.metrics.alarm import FALSE_ALARM_RATE, ErrorRateAlarm, bound_error_rate
from catto.metrics.risk import Threshold, threshold_for_risk
from thresholds import SIGNIFICANCE, WORLDS

Floats = NDArray[np.float64]

# The promised error rate in the test for false alarms.
RISK = 0.1
# Numbers of calibration answers.
SIZES = (400, 3000)
STREAM_LENGTH = 3000
# Streams are drawn until enough of them keep their promise, but at most this many times as many.
MAX_DRAWS_PER_STREAM = 20
# Drop of the accuracy, and the numbers of served answers after which it happens.
DROP = 0.1
DROP_AFTER = (0, 500, 2000)


class DropWorld(NamedTuple):
    """A world whose accuracy drops.

    Attributes:
        risk: The promised error rate.
        error_rate: The true error rate before the drop, also that of the calibration answers.
    """

    risk: float
    error_rate: float


DROP_WORLDS = {
    "5 % wrong, at most 10 % promised": DropWorld(risk=0.1, error_rate=0.05),
    "2 % wrong, at most 5 % promised": DropWorld(risk=0.05, error_rate=0.02),
}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="number of streams per table row")
    streams = parser.parse_args().streams
    print(f"{streams} streams of {STREAM_LENGTH} answers")
    print_false_alarms(streams)
    print()
    print_delays(streams)


def print_false_alarms(streams: int) -> None:
    """Print the number of false alarms in one row per world and size."""
    print("| world | calibration answers | promises kept | false alarms | significantly above 1 % from |")
    print("|---|---|---|---|---|")
    for world in WORLDS:
        for rows in SIZES:
            promises, alarms = count_false_alarms(world, rows, streams)
            limit = int(binom.ppf(1 - SIGNIFICANCE, promises, FALSE_ALARM_RATE)) + 1
            print(f"| {world} | {rows:,} | {promises:,} | {alarms} | {limit} |", flush=True)


def print_delays(streams: int) -> None:
    """Print the delay of the alarm in one row per world, size and time of the drop."""
    print("| world | calibration answers | drop after | median delay | 90 % quantile |")
    print("|---|---|---|---|---|")
    for world in DROP_WORLDS:
        for rows in SIZES:
            for drop_after in DROP_AFTER:
                delays = measure_delays(world, rows, drop_after, streams)
                cells = f"{drop_after:,} | {np.median(delays):.0f} | {np.quantile(delays, 0.9):.0f}"
                print(f"| {world} | {rows:,} | {cells} |", flush=True)


def count_false_alarms(world: str, rows: int, streams: int) -> tuple[int, int]:
    """Count the false alarms in streams that keep their promise.

    Args:
        world: Name of a world of `benchmarks/thresholds.py`.
        rows: Number of calibration answers.
        streams: Maximum number of streams that are counted.

    Returns:
        The number of streams that keep their promise, and the number of alarms in them.
    """
    draw_confidence, chance_of_right = WORLDS[world]
    rng = np.random.default_rng(1)
    # The true error rate above a threshold is computed from a large population of confidences in descending order.
    population = np.sort(draw_confidence(rng.random(200_000)))[::-1]
    error_rate = np.cumsum(1 - chance_of_right(population)) / np.arange(1, len(population) + 1)

    def draw_answers(count: int) -> tuple[Floats, NDArray[np.bool_]]:
        confidence = draw_confidence(rng.random(count))
        correct = rng.random(count) < chance_of_right(confidence)
        return confidence, correct

    promises = 0
    alarms = 0
    for _ in range(MAX_DRAWS_PER_STREAM * streams):
        if promises == streams:
            break
        calibration_confidence, calibration_correct = draw_answers(rows)
        found = threshold_for_risk(calibration_confidence, calibration_correct, RISK)
        if found.threshold is None:
            continue
        answered = int(np.searchsorted(-population, -found.threshold, side="right"))
        keeps_promise = answered > 0 and error_rate[answered - 1] <= RISK
        if not keeps_promise:
            continue
        promises += 1
        confidence, correct = draw_answers(STREAM_LENGTH)
        is_wrong = ~correct[confidence >= found.threshold]
        if find_alarm(is_wrong, found) is not None:
            alarms += 1
    return promises, alarms


def measure_delays(world: str, rows: int, drop_after: int, streams: int) -> Floats:
    """Measure how many answers follow the drop until the alarm is raised.

    Args:
        world: A name of DROP_WORLDS.
        rows: Number of calibration answers.
        drop_after: Number of served answers before the drop.
        streams: Number of streams.

    Returns:
        The delay of every stream, (streams,). It is 0 if the alarm comes before the drop, and infinite if it never
        comes.
    """
    risk, error_rate = DROP_WORLDS[world]
    rng = np.random.default_rng(2)
    delays = []
    while len(delays) < streams:
        confidence = rng.random(rows)
        correct = rng.random(rows) >= error_rate
        found = threshold_for_risk(confidence, correct, risk)
        if found.threshold is None:
            continue
        served_error_rates = np.full(drop_after + STREAM_LENGTH, error_rate)
        served_error_rates[drop_after:] += DROP
        is_wrong = rng.random(len(served_error_rates)) < served_error_rates
        raised_at = find_alarm(is_wrong, found)
        delay = np.inf if raised_at is None else raised_at - drop_after
        delays.append(max(delay, 0.0))
    return np.array(delays)


def find_alarm(is_wrong: NDArray[np.bool_], found: Threshold) -> int | None:
    """Return the number of answers after which the alarm is raised; None if it never is.

    Args:
        is_wrong: Whether each served answer is wrong, in order, (N,).
        found: The threshold with its calibration counts.
    """
    allowed_rate = bound_error_rate(found.errors, found.answered, found.risk)
    alarm = ErrorRateAlarm()
    for wrong in is_wrong.tolist():
        alarm.add_answer(is_wrong=wrong, allowed_rate=allowed_rate)
        if alarm.is_raised:
            return alarm.answers
    return None


if __name__ == "__main__":
    main()
