"""Keep the confidence of every answer until feedback says whether the answer was right."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from catto.metrics.alarm import ALARM_LIMIT, ErrorRateAlarm
from catto.metrics.errors import brier, ece
from catto.records import Protocol
from catto.serve.promise import ServedPromise

logger = logging.getLogger("catto.serve")

MAX_PENDING_ANSWERS = 50_000
# The rolling numbers cover this many graded answers.
ROLLING_ANSWERS = 1000
LOGGED_FIELDS = ("confidence", "confidence_raw", "label", "source", "k", "rule", "abstained")
REFIT = "answers have no guarantee until calibrator and threshold are fitted again with catto calibrate fit"


class LogRow(BaseModel, extra="allow", frozen=True):
    """One answer in the log.

    Its extra fields are the other `LOGGED_FIELDS`, the time and the protocol.

    Attributes:
        id: Id of the answer.
        confidence: The calibrated confidence.
        correct: Whether the answer was right; None without feedback.
        model: The served model.
        calibrator: Digest of the calibrator that was applied; None without one.
        promise: Digest of the promise that covers the answer; None without one.
        evidence: Evidence against the promise, including the feedback on this answer; None without a promise.
    """

    id: str
    confidence: float = Field(ge=0, le=1)
    correct: bool | None = None
    model: str | None = None
    calibrator: str | None = None
    promise: str | None = None
    evidence: float | None = None


class FeedbackLog:
    """Store answers in `<log>.pending.jsonl`, and append them to the log once they have feedback.

    `catto measure` reads the log. Without a path, answers are kept only in memory. Feedback on answers that the promise
    covers updates `alarm`; after a restart, the alarm is computed again from the log.

    Args:
        path: The log, a file of JSON lines; None writes no file.
        model: The served model.
        calibrator: Digest of the calibrator; None without one.
        promise: What the gateway promises about its answers; None if it promises nothing.

    Attributes:
        pending_path: The file of the answers without feedback; None without a log.
        alarm: The evidence that the promise is broken.
        pending: Id -> JSON of each answer that waits for feedback, oldest first. JSON takes a fifth of a row's memory.
        graded: The last answers with feedback.
    """

    def __init__(
        self, path: Path | None, model: str, calibrator: str | None, promise: ServedPromise | None = None
    ) -> None:
        self.path = path
        self.pending_path: Path | None = None
        if path is not None:
            self.pending_path = path.with_name(path.name.removesuffix(".jsonl") + ".pending.jsonl")
        self.model = model
        self.calibrator = calibrator
        self.promise = promise
        self.alarm = ErrorRateAlarm()
        self.pending: OrderedDict[str, str] = OrderedDict()
        self.graded: deque[LogRow] = deque(maxlen=ROLLING_ANSWERS)
        for row in _read_rows(self.pending_path):
            self._add_pending(row)
        for row in _read_rows(self.path):
            # An answer stays in the pending file when it gets feedback, since rows are only appended.
            self.pending.pop(row.id, None)
            self.graded.append(row)
            self._update_alarm(row)

    def _update_alarm(self, row: LogRow) -> float | None:
        """Update the alarm with a graded answer; return the evidence, or None if no promise covers the answer."""
        promise = self.promise
        if promise is None or row.correct is None:
            return None
        is_covered = row.promise == promise.digest and row.model == self.model
        if not is_covered:
            return None
        allowed_rate = promise.find_allowed_rate(row.confidence)
        self.alarm.add_answer(is_wrong=not row.correct, allowed_rate=allowed_rate)
        return self.alarm.evidence

    def _add_pending(self, row: LogRow) -> None:
        self.pending[row.id] = row.model_dump_json(exclude_none=True)
        if len(self.pending) > MAX_PENDING_ANSWERS:
            self.pending.popitem(last=False)

    def add_answer(self, answer_id: str, reply_fields: Mapping[str, Any], protocol: Protocol) -> None:
        """Store an answer until it gets feedback.

        An answer without a confidence is not stored, because nothing about its calibration can be measured.

        Args:
            answer_id: Id of the answer.
            reply_fields: Its `catto` object.
            protocol: How the answer was obtained.
        """
        if reply_fields["confidence"] is None:
            return
        fields = {name: reply_fields[name] for name in LOGGED_FIELDS}
        made_by: dict[str, Any] = {
            "model": self.model,
            "calibrator": self.calibrator,
            "protocol": protocol.model_dump(),
        }
        if self.promise is not None and self.promise.covers(reply_fields):
            made_by["promise"] = self.promise.digest
        row = LogRow.model_validate({"id": answer_id, "time": int(time.time()), **made_by, **fields})
        self._add_pending(row)
        _append_row(self.pending_path, row)

    def add_feedback(self, answer_id: str, correct: bool) -> bool:
        """Add the feedback on an answer; return False if no answer with this id is waiting for feedback."""
        pending = self.pending.pop(answer_id, None)
        if pending is None:
            return False
        was_raised = self.alarm.is_raised
        row = LogRow.model_validate_json(pending).model_copy(update={"correct": correct})
        row = row.model_copy(update={"evidence": self._update_alarm(row)})
        if self.alarm.is_raised and not was_raised:
            logger.warning("ALARM: %s; %s", self.describe_alarm(), REFIT)
        self.graded.append(row)
        _append_row(self.path, row)
        return True

    def describe_alarm(self) -> str:
        """Describe what the feedback says about the promise, as text without a final full stop."""
        if self.promise is None:
            return "nothing is promised, so there is no alarm"
        count = f"{self.alarm.answers:,} answers with feedback"
        if self.alarm.is_raised:
            return f"{count} show that {self.promise.broken_text}"
        return (
            f"{count}; evidence that {self.promise.broken_text}: {self.alarm.evidence:.3g} (alarm at {ALARM_LIMIT:g})"
        )

    def summarise_alarm(self) -> dict[str, float]:
        """Return the metrics of the alarm; empty without a promise."""
        if self.promise is None:
            return {}
        return {
            "catto_alarm": float(self.alarm.is_raised),
            "catto_alarm_evidence": self.alarm.evidence,
            "catto_alarm_answers": self.alarm.answers,
        }

    def summarise_rolling(self) -> dict[str, float]:
        """Measure the calibration of the answers in `graded` that this model and this calibrator gave.

        Returns:
            Metric name -> value. Without such answers, there is only their number.
        """
        confidence = []
        correct = []
        for row in self.graded:
            if row.model == self.model and row.calibrator == self.calibrator:
                confidence.append(row.confidence)
                correct.append(bool(row.correct))
        count = len(confidence)
        if count == 0:
            return {"catto_feedback_answers": 0}
        return {
            "catto_feedback_answers": count,
            "catto_rolling_confidence": sum(confidence) / count,
            "catto_rolling_accuracy": sum(correct) / count,
            "catto_rolling_ece": ece(confidence, correct),
            "catto_rolling_brier": brier(confidence, correct),
        }


def _read_rows(path: Path | None) -> Iterator[LogRow]:
    """Yield the valid rows of a log. A last row that was cut off, as by a power cut, is removed from the file."""
    if path is None or not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = LogRow.model_validate_json(line)
            except ValidationError:
                begins_like_a_row = b'{"id":'.startswith(line[:6])  # even if only part of that was written
                is_cut_off = not line.endswith(b"\n")
                if begins_like_a_row and is_cut_off:
                    os.truncate(path, file.tell() - len(line))
                continue
            yield row


def _append_row(path: Path | None, row: LogRow) -> None:
    """Append a row to a log; None has no file. A failure is only logged, so that the answer is still sent.

    If the disk is full, the row is lost, but no partial line remains.
    """
    if path is None:
        return
    line = row.model_dump_json(exclude_none=True).encode() + b"\n"
    try:
        # The file is opened for every row, because it may have been rotated. Without a buffer, `write` may write less.
        with path.open("a+b", buffering=0) as file:
            size = file.tell()  # a file opened for appending is positioned at its end
            file.seek(max(0, size - 1))
            last_byte = file.read(1)  # empty in an empty file
            is_last_line_cut_off = last_byte not in (b"", b"\n")
            if is_last_line_cut_off:  # leave it as an invalid line of its own
                line = b"\n" + line
            if file.write(line) < len(line):
                file.truncate(size)
                logger.warning("%s: the disk is full", path)
    except OSError as error:
        logger.warning("%s: %s", path, error.strerror)
