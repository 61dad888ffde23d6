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
from catto.engines import Generation, Request, stop_end
from catto.engines.server import FaultError, ServerEngine
from catto.metrics.selection import Candidates, gather_candidates, samples_still_needed
from catto.predict.label_reader import NO_ANSWER, Answer, Case, left_open, read_reply
from catto.predict.predictor import STOP, prediction, request_seed
from catto.prompts import parse_answer
from catto.records import Message, Prediction, Protocol, Question, Refusal

NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
CUT = "a response was cut at max_tokens"
OTHER_MODEL = "the threshold was fitted on answers of another model"
MAJORITY = "majority vote"
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
    """A response, and its continuation where it left something open; `unreadable`: why its label has no probability.

    The confidence of such a prediction is unknown, and 0 in its place.
    """

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
        unreadable = None
        if isinstance(answer, Refusal):
            unreadable, parsed = answer.refused, parse_answer(replies[0].text, question)
            if asked.protocol.rule != MAJORITY:
                raise FaultError(f"no confidence can be read: {unreadable}", again=False, code=400)
            answer = Answer(parsed.label, parsed.source or "free", 0.0, None, None)
        if stop_end(replies[0].text, STOP) is not None:  # the answer is whole, whatever the upstream wrote after it
            replies[0] = replies[0].model_copy(update={"finish_reason": "stop"})
        made = prediction(question, replies[0], answer, request.temperature, request.seed, self.engine.name)
        return Sample(made, tuple(replies), unreadable)

    def _answered(self, asked: Asked, samples: list[Sample]) -> Answered:
        """The rule's choice of the samples and what is known of it."""
        protocol, threshold, fitted = asked.protocol, self.threshold, self.fitted
        replies = [reply for sample in samples for reply in sample.replies]
        models = (threshold.models if threshold else ()) or (self.engine.model,)
        faults = [sample.unreadable for sample in samples]
        faults += [CUT for sample in samples if sample.replies[0].finish_reason == "length"]
        faults += [OTHER_MODEL for reply in replies if threshold and reply.model not in models]
        reason = next(filter(None, faults), None)
        predictions = [sample.prediction for sample in samples]
        stated = [None if sample.unreadable is not None else sample.prediction.confidence for sample in samples]
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
            "confidence_raw": stated[final.sample],
            **final.model_dump(include={"label", "votes", "source"}),
            "k": len(samples),
            "rule": protocol.rule,
            "calibrator": {"name": fitted.calibrator.kind, "n": fitted.rows} if fitted else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": threshold.promise if threshold and threshold.protocol == protocol and not reason else None,
            "abstained": abstained,
            "reason": uncalibrated or (NO_LABEL if final.label is None else reason),
        }
        if asked.return_candidates:
            about["candidates"] = [
                sample.model_dump(include={"text", "label", "source"})
                | {"confidence": None if uncalibrated or raw is None else sample.confidence, "confidence_raw": raw}
                for sample, raw in zip(calibrated, stated, strict=True)
            ]
        chosen = samples[final.sample].replies[0]
        read, written = sum(reply.prompt_tokens or 0 for reply in replies), sum(reply.tokens or 0 for reply in replies)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        text, ended = (self.abstention, "stop") if abstained else (chosen.text, chosen.finish_reason or "stop")
        return Answered(text, ended, usage, about)
