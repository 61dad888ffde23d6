"""Fit, store and load a model's calibrator and threshold, which are in its folder next to the weights.

`catto calibrate fit --model FOLDER` writes them. `catto eval`, `catto serve` and `catto.load_calibrator` find them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from catto.answer_columns import GradedAnswers
from catto.calibrate import (
    Fitted,
    Kind,
    On,
    RiskThreshold,
    final_notes,
    find_threshold,
    fit_answers,
    open_fitted,
    read_uncalibrated,
    write_fitted,
)
from catto.errors import DataError
from catto.formats.answers import read_answers
from catto.formats.columns import ColumnNames
from catto.io.atomic import write_text
from catto.io.record_files import manifest_path, read_record, write_record
from catto.metrics.alarm import ALARM_LIMIT
from catto.metrics.binning import Bools, Floats
from catto.records import Protocol, Unparsed

CALIBRATOR_FILE = "catto_calibrator.json"
THRESHOLD_FILE = "catto_threshold.json"
CARD_FILE = "README.md"
CARD_START = "<!-- written by catto calibrate -->"
CARD_END = "<!-- end of catto calibrate -->"
# The rule in the protocol of answers from `catto eval`. With one sample per question, all rules choose the same answer.
RULE_FOR_ONE_SAMPLE = "most confident"


class LabelConfidence(NamedTuple):
    """A label and how sure the model is of it.

    Attributes:
        label: The most probable label.
        confidence: Its calibrated probability, in [0, 1].
        abstains: Whether the confidence is below the model's threshold; False without a threshold.
    """

    label: str
    confidence: float
    abstains: bool


@dataclass(frozen=True)
class ModelCalibration:
    """The calibrator of a model, and its threshold if there is one.

    Attributes:
        fitted: The calibrator.
        threshold: The threshold, at or above which errors are rare; None if there is none.
    """

    fitted: Fitted
    threshold: RiskThreshold | None = None

    def read_logits(self, logits: ArrayLike, label_ids: Mapping[str, int]) -> LabelConfidence:
        """Return the most probable label and its calibrated confidence.

        Args:
            logits: (V,) logits of the next token at the position of the label, as an array or a torch tensor.
            label_ids: Label -> id of its first token, in the form used at this position (after a space or not).

        Returns:
            The most probable label (in a tie, the first one), its calibrated confidence, and whether to abstain.

        Raises:
            ValueError: The calibrator is for an answer chosen among several samples, or the logits do not have the
                shape (V,).

        >>> from catto.metrics.calibrators import Temperature
        >>> calibration = ModelCalibration(Fitted(Temperature(tau=2.0)))
        >>> calibration.read_logits([2.2, 0.0, -50.0], {"yes": 0, "no": 1})
        LabelConfidence(label='yes', confidence=0.75..., abstains=False)
        """
        protocol = self.fitted.protocol
        if protocol is not None and protocol.k > 1:
            raise ValueError(f"the calibrator is for the {protocol.rule} of {protocol.k} samples, not for logits")
        logprobs = _log_softmax(_as_array(logits))
        label_logprobs = {label: float(logprobs[token_id]) for label, token_id in label_ids.items()}
        label = max(label_logprobs, key=lambda name: label_logprobs[name])
        if self.fitted.on == "labels":
            confidence = self.fitted.find_label_confidence(label_logprobs, label)
        else:
            probability = np.exp(label_logprobs[label])
            confidence = float(self.fitted.calibrate_confidences([probability])[0])
        abstains = self.threshold is not None and confidence < self.threshold.threshold
        return LabelConfidence(label, confidence, abstains)


def _as_array(logits: Any) -> Floats:
    """Return the logits in float64, (V,). A torch tensor may be in bfloat16, be on a GPU or require a gradient."""
    if hasattr(logits, "detach"):
        logits = logits.detach().float().cpu().numpy()
    array = np.asarray(logits, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"logits have shape {array.shape}, expected (V,): the logits at one position")
    return array


def _log_softmax(logits: Floats) -> Floats:
    from scipy.special import log_softmax

    return np.asarray(log_softmax(logits), dtype=np.float64)


def load_calibrator(path: str | Path) -> ModelCalibration:
    """Load a model's calibrator, and its threshold if there is one.

    Args:
        path: The model's folder, or a calibrator file from `catto calibrate fit --out`, which has no threshold.

    Returns:
        The calibrator, and the threshold if the folder has one.

    Raises:
        DataError: There is no calibrator, or the threshold was fitted with a different calibrator.

    >>> import tempfile
    >>> from catto.metrics.calibrators import Temperature
    >>> folder = Path(tempfile.mkdtemp())
    >>> written = store_calibration(folder, ModelCalibration(Fitted(Temperature(tau=2.0))), fitted_on="fit.jsonl")
    >>> load_calibrator(folder).fitted.calibrator.tau
    2.0
    """
    path = Path(path)
    if not path.is_dir():
        return ModelCalibration(open_fitted(path))
    fitted = open_fitted(path / CALIBRATOR_FILE)
    threshold_path = path / THRESHOLD_FILE
    if not threshold_path.exists():
        return ModelCalibration(fitted)
    threshold = read_record(threshold_path, RiskThreshold)
    if threshold.calibrator != fitted.digest:
        raise DataError(threshold_path, None, f"was fitted with a different calibrator than {CALIBRATOR_FILE}")
    return ModelCalibration(fitted, threshold)


def has_calibrator(folder: Path) -> bool:
    """Whether a folder has a calibrator next to the model's weights."""
    return (folder / CALIBRATOR_FILE).is_file()


# ---- fit and store


class AnswerOrigin(NamedTuple):
    """What a file says about how its answers were made.

    Attributes:
        names: Names of the columns. For the log of a gateway, the confidence is the one before calibration.
        usable_rows: Rows made with `protocol` by `models`, counted from 0; None means all.
        protocol: How an answer was made from samples; None if the file does not say, or if there were several ways.
        models: The models that answered; empty if the file does not say.
    """

    names: ColumnNames
    usable_rows: Sequence[int] | None = None
    protocol: Protocol | None = None
    models: tuple[str, ...] = ()


class RiskTarget(NamedTuple):
    """The guarantee that a threshold should give.

    Attributes:
        risk: Largest share of wrong answers.
        delta: Probability with which the guarantee may fail.
    """

    risk: float
    delta: float


class ModelFit(NamedTuple):
    """A calibration and the answers to judge it by.

    Attributes:
        calibration: The calibrator, and the threshold if there is one.
        answers: The answers that the threshold was fitted on, or without a threshold those that the calibrator was
            fitted on. Their confidences are not calibrated.
        calibrated: (N,) calibrated confidences of these answers.
    """

    calibration: ModelCalibration
    answers: GradedAnswers
    calibrated: Floats


def fit_model(
    path: Path, *, kind: Kind, on: On, names: ColumnNames, unparsed: Unparsed, target: RiskTarget | None
) -> ModelFit:
    """Fit a calibrator, and a threshold if there is a target. Nothing is written.

    With a target, the questions are split into two halves by the digests of their ids: the calibrator is fitted on one
    half, and the threshold on the other.

    Args:
        path: Answers of `catto eval` or `catto select`, or the log of `catto serve`. Without a target, any answers.
        kind: The kind of calibrator.
        on: What the calibrator reads: `confidence`, or `labels` for the label log-probabilities.
        names: Names of the columns.
        unparsed: How forced answers count: `wrong` counts all of them as wrong, `fallback` grades them like any other
            answer.
        target: The guarantee that the threshold should give; None fits no threshold.

    Returns:
        The calibrator and the threshold, with the answers and confidences that show how good they are.

    Raises:
        DataError: The answers cannot be read or fitted on. With a target, also if no threshold can guarantee it, the
            file does not say how its answers were made, or a question has several answers.
    """
    origin = describe_origin(path, names)
    answers = read_uncalibrated(path, origin.names, unparsed)
    usable_rows = origin.usable_rows
    if usable_rows is None:
        usable_rows = range(len(answers))
    fit_rows = usable_rows
    judged_rows = usable_rows
    if target is not None:
        _check_answers_for_threshold(path, origin, answers.pick_rows(usable_rows))
        fit_rows, judged_rows = _split_questions(answers, usable_rows)
    fitted = fit_answers(answers, kind, on, origin.names, fit_rows)
    # All answers are calibrated, since label log-probabilities are read from the whole file.
    calibrated = _calibrate_answers(fitted, answers, origin.names)[judged_rows]
    judged = answers.pick_rows(judged_rows)
    threshold = None
    if target is not None:
        made_with = {"protocol": origin.protocol, "calibrator": fitted.digest, "models": origin.models}
        threshold = find_threshold(replace(judged, confidence=calibrated), target.risk, target.delta, made_with)
    return ModelFit(ModelCalibration(fitted, threshold), judged, calibrated)


def _calibrate_answers(fitted: Fitted, answers: GradedAnswers, names: ColumnNames) -> Floats:
    """Return calibrated confidences, (N,). An answer without a label gets 0, as in `catto select` and `catto serve`."""
    calibrated = fitted.calibrate_answers(answers, names)
    has_label = _read_has_label(answers.source, names)
    return np.where(has_label, calibrated, 0.0)


def _read_has_label(path: Path, names: ColumnNames) -> Bools:
    """Read from the file which answers have a label, (N,); if there is no column for labels, all are True."""
    column = names.prediction or "label"
    has_label = []
    for _, fields in read_answers(path, names):
        is_none = column in fields and fields[column] is None
        has_label.append(not is_none)
    return np.array(has_label, dtype=np.bool_)


def describe_origin(path: Path, names: ColumnNames) -> AnswerOrigin:
    """Find out how the answers of a file were made, from its manifest or its rows.

    The file may have final answers of `catto select`, the log of `catto serve`, or predictions of `catto eval`. A file
    of another tool does not say how its answers were made.

    Args:
        path: The file.
        names: Names of the columns.

    Returns:
        The protocol and the models as far as the file tells them, and which columns and rows to fit on.

    Raises:
        DataError: There are no answers, or the log of a gateway has no answers to fit on.
    """
    notes = final_notes(path)
    if notes:
        protocol = Protocol.model_validate(notes["protocol"])
        return AnswerOrigin(names, protocol=protocol, models=tuple(notes.get("models") or ()))
    rows = [dict(fields) for _, fields in read_answers(path, names)]
    if not rows:
        raise DataError(path, None, "no answers")
    is_gateway_log = isinstance(rows[0].get("protocol"), dict)
    if is_gateway_log:
        return _describe_log(path, names, rows)
    are_predictions = "temperature" in rows[0] and "source" in rows[0]
    if are_predictions:
        return _describe_predictions(names, rows)
    return AnswerOrigin(names)


def _describe_predictions(names: ColumnNames, rows: Sequence[Mapping[str, Any]]) -> AnswerOrigin:
    """Describe predictions of `catto eval`, whose answers come from one sample each.

    A protocol has a single temperature, so predictions at several temperatures have no protocol.
    """
    models = tuple(sorted({str(row["model"]) for row in rows}))
    temperatures = {row["temperature"] for row in rows}
    if len(temperatures) > 1:
        return AnswerOrigin(names, models=models)
    forced_labels = [row["label"] for row in rows if row["source"] == "fallback"]
    fallback = None
    if forced_labels:
        # Without a label, the engine could not continue the response to an answer.
        fallback = "none" if None in forced_labels else "answer"
    settings = {"rule": RULE_FOR_ONE_SAMPLE, "k": 1, "temperature": temperatures.pop(), "fallback": fallback}
    kind = rows[0].get("confidence_kind")
    if kind != "label":  # a protocol stores only the other kinds
        settings["confidence_kind"] = kind
    return AnswerOrigin(names, protocol=Protocol.model_validate(settings), models=models)


def _describe_log(path: Path, names: ColumnNames, rows: Sequence[Mapping[str, Any]]) -> AnswerOrigin:
    """Choose the answers to fit on from a gateway's log, and describe how they were made.

    The gateway raises an alarm when its answers turn out worse than promised. A calibrator must then be fitted on new
    answers, so those up to the last alarm are left out. A fit describes one protocol and one model, so only answers
    with the most frequent pair are kept.

    Returns:
        The origin, whose confidence column is `confidence_raw`: the gateway may have calibrated `confidence`.

    Raises:
        DataError: There are no answers since the last alarm, or they were chosen among several samples.
    """
    first_row = 0
    for row, fields in enumerate(rows):
        # The evidence that the answers are worse than promised; None if no promise covers this answer.
        evidence = fields.get("evidence") or 0.0
        is_alarm = evidence >= ALARM_LIMIT
        if is_alarm:
            first_row = row + 1
    made_by = []
    for fields in rows[first_row:]:
        protocol = Protocol.model_validate(fields["protocol"])
        made_by.append((protocol, str(fields["model"])))
    if not made_by:
        raise DataError(path, None, "no answers with feedback since the last alarm: collect some first")
    [(most_frequent, _)] = Counter(made_by).most_common(1)
    protocol, model = most_frequent
    if protocol.k > 1:
        problem = "the log has the confidence of only one sample: fit on the answers of catto select"
        raise DataError(path, None, f"answers were chosen among {protocol.k} samples, and {problem}")
    usable_rows = []
    for row, protocol_and_model in enumerate(made_by, first_row):
        if protocol_and_model == most_frequent:
            usable_rows.append(row)
    return AnswerOrigin(replace(names, confidence="confidence_raw"), usable_rows, protocol, (model,))


def _check_answers_for_threshold(path: Path, origin: AnswerOrigin, answers: GradedAnswers) -> None:
    """Raise DataError unless the file says how its answers were made, and each question has exactly one of them."""
    if origin.protocol is None:
        expected = "answers of catto eval at one temperature, of catto select, or the log of catto serve"
        raise DataError(path, None, f"does not say how its answers were made; a threshold needs {expected}")
    one_answer_per_question = answers.questions == len(answers)
    if not one_answer_per_question:
        raise DataError(path, None, "several answers per question: choose one of them with catto select --out")


def _split_questions(answers: GradedAnswers, rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Split rows into two halves by the digests of their questions, so the order in the file does not matter.

    Args:
        answers: All answers of the file. Each names its question.
        rows: The rows to split, counted from 0.

    Returns:
        The rows of the two halves, in increasing order. For an odd number of rows, the second half has one more.
    """
    questions = answers.question
    assert questions is not None  # checked by `_check_answers_for_threshold`
    ordered = sorted(rows, key=lambda row: sha256(questions[row].encode()).hexdigest())
    middle = len(ordered) // 2
    return sorted(ordered[:middle]), sorted(ordered[middle:])


def store_calibration(folder: Path, calibration: ModelCalibration, *, fitted_on: str) -> list[str]:
    """Write the calibrator and the threshold to a model's folder and describe them in the model card.

    An old threshold is deleted first, so that an interrupted run cannot leave it next to the new calibrator.

    Args:
        folder: The model's folder.
        calibration: The calibrator, and the threshold if there is one.
        fitted_on: Name of the file that the calibrator was fitted on.

    Returns:
        The names of the written files.
    """
    threshold_path = folder / THRESHOLD_FILE
    threshold_path.unlink(missing_ok=True)
    calibrator_path = folder / CALIBRATOR_FILE
    write_fitted(calibrator_path, calibration.fitted, fitted_on=fitted_on)
    names = [CALIBRATOR_FILE, manifest_path(calibrator_path).name]
    if calibration.threshold is not None:
        write_record(threshold_path, calibration.threshold)
        names.append(THRESHOLD_FILE)
    _write_card_section(folder / CARD_FILE, calibration)
    return [*names, CARD_FILE]


def _write_card_section(card: Path, calibration: ModelCalibration) -> None:
    """Write the section on calibration into a model card: in place of an older one, else at the end."""
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    before, _, from_section_on = text.partition(CARD_START)  # without an older section, `before` is the whole text
    _, _, after = from_section_on.partition(CARD_END)
    section = "\n".join([CARD_START, *_describe_calibration(calibration), CARD_END])
    parts = [part.strip() for part in (before, section, after) if part.strip()]
    write_text(card, "\n\n".join(parts) + "\n")


def _describe_calibration(calibration: ModelCalibration) -> Iterator[str]:
    """Yield the lines of the section on calibration, in Markdown."""
    fitted = calibration.fitted
    threshold = calibration.threshold
    yield "## Calibrated confidence"
    yield ""
    yield f"`{CALIBRATOR_FILE}` maps the model's probability of its answer to a calibrated confidence"
    yield f"(`{fitted.calibrator.kind}`, fitted on {fitted.rows or 0:,} answers)."
    if threshold is not None:
        yield f"`{THRESHOLD_FILE}`: among the answers with a confidence of at least {threshold.threshold:.4g}, at most"
        yield f"{100 * threshold.risk:g} % are wrong, with {100 * (1 - threshold.delta):g} % confidence. These are"
        yield f"{100 * threshold.coverage:.0f} % of the answers. This holds for questions like the {threshold.rows:,}"
        yield "that it was fitted on."
    yield ""
    yield "```python"
    yield "import catto"
    yield ""
    yield 'calibration = catto.load_calibrator("path of this folder")'
    yield "label, confidence, abstains = calibration.read_logits(logits, label_ids)"
    yield "```"
