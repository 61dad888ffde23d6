"""`catto teach`: the teacher's responses to the training questions, and the rows made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli.console import check_name, examples, refusing, say
from catto.cli.data import AnswerOption, AnswersOption, FieldsOption, FileOption, task_of_recipe
from catto.cli.run import OutOption, RecipeArgument, RetryOption, SetOption, folder, go

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe

__all__ = ["teach"]

EXAMPLES = examples(
    "catto teach quickstart",
    "catto teach mine.yaml --task snli --set teacher.concurrency=64",
    "catto teach mine.yaml --dry-run",
)


def teach(
    recipe: RecipeArgument,
    task: Annotated[
        str | None,
        typer.Option(help="Only this task, or a YAML file of one.", show_default="all that are trained on"),
    ] = None,
    file: FileOption = None,
    fields: FieldsOption = None,
    answer: AnswerOption = None,
    answers: AnswersOption = None,
    out: OutOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would cost; ask nothing.")] = False,
    sets: SetOption = None,
    retry_refused: RetryOption = False,
) -> None:
    """Ask the teacher and write SFT, preference and outcome rows; an interrupted run resumes."""
    from catto.experiment.graph import Graph, check_places, open_recipe
    from catto.experiment.stages import place
    from catto.teacher import Yield

    task, overrides = task_of_recipe(sets, task, file, fields, answer, answers)
    read = open_recipe(recipe, overrides)
    check_places(recipe, read)
    root, graph = folder(read, out), Graph(read)
    if task is not None:
        check_name("--task", task, read.tasks)
    tasks = [name for name in (task, read.train_on) if name is not None][:1] or list(read.tasks)
    if dry_run:
        for name in tasks:
            _estimate(read, root, name, graph.responses(name), retry_refused)
        return
    go(recipe, read, root, [graph.teacher(name) for name in tasks], retry_refused)
    for name in tasks:
        rows = place(root, graph.teacher(name))
        say(f"{name}: {rows}")
        for line in Yield.model_validate_json((rows / "yield.json").read_text(encoding="utf-8")).lines():
            say(f"  {line}")


def _estimate(recipe: Recipe, root: Path, task: str, stage: Stage, retry_refused: bool) -> None:
    """Print what is still to be asked for one task."""
    from catto.experiment.stages import done, part, place
    from catto.experiment.steps import questions_of, read_questions
    from catto.teacher import dry_run

    asked = stage.needs["questions"]
    stored = place(root, stage) if done(root, stage) else part(root, stage)
    with refusing(place=f"{task}: "):
        if done(root, asked):
            questions = read_questions(place(root, asked) / "train.jsonl")
        else:
            questions = questions_of(asked.settings)[0]
        estimate = dry_run(questions, None, recipe.teacher, stored, retry_refused=retry_refused)
    for line in estimate.lines():
        say(f"{task}: {line}")
