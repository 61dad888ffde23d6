"""`catto recipe`: the recipes that come with the package."""

from __future__ import annotations

import shutil
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from catto.cli import completing
from catto.cli.console import refuse, say

__all__ = ["app"]

EXAMPLES = """
[bold]Examples[/bold]

  catto recipe list

  catto recipe show quickstart

  catto recipe copy quickstart mine.yaml
"""

app = typer.Typer(no_args_is_help=True, help="List, show and copy the shipped recipes.", epilog=EXAMPLES)

NameArgument = Annotated[
    str,
    typer.Argument(help="The recipe's name, as `catto recipe list` gives it.", autocompletion=completing.recipes),
]


@app.command("list", epilog="[bold]Example[/bold]\n\n  catto recipe list")
def names() -> None:
    """List the shipped recipes, each with the first sentence of its own comment."""
    from catto.recipe_file import shipped

    for name, path in shipped().items():
        say(f"{name:12s} {_about(path)}")


def _about(path: Path) -> str:
    """The first sentence of the comment at the top."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines).partition(". ")[0].rstrip(".")


@app.command("show", epilog="[bold]Example[/bold]\n\n  catto recipe show quickstart")
def show(name: NameArgument) -> None:
    """Print a recipe as it is written."""
    say(_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


@app.command("copy", epilog="[bold]Example[/bold]\n\n  catto recipe copy quickstart mine.yaml")
def copy(
    name: NameArgument,
    path: Annotated[Path | None, typer.Argument(help="Where it goes.", show_default="NAME.yaml")] = None,
) -> None:
    """Copy a recipe to change it; a file that is there is left alone."""
    found, path = _shipped(name), path or Path(f"{name}.yaml")
    if path.is_dir():
        path /= found.name
    if path.exists():
        refuse(f"{path}: is there already")
    shutil.copyfile(found, path)
    say(f"Wrote {path}: catto run {path}")


def _shipped(name: str) -> Path:
    from catto.recipe import suggestion
    from catto.recipe_file import shipped

    known = shipped()
    if name not in known:
        refuse(f"recipe {name}: not one of {', '.join(known)}{suggestion(name, known)}")
    return known[name]
