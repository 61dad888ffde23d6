"""What the commands share: printing, refusing, a progress bar, numbers as people read them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from catto.problems import shortened

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["number", "print_json", "print_table", "progress", "refuse", "say", "span", "table", "warn"]


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
