"""Rows of a dataset: a file, a folder of files, or a dataset of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from catto.engines.places import is_hub_id
from catto.problems import DataError
from catto.tasks.readers import SUFFIXES, kind, read_rows


class Row(NamedTuple):
    """One row, and where it stands (rows count from 1)."""

    place: str | Path
    number: int
    values: dict[str, Any]

    def error(self, message: str) -> DataError:
        """An error at this row."""
        return DataError(self.place, self.number, message)


def read_table(place: str) -> Iterator[Row]:
    """Yield the rows of a file, of a folder's files in order of name, or of a hub dataset's train split."""
    path = Path(place)
    if not path.exists() and not kind(path) and "/" in place and is_hub_id(place):
        yield from _hub(place)
        return
    files = sorted(file for file in path.iterdir() if kind(file)) if path.is_dir() else [path]
    if not files:
        raise DataError(path, None, f"no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        for number, values in read_rows(file):
            yield Row(file, number, values)


def _hub(name: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(name, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
    try:
        rows = load_dataset(name, split="train")
    except Exception as error:  # the hub's errors share no class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(name, None, f"neither a file nor a hub dataset within reach: {reason}") from None
    for number, values in enumerate(rows, 1):
        yield Row(name, number, dict(values))
