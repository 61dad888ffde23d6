"""What the missing trainings of a plan and its teacher need. Nothing is loaded; tokens and hours are upper bounds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from catto.experiment.stages import Stage, TrainSettings
from catto.recipe import Recipe
from catto.tasks.witnesses import SIZES

__all__ = ["needed", "parameters"]

# Training takes 6 operations per parameter and token; a well-tuned run reaches about 40 % of what the GPU can do.
GPU, OPERATIONS, REACHED = "A100", 312e12, 0.4


def needed(recipe: Recipe, missing: Iterable[Stage]) -> list[str]:
    """Return lines on memory, hours and the teacher's requests; none where there is nothing left to train or ask."""
    stages, unknown = list(missing), defaultdict[str, set[str]](set)

    def questions(stage: Stage) -> int:
        """Count the questions that a stage reads; unknown where all of a task are taken."""
        settings = stage.needs["questions"].settings
        count = getattr(settings.block, settings.split) or (
            SIZES[settings.split] if settings.task == "witnesses" else 0
        )
        if not count:
            unknown[settings.split].add(settings.task)
        return count

    def rows(stage: Stage[TrainSettings]) -> int:
        """Bound the rows of an epoch: a pair counts twice, and the third stream on top of it."""
        settings, asked = stage.settings, questions(stage.needs["teacher"])
        if settings.method.stage != "preference":
            return settings.block.rows or asked * recipe.teacher.n
        pairs = settings.pairs or settings.block.rows or asked * recipe.teacher.pairs_per_question
        return pairs * (2 + (recipe.outcome.rows_per_pair if settings.method.stream != "none" else 0))

    trainings, lines = [stage for stage in stages if stage.kind == "train"], []
    if trainings:
        tokens = recipe.context * sum(rows(stage) * stage.settings.epochs for stage in trainings)
        lines = [
            f"{len(trainings)} trainings: up to {tokens / 1e6:,.0f} million tokens, with rows as long as the context"
        ]
        size = parameters(recipe.model.path or "")
        if size is not None:
            width = 2 if recipe.model.dtype == "bfloat16" else 4
            held = "the weights" if recipe.model.peft else "weights, gradients and Adam's moments"
            memory = size * width * (1 if recipe.model.peft else 4) / 1e9
            speed = REACHED * OPERATIONS / (6 * size)
            lines.append(
                f"{size / 1e9:g} billion parameters: {memory:,.0f} GB of GPU memory for {held}, then activations"
            )
            hours = f"{tokens / speed / 3600:,.0f} GPU hours at {speed:,.0f} tokens/s"
            lines.append(f"up to {hours} ({REACHED:.0%} of an {GPU}'s {OPERATIONS / 1e12:.0f} TFLOP/s)")
    asked = [stage for stage in stages if stage.kind == "responses" and recipe.teacher.source == "server"]
    if asked:
        requests = sum(questions(stage) * stage.settings.teacher.n for stage in asked)
        generated = requests * recipe.teacher.max_tokens / 1e6
        lines.append(f"teacher: {requests:,} requests, up to {generated:,.0f} million generated tokens")
    return lines + [
        f"not counted: {split} questions of {', '.join(sorted(tasks))}" for split, tasks in sorted(unknown.items())
    ]


def parameters(name: str) -> float | None:
    """Read the number of parameters off a model's name; None where it does not say.

    >>> parameters("Qwen/Qwen3-4B"), parameters("SmolLM2-135M-Instruct"), parameters("my-model")
    (4000000000.0, 135000000.0, None)
    """
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![a-zA-Z])", name, re.IGNORECASE)
    return float(found[1]) * {"B": 1e9, "M": 1e6}[found[2].upper()] if found else None
