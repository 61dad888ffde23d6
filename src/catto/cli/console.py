"""What can be known to fail before a model, torch or a large file is loaded.

What the shell offers after a Tab: recipes, methods and tasks by name. Where nothing fits it offers files.

What the commands share: printing, refusing, a progress bar, numbers as people read them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from catto.recipe import Recipe
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from catto.problems import shortened

if TYPE_CHECKING:
    from rich.table import Table


# ---- checks


# Below this many answers bootstrap intervals are too narrow, and a fit follows single rows.
FEW = 30
# Seeds go to NumPy and torch, which take 64 bits at most.
MOST_SEED = 2**32 - 1


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which pass every range."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def writable_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    _check_parents(option, path, path)


def writable_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written."""
    if path.is_dir():
        refuse(f"{option}: {path} is a folder, expected a file")
    if path.exists() and not path.is_file():
        refuse(f"{option}: {path} is not a regular file")
    if path.exists() and not os.access(path, os.W_OK):
        refuse(f"{path}: no permission to write, needed for {option}")
    _check_parents(option, path, path.parent)


def _check_parents(option: str, path: Path, folder: Path) -> None:
    """Find the first folder that is there: what is missing below it is made there."""
    place = next(one for one in (folder, *folder.parents, Path()) if one.exists() or one.is_symlink())
    if not place.is_dir():
        refuse(f"{place}: not a folder, needed for {option} {path}")
    if not os.access(place, os.W_OK | os.X_OK):
        refuse(f"{place}: no permission to write, needed for {option} {path}")


def needs(package: str, extra: str, what: str) -> None:
    """Refuse what a package is missing for, and name the extra that brings it."""
    if find_spec(package) is None:
        refuse(f"{what} needs {package}: pip install 'catto[{extra}]'")


def server_url(option: str, url: str) -> None:
    """Refuse what is no address of a server."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        refuse(f"{option}: expected an address such as http://localhost:8000/v1, got {url!r}")


def places(source: str, recipe: Recipe) -> None:
    """Refuse a recipe whose files, models or server cannot be there, before its first stage runs."""
    from catto.engines.places import check_model, is_hub_id
    from catto.experiment.steps import task_of
    from catto.problems import DataError
    from catto.tasks.loading import find
    from catto.tasks.witnesses import generate

    teacher = recipe.teacher
    try:
        for name, block in recipe.tasks.items():
            where = f"tasks.{name}"
            if name == "witnesses" and block.path is None:
                generate("train", 0, seed=0, **block.knobs())
            else:
                find(task_of(name, block), block.files, block.data_dir)
        where = "model.path"
        if recipe.model.path is not None:
            check_model(recipe.model.path)
        where = "teacher.model"
        if teacher.source == "transformers":
            check_model(teacher.model or "")
        where = "teacher.responses"
        responses = teacher.responses or ""
        if teacher.source == "responses" and not Path(responses).exists() and not is_hub_id(responses):
            raise DataError(responses, None, "no such file or folder, and not a hub id, which is owner/name")
    except (DataError, ValueError) as error:
        refuse(f"{source}: {where}: {error}")
    if teacher.source == "server":
        server_url(f"{source}: teacher.base_url", teacher.base_url or "")
    if recipe.evaluation.engine == "vllm":
        needs("vllm", "vllm", f"{source}: evaluation.engine vllm")


def warn_few(rows: int, source: Path, what: str) -> None:
    """Say that numbers of so few answers tell little."""
    if rows < FEW:
        answers = "1 answer" if rows == 1 else f"{rows} answers"
        warn(f"{source}: only {answers}; below {FEW} {what}")


# ---- completing


def recipes(incomplete: str) -> list[str]:
    """The shipped recipes that begin so."""
    from catto.recipe_file import shipped

    return _beginning(shipped(), incomplete)


def methods(incomplete: str) -> list[str]:
    """The methods that begin so."""
    from catto.methods import METHODS

    return _beginning(METHODS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """The tasks that begin so."""
    from catto.tasks import TASKS

    return _beginning(TASKS, incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


# ---- console


# A path or two, and a message that is bounded itself.
LONGEST = 1200


def refuse(message: str) -> NoReturn:
    """Say in one line on stderr why nothing was done, and leave with exit code 2."""
    warn(message)
    sys.exit(2)


def warn(message: str) -> None:
    """Say one short line on stderr."""
    typer.echo(f"catto: {shortened(message, LONGEST)}", err=True)


def say(message: str) -> None:
    """Print plain text, whatever brackets it holds."""
    typer.echo(message)


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def table(title: str, *columns: str) -> Table:
    """Start a table: the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place == 0 else "right")
    return made


def print_table(made: Table) -> None:
    """Print a table on stdout as wide as the terminal."""
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(made)


def number(value: float, percent: bool, signed: bool = False) -> str:
    """Write a value: per cent with one digit, else four digits; a dash where it is undefined."""
    if not isfinite(value):
        return "-"
    scaled, digits = (100 * value, 1) if percent else (value, 4)
    return f"{scaled:{'+' if signed else ''}.{digits}f}"


def span(low: float, high: float, percent: bool, signed: bool = False) -> str:
    """Write an interval: `1.9 to 4.4`."""
    if not (isfinite(low) and isfinite(high)):
        return "-"
    return f"{number(low, percent, signed)} to {number(high, percent, signed)}"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call at each step; the bar stands on stderr, and only in a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn(title), BarColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
