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
from catto.report.numbers import Cell


@dataclass(frozen=True)
class CellAnswers(GradedAnswers):
    """The answers of one cell, one per question.

    Attributes:
        cell: The cell.
        label: N labels, or N short answers if the task has no labels; None for a response without an answer.
        model: Name of the model.
        asked: The N questions, in the order of the answers; empty if they are unknown.
        margins: Margins of held-out preference pairs; empty if none were scored.
    """

    cell: Cell
    label: list[str | None]
    model: str
    asked: list[Question]
    margins: Sequence[PairMargin] = ()

    @property
    def posteriors(self) -> list[dict[str, float]]:
        """The exact posterior of each question (label -> probability); empty if any question has none."""
        posteriors = []
        for question in self.asked:
            if question.posterior is not None:
                posteriors.append(question.posterior)
        if len(posteriors) != len(self):
            return []
        return posteriors

    @property
    def truth(self) -> Floats:
        """The exact posterior probability of each answer, (N,); 0 for an answer that the posterior does not list.

        Raises:
            ValueError: A question has no posterior.
        """
        probabilities = []
        for posterior, label in zip(self.posteriors, self.label, strict=True):
            if label is None:
                probabilities.append(0.0)
            else:
                probabilities.append(posterior.get(label, 0.0))
        return np.array(probabilities)


class CellFile(NamedTuple):
    """The predictions of a cell, as columns to measure them, and as records to show them in the browser.

    Attributes:
        answers: The columns; the argument `unparsed` of `read_cell` decides whether forced answers are right.
        predictions: The records as they are in the file, in the same order.
    """

    answers: CellAnswers
    predictions: list[Prediction]


def read_cell(cell: Cell, folder: Path, known_questions: Mapping[str, Question], unparsed: Unparsed) -> CellFile:
    """Read the predictions of a cell, one per question, and the margins of its held-out pairs.

    Args:
        cell: The cell.
        folder: Folder of the experiment.
        known_questions: The questions of the cell's task by id; empty if they are unknown.
        unparsed: "wrong" if forced answers count as wrong, "fallback" if they count as they are.

    Returns:
        The answers as columns and as records.

    Raises:
        DataError: A file is broken, there are no predictions, or a prediction belongs to a different task, repeats a
            question, or answers none of the known questions.
    """
    path = folder / cell.predictions
    prediction_of_question = _read_predictions(path, cell.task, known_questions)
    predictions = list(prediction_of_question.values())
    margins: list[PairMargin] = []
    if cell.preference is not None:
        margins = list(read_records(folder / cell.preference, PairMargin))
    asked = []
    if known_questions:
        asked = [known_questions[question_id] for question_id in prediction_of_question]
    answers = CellAnswers(
        source=path,
        confidence=np.array([prediction.confidence for prediction in predictions], dtype=np.float64),
        question=list(prediction_of_question),
        read_as=[prediction.source for prediction in predictions],
        by=None,  # a report does not divide the answers of a cell into slices
        correct=np.array([prediction.is_correct for prediction in predictions]),
        cell=cell,
        label=[prediction.choice for prediction in predictions],
        model=predictions[0].model,  # all predictions of a cell are by the same model
        asked=asked,
        margins=margins,
    )
    if unparsed == "wrong":
        answers = answers.count_unparsed_as_wrong()
    return CellFile(answers, predictions)


def _read_predictions(path: Path, task: str, known_questions: Mapping[str, Question]) -> dict[str, Prediction]:
    """Read question id -> prediction, in the order of the file; there is at least one.

    Args:
        path: The file of predictions.
        task: The task that all of them must belong to.
        known_questions: The questions of the task by id; empty if they are unknown, so that any question is accepted.

    Raises:
        DataError: The file is empty, or a prediction belongs to a different task, repeats a question, or answers none
            of the known questions.
    """
    prediction_of_question: dict[str, Prediction] = {}
    for row, prediction in enumerate(read_records(path, Prediction), 1):
        question_id = prediction.question
        if prediction.task != task:
            raise DataError(path, row, f"task: expected {task!r}, got {prediction.task!r}")
        if question_id in prediction_of_question:
            raise DataError(path, row, f"question: {question_id!r} is answered twice; expected one line each")
        if known_questions and question_id not in known_questions:
            raise DataError(path, row, f"question: {question_id!r} is not among the task's questions")
        prediction_of_question[question_id] = prediction
    if not prediction_of_question:
        raise DataError(path, None, "has no rows")
    return prediction_of_question
