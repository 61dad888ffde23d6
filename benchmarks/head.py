"""Time and peak memory of forward + backward through the LM head: ours, TRL's and the dense way.

    python benchmarks/head.py            # both sizes
    python benchmarks/head.py --quick    # the smaller size, few repeats

Ours returns the log-probabilities of target and rival; TRL's the target's alone (`outputs=()`: its entropy, mean
logit and top-1 flag are off), and once more with the outputs that its DPOTrainer asks for; dense is log_softmax over
the full logits with the same two numbers. Time: arms interleaved in one process, median of the ratios. Memory: one
subprocess an arm, peak resident size above inputs and parameter gradients.
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

import torch
from torch import Tensor

from catto.objectives import token_stats

SIZES = ((512, 576, 49_152), (2_048, 1_024, 151_936))
DPO_OUTPUTS = ("entropy", "mean_logits", "is_top1")
CHUNK = 32_768  # the tile that TRL 1.16's trainers use
Arm = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    stats = token_stats(hidden, weight, targets, extras=())
    return stats.target.sum() + stats.rival.exp().sum()


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...] = ()) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, outputs)[0].sum()


def trl_dpo(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return trl(hidden, weight, targets, DPO_OUTPUTS)


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    index = targets.unsqueeze(-1)
    return log_p.gather(-1, index).sum() + log_p.scatter(-1, index, -torch.inf).amax(-1).exp().sum()


ARMS: dict[str, Arm] = {"ours": ours, "trl": trl, "trl_dpo": trl_dpo, "dense": dense}


def problem(size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, vocabulary = size
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width).mul_(width**-0.5)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocabulary, (tokens,))


def step(arm: str, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    inputs[0].grad = inputs[1].grad = None
    start = time.perf_counter()
    ARMS[arm](*inputs).backward()
    return time.perf_counter() - start


def times(size: tuple[int, int, int], repeats: int) -> dict[str, list[float]]:
    inputs = problem(size)
    step("ours", inputs)
    rounds = [{arm: step(arm, inputs) for arm in ARMS} for _ in range(repeats)]
    return {arm: [one[arm] for one in rounds] for arm in ARMS}


def peak_memory(arm: str, size: tuple[int, int, int]) -> int:
    """Bytes above inputs and parameter gradients, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak", arm, *map(str, size)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(arm: str, size: tuple[int, int, int]) -> None:
    inputs = problem(size)
    step(arm, problem((8, 16, 64)))  # load what the arm imports before the baseline is taken
    held = torch.ones(size[2] * size[1]), torch.ones(size[0] * size[1])  # room that the gradients will take
    # A child begins with its parent's peak, so the peak is set back to what is resident now (Linux).
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    del held
    step(arm, inputs)
    print(resident_peak() - before)


def resident_peak() -> int:
    """Bytes: the peak resident size of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", nargs=4)
    options = parser.parse_args()
    if options.peak:
        arm, *size = options.peak
        print_peak(arm, tuple(map(int, size)))
        return
    figures: dict[str, float] = {}
    for size in SIZES[:1] if options.quick else SIZES:
        seconds = times(size, 2 if options.quick else options.repeats)
        memory = {arm: peak_memory(arm, size) for arm in ARMS}
        print(f"\n{size[0]:,} tokens x {size[1]:,} x {size[2]:,} vocabulary, fp32, {torch.get_num_threads()} threads")
        print(f"{'arm':10}{'median s':>10}{'vs trl':>9}{'vs dense':>10}{'peak MB':>10}{'vs dense':>10}")
        for arm in ARMS:
            to_trl, to_dense = ratio(seconds[arm], seconds["trl"]), ratio(seconds[arm], seconds["dense"])
            share = memory[arm] / memory["dense"]
            median = statistics.median(seconds[arm])
            print(f"{arm:10}{median:10.2f}{to_trl:9.2f}{to_dense:10.2f}{memory[arm] / 2**20:10.0f}{share:10.3f}")
        figures = {
            "time_vs_trl": round(ratio(seconds["ours"], seconds["trl"]), 3),
            "time_vs_trl_dpo": round(ratio(seconds["ours"], seconds["trl_dpo"]), 3),
            "time_vs_dense": round(ratio(seconds["ours"], seconds["dense"]), 3),
            "memory_vs_dense": round(memory["ours"] / memory["dense"], 4),
            "memory_vs_trl": round(memory["ours"] / memory["trl"], 3),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
