"""`catto teach`: the teacher's responses to the training questions, and the rows made from them."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from catto import teacher
from catto.cli.console import check_name, refusing, say
from catto.cli.data import AnswerOption, AnswersOption, FieldsOption, FileOption, task_of_recipe
from catto.cli.run import OutOption, RecipeArgument, RetryOption, SetOption, folder, go
from catto.experiment.attempts import folders
from catto.experiment.stages import done, place
from catto.experiment.steps import questions_of, read_questions

__all__ = ["teach"]


def teach(
    recipe: RecipeArgument,
    task: Annotated[str | None, Option(help="Only this task, or its YAML file.", show_default="all trained on")] = None,
    file: FileOption = None,
    fields: FieldsOption = None,
    answer: AnswerOption = None,
    answers: AnswersOption = None,
    out: OutOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what it would cost; ask nothing.")] = False,
    sets: SetOption = None,
    retry_refused: RetryOption = False,
) -> None:
    """Ask the teacher and write SFT, preference and outcome rows; an interrupted run resumes.

    Examples:
    catto teach quickstart
    catto teach mine.yaml --task snli --set teacher.concurrency=64
    catto teach mine.yaml --dry-run
    """
    from catto.experiment.graph import Graph, check_places, open_recipe

    task, overrides = task_of_recipe(sets, task, file, fields, answer, answers)
    read = open_recipe(recipe, overrides)
    check_places(recipe, read)
    root, graph = folder(read, out), Graph(read)
    if task is not None:
        check_name("--task", task, read.tasks)
    tasks = [name for name in (task, read.train_on) if name is not None][:1] or list(read.tasks)
    if dry_run:
        for name in tasks:
            stage = graph.responses(name)
            asked, begun = stage.needs["questions"], folders(root, stage)
            stored = place(root, stage) if done(root, stage) else begun[-1] if begun else None
            with refusing(place=f"{name}: "):
                path = place(root, asked) / "train.jsonl"
                questions = read_questions(path) if done(root, asked) else questions_of(asked.settings)[0]
                estimate = teacher.dry_run(questions, None, read.own_teacher, stored, retry_refused=retry_refused)
            for line in estimate.lines():
                say(f"{name}: {line}")
        return
    go(recipe, read, root, [graph.teacher(name) for name in tasks], retry_refused)
    for name in tasks:
        rows = place(root, graph.teacher(name))
        say(f"{name}: {rows}")
        for line in teacher.Yield.model_validate_json((rows / "yield.json").read_text(encoding="utf-8")).lines():
            say(f"  {line}")
