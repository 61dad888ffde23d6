"""`catto train`: train one model of a recipe."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from catto.cli.console import Seed, check_name, refuse, say
from catto.cli.data import AnswerOption, AnswersOption, FieldsOption, FileOption, task_of_recipe
from catto.cli.run import OutOption, RecipeArgument, SetOption, folder, go
from catto.methods import METHODS, Budget, unscaled
from catto.pipeline.stage import chosen, place

__all__ = ["train"]


def train(
    recipe: RecipeArgument,
    method: Annotated[str, Option(help=f"One of {', '.join(METHODS)}.", autocompletion=lambda: list(METHODS))],
    task: Annotated[str | None, Option(help="The task, or a YAML file of one.", show_default="the only one")] = None,
    file: FileOption = None,
    fields: FieldsOption = None,
    answer: AnswerOption = None,
    answers: AnswersOption = None,
    seed: Annotated[int | None, Seed(help="The seed.", show_default="the recipe's first")] = None,
    budget: Annotated[Budget | None, Option(help="How much it trains.", show_default="the recipe's first")] = None,
    processes: Annotated[
        int | None, Option(min=1, help="Processes of a training.", show_default="the recipe's")
    ] = None,
    config: Annotated[str | None, Option(help="Their layout: ddp, fsdp2, zero2, zero3, or Accelerate's file.")] = None,
    out: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Train one method and the models it starts from; of several learning rates the best is chosen.

    Examples:
    catto train quickstart --method dpo+catto
    catto train mine.yaml --method dpo --task snli --seed 1 --budget paper
    catto train mine.yaml --method dpo+catto --processes 8 --config fsdp2
    """
    from catto.pipeline.plan import Graph, open_recipe

    if unscaled(method) in set(METHODS) - {method}:
        refuse(f"--method: {method} only rescales the confidence of {unscaled(method)}: train that")
    check_name("--method", method, METHODS)
    task, overrides = task_of_recipe(sets, task, file, fields, answer, answers)
    launch = {"launch.processes": processes, "launch.config": config}
    overrides += [f"{name}={value}" for name, value in launch.items() if value is not None]
    read = open_recipe(recipe, overrides)
    if METHODS[method].stage == "base":
        refuse(f"--method: {method} is the given model itself, which is not trained")
    if METHODS[method].only_from not in (None, read.start):
        refuse(f"--method: {method} needs start: {METHODS[method].only_from}, and the recipe has start: {read.start}")
    seed, budget = read.seeds[0] if seed is None else seed, budget or read.budgets[0]
    check_name("--seed", str(seed), [str(known) for known in read.seeds])
    check_name("--budget", budget, read.budgets)
    if task is None and read.train_on is None and len(read.tasks) > 1:
        refuse(f"--task: the recipe has several, name one of {', '.join(read.tasks)}")
    task = task or read.train_on or next(iter(read.tasks))
    check_name("--task", task, read.tasks)
    root, goal = folder(read, out), Graph(read).chosen(task, seed, method, budget)
    go(recipe, read, root, [goal])
    trained = chosen(root, goal)
    say(f"{method} on {task}, seed {seed}, learning rate {trained.settings.learning_rate:g}")
    say(str(place(root, trained) / "model"))
