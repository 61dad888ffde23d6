"""`catto teach`: the teacher's responses to the training questions, and the rows made from them.

Where the report of the recipe measures held-out pairs, the validation questions are asked too.
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
            help="Task of the recipe, or a YAML file of a task.",
            show_default="all training tasks",
            rich_help_panel=INPUT,
        ),
    ] = None,
    out: OutOption = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the number of requests and tokens; send nothing.", rich_help_panel=OUTPUT)
    ] = False,
    sets: SetOption = None,
    retry_refused: RetryOption = False,
) -> None:
    """Collect teacher responses and write SFT, preference and outcome rows.

    An interrupted run resumes.

    Examples:
    catto teach quickstart
    catto teach mine.yaml --task snli --set teacher.concurrency=64
    catto teach mine.yaml --dry-run
    """
    from catto.pipeline.plan import Graph, check_places, open_recipe

    chosen = override_task(sets, task, questions)
    task = chosen.name
    read = open_recipe(recipe, chosen.overrides)
    check_places(recipe, read)
    root = choose_folder(read, out)
    graph = Graph(read)
    if task is not None:
        check_name("--task", task, read.tasks)
    only_task = task or read.train_on
    tasks = list(read.tasks) if only_task is None else [only_task]
    goals: dict[str, Stage] = {}  # by the title of what is printed
    for name in tasks:
        goals[name] = graph.plan_teacher_rows(name)
        for seed, pairs in graph.find_measured_pairs(name).items():
            goals[f"{name}, held-out pairs of seed {seed}"] = pairs
    if dry_run:
        for title, goal in goals.items():
            stage = goal.needs["responses"]
            with refuse_errors(place=f"{title}: "):
                estimate = _estimate_requests(root, stage, read.own_teacher, retry_refused)
            for line in estimate.lines():
                say(f"{title}: {line}")
        return
    run_missing(recipe, read, root, list(goals.values()), retry_refused)
    for title, goal in goals.items():
        rows = stage_dir(root, goal)
        say(f"{title}: {rows}")
        for line in teacher.Yield.model_validate_json((rows / "yield.json").read_text(encoding="utf-8")).lines():
            say(f"  {line}")


def _estimate_requests(root: Path, stage: Stage, settings: TeacherSettings, retry_refused: bool) -> Estimate:
    """Count what a stage of responses would still ask."""
    asked = stage.needs["questions"]
    begun = attempt_folders(root, stage)
    stored = begun[-1] if begun else None
    if is_done(root, stage):
        stored = stage_dir(root, stage)
    if is_done(root, asked):
        questions = read_questions(stage_dir(root, asked) / f"{stage.settings.split}.jsonl")
    else:
        questions, _ = load_split(asked.settings)
    return teacher.dry_run(questions, None, settings, stored, retry_refused=retry_refused)
