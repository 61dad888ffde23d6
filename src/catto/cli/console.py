"""How commands print, warn and refuse, and the checks they make before anything heavy is loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import NoReturn, Protocol

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from catto.errors import DataError, did_you_mean, escape_controls, shorten_text
from catto.recipe.settings import FEW_QUESTIONS

# Long enough for one or two paths and the message of an error, which is shortened on its own.
MAX_MESSAGE_LENGTH = 1200
# In a narrower terminal, the numbers of a table would be cut off.
MIN_TABLE_WIDTH = 60


# ---- printing


def say(text: str) -> None:
    """Print text on stdout. Brackets are not markup; control characters from files or servers are escaped."""
    typer.echo(escape_controls(text))


def warn(message: str) -> None:
    """Print one short line on stderr."""
    typer.echo(f"catto: {shorten_text(message, MAX_MESSAGE_LENGTH)}", err=True)


def refuse(message: str) -> NoReturn:
    """Print one line on stderr that says why nothing was done, and exit with code 2."""
    warn(message)
    sys.exit(2)


@contextmanager
def refuse_errors(*kinds: type[Exception], place: str = "") -> Iterator[None]:
    """Turn errors that the user can fix into one line and exit code 2.

    Args:
        kinds: Exceptions to catch in addition to ValueError.
        place: Start of the line, such as `--task: `. A DataError names its own file instead.
    """
    errors: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except DataError as error:
        refuse(str(error))
    except errors as error:
        refuse(f"{place}{error}")


def warn_few(count: int, source: Path | str, consequence: str, unit: str = "answer") -> None:
    """Warn if there are too few answers or questions for reliable numbers.

    Args:
        count: Number of answers or questions.
        source: Where they come from.
        consequence: What too few of them lead to, such as `intervals are too narrow`.
        unit: Singular noun for what is counted.
    """
    if count >= FEW_QUESTIONS:
        return
    noun = unit if count == 1 else f"{unit}s"
    warn(f"{source}: only {count} {noun}; below {FEW_QUESTIONS}, {consequence}")


def print_json(value: object) -> None:
    """Print one JSON document on stdout."""
    # In other encodings, the stream would escape characters in a way that JSON does not allow.
    only_ascii = str(sys.stdout.encoding).lower() != "utf-8"
    document = json.dumps(value, indent=2, ensure_ascii=only_ascii, allow_nan=False)
    typer.echo(escape_controls(document))


def show_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table.

    Args:
        title: Printed above the table; empty for none.
        columns: Names of the columns. The first column contains text and may wrap; the others contain numbers.
        rows: Cells of each row. A row without cells is not printed: it separates two sections of the table.
    """
    table = Table(title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title = shorten_text(title)
    for index, column in enumerate(columns):
        header = escape_controls(column)
        if index == 0:
            table.add_column(header, justify="left")
        else:
            table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row:
            table.add_row(*map(escape_controls, row))
        else:
            table.add_section()
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table on stdout. It is as wide as the terminal, but never so narrow that numbers are cut off."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_TABLE_WIDTH)
    console.print(table)


# ---- numbers


class HasBounds(Protocol):
    """Anything with a lower and an upper bound."""

    @property
    def low(self) -> float:
        """Lower bound."""

    @property
    def high(self) -> float:
        """Upper bound."""


def format_number(value: float, percent: bool, signed: bool = False) -> str:
    """Format a value: a percentage with one decimal, any other number with four, nan and infinity as a dash.

    Args:
        value: The value; a share in [0, 1] if it is printed as a percentage.
        percent: Whether to print a percentage.
        signed: Whether to print a plus sign before positive numbers.

    >>> format_number(0.1234, percent=True)
    '12.3'
    >>> format_number(0.1234, percent=False, signed=True)
    '+0.1234'
    >>> format_number(-1e-9, percent=True)
    '0.0'
    """
    if not isfinite(value):
        return "-"
    sign = "+" if signed else ""
    if percent:
        return f"{100 * value:{sign}z.1f}"  # "z" prints 0.0 instead of -0.0
    return f"{value:{sign}z.4f}"


def format_interval(bounds: HasBounds, percent: bool, signed: bool = False) -> str:
    """Format an interval like `format_number`; one without finite bounds becomes a dash.

    >>> from catto.metrics.intervals import Interval
    >>> format_interval(Interval(value=0.03, low=0.019, high=0.044, level=0.95), percent=True)
    '1.9 to 4.4'
    """
    if not (isfinite(bounds.low) and isfinite(bounds.high)):
        return "-"
    low = format_number(bounds.low, percent, signed)
    high = format_number(bounds.high, percent, signed)
    return f"{low} to {high}"


# ---- checks


def check_name(option: str, name: str, known: Collection[str]) -> None:
    """Refuse an unknown name and list the known ones."""
    if name not in known:
        refuse(f"{option}: {name} is not one of {', '.join(known)}{did_you_mean(name, known)}")


def require_package(package: str, extra: str, feature: str) -> None:
    """Refuse a feature if the package it needs is missing, and name the extra that installs it."""
    if find_spec(package) is None:
        refuse(f"{feature} needs {package}: pip install 'catto[{extra}]'")


def require_writable_folder(option: str, folder: Path, file: Path | None = None) -> None:
    """Refuse a folder that cannot be created or written to.

    Args:
        option: The option that names it, for the message.
        folder: The folder. It and its parents may be missing: they are created later.
        file: The file that will be written to the folder, for the message.
    """
    target = file or folder
    existing = _closest_existing(folder)
    if not existing.is_dir():
        refuse(f"{existing}: not a folder, but {option} {target} needs one here")
    if not os.access(existing, os.W_OK | os.X_OK):
        refuse(f"{existing}: no permission to write {option} {target} here")


def _closest_existing(folder: Path) -> Path:
    """Return the folder itself if it exists, otherwise its closest existing parent."""
    for candidate in (folder, *folder.parents):
        if candidate.exists() or candidate.is_symlink():
            return candidate
    return Path()


def require_writable_file(option: str, path: Path, *suffixes: str, source: Path | None = None) -> None:
    """Refuse an output file that cannot be written.

    Args:
        option: The option that names it, for the message.
        path: The file.
        suffixes: Allowed endings; any if empty.
        source: The input file, which must not be overwritten.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        refuse(f"{option}: {path} must end in {', '.join(suffixes)}")
    if path.exists():
        _check_existing_file(option, path, source)
    require_writable_folder(option, path.parent, path)


def _check_existing_file(option: str, path: Path, source: Path | None) -> None:
    if source is not None and source.exists() and path.samefile(source):
        refuse(f"{path}: is the input file; choose a different file for {option}")
    if path.is_dir():
        refuse(f"{option}: {path} is a folder")
    if not path.is_file():
        refuse(f"{option}: {path} is not a regular file")
    if not os.access(path, os.W_OK):
        refuse(f"{path}: no permission to write this file for {option}")
