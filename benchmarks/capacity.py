"""Memory of a training step and a simulated schedule of a recipe's stages, before GPUs are rented.

Memory follows from the shape of the model by the tensors that a step holds on a GPU: fp32 or bf16 weights, bf16
products, gradient checkpointing, AdamW's fused kernel, the reference precomputed. `benchmarks/memory.py` compares it
with the bytes of real steps. Seconds are operations over a GPU's speed and bytes over its bandwidth.

    python benchmarks/capacity.py memory paper
    python benchmarks/capacity.py schedule paper --gpus 1 8 64 --seconds train=5400
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, NamedTuple

from catto.pipeline.estimate import (
    GPU,
    KNOWN_NETWORKS,
    Network,
    PlanEstimate,
    parse_parameter_count,
    stage_group,
    stage_resources,
)
from catto.pipeline.kinds.train import TrainSettings
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, list_needed
from catto.recipe.load import load_recipe

__all__ = ["KNOWN_NETWORKS", "Capacity", "Job", "Memory", "Network", "memory", "simulate"]

# The share of the bandwidth of a decoder that reads all weights for every token.
READING = 0.8
# Tokens/s of one response of the teacher's server.
STREAM = 50.0
# Seconds of stages that read, count or choose, without a model.
LITTLE = 5.0
# The share of a row that is its prompt, which `prefix_sharing` computes once for both responses.
PROMPT = 0.5

# ---- memory


def count_adapter_parameters(net: Network, rank: int) -> int:
    """Count the parameters of LoRA adapters on all linear layers: rank x (inputs + outputs) each."""
    inputs = 5 * net.width + net.queries + net.intermediate
    outputs = net.queries + 2 * net.keys + 2 * net.width + 2 * net.intermediate
    return net.layers * rank * (inputs + outputs)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. The peak is less than the sum: gradients grow while activations are freed."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    peak: float


def memory(net: Network, tokens: int, scored: int, *, width: int = 4, rank: int | None = None, gpus: int = 1) -> Memory:
    """Return what a training step holds at most on each GPU.

    tokens: computed in a step on this GPU. scored: those of them that are responses. width: bytes of a weight. rank: of
    LoRA adapters on all linear layers; None trains every weight. gpus: over which FSDP2 cuts weights (bf16 while they
    compute), gradients and moments, a layer at a time.

    >>> step = memory(KNOWN_NETWORKS["Qwen/Qwen3-4B"], tokens=12_288, scored=8_192)
    >>> round(step.weights / 1e9, 1), round(step.optimizer / 1e9, 1), round(step.peak / 1e9, 1)
    (16.1, 32.2, 67.5)
    """
    full, sharded, table = rank is None, gpus > 1, net.table
    trained, grain = (net.parameters, width) if rank is None else (count_adapter_parameters(net, rank), 4)
    weights = width * net.parameters + (0 if full else 4 * trained)
    gradients, optimizer = grain * trained, 2 * grain * trained
    stream = 2 if sharded else width  # bytes of a number of the residual stream
    # Tensors that a layer saves for its backward pass, per token. Norms that are not trained save less, and so does a
    # bf16 stream, which products read without another copy.
    saved = 18 if not full else 26 if stream == 4 else 16
    layer = tokens * (saved * net.width + (10 if full else 8) * (net.queries + net.keys) + 8 * net.intermediate)
    layer += tokens * (8 * net.width + (3 if full else 8) * net.intermediate)  # gradients on their way through it
    layer += 0 if sharded or stream == 2 else 2 * net.layer  # its weights in bf16
    kept = tokens * stream * net.width * net.layers  # what checkpointing keeps: the input of every layer
    tile = min(GPU.memory / 256, scored * table / net.width / 2)  # of fp32 logits, at most an eighth of the vocabulary
    head = (3 * tokens * stream + 6 * scored) * net.width + 4 * tile
    activations = kept + max(layer, head)
    # Four moments compete: the end of the forward pass, the first layer and the last one of the backward pass, and the
    # embedding, whose second gradient is added to the head's.
    if sharded:
        whole, tables = 2 * net.layer, 2 * table * (1 if net.tied else 2)
        moments = [
            tables + 2 * whole + kept + head,
            tables + 4 * whole + kept + layer + 2 * table,
            (gradients - grain * net.layer) / gpus + tables + 3 * whole + layer + 2 * table,
            gradients / gpus + tables + 8 * table,
        ]
    else:
        copies = 2 * net.parameters if full and width == 4 else 0  # autocast keeps them until the forward pass ends
        twice = 2 * table * grain if full and net.tied else 0
        done = gradients - (net.layer * grain if full else 0)
        begun = table * grain if full else 0
        moments = [copies + kept + head, begun + kept + layer, done + layer, gradients + twice]
    parts = weights / gpus, gradients / gpus, optimizer / gpus
    return Memory(*parts, activations, parts[0] + parts[2] + max(moments))


# ---- time


class Duration(NamedTuple):
    """Seconds of a stage, and where they come from: stated, measured or estimated."""

    seconds: float
    source: str


class Capacity(PlanEstimate):
    """What the stages of a recipe need of GPUs: bytes and seconds."""

    def pair_tokens(self, stage: Stage) -> int:
        """Bound the tokens of the held-out pairs that a stage scores."""
        pairs = stage.needs["pairs"]
        asked = self.count_questions(pairs.needs["questions"])
        per_question: int = pairs.settings.asked.sampling.pairs_per_question
        return 2 * self.recipe.context * asked * per_question

    def batch(self, settings: TrainSettings) -> int:
        """Return the rows or pairs that are computed at once; `trl` overrides the recipe's."""
        return int(settings.block.trl.get("per_device_train_batch_size", settings.batch_size))

    def seconds(self, stage: Stage) -> float | None:
        """Estimate how long a stage takes on an A100; None for a model of unknown size."""
        teacher, evaluation, size = self.recipe.own_teacher, self.recipe.evaluation, self.parameters
        batch, length = evaluation.batch_size, evaluation.max_tokens
        if stage.kind == "train":
            return (
                None
                if size is None
                else self.count_training_tokens(stage) / self.tokens_per_second / self.recipe.launch.processes
            )
        if stage.kind == "pair_logprobs":
            return (
                None if size is None else self.pair_tokens(stage) / (3 * self.tokens_per_second)
            )  # without the backward pass
        if stage.kind == "responses" and teacher.source == "server":
            return self.count_requests(stage) * teacher.max_tokens / (STREAM * teacher.concurrency)
        if stage.kind == "responses" and teacher.source == "transformers":
            batch, length, size = teacher.concurrency, teacher.max_tokens, parse_parameter_count(teacher.model or "")
        elif stage.kind not in ("generated", "sampled"):
            return LITTLE
        if size is None:
            return None
        # Every token of a batch reads all weights and the keys and values of the responses so far.
        requests, net = self.count_requests(stage), self.network
        width = 0 if net is None else 4 * net.layers * net.keys
        cache = min(batch, requests) * (PROMPT * self.recipe.context + length / 2) * width
        return ceil(requests / batch) * length * (self.weight_bytes * size + cache) / (READING * GPU.bandwidth)

    def durations(
        self, missing: Iterable[Stage], taken: Iterable[tuple[Stage, float]], stated: Mapping[str, float]
    ) -> dict[str, Duration]:
        """Return the seconds of every missing stage by its key: stated, measured or estimated, in this order.

        stated: by the line of the plan or by kind. taken: finished stages and their seconds, of which the median of the
        line counts.
        """
        measured: dict[str, list[float]] = defaultdict(list)
        for stage, took in taken:
            measured[stage_group(stage)].append(took)
        durations = {}
        for stage in missing:
            line = stage_group(stage)
            seconds, source = stated.get(line, stated.get(stage.kind)), "stated"
            if seconds is None and line in measured:
                seconds, source = median(measured[line]), "measured"
            if seconds is None:
                seconds, source = self.seconds(stage), "estimated"
            if seconds is None:
                raise ValueError(f"how long {stage.name} takes is unknown: state --seconds '{line}=...'")
            durations[stage.key] = Duration(seconds, source)
        return durations

    def layouts(self, largest: TrainSettings) -> dict[str, tuple[Memory, Memory]]:
        """Return the memory of a training in several layouts, prompts computed for every response and shared.

        Processes share the batch of a step; each has at least one of its elements.
        """
        net, context = self.network, self.recipe.context
        if net is None:
            path = self.recipe.model.path
            raise ValueError(f"the shape of {path} is unknown: no config.json here or in the hub's cache")
        prompt, paired = round(PROMPT * context), largest.method.stage == "preference"
        rank = (self.recipe.model.peft or {}).get("r", 32)
        options: dict[str, dict[str, Any]] = {"full": {}, f"LoRA {rank}": {"rank": rank}}
        if self.weight_bytes == 4:
            options[f"LoRA {rank}, bf16"] = {"rank": rank, "width": 2}
        numbers = sorted({2, 4, 8, max(2, self.recipe.launch.processes)})
        options |= {f"FSDP2, {gpus} GPUs": {"gpus": gpus} for gpus in numbers}
        layouts = {}
        for name, each in options.items():
            size = max(1, self.batch(largest) // each.get("gpus", 1))
            tokens, scored = size * self.count_rows(largest) * context, size * (2 if paired else 1) * (context - prompt)
            shared = tokens - size * prompt * paired
            weights = {"width": self.weight_bytes, **each}
            layouts[name] = memory(net, tokens, scored, **weights), memory(net, shared, scored, **weights)
        return layouts


# ---- a schedule


@dataclass(frozen=True)
class Job:
    """A stage as a scheduler sees it."""

    key: str
    needs: tuple[str, ...]  # keys of jobs in the same plan
    seconds: float
    gpus: float = 0.0  # below 1 a share of one, above it whole ones


@dataclass(frozen=True)
class Schedule:
    """When each job starts, in seconds, on which GPUs, and what follows from it."""

    starts: Mapping[str, float]
    places: Mapping[str, list[int]]  # numbers of GPUs
    makespan: float
    critical: tuple[str, ...]  # the chain of jobs that no number of GPUs shortens, first to last
    shortest: float  # its length
    busy: float  # GPU-seconds of all jobs
    utilisation: float  # of the GPUs, over the makespan


def simulate(jobs: Sequence[Job], gpus: int) -> Schedule:
    """Start each job as soon as its needs are done and its GPUs are free, the one with most work behind it first.

    jobs: what is needed comes first. A job that finds too few free GPUs lets smaller ones pass, as Ray and Slurm do;
    jobs without a GPU never wait for one. Shares are parts of one GPU, of the fullest with room. Raises ValueError for
    a job that needs more GPUs than there are.

    >>> jobs = [Job("sft", (), 60, 1), Job("dpo", ("sft",), 30, 1), Job("catto", ("sft",), 40, 1)]
    >>> simulate(jobs, 1).makespan, simulate(jobs, 2).makespan, simulate(jobs, 2).critical
    (130.0, 100.0, ('sft', 'catto'))
    """
    after: dict[str, list[str]] = defaultdict(list)
    for job in jobs:
        if job.gpus > gpus:
            raise ValueError(f"{job.key} needs {job.gpus:g} GPUs at once, and there are {gpus:g}")
        for need in job.needs:
            after[need].append(job.key)
    named, tail = {job.key: job for job in jobs}, dict[str, float]()  # tail: the longest chain that starts with a job
    for job in reversed(jobs):
        tail[job.key] = job.seconds + max((tail[key] for key in after[job.key]), default=0.0)
    waiting = {job.key: len(job.needs) for job in jobs}
    # By GPUs: jobs that could start, longest tail first.
    ready: dict[float, list[tuple[float, str]]] = defaultdict(list)
    running: list[tuple[float, str]] = []
    starts, places = dict[str, float](), dict[str, list[int]]()
    free = [1.0] * min(gpus, sum(ceil(job.gpus) for job in jobs))  # of each GPU that can be in use
    now, new = 0.0, [job.key for job in jobs if not job.needs]
    while running or len(starts) < len(jobs):
        for key in new:
            heapq.heappush(ready[named[key].gpus], (-tail[key], key))
        while fitting := [(queue[0], size) for size, queue in ready.items() if queue and _room(free, size) is not None]:
            (_, key), size = min(fitting)
            heapq.heappop(ready[size])
            starts[key], places[key] = now, _room(free, size) or []
            for number in places[key]:
                free[number] -= min(size, 1.0)
            heapq.heappush(running, (now + named[key].seconds, key))
        now, ended = heapq.heappop(running)
        new = []
        for number in places[ended]:
            free[number] += min(named[ended].gpus, 1.0)
        for key in after[ended]:
            waiting[key] -= 1
            new += [key] if not waiting[key] else []
    critical, links = [], [job.key for job in jobs if not job.needs]
    while links:
        critical.append(max(links, key=lambda key: tail[key]))
        links = after[critical[-1]]
    busy = sum(job.seconds * job.gpus for job in jobs)
    shortest, makespan = max(tail.values(), default=0.0), float(now)
    utilisation = busy / (gpus * makespan) if makespan else 0.0
    return Schedule(starts, places, makespan, tuple(critical), shortest, busy, utilisation)


def _room(free: Sequence[float], size: float) -> list[int] | None:
    """Return the GPUs that a job would get; None where it has to wait. free: the share of each that is free."""
    share = min(size, 1.0)
    fullest = heapq.nsmallest(ceil(size), ((left, number) for number, left in enumerate(free) if left > share - 1e-9))
    return [number for _, number in fullest] if len(fullest) == ceil(size) else None


# ---- command line


def show_memory(recipe_name: str) -> None:
    """Print the memory of the training whose step computes most tokens."""
    recipe = load_recipe(recipe_name)
    capacity = Capacity(recipe)
    trainings = [stage.settings for stage in list_needed([Graph(recipe).plan_report()]) if stage.kind == "train"]
    largest = max(trainings, key=lambda settings: capacity.batch(settings) * capacity.count_rows(settings))
    print(f"{largest.name}: GB on each GPU; shared: with prefix_sharing")
    for name, (plain, shared) in capacity.layouts(largest).items():
        sizes = [*vars(plain).values(), shared.activations, shared.peak]
        print(f"{name:20}" + "".join(f"{size / 1e9:9.1f}" for size in sizes))
    print(f"{'':20}  weights    grads    optim   activ.     peak   shared     peak")


def show_schedule(recipe_name: str, gpus: Sequence[int], stated: Mapping[str, float]) -> None:
    """Print how long the stages of a recipe take on each number of GPUs."""
    recipe = load_recipe(recipe_name)
    capacity = Capacity(recipe)
    stages = {stage.key: stage for stage in list_needed([Graph(recipe).plan_report()])}
    durations = capacity.durations(stages.values(), [], stated)
    jobs = []
    for key, stage in stages.items():
        needs = tuple(dict.fromkeys(need.key for need in stage.needs.values()))
        jobs.append(Job(key, needs, durations[key].seconds, stage_resources(recipe, stage).gpus or 0))
    print(f"{len(jobs)} stages; durations: {dict(Counter(length.source for length in durations.values()))}")
    for count in gpus:
        schedule = simulate(jobs, count)
        hours = schedule.makespan / 3600
        print(
            f"{count:4} GPUs: {hours:10.1f} h, {schedule.utilisation:4.0%} busy, {schedule.busy / 3600:10.1f} GPU hours"
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "schedule"))
    parser.add_argument("recipe")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", action="append", default=[], metavar="KIND=SECONDS")
    arguments = parser.parse_args()
    if arguments.what == "memory":
        show_memory(arguments.recipe)
        return
    stated = {}
    for text in arguments.seconds:
        kind, _, seconds = text.rpartition("=")
        stated[kind] = float(seconds)
    show_schedule(arguments.recipe, arguments.gpus, stated)


if __name__ == "__main__":
    main()
