"""Read any file of answers into columns: the confidences and, if the rows show it, which answers are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from catto.errors import DataError, data_errors_at, did_you_mean, find_field, join_names
from catto.formats.answers import find_format, read_answers
from catto.formats.column_readers import (
    ANSWER,
    ANSWER_PROBABILITY,
    PROBABILITY,
    SOURCE,
    TEXT,
    TRUTH,
    ColumnReader,
    read_table_columns,
)
from catto.formats.columns import ColumnNames, Fields
from catto.io.tables import read_plain_table
from catto.metrics.binning import Bools, Floats
from catto.metrics.resampling import Answers
from catto.records import AnswerSource, Unparsed

# Columns that may name the question of a row. `id` is last because it may only number the rows.
QUESTION_COLUMNS = ("question", "question_id", "qid", "doc_id", "id")
# Each slice is resampled a thousand times. A column with more distinct values is an id, not a category.
MAX_SLICES = 500
# Confidences are suspected to be the probability of one label only if each side of 0.5 has this many rows.
MIN_ROWS_PER_SIDE = 5
# If there are this many answers per label and none is right, answers and gold labels are spelled differently.
MIN_ROWS_PER_LABEL = 15
# Above this share of forced answers, the numbers describe the fallback and not the model. The same holds for responses
# without an answer.
MAX_FORCED_SHARE = 0.2
# Questions, labels and slice values are kept in memory, and a compressed file of a few megabytes may hold gigabytes.
MAX_TEXT_CHARACTERS = 2**30


@dataclass(frozen=True)
class ParseCounts:
    """How many answers were parsed in which way.

    Attributes:
        free: Answers inside `<answer>` tags.
        plain: Answers without these tags.
        fallback: Forced answers. No answer could be parsed, so the most probable label was taken.
        none: Responses without an answer to a question that has no labels.

    >>> ParseCounts.of(["free"] * 3 + ["fallback"] * 17).warning
    '17 of 20 answers had to be forced: the numbers below describe the fallback, not the model.'
    """

    free: int = 0
    plain: int = 0
    fallback: int = 0
    none: int = 0

    @classmethod
    def of(cls, values: Iterable[str]) -> ParseCounts:
        """Count the values of `Prediction.source`."""
        counts = Counter(values)
        return cls(free=counts["free"], plain=counts["plain"], fallback=counts["fallback"], none=counts["none"])

    @classmethod
    def total_of(cls, all_counts: Iterable[ParseCounts]) -> ParseCounts:
        """Add up the counts of several files."""
        total = cls()
        for counts in all_counts:
            total = cls(
                free=total.free + counts.free,
                plain=total.plain + counts.plain,
                fallback=total.fallback + counts.fallback,
                none=total.none + counts.none,
            )
        return total

    @property
    def total(self) -> int:
        """The number of answers."""
        return self.free + self.plain + self.fallback + self.none

    def share(self, kind: AnswerSource) -> float:
        """Return the share of answers that were parsed in this way; 0 if there are no answers."""
        if self.total == 0:
            return 0.0
        return float(getattr(self, kind)) / self.total

    @property
    def has_too_many_forced(self) -> bool:
        """Whether more than a fifth of the answers were forced, or more than a fifth are missing.

        The numbers then say little about the model.
        """
        return max(self.share("fallback"), self.share("none")) > MAX_FORCED_SHARE

    @property
    def summary(self) -> str:
        """How many answers had to be forced or, if these are more, how many responses have no answer.

        For example, `17 of 20 answers had to be forced`.
        """
        if self.none > self.fallback:
            return f"{self.none:,} of {self.total:,} responses have no answer"
        return f"{self.fallback:,} of {self.total:,} answers had to be forced"

    @property
    def warning(self) -> str | None:
        """The warning to print before any number if too many answers were forced or are missing; else None."""
        if not self.has_too_many_forced:
            return None
        described = "missing answers" if self.none > self.fallback else "the fallback"
        return f"{self.summary}: the numbers below describe {described}, not the model."

    def describe(self, note: str = "") -> str:
        """Return the shares as text, such as `fallback 2.0 % (note), no answer 1.0 %, plain 4.0 %`.

        Args:
            note: Text in parentheses after the share of forced answers; empty for no parentheses.

        Returns:
            The share of forced answers, and those of missing and plain ones unless they are 0.
        """
        text = f"fallback {100 * self.share('fallback'):.1f} %"
        if note:
            text += f" ({note})"
        if self.none:
            text += f", no answer {100 * self.share('none'):.1f} %"
        if self.plain:
            text += f", plain {100 * self.share('plain'):.1f} %"
        return text


@dataclass(frozen=True)
class Confidences:
    """Answers as columns. The file need not say which answers are right.

    Attributes:
        source: The file.
        confidence: (N,) in [0, 1].
        question: N question ids; None if the file has none.
        read_as: How each of the N answers was parsed: `free`, `plain`, `fallback` or `none`, with the meanings that
            `ParseCounts` gives them. None if the file does not say.
        by: N values of the column that divides the file into slices; None if the user named no such column.
    """

    source: Path
    confidence: Floats
    question: list[str] | None
    read_as: list[str] | None
    by: list[str] | None

    @property
    def sources(self) -> ParseCounts | None:
        """How many answers were parsed in which way; None if the file does not say."""
        if self.read_as is None:
            return None
        return ParseCounts.of(self.read_as)

    def __len__(self) -> int:
        return len(self.confidence)


@dataclass(frozen=True)
class GradedAnswers(Confidences):
    """Answers that are known to be right or wrong.

    Attributes:
        correct: (N,) booleans.
    """

    correct: Bools

    @cached_property
    def questions(self) -> int | None:
        """The number of questions; None if the file does not name them."""
        if self.question is None:
            return None
        return len(set(self.question))

    @property
    def by_question(self) -> Answers:
        """The columns to resample by question, or to compare with those of a different file."""
        return Answers(self.question, self.confidence, self.correct, self.source)

    @property
    def run(self) -> Answers:
        """The columns to resample. If no question repeats, rows are drawn instead of questions, which is faster."""
        no_question_repeats = self.questions == len(self)
        if no_question_repeats:
            return replace(self.by_question, question=None)
        return self.by_question

    def slices(self) -> dict[str, Self]:
        """Divide the answers by the values of the `by` column.

        Returns:
            Value -> the answers with this value, in numerical order if all values are numbers, else in alphabetical
            order. Empty if there is no `by` column.

        Raises:
            DataError: There are more than MAX_SLICES values, so the column seems to have ids and not categories.
        """
        rows_with: dict[str, list[int]] = {}
        for row, value in enumerate(self.by or ()):
            rows_with.setdefault(value, []).append(row)
        if len(rows_with) > MAX_SLICES:
            problem = f"--by: {len(rows_with):,} different values, expected at most {MAX_SLICES}"
            raise DataError(self.source, None, problem)
        try:
            values = sorted(rows_with, key=float)
        except ValueError:  # a value is not a number
            values = sorted(rows_with)
        return {value: self.pick_rows(rows_with[value]) for value in values}

    def pick_rows(self, rows: Sequence[int]) -> Self:
        """Return the answers in these rows, counted from 0."""
        return replace(
            self,
            confidence=self.confidence[rows],
            correct=self.correct[rows],
            question=_pick_rows(self.question, rows),
            read_as=_pick_rows(self.read_as, rows),
            by=_pick_rows(self.by, rows),
        )

    def count_unparsed_as_wrong(self) -> Self:
        """Return the answers with every forced one counted as wrong.

        Raises:
            DataError: The file does not say how its answers were parsed.
        """
        if self.read_as is None:
            problem = "no column 'source' with 'free', 'plain' or 'fallback', which tells which rows are unparsed"
            raise DataError(self.source, None, problem)
        is_parsed = np.array([kind != "fallback" for kind in self.read_as], dtype=np.bool_)
        return replace(self, correct=self.correct & is_parsed)


def _pick_rows(column: list[str] | None, rows: Sequence[int]) -> list[str] | None:
    if column is None:
        return None
    return [column[row] for row in rows]


def read_graded(path: Path, names: ColumnNames | None = None, unparsed: Unparsed = "fallback") -> GradedAnswers:
    """Read answers from a file that shows which of them are right.

    Args:
        path: Any file that `catto measure` reads.
        names: Names of the columns; None means the default names.
        unparsed: How forced answers count: `wrong` counts all of them as wrong, `fallback` grades them like any other
            answer.

    Returns:
        The answers, with one confidence and one boolean per row.

    Raises:
        DataError: A row is bad, the file has no rows, or it does not show which answers are right. With `wrong`, also
            if it does not show which answers were forced.
    """
    answers = read_confidences(path, names)
    if not isinstance(answers, GradedAnswers):
        column = (names or ColumnNames()).correct
        raise DataError(path, None, f"no column '{column}', nor 'label' and 'gold', nor 'label_logprobs' and 'gold'")
    if unparsed == "wrong":
        return answers.count_unparsed_as_wrong()
    return answers


def read_confidences(path: Path, names: ColumnNames | None = None) -> Confidences:
    """Read the confidences of a file and, if the file shows it, which answers are right.

    Args:
        path: Any file that `catto measure` reads.
        names: Names of the columns; None means the default names.

    Returns:
        The answers, as `GradedAnswers` if the file shows which of them are right.

    Raises:
        DataError: The file has no rows, a row is bad, or a column that was named is missing.
    """
    names = names or ColumnNames()
    _refuse_several_truths(path, names)
    columns = _read_columns(path, names)
    confidence = np.array(columns["confidence"], dtype=np.float64)
    correct = None
    # There is at most one of these two columns: `_choose_correctness`, which `_read_columns` calls, decides which one.
    if "correct" in columns:
        correct = np.array(columns["correct"], dtype=np.bool_)
    elif "gold" in columns:
        with data_errors_at(path):
            graded = _grade_answers(confidence, gold=columns["gold"], answer=columns.get("answer"), names=names)
        # With `names.positive`, the column has the probability of that label. Grading turns it into the probability of
        # the answer, which is the more probable of two labels.
        confidence = graded.confidence
        correct = graded.correct
    answers = Confidences(
        source=path,
        confidence=confidence,
        question=columns.get("question"),
        read_as=_find_how_parsed(path, columns.get("source")),  # this `source` is a column of catto's predictions
        by=columns.get("by"),  # the column that divides the answers into slices
    )
    if correct is None:
        return answers
    return GradedAnswers(**vars(answers), correct=correct)


def _refuse_several_truths(path: Path, names: ColumnNames) -> None:
    """Raise DataError if several options say which answers are right."""
    options = []
    if names.correct != "correct":
        options.append("--correct")
    if names.positive:
        options.append("--positive")
    if names.prediction:
        options.append("--prediction")
    if len(options) > 1:
        raise DataError(path, None, f"{' and '.join(options)}: each says which answers are right; give only one")


def _find_how_parsed(path: Path, source_column: list[str] | None) -> list[str] | None:
    """Return how each answer was parsed, if the column `source` says so.

    In predictions of catto, it does: it contains only `free`, `plain`, `fallback` and `none` (see `ParseCounts`). In
    other files it may have another meaning, such as the dataset of each row.

    Args:
        path: The file, for the error message.
        source_column: The column; None if the file has none.

    Returns:
        The column. None if there is no such column, or if it has another meaning.

    Raises:
        DataError: Only some rows say how their answers were parsed.
    """
    if source_column is None:
        return None
    values = set(source_column)
    if values <= {"free", "plain", "fallback", "none"}:
        return source_column
    # A missing cell is read as "None". An incomplete column is an error only if it contains "fallback": the other words
    # may have another meaning, such as `free` next to rows without a price.
    is_incomplete = values <= {"free", "plain", "fallback", "None"}
    if is_incomplete and "fallback" in values:
        raise DataError(path, None, "source: expected free, plain, fallback or none in every row")
    return None


class _FieldReader(NamedTuple):
    """How a column is read, and from which field of a row."""

    reader: ColumnReader
    field: str


def _read_columns(path: Path, names: ColumnNames) -> dict[str, Any]:
    """Read the columns that `_choose_readers` chooses from the first row: `confidence`, and others if they are there.

    Returns:
        Name, such as `confidence` or `gold` -> the N values of the column.
    """
    columns = _read_plain_columns(path, names)
    if columns is not None:
        return columns
    return _read_columns_by_row(path, names)


def _read_plain_columns(path: Path, names: ColumnNames) -> dict[str, Any] | None:
    """Read the columns of a large and simple table at once; return None if it must be read row by row.

    The logs of other tools are read row by row, because their rows have to be converted. So is a table with a bad cell,
    because the error message then names the row.
    """
    table = read_plain_table(path)
    if table is None:
        return None
    [first] = table.slice(0, 1).to_pylist()
    try:
        columns = read_table_columns(table, _choose_readers(first, names))
        if columns is None or find_format(first, names) != "catto":
            return None
    except ValueError:
        return None
    return columns


class _ColumnStep(NamedTuple):
    """How one column is filled row by row. Its functions are looked up once per file, and not once per cell.

    Attributes:
        append: Adds a value to the column.
        read_cell: Takes the name of the field and the fields of a row; returns the value.
        field: The name of the field.
    """

    append: Callable[[Any], None]
    read_cell: Callable[[str, Fields], Any]
    field: str


def _read_columns_by_row(path: Path, names: ColumnNames) -> dict[str, Any]:
    """Read the columns row by row; this works for any file, but is slower than `_read_plain_columns`.

    Returns:
        Name, such as `confidence` or `gold` -> the N values of the column.

    Raises:
        DataError: A row is bad, there are no rows, or the texts are too long to keep in memory.
    """
    columns: dict[str, list[Any]] = {}
    steps: list[_ColumnStep] = []
    characters = 0
    for row, fields in read_answers(path, names):
        try:
            is_first_row = not steps
            if is_first_row:  # it decides for all rows which columns are read
                for name, (reader, field) in _choose_readers(fields, names).items():
                    columns[name] = []
                    steps.append(_ColumnStep(columns[name].append, reader.read_cell, field))
            for append, read_cell, field in steps:
                value = read_cell(field, fields)
                append(value)
                if isinstance(value, str):
                    characters += len(value)
            if characters > MAX_TEXT_CHARACTERS:
                raise ValueError(f"the texts of its columns have more than {MAX_TEXT_CHARACTERS:,} characters")
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
    if not steps:
        raise DataError(path, None, "has no rows")
    return columns


def _choose_readers(first: Fields, names: ColumnNames) -> dict[str, _FieldReader]:
    """Decide from the first row how each column is read, and from which field.

    Returns:
        Name of the column -> its reader. There is always one for `confidence`. What shows which answers are right is
        `correct`, or `gold` and `answer`, or nothing (`_choose_correctness`). There are readers for `question` and
        `source`, which may say how an answer was parsed, if the row has these fields. There is one for `by`, which
        divides the answers into slices, if the user named it.

    Raises:
        ValueError: The row lacks the confidence or a column that the user named.
    """
    readers = {"confidence": _choose_confidence(first, names)}
    readers |= _choose_correctness(first, names)
    question = names.question
    if question is None:
        question = next((name for name in QUESTION_COLUMNS if name in first), None)
    if question is not None:
        _require_column(first, question)
        readers["question"] = _FieldReader(TEXT, question)
    if "source" in first:
        readers["source"] = _FieldReader(SOURCE, "source")
    if names.by is not None:
        _require_column(first, names.by)
        readers["by"] = _FieldReader(TEXT, names.by)
    return readers


def _require_column(first: Fields, name: str, hint: str = "") -> None:
    """Raise ValueError if the first row lacks a column. hint: Text to put after the name of the column."""
    try:
        find_field(first, name)
    except ValueError:
        suggestion = f"{did_you_mean(name, first)} (columns: {', '.join(first)})"
        raise ValueError(f"no column {name!r}{hint}{suggestion}") from None


def _choose_confidence(first: Fields, names: ColumnNames) -> _FieldReader:
    """Return how the confidence is read: from its column or, without one, as the probability of the answer's label."""
    is_default = names.confidence == "confidence"
    if is_default and "confidence" not in first and "label_logprobs" in first:
        return _FieldReader(ANSWER_PROBABILITY, names.prediction or "label")
    _require_column(first, names.confidence)
    return _FieldReader(PROBABILITY, names.confidence)


def _choose_correctness(first: Fields, names: ColumnNames) -> dict[str, _FieldReader]:
    """Return how to read which answers are right: from `correct`, from `gold` and `answer`, or not at all.

    Columns that the user names take precedence.

    Returns:
        One of these:

        - a reader for `correct`;
        - readers for `gold` and `answer`, which are compared;
        - a reader for `gold` alone, if the user named a label with `--positive`: the confidence is then the probability
          of this label;
        - no reader, if the row does not show which answers are right.

    Raises:
        ValueError: The row lacks a column that the user named, or one that has to be compared with it.
    """
    user_names_labels = names.prediction is not None or names.gold is not None or names.positive is not None
    user_names_correct = names.correct != "correct"
    if user_names_correct or ("correct" in first and not user_names_labels):
        _require_column(first, names.correct)
        return {"correct": _FieldReader(TRUTH, names.correct)}
    row_has_labels = "gold" in first and ("label" in first or "label_logprobs" in first)
    if not user_names_labels and not row_has_labels:
        return {}
    gold = names.gold or "gold"
    _require_column(first, gold)
    readers = {"gold": _FieldReader(TEXT, gold)}
    if names.positive is not None:  # no column has the answer: it follows from the probability of that label
        return readers
    prediction = names.prediction or "label"
    # The answer of a row without a label is its most probable label.
    can_be_top_label = prediction == "label" and "label_logprobs" in first
    if not can_be_top_label:
        hint = (
            f" to compare with {gold!r}: name it with --prediction; or, if {names.confidence!r} is the probability "
            "of one label, name that label with --positive"
        )
        _require_column(first, prediction, hint)
    readers["answer"] = _FieldReader(ANSWER, prediction)
    return readers


class _Graded(NamedTuple):
    """The confidence of each answer and whether it is right, (N,) each."""

    confidence: Floats
    correct: Bools


def _grade_answers(
    confidence: Floats, *, gold: list[str], answer: list[str | None] | None, names: ColumnNames
) -> _Graded:
    """Compare the answers with the gold labels.

    Args:
        confidence: (N,) probabilities of the answers or, without `answer`, of the label `names.positive`.
        gold: N gold labels.
        answer: N answers, each None if it could not be parsed. Without this list, the more probable of two labels is
            taken as the answer.
        names: Names of the columns.

    Returns:
        The confidence of each answer, and whether it is right.

    Raises:
        ValueError: The columns do not seem to fit together, for example because the labels are spelled in two ways.
    """
    if answer is None:
        return _grade_probability(confidence, gold, names)
    _refuse_two_spellings(answer, gold)
    _refuse_probability_of_label(confidence, answer, names)
    correct = np.array([label == right for label, right in zip(answer, gold, strict=True)], dtype=np.bool_)
    return _Graded(confidence, correct)


def _grade_probability(confidence: Floats, gold: list[str], names: ColumnNames) -> _Graded:
    """Take the more probable of two labels as the answer; at a probability of 0.5, this is `names.positive`.

    Args:
        confidence: (N,) probabilities of the label `names.positive`.
        gold: N gold labels.
        names: Names of the columns.

    Raises:
        ValueError: There are more than two labels.
    """
    labels = sorted(set(gold))
    if len({*labels, names.positive}) > 2:
        expected = f"expected one of two labels in {names.gold or 'gold'!r}, got {join_names(labels)}"
        raise ValueError(f"--positive {names.positive}: {expected}")
    answers_positive = confidence >= 0.5
    is_positive = np.array([label == names.positive for label in gold], dtype=np.bool_)
    confidence_of_answer = np.where(answers_positive, confidence, 1.0 - confidence)
    return _Graded(confidence_of_answer, answers_positive == is_positive)


def _refuse_two_spellings(answer: list[str | None], gold: list[str]) -> None:
    """Raise ValueError if no answer is right although there are several labels with many answers each.

    With few answers, or if all of them give the same label, they may simply all be wrong.
    """
    answer_labels = {label for label in answer if label is not None}
    gold_labels = set(gold)
    several_labels = len(answer_labels) > 1 and len(gold_labels) > 1
    many_rows_per_label = len(gold) >= MIN_ROWS_PER_LABEL * len(gold_labels)
    if several_labels and many_rows_per_label and not answer_labels & gold_labels:
        raise ValueError(
            "no answer equals a gold label, so the labels seem to be spelled in two ways: the answers are "
            f"{join_names(sorted(answer_labels), 4)}, the gold labels are {join_names(sorted(gold_labels), 4)}"
        )


def _refuse_probability_of_label(confidence: Floats, answer: list[str | None], names: ColumnNames) -> None:
    """Raise ValueError if the column seems to have the probability of one label, and not that of the answer.

    This is so if there are two labels, and the confidence is below 0.5 exactly where the answer is one of them. In a
    few rows, that may be chance.
    """
    is_below_half = confidence < 0.5
    labels_above = set()
    labels_below = set()
    for label, is_below in zip(answer, is_below_half.tolist(), strict=True):
        if is_below:
            labels_below.add(label)
        else:
            labels_above.add(label)
    one_label_per_side = len(labels_above) == 1 and len(labels_below) == 1 and labels_above != labels_below
    enough_rows = min(is_below_half.sum(), (~is_below_half).sum()) >= MIN_ROWS_PER_SIDE
    if one_label_per_side and enough_rows:
        [label_above] = labels_above
        [label_below] = labels_below
        raise ValueError(
            f"{names.confidence}: below 0.5 exactly where the answer is {label_below!r}, so it looks like the "
            f"probability of {label_above!r} and not of the answer; if so, add --positive {label_above}"
        )
