"""Time our metrics against torchmetrics and netcal: `python benchmarks/metrics.py [--quick]`.

The libraries run in turn, so that a slow phase of the machine affects all of them. Ratios are medians over the rounds;
the printed times are minima. Every time includes the library's input checks. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catto.metrics.errors import brier, ece
from catto.metrics.ranking import aurc
from catto.metrics.statistics import bootstrap

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from netcal.metrics import ECE
    from torchmetrics.functional.classification import binary_calibration_error

BINS = 20
# Timed ECE of another library -> the library's name in the results.
OTHER_LIBRARIES = {
    "torchmetrics ece": "torchmetrics",
    "torchmetrics ece unchecked": "torchmetrics_unchecked",
    "netcal ece": "netcal",
}


@dataclass(frozen=True)
class Plan:
    """How much to time.

    Attributes:
        rounds: Number of rows -> number of rounds, in order of increasing size.
        bootstrap_rows: Numbers of rows for the bootstrap.
        resamples: Number of bootstrap resamples.
    """

    rounds: Mapping[int, int]
    bootstrap_rows: Sequence[int]
    resamples: int


FULL = Plan(rounds={10_000: 200, 1_000_000: 15, 10_000_000: 5}, bootstrap_rows=(10_000, 1_000_000), resamples=1000)
QUICK = Plan(rounds={10_000: 30, 100_000: 5}, bootstrap_rows=(10_000,), resamples=100)


class Answers(NamedTuple):
    """Confidence and correctness of N answers."""

    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]


def draw_answers(rows: int) -> Answers:
    rng = np.random.default_rng(0)
    confidence = rng.random(rows)
    correct = rng.random(rows) < confidence
    return Answers(confidence, correct)


def list_timed_functions(rows: int) -> dict[str, Callable[[], object]]:
    """Return name -> function to time. The tensors share memory and dtype (float64) with the arrays."""
    confidence, correct = draw_answers(rows)
    confidence_tensor = torch.from_numpy(confidence)
    correct_tensor = torch.from_numpy(correct).long()
    correct_int = correct.astype(np.int64)

    def measure_torchmetrics(validate_args: bool) -> object:
        return binary_calibration_error(confidence_tensor, correct_tensor, n_bins=BINS, validate_args=validate_args)

    return {
        "ece": lambda: ece(confidence, correct),
        "torchmetrics ece": lambda: measure_torchmetrics(validate_args=True),
        "torchmetrics ece unchecked": lambda: measure_torchmetrics(validate_args=False),
        "netcal ece": lambda: ECE(BINS).measure(confidence, correct_int),
        "brier": lambda: brier(confidence, correct),
        "aurc": lambda: aurc(confidence, correct),
    }


def time_interleaved(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time every function once per round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def compare_ece_times(times: Mapping[str, Sequence[float]], other: str) -> float:
    """Return the median over the rounds of our ECE time divided by theirs; below 1, ours is faster."""
    return statistics.median(ours / theirs for ours, theirs in zip(times["ece"], times[other], strict=True))


class BootstrapTime(NamedTuple):
    """Elapsed seconds and processor seconds; they differ if the machine is shared."""

    elapsed: float
    processor: float


def time_bootstrap(rows: int, resamples: int) -> BootstrapTime:
    confidence, correct = draw_answers(rows)
    start = time.perf_counter()
    processor_start = time.process_time()
    bootstrap(ece, confidence, correct, resamples=resamples)
    return BootstrapTime(time.perf_counter() - start, time.process_time() - processor_start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes only, to check that it runs")
    plan = QUICK if parser.parse_args().quick else FULL
    results: dict[str, object] = {}
    best_seconds: dict[int, dict[str, float]] = {}
    for rows, rounds in plan.rounds.items():
        times = time_interleaved(list_timed_functions(rows), rounds)
        best_seconds[rows] = {name: min(seconds) for name, seconds in times.items()}
        texts = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in best_seconds[rows].items()]
        print(f"{rows:>12,} rows: " + ", ".join(texts))
        ratios = {}
        for other, library in OTHER_LIBRARIES.items():
            ratios[f"vs_{library}_{rows}"] = round(compare_ece_times(times, other), 4)
        print(f"{'':>12} our ECE / theirs: " + ", ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
        results |= ratios
    *_, second_largest, largest = plan.rounds
    growth = {}
    for name in ("ece", "brier", "aurc"):
        growth[name] = round(best_seconds[largest][name] / best_seconds[second_largest][name], 2)
    growth_text = ", ".join(f"{name} x{factor}" for name, factor in growth.items())
    print(f"growth {second_largest:,} -> {largest:,} rows: {growth_text}")
    for rows in plan.bootstrap_rows:
        elapsed, processor = time_bootstrap(rows, plan.resamples)
        title = f"bootstrap of ECE, {plan.resamples:,} resamples of {rows:,} rows"
        print(f"{title}: {elapsed:.2f} s, processor {processor:.2f} s")
        results[f"bootstrap_seconds_{rows}"] = round(elapsed, 3)
        results[f"bootstrap_cpu_seconds_{rows}"] = round(processor, 3)
    # The second largest size is the one whose ratios are reported.
    results["vs_torchmetrics"] = results[f"vs_torchmetrics_{second_largest}"]
    results["vs_netcal"] = results[f"vs_netcal_{second_largest}"]
    print(json.dumps(results | {"growth": growth, "rows": second_largest}))


if __name__ == "__main__":
    main()
