"""What the commands that run a recipe share: reading it, running stages under a display, telling what failed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli import completing
from catto.cli.checks import needs, places, writable_folder
from catto.cli.console import refuse, warn

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe

__all__ = [
    "OutOption",
    "RecipeArgument",
    "RepairOption",
    "RetryOption",
    "SetOption",
    "folder",
    "go",
    "one_task",
    "opened",
]

RecipeArgument = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped recipe.", autocompletion=completing.recipes)
]
OutOption = Annotated[Path | None, typer.Option(help="The experiment's folder.", show_default="runs/<name>")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: evaluation.bins=15. May stand several times.")
]
RepairOption = Annotated[
    bool, typer.Option("--repair", help="Run damaged stages again; the damaged folders are kept beside.")
]
RetryOption = Annotated[
    bool,
    typer.Option("--retry-refused", help="Ask what the teacher's server refused again, and redo what depends on it."),
]

# Progress bars and notices of libraries would tear the display apart.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def opened(source: str, overrides: Sequence[str] | None) -> Recipe:
    """Read a recipe with its overrides; a task that nobody knows or a seed without splits is told at once."""
    from catto.recipe import suggestion
    from catto.recipe_file import blamed, load
    from catto.tasks import TASKS
    from catto.tasks.rows import SEEDS

    recipe = load(source, overrides or ())
    for name, block in recipe.tasks.items():
        if name not in TASKS and block.path is None:
            known = ", ".join(TASKS)
            told = blamed(source, overrides or (), ("tasks", name))
            refuse(f"{told}: tasks.{name}: neither one of {known} nor given a path{suggestion(name, TASKS)}")
        # The embedded world is made from any seed; other splits are fixed by theirs.
        split_seeds = recipe.seeds if name == "witnesses" else TASKS[name].seeds if block.path is None else SEEDS
        for seed in recipe.seeds:
            if seed not in split_seeds:
                told = blamed(source, overrides or (), ("seeds",))
                refuse(f"{told}: seeds: {seed} is not one of {name}'s split seeds {', '.join(map(str, split_seeds))}")
    return recipe


def folder(recipe: Recipe, out: Path | None) -> Path:
    """Where the experiment lies; a place that cannot be written to is told before anything runs."""
    root = Path("runs") / recipe.name if out is None else out
    writable_folder("--out", root)
    return root


def one_task(recipe: Recipe, task: str | None) -> str:
    """The task that is meant: the one named, that of `train_on`, or the only one."""
    from catto.recipe import suggestion

    if task is None:
        task = recipe.train_on or next(iter(recipe.tasks))
        if recipe.train_on is None and len(recipe.tasks) > 1:
            refuse(f"--task: the recipe has several, name one of {', '.join(recipe.tasks)}")
    if task not in recipe.tasks:
        refuse(f"--task: {task} is not one of {', '.join(recipe.tasks)}{suggestion(task, recipe.tasks)}")
    return task


def go(
    source: str,
    recipe: Recipe,
    root: Path,
    goals: Sequence[Stage],
    retry_refused: bool = False,
    repair: bool = False,
) -> None:
    """Run what is missing; leave with exit code 1 where a stage failed, 130 where a person stopped it."""
    from catto.cli.display import shown
    from catto.experiment.retry import refused_stages, retry
    from catto.experiment.runner import run, set_damaged_aside

    places(source, recipe)
    for stage in set_damaged_aside(root, goals) if repair else ():
        warn(f"{stage.name}: damaged, is run again; the damaged folder ends in .damaged")
    _check_torch(root, goals)
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        with shown(root, goals) as display:
            outcome = retry(recipe, root, goals, display) if retry_refused else run(recipe, root, goals, display)
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from here")
        sys.exit(130)
    for stage, refused in refused_stages(root, goals):
        warn(f"{stage.name}: {len(refused)} requests were refused and are left out; --retry-refused asks again")
    if outcome.ok:
        return
    for problem, log in outcome.failed.items():
        warn(f"{problem}; its log: {log}")
    if outcome.blocked:
        warn(f"not run, since they need what failed: {len(outcome.blocked)} stages")
    sys.exit(1)


def _check_torch(root: Path, goals: Sequence[Stage]) -> None:
    """Tell at once, and not after the teacher was paid, that something is to be trained and cannot be."""
    from catto.experiment.stages import done, ordered

    trained = [stage.name for stage in ordered(list(goals)) if stage.kind == "train" and not done(root, stage)]
    if trained:
        needs("torch", "train", "training")
