"""The column names of a file of answers, and the functions that read its cells."""

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
TRUTH_OF_WORD = {
    "true": True,
    "yes": True,
    "1": True,
    "1.0": True,
    "false": False,
    "no": False,
    "0": False,
    "0.0": False,
}


@dataclass(frozen=True)
class ColumnNames:
    """The columns of a file of answers, and how to read them. A column `a.b` is field b inside field a.

    Attributes:
        confidence: Column with the probability of the answer.
        correct: Column that says whether the answer is right.
        by: Column whose values divide the file into slices; None if there are no slices.
        prediction: Column with the answer; None means `label`.
        gold: Column with the right answer; None means `gold`.
        positive: With two labels, the one whose probability is in the column `confidence`. None means that the column
            has the probability of the answer.
        format: The tool that wrote the file; `auto` recognises it by the first row.
        length_normalised: For logs of lm-evaluation-harness: whether to divide the log-likelihood of each choice by its
            number of characters.
        question: Column with the id of the question; None means the first of QUESTION_COLUMNS in the file.
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

    @property
    def has_default_confidence(self) -> bool:
        """Whether the confidence is in the default column, which readers of logs fill with the tool's own confidence.

        Naming the default column with `--confidence confidence` has the same effect as leaving out the option.
        """
        return self.confidence == "confidence"


def probability_of(name: str, fields: Fields) -> float:
    """Return a number in [0, 1], also if it is written as text; raise ValueError for anything else."""
    value = find_field(fields, name)
    number = _convert_number(value)
    if not 0 <= number <= 1:
        hint = _suggest_fix(value, number)
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}{hint}")
    return number


def _convert_number(value: Any) -> float:
    """Return the number in a cell, or nan if it does not contain one."""
    if isinstance(value, bool):
        return nan
    if isinstance(value, str) and "_" in value:  # only Python accepts 1_0 as a number
        return nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return nan


def _suggest_fix(value: object, number: float) -> str:
    """Suggest how to fix a value that is not a probability; empty if there is no suggestion.

    Args:
        value: The value in the file.
        number: The value as a number, nan if it is not one.
    """
    text = str(value).strip()
    if not text:
        return "; leave such rows out"
    if 1 < number <= 100 or text.endswith("%"):
        return "; divide percentages by 100"
    if re.fullmatch(r"[-+]?\d*,\d+", text):
        return f"; decimal commas are not read: write {text.replace(',', '.')}"
    return ""


def truth_of(name: str, fields: Fields) -> bool:
    """Return a boolean, also from 0, 1 and the words of a CSV file; raise ValueError for anything else."""
    value = find_field(fields, name)
    if isinstance(value, bool):
        return value
    truth = None
    if isinstance(value, str | int | float):
        word = str(value).strip().lower()
        truth = TRUTH_OF_WORD.get(word)
    if truth is None:
        raise ValueError(f"{name}: expected true or false (or 1, 0, yes, no), got {reprlib.repr(value)}")
    return truth


def text_of(name: str, fields: Fields) -> str:
    """Return an id or a label as text; numbers are accepted, and 1.0 becomes 1.

    Raises:
        ValueError: The field is missing, empty or nested.
    """
    value = find_field(fields, name)
    is_missing = value is None or value != value  # NaN is not equal to itself
    is_nested = isinstance(value, dict | list | bytes)
    if is_missing or is_nested or not str(value).strip():
        raise ValueError(f"{name}: expected a text or a number, got {reprlib.repr(value)}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _normalise_label(str(value))


def _normalise_label(text: str) -> str:
    """Return a label in the form used for comparisons: without surrounding white space, and with 1.0 written as 1."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text.strip())


def logprob_of(value: object, name: str) -> float:
    """Return a log-probability; rounding noise above 0 counts as 0.

    Args:
        value: The value in the file. It must be a number; minus infinity is allowed.
        name: The field, for error messages.

    Returns:
        A number of at most 0.

    Raises:
        ValueError: The value is not a number, or it exceeds 0 by more than the rounding noise of float32.

    >>> logprob_of(1e-7, "logprob")
    0.0
    """
    problem = f"{name}: expected a log-probability of at most 0, got {reprlib.repr(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(problem)
    if not value <= LOGPROB_NOISE:  # unlike `value > LOGPROB_NOISE`, also true for NaN
        raise ValueError(problem)
    try:
        return min(float(value), 0.0)
    except OverflowError:  # a negative whole number of more than 308 digits
        return -inf


def logprobs_of(fields: Fields) -> dict[str, float]:
    """Read the field `label_logprobs` of a row.

    Args:
        fields: The fields of the row.

    Returns:
        Label -> log-probability, finite and at most 0. Rounding noise above 0 counts as 0.

    Raises:
        ValueError: The field is missing or empty, a number is out of range, or two labels are equal. Labels are
            normalised first, so 1 and 1.0 are equal.
    """
    logprobs = find_field(fields, "label_logprobs")
    if not isinstance(logprobs, dict) or not logprobs:
        raise ValueError(f"label_logprobs: expected an object label -> log-probability, got {reprlib.repr(logprobs)}")
    normalised: dict[str, float] = {}
    for label, value in logprobs.items():
        number = logprob_of(value, f"label_logprobs.{label}")
        if number == -inf:
            raise ValueError(f"label_logprobs.{label}: expected a finite number, got {reprlib.repr(value)}")
        normalised[_normalise_label(label)] = number
    if len(normalised) < len(logprobs):
        raise ValueError(f"label_logprobs: a label occurs twice among {', '.join(map(repr, logprobs))}")
    return normalised


def answer_of(name: str, fields: Fields) -> str | None:
    """Return the label of the answer; None for an empty cell, which means that no answer could be parsed.

    If the row has no field `label`, the answer is the likeliest label in `label_logprobs`; in a tie, the first one.

    Args:
        name: The field with the answer; `label` unless the user named a different one.
        fields: The fields of the row.

    Raises:
        ValueError: The field is missing or nested, or `label_logprobs` is needed and cannot be read.
    """
    if name == "label" and "label" not in fields:
        logprobs = logprobs_of(fields)
        return max(logprobs, key=lambda label: logprobs[label])
    value = find_field(fields, name)
    is_blank = isinstance(value, str) and not value.strip()
    if value is None or is_blank:
        return None
    return text_of(name, fields)


def answer_probability(name: str, fields: Fields) -> float:
    """Return the probability of the answer in the field `name`, from `label_logprobs`.

    Raises:
        ValueError: The answer has no log-probability, or a field is missing.
    """
    logprobs = logprobs_of(fields)
    answer = answer_of(name, fields)
    if answer not in logprobs:
        raise ValueError(f"label_logprobs: the answer {answer!r} is not one of {', '.join(logprobs)}")
    return exp(logprobs[answer])
