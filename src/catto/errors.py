"""Error messages about bad input: one short line that says where, what was expected, and the actual value."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json

# A message is read in a terminal; the content of a file must not fill it.
MOST_CHARACTERS = 500
# Maximum nesting depth of lists and objects; a record has four levels.
MOST_DEPTH = 64
TOO_DEEP = f"lists and objects are nested more than {MOST_DEPTH} deep"
UNKNOWN = object()  # stands for a validated value that is not available
# Characters that move the cursor, change colours or reverse letters in a terminal; line breaks and tabs stay.
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
        place = shorten_text(str(source))
        if row is not None:
            place = f"{place} row {row}"
        super().__init__(f"{place}: {shorten_text(message)}")


@contextmanager
def data_errors_at(
    source: str | Path, row: int | None = None, value: object = UNKNOWN, field: str = ""
) -> Iterator[None]:
    """Turn a ValueError into a DataError that says where the problem is; a DataError passes unchanged.

    Args:
        source: The file, or another name for the input.
        row: The row in the file.
        value: The value that pydantic validates inside the block; see `find_first_problem`.
        field: Text to put before the message, such as `notes: `.

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
        if isinstance(error, ValidationError):
            problem = describe_first_problem(error, value)
        else:
            problem = str(error)
        raise DataError(source, row, field + problem) from None


def shorten_text(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text on one line, with control characters escaped; the middle of a long text is cut out.

    Args:
        text: The text.
        most: Maximum length of the result in characters.

    Returns:
        The shortened text.

    >>> shorten_text("a\\nb" + 20 * "c", most=12)
    'a bcc ...ccc'
    """
    if len(text) > 4 * most:  # escaping 25 MB to keep 500 characters is slow
        text = text[: 2 * most] + text[-2 * most :]
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(map(_escape_unprintable, line))
    if len(line) <= most:
        return line
    tail_length = most // 4
    head_length = most - tail_length - 4
    head = line[:head_length].rstrip()
    tail = line[-tail_length:]
    return f"{head} ...{tail}"


def _escape_unprintable(character: str) -> str:
    if character.isprintable():
        return character
    return f"\\x{ord(character):02x}"


def escape_controls(text: str) -> str:
    """Escape control characters, so that text from a file or a server cannot drive the terminal.

    Line breaks and tabs stay. The escapes are those of JSON, so JSON text stays valid.

    >>> escape_controls("\\x1b[2J\\n")
    '\\\\u001b[2J\\n'
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def join_names(names: Sequence[object], most: int = 12) -> str:
    """Return names separated by commas, and how many more there are.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(shorten_text(str(name), 60) for name in names[:most])
    if len(names) <= most:
        return shown
    return f"{shown} and {len(names) - most} more"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the end of a message; empty if no known word is similar.

    >>> did_you_mean("bin", ["bins", "resamples"])
    '; did you mean bins?'
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def parse_json(text: str) -> Any:
    """Parse JSON; raise a ValueError with a plain message. A key that occurs twice in one object is an error.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: key 'a' occurs twice in one object
    """
    # pydantic's parser is several times as fast as Python's, but keeps the last of two equal keys. If the parsed
    # object has as many keys as the text has `":`, no duplicate was dropped. This needs colons right after the quotes.
    try:
        value = from_json(text)
    except ValueError:
        return _parse_strictly(text)
    has_space_before_colon = " :" in text or "\t:" in text or "\n:" in text or "\r:" in text
    if has_space_before_colon:
        return _parse_strictly(text)
    written_keys = text.count('":')
    # A nested object would add its own keys to `written_keys`. Most lines are flat, and this halves their time.
    is_flat = type(value) is dict and "[" not in text and len(value) == written_keys
    if is_flat or _count_keys(value) == written_keys:
        return value
    return _parse_strictly(text)


def _count_keys(value: Any, depth_left: int = MOST_DEPTH) -> int:
    """Count the keys of all objects; raise ValueError for nesting so deep that recursive code might fail on it."""
    if type(value) not in (dict, list):
        return 0
    if depth_left == 0:
        raise ValueError(TOO_DEEP)
    if type(value) is dict:
        count = len(value)
        items = value.values()
    else:
        count = 0
        items = value
    for item in items:
        if type(item) in (dict, list):  # `isinstance` with a union takes ten times as long
            count += _count_keys(item, depth_left - 1)
    return count


def _parse_strictly(text: str) -> Any:
    """Parse JSON with Python's parser, whose errors say what is wrong; `_DECODER` refuses duplicate keys."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno} {place}"
        reason = error.msg.removesuffix(" at")  # some of Python's messages end with "at"
        raise ValueError(f"not JSON: {reason} at {place}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        if "digits" in str(error):  # Python limits the digits of an integer that it converts
            raise ValueError("a whole number with more digits than can be read") from None
        raise
    _count_keys(value)  # raises if the value is nested too deeply
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # such text cannot be written, hashed or printed
        raise ValueError("text is not valid Unicode (half of a surrogate pair)") from None
    return value


def _build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        [(duplicate, _)] = counts.most_common(1)
        raise ValueError(f"key {_SHORT.repr(duplicate)} occurs twice in one object")
    return value


# Made once, because `json.loads` with options makes a new decoder for every call, which doubles the time per line.
_DECODER = json.JSONDecoder(object_pairs_hook=_build_unique_dict)


def describe_first_problem(error: ValidationError, value: object = UNKNOWN) -> str:
    """Describe the first problem of a pydantic error in one line.

    Args:
        error: The error.
        value: The value that was validated.

    Returns:
        The field, what was expected, and the actual value.
    """
    field_path, message = find_first_problem(error, value)
    other_problems = error.error_count() - 1
    if other_problems > 0:
        message = f"{message} (and {other_problems} more)"
    if not field_path:
        return message
    return f"{'.'.join(field_path)}: {message}"


def find_first_problem(error: ValidationError, value: object = UNKNOWN) -> tuple[list[str], str]:
    """Return the field of the first problem of `value`, and what is wrong with it.

    If a field may have several types, pydantic reports one problem for each type and adds the type to the path of the
    field, such as `files.train.str`. Here the path is `files.train`, since only parts that exist in `value` are kept.
    The problems of the field become one message: `expected a text or a list`.

    Args:
        error: The error.
        value: The value that was validated. If it is UNKNOWN, pydantic's path is kept as it is, and the message shows
            the input that pydantic reports.

    Returns:
        The path of the field, empty for the whole value, and a message.
    """
    problems = [_locate_problem(details, value) for details in error.errors(include_url=False)]
    # A misspelled key gives two problems: an unknown key and a missing one. The unknown key says more.
    unknown_keys = [problem for problem in problems if problem.kind == "extra_forbidden"]
    if unknown_keys and problems[0].kind == "missing":
        problems = unknown_keys
    first = problems[0]
    same_field = [problem for problem in problems if problem.field_path == first.field_path]
    expectation = _join_expectations([_describe_expectation(problem.details) for problem in same_field])
    message = _complete_message(expectation, first)
    return [shorten_text(part, 60) for part in first.field_path], message


class _LocatedProblem(NamedTuple):
    """A problem that pydantic reports, located in the validated value.

    Attributes:
        details: What pydantic says about the problem.
        field_path: The path of the field.
        actual: The value of the field; for a missing field, the value of the object around it.
    """

    details: Any
    field_path: tuple[str, ...]
    actual: object

    @property
    def kind(self) -> str:
        return str(self.details["type"])

    @property
    def is_about_key(self) -> bool:
        """Whether the problem is a key of a dict; pydantic then ends the location with `[key]`."""
        return bool(self.details["loc"][-1:] == ("[key]",))


def _join_expectations(messages: Iterable[str]) -> str:
    """Join "expected a" and "expected b" to "expected a or b"; if a message has a different form, return the first."""
    distinct = list(dict.fromkeys(messages))
    if not all(message.startswith("expected ") for message in distinct):
        return distinct[0]
    expectations = [message.removeprefix("expected ") for message in distinct]
    return f"expected {' or '.join(expectations)}"


def _complete_message(message: str, problem: _LocatedProblem) -> str:
    """Add the actual value to a message, or that a key is wrong; leave a message unchanged if it says enough."""
    is_from_our_validator = problem.kind == "value_error"
    if is_from_our_validator:
        return message
    if problem.is_about_key:
        return f"{message} as the key"
    if problem.kind in _SELF_EXPLAINING:
        return message
    return f"{message}, got {_SHORT.repr(problem.actual)}"


# Kinds of problems whose actual value would add nothing to the message, or would be the whole input.
_SELF_EXPLAINING = ("missing", "union_tag_not_found", "extra_forbidden", "json_invalid")
# pydantic's type of error -> our message.
_EXPECTED = {
    "missing": "missing",
    "union_tag_not_found": "missing",
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
    "greater_than_equal": "expected a number of at least {ge:.15g}",
    "greater_than": "expected a number above {gt:.15g}",
    "less_than_equal": "expected a number of at most {le:.15g}",
    "less_than": "expected a number below {lt:.15g}",
}


def _describe_expectation(details: Any) -> str:
    """Return our message for a problem that pydantic reports; without one, pydantic's own message."""
    kind = details["type"]
    context = details.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind].format(**context)
    if kind == "too_short":
        return f"expected at least {_count_entries(context['min_length'])}"
    if kind == "too_long":
        return f"expected at most {_count_entries(context['max_length'])}"
    if kind in ("literal_error", "union_tag_invalid"):
        choices = context.get("expected") or context["expected_tags"]
        return f"expected {choices}".replace("'", "")
    message = str(details["msg"])
    return shorten_text(message.removeprefix("Value error, "))


def _count_entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _locate_problem(problem: Any, value: Any) -> _LocatedProblem:
    """Follow pydantic's path through the value, and keep the parts that exist; the name of a missing field is kept too.

    If the value is UNKNOWN, all parts are kept, and the actual value is the input that pydantic reports.
    """
    location: tuple[str | int, ...] = problem["loc"]
    if value is UNKNOWN:
        return _LocatedProblem(problem, tuple(map(str, location)), problem["input"])
    is_about_union_tag = problem["type"].startswith("union_tag")
    if is_about_union_tag:  # pydantic's path ends at the object, so the name of its tag is added
        location = (*location, problem["ctx"]["discriminator"].strip("'"))
    actual = value
    parts: list[str] = []
    for part in location:
        try:
            actual = actual[part]
        except (KeyError, IndexError, TypeError):  # `part` is a type that pydantic added, or a missing field
            is_missing_field = part == location[-1] and _EXPECTED.get(problem["type"]) == "missing"
            if not is_missing_field:
                continue
        parts.append(str(part))
    return _LocatedProblem(problem, tuple(parts), actual)


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row; raise ValueError if it is missing.

    `a.b` is field b inside a, and `a.0` is the first entry of a list a. If a is a list, `a.b` lists b of every entry. A
    field that is itself named `a.b` takes precedence.

    >>> find_field({"choices": [{"text": "red"}, {"text": "blue"}]}, "choices.text")
    ['red', 'blue']
    """
    if name in fields:
        return fields[name]
    value: Any = fields
    try:
        for part in name.split("."):
            if isinstance(value, list):
                if part.isdecimal():
                    value = value[int(part)]
                else:
                    value = [entry[part] for entry in value]
            else:
                value = value[part]
    except (KeyError, IndexError, TypeError):
        hint = ""
        if fields:
            hint = f"{did_you_mean(name, fields)} (fields: {join_names(list(fields))})"
        raise ValueError(f"{name}: missing{hint}") from None
    return value
