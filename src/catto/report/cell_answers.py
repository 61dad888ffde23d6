"""The answers of one cell of a report, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from catto.answer_columns import GradedAnswers
from catto.errors import DataError
from catto.io.record_files import read_records
from catto.metrics.binning import Floats
from catto.records import PairMargin, Prediction, Question, Unparsed
from catto.report.numbers import (
    Cell,
)


@dataclass(frozen=True)
class CellAnswers(GradedAnswers):
    """The answers of one cell, one per question.

    Attributes:
        cell: The cell.
        label: N labels, or short answers where there are none; None for an answer that could not be parsed.
        model: Name of the model.
        asked: The N questions; empty if they are not known.
        margins: Margins of held-out preference pairs; empty if none were scored.
    """

    cell: Cell
    label: list[str | None]
    model: str
    asked: list[Question]
    margins: Sequence[PairMargin] = ()

    @property
    def posteriors(self) -> list[dict[str, float]]:
        """The exact posterior of each question; empty if any question has none."""
        exact = []
        for question in self.asked:
            if question.posterior is not None:
                exact.append(question.posterior)
        if len(exact) != len(self):
            return []
        return exact

    @property
    def truth(self) -> Floats:
        """The exact probability of each answer, (N,). Every question must have a posterior."""
        probabilities = []
        for posterior, label in zip(self.posteriors, self.label, strict=True):
            probabilities.append(posterior.get(label or "", 0.0))
        return np.array(probabilities)


class CellFile(NamedTuple):
    """The predictions of a cell, as columns and as they are in the file."""

    answers: CellAnswers
    predictions: list[Prediction]


def read_cell(cell: Cell, folder: Path, asked: Mapping[str, Question], unparsed: Unparsed) -> CellFile:
    """Read the predictions of a cell: one per question, all of the cell's task.

    Args:
        cell: The cell.
        folder: Folder of the experiment.
        asked: The questions of the cell's task by id; empty if they are not known.
        unparsed: Whether forced answers count as wrong.

    Returns:
        The answers as columns, and the predictions.
    """
    path = folder / cell.predictions
    by_question = _read_predictions(path, cell.task, asked)
    predictions = list(by_question.values())
    margins: list[PairMargin] = []
    if cell.preference is not None:
        margins = list(read_records(folder / cell.preference, PairMargin))
    questions = []
    if asked:
        questions = [asked[name] for name in by_question]
    answers = CellAnswers(
        source=path,
        confidence=np.array([prediction.confidence for prediction in predictions], dtype=np.float64),
        question=list(by_question),
        read_as=[prediction.source for prediction in predictions],
        by=None,
        correct=np.array([prediction.is_correct for prediction in predictions]),
        cell=cell,
        label=[prediction.choice for prediction in predictions],
        model=predictions[0].model,
        asked=questions,
        margins=margins,
    )
    if unparsed == "wrong":
        answers = answers.count_unparsed_as_wrong()
    return CellFile(answers, predictions)


def _read_predictions(path: Path, task: str, asked: Mapping[str, Question]) -> dict[str, Prediction]:
    """Read question id -> prediction."""
    by_question: dict[str, Prediction] = {}
    for row, prediction in enumerate(read_records(path, Prediction), 1):
        name = prediction.question
        if prediction.task != task:
            raise DataError(path, row, f"task: expected {task!r}, got {prediction.task!r}")
        if name in by_question:
            raise DataError(path, row, f"question: {name!r} is answered twice; expected one line each")
        if asked and name not in asked:
            raise DataError(path, row, f"question: {name!r} is not among the task's questions")
        by_question[name] = prediction
    if not by_question:
        raise DataError(path, None, "holds no rows")
    return by_question
