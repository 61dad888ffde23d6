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

__all__ = ["train"]


@expand_options
def train(
    recipe: RecipeArgument,
    questions: QuestionFileOptions,
    method: Annotated[str, Option(help=f"One of {', '.join(METHODS)}.", autocompletion=lambda: list(METHODS))],
    task: Annotated[
        str | None,
        Option(
            help="Task of the recipe, or a YAML file of a task.", show_default="the only task", rich_help_panel=INPUT
        ),
    ] = None,
    seed: Annotated[int | None, Seed(help="Random seed.", show_default="first of the recipe")] = None,
    budget: Annotated[Budget | None, Option(help="Training budget.", show_default="first of the recipe")] = None,
    processes: Annotated[
        int | None,
        Option(min=1, help="Number of processes (GPUs).", show_default="as in the recipe", rich_help_panel=ADVANCED),
    ] = None,
    config: Annotated[
        str | None,
        Option(help="ddp, fsdp2, zero2, zero3, or an Accelerate config file.", rich_help_panel=ADVANCED),
    ] = None,
    out: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Train one method of a recipe, and the models it starts from.

    If the recipe lists several learning rates, the best one on the validation questions is chosen.

    Examples:
    catto train quickstart --method dpo+catto
    catto train mine.yaml --method dpo --task snli --seed 1 --budget paper
    catto train mine.yaml --method dpo+catto --processes 8 --config fsdp2
    """
    from catto.pipeline.plan import Graph, open_recipe

    if strip_scaling(method) in set(METHODS) - {method}:
        refuse(f"--method: {method} only rescales the confidence of {strip_scaling(method)}: train that")
    check_name("--method", method, METHODS)
    named = override_task(sets, task, questions)
    task = named.name
    overrides = named.overrides
    launch = {"launch.processes": processes, "launch.config": config}
    overrides += [f"{name}={value}" for name, value in launch.items() if value is not None]
    read = open_recipe(recipe, overrides)
    if METHODS[method].stage == "base":
        refuse(f"--method: {method} is the given model itself, which is not trained")
    if METHODS[method].only_from not in (None, read.start):
        refuse(f"--method: {method} needs start: {METHODS[method].only_from}, and the recipe has start: {read.start}")
    if seed is None:
        seed = read.seeds[0]
    budget = budget or read.budgets[0]
    check_name("--seed", str(seed), [str(known) for known in read.seeds])
    check_name("--budget", budget, read.budgets)
    if task is None and read.train_on is None and len(read.tasks) > 1:
        refuse(f"--task: the recipe has several, name one of {', '.join(read.tasks)}")
    task = task or read.train_on or next(iter(read.tasks))
    check_name("--task", task, read.tasks)
    root = choose_folder(read, out)
    goal = Graph(read).plan_choice(task, seed, method, budget)
    run_missing(recipe, read, root, [goal])
    trained = resolve_choice(root, goal)
    say(f"{method} on {task}, seed {seed}, learning rate {trained.settings.learning_rate:g}")
    say(str(stage_dir(root, trained) / "model"))
