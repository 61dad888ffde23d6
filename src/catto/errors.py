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
MAX_CHARACTERS = 500
MAX_NAME_CHARACTERS = 60  # of a field or another name in a message
_CUT_MARK = " ..."  # stands for the part of a text that was cut out
# Maximum nesting depth of lists and objects; a record has four levels.
MAX_DEPTH = 64
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"
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
        row: The row in the file; None if the input has no rows or the problem is not in a single row.
        value: The value that pydantic validates inside the block. It helps to name the field and to quote its value.
            UNKNOWN if the block validates nothing or if the value is not available.
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


def shorten_text(text: str, max_length: int = MAX_CHARACTERS) -> str:
    """Return the text on one line, with the middle of a long text replaced by ` ...`.

    Line breaks, tabs and other runs of white space become single spaces. Other characters that cannot be printed, such
    as those that control a terminal, are escaped.

    Args:
        text: The text.
        max_length: Maximum length of the result in characters, at least 5.

    Returns:
        The shortened text; empty if the text consists of white space.

    >>> shorten_text("a\\nb" + 20 * "c", max_length=12)
    'a bcc ...ccc'
    >>> shorten_text("red\\x1b")
    'red\\\\x1b'
    """
    # Only the two ends of a very long text are kept here, since escaping 25 MB to show 500 characters is slow. Each end
    # has twice the length of the result. So the place where they meet is cut out below, unless the ends are mostly
    # white space.
    end_length = 2 * max_length
    if len(text) > 2 * end_length:
        text = text[:end_length] + text[-end_length:]
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(map(_escape_unprintable, line))
    if len(line) <= max_length:
        return line
    tail_length = max_length // 4  # only a quarter: the beginning of a text says more than its end
    head_length = max_length - tail_length - len(_CUT_MARK)
    head = line[:head_length].rstrip()
    tail = line[-tail_length:]
    return f"{head}{_CUT_MARK}{tail}"


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


def join_names(names: Sequence[object], max_names: int = 12) -> str:
    """Return the first names, shortened and separated by commas, then the number of the others if there are any.

    >>> join_names(["a", "b", "c"], max_names=2)
    'a, b and 1 more'
    """
    shown = ", ".join(shorten_text(str(name), MAX_NAME_CHARACTERS) for name in names[:max_names])
    if len(names) <= max_names:
        return shown
    return f"{shown} and {len(names) - max_names} more"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the end of a message; empty if no known word is similar.

    >>> did_you_mean("bin", ["bins", "resamples"])
    '; did you mean bins?'
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def parse_json(text: str) -> Any:
    """Parse JSON, with plain messages for errors. A key that occurs twice in one object is an error.

    Raises:
        ValueError: The text is not JSON, repeats a key, is nested more than MAX_DEPTH deep, has a whole number with too
            many digits, or has text that is not valid Unicode.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: key 'a' occurs twice in one object
    """
    # pydantic's parser is several times as fast as Python's, but if a key is repeated, it silently keeps the last one.
    # So its result is used only if it has as many keys as the text has `":`: then no key was dropped. In all other
    # cases, `_parse_strictly` returns the value or says what is wrong. A string that contains `":` makes the number in
    # the text too high, which costs only the time to parse a valid text again: a dropped key is never missed.
    try:
        value = from_json(text)
    except ValueError:
        return _parse_strictly(text)
    has_space_before_colon = " :" in text or "\t:" in text or "\n:" in text or "\r:" in text
    if has_space_before_colon:  # such a key is not counted as `":`
        return _parse_strictly(text)
    written_keys = text.count('":')
    # `_count_keys` is not needed for a flat object, which halves the time of most lines. `len` counts only the keys of
    # the outermost object, so `is_flat` is False if nested objects have keys. Lists can be nested more than MAX_DEPTH
    # deep without any key, so a text with a list is left to `_count_keys`, which refuses such nesting.
    is_flat = type(value) is dict and "[" not in text and len(value) == written_keys
    if is_flat or _count_keys(value) == written_keys:
        return value
    return _parse_strictly(text)


def _count_keys(value: Any, depth_left: int = MAX_DEPTH) -> int:
    """Count the keys of all objects inside a value, and check how deeply it is nested.

    Args:
        value: A value of JSON.
        depth_left: How many levels of lists and objects are still allowed, including the value itself.

    Returns:
        The number of keys; 0 for a value that is neither a list nor an object.

    Raises:
        ValueError: Lists and objects are nested more than `depth_left` deep. Recursive code might fail on such a value.
    """
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
    """Parse JSON with Python's parser, which is slower than pydantic's, but refuses repeated keys (see `_DECODER`).

    Raises:
        ValueError: The text cannot be used, for one of the reasons that `parse_json` lists. The message says which.
    """
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
    """Describe the first problem of a pydantic error in one line, and count the other problems.

    Args:
        error: The error.
        value: The value that was validated; UNKNOWN if it is not available.

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
    return [shorten_text(part, MAX_NAME_CHARACTERS) for part in first.field_path], message


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
    """Return our message for a problem that pydantic reports, or pydantic's own message if we have none."""
    kind = details["type"]
    context = details.get("ctx", {})  # the numbers and names of the message, such as `max_length`
    if kind in _EXPECTED:
        return _EXPECTED[kind].format(**context)
    if kind == "too_short":
        return f"expected at least {_count_entries(context['min_length'])}"
    if kind == "too_long":
        return f"expected at most {_count_entries(context['max_length'])}"
    if kind in ("literal_error", "union_tag_invalid"):
        choices = context["expected"] if kind == "literal_error" else context["expected_tags"]
        return f"expected {choices}".replace("'", "")
    message = str(details["msg"])
    return shorten_text(message.removeprefix("Value error, "))  # pydantic's prefix for errors of our validators


def _count_entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _locate_problem(problem: Any, value: Any) -> _LocatedProblem:
    """Follow pydantic's path through the validated value to the field that has the problem.

    Of the path, only the parts that exist in the value are kept, and the name of a missing field. If the value is
    UNKNOWN, all parts are kept, and the actual value is the input that pydantic reports.

    Args:
        problem: What pydantic says about the problem.
        value: The whole value that was validated.
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
            is_about_missing_field = _EXPECTED.get(problem["type"]) == "missing"
            is_missing_field = is_about_missing_field and part == location[-1]
            if not is_missing_field:
                continue
        parts.append(str(part))
    return _LocatedProblem(problem, tuple(parts), actual)


def find_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of a row, which may be None; raise ValueError if the field is missing.

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
