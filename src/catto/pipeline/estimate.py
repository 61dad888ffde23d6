"""What a plan needs before it runs: trainings and their tokens, GPU hours, and requests to the teacher.

Nothing is loaded. Rows are taken to be as long as the context, so tokens are upper bounds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from catto.engines import is_hub_id
from catto.io.text_files import read_json
from catto.pipeline.kinds.questions import QuestionSettings
from catto.pipeline.kinds.responses import ResponseSettings
from catto.pipeline.kinds.table import STAGE_KINDS, ResourceBlock
from catto.pipeline.kinds.train import TrainSettings
from catto.pipeline.stage import Stage, read_done, stage_dir
from catto.recipe.settings import ModelSettings, Recipe, Resources, ScratchModel
from catto.records import Split
from catto.tasks import TASKS, readings, witnesses


class Card(NamedTuple):
    """Published peaks of a GPU: 16-bit operations/s, bytes/s, bytes."""

    name: str
    operations: float
    bandwidth: float
    memory: float


GPU = Card("A100", 312e12, 2.04e12, 80e9)
# The share of the peak that a well-tuned training reaches.
TRAINING_SHARE = 0.4
MOST_CPU_PARAMETERS = 2e9  # larger models are not trained on a CPU
# Operations/s that a training reaches on two CPU cores without bf16 instructions: 140 tokens/s of SmolLM2-135M.
CPU_OPERATIONS = 0.11e12
# Words of the embedded world, the vocabulary of a model from scratch.
SCRATCH_VOCABULARY = 256


# ---- the model


@dataclass(frozen=True)
class Network:
    """The shape of a dense decoder with gated MLPs (Llama, Qwen, Mistral, ...).

    Attributes:
        layers: Number of layers.
        width: Width of the residual stream.
        intermediate: Width of the MLPs.
        queries: Number of attention heads times their width.
        keys: Number of key heads times their width; values have as many.
        vocabulary: Number of token ids.
        tied: Whether the head shares the embedding's weights.
    """

    layers: int
    width: int
    intermediate: int
    queries: int
    keys: int
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
        """Parameters of the whole model.

        >>> KNOWN_NETWORKS["Qwen/Qwen3-4B"].parameters
        4022458880
        """
        tables = 1 if self.tied else 2
        return self.layers * self.layer + self.table * tables + self.width


KNOWN_NETWORKS = {"Qwen/Qwen3-4B": Network(36, 2560, 9728, 32 * 128, 8 * 128, 151_936, True)}


def read_network(model: ModelSettings) -> Network | None:
    """Return the shape of a recipe's model, from its settings, its folder or the hub's cache; None if it is unknown."""
    if model.scratch is not None:
        return _scratch_network(model.scratch)
    name = model.path or ""
    path = _find_config(name)
    if path is None:
        return KNOWN_NETWORKS.get(name)
    config = read_json(path)
    config = config.get("text_config", config)
    is_mixture_of_experts = "num_experts_per_tok" in config
    if is_mixture_of_experts:
        return None
    try:
        return _parse_config(config)
    except KeyError:  # another family's names
        return None


def _scratch_network(scratch: ScratchModel) -> Network:
    queries = scratch.width // scratch.heads * scratch.heads
    return Network(
        layers=scratch.layers,
        width=scratch.width,
        intermediate=scratch.intermediate,
        queries=queries,
        keys=queries,
        vocabulary=SCRATCH_VOCABULARY,
        tied=True,
    )


def _find_config(name: str) -> Path | None:
    path = Path(name) / "config.json"
    if path.is_file():
        return path
    if not is_hub_id(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def _parse_config(config: dict[str, Any]) -> Network:
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    head_width = config.get("head_dim") or width // heads
    key_heads = config.get("num_key_value_heads") or heads
    return Network(
        layers=config["num_hidden_layers"],
        width=width,
        intermediate=config["intermediate_size"],
        queries=heads * head_width,
        keys=key_heads * head_width,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
    )


def parse_parameter_count(name: str) -> float | None:
    """Read the number of parameters off a model's name; None if the name does not say.

    >>> parse_parameter_count("Qwen/Qwen3-4B"), parse_parameter_count("my-model")
    (4000000000.0, None)
    """
    size = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", name, re.IGNORECASE)
    if size is None:
        return None
    unit = {"B": 1e9, "M": 1e6}[size[2].upper()]
    return float(size[1]) * unit


# ---- stages


def stage_group(stage: Stage) -> str:
    """Return the line of the plan that counts a stage: its kind, and the method of a training."""
    if stage.kind == "train":
        return f"train {stage.method}"
    return stage.kind.replace("_", " ")


def stage_seconds(root: Path, stage: Stage) -> float | None:
    """Return how long a finished stage took; None if it is not finished. A resumed training counts all of its runs."""
    folder = stage_dir(root, stage)
    if not folder.exists():
        return None
    seconds = float(read_done(folder)["seconds"])
    if stage.kind != "train":
        return seconds
    trained = float(read_json(folder / "training.json")["seconds"])
    return max(seconds, trained)


def resource_block(recipe: Recipe, stage: Stage) -> ResourceBlock:
    """Return the name of the block of the recipe's resources that a stage has."""
    if stage.kind == "responses" and recipe.teacher.source == "transformers":
        return "predict"
    return STAGE_KINDS[stage.kind].resources


def stage_resources(recipe: Recipe, stage: Stage, *, gpus: bool = True) -> Resources:
    """Return what a stage gets of a cluster.

    Args:
        recipe: The recipe.
        stage: One of its stages.
        gpus: If the recipe names no number of GPUs, give each process of a stage with a model one of them.
    """
    name = resource_block(recipe, stage)
    block: Resources = getattr(recipe.resources, name)
    if block.gpus is not None:
        return block
    usual = {"train": recipe.launch.processes, "predict": 1, "report": 0}[name]
    return block.model_copy(update={"gpus": usual if gpus else 0})


# ---- the estimate

# How many questions a split of an embedded world has.
GENERATED_COUNTS = {"witnesses": witnesses.SIZES, "readings": readings.READING_COUNTS}


class PlanEstimate:
    """What the stages of a recipe need: questions, rows, tokens and requests."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.network = read_network(recipe.model)
        self.parameters: float | None = parse_parameter_count(recipe.model.path or "")
        if self.network is not None:
            self.parameters = self.network.parameters
        self.weight_bytes = 2 if recipe.model.dtype == "bfloat16" else 4
        self.uncounted: dict[Split, set[str]] = defaultdict(set)  # tasks whose questions are not counted

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU trains on in a second, at 6 operations per parameter and token."""
        return TRAINING_SHARE * GPU.operations / (6 * (self.parameters or 1))

    def count_questions(self, stage: Stage[QuestionSettings]) -> int:
        """Count the questions of a stage; 0 if it takes all of a task's, whose number is not known."""
        settings = stage.settings
        split = settings.split
        task = settings.task
        count = getattr(settings.block, split)
        if not count and task in GENERATED_COUNTS:
            count = GENERATED_COUNTS[task][split]
        if count is None and split != "train" and task in TASKS:
            count = TASKS[task].sample
        if count is None:
            self.uncounted[split].add(task)
        return count or 0

    def count_training_tokens(self, stage: Stage[TrainSettings]) -> int:
        """Bound the tokens of a training. A pair counts twice, and the rows of the third stream on top of it."""
        settings = stage.settings
        teacher = self.recipe.own_teacher
        per_question = teacher.n
        if settings.method.stage == "preference":
            per_question = teacher.pairs_per_question
        questions = self.count_questions(stage.needs["teacher"].needs["questions"])
        limits = (settings.pairs, settings.block.rows, questions * per_question)
        elements = min((limit for limit in limits if limit), default=0)
        epochs: float = settings.block.trl.get("num_train_epochs", settings.epochs)
        return ceil(self.recipe.context * elements * self.count_rows(settings) * epochs)

    def count_rows(self, settings: TrainSettings) -> int:
        """Count the rows of one element of a batch: two for a pair, and those of the third stream."""
        if settings.method.stage != "preference":
            return 1
        if settings.method.stream == "none":
            return 2
        return 2 + self.recipe.outcome.rows_per_pair

    def count_requests(self, stage: Stage) -> int:
        """Count the responses that a stage generates or asks for."""
        if isinstance(stage.settings, ResponseSettings):
            questions = self.count_questions(stage.needs["questions"])
            outcome = stage.settings.outcome
            if outcome is not None and outcome.questions:
                questions = min(questions, outcome.questions)
            return questions * stage.settings.sampling.n
        questions = self.count_questions(stage.needs["held_out"])
        if stage.settings.limit:
            questions = min(questions, stage.settings.limit)
        temperatures = stage.settings.temperatures
        samples = temperatures if isinstance(temperatures, int) else len(temperatures)
        return questions * samples

    def describe_missing(self, missing: Iterable[Stage]) -> list[str]:
        """Say what the missing trainings and the teacher need; nothing if there is nothing to train or to ask."""
        stages = list(missing)
        self.uncounted.clear()
        lines = self._describe_trainings([stage for stage in stages if stage.kind == "train"])
        asking = [stage for stage in stages if stage.kind == "responses"]
        teacher = self.recipe.own_teacher
        if asking and teacher.source == "server":
            requests = sum(self.count_requests(stage) for stage in asking)
            millions = requests * teacher.max_tokens / 1e6
            lines.append(f"teacher: {requests:,} requests, up to {_format_amount(millions)} million generated tokens")
        return lines + self.describe_uncounted()

    def _describe_trainings(self, trainings: Sequence[Stage]) -> list[str]:
        if not trainings:
            return []
        tokens = sum(self.count_training_tokens(stage) for stage in trainings)
        millions = max(tokens / 1e6, 1)
        lines = [f"{len(trainings)} trainings: up to {millions:,.0f} million tokens, with rows as long as the context"]
        if self.parameters is None:
            return lines
        lines.append(self._describe_memory(self.parameters))
        gpu_hours = tokens / self.tokens_per_second / 3600
        peak = GPU.operations / 1e12
        lines.append(
            f"up to {_format_amount(gpu_hours)} GPU hours at {self.tokens_per_second:,.0f} tokens/s "
            f"({TRAINING_SHARE:.0%} of an {GPU.name}'s {peak:.0f} TFLOP/s)"
        )
        if self.parameters < MOST_CPU_PARAMETERS:
            cpu_hours = gpu_hours * TRAINING_SHARE * GPU.operations / CPU_OPERATIONS
            lines.append(f"or up to {_format_amount(cpu_hours)} hours of two CPU cores")
        return lines

    def _describe_memory(self, parameters: float) -> str:
        content = "weights, gradients and Adam's moments"
        copies = 4
        if self.recipe.model.peft is not None:
            content = "the weights"
            copies = 1
        gigabytes = parameters * self.weight_bytes * copies / 1e9
        count = f"{parameters:,.0f}"
        if parameters >= 1e7:
            count = f"{parameters / 1e9:.3g} billion"
        return f"{count} parameters: {_format_amount(gigabytes)} GB of GPU memory for {content}, then activations"

    def describe_uncounted(self) -> list[str]:
        """Say which questions were not counted so far."""
        lines = []
        for split, tasks in sorted(self.uncounted.items()):
            lines.append(f"not counted: {split} questions of {', '.join(sorted(tasks))}")
        return lines


def _format_amount(amount: float) -> str:
    """Format an amount, never as zero.

    >>> _format_amount(1234.5), _format_amount(0.25), _format_amount(0.0001)
    ('1,234', '0.25', '0.01')
    """
    if amount >= 1:
        return f"{amount:,.0f}"
    return f"{max(amount, 0.01):.2f}"
