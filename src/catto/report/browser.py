"""Individual predictions for the page: the most telling ones where there are too many, as compact columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from catto.prompts import parse
from catto.records import Prediction, Question
from catto.report.results import Cell

__all__ = ["MOST_ROWS", "Browser", "script_json"]

MOST_ROWS = 20_000
# A response of more characters is cut on the page; the file has all of it.
LONGEST = 4_000
RIGHT, FALLBACK, CUT, PLAIN = 1, 2, 4, 8


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@dataclass
class Browser:
    """Collects the rows cell by cell. `quota`: most rows of one cell."""

    questions: Mapping[str, Mapping[str, Question]]
    quota: int
    total: int = 0
    cells: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    _places: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, cell: Cell, predictions: Sequence[Prediction]) -> None:
        """Keep the cell's most telling predictions: those furthest from what happened."""
        self.total += len(predictions)
        telling = sorted(predictions, key=lambda one: (-abs(one.confidence - (one.label == one.gold)), one.question))
        place = len(self.cells)
        self.cells.append(cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}))
        self.rows += [self._row(place, one) for one in telling[: self.quota]]

    def _row(self, cell: int, one: Prediction) -> list[Any]:
        question = self.questions.get(one.task, {}).get(one.question)
        labels = question.labels if question is not None else tuple(filter(None, (one.label, one.gold)))
        said = parse(one.text, labels).reasoning or one.text
        flags = RIGHT * (one.label == one.gold) + FALLBACK * (one.source == "fallback") + CUT * (len(said) > LONGEST)
        flags += PLAIN * (one.source == "plain")
        return [cell, self._place(one, question), one.label, round(one.confidence, 5), flags, said[:LONGEST]]

    def _place(self, one: Prediction, question: Question | None) -> int:
        key = (one.task, one.question)
        if key not in self._places:
            self._places[key] = len(self.asked)
            self.asked.append(_asked(one, question))
        return self._places[key]

    def data(self) -> dict[str, Any]:
        """Columns: cell, question, answer, confidence, flags, response; with what they refer to."""
        columns = [list(column) for column in zip(*self.rows, strict=True)] or [[] for _ in range(6)]
        return {"cells": self.cells, "questions": self.asked, "columns": columns, "total": self.total}


def _asked(one: Prediction, question: Question | None) -> dict[str, Any]:
    found: dict[str, Any] = {"id": one.question, "gold": one.gold}
    if question is not None:
        found["parts"] = [[name, text] for name, text in question.fields.items()]
        found["options"] = [[option.label, option.text] for option in question.options]
        if question.posterior is not None:
            found["posterior"] = {label: round(value, 4) for label, value in question.posterior.items()}
    return found
