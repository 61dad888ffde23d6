"""Time the metrics beside torchmetrics and netcal: `python benchmarks/metrics.py [--quick]`.

Repeats of all libraries are interleaved, so that a slow spell of the machine meets each of them, and the ratio is the
median over the rounds; the times shown are minima. Input checks are part of every time. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np

from catto.metrics.errors import brier, ece
from catto.metrics.ranking import aurc
from catto.metrics.statistics import bootstrap

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from netcal.metrics import ECE
    from torchmetrics.functional.classification import binary_calibration_error

Work = dict[str, Callable[[], object]]


def works(rows: int) -> Work:
    """Return what is timed at this size; the tensors share the arrays' memory and dtype (float64)."""
    rng = np.random.default_rng(0)
    c = rng.random(rows)
    z = rng.random(rows) < c
    c_torch, z_torch, z_int = torch.from_numpy(c), torch.from_numpy(z).long(), z.astype(np.int64)
    return {
        "ece": lambda: ece(c, z),
        "torchmetrics ece": lambda: binary_calibration_error(c_torch, z_torch, n_bins=20),
        "torchmetrics ece unchecked": lambda: binary_calibration_error(
            c_torch, z_torch, n_bins=20, validate_args=False
        ),
        "netcal ece": lambda: ECE(20).measure(c, z_int),
        "brier": lambda: brier(c, z),
        "aurc": lambda: aurc(c, z),
    }


def interleaved(work: Work, rounds: int) -> dict[str, list[float]]:
    """Time every function once a round, after one round that is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def ratio(times: dict[str, list[float]], other: str) -> float:
    """Return our ECE time over theirs, the median over rounds; below 1 is ours ahead."""
    return statistics.median(a / b for a, b in zip(times["ece"], times[other], strict=True))


def bootstrap_seconds(rows: int, resamples: int) -> tuple[float, float]:
    """Return elapsed and processor seconds; they differ where others use the machine."""
    rng = np.random.default_rng(0)
    c = rng.random(rows)
    z = rng.random(rows) < c
    start, start_cpu = time.perf_counter(), time.process_time()
    bootstrap(ece, c, z, resamples=resamples)
    return time.perf_counter() - start, time.process_time() - start_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only, to see that it runs")
    quick = parser.parse_args().quick
    sizes = {10_000: 30, 100_000: 5} if quick else {10_000: 200, 1_000_000: 15, 10_000_000: 5}
    figures: dict[str, object] = {}
    least: dict[int, dict[str, float]] = {}
    for rows, rounds in sizes.items():
        times = interleaved(works(rows), rounds)
        least[rows] = {name: min(seconds) for name, seconds in times.items()}
        print(f"{rows:>12,} rows: " + ", ".join(f"{name} {1e3 * t:.3g} ms" for name, t in least[rows].items()))
        for other in ("torchmetrics ece", "torchmetrics ece unchecked", "netcal ece"):
            figures[f"vs_{other.replace(' ece', '').replace(' ', '_')}_{rows}"] = round(ratio(times, other), 4)
        print(f"{'':>12} our ECE / theirs: " + ", ".join(f"{k} {v}" for k, v in list(figures.items())[-3:]))
    last, before = sorted(least)[-1], sorted(least)[-2]
    growth = {name: round(least[last][name] / least[before][name], 2) for name in ("ece", "brier", "aurc")}
    print(f"growth {before:,} -> {last:,} rows: " + ", ".join(f"{k} x{v}" for k, v in growth.items()))
    for rows in (10_000,) if quick else (10_000, 1_000_000):
        resamples = 100 if quick else 1000
        seconds, cpu = bootstrap_seconds(rows, resamples)
        print(f"bootstrap of ECE, {resamples:,} resamples of {rows:,} rows: {seconds:.2f} s, processor {cpu:.2f} s")
        figures |= {f"bootstrap_seconds_{rows}": round(seconds, 3), f"bootstrap_cpu_seconds_{rows}": round(cpu, 3)}
    anchor = before
    figures |= {"vs_torchmetrics": figures[f"vs_torchmetrics_{anchor}"], "vs_netcal": figures[f"vs_netcal_{anchor}"]}
    print(json.dumps(figures | {"growth": growth, "rows": anchor}))


if __name__ == "__main__":
    main()
