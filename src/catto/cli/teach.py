"""`catto teach`: collect the teacher's responses to the training questions, and write the training rows.

If the report of the recipe measures held-out pairs, the teacher answers the validation questions too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

    named = override_task(sets, task, questions)
    chosen = open_recipe(recipe, named.overrides)
    check_places(recipe, chosen)
    root = choose_folder(chosen, out)
    graph = Graph(chosen)
    if named.name is not None:
        check_name("--task", named.name, chosen.tasks)
    only_task = named.name or chosen.train_on
    tasks = list(chosen.tasks) if only_task is None else [only_task]
    goals: dict[str, Stage] = {}  # title of the printed lines -> stage that writes the rows
    for name in tasks:
        goals[name] = graph.plan_teacher_rows(name)
        for seed, pairs in graph.find_measured_pairs(name).items():
            goals[f"{name}, held-out pairs of seed {seed}"] = pairs
    if dry_run:
        for title, goal in goals.items():
            stage = goal.needs["responses"]
            with refuse_errors(place=f"{title}: "):
                estimate = _estimate_requests(root, stage, chosen.own_teacher, retry_refused=retry_refused)
            for line in estimate.lines():
                say(f"{title}: {line}")
        return
    run_missing(recipe, chosen, root, list(goals.values()), retry_refused=retry_refused)
    for title, goal in goals.items():
        rows = stage_dir(root, goal)
        say(f"{title}: {rows}")
        row_counts = teacher.Yield.model_validate_json((rows / "yield.json").read_text(encoding="utf-8"))
        for line in row_counts.lines():
            say(f"  {line}")


def _estimate_requests(root: Path, stage: Stage, settings: TeacherSettings, *, retry_refused: bool) -> Estimate:
    """Estimate the requests that a stage of responses would still send.

    Args:
        root: The experiment's folder.
        stage: The stage.
        settings: Settings of the teacher.
        retry_refused: Whether refused requests would be sent again.
    """
    if is_done(root, stage):
        stored: Path | None = stage_dir(root, stage)
    else:
        attempts = attempt_folders(root, stage)
        stored = attempts[-1] if attempts else None
    questions_stage = stage.needs["questions"]
    if is_done(root, questions_stage):
        questions = read_questions(stage_dir(root, questions_stage) / f"{stage.settings.split}.jsonl")
    else:
        questions, _ = load_split(questions_stage.settings)
    return teacher.dry_run(questions, None, settings, stored, retry_refused=retry_refused)
