"""`catto teach`: collect the teacher's responses to the training questions, and write the training rows.

If the report of the recipe measures held-out pairs, the teacher answers the validation questions too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from catto import teacher
from catto.cli.console import check_name, refuse_errors, say
from catto.cli.data import override_task
from catto.cli.options import INPUT, OUTPUT, QuestionFileOptions, expand_options
from catto.cli.run import OutOption, RecipeArgument, RetryOption, SetOption, choose_folder, run_missing
from catto.pipeline.attempts import attempt_folders
from catto.pipeline.kinds.questions import load_split, read_questions
from catto.pipeline.stage import Stage, is_done, stage_dir
from catto.recipe.settings import TeacherSettings
from catto.teacher.responses import Estimate

if TYPE_CHECKING:
    from catto.pipeline.plan import Graph

__all__ = ["teach"]


@expand_options
def teach(
    recipe: RecipeArgument,
    questions: QuestionFileOptions,
    task: Annotated[
        str | None,
        Option(
            help="Task of the recipe, or the YAML file of a task.",
            show_default="all training tasks",
            rich_help_panel=INPUT,
        ),
    ] = None,
    out: OutOption = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print the number of requests and tokens, and send nothing.", rich_help_panel=OUTPUT),
    ] = False,
    sets: SetOption = None,
    retry_refused: RetryOption = False,
) -> None:
    """Collect the teacher's responses and write SFT, preference and outcome rows.

    To resume an interrupted run, run the same command again.

    Examples:
    catto teach quickstart
    catto teach mine.yaml --task snli --set teacher.concurrency=64
    catto teach mine.yaml --dry-run
    """
    from catto.pipeline.plan import Graph, check_places, open_recipe

    recipe_task = override_task(sets, task, questions)
    opened = open_recipe(recipe, recipe_task.overrides)
    check_places(recipe, opened)
    root = choose_folder(opened, out)
    if recipe_task.name is not None:
        check_name("--task", recipe_task.name, opened.tasks)
    only_task = recipe_task.name or opened.train_on
    tasks = list(opened.tasks) if only_task is None else [only_task]
    goals = _plan_goals(Graph(opened), tasks)
    if dry_run:
        for title, goal in goals.items():
            responses_stage = goal.needs["responses"]
            with refuse_errors(place=f"{title}: "):
                estimate = _estimate_requests(root, responses_stage, opened.own_teacher, retry_refused=retry_refused)
            for line in estimate.lines():
                say(f"{title}: {line}")
        return
    run_missing(recipe, opened, root, list(goals.values()), retry_refused=retry_refused)
    for title, goal in goals.items():
        folder = stage_dir(root, goal)
        say(f"{title}: {folder}")
        row_counts = teacher.Yield.model_validate_json((folder / "yield.json").read_text(encoding="utf-8"))
        for line in row_counts.lines():
            say(f"  {line}")


def _plan_goals(graph: Graph, tasks: Sequence[str]) -> dict[str, Stage]:
    """Return the stages that write the rows of the tasks, by the title under which their results are printed.

    Each task has one stage for its training rows, and one for each seed whose held-out pairs the report measures.
    """
    goals: dict[str, Stage] = {}
    for task in tasks:
        goals[task] = graph.plan_teacher_rows(task)
        for seed, pairs_stage in graph.find_measured_pairs(task).items():
            goals[f"{task}, held-out pairs of seed {seed}"] = pairs_stage
    return goals


def _estimate_requests(root: Path, stage: Stage, settings: TeacherSettings, *, retry_refused: bool) -> Estimate:
    """Estimate the requests that a stage of responses would still send; nothing is sent.

    Args:
        root: The experiment's folder.
        stage: The stage.
        settings: Settings of the teacher.
        retry_refused: Whether refused requests would be sent again.

    Returns:
        The number of requests that are left, with estimates of their tokens.
    """
    if is_done(root, stage):
        stored: Path | None = stage_dir(root, stage)
    else:
        unfinished = attempt_folders(root, stage)
        stored = unfinished[-1] if unfinished else None  # the last one got furthest
    questions_stage = stage.needs["questions"]
    if is_done(root, questions_stage):
        questions = read_questions(stage_dir(root, questions_stage) / f"{stage.settings.split}.jsonl")
    else:
        questions, _counts = load_split(questions_stage.settings)
    # `source=None`: the teacher of the settings would be asked.
    return teacher.dry_run(questions, source=None, settings=settings, out=stored, retry_refused=retry_refused)
