"""Fit a calibrator on one file of answers and apply it to another; choose final answers and a threshold for them.

Next to the calibrator is a manifest that says what it reads (`on`: confidences or label log-probabilities) and which
questions it was fitted on, as digests, so that measuring on the fit set can be noticed.

A calibrator that was fitted on final answers (`final_answers`) is applied to final answers of the same protocol, any
other to each sample before one is chosen. A threshold holds for final answers of one protocol and one calibrator.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field
from pydantic.dataclasses import dataclass

from catto.answer_columns import Confidences, GradedAnswers, read_confidences, read_graded
from catto.errors import DataError, data_errors_at
from catto.formats.answers import read_answers
from catto.formats.columns import ColumnNames, answer_of, logprobs_of, text_of
from catto.io import atomic, record_files, text_files
from catto.io.record_files import library_versions, manifest_path, read_manifest
from catto.metrics.binning import Floats
from catto.metrics.calibrators import (
    CALIBRATORS,
    Calibrator,
    Temperature,
    VectorScaling,
    label_table,
    pad_label_logprobs,
    read_calibrator,
)
from catto.metrics.risk import estimate_rows_needed, threshold_for_risk
from catto.metrics.selection import LIKELIEST, choose_adaptively, gather_candidates, samples_by_question
from catto.records import (
    CONFIDENCE_KINDS,
    ConfidenceKind,
    FinalAnswer,
    Manifest,
    Prediction,
    Protocol,
    Record,
    Unparsed,
    content_hash,
)

On = Literal["confidence", "labels"]
Kind = Literal["temperature", "platt", "isotonic", "histogram", "vector"]

# The smallest digests of the fit questions are kept, and no more: of larger sets they are a fair sample.
MANY_QUESTIONS = 10_000
FINAL = "final answers"
OTHER_PROTOCOL = "the calibrator was fitted on final answers of another rule, k, temperature, stop or fallback"


def read_labels(path: Path, names: ColumnNames) -> Iterator[tuple[dict[str, float], str | None, str | None]]:
    """Yield the label log-probabilities of each row, its answer and its gold label; None: the row has none."""
    for row, fields in read_answers(path, names):
        with data_errors_at(path, row):
            logprobs = logprobs_of(fields)
            answer = answer_of(names.prediction or "label", fields)
            gold = text_of(names.gold or "gold", fields) if names.gold or "gold" in fields else None
            for name, label in ((names.prediction or "label", answer), (names.gold or "gold", gold)):
                if label is not None and label not in logprobs:
                    raise ValueError(f"{name}: {label!r} is not one of the labels {', '.join(logprobs)}")
        yield logprobs, answer, gold


@dataclass(frozen=True)
class Fitted:
    """A calibrator, what it reads, and the digests of the questions it was fitted on (None: not known).

    `protocol`: of the final answers that it was fitted on; None: of single samples. `rows` is how many there were.
    """

    calibrator: Calibrator
    on: On = "confidence"
    questions: tuple[str, ...] | None = None
    protocol: Protocol | None = None
    rows: int | None = None
    confidence_kind: ConfidenceKind | None = None  # what it reads, if not the labels' own probabilities

    @property
    def digest(self) -> str:
        """What tells this calibrator from others."""
        identity: list[object] = [self.on, self.calibrator.model_dump()]
        if self.confidence_kind is not None:
            identity.append(self.confidence_kind)
        return content_hash(identity)

    def check_kind(self, kind: str | None) -> None:
        """Raise ValueError if the confidences are of another kind than those that the calibrator was fitted on."""
        own = self.confidence_kind or "label"
        if (kind or "label") != own:
            raise ValueError(f"the calibrator was fitted on the confidence kind {own}, these are {kind or 'label'}")

    def calibrate_samples(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return samples with calibrated confidences; a calibrator of final answers leaves samples as they are.

        ValueError where a sample lacks the label log-probabilities that the calibrator reads. No answer stays at 0.
        """
        if self.protocol is not None:
            return list(predictions)
        for kind in {prediction.confidence_kind for prediction in predictions}:
            self.check_kind(kind)
        if self.on == "confidence":
            new = self.of_confidences([prediction.confidence for prediction in predictions]).tolist()
        else:
            new = [self.find_label_confidence(row.label_logprobs, row.label, row.name) for row in predictions]
        calibrated = []
        for prediction, confidence in zip(predictions, new, strict=True):
            if prediction.choice is None:
                confidence = 0.0
            calibrated.append(prediction.model_copy(update={"confidence": confidence}))
        return calibrated

    def of_confidences(self, confidence: ArrayLike) -> Floats:
        """Return calibrated confidences. (N,) -> (N,)."""
        if isinstance(self.calibrator, VectorScaling):
            raise ValueError("vector scaling reads label log-probabilities, not confidences")
        return self.calibrator.apply(confidence)

    def find_label_confidence(self, logprobs: Mapping[str, float] | None, label: str | None, name: str = "") -> float:
        """Return the calibrated probability of one of the labels; 0 where there is no answer."""
        if label is None:
            return 0.0
        if logprobs is None:
            raise ValueError(f"{name} has no label_logprobs, which the calibrator reads")
        if isinstance(self.calibrator, VectorScaling):
            return self.calibrator.probability(logprobs, label)
        if not isinstance(self.calibrator, Temperature):
            raise ValueError("only a temperature or vector scaling can be applied to label log-probabilities")
        new_logprobs = self.calibrator.apply_labels([list(logprobs.values())])
        return exp(new_logprobs[0, list(logprobs).index(label)])

    def confidences(self, answers: Confidences, names: ColumnNames) -> Floats:
        """Return the calibrated confidence of each answer. -> (N,)."""
        if self.on == "confidence":
            return self.of_confidences(answers.confidence)
        with data_errors_at(answers.source):
            rows = read_labels(answers.source, names)
            confidences = [self.find_label_confidence(logprobs, answer) for logprobs, answer, _ in rows]
        return np.array(confidences, dtype=np.float64)

    def count_fit_questions(self, questions: Iterable[str]) -> int | None:
        """Count the fit questions, as far as they were kept, that are among these too; None: they are not known."""
        return None if self.questions is None else len({*self.questions} & {*_digests(questions)})


def fit_file(
    path: Path, kind: Kind, on: On, names: ColumnNames, unparsed: Unparsed, out: Path
) -> tuple[Fitted, GradedAnswers]:
    """Fit on the answers of a file and write the calibrator with its manifest; return it and the answers."""
    answers = read_uncalibrated(path, names, unparsed)
    fitted = fit_answers(answers, kind, on, names)
    write_fitted(out, fitted, fitted_on=path.name)
    return fitted, answers


def read_uncalibrated(path: Path, names: ColumnNames, unparsed: Unparsed) -> GradedAnswers:
    """Read the answers of a file; DataError if their confidences were calibrated before."""
    if final_notes(path).get("calibrator"):
        raise DataError(path, None, "its confidences are calibrated already: choose answers without a calibrator")
    answers = read_graded(path, names, unparsed)
    _, first = next(iter(read_answers(path, names)))  # `apply_file` marks every row
    if not final_notes(path) and first.get(f"{names.confidence}_raw") is not None:
        raise DataError(path, 1, f"{names.confidence}_raw: there already, so the answers were calibrated before")
    return answers


def fit_answers(
    answers: GradedAnswers, kind: Kind, on: On, names: ColumnNames, rows: Sequence[int] | None = None
) -> Fitted:
    """Fit a calibrator to the answers of a file.

    Args:
        answers: All answers of the file.
        kind: The kind of calibrator.
        on: What it reads; label log-probabilities are read from the file.
        names: Names of the columns.
        rows: The rows to fit on, counted from 0; None means all.
    """
    path = answers.source
    if rows is not None:
        answers = answers.pick_rows(rows)
    with data_errors_at(path):
        if on == "confidence":
            if kind == "vector":
                raise ValueError("vector scaling reads label log-probabilities, not confidences")
            calibrator: Calibrator = CALIBRATORS[kind].fit(answers.confidence, answers.correct)
        else:
            calibrator = _fit_on_labels(path, kind, names, rows)
    if answers.correct.all() or not answers.correct.any():
        side = "right" if answers.correct.all() else "wrong"
        raise DataError(path, None, f"all {len(answers)} answers are {side}: fitting needs right and wrong ones")
    known = None if answers.question is None else _digests(answers.question)[:MANY_QUESTIONS]
    protocol = final_notes(path).get("protocol")
    with data_errors_at(manifest_path(path), field="notes: "):
        return Fitted(calibrator, on, known, protocol, len(answers), _read_kind(path, names))


def _read_kind(path: Path, names: ColumnNames) -> Any:
    """Return the kind of a file's confidences; None for a label's own probability, or if the file does not say."""
    protocol = final_notes(path).get("protocol")
    if protocol is not None:
        return protocol.get("confidence_kind")
    _, first = next(iter(read_answers(path, names)))
    kind = first.get("confidence_kind")
    if kind is not None and names.confidence.startswith("confidences."):
        kind = names.confidence.removeprefix("confidences.")
    return None if kind not in CONFIDENCE_KINDS or kind == "label" else kind


def write_fitted(out: Path, fitted: Fitted, *, fitted_on: str) -> None:
    """Write a calibrator with its manifest, which names the file it was fitted on."""
    protocol = None if fitted.protocol is None else fitted.protocol.model_dump()
    notes = {"on": fitted.on, "fitted_on": fitted_on, "questions": fitted.questions, "protocol": protocol}
    if fitted.confidence_kind is not None:
        notes["confidence_kind"] = fitted.confidence_kind
    manifest_path(out).unlink(missing_ok=True)  # of the calibrator that is replaced
    record_files.write_record(out, fitted.calibrator)
    counts = {"rows": fitted.rows or 0}
    record_files.write_manifest(
        out, Manifest(kind="calibrator", counts=counts, versions=library_versions(), notes=notes)
    )


def _fit_on_labels(path: Path, kind: Kind, names: ColumnNames, rows: Sequence[int] | None) -> Calibrator:
    """Fit a temperature or vector scaling to the label log-probabilities and gold labels of the rows of a file."""
    wanted = None if rows is None else set(rows)
    scores = []
    golds = []
    for row, (logprobs, _, gold) in enumerate(read_labels(path, names)):
        if wanted is not None and row not in wanted:
            continue
        if gold is None:
            raise ValueError("gold: missing")
        scores.append(logprobs)
        golds.append(gold)
    if kind == "vector":
        labels, table = label_table(scores)
        places = [labels.index(gold) for gold in golds]
        return VectorScaling.fit_labels(table, places, labels)
    return Temperature.fit_labels(*pad_label_logprobs(scores, golds))


def open_fitted(path: Path, on: On | None = None) -> Fitted:
    """Read a calibrator with its manifest; without a manifest, `on` must say what the calibrator reads."""
    calibrator = read_calibrator(path)
    place = manifest_path(path)
    if not place.exists():
        if on is None:
            raise DataError(place, None, "missing: copy it beside the calibrator too (calibrate apply takes --on)")
        return Fitted(calibrator, on)
    manifest = read_manifest(path)
    made = {**manifest.notes, "calibrator": calibrator, "rows": manifest.counts.get("rows")}
    with data_errors_at(place, value=manifest.notes, field="notes."):
        return Fitted(**made if on is None else made | {"on": on})


def _digests(questions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({hashlib.sha256(question.encode()).hexdigest()[:12] for question in questions}))


def apply_file(fitted: Fitted, path: Path, names: ColumnNames, out: Path) -> tuple[Confidences, Floats]:
    """Write the rows with the calibrated confidence, the stated one kept as `<column>_raw`; return both columns."""
    answers = read_confidences(path, names)
    kind = _read_kind(path, names)
    if kind is not None or fitted.confidence_kind is not None:
        with data_errors_at(path):
            fitted.check_kind(kind)
    calibrated = fitted.confidences(answers, names)
    raw = f"{names.confidence}_raw"
    final = final_notes(path)
    foreign = fitted.protocol is not None and final.get("protocol") != fitted.protocol.model_dump()
    untouched = bool(final) and final.get("calibrator") is None  # final answers have the model's own as raw
    with atomic.replace_file(out) as file:
        pairs = zip(read_answers(path, names), answers.confidence.tolist(), calibrated.tolist(), strict=True)
        for (row, fields), stated, new in pairs:
            fields = fields.maps[0] if isinstance(fields, ChainMap) else fields  # of a log, what it was read as
            if fields.get(raw) is not None and not untouched:  # catto's own predictions have it, as null
                raise DataError(path, row, f"{raw}: there already, so the row was calibrated before")
            if foreign:
                raise DataError(path, None, OTHER_PROTOCOL)
            try:
                line = json.dumps({**fields, names.confidence: new, raw: stated}, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError):  # a date of a Parquet file, or a nan that only Python's JSON knows
                message = "holds a value that JSON has no form for (NaN, Infinity or a date)"
                raise DataError(path, row, message) from None
            file.write(line + "\n")
        manifest_path(out).unlink(missing_ok=True)  # of the file that is replaced
    return answers, calibrated


def final_answers(
    predictions: Sequence[Prediction], protocol: Protocol, fitted: Fitted | None = None
) -> list[FinalAnswer]:
    """Choose one answer a question of the first k samples, as the protocol says, with its calibrated confidence.

    The calibrator must be of single samples or of this protocol.
    """
    rows = [row[: protocol.k] for row in samples_by_question(predictions)]
    if len(rows[0]) < protocol.k:
        raise ValueError(f"k is {protocol.k}, there are {len(rows[0])} samples per question")
    samples = [sample for row in rows for sample in row]
    given = gather_candidates(samples if fitted is None else fitted.calibrate_samples(samples))
    if protocol.rule == LIKELIEST and np.isnan(given.logprob).all():
        raise ValueError(f"{LIKELIEST} needs mean_logprob, which no sample has")
    (places, confidence), taken = choose_adaptively(given, protocol.rule, protocol.stop)
    if fitted is not None and fitted.protocol is not None:
        confidence = fitted.of_confidences(confidence)
    answers = []
    for row, place, stated, count in zip(rows, places.tolist(), confidence.tolist(), taken.tolist(), strict=True):
        chosen = row[place]
        used = row[:count]
        tokens = [other.tokens for other in used if other.tokens is not None]
        answer = FinalAnswer(
            **chosen.model_dump(include={"question", "sample", "label", "answer", "gold", "source"}),
            correct=chosen.is_correct,
            confidence=stated if chosen.choice is not None else 0.0,
            confidence_raw=chosen.confidence,
            samples=count,
            votes=sum(other.choice == chosen.choice for other in used if other.choice is not None),
            tokens=sum(tokens) if len(tokens) == count else None,
        )
        answers.append(answer)
    return answers


def write_final(
    out: Path, predictions: Sequence[Prediction], protocol: Protocol, fitted: Fitted | None, *, own_stop: bool = False
) -> list[FinalAnswer]:
    """Write the final answers with a manifest of how they were made; see `final_answers`.

    own_stop: where sampling stops was chosen by the gold labels of these questions.
    """
    if fitted is not None and fitted.protocol not in (None, protocol):
        raise ValueError(OTHER_PROTOCOL)
    if any(row.confidence_raw is not None for row in predictions):
        raise ValueError("the samples are calibrated already: give them as predicted, and the --calibrator")
    answers = final_answers(predictions, protocol, fitted)
    notes = {
        "protocol": protocol.model_dump(),
        "calibrator": fitted.digest if fitted else None,
        # How many of these questions the calibrator was fitted on; None: that is not known.
        "fitted_on": fitted.count_fit_questions(answer.question for answer in answers) if fitted else 0,
        "models": sorted({prediction.model for prediction in predictions}),
        "own_stop": protocol.stop if own_stop else None,
    }
    counts = {"answers": len(answers)}
    record_files.write_records(
        out, answers, Manifest(kind=FINAL, counts=counts, versions=library_versions(), notes=notes)
    )
    return answers


def final_notes(path: Path) -> dict[str, Any]:
    """The notes of a file of final answers; none where it is another file."""
    manifest = read_manifest(path) if manifest_path(path).exists() else None
    return manifest.notes if manifest is not None and manifest.kind == FINAL else {}


class RiskThreshold(Record):
    """Answer at `confidence >= threshold`: at most `risk` of the answers are wrong, with probability 1 - delta.

    This holds for final answers of the protocol with the calibrator of that digest, to questions like the `rows` that
    it was fitted on, of which it answers the share `coverage`.
    """

    schema_version: Literal[1] = 1
    kind: Literal["threshold"] = "threshold"
    threshold: float = Field(ge=0, le=1)
    risk: float = Field(gt=0, lt=1)
    delta: float = Field(gt=0, lt=1)
    coverage: float
    answered: int
    errors: int
    bound: float
    rows: int
    protocol: Protocol
    calibrator: str | None
    models: tuple[str, ...] = ()

    @property
    def promise(self) -> dict[str, float]:
        """What holds for the answers at or above the threshold."""
        return {"risk": self.risk, "confidence_level": 1.0 - self.delta, "coverage": self.coverage}


def fit_threshold(path: Path, risk: float, delta: float, out: Path) -> RiskThreshold:
    """Find the threshold for final answers and write it; DataError where none can promise the risk."""
    with text_files.open_input(path):  # refuses a folder, and what is missing
        notes = final_notes(path)
    if "protocol" not in notes:
        raise DataError(path, None, "not a file of final answers, which catto select --rule ... --out writes")
    shared = notes.get("fitted_on")
    if shared:
        raise DataError(path, None, f"the calibrator was fitted on {shared} of these questions: use others")
    stop = notes.get("own_stop")
    if stop is not None:
        raise DataError(path, None, f"--stop {stop} was chosen on these questions: use others, and give it there")
    made_with = {name: notes.get(name) for name in ("protocol", "calibrator", "models")}
    threshold = find_threshold(read_graded(path), risk, delta, made_with)
    record_files.write_record(out, threshold)
    return threshold


def find_threshold(answers: GradedAnswers, risk: float, delta: float, made_with: Mapping[str, Any]) -> RiskThreshold:
    """Find the threshold for answers with calibrated confidences; DataError where none can promise the risk.

    Args:
        answers: One answer per question.
        risk: Largest share of wrong answers.
        delta: Probability with which the promise may fail.
        made_with: `protocol` of the answers, digest of the `calibrator`, and `models`.
    """
    path = answers.source
    fitted = threshold_for_risk(answers.confidence, answers.correct, risk, delta)
    if fitted.threshold is None:
        promise = f"an error rate of at most {100 * risk:g} % with {100 * (1 - delta):g} % confidence"
        wrong = int((~answers.correct).sum())
        needed = estimate_rows_needed(answers.confidence, answers.correct, risk, delta)
        advice = "more answers would probably not help"
        if needed is not None:
            advice = f"about {needed:,} answers would probably be enough"
        raise DataError(
            path,
            None,
            f"no threshold can promise {promise}: {wrong} of {len(answers)} answers are wrong; {advice}",
        )
    with data_errors_at(manifest_path(path), field="notes: "):
        return RiskThreshold.model_validate({**asdict(fitted), "rows": len(answers), **made_with})
