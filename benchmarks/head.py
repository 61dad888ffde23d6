"""Time and peak memory of a forward and backward pass through the LM head: ours, TRL's and a dense one.

    python benchmarks/head.py            # both sizes
    python benchmarks/head.py --quick    # the smaller size, few repeats

- ours: the log-probabilities of target and rival.
- trl: the log-probability of the target only (`outputs=()`: no entropy, mean logit or top-1 flag).
- trl_dpo: the same with the outputs that TRL's DPOTrainer requests.
- dense: log_softmax over the full logits, for the same two numbers as ours.

For the time, the arms run in turn in one process; ratios are medians over the repeats. For the memory, each arm has
its own process; the result is the peak resident size above the inputs and the parameter gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from catto.objectives import token_stats


class Size(NamedTuple):
    """The shape of a problem."""

    tokens: int
    width: int
    vocabulary: int


class HeadInputs(NamedTuple):
    """The inputs of a head: hidden states (N, D) and weight (V, D) with gradients, and target token ids (N,)."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


SIZES = (Size(512, 576, 49_152), Size(2_048, 1_024, 151_936))
# The outputs that TRL's DPOTrainer requests from its head.
DPO_OUTPUTS = ("entropy", "mean_logits", "is_top1")
# The tile size that TRL 1.16's trainers use.
CHUNK = 32_768


def compute_ours(inputs: HeadInputs) -> Tensor:
    """Return a scalar that depends on the log-probabilities of target and rival."""
    stats = token_stats(inputs.hidden, inputs.weight, inputs.targets, extras=())
    return stats.target.sum() + stats.rival.exp().sum()


def compute_trl(inputs: HeadInputs, outputs: tuple[str, ...] = ()) -> Tensor:
    """Return a scalar that depends on the log-probability of the target."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    options = (1.0, CHUNK, None, 1.0, outputs)
    return ChunkedLogProbFunction.apply(inputs.hidden, inputs.weight, None, inputs.targets, *options)[0].sum()


def compute_trl_dpo(inputs: HeadInputs) -> Tensor:
    """Return the same as `compute_trl`, computing the outputs for DPO as well."""
    return compute_trl(inputs, DPO_OUTPUTS)


def compute_dense(inputs: HeadInputs) -> Tensor:
    """Return the same as `compute_ours` from the full logits."""
    logprobs = torch.log_softmax(inputs.hidden @ inputs.weight.T, -1)
    index = inputs.targets.unsqueeze(-1)
    target_sum = logprobs.gather(-1, index).sum()
    return target_sum + logprobs.scatter(-1, index, -torch.inf).amax(-1).exp().sum()


ARMS: dict[str, Callable[[HeadInputs], Tensor]] = {
    "ours": compute_ours,
    "trl": compute_trl,
    "trl_dpo": compute_trl_dpo,
    "dense": compute_dense,
}


def make_inputs(size: Size) -> HeadInputs:
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.width)
    weight = torch.randn(size.vocabulary, size.width).mul_(size.width**-0.5)
    targets = torch.randint(size.vocabulary, (size.tokens,))
    return HeadInputs(hidden.requires_grad_(), weight.requires_grad_(), targets)


def time_step(arm: str, inputs: HeadInputs) -> float:
    """Return the seconds of one forward and backward pass."""
    inputs.hidden.grad = None
    inputs.weight.grad = None
    start = time.perf_counter()
    ARMS[arm](inputs).backward()
    return time.perf_counter() - start


def time_interleaved(size: Size, repeats: int) -> dict[str, list[float]]:
    """Time every arm once per repeat, after a warm-up."""
    inputs = make_inputs(size)
    time_step("ours", inputs)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            times[arm].append(time_step(arm, inputs))
    return times


def measure_peak_in_subprocess(arm: str, size: Size) -> int:
    """Return the peak memory of one step in bytes, above the inputs and the parameter gradients."""
    command = [sys.executable, __file__, "--peak", arm, *map(str, size)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(arm: str, size: Size) -> None:
    """Print the peak memory of one step in this process; see `measure_peak_in_subprocess`."""
    inputs = make_inputs(size)
    # A small step first, so that the arm's imports are part of the baseline.
    time_step(arm, make_inputs(Size(8, 16, 64)))
    # Memory of the size of the gradients, so that they are part of the baseline too.
    gradient_room = (torch.ones(size.vocabulary * size.width), torch.ones(size.tokens * size.width))
    # A child process inherits the peak of its parent, so the peak is reset to what is resident now (Linux).
    Path("/proc/self/clear_refs").write_text("5")
    before = read_resident_peak()
    del gradient_room
    time_step(arm, inputs)
    print(read_resident_peak() - before)


def read_resident_peak() -> int:
    """Return the peak resident size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_line = next(line for line in lines if line.startswith("VmHWM"))
    kilobytes = int(peak_line.split()[1])
    return kilobytes * 1024


def median_ratio(seconds: list[float], reference: list[float]) -> float:
    """Return the median over the repeats of one arm's time divided by the time of a reference arm."""
    return statistics.median(mine / other for mine, other in zip(seconds, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller size with two repeats")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        arm, *size = options.peak
        print_peak(arm, Size(*map(int, size)))
        return
    sizes = SIZES[:1] if options.quick else SIZES
    repeats = 2 if options.quick else options.repeats
    results: dict[str, float] = {}
    for size in sizes:
        results = compare_arms(size, repeats)
    # The last size is the one whose ratios are reported.
    print(json.dumps(results))


def compare_arms(size: Size, repeats: int) -> dict[str, float]:
    """Print a table of all arms, and return the ratios of ours to the others."""
    times = time_interleaved(size, repeats)
    peaks = {arm: measure_peak_in_subprocess(arm, size) for arm in ARMS}
    threads = torch.get_num_threads()
    print(f"\n{size.tokens:,} tokens x {size.width:,} x {size.vocabulary:,} vocabulary, fp32, {threads} threads")
    print(f"{'arm':10}{'median s':>10}{'vs trl':>9}{'vs dense':>10}{'peak MB':>10}{'vs dense':>10}")
    for arm in ARMS:
        time_columns = f"{statistics.median(times[arm]):10.2f}{median_ratio(times[arm], times['trl']):9.2f}"
        time_columns += f"{median_ratio(times[arm], times['dense']):10.2f}"
        memory_columns = f"{peaks[arm] / 2**20:10.0f}{peaks[arm] / peaks['dense']:10.3f}"
        print(f"{arm:10}{time_columns}{memory_columns}")
    return {
        "time_vs_trl": round(median_ratio(times["ours"], times["trl"]), 3),
        "time_vs_trl_dpo": round(median_ratio(times["ours"], times["trl_dpo"]), 3),
        "time_vs_dense": round(median_ratio(times["ours"], times["dense"]), 3),
        "memory_vs_dense": round(peaks["ours"] / peaks["dense"], 4),
        "memory_vs_trl": round(peaks["ours"] / peaks["trl"], 3),
    }


if __name__ == "__main__":
    main()
