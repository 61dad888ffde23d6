"""What is wrong with an input, in one short line: the place, what was expected, what was there instead."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

# A message is read in a terminal: what a file holds must not fill it.
MOST_CHARACTERS = 500
# Lists and objects inside each other; a record has four levels.
MOST_DEPTH = 64
TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"
UNKNOWN = object()  # an input that is not available
# What moves the cursor, changes colours or reverses the order of letters in a terminal; line breaks and tabs stay.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40


class DataError(ValueError):
    """Bad input, described in one short line.

    >>> print(DataError("answers.csv", 17, "confidence: expected a number"))
    answers.csv row 17: confidence: expected a number
    """

    def __init__(self, source: str | Path, row: int | None, message: str) -> None:
        place = shorten_text(str(source)) + (f" row {row}" if row is not None else "")
        super().__init__(f"{place}: {shorten_text(message)}")


@contextmanager
def data_errors_at(
    source: str | Path, row: int | None = None, value: object = UNKNOWN, field: str = ""
) -> Iterator[None]:
    """Turn a ValueError, also one of pydantic about `value`, into the DataError of this place; a DataError passes.

    >>> with data_errors_at("answers.csv", 17):
    ...     raise ValueError("confidence: expected a number")
    Traceback (most recent call last):
    catto.errors.DataError: answers.csv row 17: confidence: expected a number
    """
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        problem = first_problem(error, value) if isinstance(error, ValidationError) else str(error)
        raise DataError(source, row, field + problem) from None


def shorten_text(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text on one line and without control characters, a long one without its middle.

    >>> shorten_text("a\\nb" + 20 * "c", most=12)
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


def escape_controls(text: str) -> str:
    """Return the text with control characters as escapes: what a file or a server holds cannot drive a terminal.

    Line breaks and tabs stay. The escapes are those of JSON: a JSON text remains one.

    >>> escape_controls("\\x1b[2J\\n")
    '\\\\u001b[2J\\n'
    """
    return _CONTROLS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def join_names(names: Sequence[object], most: int = 12) -> str:
    """Return names separated by commas, and how many more there are.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(shorten_text(str(name), 60) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the end of a message, or nothing where no known word is close.

    >>> did_you_mean("bin", ["bins", "resamples"])
    '; did you mean bins?'
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def parse_json(text: str) -> Any:
    """Parse JSON, or raise ValueError in plain words. A key that occurs twice in an object is an error.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: key 'a' occurs twice in one object
    """
    # pydantic's parser is several times as fast as Python's and keeps the last of two equal keys. Every key ends in a
    # quote and a colon: a value with as many keys as there are such pairs of signs has lost none.
    try:
        value = from_json(text)
    except ValueError:
        return _strict(text)
    keys, spaced = text.count('":'), " :" in text or "\t:" in text or "\n:" in text or "\r:" in text
    # An object in a flat one that is not empty brings keys of its own; this halves the time of most lines.
    whole = type(value) is dict and "[" not in text and len(value) == keys
    return value if not spaced and (whole or _count_keys(value) == keys) else _strict(text)


def _count_keys(value: Any, left: int = MOST_DEPTH) -> int:
    """Count the keys of all objects; refuse more levels than `left`, which a later walk over the value may not take."""
    if type(value) not in (dict, list):
        return 0
    if left == 0:
        raise ValueError(TOO_DEEP)
    count, items = (len(value), value.values()) if type(value) is dict else (0, value)
    for item in items:
        if type(item) in (dict, list):  # `isinstance` of a union costs ten times as much
            count += _count_keys(item, left - 1)
    return count


def _strict(text: str) -> Any:
    """Parse JSON with Python's parser, look at every object's pairs, and put what is wrong into words."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        reason = error.msg.removesuffix(" at")  # some of Python's messages end in it
        raise ValueError(f"not JSON: {reason} at {place}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        if "digits" in str(error):  # Python's own limit on the conversion, in its own words
            raise ValueError("a whole number of more digits than can be read") from None
        raise
    _count_keys(value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # it could not be written, hashed or printed
        raise ValueError("text is not valid Unicode (half of a surrogate pair)") from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {_SHORT.repr(twice)} occurs twice in one object")
    return value


# Made once: `json.loads` with options would make one a call, which doubles the time of a line.
_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def first_problem(error: ValidationError, value: object = UNKNOWN) -> str:
    """Describe the first problem of a pydantic error in one line: field, what was expected, what is there."""
    place, message = validation_problem(error, value)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{'.'.join(place)}: {message}{more}" if place else f"{message}{more}"


def validation_problem(error: ValidationError, value: object = UNKNOWN) -> tuple[list[str], str]:
    """Return the place of the first problem of `value`, and what was expected and is there instead.

    pydantic names the members of a union in its places (`files.train.str`); only parts that exist in `value` are kept,
    and what the members expect is joined by `or`.
    """
    problems = [(problem, *_located(problem, value)) for problem in error.errors(include_url=False)]
    # A misspelled key is unknown, and the one that was meant is missing: the first says more.
    unknown = [problem for problem in problems if problem[0]["type"] == "extra_forbidden"]
    if unknown and problems[0][0]["type"] == "missing":
        problems = unknown
    first, place, actual = problems[0]
    messages = list(dict.fromkeys(_expected(problem) for problem, other, _ in problems if other == place))
    expected = [message.removeprefix("expected ") for message in messages if message.startswith("expected ")]
    message = f"expected {' or '.join(expected)}" if len(expected) == len(messages) else messages[0]
    if first["loc"][-1:] == ("[key]",) and first["type"] != "value_error":
        message = f"{message} as the key"
    elif first["type"] not in _SELF_EXPLAINING:
        message = f"{message}, got {_SHORT.repr(actual)}"
    return [shorten_text(part, 60) for part in place], message


# Their message says all: what is there would add nothing, or is the whole of the input.
_SELF_EXPLAINING = ("missing", "union_tag_not_found", "value_error", "extra_forbidden", "json_invalid")
_EXPECTED = {
    kind: message
    for kinds, message in {
        "missing union_tag_not_found": "missing",
        "extra_forbidden": "unknown key",
        "int_type int_parsing int_from_float int_parsing_size": "expected a whole number",
        "float_type float_parsing": "expected a number",
        "finite_number": "expected a finite number",
        "bool_type bool_parsing": "expected true or false",
        "string_type": "expected a text",
        "string_unicode": "expected a text in valid Unicode",
        "list_type tuple_type": "expected a list",
        "dict_type model_type model_attributes_type": "expected a block of names and values",
        "none_required": "expected nothing",
        "greater_than_equal": "expected a number of at least {ge:.15g}",
        "greater_than": "expected a number above {gt:.15g}",
        "less_than_equal": "expected a number of at most {le:.15g}",
        "less_than": "expected a number below {lt:.15g}",
    }.items()
    for kind in kinds.split()
}


def _expected(problem: Any) -> str:
    """What was expected, in the words of a message."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind].format(**context)
    if kind in ("too_short", "too_long"):
        word, count = ("least", context["min_length"]) if kind == "too_short" else ("most", context["max_length"])
        return f"expected at {word} {count} {'entry' if count == 1 else 'entries'}"
    if kind in ("literal_error", "union_tag_invalid"):
        return f"expected {context.get('expected') or context['expected_tags']}".replace("'", "")
    return shorten_text(str(problem["msg"]).removeprefix("Value error, "))


def _located(problem: Any, value: Any) -> tuple[tuple[str, ...], object]:
    """The parts of the problem's place that exist in the value, with the name of what is missing; and what is there."""
    location: tuple[str | int, ...] = problem["loc"]
    if value is UNKNOWN:
        return tuple(map(str, location)), problem["input"]
    if problem["type"].startswith("union_tag"):
        location = (*location, problem["ctx"]["discriminator"].strip("'"))
    parts: list[str] = []
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # the member of a union, or the name of what is missing
            if part != location[-1] or _EXPECTED.get(problem["type"]) != "missing":
                continue
        parts.append(str(part))
    return tuple(parts), value


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row; ValueError where it is missing.

    `a.b` is b inside a, `a.0` the first entry of a list a, and `a.b` of a list a is the list of b of every entry.

    >>> find_field({"choices": [{"text": "red"}, {"text": "blue"}]}, "choices.text")
    ['red', 'blue']
    """
    if name in fields:
        return fields[name]
    value: Any = fields
    try:
        for part in name.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() else [entry[part] for entry in value]
            else:
                value = value[part]
    except (KeyError, IndexError, TypeError):
        there = f"{did_you_mean(name, fields)} (fields: {join_names(list(fields))})" if fields else ""
        raise ValueError(f"{name}: missing{there}") from None
    return value
