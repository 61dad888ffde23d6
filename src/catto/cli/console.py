"""What the commands share: options, printing, refusing, checks before anything heavy is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

from catto.errors import DataError, did_you_mean, escape_controls, shorten_text
from catto.recipe.settings import FEW_QUESTIONS
from catto.tasks import TASKS

# A path or two, and a message that is itself limited in length.
LONGEST = 1200
# Seeds go to NumPy and torch, which take at most 64 bits.
MOST_SEED = 2**32 - 1


def say(text: str) -> None:
    """Print a text on stdout. Brackets are not markup, and control characters of a file or a server are escaped."""
    typer.echo(escape_controls(text))


def refuse(message: str) -> NoReturn:
    """Print in one line on stderr why nothing was done, and exit with code 2."""
    warn(message)
    sys.exit(2)


@contextmanager
def refusing(*kinds: type[Exception], place: str = "") -> Iterator[None]:
    """Turn ValueError and others that the user can repair into a refusal that starts with `place`, or its own file."""
    errors: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except errors as error:
        refuse(f"{'' if isinstance(error, DataError) else place}{error}")


def warn(message: str) -> None:
    """Print one short line on stderr."""
    typer.echo(f"catto: {shorten_text(message, LONGEST)}", err=True)


def warn_few(count: int, source: Path | str, what: str, unit: str = "answer") -> None:
    """Warn that numbers from so few answers, or questions, are unreliable."""
    if count < FEW_QUESTIONS:
        warn(f"{source}: only {count} {unit}{'s' if count > 1 else ''}; below {FEW_QUESTIONS} {what}")


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    # What the stream itself escapes would not be JSON.
    only_ascii = str(sys.stdout.encoding).lower() != "utf-8"
    typer.echo(escape_controls(json.dumps(value, indent=2, ensure_ascii=only_ascii, allow_nan=False)))


def show_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column is text, which may wrap, the others are numbers; an empty row is a line."""
    table = Table(title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title = shorten_text(title)
    for place, column in enumerate(columns):
        table.add_column(escape_controls(column), justify="right" if place else "left", no_wrap=place > 0)
    for row in rows:
        if row:
            table.add_row(*map(escape_controls, row))
        else:
            table.add_section()
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as the terminal, and not so narrow that numbers are cut."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, 60)
    console.print(table)


def number(value: float, percent: bool, signed: bool = False) -> str:
    """Format a value: per cent with one digit, others with four; a dash where it is undefined.

    >>> number(0.1234, percent=True), number(0.1234, percent=False, signed=True), number(-1e-9, percent=True)
    ('12.3', '+0.1234', '0.0')
    """
    if not isfinite(value):
        return "-"
    scaled, digits = (100 * value, 1) if percent else (value, 4)
    return f"{scaled:{'+' if signed else ''}z.{digits}f}"


def span(ends: Any, percent: bool, signed: bool = False) -> str:
    """Format an interval, anything with `low` and `high`.

    >>> from catto.metrics.statistics import Interval
    >>> span(Interval(value=0.03, low=0.019, high=0.044, level=0.95), percent=True)
    '1.9 to 4.4'
    """
    if not (isfinite(ends.low) and isfinite(ends.high)):
        return "-"
    return f"{number(ends.low, percent, signed)} to {number(ends.high, percent, signed)}"


# ---- options --------------------------------------------------------------------------------------------------------


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which pass every range (a callback of options)."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def tasks() -> list[str]:
    """Return the names that the shell completes a task to."""
    return list(TASKS)


# Options with a number that is not whole, and with a seed.
Real = partial(Option, callback=finite)
Seed = partial(Option, min=0, max=MOST_SEED)
SeedOption = Annotated[int, Seed(help="Seed of the resamples.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON and nothing else; shares in 0 to 1.")]


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_name(option: str, name: str, known: Collection[str]) -> None:
    """Refuse an unknown name, and list the known ones."""
    if name not in known:
        refuse(f"{option}: {name} is not one of {', '.join(known)}{did_you_mean(name, known)}")


def needs(package: str, extra: str, what: str) -> None:
    """Refuse what a missing package is needed for, and name the extra that installs it."""
    if find_spec(package) is None:
        refuse(f"{what} needs {package}: pip install 'catto[{extra}]'")


def writable_folder(option: str, folder: Path, file: Path | None = None) -> None:
    """Refuse a folder that cannot be created or written to; `file` is what will be written to it."""
    existing = next(place for place in (folder, *folder.parents, Path()) if place.exists() or place.is_symlink())
    if not existing.is_dir():  # missing folders are created in the closest one that exists
        refuse(f"{existing}: not a folder, needed for {option} {file or folder}")
    if not os.access(existing, os.W_OK | os.X_OK):
        refuse(f"{existing}: no permission to write, needed for {option} {file or folder}")


def writable_file(option: str, path: Path, *suffixes: str, source: Path | None = None) -> None:
    """Refuse a file that cannot be written, is the source, or ends in none of the suffixes, where some are given."""
    if suffixes and path.suffix.lower() not in suffixes:
        refuse(f"{option}: {path} must end in {', '.join(suffixes)}")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        refuse(f"{path}: is the input: write {option} to another file")
    if path.exists() and not path.is_file():
        refuse(f"{option}: {path} is {'a folder' if path.is_dir() else 'not a regular file'}")
    if path.exists() and not os.access(path, os.W_OK):
        refuse(f"{path}: no permission to write, needed for {option}")
    writable_folder(option, path.parent, path)
