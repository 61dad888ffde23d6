"""Turn one request into k samples of the upstream and one answer with its confidence, or an abstention.

Labels are read, confidences calibrated and answers chosen by the functions of evaluation: the same samples give the
same numbers as `catto eval` and `catto select`. This module uses no web framework.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx2 as httpx
import numpy as np

from catto.answer.confidence import NO_ANSWER, Answer, Case, read_reply, request_continuation
from catto.answer.response import parse_answer
from catto.calibrate import OTHER_PROTOCOL, Fitted, RiskThreshold, final_answers
from catto.engines import Generation, Request, find_stop_end
from catto.engines.server import FaultError, ServerEngine
from catto.metrics.selection import Candidates, gather_candidates, samples_still_needed
from catto.predict import STOP, describe_answer, request_seed
from catto.records import FinalAnswer, Message, Option, Prediction, Protocol, Refusal

FORCED = "the response states none of the labels: the text is the label that its continuation gives"
NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
NO_ANSWER_STATED = "the response states no answer"
CUT = "a response was cut at max_tokens"
OTHER_MODEL = "the threshold was fitted on answers of another model"
OTHER_LABELS = "the options of the request have labels that the task does not have"
MAJORITY = "majority vote"
# More threads would not read faster: only one at a time runs Python, and the event loop would wait for each of them.
_READING_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="catto-read")
_NONE = np.zeros((1, 0))
NO_SAMPLES = Candidates(("",), _NONE.astype(np.intp), _NONE, _NONE, _NONE.astype(np.bool_))


T = TypeVar("T")


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Do slow work in one of a few threads, so that the event loop goes on serving."""
    return await asyncio.get_running_loop().run_in_executor(_READING_THREADS, work, *arguments)


@dataclass(frozen=True)
class ServedQuestion:
    """A question of a client: its options, and no gold label."""

    id: str
    options: tuple[Option, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the options."""
        return tuple(option.label for option in self.options)


@dataclass(frozen=True)
class AnswerRequest:
    """A checked request of a client.

    Attributes:
        question: Its id and options.
        messages: The prompt.
        protocol: How one answer is made of the samples.
        max_tokens: Maximum number of generated tokens per sample.
        seed: Seed of the samples.
        return_candidates: Whether the reply lists all samples.
        has_other_labels: Whether its options have labels that the served task does not have.
    """

    question: ServedQuestion
    messages: tuple[Message, ...]
    protocol: Protocol
    max_tokens: int
    seed: int
    return_candidates: bool = False
    has_other_labels: bool = False


class GatewayAnswer(NamedTuple):
    """The reply to a client.

    Attributes:
        text: The text of the answer, or that of the abstention.
        finish_reason: OpenAI's `finish_reason`.
        usage: Tokens of all upstream requests.
        catto: The `catto` object of the reply.
    """

    text: str
    finish_reason: str
    usage: dict[str, int]
    catto: dict[str, Any]


class Sample(NamedTuple):
    """A sample of the upstream.

    Attributes:
        prediction: What was read. Its confidence is 0 if the probability of the label cannot be read.
        replies: The response, and its continuation if one was needed.
        unreadable: Why the label has no probability; None if it has one.
    """

    prediction: Prediction
    replies: tuple[Generation, ...]
    unreadable: str | None

    @property
    def is_forced(self) -> bool:
        """Whether the label came from continuing the response, and not from its text."""
        return self.prediction.label is not None and self.prediction.source == "fallback"

    @property
    def shown_text(self) -> str:
        """What a client sees: the response, or the label if the response does not state it.

        The confidence belongs to the label, so a text with another content must not be taken for the answer.
        """
        if self.is_forced:
            return str(self.prediction.label)
        return self.prediction.text

    @property
    def raw_confidence(self) -> float | None:
        """The uncalibrated confidence; None without a label or answer, or if it cannot be read."""
        if self.prediction.choice is None or self.unreadable is not None:
            return None
        return self.prediction.confidence

    def describe(self) -> dict[str, Any]:
        """Return the sample as a candidate of a reply; `response` is the upstream's text if another text is shown."""
        return {
            "text": self.shown_text,
            "response": self.prediction.text if self.is_forced else None,
            **self.prediction.model_dump(include={"label", "answer", "source"}),
        }


class ChosenAnswer(NamedTuple):
    """The answer that the protocol makes of the samples.

    Attributes:
        final: The answer and its votes.
        sample: The sample that states it.
        confidence: The calibrated confidence, or the raw one without a calibrator. None without an answer, or if the
            calibrator cannot be applied.
        calibrator: The calibrator; None if there is none for this protocol.
        calibrated: The predictions of all samples, calibrated if possible.
        uncalibrated_reason: Why the calibrator cannot be applied; None if it can, or if there is none.
    """

    final: FinalAnswer
    sample: Sample
    confidence: float | None
    calibrator: Fitted | None
    calibrated: list[Prediction]
    uncalibrated_reason: str | None


def make_unreadable_fault(reason: str) -> FaultError:
    """Make the fault with which a gateway refuses a request (400): the upstream's replies show no confidence."""
    return FaultError(f"no confidence can be read: {reason}", is_retryable=False, code=400)


@dataclass(frozen=True)
class Answerer:
    """Answers requests by asking the upstream.

    Attributes:
        engine: The upstream.
        client: The HTTP client of the upstream.
        fitted: The calibrator; None for raw confidences.
        threshold: The risk threshold, fitted with this calibrator; its guarantee covers requests of its protocol.
        abstention: The text of an abstention.
    """

    engine: ServerEngine
    client: httpx.AsyncClient
    fitted: Fitted | None
    threshold: RiskThreshold | None
    abstention: str

    async def answer(self, asked: AnswerRequest) -> GatewayAnswer:
        """Sample until the choice is final, choose, calibrate, and compare with the threshold.

        Raises:
            FaultError: The upstream fails; of several samples that fail, the first to do so is reported. The code is
                400 if `_take_sample` cannot read a confidence that the rule needs: a choice among the other samples
                would favour the labels that can be read. It is 400 too if the rule reads what no sample has.
        """
        samples: list[Sample] = []
        while True:
            missing = self._count_missing_samples(asked.protocol, samples)
            if missing == 0:
                return self._compose_answer(asked, samples)
            first_number = len(samples)
            tasks = []
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(first_number, first_number + missing):
                        tasks.append(group.create_task(self._take_sample(asked, number)))
            except ExceptionGroup as faults:
                # The group has cancelled the other samples, so one fault tells the client as much as all.
                raise faults.exceptions[0] from None
            samples += [task.result() for task in tasks]

    def _count_missing_samples(self, protocol: Protocol, samples: list[Sample]) -> int:
        """Return how many samples to take next; 0 if no further sample can change the choice."""
        if protocol.stop is None:
            return protocol.k - len(samples)
        candidates = NO_SAMPLES
        if samples:
            calibrated, _ = self._calibrate([sample.prediction for sample in samples])
            candidates = gather_candidates(calibrated)
        needed = samples_still_needed(candidates, protocol.rule, protocol.k, protocol.stop)
        return int(needed[0])

    def _calibrate(self, predictions: list[Prediction]) -> tuple[list[Prediction], str | None]:
        """Return the predictions with calibrated confidences, or unchanged with the reason.

        Without a calibrator, or with one of final answers, they are unchanged without a reason.
        """
        if self.fitted is None:
            return predictions, None
        try:
            return self.fitted.calibrate_samples(predictions), None
        except ValueError as error:
            return predictions, str(error)

    async def _take_sample(self, asked: AnswerRequest, number: int) -> Sample:
        """Take one sample. Replies are read in a thread, so that the event loop goes on serving.

        Raises:
            FaultError: The upstream fails, or `_make_sample` lacks a confidence.
        """
        request = self._make_request(asked, number, stop=STOP)
        reply = await self.engine.ask(self.client, request)
        case = Case(asked.question, asked.messages, reply)
        answer, continuation_request = await run_in_thread(self._read_response, case)
        replies = [reply]
        if continuation_request is not None:
            continuation = await self.engine.ask(self.client, continuation_request)
            answer = await run_in_thread(read_reply, case, continuation)
            replies.append(continuation)
        return await run_in_thread(self._make_sample, asked, request, replies, answer)

    def _make_request(self, asked: AnswerRequest, number: int, *, stop: tuple[str, ...]) -> Request:
        """Make the upstream request for the response of sample `number`."""
        return Request(
            question=asked.question.id,
            sample=number,
            messages=asked.messages,
            temperature=asked.protocol.temperature,
            seed=request_seed(asked.seed, "", number),
            max_tokens=asked.max_tokens,
            stop=stop,
        )

    def _read_response(self, case: Case) -> tuple[Answer | Refusal, Request | None]:
        """Return the answer of a response, and a request for what it leaves open.

        The request continues a response without an answer, or asks for all labels if the calibrator reads them. It is
        None if nothing is open or the upstream cannot continue.
        """
        answer = read_reply(case)
        reads_all_labels = self.fitted is not None and self.fitted.on == "labels"
        if answer is NO_ANSWER or reads_all_labels:
            return answer, request_continuation(self.engine, case, answer)
        return answer, None

    def _make_sample(
        self, asked: AnswerRequest, request: Request, replies: list[Generation], answer: Answer | Refusal
    ) -> Sample:
        """Record what was read.

        Args:
            asked: The client's request.
            request: The upstream request of the response.
            replies: The response, and its continuation if there is one.
            answer: What was read of them; a refusal if the label's log-probability cannot be read.

        Raises:
            FaultError: There is no confidence, and the rule is not the majority vote, which needs none.
        """
        unreadable = None
        response = replies[0]
        if isinstance(answer, Refusal):
            unreadable = answer.refused
            if asked.protocol.rule != MAJORITY:
                raise make_unreadable_fault(unreadable)
            parsed = parse_answer(response.text, asked.question)
            source = parsed.source or "free"  # a prediction without a label needs a source too
            answer = Answer(parsed.label, source, confidence=0.0, label_logprobs=None, logsumexp=None)
        is_complete = find_stop_end(response.text, STOP) is not None
        if is_complete:  # whatever the upstream wrote after the answer, the answer was not cut
            response = response.model_copy(update={"finish_reason": "stop"})
        # Nobody knows the right answer of a served question: an empty gold label equals no answer.
        prediction = Prediction(
            question=asked.question.id,
            task="served",
            split="test",
            gold="",
            **describe_answer(response, answer),
            temperature=request.temperature,
            seed=request.seed,
            engine=self.engine.name,
        )
        return Sample(prediction, (response, *replies[1:]), unreadable)

    def _compose_answer(self, asked: AnswerRequest, samples: list[Sample]) -> GatewayAnswer:
        """Choose among the samples by the rule, and report what is known of the choice.

        Raises:
            FaultError: The rule reads what no sample has.
        """
        threshold = self.threshold
        chosen = self._choose_answer(asked.protocol, samples)
        abstains = False
        if threshold is not None:
            abstains = chosen.confidence is None or chosen.confidence < threshold.threshold
        caveats = self._list_caveats(asked, samples)
        guarantee = None
        if threshold is not None and threshold.protocol == asked.protocol and not caveats:
            guarantee = threshold.promise
        reasons = [*_list_reasons(asked, chosen), *caveats]
        calibrator = chosen.calibrator
        about = {
            "confidence": chosen.confidence,
            "confidence_raw": chosen.sample.raw_confidence,
            **chosen.final.model_dump(include={"label", "answer", "votes", "source"}),
            "k": len(samples),
            "rule": asked.protocol.rule,
            "calibrator": {"name": calibrator.calibrator.kind, "n": calibrator.rows} if calibrator else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": guarantee,
            "abstained": abstains,
            "reason": "; ".join(reasons) or None,
        }
        if asked.return_candidates:
            about["candidates"] = _describe_candidates(samples, chosen)
        usage = _count_usage(samples)
        if abstains:
            return GatewayAnswer(self.abstention, "stop", usage, about)
        finish_reason = "stop"  # of a forced label, which is whole even if the response was cut
        if not chosen.sample.is_forced:
            finish_reason = chosen.sample.replies[0].finish_reason or "stop"
        return GatewayAnswer(chosen.sample.shown_text, finish_reason, usage, about)

    def _choose_answer(self, protocol: Protocol, samples: list[Sample]) -> ChosenAnswer:
        """Choose among the samples by the rule, and calibrate; FaultError if the rule reads what no sample has."""
        fitted = self.fitted
        predictions = [sample.prediction for sample in samples]
        calibrated, uncalibrated_reason = self._calibrate(predictions)
        # A calibrator of single samples has no protocol, and serves them all.
        is_for_other_protocol = fitted is not None and fitted.protocol not in (None, protocol)
        if is_for_other_protocol:
            fitted = None
            uncalibrated_reason = OTHER_PROTOCOL
        applied = None if uncalibrated_reason else fitted
        # All samples that were taken count, so the choice is that of a fixed k.
        fixed_protocol = protocol.model_copy(update={"k": len(samples), "stop": None})
        try:
            (final,) = final_answers(predictions, fixed_protocol, applied)
        except ValueError as error:
            raise FaultError(str(error), is_retryable=False, code=400) from None
        confidence = None
        if final.choice is not None and not uncalibrated_reason:
            confidence = final.confidence
        return ChosenAnswer(
            final=final,
            sample=samples[final.sample],
            confidence=confidence,
            calibrator=fitted,
            calibrated=calibrated,
            uncalibrated_reason=uncalibrated_reason,
        )

    def _list_caveats(self, asked: AnswerRequest, samples: list[Sample]) -> list[str]:
        """List why the guarantee of a threshold does not cover this answer, each reason once."""
        threshold = self.threshold
        caveats = [sample.unreadable for sample in samples if sample.unreadable is not None]
        for sample in samples:
            if sample.replies[0].finish_reason == "length":
                caveats.append(CUT)
            if threshold is not None:
                threshold_models = threshold.models or (self.engine.model,)  # its file may name none
                is_other_model = any(reply.model not in threshold_models for reply in sample.replies)
                if is_other_model:
                    caveats.append(OTHER_MODEL)
        is_fitted = threshold is not None or self.fitted is not None
        if asked.has_other_labels and is_fitted:
            caveats.append(OTHER_LABELS)
        return list(dict.fromkeys(caveats))


def _list_reasons(asked: AnswerRequest, chosen: ChosenAnswer) -> list[str]:
    """List what is unusual about the chosen answer: no calibration, no label or answer, or a forced label."""
    reasons = []
    if chosen.uncalibrated_reason:
        reasons.append(chosen.uncalibrated_reason)
    if chosen.final.choice is None:
        reasons.append(NO_LABEL if asked.question.options else NO_ANSWER_STATED)
    elif chosen.sample.is_forced:
        reasons.append(FORCED)
    return reasons


def _describe_candidates(samples: list[Sample], chosen: ChosenAnswer) -> list[dict[str, Any]]:
    """Return all samples with their raw and calibrated confidences; None where one is unknown."""
    candidates = []
    for sample, prediction in zip(samples, chosen.calibrated, strict=True):
        raw_confidence = sample.raw_confidence
        confidence = None
        if raw_confidence is not None and not chosen.uncalibrated_reason:
            confidence = prediction.confidence
        candidates.append({**sample.describe(), "confidence": confidence, "confidence_raw": raw_confidence})
    return candidates


def _count_usage(samples: list[Sample]) -> dict[str, int]:
    """Count the tokens of all upstream requests; a count that the upstream does not report is 0."""
    prompt_tokens = 0
    completion_tokens = 0
    for sample in samples:
        for reply in sample.replies:
            prompt_tokens += reply.prompt_tokens or 0
            completion_tokens += reply.tokens or 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
