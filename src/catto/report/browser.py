"""Collect the predictions that can be browsed on the page; if there are too many, only some of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from catto.answer.response import parse_response
from catto.records import Prediction, Question, Unparsed
from catto.report.numbers import Cell

MAX_ROWS = 20_000
MAX_RESPONSE_CHARACTERS = 4_000  # longer responses are cut on the page, but not in the file of predictions
# Flags of a row, as bits; browser.js has the same constants.
RIGHT = 1  # the answer counts as right
FALLBACK = 2  # the answer was forced
CUT = 4  # the response is longer than the page shows
PLAIN = 8  # the answer was read from a response without answer tags


class QuestionKey(NamedTuple):
    """Identifies a question. Names are unique within a task; `gold` is the answer that counts as right."""

    task: str
    name: str
    gold: str


class BrowserRow(NamedTuple):
    """One prediction on the page. cell: index into `Browser.cells`; flags: RIGHT, FALLBACK, CUT and PLAIN, combined."""

    cell: int
    question: QuestionKey
    answer: str | None
    confidence: float
    flags: int
    response: str


@dataclass
class Browser:
    """The predictions on the page, collected cell by cell.

    Attributes:
        questions: task -> id -> question, for the questions that are known.
        max_rows: all predictions are kept up to this number; beyond it, every cell keeps an equal share.
        expected_cells: number of cells that will be added.
        unparsed: "wrong" if forced answers count as wrong, "fallback" if they count as they are.
        total: number of predictions added so far.
        cells: what the page shows about each cell.
        rows: the predictions that are kept.
    """

    questions: Mapping[str, Mapping[str, Question]]
    max_rows: int = MAX_ROWS
    expected_cells: int = 1
    unparsed: Unparsed = "fallback"
    total: int = 0
    cells: list[dict[str, Any]] = field(default_factory=list)
    rows: list[BrowserRow] = field(default_factory=list)

    def add(self, cell: Cell, predictions: Sequence[Prediction]) -> None:
        """Add a cell, and as many of its predictions as fit.

        All predictions are kept until there are more than `max_rows` in all cells. From then on, each cell keeps an
        equal share of `max_rows`: its most surprising predictions, those whose confidence is furthest from the outcome
        (0 or 1).
        """
        cell_index = len(self.cells)
        self.cells.append(cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}))
        self.total += len(predictions)
        has_too_many = self.total > self.max_rows
        share = max(1, self.max_rows // self.expected_cells)
        kept = sorted(predictions, key=self._rank_by_surprise)
        if has_too_many:
            kept = kept[:share]
        self.rows += [self._make_row(cell_index, prediction) for prediction in kept]
        if has_too_many:  # cells that were added before there were too many may still have more rows than their share
            self.rows = _keep_share(self.rows, share)

    def data(self) -> dict[str, Any]:
        """Return what browser.js reads: the cells, the questions, and the rows as columns that refer to both."""
        keys = list(dict.fromkeys(row.question for row in self.rows))
        question_index = {key: index for index, key in enumerate(keys)}
        columns = [
            [row.cell for row in self.rows],
            [question_index[row.question] for row in self.rows],
            [row.answer for row in self.rows],
            [row.confidence for row in self.rows],
            [row.flags for row in self.rows],
            [row.response for row in self.rows],
        ]
        questions = [self._describe_question(key) for key in keys]
        return {"cells": self.cells, "questions": questions, "columns": columns}

    def _is_right(self, prediction: Prediction) -> bool:
        return prediction.counts_as_correct(self.unparsed)

    def _rank_by_surprise(self, prediction: Prediction) -> tuple[float, str]:
        surprise = abs(prediction.confidence - self._is_right(prediction))
        return -surprise, prediction.question

    def _make_row(self, cell_index: int, prediction: Prediction) -> BrowserRow:
        response = self._read_reasoning(prediction)
        flags = 0
        if self._is_right(prediction):
            flags |= RIGHT
        if len(response) > MAX_RESPONSE_CHARACTERS:
            flags |= CUT
        if prediction.is_forced:
            flags |= FALLBACK
        if prediction.source == "plain":
            flags |= PLAIN
        return BrowserRow(
            cell=cell_index,
            question=QuestionKey(prediction.task, prediction.question, prediction.gold),
            answer=prediction.choice,
            confidence=round(prediction.confidence, 5),
            flags=flags,
            response=response[:MAX_RESPONSE_CHARACTERS],
        )

    def _read_reasoning(self, prediction: Prediction) -> str:
        """Return the response without its answer; the whole response if nothing else is in it."""
        question = self._find_question(prediction.task, prediction.question)
        if question is None:
            labels = tuple(label for label in (prediction.label, prediction.gold) if label)
        else:
            labels = question.labels
        return parse_response(prediction.text, labels).reasoning or prediction.text

    def _find_question(self, task: str, name: str) -> Question | None:
        return self.questions.get(task, {}).get(name)

    def _describe_question(self, key: QuestionKey) -> dict[str, Any]:
        """Return what the page shows about a question: its texts, options and posterior, if they are known."""
        described: dict[str, Any] = {"id": key.name, "gold": key.gold}
        question = self._find_question(key.task, key.name)
        if question is None:
            return described
        described["parts"] = list(question.fields.items())
        described["options"] = [(option.label, option.text) for option in question.options]
        if question.posterior is not None:
            described["posterior"] = {label: round(p, 4) for label, p in question.posterior.items()}
        return described


def _keep_share(rows: Iterable[BrowserRow], share: int) -> list[BrowserRow]:
    """Return the first rows of each cell, at most `share` per cell."""
    kept = []
    counts: Counter[int] = Counter()
    for row in rows:
        if counts[row.cell] < share:
            counts[row.cell] += 1
            kept.append(row)
    return kept
