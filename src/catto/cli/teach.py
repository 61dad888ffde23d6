"""`catto teach`: the teacher's responses to the training questions, and the rows made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli.console import places, refuse, say
from catto.cli.run import OutOption, RecipeArgument, RetryOption, SetOption, folder, go, opened

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe
    from catto.records import Question

__all__ = ["teach"]

EXAMPLES = """
[bold]Examples[/bold]

  catto teach quickstart

  catto teach mine.yaml --task snli --set teacher.concurrency=64

  catto teach mine.yaml --dry-run
"""


def teach(
    recipe: RecipeArgument,
    task: Annotated[str | None, typer.Option(help="Only this task.", show_default="all that are trained on")] = None,
    out: OutOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost; ask nothing.")] = False,
    sets: SetOption = None,
    retry_refused: RetryOption = False,
) -> None:
    """Ask the teacher and write SFT, preference and outcome rows; a run that was stopped goes on."""
    from catto.experiment.graph import Graph

    read = opened(recipe, sets)
    places(recipe, read)
    root, graph, tasks = folder(read, out), Graph(read), _tasks(read, task)
    if dry_run:
        for name in tasks:
            _estimate(read, root, name, graph.responses(name), retry_refused)
        return
    go(recipe, read, root, [graph.teacher(name) for name in tasks], retry_refused)
    for name in tasks:
        _show(root, name, graph.teacher(name))


def _tasks(recipe: Recipe, task: str | None) -> list[str]:
    from catto.problems import did_you_mean

    if task is not None and task not in recipe.tasks:
        refuse(f"--task: {task} is not one of {', '.join(recipe.tasks)}{did_you_mean(task, recipe.tasks)}")
    return [task] if task is not None else [recipe.train_on] if recipe.train_on is not None else list(recipe.tasks)


def _estimate(recipe: Recipe, root: Path, task: str, stage: Stage, retry_refused: bool) -> None:
    """Print what is still to be asked for one task."""
    from catto.experiment.stages import done, part, place
    from catto.teacher import dry_run

    stored = place(root, stage) if done(root, stage) else part(root, stage)
    try:
        questions = _questions(root, stage.needs["questions"])
        found = dry_run(questions, None, recipe.teacher, stored, retry_refused=retry_refused)
    except ValueError as error:
        refuse(f"{task}: {error}")
    for line in found.lines():
        say(f"{task}: {line}")


def _questions(root: Path, stage: Stage) -> list[Question]:
    from catto.experiment.stages import done, place
    from catto.experiment.steps import questions_of, read_questions

    if done(root, stage):
        return read_questions(place(root, stage) / "train.jsonl")
    return questions_of(stage.settings)[0]


def _show(root: Path, task: str, stage: Stage) -> None:
    from catto.experiment.stages import place
    from catto.teacher import Yield

    found = place(root, stage)
    say(f"{task}: {found}")
    for line in Yield.model_validate_json((found / "yield.json").read_text(encoding="utf-8")).lines():
        say(f"  {line}")
