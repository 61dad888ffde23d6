"""Answer a request: take k samples from the upstream, and return one answer with its confidence, or abstain.

Reading labels, calibrating confidences and choosing answers use the same functions as evaluation, so the same samples
give the same numbers as `catto eval` and `catto select`. This module does not depend on a web framework.
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

FORCED = "the response states none of the labels; the text is the label that continuing the response gave"
NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
NO_ANSWER_STATED = "the response states no answer"
CUT = "a response was cut at max_tokens"
OTHER_MODEL = "the threshold was fitted on answers from a different model"
OTHER_LABELS = "the options of the request have labels that the task does not have"
MAJORITY = "majority vote"
# More threads would not be faster: only one of them runs Python at a time, and each delays the event loop.
_READING_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="catto-read")
# One question without any samples yet.
NO_SAMPLES = Candidates(
    ("",),
    label=np.zeros((1, 0), dtype=np.intp),
    confidence=np.zeros((1, 0)),
    logprob=np.zeros((1, 0)),
    correct=np.zeros((1, 0), dtype=np.bool_),
)


T = TypeVar("T")


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run slow work in one of a few threads, so that the event loop can continue to serve."""
    return await asyncio.get_running_loop().run_in_executor(_READING_THREADS, work, *arguments)


@dataclass(frozen=True)
class ServedQuestion:
    """A client's question: its options, without a gold label."""

    id: str
    options: tuple[Option, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the options."""
        return tuple(option.label for option in self.options)


@dataclass(frozen=True)
class AnswerRequest:
    """A client's request, after it was checked.

    Attributes:
        question: Its id and options.
        messages: The prompt.
        protocol: How the samples become one answer.
        max_tokens: Maximum number of generated tokens per sample.
        seed: Seed of the samples.
        return_candidates: Whether the reply lists all samples.
        has_other_labels: Whether its options include labels that the served task does not have.
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
        text: The text of the answer or of the abstention.
        finish_reason: OpenAI's `finish_reason`.
        usage: Token counts, summed over all upstream requests.
        catto: The `catto` object of the reply.
    """

    text: str
    finish_reason: str
    usage: dict[str, int]
    catto: dict[str, Any]


class Sample(NamedTuple):
    """A sample from the upstream.

    Attributes:
        prediction: The prediction read from it. Its confidence is 0 if the probability of the label cannot be read.
        replies: The response, and its continuation if one was needed.
        unreadable: Why the probability of the label cannot be read; None if it can.
    """

    prediction: Prediction
    replies: tuple[Generation, ...]
    unreadable: str | None

    @property
    def is_forced(self) -> bool:
        """Whether the label was obtained by continuing the response, and not from its text."""
        return self.prediction.label is not None and self.prediction.source == "fallback"

    @property
    def shown_text(self) -> str:
        """The text that a client sees: the response, or the label if the response does not state it.

        The confidence belongs to the label, so a text that says something else must not be taken for the answer.
        """
        if self.is_forced:
            return str(self.prediction.label)
        return self.prediction.text

    @property
    def raw_confidence(self) -> float | None:
        """The uncalibrated confidence; None if it cannot be read, or if there is no label or answer."""
        if self.prediction.choice is None or self.unreadable is not None:
            return None
        return self.prediction.confidence

    def describe(self) -> dict[str, Any]:
        """Return the sample as a candidate in a reply; `response` is the upstream's text if `text` differs from it."""
        return {
            "text": self.shown_text,
            "response": self.prediction.text if self.is_forced else None,
            **self.prediction.model_dump(include={"label", "answer", "source"}),
        }


class ChosenAnswer(NamedTuple):
    """The answer that the protocol chooses from the samples.

    Attributes:
        final: The answer and its votes.
        sample: The sample that states it.
        confidence: The calibrated confidence, or the raw one without a calibrator. None without an answer, or if the
            calibrator cannot be applied.
        calibrator: The calibrator; None if there is none for this protocol.
        calibrated: The predictions of all samples, with calibrated confidences if possible.
        uncalibrated_reason: Why the calibrator cannot be applied; None if it can be applied, or if there is none.
    """

    final: FinalAnswer
    sample: Sample
    confidence: float | None
    calibrator: Fitted | None
    calibrated: list[Prediction]
    uncalibrated_reason: str | None


def make_unreadable_fault(reason: str) -> FaultError:
    """Make the fault (status 400) for a request whose confidence cannot be read from the upstream's replies."""
    return FaultError(f"no confidence can be read: {reason}", is_retryable=False, code=400)


@dataclass(frozen=True)
class Answerer:
    """Answers requests by asking the upstream.

    Attributes:
        engine: The upstream.
        client: The HTTP client of the upstream.
        fitted: The calibrator; None leaves confidences raw.
        threshold: The risk threshold, fitted with this calibrator; its guarantee covers requests with its protocol.
            None means that the gateway never abstains.
        abstention: The text of an abstention.
    """

    engine: ServerEngine
    client: httpx.AsyncClient
    fitted: Fitted | None
    threshold: RiskThreshold | None
    abstention: str

    async def answer(self, client_request: AnswerRequest) -> GatewayAnswer:
        """Sample until no further sample can change the choice, then choose, calibrate and compare with the threshold.

        Args:
            client_request: The client's request.

        Returns:
            The reply to the client: the answer, or an abstention.

        Raises:
            FaultError: The upstream fails, or the confidence of a sample cannot be read although the rule needs it: a
                choice among the other samples would favour the labels that can be read. Also if the rule needs a value
                that no sample has. If several samples fail, the first failure is reported.
        """
        samples: list[Sample] = []
        while True:
            missing = self._count_missing_samples(client_request.protocol, samples)
            if missing == 0:
                return self._compose_answer(client_request, samples)
            next_number = len(samples)
            tasks = []
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(next_number, next_number + missing):
                        tasks.append(group.create_task(self._take_sample(client_request, number)))
            except ExceptionGroup as faults:
                # The first fault cancels the other samples, so it is all that the client needs to know.
                raise faults.exceptions[0] from None
            samples += [task.result() for task in tasks]

    def _count_missing_samples(self, protocol: Protocol, samples: list[Sample]) -> int:
        """Return how many more samples the choice needs at least; 0 if no further sample can change it."""
        if protocol.stop is None:
            return protocol.k - len(samples)
        candidates = NO_SAMPLES
        if samples:
            calibrated, _ = self._calibrate([sample.prediction for sample in samples])
            candidates = gather_candidates(calibrated)
        needed = samples_still_needed(candidates, protocol.rule, protocol.k, protocol.stop)
        return int(needed[0])

    def _calibrate(self, predictions: list[Prediction]) -> tuple[list[Prediction], str | None]:
        """Return the predictions with calibrated confidences and None, or unchanged with the reason why.

        Without a calibrator, or with one for final answers, they are unchanged and the reason is None.
        """
        if self.fitted is None:
            return predictions, None
        try:
            return self.fitted.calibrate_samples(predictions), None
        except ValueError as error:
            return predictions, str(error)

    async def _take_sample(self, client_request: AnswerRequest, number: int) -> Sample:
        """Take one sample. Replies are read in a thread, so that the event loop can continue to serve.

        Args:
            client_request: The client's request.
            number: The number of the sample, counted from 0.

        Raises:
            FaultError: The upstream fails, or the rule needs a confidence that cannot be read.
        """
        upstream_request = self._make_upstream_request(client_request, number, stop=STOP)
        response = await self.engine.ask(self.client, upstream_request)
        case = Case(client_request.question, client_request.messages, response)
        answer, continuation_request = await run_in_thread(self._read_response, case)
        replies = [response]
        if continuation_request is not None:
            continuation = await self.engine.ask(self.client, continuation_request)
            answer = await run_in_thread(read_reply, case, continuation)
            replies.append(continuation)
        return await run_in_thread(self._make_sample, client_request, upstream_request, replies, answer)

    def _make_upstream_request(self, client_request: AnswerRequest, number: int, *, stop: tuple[str, ...]) -> Request:
        """Make the upstream request for the response of sample `number`."""
        return Request(
            question=client_request.question.id,
            sample=number,
            messages=client_request.messages,
            temperature=client_request.protocol.temperature,
            seed=request_seed(client_request.seed, "", number),
            max_tokens=client_request.max_tokens,
            stop=stop,
        )

    def _read_response(self, case: Case) -> tuple[Answer | Refusal, Request | None]:
        """Return the answer in a response, and the request for its continuation; None if no continuation is made.

        A response without an answer is continued to get one. A response with an answer is continued if the calibrator
        needs the probabilities of all labels and some are unknown. Nothing is continued if the upstream cannot do so.
        """
        answer = read_reply(case)
        reads_all_labels = self.fitted is not None and self.fitted.on == "labels"
        if answer is NO_ANSWER or reads_all_labels:
            return answer, request_continuation(self.engine, case, answer)
        return answer, None

    def _make_sample(
        self,
        client_request: AnswerRequest,
        upstream_request: Request,
        replies: list[Generation],
        answer: Answer | Refusal,
    ) -> Sample:
        """Make a sample from the replies and the answer that was read from them.

        Args:
            client_request: The client's request.
            upstream_request: The upstream request that gave the response.
            replies: The response, and its continuation if there is one.
            answer: The answer read from them; a refusal if the log-probability of the label cannot be read.

        Raises:
            FaultError: The confidence cannot be read, and the rule is not the majority vote, which does not need it.
        """
        response = replies[0]
        unreadable = None
        if isinstance(answer, Refusal):
            unreadable = answer.refused
            if client_request.protocol.rule != MAJORITY:
                raise make_unreadable_fault(unreadable)
            answer = _read_label_only(response, client_request.question)
        has_closed_answer = find_stop_end(response.text, STOP) is not None
        if has_closed_answer:  # even if max_tokens was reached, only text after the answer was cut
            response = response.model_copy(update={"finish_reason": "stop"})
        prediction = Prediction(
            question=client_request.question.id,
            task="served",
            split="test",
            gold="",  # unknown; no label is empty, so the prediction never counts as correct
            **describe_answer(response, answer),
            temperature=upstream_request.temperature,
            seed=upstream_request.seed,
            engine=self.engine.name,
        )
        return Sample(prediction, (response, *replies[1:]), unreadable)

    def _compose_answer(self, client_request: AnswerRequest, samples: list[Sample]) -> GatewayAnswer:
        """Choose among the samples by the rule, and compose the reply with what is known about the choice.

        Raises:
            FaultError: The rule needs a value that no sample has.
        """
        threshold = self.threshold
        chosen = self._choose_answer(client_request.protocol, samples)
        abstains = False
        if threshold is not None:  # an answer without a confidence counts as below the threshold
            abstains = chosen.confidence is None or chosen.confidence < threshold.threshold
        caveats = self._list_caveats(client_request, samples)
        guarantee = None
        if threshold is not None and threshold.protocol == client_request.protocol and not caveats:
            guarantee = threshold.promise
        reasons = [*_list_reasons(client_request, chosen), *caveats]
        calibrator = chosen.calibrator
        reply_fields = {
            "confidence": chosen.confidence,
            "confidence_raw": chosen.sample.raw_confidence,
            **chosen.final.model_dump(include={"label", "answer", "votes", "source"}),
            "k": len(samples),
            "rule": client_request.protocol.rule,
            "calibrator": {"name": calibrator.calibrator.kind, "n": calibrator.rows} if calibrator else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": guarantee,
            "abstained": abstains,
            "reason": "; ".join(reasons) or None,
        }
        if client_request.return_candidates:
            reply_fields["candidates"] = _describe_candidates(samples, chosen)
        usage = _count_usage(samples)
        if abstains:
            return GatewayAnswer(self.abstention, "stop", usage, reply_fields)
        finish_reason = "stop"  # a forced label, read from a continuation, is complete even if the response was cut
        if not chosen.sample.is_forced:
            finish_reason = chosen.sample.replies[0].finish_reason or "stop"
        return GatewayAnswer(chosen.sample.shown_text, finish_reason, usage, reply_fields)

    def _choose_answer(self, protocol: Protocol, samples: list[Sample]) -> ChosenAnswer:
        """Choose among the samples by the rule, and calibrate the confidence.

        If the calibrator cannot be applied, the choice is made by raw confidences and no confidence is returned.

        Raises:
            FaultError: The rule needs a value that no sample has.
        """
        fitted = self.fitted
        predictions = [sample.prediction for sample in samples]
        calibrated, uncalibrated_reason = self._calibrate(predictions)
        # A calibrator for single samples has no protocol, and applies to all protocols.
        is_for_other_protocol = fitted is not None and fitted.protocol not in (None, protocol)
        if is_for_other_protocol:
            fitted = None
            uncalibrated_reason = OTHER_PROTOCOL
        applicable = None if uncalibrated_reason else fitted
        # All samples have been taken, so the choice is made as with a fixed k.
        fixed_protocol = protocol.model_copy(update={"k": len(samples), "stop": None})
        try:
            (final,) = final_answers(predictions, fixed_protocol, applicable)  # `samples` are of one question
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

    def _list_caveats(self, client_request: AnswerRequest, samples: list[Sample]) -> list[str]:
        """List the reasons why a guarantee does not cover this answer, each of them once.

        Unreadable confidences and cut responses are listed even without a threshold.
        """
        threshold = self.threshold
        caveats = [sample.unreadable for sample in samples if sample.unreadable is not None]
        for sample in samples:
            response = sample.replies[0]
            if response.finish_reason == "length":
                caveats.append(CUT)
            if threshold is not None:
                threshold_models = threshold.models or (self.engine.model,)  # its file may name no models
                is_other_model = any(reply.model not in threshold_models for reply in sample.replies)
                if is_other_model:
                    caveats.append(OTHER_MODEL)
        is_fitted = threshold is not None or self.fitted is not None
        if client_request.has_other_labels and is_fitted:
            caveats.append(OTHER_LABELS)
        return list(dict.fromkeys(caveats))


def _read_label_only(response: Generation, question: ServedQuestion) -> Answer:
    """Read the label of a response whose log-probabilities cannot be read. Its confidence is 0."""
    parsed = parse_answer(response.text, question)
    source = parsed.source or "free"  # a prediction needs a source even without a label
    return Answer(parsed.label, source, confidence=0.0, label_logprobs=None, logsumexp=None)


def _list_reasons(client_request: AnswerRequest, chosen: ChosenAnswer) -> list[str]:
    """List what is unusual about the chosen answer: it is uncalibrated or missing, or its label was forced.

    A forced label was obtained by continuing a response that states none.
    """
    reasons = []
    if chosen.uncalibrated_reason:
        reasons.append(chosen.uncalibrated_reason)
    if chosen.final.choice is None:
        reasons.append(NO_LABEL if client_request.question.options else NO_ANSWER_STATED)
    elif chosen.sample.is_forced:
        reasons.append(FORCED)
    return reasons


def _describe_candidates(samples: list[Sample], chosen: ChosenAnswer) -> list[dict[str, Any]]:
    """Return all samples with their raw and calibrated confidences; an unknown confidence is None."""
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
