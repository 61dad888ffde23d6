"""What a plan costs before it runs: memory of a training step, seconds of a stage, a schedule. Nothing is loaded.

Memory follows from the shape of the model by the tensors that a step holds on a GPU: fp32 or bf16 weights, bf16
products, gradient checkpointing, AdamW's fused kernel, the reference precomputed. `benchmarks/memory.py` compares it
with the bytes of real steps. Seconds are operations over a GPU's speed and bytes over its bandwidth. Rows are taken to
be as long as the context, so tokens are upper bounds.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from catto.engines import is_hub_id
from catto.io.text_files import read_json
from catto.pipeline.stage import QuestionSettings, ResponseSettings, Stage, TrainSettings, account, place
from catto.recipe.settings import ModelSettings, Recipe, Resources
from catto.records import Split
from catto.tasks import TASKS
from catto.tasks.witnesses import SIZES


class Card(NamedTuple):
    """Published peaks of a GPU: 16-bit operations/s, bytes/s, bytes."""

    name: str
    operations: float
    bandwidth: float
    memory: float


GPU = Card("A100", 312e12, 2.04e12, 80e9)
# The share of the peaks that a well-tuned training reaches, and a decoder that reads all weights for every token.
TRAINING, READING = 0.4, 0.8
# Operations/s that a training reaches on two CPU cores without bf16 instructions: 140 tokens/s of SmolLM2-135M.
CORES = 0.11e12
# Tokens/s of one response of the teacher's server.
STREAM = 50.0
# Stages that read, count or choose, without a model.
LITTLE = 5.0
# The share of a row that is its prompt, which `prefix_sharing` computes once for both responses.
PROMPT = 0.5
# Words of the embedded world, the vocabulary of a model from scratch.
WORDS = 256

# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """The shape of a dense decoder with gated MLPs (Llama, Qwen, Mistral, ...)."""

    layers: int
    width: int
    intermediate: int
    queries: int  # heads x their width
    keys: int  # of keys, and of values
    vocabulary: int
    tied: bool

    @property
    def layer(self) -> int:
        """Parameters of one layer: attention, MLP, two norms."""
        return self.width * (2 * self.queries + 2 * self.keys + 3 * self.intermediate + 2)

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All of them.

        >>> KNOWN["Qwen/Qwen3-4B"].parameters
        4022458880
        """
        return self.layers * self.layer + self.table * (1 if self.tied else 2) + self.width

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on all linear layers: rank x (inputs + outputs) each."""
        inputs = 5 * self.width + self.queries + self.intermediate
        outputs = self.queries + 2 * self.keys + 2 * self.width + 2 * self.intermediate
        return self.layers * rank * (inputs + outputs)


KNOWN = {"Qwen/Qwen3-4B": Network(36, 2560, 9728, 32 * 128, 8 * 128, 151_936, True)}


def network(model: ModelSettings) -> Network | None:
    """Return the shape of a recipe's model: from scratch, from its folder or the hub's cache; None where unknown."""
    if (scratch := model.scratch) is not None:
        heads = scratch.width // scratch.heads * scratch.heads
        return Network(scratch.layers, scratch.width, scratch.intermediate, heads, heads, WORDS, True)
    name = model.path or ""
    path = Path(name) / "config.json"
    if not path.is_file() and is_hub_id(name):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        path = Path(cached) if isinstance(cached, str) else path
    if not path.is_file():
        return KNOWN.get(name)
    config = read_json(path)
    config = config.get("text_config", config)
    if "num_experts_per_tok" in config:  # a mixture of experts
        return None
    try:
        heads, width = config["num_attention_heads"], config["hidden_size"]
        head = config.get("head_dim") or width // heads
        keys = config.get("num_key_value_heads") or heads
        shape = config["num_hidden_layers"], width, config["intermediate_size"], heads * head, keys * head
        return Network(*shape, config["vocab_size"], bool(config.get("tie_word_embeddings")))
    except KeyError:  # another family's names
        return None


# ---- memory ---------------------------------------------------------------------------------------------------------


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

    >>> step = memory(KNOWN["Qwen/Qwen3-4B"], tokens=12_288, scored=8_192)
    >>> round(step.weights / 1e9, 1), round(step.optimizer / 1e9, 1), round(step.peak / 1e9, 1)
    (16.1, 32.2, 67.5)
    """
    full, sharded, table = rank is None, gpus > 1, net.table
    trained, grain = (net.parameters, width) if rank is None else (net.adapters(rank), 4)
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


# ---- time -----------------------------------------------------------------------------------------------------------


def group(stage: Stage) -> str:
    """Return the line of the plan that counts a stage: its kind, and a training's method."""
    kind = stage.kind.replace("_", " ")
    if stage.kind == "train":
        return f"train {stage.method}"
    return kind


def took(root: Path, stage: Stage) -> float | None:
    """Return how long a finished stage took; a training that was resumed, with all of its runs."""
    folder = place(root, stage)
    if not folder.exists():
        return None
    seconds = float(account(folder)["seconds"])
    return max(seconds, read_json(folder / "training.json")["seconds"]) if stage.kind == "train" else seconds


def parameters(name: str) -> float | None:
    """Read the number of parameters off a model's name; None where it does not say.

    >>> parameters("Qwen/Qwen3-4B"), parameters("SmolLM2-135M-Instruct"), parameters("my-model")
    (4000000000.0, 135000000.0, None)
    """
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", name, re.IGNORECASE)
    return float(size[1]) * {"B": 1e9, "M": 1e6}[size[2].upper()] if size else None


# Kinds of stages that use a model, and the block of the recipe's resources that they have; the others are light.
MODELS = {"train": "train", **dict.fromkeys(("generated", "predicted", "sampled", "pair_logprobs"), "predict")}


def sort_of(recipe: Recipe, stage: Stage) -> str:
    """Return which block of the recipe's resources a stage has."""
    if stage.kind == "responses" and recipe.teacher.source == "transformers":
        return "predict"
    return MODELS.get(stage.kind, "report")


def resources(recipe: Recipe, stage: Stage, *, gpus: bool = True) -> Resources:
    """Return what a stage gets of a cluster; with `gpus`, where the recipe says none, one for each of its processes."""
    sort = sort_of(recipe, stage)
    block: Resources = getattr(recipe.resources, sort)
    if block.gpus is not None:
        return block
    usual = {"train": recipe.launch.processes, "predict": 1, "report": 0}[sort]
    return block.model_copy(update={"gpus": usual * gpus})


class Duration(NamedTuple):
    """Seconds of a stage, and where they come from: stated, measured or estimated."""

    seconds: float
    source: str


class Costs:
    """What the stages of a recipe need: rows, tokens, bytes and seconds."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.network = recipe, network(recipe.model)
        self.parameters = self.network.parameters if self.network else parameters(recipe.model.path or "")
        self.width = 2 if recipe.model.dtype == "bfloat16" else 4
        self.uncounted: dict[Split, set[str]] = defaultdict(set)  # tasks whose questions are not counted

    def questions(self, stage: Stage[QuestionSettings]) -> int:
        """Count the questions of a stage; 0 where all of a task's are taken, however many those are."""
        settings = stage.settings
        split, task = settings.split, settings.task
        count = getattr(settings.block, split) or (SIZES[split] if task == "witnesses" else None)
        if count is None and split != "train" and task in TASKS:
            count = TASKS[task].sample
        if count is None:
            self.uncounted[split].add(task)
        return count or 0

    def tokens(self, stage: Stage[TrainSettings]) -> int:
        """Bound the tokens of a training: a pair counts twice, and the third stream on top of it."""
        settings, teacher = stage.settings, self.recipe.own_teacher
        each = teacher.pairs_per_question if settings.method.stage == "preference" else teacher.n
        asked = self.questions(stage.needs["teacher"].needs["questions"])
        elements = min(filter(None, (settings.pairs, settings.block.rows, asked * each)), default=0)
        epochs: float = settings.block.trl.get("num_train_epochs", settings.epochs)
        return ceil(self.recipe.context * elements * self.rows(settings) * epochs)

    def pair_tokens(self, stage: Stage) -> int:
        """Bound the tokens of the held-out pairs that a stage scores."""
        pairs = stage.needs["pairs"]
        asked = self.questions(pairs.needs["questions"])
        per_question: int = pairs.settings.asked.teacher.pairs_per_question
        return 2 * self.recipe.context * asked * per_question

    def rows(self, settings: TrainSettings) -> int:
        """Count the rows of one element of a batch: of a pair two, and those of the third stream."""
        if settings.method.stage != "preference":
            return 1
        return 2 + (self.recipe.outcome.rows_per_pair if settings.method.stream != "none" else 0)

    def batch(self, settings: TrainSettings) -> int:
        """Return the rows or pairs that are computed at once; `trl` overrides the recipe's."""
        return int(settings.block.trl.get("per_device_train_batch_size", settings.batch_size))

    def requests(self, stage: Stage) -> int:
        """Count the responses that a stage generates or asks for."""
        if isinstance(stage.settings, ResponseSettings):
            asked, outcome = self.questions(stage.needs["questions"]), stage.settings.outcome
            return min(asked, (outcome and outcome.questions) or asked) * stage.settings.teacher.n
        asked, each = self.questions(stage.needs["held_out"]), stage.settings.temperatures
        samples = each if isinstance(each, int) else len(each)
        return min(asked, stage.settings.limit or asked) * samples

    def seconds(self, stage: Stage) -> float | None:
        """Estimate how long a stage takes on GPUs of the kind `GPU`; None for a model of unknown size."""
        teacher, evaluation, size = self.recipe.own_teacher, self.recipe.evaluation, self.parameters
        batch, length = evaluation.batch_size, evaluation.max_tokens
        if stage.kind == "train":
            return None if size is None else self.tokens(stage) / self.speed / self.recipe.launch.processes
        if stage.kind == "pair_logprobs":
            return None if size is None else self.pair_tokens(stage) / (3 * self.speed)  # without the backward pass
        if stage.kind == "responses" and teacher.source == "server":
            return self.requests(stage) * teacher.max_tokens / (STREAM * teacher.concurrency)
        if stage.kind == "responses" and teacher.source == "transformers":
            batch, length, size = teacher.concurrency, teacher.max_tokens, parameters(teacher.model or "")
        elif stage.kind not in ("generated", "sampled"):
            return LITTLE
        if size is None:
            return None
        # Every token of a batch reads all weights and the keys and values of the responses so far.
        requests, net = self.requests(stage), self.network
        width = 0 if net is None else 4 * net.layers * net.keys
        cache = min(batch, requests) * (PROMPT * self.recipe.context + length / 2) * width
        return ceil(requests / batch) * length * (self.width * size + cache) / (READING * GPU.bandwidth)

    def durations(
        self, missing: Iterable[Stage], taken: Iterable[tuple[Stage, float]], stated: Mapping[str, float]
    ) -> dict[str, Duration]:
        """Return the seconds of every missing stage by its key: stated, measured or estimated, in this order.

        stated: by the line of the plan or by kind. taken: finished stages and their seconds, of which the median of the
        line counts.
        """
        measured: dict[str, list[float]] = defaultdict(list)
        for stage, took in taken:
            measured[group(stage)].append(took)
        durations = {}
        for stage in missing:
            line = group(stage)
            seconds, source = stated.get(line, stated.get(stage.kind)), "stated"
            if seconds is None and line in measured:
                seconds, source = median(measured[line]), "measured"
            if seconds is None:
                seconds, source = self.seconds(stage), "estimated"
            if seconds is None:
                raise ValueError(f"how long {stage.name} takes is unknown: state --seconds '{line}=...'")
            durations[stage.key] = Duration(seconds, source)
        return durations

    @property
    def speed(self) -> float:
        """Tokens that are trained on in a second: 6 operations per parameter and token."""
        return TRAINING * GPU.operations / (6 * (self.parameters or 1))

    def lines(self, missing: Iterable[Stage]) -> list[str]:
        """Say what the missing trainings and the teacher need; nothing where there is nothing to train or ask."""
        stages, lines, teacher = list(missing), [], self.recipe.own_teacher
        self.uncounted.clear()
        trainings, asking = ([stage for stage in stages if stage.kind == kind] for kind in ("train", "responses"))
        if trainings:
            tokens = sum(map(self.tokens, trainings))
            length = "with rows as long as the context"
            lines.append(f"{len(trainings)} trainings: up to {max(tokens / 1e6, 1):,.0f} million tokens, {length}")
        if trainings and self.parameters is not None:
            adapted = self.recipe.model.peft is not None
            held = "the weights" if adapted else "weights, gradients and Adam's moments"
            size = self.parameters * self.width * (1 if adapted else 4) / 1e9
            counted = f"{self.parameters / 1e9:.3g} billion" if self.parameters >= 1e7 else f"{self.parameters:,.0f}"
            hours, peak = tokens / self.speed / 3600, GPU.operations
            amounts = size, hours, hours * TRAINING * peak / CORES
            memory, on_gpu, on_cores = (f"{max(each, 0.01):,.{0 if each >= 1 else 2}f}" for each in amounts)
            lines.append(f"{counted} parameters: {memory} GB of GPU memory for {held}, then activations")
            share = f"at {self.speed:,.0f} tokens/s ({TRAINING:.0%} of an {GPU.name}'s {peak / 1e12:.0f} TFLOP/s)"
            lines.append(f"up to {on_gpu} GPU hours {share}")
            if self.parameters < 1e9:
                lines.append(f"or up to {on_cores} hours of two CPU cores")
        if asking and teacher.source == "server":
            requests = sum(map(self.requests, asking))
            generated = f"up to {requests * teacher.max_tokens / 1e6:,.0f} million generated tokens"
            lines.append(f"teacher: {requests:,} requests, {generated}")
        return lines + self.left_out()

    def left_out(self) -> list[str]:
        """Say which questions were not counted so far."""
        splits = sorted(self.uncounted.items())
        return [f"not counted: {split} questions of {', '.join(sorted(tasks))}" for split, tasks in splits]

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
        if self.width == 4:
            options[f"LoRA {rank}, bf16"] = {"rank": rank, "width": 2}
        numbers = sorted({2, 4, 8, max(2, self.recipe.launch.processes)})
        options |= {f"FSDP2, {gpus} GPUs": {"gpus": gpus} for gpus in numbers}
        layouts = {}
        for name, each in options.items():
            size = max(1, self.batch(largest) // each.get("gpus", 1))
            tokens, scored = size * self.rows(largest) * context, size * (2 if paired else 1) * (context - prompt)
            shared = tokens - size * prompt * paired
            weights = {"width": self.width, **each}
            layouts[name] = memory(net, tokens, scored, **weights), memory(net, shared, scored, **weights)
        return layouts


# ---- a schedule -----------------------------------------------------------------------------------------------------


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
