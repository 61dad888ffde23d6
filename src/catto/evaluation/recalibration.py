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

from catto.evaluation.binning import Floats
from catto.evaluation.calibrators import CALIBRATORS, Calibrator, Temperature, load, save
from catto.evaluation.tables import Confidences, Names, Table, Unparsed, read_confidences, read_labels, read_table
from catto.records import (
    DataError,
    Manifest,
    library_versions,
    manifest_path,
    read_manifest,
    replacing,
    write_manifest,
)
from catto.tasks.readers import read_rows

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


def fit_file(path: Path, kind: Kind, on: On, names: Names, unparsed: Unparsed, out: Path) -> tuple[Fitted, Table]:
    """Fit on the answers of a file and write the calibrator with its manifest; return both."""
    answers = read_table(path, names, unparsed)
    try:
        calibrator = _fit_labels(path) if on == "labels" else CALIBRATORS[kind].fit(answers.confidence, answers.correct)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
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
    if manifest_path(path).exists():
        notes = read_manifest(path).notes
        questions = notes.get("questions")
        return Fitted(calibrator, on or notes.get("on", "confidence"), None if questions is None else tuple(questions))
    if on is None:
        raise DataError(manifest_path(path), None, "missing, so say what the calibrator reads: --on confidence|labels")
    return Fitted(calibrator, on)


def _digests(questions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({hashlib.sha256(question.encode()).hexdigest()[:12] for question in questions}))


def shared_questions(fitted: Fitted, answers: Confidences) -> int:
    """Count the fit questions, as far as they were kept, that stand in the answers too."""
    return len(set(fitted.questions or ()) & set(_digests(answers.question or ())))


def apply_file(fitted: Fitted, path: Path, names: Names, out: Path) -> tuple[Confidences, Floats]:
    """Write the rows with the calibrated confidence, the stated one kept as `<column>_raw`; return both columns."""
    answers = read_confidences(path, names)
    calibrated = fitted.confidences(answers)
    with replacing(out) as file:
        pairs = zip(read_rows(path), answers.confidence.tolist(), calibrated.tolist(), strict=True)
        for (row, fields), stated, new in pairs:
            if f"{names.confidence}_raw" in fields:
                raise DataError(path, row, f"{names.confidence}_raw: there already, so the row was calibrated before")
            file.write(json.dumps(_replaced(fields, names.confidence, stated, new), ensure_ascii=False) + "\n")
    return answers, calibrated


def _replaced(fields: dict[str, Any], name: str, stated: float, new: float) -> dict[str, Any]:
    return {**fields, name: new, f"{name}_raw": stated}
