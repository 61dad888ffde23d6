"""Fit a calibrator on one file of answers and apply it to another, both kept as files.

Next to the calibrator is a manifest that says what it reads (`on`: confidences or label log-probabilities) and which
questions it was fitted on, as digests, so that measuring on the fit set can be noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from catto.files import library_versions, manifest_path, read_manifest, replacing, write_manifest
from catto.logs import ColumnNames, answer_of, logprobs_of, read_answers, text_of
from catto.measure import (
    Confidences,
    GradedAnswers,
    Unparsed,
    read_confidences,
    read_graded,
)
from catto.metrics.binning import Floats, Ints
from catto.metrics.calibrators import CALIBRATORS, Calibrator, Temperature, load, save
from catto.problems import DataError
from catto.records import Manifest

On = Literal["confidence", "labels"]
Kind = Literal["temperature", "platt", "isotonic", "histogram"]

# Fills up the rows that have fewer labels than others: at every temperature that a fit may reach its probability is 0.
NO_LABEL = -1e6
# The smallest digests of the fit questions are kept, and no more: of larger sets they are a fair sample.
MANY_QUESTIONS = 10_000


@dataclass(frozen=True)
class LabelTable:
    """Label log-probabilities as columns. logprobs: (N, K); answer, gold: (N,) columns of it; gold None: not known.

    Rows with fewer than K labels are filled up with labels of probability 0.
    """

    logprobs: Floats
    answer: Ints
    gold: Ints | None


def read_labels(path: Path, names: ColumnNames) -> LabelTable:
    """Read the label log-probabilities of every row, with the place of the answer and of the gold label."""
    rows: list[list[float]] = []
    places: dict[str, list[int]] = {"label": [], "gold": []}
    for row, fields in read_answers(path, names):
        try:
            logprobs = logprobs_of(fields)
            answer = answer_of(fields)
            labels = {"label": max(logprobs, key=logprobs.__getitem__) if answer is None else answer}
            if "gold" in fields:
                labels["gold"] = text_of("gold", fields)
            for name, label in labels.items():
                if label not in logprobs:
                    raise ValueError(f"{name}: {label!r} is not one of the labels {', '.join(logprobs)}")
                places[name].append(list(logprobs).index(label))
        except KeyError as error:
            raise DataError(path, row, f"{error.args[0]}: missing") from None
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
        rows.append(list(logprobs.values()))
    if not rows:
        raise DataError(path, None, "holds no rows")
    width = max(map(len, rows))
    filled = np.array([row + [NO_LABEL] * (width - len(row)) for row in rows], dtype=np.float64)
    gold = np.array(places["gold"]) if len(places["gold"]) == len(rows) else None
    return LabelTable(filled, np.array(places["label"]), gold)


@dataclass(frozen=True)
class Fitted:
    """A calibrator, what it reads, and the digests of the questions it was fitted on (None: not known)."""

    calibrator: Calibrator
    on: On
    questions: tuple[str, ...] | None = None

    def confidences(self, answers: Confidences, names: ColumnNames) -> Floats:
        """Return the calibrated confidence of each answer. -> (N,)."""
        if self.on == "confidence":
            return self.calibrator.apply(answers.confidence)
        if not isinstance(self.calibrator, Temperature):
            raise DataError(answers.source, None, "only a temperature can be applied to label log-probabilities")
        labels = read_labels(answers.source, names)
        rescaled = self.calibrator.apply_labels(labels.logprobs)
        return np.asarray(np.exp(rescaled[np.arange(len(rescaled)), labels.answer]), dtype=np.float64)


def fit_file(
    path: Path, kind: Kind, on: On, names: ColumnNames, unparsed: Unparsed, out: Path
) -> tuple[Fitted, GradedAnswers]:
    """Fit on the answers of a file and write the calibrator with its manifest; return both."""
    _check_other_file(path, out, "the calibrator")
    answers = read_graded(path, names, unparsed)
    calibrator: Calibrator
    try:
        if on == "labels":
            labels = read_labels(path, names)
            if labels.gold is None:
                raise ValueError("gold: missing")
            calibrator = Temperature.fit_labels(labels.logprobs, labels.gold)
        else:
            calibrator = CALIBRATORS[kind].fit(answers.confidence, answers.correct)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
    if answers.correct.all() or not answers.correct.any():
        side = "right" if answers.correct.all() else "wrong"
        raise DataError(path, None, f"all {len(answers)} answers are {side}: fitting needs right and wrong ones")
    fitted = Fitted(calibrator, on, None if answers.question is None else _digests(answers.question)[:MANY_QUESTIONS])
    notes = {"on": on, "fitted_on": path.name, "questions": fitted.questions}
    save(calibrator, out)
    counts = {"rows": len(answers)}
    write_manifest(out, Manifest(kind="calibrator", counts=counts, versions=library_versions(), notes=notes))
    return fitted, answers


def _check_other_file(path: Path, out: Path, what: str) -> None:
    if out.exists() and path.exists() and out.samefile(path):
        raise DataError(out, None, f"is the input: write {what} to another file")


def open_fitted(path: Path, on: On | None = None) -> Fitted:
    """Read a calibrator with its manifest; without a manifest, `on` must say what the calibrator reads."""
    calibrator, place = load(path), manifest_path(path)
    if not place.exists():
        if on is None:
            raise DataError(place, None, "missing, so say what the calibrator reads: --on confidence|labels")
        return Fitted(calibrator, on)
    notes = read_manifest(path).notes
    noted, questions = notes.get("on", "confidence"), notes.get("questions")
    if noted not in ("confidence", "labels"):
        raise DataError(place, None, f"notes.on: expected confidence or labels, got {noted!r}")
    if questions is not None and not (isinstance(questions, list) and all(isinstance(one, str) for one in questions)):
        raise DataError(place, None, "notes.questions: expected a list of texts")
    return Fitted(calibrator, on or noted, None if questions is None else tuple(questions))


def _digests(questions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({hashlib.sha256(question.encode()).hexdigest()[:12] for question in questions}))


def shared_questions(fitted: Fitted, answers: Confidences) -> int:
    """Count the fit questions, as far as they were kept, that are among the answers too."""
    return len(set(fitted.questions or ()) & set(_digests(answers.question or ())))


def apply_file(fitted: Fitted, path: Path, names: ColumnNames, out: Path) -> tuple[Confidences, Floats]:
    """Write the rows with the calibrated confidence, the stated one kept as `<column>_raw`; return both columns."""
    _check_other_file(path, out, "the calibrated answers")
    answers = read_confidences(path, names)
    calibrated = fitted.confidences(answers, names)
    raw = f"{names.confidence}_raw"
    with replacing(out) as file:
        pairs = zip(read_answers(path, names), answers.confidence.tolist(), calibrated.tolist(), strict=True)
        for (row, fields), stated, new in pairs:
            fields = fields.maps[0] if isinstance(fields, ChainMap) else fields  # of a log, what it was read as
            if fields.get(raw) is not None:  # catto's own predictions have it, as null
                raise DataError(path, row, f"{raw}: there already, so the row was calibrated before")
            try:
                line = json.dumps({**fields, names.confidence: new, raw: stated}, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError):  # a date of a Parquet file, or a nan that only Python's JSON knows
                message = "holds a value that JSON has no form for (NaN, Infinity or a date)"
                raise DataError(path, row, message) from None
            file.write(line + "\n")
    return answers, calibrated
