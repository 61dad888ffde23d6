"""A row of any file to a question, by a map that says which field is which. Benchmarks and users' files share it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from string import ascii_uppercase
from typing import Any, Literal, get_args

from catto.problems import DataError, listed, locating, nested, parse_json
from catto.tasks.splits import Draft

LETTERS = tuple(ascii_uppercase)
ANSWER = "answer line"  # the field that a line of a file of answers becomes
Raw = Mapping[str, Any]
Style = Literal["label", "index", "index1", "text", "boolean"]
MEANING: dict[Style, str] = {
    "label": "an option's label",
    "index": "an index from 0",
    "index1": "an index from 1",
    "text": "an option's text",
    "boolean": "true or false",
}
PLACE = r"\{([^{}]+)\}"  # of a field in a template
# Options and answers, in lower case -> what they say.
_BOOLEAN = {"yes": "true", "true": "true", "1": "true", "no": "false", "false": "false", "0": "false"}


def lookup(raw: Raw, name: str) -> Any:
    """The value of a field by its name, also a nested one; ValueError where it is missing or null."""
    if (value := nested(raw, name)) is None:
        raise ValueError(f"{name}: missing")
    return value


def text(raw: Raw, name: str) -> str:
    """A field that must be text."""
    value = lookup(raw, name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, got {type(value).__name__}")
    return value


def texts(name: str, value: object) -> tuple[str, ...]:
    """The value of the field `name`, which must be a list of texts; numbers become texts."""
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of texts, got {type(value).__name__}")
    if other := [item for item in value if type(item) not in (str, int, float) or item != item]:
        kind = type(other[0]).__name__ if other[0] == other[0] else "nan"
        raise ValueError(f"{name}: expected a list of texts, got a list with {kind}")
    return tuple(map(str, value))


@dataclass(frozen=True)
class FieldMap:
    r"""Which field of a row is which; a field inside another is `outer.inner`.

    question: one field; a template such as "{passage}\n{question}"; or several fields by the names that a prompt shows.
    options: a field with a list of texts, a list of objects with `label` and `text`, an object of two such lists or of
    label -> text; several columns; or "yes|no", the same for every row.
    answer: its field. A list of 0 and a single 1, or one of the columns of `options`, marks the answer itself.
    labels: the field of the options' labels, or the labels themselves in the order of the options; letters otherwise.
    style: what the answer is; None: what fits all rows (`settled`).

    >>> colours = FieldMap("stem", "choices", "key", style="index")
    >>> colours({"stem": "Which?", "choices": ["red", "blue"], "key": 1})
    Draft(fields={'question': 'Which?'}, options=('red', 'blue'), gold=1, id=None, group=None)
    """

    question: str | Mapping[str, str]
    options: str | tuple[str, ...]
    answer: str
    labels: str | tuple[str, ...] | None = None
    id: str | None = None
    group: str | None = None
    style: Style | None = None
    count: int | None = None  # options of every row; None: 2 to 26
    skip: tuple[str, ...] = ()  # answers that mean that there is none: such rows are left out

    @cached_property
    def constant(self) -> tuple[str, ...]:
        """The options that all rows share; empty where each row has its own."""
        options = self.options.split("|") if isinstance(self.options, str) else ()
        return tuple(map(str.strip, options)) if len(options) > 1 else ()

    @cached_property
    def names(self) -> frozenset[str]:
        """The outermost fields that it reads."""
        question = [self.question] if isinstance(self.question, str) else list(self.question.values())
        inner = [name for part in question for name in (re.findall(PLACE, part) or [part])]
        columns = () if self.constant else [self.options] if isinstance(self.options, str) else self.options
        labels = self.labels if isinstance(self.labels, str) else None
        names = (*inner, *columns, self.answer, labels, self.id, self.group)
        return frozenset(name.split(".")[0] for name in names if name is not None)

    def __call__(self, raw: Raw) -> Draft | str:
        """Turn a row into a draft, or return the reason to leave it out."""
        labels, options = self._choices(raw)
        golds = self._golds(raw, labels, options, (self.style or "label",))
        if golds is None:
            return "no_gold_label"
        (gold,) = golds.values()
        question = {"question": self.question} if isinstance(self.question, str) else self.question
        fields = {
            name: re.sub(PLACE, lambda match: text(raw, match[1]), field) if "{" in field else text(raw, field)
            for name, field in question.items()
        }
        if not any(value.strip() for value in fields.values()):
            raise ValueError(f"{' and '.join(question.values())} is empty")
        key, group = (None if name is None else str(lookup(raw, name)) for name in (self.id, self.group))
        return Draft(fields, options, gold, key, group)

    def settled(self, rows: Iterable[tuple[str, int, Raw]]) -> tuple[FieldMap, DataError | None]:
        """Give the map the style that fits the answers of all rows (file, number, fields): DataError where none does.

        Where several fit and mean different options, the error returned says so. Labels that the rows give themselves
        come before other styles.
        """
        styles, own_labels = get_args(Style), self.labels is not None
        apart: dict[tuple[Style, Style], tuple[str, int, str]] = {}  # two styles -> the first row where they differ
        for file, number, raw in rows:
            with locating(file, number):
                labels, options = self._choices(raw)
                golds = self._golds(raw, labels, options, styles)
            if golds is None:
                continue
            styles, own_labels = tuple(golds), own_labels or labels is not None
            for first, second in combinations(golds, 2):
                if golds[first] != golds[second]:
                    said = f"{self.answer} {lookup(raw, self.answer)!r} may be {MEANING[first]} or {MEANING[second]}"
                    apart.setdefault((first, second), (file, number, said))
        if own_labels and "label" in styles:
            return replace(self, style="label"), None
        doubts = (
            DataError(file, number, f"{said}, and no row decides which: state answer {first} or answer {second}")
            for (first, second), (file, number, said) in apart.items()
            if {first, second} <= {*styles}
        )
        return replace(self, style=styles[0]), next(doubts, None)

    def _choices(self, raw: Raw) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The row's own labels, None where it has none, and the texts of its options."""
        labels: object = None
        shown = self.options if isinstance(self.options, str) else "+".join(self.options)
        if self.constant:
            options = self.constant
        elif isinstance(self.options, tuple):
            columns = list(self.options)
            while self.count is None and columns and raw.get(columns[-1], 0) in (None, ""):
                columns.pop()  # a row with fewer options leaves the last columns empty
            options = texts(shown, [lookup(raw, name) for name in columns])
        else:
            value = lookup(raw, self.options)
            if isinstance(value, str) and value.startswith(("[", "{")):  # a list in a cell of a table
                try:
                    value = parse_json(value)
                except ValueError as error:
                    raise ValueError(f"{shown}: {error}") from None
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                value = {name: [item.get(name) for item in value] for name in ("label", "text")}
            if isinstance(value, dict):
                if isinstance(value.get("text"), list):
                    labels, value = value.get("label"), value["text"]
                else:  # label -> text, or text -> 0 or 1
                    labels = None if self.answer == self.options else list(value)
                    value = list(value) if labels is None else list(value.values())
            options = texts(self.options, value)
        if isinstance(self.labels, str):
            labels = lookup(raw, self.labels)
        if len(options) != self.count if self.count else not 2 <= len(options) <= len(LETTERS):
            expected = self.count or f"2 to {len(LETTERS)}"
            raise ValueError(f"{shown}: expected {expected} options, got {len(options)}")
        if self.count is None and not all(map(str.strip, options)):
            raise ValueError(f"{shown}: an option is empty")
        if labels is None or labels == [None] * len(options):
            return None, options
        named = tuple(label.strip() for label in texts(f"labels of {shown}", labels))
        if len({*named}) != len(options):
            raise ValueError(f"{shown}: expected {len(options)} different labels, got {listed(named)}")
        return named, options

    def _golds(
        self, raw: Raw, labels: tuple[str, ...] | None, options: tuple[str, ...], styles: Sequence[Style]
    ) -> dict[Style, int] | None:
        """What the answer means in each style that fits it: the index of an option. None: a row without an answer."""
        if isinstance(self.options, tuple) and self.answer in self.options[: len(options)]:
            return dict.fromkeys(styles, self.options.index(self.answer))
        value = lookup(raw, self.answer)
        if isinstance(value, dict | list):
            marks = list(value.values()) if isinstance(value, dict) else value
            if len(marks) != len(options) or marks.count(1) != 1 or marks.count(0) != len(marks) - 1:
                raise ValueError(f"{self.answer}: expected a 1 for the right one of {len(options)} options, else 0")
            return dict.fromkeys(styles, marks.index(1))
        key = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
        if key in self.skip:
            return None
        golds: dict[Style, int] = {}
        for style in styles:
            names = self._names(style, labels, options)
            name = _BOOLEAN.get(key.lower(), key) if style == "boolean" else key
            if name not in names and labels is None and style == "label":
                name = key.upper()
            if name in names:
                golds[style] = names.index(name)
            if len(styles) == 1 and names.count(name) > 1:
                raise ValueError(f"{self.answer} {value!r} is the text of more than one option")
        if not golds:
            expected = listed(self._names(styles[0], labels, options))
            more = ", nor an option's text or index" if len(styles) == len(MEANING) else ""
            raise ValueError(f"{self.answer} {value!r} is not one of {expected}{more}")
        return golds

    def _names(self, style: Style, labels: tuple[str, ...] | None, options: tuple[str, ...]) -> tuple[str, ...]:
        """How an answer of the style names each option."""
        match style:
            case "label":
                known = self.labels if isinstance(self.labels, tuple) else self.constant or LETTERS
                return labels or known[: len(options)]
            case "text":
                return tuple(option.strip() for option in options)
            case "boolean":
                return tuple(_BOOLEAN.get(option.strip().lower(), option) for option in options)
        first = int(style == "index1")
        return tuple(map(str, range(first, first + len(options))))
