"""Checks of a recipe before anything runs: its tasks and seeds are known, and the files and models it names exist."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from catto.engines import check_model, check_server, is_hub_id
from catto.experiment.steps import task_of
from catto.problems import DataError, did_you_mean
from catto.recipe import Recipe
from catto.recipe_file import blamed, load
from catto.tasks import TASKS
from catto.tasks.benchmarks import SEEDS
from catto.tasks.loading import find
from catto.tasks.witnesses import generate

__all__ = ["check_places", "open_recipe"]


def open_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with its overrides; raise DataError for an unknown task or a seed that a task has no splits for.

    >>> open_recipe("quickstart", ["tasks={snl: null}"])
    Traceback (most recent call last):
    catto.problems.DataError: --set tasks={snl: null}: tasks.snl: neither one of mmlu, snli, ...; did you mean snli?
    """
    recipe = load(source, overrides)
    for name, block in recipe.tasks.items():
        if name not in TASKS and block.path is None:
            culprit, known = blamed(source, overrides, ("tasks", name)), ", ".join(TASKS)
            raise DataError(
                culprit, None, f"tasks.{name}: neither one of {known} nor given a path{did_you_mean(name, TASKS)}"
            )
        # The embedded world is generated from any seed; the splits of other tasks are fixed for a few seeds.
        seeds = recipe.seeds if name == "witnesses" else TASKS[name].seeds if block.path is None else SEEDS
        for seed in recipe.seeds:
            if seed not in seeds:
                culprit, known = blamed(source, overrides, ("seeds",)), ", ".join(map(str, seeds))
                raise DataError(culprit, None, f"seeds: {seed} is not one of {name}'s split seeds {known}")
    return recipe


def check_places(source: str, recipe: Recipe) -> None:
    """Raise DataError for a file, model or server that the recipe names and that cannot be there."""
    teacher = recipe.teacher
    try:
        for name, block in recipe.tasks.items():
            where = f"tasks.{name}"
            if name == "witnesses" and block.path is None:
                generate("train", 0, seed=0, **block.knobs())
            else:
                find(task_of(name, block), block.files, block.data_dir)
        where = "model.path"
        if recipe.model.path is not None:
            check_model(recipe.model.path)
        where = "teacher.model"
        if teacher.source == "transformers":
            check_model(teacher.model or "")
        where = "teacher.responses"
        responses = teacher.responses or ""
        if teacher.source == "responses" and not Path(responses).exists() and not is_hub_id(responses):
            raise DataError(responses, None, "no such file or folder, and not a hub id, which is owner/name")
        where = "teacher.base_url"
        if teacher.source == "server":
            check_server(teacher.base_url or "")
    except ValueError as error:
        raise DataError(source, None, f"{where}: {error}") from None
    if recipe.evaluation.engine == "vllm" and find_spec("vllm") is None:
        raise DataError(source, None, "evaluation.engine vllm needs vllm: pip install 'catto[vllm]'")
