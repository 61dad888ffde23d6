"""Fit a calibrator on one file of answers and apply it to another; choose final answers and a threshold for them.

The manifest of a calibrator says what it reads (`on`: confidences or label log-probabilities). It also has digests of
the questions that the calibrator was fitted on, so that measuring on the fit set can be detected.

A calibrator fitted on final answers (`final_answers`) is applied to final answers of the same protocol. Any other
calibrator is applied to each sample, before one is chosen. A threshold is valid for one protocol and one calibrator.
"""

from __future__ import annotations

import hashlib
import json
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from catto.metrics.selection import LIKELIEST, Candidates, choose_adaptively, gather_candidates, samples_by_question
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

# At most this many digests of fit questions are kept. They are the smallest ones: a fair sample of a larger set.
MANY_QUESTIONS = 10_000
FINAL = "final answers"
OTHER_PROTOCOL = "the calibrator was fitted on final answers with a different rule, k, temperature, stop or fallback"


class LabelRow(NamedTuple):
    """What calibration on labels reads from a row.

    Attributes:
        logprobs: Label -> log-probability.
        answer: The label of the answer; None if the response has none.
        gold: The gold label; None if the file has no gold labels.
    """

    logprobs: dict[str, float]
    answer: str | None
    gold: str | None


def read_labels(path: Path, names: ColumnNames) -> Iterator[LabelRow]:
    """Yield the label log-probabilities of each row, its answer and its gold label.

    Raises:
        DataError: A row has no log-probabilities, or its answer or gold label is not among them.
    """
    answer_column = names.prediction or "label"
    gold_column = names.gold or "gold"
    for row, fields in read_answers(path, names):
        with data_errors_at(path, row):
            logprobs = logprobs_of(fields)
            answer = answer_of(answer_column, fields)
            gold = None
            if names.gold or "gold" in fields:
                gold = text_of(gold_column, fields)
            _require_label(answer, answer_column, logprobs)
            _require_label(gold, gold_column, logprobs)
        yield LabelRow(logprobs, answer, gold)


def _require_label(label: str | None, column: str, logprobs: Mapping[str, float]) -> None:
    """Raise ValueError for a label without a log-probability."""
    if label is not None and label not in logprobs:
        raise ValueError(f"{column}: {label!r} is not one of the labels {', '.join(logprobs)}")


@dataclass(frozen=True)
class Fitted:
    """A calibrator, and what it was fitted on.

    Attributes:
        calibrator: The calibrator.
        on: What it reads: `confidence`, or `labels` for the label log-probabilities.
        questions: Digests of the questions it was fitted on, at most `MANY_QUESTIONS`; None if they are not known.
        protocol: How its final answers were made, if it was fitted on final answers; None for single samples.
        rows: Number of answers it was fitted on; None if not known.
        confidence_kind: The kind of confidence it reads; None for the labels' own probabilities.
    """

    calibrator: Calibrator
    on: On = "confidence"
    questions: tuple[str, ...] | None = None
    protocol: Protocol | None = None
    rows: int | None = None
    confidence_kind: ConfidenceKind | None = None

    @property
    def digest(self) -> str:
        """Identifies the calibrator: calibrators with equal digests give equal confidences."""
        identity: list[object] = [self.on, self.calibrator.model_dump()]
        if self.confidence_kind is not None:  # else the digest is that of versions without this field
            identity.append(self.confidence_kind)
        return content_hash(identity)

    def check_kind(self, kind: str | None) -> None:
        """Raise ValueError if the calibrator was fitted on a different kind of confidence; None means `label`."""
        own_kind = self.confidence_kind or "label"
        given_kind = kind or "label"
        if given_kind != own_kind:
            given = f"these confidences are of the kind {given_kind}"
            raise ValueError(f"the calibrator was fitted on the confidence kind {own_kind}, but {given}")

    def calibrate_samples(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return samples with calibrated confidences.

        A sample without an answer is never right, so it gets confidence 0 whatever the calibrator makes of it. A
        calibrator for final answers leaves all samples unchanged: it is applied after one of them is chosen.

        Raises:
            ValueError: A sample has a different kind of confidence, or lacks label log-probabilities that are needed.
        """
        is_for_final_answers = self.protocol is not None
        if is_for_final_answers:
            return list(predictions)
        for kind in {prediction.confidence_kind for prediction in predictions}:
            self.check_kind(kind)
        if self.on == "confidence":
            confidences = self.calibrate_confidences([prediction.confidence for prediction in predictions]).tolist()
        else:
            confidences = []
            for prediction in predictions:  # 0 for a sample without a label, which may have no log-probabilities
                confidence = self.find_label_confidence(prediction.label_logprobs, prediction.label, prediction.name)
                confidences.append(confidence)
        calibrated = []
        for prediction, confidence in zip(predictions, confidences, strict=True):
            has_answer = prediction.choice is not None
            if not has_answer:
                confidence = 0.0
            calibrated.append(prediction.model_copy(update={"confidence": confidence}))
        return calibrated

    def calibrate_confidences(self, confidence: ArrayLike) -> Floats:
        """Return calibrated confidences; raise ValueError for vector scaling, which reads labels. (N,) -> (N,)."""
        if isinstance(self.calibrator, VectorScaling):
            raise ValueError("vector scaling reads label log-probabilities, not confidences")
        return self.calibrator.apply(confidence)

    def find_label_confidence(self, logprobs: Mapping[str, float] | None, label: str | None, name: str = "") -> float:
        """Return the calibrated probability of one of the labels.

        Args:
            logprobs: Label -> log-probability.
            label: The label; None means that there is no answer, and has probability 0.
            name: What the log-probabilities belong to, for the error message.

        Raises:
            ValueError: There are no log-probabilities, or the calibrator cannot be applied to labels.
        """
        if label is None:
            return 0.0
        if logprobs is None:
            raise ValueError(f"{name} has no label_logprobs, which the calibrator reads")
        if isinstance(self.calibrator, VectorScaling):
            return self.calibrator.probability(logprobs, label)
        if not isinstance(self.calibrator, Temperature):
            raise ValueError("only a temperature or vector scaling can be applied to label log-probabilities")
        label_index = list(logprobs).index(label)
        calibrated_logprobs = self.calibrator.apply_labels([list(logprobs.values())])
        return exp(calibrated_logprobs[0, label_index])

    def calibrate_answers(self, answers: Confidences, names: ColumnNames) -> Floats:
        """Return the calibrated confidence of each answer, (N,). Label log-probabilities are read from the file."""
        if self.on == "confidence":
            return self.calibrate_confidences(answers.confidence)
        with data_errors_at(answers.source):
            rows = read_labels(answers.source, names)
            confidences = [self.find_label_confidence(row.logprobs, row.answer) for row in rows]
        return np.array(confidences, dtype=np.float64)

    def count_fit_questions(self, questions: Iterable[str]) -> int | None:
        """Count these questions that are among the stored fit questions; None if the fit questions are not known."""
        if self.questions is None:
            return None
        shared = {*self.questions} & {*_digest_questions(questions)}
        return len(shared)


def fit_file(
    path: Path, kind: Kind, on: On, names: ColumnNames, unparsed: Unparsed, out: Path
) -> tuple[Fitted, GradedAnswers]:
    """Fit a calibrator on the answers of a file, and write it with its manifest.

    Args:
        path: The file with the answers.
        kind: The kind of calibrator.
        on: What it reads: `confidence`, or `labels` for the label log-probabilities.
        names: Names of the columns.
        unparsed: How forced answers count: `wrong` counts all of them as wrong, `fallback` grades them like any other
            answer.
        out: The file to write.

    Returns:
        The calibrator, and the answers it was fitted on.

    Raises:
        DataError: The answers cannot be read or fitted on, or they are already calibrated.
    """
    answers = read_uncalibrated(path, names, unparsed)
    fitted = fit_answers(answers, kind, on, names)
    write_fitted(out, fitted, fitted_on=path.name)
    return fitted, answers


def read_uncalibrated(path: Path, names: ColumnNames, unparsed: Unparsed) -> GradedAnswers:
    """Read the answers of a file; raise DataError if their confidences are already calibrated."""
    if final_notes(path).get("calibrator"):
        raise DataError(path, None, "its confidences are already calibrated: choose answers without a calibrator")
    answers = read_graded(path, names, unparsed)  # raises for a file without rows, so there is a first row
    # `apply_file` writes this column into every row, so checking the first row is enough. Final answers have it even if
    # they are not calibrated.
    raw_column = f"{names.confidence}_raw"
    _, first_row = next(iter(read_answers(path, names)))
    is_final = bool(final_notes(path))
    if not is_final and first_row.get(raw_column) is not None:
        raise DataError(path, 1, f"{raw_column}: already there, so the answers were calibrated before")
    return answers


def fit_answers(
    answers: GradedAnswers, kind: Kind, on: On, names: ColumnNames, rows: Sequence[int] | None = None
) -> Fitted:
    """Fit a calibrator to the answers of a file.

    Args:
        answers: All answers of the file.
        kind: The kind of calibrator.
        on: What it reads: `confidence`, or `labels` for the label log-probabilities, which are read from the file.
        names: Names of the columns.
        rows: The rows to fit on, counted from 0; None means all.

    Returns:
        The calibrator, with the questions it was fitted on and, for final answers, their protocol.

    Raises:
        DataError: The kind cannot read `on`, or the answers are all right or all wrong.
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
    # Most calibrators would fit such answers without an error (only Platt scaling refuses), but the result is useless.
    all_right = answers.correct.all()
    all_wrong = not answers.correct.any()
    if all_right or all_wrong:
        side = "right" if all_right else "wrong"
        raise DataError(path, None, f"all {len(answers)} answers are {side}: fitting needs both right and wrong ones")
    question_digests = None
    if answers.question is not None:  # `count_fit_questions` later finds answers to the same questions
        question_digests = _digest_questions(answers.question)[:MANY_QUESTIONS]  # the smallest: they are sorted
    with data_errors_at(manifest_path(path), field="notes: "):  # the protocol in the manifest may be invalid
        return Fitted(
            calibrator,
            on=on,
            questions=question_digests,
            protocol=final_notes(path).get("protocol"),
            rows=len(answers),
            confidence_kind=_read_kind(path, names),
        )


def _read_kind(path: Path, names: ColumnNames) -> Any:
    """Return the kind of a file's confidences; None for a label's own probability, or if the file does not say.

    The callers have already read the file, so it has a first row.
    """
    protocol = final_notes(path).get("protocol")
    if protocol is not None:
        return protocol.get("confidence_kind")
    _, first = next(iter(read_answers(path, names)))
    kind = first.get("confidence_kind")
    # `--confidence confidences.ptrue` selects a different kind than the main one.
    if kind is not None and names.confidence.startswith("confidences."):
        kind = names.confidence.removeprefix("confidences.")
    is_known = kind in CONFIDENCE_KINDS  # the column may have another meaning in files of other tools
    if not is_known or kind == "label":
        return None
    return kind


def write_fitted(out: Path, fitted: Fitted, *, fitted_on: str) -> None:
    """Write a calibrator with its manifest, which names the file it was fitted on."""
    protocol = None if fitted.protocol is None else fitted.protocol.model_dump()
    notes = {"on": fitted.on, "fitted_on": fitted_on, "questions": fitted.questions, "protocol": protocol}
    if fitted.confidence_kind is not None:
        notes["confidence_kind"] = fitted.confidence_kind
    # A kill must not leave the new calibrator next to the manifest of the old one.
    manifest_path(out).unlink(missing_ok=True)
    record_files.write_record(out, fitted.calibrator)
    counts = {"rows": fitted.rows or 0}
    record_files.write_manifest(
        out, Manifest(kind="calibrator", counts=counts, versions=library_versions(), notes=notes)
    )


def _fit_on_labels(path: Path, kind: Kind, names: ColumnNames, rows: Sequence[int] | None) -> Calibrator:
    """Fit a temperature or vector scaling to the label log-probabilities and gold labels of a file.

    Args:
        path: The file.
        kind: `vector`; any other kind fits a temperature.
        names: Names of the columns.
        rows: The rows to fit on, counted from 0; None means all.

    Raises:
        ValueError: A row has no gold label.
    """
    fit_rows = None if rows is None else set(rows)
    logprobs = []
    golds = []
    for number, row in enumerate(read_labels(path, names)):
        if fit_rows is not None and number not in fit_rows:
            continue
        if row.gold is None:
            raise ValueError("gold: missing")
        logprobs.append(row.logprobs)
        golds.append(row.gold)
    if kind == "vector":
        labels, table = label_table(logprobs)
        gold_indices = [labels.index(gold) for gold in golds]
        return VectorScaling.fit_labels(table, gold_indices, labels)
    return Temperature.fit_labels(*pad_label_logprobs(logprobs, golds))


def open_fitted(path: Path, on: On | None = None) -> Fitted:
    """Read a calibrator with its manifest.

    Args:
        path: The calibrator.
        on: What the calibrator reads: `confidence`, or `labels` for the label log-probabilities. It replaces what the
            manifest says. None is allowed only if there is a manifest.

    Returns:
        The calibrator, and what the manifest says about it. Without a manifest, what it was fitted on is not known.

    Raises:
        DataError: The calibrator cannot be read, or there is neither a manifest nor `on`.
    """
    calibrator = read_calibrator(path)
    manifest_file = manifest_path(path)
    if not manifest_file.exists():
        if on is None:
            problem = "missing: copy it next to the calibrator too (or use calibrate apply --on)"
            raise DataError(manifest_file, None, problem)
        return Fitted(calibrator, on)
    manifest = read_manifest(path)
    attributes = {**manifest.notes, "calibrator": calibrator, "rows": manifest.counts.get("rows")}
    if on is not None:
        attributes["on"] = on
    with data_errors_at(manifest_file, value=manifest.notes, field="notes."):
        return Fitted(**attributes)  # ignores notes that are not among its fields, such as `fitted_on`


def _digest_questions(questions: Iterable[str]) -> tuple[str, ...]:
    """Return a short digest of each distinct question id, sorted."""
    digests = {hashlib.sha256(question.encode()).hexdigest()[:12] for question in questions}
    return tuple(sorted(digests))


def apply_file(fitted: Fitted, path: Path, names: ColumnNames, out: Path) -> tuple[Confidences, Floats]:
    """Write the rows of a file with calibrated confidences, and the uncalibrated ones in the column `<column>_raw`.

    Args:
        fitted: The calibrator.
        path: Any file that `catto measure` reads; gold labels are optional.
        names: Names of the columns.
        out: The file to write, as JSON lines.

    Returns:
        The answers as they were read, and their calibrated confidences, (N,).

    Raises:
        DataError: The rows are already calibrated, or the calibrator was fitted on a different kind of confidence or
            on final answers of a different protocol.
    """
    answers = read_confidences(path, names)
    with data_errors_at(path):
        fitted.check_kind(_read_kind(path, names))
    calibrated = fitted.calibrate_answers(answers, names)
    raw_column = f"{names.confidence}_raw"
    # Final answers, one per question and chosen from several samples, have a manifest with notes: the protocol by which
    # they were chosen, and the calibrator that was applied. Other files have no notes.
    notes = final_notes(path)
    has_other_protocol = fitted.protocol is not None and notes.get("protocol") != fitted.protocol.model_dump()
    # Even uncalibrated final answers have the raw column: the confidence of the chosen sample. It may be replaced.
    is_uncalibrated_final = bool(notes) and notes.get("calibrator") is None
    with atomic.replace_file(out) as file:
        rows = zip(read_answers(path, names), answers.confidence.tolist(), calibrated.tolist(), strict=True)
        for (row, fields), uncalibrated_value, calibrated_value in rows:
            if isinstance(fields, ChainMap):
                fields = fields.maps[0]  # catto's fields of a row of another tool, without the row itself
            has_raw_value = fields.get(raw_column) is not None  # predictions have the column, but with null
            if has_raw_value and not is_uncalibrated_final:
                raise DataError(path, row, f"{raw_column}: already there, so the row was calibrated before")
            # Checked only now: a file that `apply_file` wrote has no notes, so it has no protocol either, and the error
            # above explains that case better.
            if has_other_protocol:
                raise DataError(path, None, OTHER_PROTOCOL)
            document = {**fields, names.confidence: calibrated_value, raw_column: uncalibrated_value}
            file.write(_dump_json_line(document, path, row))
        # The manifest describes the file that is replaced. It is deleted first: after a kill in between, a file without
        # a manifest is left, and not a new file with an old one.
        manifest_path(out).unlink(missing_ok=True)
    return answers, calibrated


def _dump_json_line(document: Mapping[str, Any], path: Path, row: int) -> str:
    try:
        line = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # a date from a Parquet file, or NaN, which only Python's JSON parser accepts
        message = "a value cannot be written as JSON (NaN, Infinity or a date)"
        raise DataError(path, row, message) from None
    return line + "\n"


def final_answers(
    predictions: Sequence[Prediction], protocol: Protocol, fitted: Fitted | None = None
) -> list[FinalAnswer]:
    """Choose one answer per question among its first k samples, following the protocol.

    A calibrator for single samples is applied before the choice, a calibrator for final answers after it.

    Args:
        predictions: Uncalibrated samples, equally many for every question.
        protocol: How one answer is made from k samples.
        fitted: A calibrator for single samples, or one for final answers of this protocol, which the caller has
            checked. None leaves the confidences unchanged.

    Returns:
        One answer per question, in the order of the questions' first samples.

    Raises:
        ValueError: There are fewer than k samples per question, or they lack what the rule or the calibrator needs.
    """
    samples_of_questions = [samples[: protocol.k] for samples in samples_by_question(predictions)]
    # `samples_by_question` has checked that there are equally many for every question, and at least one.
    samples_per_question = len(samples_of_questions[0])
    if samples_per_question < protocol.k:
        raise ValueError(f"k is {protocol.k}, but there are {samples_per_question} samples per question")
    candidates = _gather_candidates(samples_of_questions, fitted)
    if protocol.rule == LIKELIEST and np.isnan(candidates.logprob).all():
        raise ValueError(f"{LIKELIEST} needs mean_logprob, which no sample has")
    choice, sample_counts = choose_adaptively(candidates, protocol.rule, protocol.stop)
    confidences = choice.confidence
    if fitted is not None and fitted.protocol is not None:
        confidences = fitted.calibrate_confidences(confidences)
    answers = []
    for question_index, samples in enumerate(samples_of_questions):
        answer = _make_final_answer(
            samples[: int(sample_counts[question_index])],
            chosen=samples[int(choice.place[question_index])],
            confidence=float(confidences[question_index]),
        )
        answers.append(answer)
    return answers


def _gather_candidates(samples_of_questions: Iterable[Sequence[Prediction]], fitted: Fitted | None) -> Candidates:
    """Return the samples as arrays. A calibrator for single samples is applied to their confidences first."""
    samples: list[Prediction] = []
    for samples_of_question in samples_of_questions:
        samples += samples_of_question
    if fitted is not None and fitted.protocol is None:
        samples = fitted.calibrate_samples(samples)
    return gather_candidates(samples)


def _make_final_answer(samples: Sequence[Prediction], *, chosen: Prediction, confidence: float) -> FinalAnswer:
    """Return the final answer to a question, with the number of samples, votes and tokens that it took.

    Args:
        samples: The samples up to the one at which sampling stopped.
        chosen: The sample among them that gives the answer.
        confidence: The confidence of the chosen sample, calibrated if there is a calibrator.

    Returns:
        The final answer. Its confidence is 0 if the chosen response has no answer. Its number of tokens is None if it
        is not known for all samples.
    """
    if chosen.choice is None:
        confidence = 0.0  # a response without an answer is never right
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    all_have_tokens = len(tokens) == len(samples)
    votes = sum(sample.choice == chosen.choice for sample in samples if sample.choice is not None)
    return FinalAnswer(
        **chosen.model_dump(include={"question", "sample", "label", "answer", "gold", "source"}),
        correct=chosen.is_correct,
        confidence=confidence,
        confidence_raw=chosen.confidence,
        samples=len(samples),
        votes=votes,
        tokens=sum(tokens) if all_have_tokens else None,
    )


def write_final(
    out: Path, predictions: Sequence[Prediction], protocol: Protocol, fitted: Fitted | None, *, own_stop: bool = False
) -> list[FinalAnswer]:
    """Write the final answers with a manifest that says how they were made; see `final_answers`.

    Args:
        out: The file to write.
        predictions: Uncalibrated samples, equally many for every question.
        protocol: How one answer is made from k samples.
        fitted: The calibrator; None leaves the confidences unchanged.
        own_stop: Whether `protocol.stop` was chosen with the gold labels of these questions.

    Returns:
        One answer per question, in the order of the questions' first samples.

    Raises:
        ValueError: The samples are already calibrated, or the calibrator is for final answers of a different protocol.
    """
    if fitted is not None and fitted.protocol not in (None, protocol):
        raise ValueError(OTHER_PROTOCOL)
    if any(prediction.confidence_raw is not None for prediction in predictions):
        raise ValueError("the samples are already calibrated: use the uncalibrated samples with --calibrator")
    answers = final_answers(predictions, protocol, fitted)
    digest = None
    shared_count: int | None = 0
    if fitted is not None:
        digest = fitted.digest
        shared_count = fitted.count_fit_questions(answer.question for answer in answers)
    # `fit_threshold` reads these notes. It stores with the threshold how the answers were made, and refuses answers to
    # questions on which the calibrator was fitted or the stop was chosen.
    notes = {
        "protocol": protocol.model_dump(),
        "calibrator": digest,
        # The number of these questions that the calibrator was fitted on; None if not known.
        "fitted_on": shared_count,
        "models": sorted({prediction.model for prediction in predictions}),
        "own_stop": protocol.stop if own_stop else None,
    }
    counts = {"answers": len(answers)}
    record_files.write_records(
        out, answers, Manifest(kind=FINAL, counts=counts, versions=library_versions(), notes=notes)
    )
    return answers


def final_notes(path: Path) -> dict[str, Any]:
    """Return the notes in the manifest of a file of final answers; an empty dict for any other file."""
    if not manifest_path(path).exists():
        return {}
    manifest = read_manifest(path)
    return manifest.notes if manifest.kind == FINAL else {}


class RiskThreshold(Record):
    """Answer if `confidence >= threshold`: at most `risk` of the answers are wrong, with probability 1 - delta.

    This holds for final answers with the same protocol and calibrator, and for questions like those that the threshold
    was fitted on.

    Attributes:
        threshold: The smallest confidence of an answer that is given.
        risk: Largest share of wrong answers.
        delta: Probability with which this guarantee may fail.
        coverage: Share of the `rows` that are answered.
        answered: Number of the `rows` that are answered.
        errors: Number of answered rows that are wrong.
        bound: Upper confidence bound on the share of wrong answers, at most `risk`.
        rows: Number of answers that the threshold was fitted on, one per question.
        protocol: How the answers were made.
        calibrator: Digest of the calibrator; None if the confidences were not calibrated.
        models: The models that answered; empty if not known.
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
        """The guarantee for the answers at or above the threshold."""
        return {"risk": self.risk, "confidence_level": 1.0 - self.delta, "coverage": self.coverage}


def fit_threshold(path: Path, risk: float, delta: float, out: Path) -> RiskThreshold:
    """Find a confidence at or above which at most a given share of the final answers is wrong, and write it.

    The calibrator and the confidence at which sampling stops (`--stop`) must come from other questions. Otherwise the
    answers look better than those to new questions, and the guarantee fails.

    Args:
        path: Final answers with their manifest.
        risk: Largest share of wrong answers.
        delta: Probability with which this guarantee may fail.
        out: The file to write.

    Returns:
        The threshold as it was written.

    Raises:
        DataError: These are not final answers, the calibrator or the stop comes from the same questions, or no
            threshold can guarantee the risk.
    """
    with text_files.open_input(path):
        pass  # raises for a folder or a missing file, for which `final_notes` would return {}
    notes = final_notes(path)
    if "protocol" not in notes:
        raise DataError(path, None, "not a file of final answers: make one with catto select --rule ... --out")
    shared_count = notes.get("fitted_on")
    if shared_count:
        problem = f"the calibrator was fitted on {shared_count} of these questions: use answers to other questions"
        raise DataError(path, None, problem)
    stop = notes.get("own_stop")
    if stop is not None:
        advice = f"run catto select on other questions with --stop {stop}, and use those answers"
        raise DataError(path, None, f"--stop {stop} was chosen on these questions: {advice}")
    # Stored with the threshold, whose guarantee holds only for answers that are made in the same way.
    made_with = {name: notes.get(name) for name in ("protocol", "calibrator", "models")}
    threshold = find_threshold(read_graded(path), risk, delta, made_with)
    record_files.write_record(out, threshold)
    return threshold


def find_threshold(answers: GradedAnswers, risk: float, delta: float, made_with: Mapping[str, Any]) -> RiskThreshold:
    """Find the threshold for answers with calibrated confidences.

    Args:
        answers: One answer per question.
        risk: Largest share of wrong answers.
        delta: Probability with which this guarantee may fail.
        made_with: The `protocol` of the answers, the digest of the `calibrator`, and the `models`.

    Returns:
        The threshold, with the number of answers above it and how many of these are wrong.

    Raises:
        DataError: No threshold can guarantee the risk.
    """
    path = answers.source
    found = threshold_for_risk(answers.confidence, answers.correct, risk, delta)
    if found.threshold is None:
        promise = f"an error rate of at most {100 * risk:g} % with {100 * (1 - delta):g} % confidence"
        wrong = int((~answers.correct).sum())
        answers_needed = estimate_rows_needed(answers.confidence, answers.correct, risk, delta)
        advice = "more answers would probably not help"
        if answers_needed is not None:
            advice = f"about {answers_needed:,} answers would probably be enough"
        raise DataError(
            path,
            None,
            f"no threshold can promise {promise}: {wrong} of {len(answers)} answers are wrong; {advice}",
        )
    with data_errors_at(manifest_path(path), field="notes: "):  # `made_with` may come from the manifest unchecked
        return RiskThreshold.model_validate({**asdict(found), "rows": len(answers), **made_with})
