"""`catto train`: train one model of a recipe."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from catto.cli.console import check_name, refuse, say
from catto.cli.data import override_task
from catto.cli.options import ADVANCED, INPUT, QuestionFileOptions, Seed, expand_options
from catto.cli.run import OutOption, RecipeArgument, SetOption, choose_folder, run_missing
from catto.methods import METHODS, Budget, strip_scaling
from catto.pipeline.stage import resolve_choice, stage_dir
from catto.recipe.settings import Recipe

__all__ = ["train"]


@expand_options
def train(
    recipe: RecipeArgument,
    questions: QuestionFileOptions,
    method: Annotated[
        str, Option(help=f"Method to train: {', '.join(METHODS)}.", autocompletion=lambda: list(METHODS))
    ],
    task: Annotated[
        str | None,
        Option(
            help="Task of the recipe, or the YAML file of a task.", show_default="the only task", rich_help_panel=INPUT
        ),
    ] = None,
    seed: Annotated[
        int | None, Seed(help="Random seed, one of those in the recipe.", show_default="the first one")
    ] = None,
    budget: Annotated[
        Budget | None, Option(help="Training budget, one of those in the recipe.", show_default="the first one")
    ] = None,
    processes: Annotated[
        int | None,
        Option(min=1, help="Number of processes (GPUs).", show_default="as in the recipe", rich_help_panel=ADVANCED),
    ] = None,
    config: Annotated[
        str | None,
        Option(help="Parallelism: ddp, fsdp2, zero2, zero3, or an Accelerate config file.", rich_help_panel=ADVANCED),
    ] = None,
    out: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Train one method of a recipe, including the models it starts from.

    If the recipe lists several learning rates, a model is trained with each, and the one that is best on the validation
    questions is chosen.

    Examples:
    catto train quickstart --method dpo+catto
    catto train mine.yaml --method dpo --task snli --seed 1 --budget paper
    catto train mine.yaml --method dpo+catto --processes 8 --config fsdp2
    """
    from catto.pipeline.plan import Graph, open_recipe

    _check_method_name(method)
    recipe_task = override_task(sets, task, questions)
    launch = {"launch.processes": processes, "launch.config": config}
    launch_overrides = [f"{name}={value}" for name, value in launch.items() if value is not None]
    opened = open_recipe(recipe, [*recipe_task.overrides, *launch_overrides])
    _check_method(method, opened)
    if seed is None:
        seed = opened.seeds[0]
    budget = budget or opened.budgets[0]
    check_name("--seed", str(seed), [str(known) for known in opened.seeds])
    check_name("--budget", budget, opened.budgets)
    task = _choose_task(opened, recipe_task.name)
    root = choose_folder(opened, out)
    goal = Graph(opened).plan_choice(task, seed, method, budget)
    run_missing(recipe, opened, root, [goal])
    trained = resolve_choice(root, goal)
    say(f"{method} on {task}, seed {seed}, learning rate {trained.settings.learning_rate:g}")
    say(str(stage_dir(root, trained) / "model"))


def _check_method_name(method: str) -> None:
    """Refuse an unknown method, and one such as `dpo+ts`, which rescales confidences but has no training of its own."""
    trained_method = strip_scaling(method)
    is_rescaled = trained_method != method and trained_method in METHODS
    if is_rescaled:
        refuse(f"--method: {method} only rescales the confidence of {trained_method}: train that")
    check_name("--method", method, METHODS)


def _check_method(method: str, recipe: Recipe) -> None:
    """Refuse a method that is not trained, or that needs a different start model than the recipe's."""
    if METHODS[method].stage == "base":
        refuse(f"--method: {method} is the given model itself, which is not trained")
    needed_start = METHODS[method].only_from
    if needed_start not in (None, recipe.start):
        refuse(f"--method: {method} needs start: {needed_start}, but the recipe has start: {recipe.start}")


def _choose_task(recipe: Recipe, named: str | None) -> str:
    """Return the named task, else the task that the recipe trains on, else its only task; refuse an unknown task."""
    if named is None and recipe.train_on is None and len(recipe.tasks) > 1:
        refuse(f"--task: the recipe has several, name one of {', '.join(recipe.tasks)}")
    task = named or recipe.train_on or next(iter(recipe.tasks))
    check_name("--task", task, recipe.tasks)
    return task
