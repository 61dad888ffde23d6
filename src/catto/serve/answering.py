"""One request -> k samples of the upstream -> one answer with its confidence, or an abstention. No web framework.

Labels are read, confidences calibrated and answers chosen by the functions of evaluation: the same samples give the
same numbers as `catto eval` and `catto select`.
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
from catto.records import Message, Option, Prediction, Protocol, Refusal

FORCED = "the response states none of the labels: the text is the label that its continuation gives"
NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
CUT = "a response was cut at max_tokens"
OTHER_MODEL = "the threshold was fitted on answers of another model"
OTHER_LABELS = "the options of the request have labels that the task does not have"
MAJORITY = "majority vote"
# More threads would read no faster, since one at a time runs Python, and the event loop would wait for each of them.
_READING_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="catto-read")
_NONE = np.zeros((1, 0))
NO_SAMPLES = Candidates(("",), _NONE.astype(np.intp), _NONE, _NONE, _NONE.astype(np.bool_))


T = TypeVar("T")


async def run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Do work that takes long in one of the few threads for it, so that the event loop goes on serving."""
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
class Asked:
    """A request: `question` holds its id and labels, `protocol` says how one answer is made of the samples.

    `has_other_labels`: the request's own options have labels that the served task does not have.
    """

    question: ServedQuestion
    messages: tuple[Message, ...]
    protocol: Protocol
    max_tokens: int
    seed: int
    return_candidates: bool = False
    has_other_labels: bool = False


class Answered(NamedTuple):
    """The answer's text, or that of the abstention; tokens of all upstream requests; the `catto` object."""

    text: str
    finish_reason: str
    usage: dict[str, int]
    catto: dict[str, Any]


class Sample(NamedTuple):
    """A response, and its continuation where it left something open; `unreadable`: why its label has no probability.

    The confidence of such a prediction is unknown, and 0 in its place.
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
        """What a client is shown: the response, or the label where the response does not state it.

        The confidence is that of the label, and a text that says something else would be taken for the answer.
        """
        return str(self.prediction.label) if self.is_forced else self.prediction.text

    @property
    def stated_confidence(self) -> float | None:
        """The model's own probability of the label; None without a label, or where it cannot be read."""
        if self.prediction.label is None or self.unreadable is not None:
            return None
        return self.prediction.confidence

    def describe(self) -> dict[str, Any]:
        """The sample as a candidate; `response` is what the upstream wrote, where that is not the text shown."""
        return {
            "text": self.shown_text,
            "response": self.prediction.text if self.is_forced else None,
            "label": self.prediction.label,
            "source": self.prediction.source,
        }


@dataclass(frozen=True)
class Answerer:
    """Asks the upstream. The threshold is of this calibrator; its guarantee is given to requests of its protocol."""

    engine: ServerEngine
    client: httpx.AsyncClient
    fitted: Fitted | None
    threshold: RiskThreshold | None
    abstention: str

    async def answer(self, asked: Asked) -> Answered:
        """Sample until the choice is settled, choose, calibrate, compare with the threshold.

        FaultError where the upstream fails, with code 400 where a sample has no confidence that can be read: a choice
        among the others would favour the labels that can be read. A majority needs no confidence.
        """
        samples: list[Sample] = []
        while more := self._further(asked.protocol, [sample.prediction for sample in samples]):
            numbers = range(len(samples), len(samples) + more)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._sample(asked, number)) for number in numbers]
            except ExceptionGroup as faults:
                raise faults.exceptions[0] from None
            samples += [task.result() for task in tasks]
        return self._answered(asked, samples)

    def _further(self, protocol: Protocol, predictions: list[Prediction]) -> int:
        """How many samples to take next, 0 where the choice is settled."""
        if protocol.stop is None:
            return protocol.k - len(predictions)
        given = gather_candidates(self._calibrated(predictions)[0]) if predictions else NO_SAMPLES
        return int(samples_still_needed(given, protocol.rule, protocol.k, protocol.stop)[0])

    def _calibrated(self, predictions: list[Prediction]) -> tuple[list[Prediction], str | None]:
        """The samples with calibrated confidences, or as they are and why they have none."""
        try:
            return (predictions if self.fitted is None else self.fitted.calibrate_samples(predictions)), None
        except ValueError as error:
            return predictions, str(error)

    async def _sample(self, asked: Asked, number: int) -> Sample:
        """Take one sample. Replies are read in a thread, so that the event loop goes on serving."""
        request = Request(
            question=asked.question.id,
            sample=number,
            messages=asked.messages,
            temperature=asked.protocol.temperature,
            seed=request_seed(asked.seed, "", number),
            max_tokens=asked.max_tokens,
            stop=STOP,
        )
        reply = await self.engine.ask(self.client, request)
        case = Case(asked.question, asked.messages, reply)
        answer, more = await run_in_thread(self._read_response, case)
        replies = [reply]
        if more is not None:
            continuation = await self.engine.ask(self.client, more)
            answer = await run_in_thread(read_reply, case, continuation)
            replies.append(continuation)
        return await run_in_thread(self._make_sample, asked, request, replies, answer)

    def _read_response(self, case: Case) -> tuple[Answer | Refusal, Request | None]:
        """The answer of a response, and the request for what it leaves open."""
        answer = read_reply(case)
        reads_all_labels = self.fitted is not None and self.fitted.on == "labels"
        if answer is NO_ANSWER or reads_all_labels:
            return answer, request_continuation(self.engine, case, answer)
        return answer, None

    def _make_sample(
        self, asked: Asked, request: Request, replies: list[Generation], answer: Answer | Refusal
    ) -> Sample:
        """Record what was read. FaultError where the rule needs a confidence and none can be read."""
        unreadable = None
        response = replies[0]
        if isinstance(answer, Refusal):
            unreadable = answer.refused
            if asked.protocol.rule != MAJORITY:
                raise FaultError(f"no confidence can be read: {unreadable}", is_retryable=False, code=400)
            parsed = parse_answer(response.text, asked.question)
            answer = Answer(parsed.label, parsed.source or "free", 0.0, None, None)
        if find_stop_end(response.text, STOP) is not None:  # the answer is whole, whatever the upstream wrote after it
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

    def _answered(self, asked: Asked, samples: list[Sample]) -> Answered:
        """The rule's choice of the samples and what is known of it."""
        protocol, threshold, fitted = asked.protocol, self.threshold, self.fitted
        predictions = [sample.prediction for sample in samples]
        calibrated, uncalibrated = self._calibrated(predictions)
        if fitted is not None and fitted.protocol not in (None, protocol):
            fitted, uncalibrated = None, OTHER_PROTOCOL
        # All samples that were taken count, so the choice is that of a fixed k.
        taken = protocol.model_copy(update={"k": len(samples), "stop": None})
        try:
            (final,) = final_answers(predictions, taken, None if uncalibrated else fitted)
        except ValueError as error:  # a rule that reads what no sample has
            raise FaultError(str(error), is_retryable=False, code=400) from None
        chosen = samples[final.sample]
        confidence = None if uncalibrated or final.label is None else final.confidence
        abstained = threshold is not None and (confidence is None or confidence < threshold.threshold)
        faults = self._faults(asked, samples)
        guarantee = None
        if threshold is not None and threshold.protocol == protocol and not faults:
            guarantee = threshold.promise
        reasons = [uncalibrated] if uncalibrated else []
        if final.label is None:
            reasons.append(NO_LABEL)
        elif chosen.is_forced:
            reasons.append(FORCED)
        reasons += faults
        about = {
            "confidence": confidence,
            "confidence_raw": chosen.stated_confidence,
            **final.model_dump(include={"label", "votes", "source"}),
            "k": len(samples),
            "rule": protocol.rule,
            "calibrator": {"name": fitted.calibrator.kind, "n": fitted.rows} if fitted else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": guarantee,
            "abstained": abstained,
            "reason": "; ".join(reasons) or None,
        }
        if asked.return_candidates:
            candidates_shown = []
            for sample, scaled in zip(samples, calibrated, strict=True):
                raw = sample.stated_confidence
                known = None if uncalibrated or raw is None else scaled.confidence
                candidates_shown.append({**sample.describe(), "confidence": known, "confidence_raw": raw})
            about["candidates"] = candidates_shown
        replies = [reply for sample in samples for reply in sample.replies]
        prompt_tokens = sum(reply.prompt_tokens or 0 for reply in replies)
        completion_tokens = sum(reply.tokens or 0 for reply in replies)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if abstained:
            return Answered(self.abstention, "stop", usage, about)
        finish_reason = "stop" if chosen.is_forced else chosen.replies[0].finish_reason or "stop"
        return Answered(chosen.shown_text, finish_reason, usage, about)

    def _faults(self, asked: Asked, samples: list[Sample]) -> list[str]:
        """Why the promise of a threshold does not cover this answer, each reason once."""
        threshold = self.threshold
        models = (threshold.models if threshold else ()) or (self.engine.model,)
        faults = [sample.unreadable for sample in samples if sample.unreadable is not None]
        for sample in samples:
            if sample.replies[0].finish_reason == "length":
                faults.append(CUT)
            if threshold is not None and any(reply.model not in models for reply in sample.replies):
                faults.append(OTHER_MODEL)
        if asked.has_other_labels and (threshold is not None or self.fitted is not None):
            faults.append(OTHER_LABELS)
        return list(dict.fromkeys(faults))
