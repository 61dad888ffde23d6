"""Turn a row of any file into a question, with a map that says which field is which.

Benchmarks and users' own files use the same kind of map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from string import ascii_uppercase
from typing import Any, Literal, NamedTuple, get_args

from catto.errors import DataError, data_errors_at, find_field, join_names, parse_json
from catto.tasks.splits import Draft

LETTERS = tuple(ascii_uppercase)
ANSWER = "answer line"  # the field that is added to a row if the answers are in a separate file
Raw = Mapping[str, Any]
# What an answer is. If several styles fit a file, the first of them in this order is used.
Style = Literal["label", "index", "index1", "text", "boolean"]
MEANING: dict[Style, str] = {
    "label": "an option's label",
    "index": "an index from 0",
    "index1": "an index from 1",
    "text": "an option's text",
    "boolean": "true or false",
}
PLACEHOLDER = r"\{([^{}]+)\}"  # a field in a template
# Options and answers in lower case -> the truth value they state.
_BOOLEAN = {"yes": "true", "true": "true", "1": "true", "no": "false", "false": "false", "0": "false"}


class SourceRow(NamedTuple):
    """A row: the name of its file, its number in that file from 1, and its fields."""

    file: str
    number: int
    fields: dict[str, Any]


# ---- fields of a row ------------------------------------------------------------------------------------------------


def get_field(raw: Raw, name: str) -> Any:
    """Return the value of a field, `outer.inner` for a nested one; ValueError if it is missing or null."""
    value = find_field(raw, name)
    if value is None:
        raise ValueError(f"{name}: missing")
    return value


def get_text(raw: Raw, name: str) -> str:
    """Return the value of a field that must be text."""
    value = get_field(raw, name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, got {type(value).__name__}")
    return value


def convert_texts(name: str, value: object) -> tuple[str, ...]:
    """Return the value of the field `name`, which must be a list of texts; numbers are converted to texts."""
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of texts, got {type(value).__name__}")
    for item in value:
        is_nan = item != item  # only NaN differs from itself
        if type(item) not in (str, int, float) or is_nan:
            item_kind = "nan" if is_nan else type(item).__name__
            raise ValueError(f"{name}: expected a list of texts, got a list with {item_kind}")
    return tuple(str(item) for item in value)


def fill_template(template: str, raw: Raw) -> str:
    """Put the row's fields into a template such as "{passage} {question}"; a bare name is the field itself."""
    if "{" not in template:
        return get_text(raw, template)
    return re.sub(PLACEHOLDER, lambda match: get_text(raw, match[1]), template)


def template_fields(template: str) -> list[str]:
    """Return the names of the fields in a template; a template without placeholders is itself a field name."""
    return re.findall(PLACEHOLDER, template) or [template]


def find_single_mark(marks: Sequence[object]) -> int | None:
    """Return the index of the only 1 among zeros; None if the marks are anything else."""
    if marks.count(1) != 1 or marks.count(0) != len(marks) - 1:
        return None
    return marks.index(1)


# ---- the map --------------------------------------------------------------------------------------------------------


class RowOptions(NamedTuple):
    """The options of one row: their labels (None if the row does not give any) and their texts."""

    labels: tuple[str, ...] | None
    texts: tuple[str, ...]


class InferredStyle(NamedTuple):
    """A field map with an answer style that fits all rows.

    Attributes:
        field_map: The map with that style.
        ambiguity: The error to raise if two styles fit all rows but mean different options in some row; None otherwise.
    """

    field_map: FieldMap
    ambiguity: DataError | None


class StyleConflict(NamedTuple):
    """A row whose answer means different options in two styles."""

    row: SourceRow
    first: Style
    second: Style


@dataclass(frozen=True)
class FieldMap:
    r"""Which field of a row is which; a nested field is written `outer.inner`.

    Attributes:
        question: One field; a template such as "{passage}\n{question}"; or several fields by the names that a prompt
            shows.
        options: A field with a list of texts, a list of objects with `label` and `text`, an object of two such lists or
            of label -> text; several columns; or "yes|no", the same for every row.
        answer: The field with the answer. It may contain a 1 for the right option and a 0 for every other, or be the
            column in `options` that always contains the right option.
        labels: The field with the labels of the options, or the labels themselves in the order of the options; None
            means letters.
        id: The field with the question's id.
        group: The field with the name of a row's group; all rows of a group go to the same split.
        style: What the answer is; None infers the style that fits all rows (`infer_style`).
        count: Number of options in every row; None allows 2 to 26.
        skip: Answers that mean that a row has no answer; such rows are left out.

    >>> colours = FieldMap("stem", "choices", "key", style="index")
    >>> draft = colours.parse_row({"stem": "Which?", "choices": ["red", "blue"], "key": 1})
    >>> draft.fields, draft.options, draft.gold
    ({'question': 'Which?'}, ('red', 'blue'), 1)
    """

    question: str | Mapping[str, str]
    options: str | tuple[str, ...]
    answer: str
    labels: str | tuple[str, ...] | None = None
    id: str | None = None
    group: str | None = None
    style: Style | None = None
    count: int | None = None
    skip: tuple[str, ...] = ()

    @cached_property
    def shared_options(self) -> tuple[str, ...]:
        """The options that all rows share; empty if each row has its own."""
        if not isinstance(self.options, str) or "|" not in self.options:
            return ()
        return tuple(option.strip() for option in self.options.split("|"))

    @cached_property
    def top_level_fields(self) -> frozenset[str]:
        """The fields of a row that the map reads; for a nested field, the outermost one."""
        names: list[str | None] = [self.answer, self.id, self.group]
        for template in self._question_templates().values():
            names.extend(template_fields(template))
        if isinstance(self.options, tuple):
            names.extend(self.options)
        elif not self.shared_options:
            names.append(self.options)
        if isinstance(self.labels, str):
            names.append(self.labels)
        return frozenset(name.split(".")[0] for name in names if name is not None)

    def _question_templates(self) -> Mapping[str, str]:
        """Return the templates for the parts of the question, by the names that a prompt shows."""
        if isinstance(self.question, str):
            return {"question": self.question}
        return self.question

    def parse_row(self, raw: Raw) -> Draft | str:
        """Turn a row into a draft. A map without a style reads the answer as a label.

        Returns:
            The draft, or `no_gold_label`, the reason to leave the row out, if its answer is one of `skip`.

        Raises:
            ValueError: A field is missing, the question is empty, or the options or the answer are not as expected.
        """
        options = self._read_options(raw)
        gold_by_style = self._match_answer(raw, options, styles=(self.style or "label",))
        if gold_by_style is None:
            return "no_gold_label"
        (gold,) = gold_by_style.values()  # only one style was tried
        templates = self._question_templates()
        fields = {name: fill_template(template, raw) for name, template in templates.items()}
        is_empty = not any(value.strip() for value in fields.values())
        if is_empty:
            raise ValueError(f"{' and '.join(templates.values())} is empty")
        question_id = None
        if self.id is not None:
            question_id = str(get_field(raw, self.id))
        group = None
        if self.group is not None:
            group = str(get_field(raw, self.group))
        return Draft(fields=fields, options=options.texts, gold=gold, id=question_id, group=group)

    def infer_style(self, rows: Iterable[SourceRow]) -> InferredStyle:
        """Find the answer style that fits all rows.

        A style says what the answers are: labels, indices or texts of options, or truth values (see `MEANING`). If
        several styles fit, it is the first of them in the order of `Style`, which begins with `label`. Without rows,
        every style fits. A row whose answer is one of `skip` fits every style.

        Args:
            rows: All rows of the files, or only the first ones.

        Returns:
            The map with that style. If several styles fit but mean different options in some row, also an error that
            says so. It is not raised here, since a caller that passes only the first rows may ignore it. There is no
            such error if the style is `label` and the map or a row gives labels: then the labels decide.

        Raises:
            DataError: No style fits all rows, or a row has no valid options or no answer.
        """
        fitting_styles: tuple[Style, ...] = get_args(Style)
        has_own_labels = self.labels is not None
        # Two styles -> the first row in which they mean different options.
        conflicts: dict[tuple[Style, Style], StyleConflict] = {}
        for row in rows:
            with data_errors_at(row.file, row.number):
                options = self._read_options(row.fields)
                gold_by_style = self._match_answer(row.fields, options, styles=fitting_styles)
            if gold_by_style is None:  # the answer is one of `skip`
                continue
            fitting_styles = tuple(gold_by_style)  # those that fit this row and all earlier ones
            if options.labels is not None:
                has_own_labels = True
            for first, second in combinations(fitting_styles, 2):
                if gold_by_style[first] != gold_by_style[second]:
                    conflicts.setdefault((first, second), StyleConflict(row, first, second))
        if has_own_labels and "label" in fitting_styles:
            return InferredStyle(replace(self, style="label"), ambiguity=None)
        ambiguity = self._find_ambiguity(conflicts.values(), fitting_styles)
        return InferredStyle(replace(self, style=fitting_styles[0]), ambiguity)

    def _find_ambiguity(
        self, conflicts: Iterable[StyleConflict], fitting_styles: tuple[Style, ...]
    ) -> DataError | None:
        """Return an error for the first conflict between two styles that fit all rows; None if there is none.

        Even if neither of the two is the style that was inferred, the answers are ambiguous: the inferred style then
        means a different option than at least one of the two.
        """
        for conflict in conflicts:
            both_fit_all_rows = conflict.first in fitting_styles and conflict.second in fitting_styles
            if both_fit_all_rows:
                return self._explain_conflict(conflict)
        return None

    def _explain_conflict(self, conflict: StyleConflict) -> DataError:
        row = conflict.row
        first = conflict.first
        second = conflict.second
        value = get_field(row.fields, self.answer)
        meanings = f"{self.answer} {value!r} may be {MEANING[first]} or {MEANING[second]}"
        request = f"state answer {first} or answer {second}"
        message = f"{meanings}, and no row decides which: {request}"
        return DataError(row.file, row.number, message)

    # ---- options ----------------------------------------------------------------------------------------------------

    @property
    def _options_name(self) -> str:
        """How errors name the options."""
        if isinstance(self.options, str):
            return self.options
        return "+".join(self.options)

    def _read_options(self, raw: Raw) -> RowOptions:
        """Return the options of a row.

        Labels in a field of their own take precedence over those in the field of the options.

        Raises:
            ValueError: The number, the types or the labels of the options are not as expected.
        """
        labels: object = None
        if self.shared_options:
            texts = self.shared_options
        elif isinstance(self.options, tuple):
            texts = self._read_columns(raw, self.options)
        else:
            value, labels = self._read_option_field(raw, self.options)
            texts = convert_texts(self.options, value)
        if isinstance(self.labels, str):
            labels = get_field(raw, self.labels)
        self._check_texts(texts)
        return RowOptions(self._check_labels(labels, len(texts)), texts)

    def _read_columns(self, raw: Raw, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the texts in several columns; a row with fewer options than columns leaves the last ones empty."""
        filled = list(columns)
        if self.count is None:  # otherwise every row must have a text in every column
            while filled and _is_empty_cell(raw, filled[-1]):
                filled.pop()
        texts = [get_field(raw, name) for name in filled]
        return convert_texts(self._options_name, texts)

    def _read_option_field(self, raw: Raw, name: str) -> tuple[object, object]:
        """Return the texts and the labels in one field, before any check of their types.

        The labels are None if the field has none.
        """
        value = get_field(raw, name)
        if isinstance(value, str) and value.startswith(("[", "{")):  # JSON in a cell of a table
            try:
                value = parse_json(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        is_filled_list = isinstance(value, list) and len(value) > 0
        are_objects = is_filled_list and all(isinstance(item, dict) for item in value)
        if are_objects:  # [{"label": "A", "text": "red"}, {"label": "B", "text": "blue"}]
            texts = [item.get("text") for item in value]
            labels = [item.get("label") for item in value]
            return texts, labels
        if not isinstance(value, dict):  # ["red", "blue"]
            return value, None
        has_two_lists = isinstance(value.get("text"), list)
        if has_two_lists:  # {"label": ["A", "B"], "text": ["red", "blue"]}
            return value["text"], value.get("label")
        maps_text_to_mark = self.answer == self.options
        if maps_text_to_mark:  # {"red": 0, "blue": 1}
            return list(value), None
        return list(value.values()), list(value)  # {"A": "red", "B": "blue"}

    def _check_texts(self, texts: tuple[str, ...]) -> None:
        shown = self._options_name
        if self.count:
            is_expected_count = len(texts) == self.count
        else:
            is_expected_count = 2 <= len(texts) <= len(LETTERS)
        if not is_expected_count:
            expected = self.count or f"2 to {len(LETTERS)}"
            raise ValueError(f"{shown}: expected {expected} options, got {len(texts)}")
        # Only benchmarks state a count. Their empty options are kept as they were published.
        if self.count is None and not all(text.strip() for text in texts):
            raise ValueError(f"{shown}: an option is empty")

    def _check_labels(self, labels: object, count: int) -> tuple[str, ...] | None:
        """Return the labels of a row as texts; None if neither the row nor any of its options has one."""
        if labels is None or labels == [None] * count:
            return None
        shown = self._options_name
        texts = convert_texts(f"labels of {shown}", labels)
        names = tuple(text.strip() for text in texts)
        if len(set(names)) != count:
            raise ValueError(f"{shown}: expected {count} different labels, got {join_names(names)}")
        return names

    # ---- the answer -------------------------------------------------------------------------------------------------

    def _match_answer(self, raw: Raw, options: RowOptions, styles: Sequence[Style]) -> dict[Style, int] | None:
        """Find the option that a row's answer means, in every style that fits.

        Args:
            raw: The row.
            options: Its options.
            styles: The styles to try. All of them fit if the answer marks the right option with a 1 and every other
                with a 0, or if it is one of the columns in `options`.

        Returns:
            Each style that fits, in the order of `styles` -> the index of the option that the answer means in this
            style: the first one if several options have the same text. None if the answer is one of `skip`.

        Raises:
            ValueError: No style fits. Or there is only one style, and the answer means two options in it.
        """
        count = len(options.texts)
        # If a row has fewer options than columns, the last columns are empty.
        option_columns = self.options[:count] if isinstance(self.options, tuple) else ()
        if self.answer in option_columns:
            return dict.fromkeys(styles, option_columns.index(self.answer))
        value = get_field(raw, self.answer)
        if isinstance(value, dict | list):
            return dict.fromkeys(styles, self._read_marks(value, count))
        if isinstance(value, float) and value.is_integer():
            answer = str(int(value))  # a table may hold 2 as 2.0
        else:
            answer = str(value).strip()
        if answer in self.skip:
            return None
        gold_by_style: dict[Style, int] = {}
        for style in styles:
            matches = self._find_options(answer, style, options)
            # Two options may have the same text. While several styles are tried, another one may tell them apart.
            has_equal_options = len(matches) > 1
            if has_equal_options and len(styles) == 1:
                raise ValueError(f"{self.answer} {value!r} is the text of more than one option")
            if matches:
                gold_by_style[style] = matches[0]
        if not gold_by_style:
            expected = join_names(self._option_names(styles[0], options))
            tried_all_styles = len(styles) == len(MEANING)
            more = ", nor an option's text or index" if tried_all_styles else ""
            raise ValueError(f"{self.answer} {value!r} is not one of {expected}{more}")
        return gold_by_style

    def _find_options(self, answer: str, style: Style, options: RowOptions) -> list[int]:
        """Return the indices of the options that the answer names in this style."""
        names = self._option_names(style, options)
        wanted = answer
        if style == "boolean":
            wanted = _BOOLEAN.get(answer.lower(), answer)
        elif style == "label" and options.labels is None and answer not in names:
            wanted = answer.upper()  # "b" for the letter B
        return [index for index, name in enumerate(names) if name == wanted]

    def _read_marks(self, value: dict[str, Any] | list[Any], count: int) -> int:
        """Return the index of the only option that is marked with a 1; the others must be marked with a 0."""
        marks = list(value.values()) if isinstance(value, dict) else value
        index = find_single_mark(marks)
        if len(marks) != count or index is None:
            raise ValueError(f"{self.answer}: expected {count} marks, a 1 for the right option and a 0 for every other")
        return index

    def _option_names(self, style: Style, options: RowOptions) -> tuple[str, ...]:
        """Return how answers of this style name each option, such as A, B, C or 0, 1, 2."""
        count = len(options.texts)
        match style:
            case "label":
                if options.labels is not None:
                    return options.labels
                if isinstance(self.labels, tuple):
                    return self.labels[:count]
                return (self.shared_options or LETTERS)[:count]
            case "text":
                return tuple(text.strip() for text in options.texts)
            case "boolean":
                return tuple(_BOOLEAN.get(text.strip().lower(), text) for text in options.texts)
            case "index":
                return tuple(str(index) for index in range(count))
            case "index1":
                return tuple(str(index) for index in range(1, count + 1))


def _is_empty_cell(raw: Raw, name: str) -> bool:
    """Return whether the row has this column and nothing in it; a missing column is reported where it is read."""
    return name in raw and raw[name] in (None, "")
