"""One request -> k samples of the upstream -> one answer with its confidence, or an abstention. No web framework.

Labels are read, confidences calibrated and answers chosen by the functions of evaluation: the same samples give the
same numbers as `catto eval` and `catto select`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np

from catto.calibrate import OTHER_PROTOCOL, Fitted, RiskThreshold, final_answers
from catto.engines import Generation, Request
from catto.engines.server import FaultError, ServerEngine
from catto.metrics.selection import Candidates, candidates, further
from catto.predict.label_reader import NO_ANSWER, Case, left_open, read_reply
from catto.predict.predictor import STOP, prediction, request_seed
from catto.records import Message, Prediction, Protocol, Question, Refusal

NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
CUT = "a response was cut at max_tokens"
_NONE = np.zeros((1, 0))
NO_SAMPLES = Candidates(("",), _NONE.astype(np.intp), _NONE, _NONE, _NONE.astype(np.bool_))


@dataclass(frozen=True)
class Asked:
    """A request: `question` holds its id and labels, `protocol` says how one answer is made of the samples."""

    question: Question
    messages: tuple[Message, ...]
    protocol: Protocol
    max_tokens: int
    seed: int
    return_candidates: bool = False


class Answered(NamedTuple):
    """The answer's text, or that of the abstention; tokens of all upstream requests; the `catto` object."""

    text: str
    finish_reason: str
    usage: dict[str, int]
    catto: dict[str, Any]


class Sample(NamedTuple):
    """A response, and its continuation where it left something open; `unreadable`: why its label has no probability."""

    prediction: Prediction
    replies: tuple[Generation, ...]
    unreadable: str | None


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

        FaultError where the upstream fails, with code 400 where no sample has a confidence that can be read.
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
        given = candidates(self._calibrated(predictions)[0]) if predictions else NO_SAMPLES
        return int(further(given, protocol.rule, protocol.k, protocol.stop)[0])

    def _calibrated(self, predictions: list[Prediction]) -> tuple[list[Prediction], str | None]:
        """The samples with calibrated confidences, or as they are and why they have none."""
        try:
            return (predictions if self.fitted is None else self.fitted.ranked(predictions)), None
        except ValueError as error:
            return predictions, str(error)

    async def _sample(self, asked: Asked, number: int) -> Sample:
        question, chat = asked.question, asked.messages
        how: Any = {"temperature": asked.protocol.temperature, "seed": request_seed(asked.seed, "", number)}
        how |= {"max_tokens": asked.max_tokens, "stop": STOP}
        request = Request(question=question.id, sample=number, messages=chat, **how)
        replies = [await self.engine.ask(self.client, request)]
        case = Case(question, chat, replies[0])
        answer = read_reply(case)
        # Only a calibrator of labels reads the other labels.
        unknown = answer is NO_ANSWER or (self.fitted is not None and self.fitted.on == "labels")
        if unknown and (more := left_open(self.engine, case, answer)):
            replies.append(await self.engine.ask(self.client, more))
            answer = read_reply(case, replies[1])
        unreadable = answer.refused if isinstance(answer, Refusal) else None
        read = NO_ANSWER if isinstance(answer, Refusal) else answer
        made = prediction(question, replies[0], read, request.temperature, request.seed, self.engine.name)
        return Sample(made, tuple(replies), unreadable)

    def _answered(self, asked: Asked, samples: list[Sample]) -> Answered:
        """The rule's choice of the samples and what is known of it."""
        protocol, threshold, fitted = asked.protocol, self.threshold, self.fitted
        reason = next((sample.unreadable for sample in samples if sample.unreadable is not None), None)
        if all(sample.unreadable is not None for sample in samples):
            raise FaultError(f"no confidence can be read: {reason}", again=False, code=400)
        reason = reason or (CUT if any(sample.replies[0].finish_reason == "length" for sample in samples) else None)
        guaranteed = threshold is not None and threshold.protocol == protocol and reason is None
        predictions = [sample.prediction for sample in samples]
        calibrated, uncalibrated = self._calibrated(predictions)
        if fitted is not None and fitted.protocol not in (None, protocol):
            fitted, uncalibrated = None, OTHER_PROTOCOL
        # All samples that were taken count, so the choice is that of a fixed k.
        taken = protocol.model_copy(update={"k": len(samples), "stop": None})
        try:
            (final,) = final_answers(predictions, taken, None if uncalibrated else fitted)
        except ValueError as error:  # a rule that reads what no sample has
            raise FaultError(str(error), again=False, code=400) from None
        confidence = None if uncalibrated or final.label is None else final.confidence
        abstained = threshold is not None and (confidence is None or confidence < threshold.threshold)
        about = {
            "confidence": confidence,
            **final.model_dump(include={"confidence_raw", "label", "votes", "source"}),
            "k": len(samples),
            "rule": protocol.rule,
            "calibrator": {"name": fitted.calibrator.kind, "n": fitted.rows} if fitted else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": threshold.promise if threshold and guaranteed else None,
            "abstained": abstained,
            "reason": uncalibrated or reason or (NO_LABEL if final.label is None else None),
        }
        if asked.return_candidates:
            known = [None if uncalibrated else sample.confidence for sample in calibrated]
            about["candidates"] = [
                sample.model_dump(include={"text", "label", "source"})
                | {"confidence": confidence, "confidence_raw": sample.confidence}
                for sample, confidence in zip(predictions, known, strict=True)
            ]
        replies, chosen = [reply for sample in samples for reply in sample.replies], samples[final.sample].replies[0]
        read, written = sum(reply.prompt_tokens or 0 for reply in replies), sum(reply.tokens or 0 for reply in replies)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        if abstained:
            return Answered(self.abstention, "stop", usage, about)
        return Answered(chosen.text, chosen.finish_reason or "stop", usage, about)
