"""Estimate what a plan needs before it runs: training tokens, GPU hours and requests to the teacher.

No model is loaded. Rows are assumed to be as long as the context, so the numbers of tokens are upper bounds.
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
    """Published peak numbers of a GPU.

    Attributes:
        name: Its name.
        operations: 16-bit operations per second.
        bandwidth: Memory bandwidth in bytes per second.
        memory: Memory in bytes.
    """

    name: str
    operations: float
    bandwidth: float
    memory: float


GPU = Card("A100", 312e12, 2.04e12, 80e9)
# The fraction of a GPU's peak operations that a well-tuned training reaches.
TRAINING_SHARE = 0.4
MAX_CPU_PARAMETERS = 2e9  # for larger models, no CPU hours are printed
# Operations/s of training on two CPU cores without bf16 instructions: 140 tokens/s with SmolLM2-135M.
CPU_OPERATIONS = 0.11e12
# The vocabulary of a model from scratch: about as many words as the questions of a generated task have.
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
        keys: Number of key heads times their width; the same for values.
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
        """Number of parameters of one layer."""
        # Attention has query, output, key and value matrices, the gated MLP has three, and there are two norms.
        return self.width * (2 * self.queries + 2 * self.keys + 3 * self.intermediate + 2)

    @property
    def table(self) -> int:
        """Number of parameters of the embedding; the head has as many."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model.

        >>> KNOWN_NETWORKS["Qwen/Qwen3-4B"].parameters
        4022458880
        """
        tables = 1 if self.tied else 2
        final_norm = self.width
        return self.layers * self.layer + self.table * tables + final_norm


KNOWN_NETWORKS = {"Qwen/Qwen3-4B": Network(36, 2560, 9728, 32 * 128, 8 * 128, 151_936, True)}


def read_network(model: ModelSettings) -> Network | None:
    """Return the shape of a recipe's model.

    It is read from the settings of a model from scratch, or else from config.json in the model's folder or in the Hub's
    cache. Without this file, it is looked up in `KNOWN_NETWORKS`.

    Returns:
        The shape; None if it is unknown, or if the model is not a dense decoder.
    """
    if model.scratch is not None:
        return _scratch_network(model.scratch)
    name = model.path or ""
    path = _find_config(name)
    if path is None:
        return KNOWN_NETWORKS.get(name)
    config = read_json(path)
    config = config.get("text_config", config)  # a model for text and images describes its decoder in this section
    is_mixture_of_experts = "num_experts_per_tok" in config
    if is_mixture_of_experts:
        return None
    try:
        return _parse_config(config)
    except KeyError:  # other model families use different names
        return None


def _scratch_network(scratch: ScratchModel) -> Network:
    """Return the shape of a model from scratch, which has as many key heads as attention heads."""
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
    """Return the path of config.json in a model's folder or in the Hub's cache; None if it is in neither."""
    path = Path(name) / "config.json"
    if path.is_file():
        return path
    if not is_hub_id(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def _parse_config(config: dict[str, Any]) -> Network:
    """Return the shape that a config.json of Transformers describes. Raise KeyError if an entry is missing."""
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
    """Read the number of parameters from a model's name; None if the name does not include it.

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
    """Return the group in which the plan lists a stage: its kind, with the method of a training stage."""
    if stage.kind == "train":
        return f"train {stage.method}"
    return stage.kind.replace("_", " ")


def stage_seconds(root: Path, stage: Stage) -> float | None:
    """Return how long a finished stage took; None if it is not finished. For a resumed training, all runs count."""
    folder = stage_dir(root, stage)
    if not folder.exists():
        return None
    seconds = float(read_done(folder)["seconds"])
    if stage.kind != "train":
        return seconds
    trained = float(read_json(folder / "training.json")["seconds"])
    return max(seconds, trained)


def resource_block(recipe: Recipe, stage: Stage) -> ResourceBlock:
    """Return the name of the block of the recipe's `resources` that applies to a stage."""
    if stage.kind == "responses" and recipe.teacher.source == "transformers":
        return "predict"
    return STAGE_KINDS[stage.kind].resources


def stage_resources(recipe: Recipe, stage: Stage, *, gpus: bool = True) -> Resources:
    """Return the resources that a stage requests from a cluster.

    Args:
        recipe: The recipe.
        stage: One of its stages.
        gpus: If the recipe gives no number of GPUs, whether to request one for each process that has a model.
    """
    name = resource_block(recipe, stage)
    block: Resources = getattr(recipe.resources, name)
    if block.gpus is not None:
        return block
    default_gpus = {"train": recipe.launch.processes, "predict": 1, "report": 0}[name]
    return block.model_copy(update={"gpus": default_gpus if gpus else 0})


# ---- the estimate

# Number of questions in each split of the tasks that are generated.
GENERATED_COUNTS = {"witnesses": witnesses.SIZES, "readings": readings.READING_COUNTS}


class PlanEstimate:
    """Estimates the questions, rows, tokens and requests of the stages of a recipe.

    Attributes:
        recipe: The recipe.
        network: The shape of its model; None if it is unknown.
        parameters: Number of parameters of the model; None if it is unknown.
        weight_bytes: Bytes per weight.
        uncounted: For each split, the tasks whose number of questions is unknown, so that they were counted as 0.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.network = read_network(recipe.model)
        self.parameters: float | None = parse_parameter_count(recipe.model.path or "")
        if self.network is not None:
            self.parameters = self.network.parameters
        self.weight_bytes = 2 if recipe.model.dtype == "bfloat16" else 4
        self.uncounted: dict[Split, set[str]] = defaultdict(set)

    @property
    def tokens_per_second(self) -> float:
        """Number of tokens that one GPU trains on per second.

        The forward pass takes 2 operations per parameter and token, the backward pass 4.
        """
        return TRAINING_SHARE * GPU.operations / (6 * (self.parameters or 1))

    def count_questions(self, stage: Stage[QuestionSettings]) -> int:
        """Count the questions of a stage.

        If it uses all questions of a task and their number is unknown, return 0 and add the task to `uncounted`.
        """
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
        """Return an upper bound for the tokens of a training stage.

        Every row is counted as long as the context: longer rows are dropped before training.
        """
        settings = stage.settings
        teacher = self.recipe.own_teacher
        per_question = teacher.n
        if settings.method.stage == "preference":
            per_question = teacher.pairs_per_question
        questions = self.count_questions(stage.needs["teacher"].needs["questions"])
        limits = (settings.pairs, settings.block.rows, questions * per_question)
        # A limit of None is no limit. If the number of questions is unknown, it is 0, which does not count either.
        rows_or_pairs = min((limit for limit in limits if limit), default=0)
        epochs: float = settings.block.trl.get("num_train_epochs", settings.epochs)
        return ceil(self.recipe.context * rows_or_pairs * self.count_rows(settings) * epochs)

    def count_rows(self, settings: TrainSettings) -> int:
        """Count the rows that are computed for each row or pair of a batch.

        A pair has two. If the method's calibration term learns from a stream of sampled responses, `rows_per_pair` of
        them are computed together with each pair.
        """
        if settings.method.stage != "preference":
            return 1
        if settings.method.stream == "none":
            return 2
        return 2 + self.recipe.outcome.rows_per_pair

    def count_requests(self, stage: Stage) -> int:
        """Count the responses that a stage generates or requests."""
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
        """Return lines that say what the missing training stages and the teacher need; empty if there are none."""
        stages = list(missing)
        self.uncounted.clear()
        lines = self._describe_trainings([stage for stage in stages if stage.kind == "train"])
        response_stages = [stage for stage in stages if stage.kind == "responses"]
        teacher = self.recipe.own_teacher
        if response_stages and teacher.source == "server":
            requests = sum(self.count_requests(stage) for stage in response_stages)
            millions = requests * teacher.max_tokens / 1e6
            lines.append(f"teacher: {requests:,} requests, up to {_format_amount(millions)} million generated tokens")
        return lines + self.describe_uncounted()

    def _describe_trainings(self, trainings: Sequence[Stage]) -> list[str]:
        """Return lines with the tokens of training stages and, if the model's size is known, memory and hours.

        Without training stages, the list is empty.
        """
        if not trainings:
            return []
        tokens = sum(self.count_training_tokens(stage) for stage in trainings)
        millions = max(tokens / 1e6, 1)  # fewer would be rounded to 0
        tokens_text = f"up to {millions:,.0f} million tokens, with rows as long as the context"
        lines = [f"{len(trainings)} training runs: {tokens_text}"]
        if self.parameters is None:
            return lines
        lines.append(self._describe_memory(self.parameters))
        gpu_hours = tokens / self.tokens_per_second / 3600
        peak = GPU.operations / 1e12
        lines.append(
            f"up to {_format_amount(gpu_hours)} GPU hours at {self.tokens_per_second:,.0f} tokens/s "
            f"({TRAINING_SHARE:.0%} of an {GPU.name}'s {peak:.0f} TFLOP/s)"
        )
        if self.parameters < MAX_CPU_PARAMETERS:
            gpu_operations = TRAINING_SHARE * GPU.operations
            cpu_hours = gpu_hours * gpu_operations / CPU_OPERATIONS
            lines.append(f"or up to {_format_amount(cpu_hours)} hours of two CPU cores")
        return lines

    def _describe_memory(self, parameters: float) -> str:
        """Return a line with the GPU memory that training needs before the activations."""
        content = "weights, gradients and Adam's moments"
        copies = 4  # of as many numbers as there are parameters: Adam has two moments
        if self.recipe.model.peft is not None:  # only an adapter is trained, which is small
            content = "the weights"
            copies = 1
        gigabytes = parameters * self.weight_bytes * copies / 1e9
        count = f"{parameters:,.0f}"
        if parameters >= 1e7:
            count = f"{parameters / 1e9:.3g} billion"
        return f"{count} parameters: {_format_amount(gigabytes)} GB of GPU memory for {content}, then activations"

    def describe_uncounted(self) -> list[str]:
        """Return lines that say which questions could not be counted so far."""
        lines = []
        for split, tasks in sorted(self.uncounted.items()):
            lines.append(f"not counted: {split} questions of {', '.join(sorted(tasks))}")
        return lines


def _format_amount(amount: float) -> str:
    """Format an amount for the plan; small amounts are rounded up to 0.01, not down to zero.

    >>> _format_amount(1234.5), _format_amount(0.25), _format_amount(0.0001)
    ('1,234', '0.25', '0.01')
    """
    if amount >= 1:
        return f"{amount:,.0f}"
    return f"{max(amount, 0.01):.2f}"
