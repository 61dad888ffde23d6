"""The fields of a row of answers: which columns hold them, and how a cell is read."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, nan
from typing import Any, Literal

from catto.errors import find_field
from catto.records import LOGPROB_NOISE

Fields = Mapping[str, Any]
Format = Literal["auto", "catto", "lm-eval", "inspect", "helm", "openai", "uqlm"]
WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class ColumnNames:
    """Where a file holds what; `a.b` is field b inside a. `by` is the column that cuts the file into slices.

    prediction, gold None: `label` and `gold`. positive: the confidence is the probability of this label of two.
    question None: the first of QUESTION_COLUMNS that there is.
    """

    confidence: str = "confidence"
    correct: str = "correct"
    by: str | None = None
    prediction: str | None = None
    gold: str | None = None
    positive: str | None = None
    format: Format = "auto"
    length_normalised: bool = False
    question: str | None = None


def probability_of(name: str, fields: Fields) -> float:
    """Return a number in [0, 1], also from its text."""
    value = find_field(fields, name)
    try:
        number = nan if isinstance(value, bool) or (isinstance(value, str) and "_" in value) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not 0 <= number <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}{_number_hint(value, number)}")
    return number


def _number_hint(value: object, number: float) -> str:
    """Return a hint on a value that is no probability. number: what it was read as, nan if it was not."""
    text = str(value).strip()
    if not text:
        return "; leave such rows out"
    if 1 < number <= 100 or text.endswith("%"):
        return "; divide percentages by 100"
    if re.fullmatch(r"[-+]?\d*,\d+", text):
        return f"; decimal commas are not read: write {text.replace(',', '.')}"
    return ""


def truth_of(name: str, fields: Fields) -> bool:
    """Return a boolean, also from 0, 1 and the words of a CSV file."""
    value = find_field(fields, name)
    if isinstance(value, bool):
        return value
    word = WORDS.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if word is None:
        raise ValueError(f"{name}: expected true or false (or 1, 0, yes, no), got {reprlib.repr(value)}")
    return word


def text_of(name: str, fields: Fields) -> str:
    """Return the field as text; ids and labels may be written as numbers, 1 also as 1.0. An empty cell is none."""
    value = find_field(fields, name)
    if value is None or isinstance(value, dict | list | bytes) or value != value or not str(value).strip():
        raise ValueError(f"{name}: expected a text or a number, got {reprlib.repr(value)}")
    return _label(str(int(value) if isinstance(value, float) and value.is_integer() else value))


def _label(text: str) -> str:
    """A label as it is compared: without the white space around it, a whole number without its zeros."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text.strip())


def logprob_of(value: object, name: str) -> float:
    """Return a log-probability; rounding noise above 0 counts as 0.

    Args:
        value: What a file holds. Only a number is one; minus infinity is allowed.
        name: The field, for the message.

    Returns:
        A number of at most 0.

    Raises:
        ValueError: The value is a text, a boolean, NaN, or above the noise of float32.

    >>> logprob_of(1e-7, "logprob")
    0.0
    """
    expected = f"{name}: expected a log-probability of at most 0, got {reprlib.repr(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(expected)
    if not value <= LOGPROB_NOISE:  # NaN is not at most anything
        raise ValueError(expected)
    try:
        return min(float(value), 0.0)
    except OverflowError:  # a whole number of more than 308 digits
        return -inf


def logprobs_of(fields: Fields) -> dict[str, float]:
    """Return `label_logprobs`: label -> log-probability, finite and at most 0 (rounding noise counts as 0)."""
    logprobs = find_field(fields, "label_logprobs")
    if not isinstance(logprobs, dict) or not logprobs:
        raise ValueError(f"label_logprobs: expected an object label -> log-probability, got {reprlib.repr(logprobs)}")
    named: dict[str, float] = {}
    for label, value in logprobs.items():
        number = logprob_of(value, f"label_logprobs.{label}")
        if number == -inf:
            raise ValueError(f"label_logprobs.{label}: expected a finite number, got {reprlib.repr(value)}")
        named[_label(label)] = number
    if len(named) < len(logprobs):
        raise ValueError(f"label_logprobs: a label occurs twice among {', '.join(map(repr, logprobs))}")
    return named


def answer_of(name: str, fields: Fields) -> str | None:
    """Return the answer's label; None where nothing could be parsed, which is never right."""
    if name == "label" and "label" not in fields:
        logprobs = logprobs_of(fields)
        return max(logprobs, key=logprobs.__getitem__)
    value = find_field(fields, name)
    return None if value is None or (isinstance(value, str) and not value.strip()) else text_of(name, fields)


def answer_probability(name: str, fields: Fields) -> float:
    """Return the probability of the answer, the field `name`, in `label_logprobs`."""
    logprobs, answer = logprobs_of(fields), answer_of(name, fields)
    if answer not in logprobs:
        raise ValueError(f"label_logprobs: the answer {answer!r} is not one of {', '.join(logprobs)}")
    return exp(logprobs[answer])
