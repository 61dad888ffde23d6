"""Read a file of anybody's confidences into columns.

What a row must tell: how sure the answer was, and whether it was right. Confidence is the column `confidence`, else the
probability of the answer in `label_logprobs` (label -> log-probability). Right is the column `correct`, else
`label == gold`, else that the top label of `label_logprobs` is `gold`. The first row decides; later rows must follow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from catto.evaluation.binning import Bools, Floats, Ints
from catto.evaluation.cells import Fields, cell, known_column, logprobs_cell, probability, text, truth
from catto.evaluation.sources import KINDS, Sources
from catto.problems import DataError
from catto.tasks.readers import read_rows

__all__ = [
    "Confidences",
    "LabelTable",
    "Names",
    "Table",
    "Unparsed",
    "read_confidences",
    "read_labels",
    "read_table",
]

Unparsed = Literal["fallback", "wrong"]
Read = Callable[[Fields], Any]

QUESTION_COLUMNS = ("question", "id")
# Stands where a row has fewer labels than others: at every temperature that a fit may reach its probability is 0.
NO_LABEL = -1e6
# Each slice is resampled a thousand times; a column of more values is an id, not a kind.
MOST_SLICES = 500


@dataclass(frozen=True)
class Names:
    """What the columns are called in the file; `by` is the column that cuts it into slices."""

    confidence: str = "confidence"
    correct: str = "correct"
    by: str | None = None


@dataclass(frozen=True)
class Confidences:
    """Answers as columns. confidence: (N,); question, by, read_as: N texts. None: the file does not tell.

    read_as: the column `source`, how each answer was read (`free`, `plain` or `fallback`).
    """

    source: Path
    confidence: Floats
    question: list[str] | None
    read_as: list[str] | None
    by: list[str] | None

    @property
    def fallback(self) -> Bools | None:
        """Which answers had to be forced. (N,)."""
        return None if self.read_as is None else np.array([kind == "fallback" for kind in self.read_as], dtype=np.bool_)

    @property
    def sources(self) -> Sources | None:
        """How many answers were read where."""
        return None if self.read_as is None else Sources.of(self.read_as)

    def __len__(self) -> int:
        return len(self.confidence)


@dataclass(frozen=True)
class Table(Confidences):
    """Answers of which it is known whether they were right. correct: (N,)."""

    correct: Bools

    def picked(self, rows: Ints) -> Self:
        """Return the given rows as a table of their own."""
        return replace(
            self,
            confidence=self.confidence[rows],
            correct=self.correct[rows],
            question=None if self.question is None else [self.question[row] for row in rows],
            read_as=None if self.read_as is None else [self.read_as[row] for row in rows],
            by=None if self.by is None else [self.by[row] for row in rows],
        )

    def slices(self) -> dict[str, Self]:
        """Return one table a value of the `by` column, values sorted."""
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(self.by or ()):
            rows.setdefault(value, []).append(row)
        if len(rows) > MOST_SLICES:
            raise DataError(self.source, None, f"--by: {len(rows):,} different values, expected at most {MOST_SLICES}")
        return {value: self.picked(np.array(rows[value], dtype=np.intp)) for value in sorted(rows)}

    def unparsed_wrong(self) -> Self:
        """Count every answer that came from the fallback as wrong."""
        fallback = self.fallback
        if fallback is None:
            raise DataError(
                self.source, None, "no column 'source' with 'free', 'plain' or 'fallback' to count unparsed rows by"
            )
        return replace(self, correct=self.correct & ~fallback)


def read_table(path: Path, names: Names | None = None, unparsed: Unparsed = "fallback") -> Table:
    """Read answers with their correctness; a bad row is one DataError naming the file, the row and the field."""
    table = read_confidences(path, names)
    if not isinstance(table, Table):
        wanted = (names or Names()).correct
        raise DataError(path, None, f"no column '{wanted}', nor 'label' and 'gold', nor 'label_logprobs' and 'gold'")
    return table.unparsed_wrong() if unparsed == "wrong" else table


def read_confidences(path: Path, names: Names | None = None) -> Confidences:
    """Read answers; the result is a Table where the rows tell which were right."""
    readers: dict[str, Read] = {}
    columns: dict[str, Any] = {"confidence": array("d"), "correct": array("b"), "question": [], "source": [], "by": []}
    steps: list[tuple[Callable[[Any], None], Read]] = []
    for row, fields in read_rows(path):
        try:
            if not steps:
                readers = _readers(fields, names or Names())
                steps = [(columns[name].append, read) for name, read in readers.items()]
            for append, read in steps:
                append(read(fields))
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
    if not steps:
        raise DataError(path, None, "holds no rows")
    return _table(path, {name: columns[name] for name in readers})


def _table(path: Path, columns: Mapping[str, Any]) -> Confidences:
    confidence = np.frombuffer(columns["confidence"], dtype=np.float64)
    common = (path, confidence, columns.get("question"), _read_as(columns.get("source")), columns.get("by"))
    if "correct" not in columns:
        return Confidences(*common)
    return Table(*common, np.frombuffer(columns["correct"], dtype=np.bool_))


def _read_as(source: list[str] | None) -> list[str] | None:
    """A foreign file may call something else `source`: the column is ours only if all its values are."""
    return source if source is not None and set(source) <= set(KINDS) else None


def _readers(first: Fields, names: Names) -> dict[str, Read]:
    """Decide from the first row how each column is read."""
    readers = {"confidence": _confidence_reader(first, names.confidence)}
    correct = _correct_reader(first, names.correct)
    if correct is not None:
        readers["correct"] = correct
    question = next((name for name in QUESTION_COLUMNS if name in first), None)
    if question is not None:
        readers["question"] = lambda fields: text(fields, question)
    if "source" in first:
        readers["source"] = lambda fields: str(fields.get("source"))
    if names.by is not None:
        by = known_column(names.by, first)
        readers["by"] = lambda fields: text(fields, by)
    return readers


def _confidence_reader(first: Fields, name: str) -> Read:
    if name == "confidence" and name not in first and "label_logprobs" in first:
        return _answer_probability
    known_column(name, first)
    return lambda fields: probability(name, cell(fields, name))


def _correct_reader(first: Fields, name: str) -> Read | None:
    if name in first:
        return lambda fields: truth(name, cell(fields, name))
    if name != "correct":
        known_column(name, first)
    if "gold" in first and ("label" in first or "label_logprobs" in first):
        return lambda fields: _answer(fields) == text(fields, "gold")
    return None


def _answer(fields: Fields) -> str | None:
    """The answer's label; None where nothing could be parsed, which is never right."""
    if "label" not in fields:
        logprobs = logprobs_cell(fields)
        return max(logprobs, key=logprobs.__getitem__)
    return None if fields["label"] is None else text(fields, "label")


def _answer_probability(fields: Fields) -> float:
    logprobs, answer = logprobs_cell(fields), _answer(fields)
    if answer not in logprobs:
        raise ValueError(f"label_logprobs: the answer {answer!r} is not one of {', '.join(logprobs)}")
    return exp(min(logprobs[answer], 0.0))


@dataclass(frozen=True)
class LabelTable:
    """Label log-probabilities as columns. logprobs: (N, K); answer, gold: (N,) columns of it; gold None: not told.

    Rows with fewer than K labels are filled up with labels of probability 0.
    """

    logprobs: Floats
    answer: Ints
    gold: Ints | None


def read_labels(path: Path) -> LabelTable:
    """Read the label log-probabilities of every row, with the place of the answer and of the gold label."""
    logprobs: list[list[float]] = []
    answer: list[int] = []
    gold: list[int] = []
    for row, fields in read_rows(path):
        try:
            found = logprobs_cell(fields)
            chosen = _answer(fields)
            answer.append(_place(found, max(found, key=found.__getitem__) if chosen is None else chosen, "label"))
            if "gold" in fields:
                gold.append(_place(found, text(fields, "gold"), "gold"))
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
        logprobs.append(list(found.values()))
    if not logprobs:
        raise DataError(path, None, "holds no rows")
    known = len(gold) == len(answer)
    return LabelTable(_filled(logprobs), np.array(answer), np.array(gold) if known else None)


def _place(logprobs: dict[str, float], label: str, field: str) -> int:
    if label not in logprobs:
        raise ValueError(f"{field}: {label!r} is not one of the labels {', '.join(logprobs)}")
    return list(logprobs).index(label)


def _filled(rows: list[list[float]]) -> Floats:
    width = max(len(row) for row in rows)
    return np.array([row + [NO_LABEL] * (width - len(row)) for row in rows], dtype=np.float64)
