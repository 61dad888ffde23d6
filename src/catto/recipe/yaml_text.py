"""Read YAML 1.2 texts that contain only what JSON can represent, with no key twice in a block."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from catto.errors import DataError, shorten_text

# A text of a recipe's size has fewer values, unless aliases of aliases multiply them.
MAX_VALUES = 2**20


def parse_yaml(text: str, source: str) -> Any:
    """Parse a YAML text.

    Args:
        text: The text, YAML 1.2: `1e-5` is a number, and `yes` is a text.
        source: Where the text is from, for error messages, such as a file.

    Returns:
        The value of the text: a dict with texts as keys, a list, a text, a finite number, a boolean or None. Everything
        in a dict or list is such a value too. An empty text is None.

    Raises:
        DataError: The text is not such YAML; the message is one line with the place in the text.

    >>> parse_yaml("rate: 1e-5", "recipe.yaml")
    {'rate': 1e-05}
    """
    try:
        value = YAML(typ="safe", pure=True).load(text)
        _check_plain(value, (), 0)  # the count that it returns is only for its own recursion
    except MarkedYAMLError as error:
        raise DataError(source, None, _describe_problem(error)) from None
    except RecursionError:
        raise DataError(source, None, "lists and blocks are nested too deeply") from None
    except (YAMLError, ValueError) as error:
        raise DataError(source, None, str(error)) from None
    return value


def _describe_problem(error: MarkedYAMLError) -> str:
    """Return the message of a YAML error with the line and column, if the library gives them."""
    problem = str(error.problem or error.context)
    if isinstance(error, DuplicateKeyError):
        # The library's message repeats both values, and one may be a secret.
        key = re.search(r'duplicate key "(.*?)" with value', problem)
        problem = f"key {key[1]!r} occurs twice" if key else "a key occurs twice"
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return problem
    return f"line {mark.line + 1} column {mark.column + 1}: {problem}"


def _check_plain(value: object, place: tuple[str, ...], count: int) -> int:
    """Raise ValueError for a value that JSON cannot represent: stages are keyed by the JSON of their settings.

    Args:
        value: The value to check, including everything in it.
        place: The keys that lead to the value; empty for the value of the whole text.
        count: Number of values that were checked before this one.

    Returns:
        The number of values that have been checked, including this one and everything in it.

    Raises:
        ValueError: A key is not a text, a number is not finite, a value is of another type, such as a date, or there
            are more than `MAX_VALUES` values.
    """
    count += 1
    if count > MAX_VALUES:
        raise ValueError("aliases repeat too many values; write them out")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{_name_place(place)}key {shorten_text(repr(key), 60)}: expected a text; quote it")
            count = _check_plain(item, (*place, key), count)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            count = _check_plain(item, (*place, str(number)), count)
    elif isinstance(value, int | float):  # also true and false
        if not isfinite(value):
            raise ValueError(f"{_name_place(place)}expected a finite number, got {value}")
    elif value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"{_name_place(place)}expected a text, a number, a list or a block, got a {kind}; quote it")
    return count


def _name_place(place: tuple[str, ...]) -> str:
    if not place:
        return ""
    return ".".join(place) + ": "
