"""The neutral row that every dataset is turned into, and the table entry that says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from catto.records import Question, Split

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
SEEDS = (0, 1, 2, 3, 4)

Raw = Mapping[str, Any]
Files = Mapping[Split, str | Path | Sequence[str | Path]]


class RowError(ValueError):
    """A row that cannot be a question; the reader adds the file and the row number."""


@dataclass(frozen=True, slots=True)
class Row:
    """A question before its options are ordered. `gold` is an index, so equal option texts stay apart."""

    fields: dict[str, str]
    options: tuple[str, ...]
    gold: int
    id: str | None = None  # the source's own id; None where the release has none
    group: str | None = None  # rows of one group never stand in two parts cut from one file


@dataclass(frozen=True)
class Cut:
    """Cut the rows of one file into parts by seed: each share in rows, at most `most`; the rest goes to `rest`."""

    source: Split
    shares: Mapping[Split, float]
    rest: Split
    most: int | None = None

    @property
    def parts(self) -> tuple[Split, ...]:
        """The splits that come out of the file."""
        return (*self.shares, self.rest)


@dataclass(frozen=True)
class Task:
    """Where the questions of one task come from. `parse` returns the row, or the reason to leave it out."""

    name: str
    labels: tuple[str, ...]
    licence: str
    source: str
    parse: Callable[[Raw], Row | str] | None = None
    generate: Callable[[Split, int | None, int], Iterator[Question]] | None = None
    hub: str | None = None
    config: str | None = None
    revision: str | None = None  # None: the head of the hub's main branch
    hub_splits: Mapping[Split, str] = field(default_factory=dict)
    patterns: Mapping[Split, tuple[str, ...]] = field(default_factory=dict)  # the first that matches a file wins
    columns: tuple[str, ...] | None = None  # of a CSV file without a header
    # Where options are whole texts the gold one comes first in the source, so those are shuffled whatever they say.
    order: Literal["shuffled", "shuffled unless letters are named", "fixed"] = "shuffled unless letters are named"
    cut: Cut | None = None
    sample: int | None = 500  # questions in validation and in test; None keeps all
    seeds: tuple[int, ...] = SEEDS
    files: Files | None = None


def lookup(raw: Raw, name: str) -> Any:
    """The value of a field, `a.b` being b inside a; a missing or null one is a RowError."""
    value: Any = raw.get(name)
    if value is None and "." in name:
        value = raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise RowError(f"{name} is missing")
    return value


def text(raw: Raw, name: str) -> str:
    """A field that must be text."""
    value = lookup(raw, name)
    if not isinstance(value, str):
        raise RowError(f"{name}: expected text, got {type(value).__name__}")
    return value


def texts(raw: Raw, name: str) -> tuple[str, ...]:
    """A field that must be a list of texts."""
    value = lookup(raw, name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"{name}: expected a list of texts, got {type(value).__name__}")
    return tuple(value)


def position(raw: Raw, name: str, labels: Sequence[object]) -> int:
    """The index of a field's value among the labels that the source uses."""
    value = lookup(raw, name)
    for index, label in enumerate(labels):
        if value == label and type(value) is type(label):
            return index
    raise RowError(f"{name} {value!r} is not one of {', '.join(map(str, labels))}")
