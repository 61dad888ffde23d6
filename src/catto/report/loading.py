"""Read the files of an experiment: each cell's answers as columns, and the questions they answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catto.evaluation.binning import Bools, Floats
from catto.evaluation.sources import Sources
from catto.problems import DataError
from catto.records import Prediction, Question, read_lines, read_records
from catto.report.results import Cell, Results

__all__ = ["Answered", "Protocol", "answered", "file_hash", "predictions_of", "questions_of"]


@dataclass(frozen=True)
class Protocol:
    """How the numbers are made: bins of the ECE, resamples and simulations, whether unparsed answers count wrong."""

    bins: int = 20
    resamples: int = 1000
    level: float = 0.95
    unparsed_wrong: bool = False

    @classmethod
    def of(cls, results: Results) -> Protocol:
        """Read the recipe's evaluation block; what it leaves out is the default."""
        block: dict[str, Any] = results.recipe.get("evaluation") or {}
        return cls(
            bins=int(block.get("bins", cls.bins)),
            resamples=int(block.get("resamples", cls.resamples)),
            unparsed_wrong=block.get("unparsed") == "wrong",
        )


@dataclass(frozen=True)
class Answered:
    """The answers of one cell, one a question. question, label: N texts; confidence, correct, fallback: (N,)."""

    cell: Cell
    question: list[str]
    label: list[str | None]
    confidence: Floats
    correct: Bools
    fallback: Bools
    sources: Sources
    model: str

    def __len__(self) -> int:
        return len(self.question)


def predictions_of(cell: Cell, folder: Path) -> Iterator[Prediction]:
    """Yield the cell's predictions, each checked to be of its task and to stand once."""
    path, seen = folder / cell.predictions, set[str]()
    for row, prediction in enumerate(read_records(path, Prediction), 1):
        if prediction.task != cell.task:
            raise DataError(path, row, f"task: expected {cell.task!r}, got {prediction.task!r}")
        if prediction.question in seen:
            raise DataError(path, row, f"question: {prediction.question!r} is answered twice; expected one line each")
        seen.add(prediction.question)
        yield prediction


def answered(cell: Cell, predictions: Sequence[Prediction], folder: Path, unparsed_wrong: bool = False) -> Answered:
    """Put a cell's predictions into columns."""
    if not predictions:
        raise DataError(folder / cell.predictions, None, "holds no rows")
    fallback = np.array([one.source == "fallback" for one in predictions])
    correct = np.array([one.label == one.gold for one in predictions])
    return Answered(
        cell=cell,
        question=[one.question for one in predictions],
        label=[one.label for one in predictions],
        confidence=np.array([one.confidence for one in predictions], dtype=np.float64),
        correct=correct & ~fallback if unparsed_wrong else correct,
        fallback=fallback,
        sources=Sources.of(one.source for one in predictions),
        model=predictions[0].model,
    )


def questions_of(results: Results, folder: Path) -> dict[str, dict[str, Question]]:
    """Read the test questions: task -> id -> question."""
    return {
        task: {question.id: question for path in paths for question in read_records(folder / path, Question)}
        for task, paths in results.questions.items()
    }


def row_count(path: Path) -> int:
    """How many records a file holds."""
    return sum(1 for _ in read_lines(path))


def file_hash(path: Path) -> str:
    """A digest of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(path, None, error.strerror or str(error)) from None
