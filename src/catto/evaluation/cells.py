"""Read one cell of anybody's row, or raise ValueError naming the field and what was expected."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any

Fields = Mapping[str, Any]

WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}


def logprobs_cell(fields: Fields) -> dict[str, float]:
    """Return `label_logprobs`: label -> log-probability, finite and at most 0 (float32 rounding of 1e-6 allowed)."""
    found = cell(fields, "label_logprobs")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"label_logprobs: expected an object label -> log-probability, got {reprlib.repr(found)}")
    for label, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and -inf < value <= 1e-6):  # a nan fails both
            raise ValueError(f"label_logprobs.{label}: expected a finite number <= 0, got {reprlib.repr(value)}")
    return found


def cell(fields: Fields, name: str) -> Any:
    """Return the field, which must be there; it may be null."""
    try:
        return fields[name]
    except KeyError:
        raise ValueError(f"{name}: missing") from None


def probability(name: str, value: object) -> float:
    """Return a number in [0, 1], also from its text."""
    number = _number(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}")
    if not 0 <= number <= 1:
        hint = "; divide percentages by 100" if 1 < number <= 100 else ""
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}{hint}")
    return float(number)


def _number(written: str) -> float | None:
    try:
        return float(written)
    except ValueError:
        return None


def truth(name: str, value: object) -> bool:
    """Return a boolean, also from 0, 1 and the words of a CSV file."""
    if isinstance(value, bool):
        return value
    found = WORDS.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if found is None:
        raise ValueError(f"{name}: expected true or false (or 1, 0, yes, no), got {reprlib.repr(value)}")
    return found


def text(fields: Fields, name: str) -> str:
    """Return the field as text; ids and labels may be written as numbers."""
    value = cell(fields, name)
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{name}: expected a text or a number, got {reprlib.repr(value)}")
    return str(value)


def known_column(name: str, columns: Collection[str]) -> str:
    """Return the name of a column that is there, or raise with a suggestion."""
    if name not in columns:
        raise ValueError(f"no column {did_you_mean(name, columns)}")
    return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say what is unknown, what may have been meant, and what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"{name!r}{f', did you mean {close[0]!r}?' if close else ''} (there is {', '.join(names)})"
