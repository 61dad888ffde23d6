"""Fit a calibrator on one file of answers and apply it to another, both kept as files.

Beside the calibrator stands a manifest that says what it reads (`on`: confidences or label log-probabilities) and which
questions it was fitted on, as digests, so that measuring on the fit set can be noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from catto.files import library_versions, manifest_path, read_manifest, read_rows, replacing, write_manifest
from catto.measure import ColumnNames, Confidences, GradedAnswers, Unparsed, read_confidences, read_graded, read_labels
from catto.metrics.binning import Floats
from catto.metrics.calibrators import CALIBRATORS, Calibrator, Temperature, load, save
from catto.problems import DataError
from catto.records import Manifest

__all__ = ["MANY_QUESTIONS", "Fitted", "Kind", "On", "apply_file", "fit_file", "open_fitted", "shared_questions"]

On = Literal["confidence", "labels"]
Kind = Literal["temperature", "platt", "isotonic", "histogram"]

# The least digests of the fit questions are kept, and no more: of larger sets they are a fair sample.
MANY_QUESTIONS = 10_000


@dataclass(frozen=True)
class Fitted:
    """A calibrator, what it reads, and the digests of the questions it was fitted on (None: not known)."""

    calibrator: Calibrator
    on: On
    questions: tuple[str, ...] | None = None

    def confidences(self, answers: Confidences) -> Floats:
        """Return the calibrated confidence of each answer. -> (N,)."""
        if self.on == "confidence":
            return self.calibrator.apply(answers.confidence)
        if not isinstance(self.calibrator, Temperature):
            raise DataError(answers.source, None, "only a temperature can be applied to label log-probabilities")
        labels = read_labels(answers.source)
        rescaled = self.calibrator.apply_labels(labels.logprobs)
        return np.asarray(np.exp(rescaled[np.arange(len(rescaled)), labels.answer]), dtype=np.float64)


def fit_file(
    path: Path, kind: Kind, on: On, names: ColumnNames, unparsed: Unparsed, out: Path
) -> tuple[Fitted, GradedAnswers]:
    """Fit on the answers of a file and write the calibrator with its manifest; return both."""
    if out.exists() and path.exists() and out.samefile(path):
        raise DataError(out, None, "is the input: write the calibrator to another file")
    answers = read_graded(path, names, unparsed)
    try:
        calibrator = _fit_labels(path) if on == "labels" else CALIBRATORS[kind].fit(answers.confidence, answers.correct)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
    if answers.correct.all() or not answers.correct.any():
        kind_of = "right" if answers.correct.all() else "wrong"
        raise DataError(path, None, f"all {len(answers)} answers are {kind_of}: fitting needs right and wrong ones")
    fitted = Fitted(calibrator, on, None if answers.question is None else _digests(answers.question)[:MANY_QUESTIONS])
    save(calibrator, out)
    write_manifest(out, _manifest(fitted, path, len(answers)))
    return fitted, answers


def _fit_labels(path: Path) -> Temperature:
    labels = read_labels(path)
    if labels.gold is None:
        raise DataError(path, None, "gold: missing")
    return Temperature.fit_labels(labels.logprobs, labels.gold)


def _manifest(fitted: Fitted, path: Path, rows: int) -> Manifest:
    notes = {"on": fitted.on, "fitted_on": path.name, "questions": fitted.questions}
    return Manifest(kind="calibrator", counts={"rows": rows}, versions=library_versions(), notes=notes)


def open_fitted(path: Path, on: On | None = None) -> Fitted:
    """Read a calibrator with its manifest; without a manifest, `on` must say what the calibrator reads."""
    calibrator = load(path)
    place = manifest_path(path)
    if place.exists():
        notes = read_manifest(path).notes
        noted, questions = notes.get("on", "confidence"), notes.get("questions")
        if noted not in ("confidence", "labels"):
            raise DataError(place, None, f"notes.on: expected confidence or labels, got {noted!r}")
        if questions is not None and not _texts(questions):
            raise DataError(place, None, "notes.questions: expected a list of texts")
        return Fitted(calibrator, on or noted, None if questions is None else tuple(questions))
    if on is None:
        raise DataError(place, None, "missing, so say what the calibrator reads: --on confidence|labels")
    return Fitted(calibrator, on)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _digests(questions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({hashlib.sha256(question.encode()).hexdigest()[:12] for question in questions}))


def shared_questions(fitted: Fitted, answers: Confidences) -> int:
    """Count the fit questions, as far as they were kept, that stand in the answers too."""
    return len(set(fitted.questions or ()) & set(_digests(answers.question or ())))


def apply_file(fitted: Fitted, path: Path, names: ColumnNames, out: Path) -> tuple[Confidences, Floats]:
    """Write the rows with the calibrated confidence, the stated one kept as `<column>_raw`; return both columns."""
    if out.exists() and path.exists() and out.samefile(path):
        raise DataError(out, None, "is the input: write the calibrated answers to another file")
    answers = read_confidences(path, names)
    calibrated = fitted.confidences(answers)
    with replacing(out) as file:
        pairs = zip(read_rows(path), answers.confidence.tolist(), calibrated.tolist(), strict=True)
        for (row, fields), stated, new in pairs:
            if fields.get(f"{names.confidence}_raw") is not None:  # catto's own predictions have it, as null
                raise DataError(path, row, f"{names.confidence}_raw: there already, so the row was calibrated before")
            file.write(_line(path, row, _replaced(fields, names.confidence, stated, new)))
    return answers, calibrated


def _line(path: Path, row: int, fields: dict[str, Any]) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError):  # a date of a Parquet file, or a nan that only Python's JSON knows
        raise DataError(path, row, "holds a value that JSON has no form for (NaN, Infinity or a date)") from None


def _replaced(fields: dict[str, Any], name: str, stated: float, new: float) -> dict[str, Any]:
    return {**fields, name: new, f"{name}_raw": stated}
