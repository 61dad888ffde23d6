"""What is wrong with an input, in one short line: the place, what was expected, what was there instead."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

__all__ = [
    "MOST_CHARACTERS",
    "MOST_DEPTH",
    "TOO_DEEP",
    "DataError",
    "did_you_mean",
    "listed",
    "parse_json",
    "shortened",
    "validation_problem",
]

# A message is read in a terminal: what a file holds must not fill it.
MOST_CHARACTERS = 500
# Lists and objects inside each other; a record has four levels.
MOST_DEPTH = 64
TOO_DEEP = f"lists and objects stand more than {MOST_DEPTH} deep inside each other"
UNKNOWN = object()  # stands for an input that is not at hand

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40


class DataError(ValueError):
    """Bad input, told in one short line: `file row 17: field: what was expected`."""

    def __init__(self, source: str | Path, row: int | None, message: str) -> None:
        told = shortened(str(source))
        place = f"{told} row {row}" if row is not None else told
        super().__init__(f"{place}: {shortened(message)}")


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text on one line and without control characters; of a long one the beginning and the end.

    >>> shortened("a\\nb" + 20 * "c", most=12)
    'a bcc ...ccc'
    """
    if len(text) > 4 * most:  # joining and escaping 25 MB to keep 500 characters would take its time
        text = text[: 2 * most] + text[-2 * most :]
    line = " ".join(text.split())
    line = "".join(sign if sign.isprintable() else f"\\x{ord(sign):02x}" for sign in line)
    if len(line) <= most:
        return line
    tail = most // 4
    return f"{line[: most - tail - 4].rstrip()} ...{line[-tail:]}"


def listed(names: Sequence[object], most: int = 12) -> str:
    """Return names separated by commas, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(shortened(str(name), 60) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the end of a message, or nothing where no known word is close.

    >>> did_you_mean("bin", ["bins", "resamples"])
    '; did you mean bins?'
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def parse_json(text: str) -> Any:
    """Parse JSON, or raise ValueError in plain words. A key that stands twice is an error, not the last one's win.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: key 'a' stands twice in one object
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {place}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        if "digits" in str(error):  # Python's own limit on the conversion, in its own words
            raise ValueError("a whole number of more digits than can be read") from None
        raise
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    if "\\ud" in text or "\\uD" in text:
        _check_unicode(value)
    return value


def _check_depth(value: object) -> None:
    """Refuse what the parser still takes and a later walk over the value would not."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {_SHORT.repr(twice)} stands twice in one object")
    return made


# Made once: `json.loads` with options would make one a call, which doubles the time of a line.
_DECODER = json.JSONDecoder(object_pairs_hook=_pairs)


def _check_unicode(value: object) -> None:
    """Refuse half of a surrogate pair: it cannot be written, hashed or printed."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("text is not valid Unicode (half of a surrogate pair)") from None


def validation_problem(error: ValidationError, value: object = UNKNOWN) -> tuple[list[str], str]:
    """Return where the first problem of `value` lies, and what was expected and is there instead.

    pydantic names the members of a union in its places (`files.train.str`); only parts that exist in `value` are kept,
    and what the members expect is joined by `or`.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    place = _place(first, value)
    same = [problem for problem in problems if _place(problem, value) == place]
    messages = list(dict.fromkeys(_expected(problem) for problem in same))
    expected = [message.removeprefix("expected ") for message in messages if message.startswith("expected ")]
    joined = f"expected {' or '.join(expected)}"
    message = joined if len(expected) == len(messages) else messages[0]
    if first["loc"] and first["loc"][-1] == "[key]":
        return [shortened(part, 60) for part in place], f"{message} as the key"
    told = message if first["type"] in _SELF_EXPLAINING else f"{message}, got {_SHORT.repr(_at(value, place, first))}"
    return [shortened(part, 60) for part in place], told


# Their message says all: what is there would add nothing, or is the whole of the input.
_SELF_EXPLAINING = ("missing", "value_error", "extra_forbidden", "json_invalid")
_EXPECTED = {
    "missing": "missing",
    "extra_forbidden": "unknown key",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected a text",
    "string_unicode": "expected a text in valid Unicode",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a block of names and values",
    "model_type": "expected a block of names and values",
    "model_attributes_type": "expected a block of names and values",
    "none_required": "expected nothing",
}


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    bounds = {"greater_than_equal": ("ge", "of at least"), "greater_than": ("gt", "above"),
              "less_than_equal": ("le", "of at most"), "less_than": ("lt", "below")}  # fmt: skip
    if kind in bounds:
        name, words = bounds[kind]
        return f"expected a number {words} {context[name]:.15g}"
    if kind in ("too_short", "too_long"):
        word, count = ("least", context["min_length"]) if kind == "too_short" else ("most", context["max_length"])
        return f"expected at {word} {count} {'entry' if count == 1 else 'entries'}"
    if kind == "literal_error":
        return f"expected {context['expected'].replace(chr(39), '')}"
    return shortened(str(problem["msg"]).removeprefix("Value error, "))


def _place(problem: Any, value: object) -> tuple[str, ...]:
    """The parts of the problem's place that exist in the value, and the name of what is missing."""
    if value is UNKNOWN:
        return tuple(map(str, problem["loc"]))
    parts: list[str] = []
    for part in problem["loc"]:
        found = _inside(value, part)
        if found is _NOTHING:
            if problem["type"] == "missing":
                parts.append(str(part))
            break
        parts.append(str(part))
        value = found
    return tuple(parts)


_NOTHING = object()


def _inside(value: object, part: object) -> object:
    if isinstance(value, Mapping):
        return value.get(part, _NOTHING)
    if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
        return value[part]
    return _NOTHING


def _at(value: object, place: Sequence[str], problem: Any) -> object:
    """What stands at the place; pydantic's own input where it cannot be walked to."""
    if value is UNKNOWN:
        return problem["input"]
    for part in place:
        value = _inside(value, int(part) if isinstance(value, list | tuple) else part)
        if value is _NOTHING:
            return problem["input"]
    return value
