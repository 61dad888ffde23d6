"""One request -> k samples of the upstream -> one answer with its confidence, or an abstention. No web framework.

Labels are read, confidences calibrated and answers chosen by the functions of evaluation: the same samples give the
same numbers as `catto eval` and `catto select`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np

from catto.calibrate import OTHER_PROTOCOL, Fitted, RiskThreshold, final_answers
from catto.engines import Generation, Request
from catto.engines.server import FaultError, ServerEngine, best_next
from catto.metrics.selection import Candidates, candidates, further
from catto.predict.label_reader import NO_ANSWER, Case, begun_answer, continued, read_reply
from catto.predict.predictor import STOP, prediction, request_seed
from catto.records import Message, Prediction, Protocol, Question, Refusal

NO_LABEL = "the response states no label, and none is among the upstream's best next tokens"
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
    """The answer's text, or that of the abstention; token counts of all samples; the `catto` object."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    catto: dict[str, Any]


class _Sample(NamedTuple):
    prediction: Prediction
    generation: Generation
    unreadable: str | None  # why the label's probability is not known


@dataclass(frozen=True)
class Answerer:
    """Asks the upstream. `continues`: it can continue a begun message, so that every response has an answer.

    The threshold must be of this calibrator. Its guarantee is given to requests of its protocol.
    """

    engine: ServerEngine
    client: httpx.AsyncClient
    continues: bool
    fitted: Fitted | None
    threshold: RiskThreshold | None
    abstention: str

    async def answer(self, asked: Asked) -> Answered:
        """Sample until the choice is settled, choose, calibrate, compare with the threshold.

        FaultError where the upstream fails, with code 400 where no sample has a confidence that can be read.
        """
        samples: list[_Sample] = []
        while more := self._further(asked.protocol, [sample.prediction for sample in samples]):
            try:
                async with asyncio.TaskGroup() as group:
                    numbers = range(len(samples), len(samples) + more)
                    tasks = [group.create_task(self._sample(asked, number)) for number in numbers]
            except ExceptionGroup as faults:
                raise faults.exceptions[0] from None
            samples += [task.result() for task in tasks]
        return self._chosen(asked, samples)

    def _further(self, protocol: Protocol, predictions: Sequence[Prediction]) -> int:
        """How many samples to take next, 0 where the choice is settled."""
        if protocol.stop is None:
            return protocol.k - len(predictions)
        given = candidates(self._ranked(predictions)[0]) if predictions else NO_SAMPLES
        return int(further(given, protocol.rule, protocol.k, protocol.stop)[0])

    def _ranked(self, predictions: Sequence[Prediction]) -> tuple[list[Prediction], str | None]:
        """The samples with calibrated confidences, or as they are and why they have none."""
        try:
            return (list(predictions) if self.fitted is None else self.fitted.ranked(predictions)), None
        except ValueError as error:
            return list(predictions), str(error)

    async def _sample(self, asked: Asked, number: int) -> _Sample:
        question = asked.question
        request = Request(
            question=question.id,
            sample=number,
            messages=asked.messages,
            temperature=asked.protocol.temperature,
            seed=request_seed(asked.seed, "", number),
            max_tokens=asked.max_tokens,
            stop=STOP,
        )
        generation = await self.engine.ask(self.client, request)
        answer = read_reply(question, generation)
        if answer is None:
            begun = begun_answer(generation.text)
            tops: dict[str, float] = {}
            if self.continues:
                tops = best_next(await self.engine.continuation(self.client, asked.messages, begun))
            answer = continued(Case(question, asked.messages, generation), tops)
        unreadable = answer.refused if isinstance(answer, Refusal) else None
        known = NO_ANSWER if isinstance(answer, Refusal) else answer
        made = prediction(question, generation, known, request.temperature, request.seed, self.engine.name)
        return _Sample(made, generation, unreadable)

    def _chosen(self, asked: Asked, samples: list[_Sample]) -> Answered:
        """The rule's choice of the samples and what is known of it."""
        protocol, fitted, threshold = asked.protocol, self.fitted, self.threshold
        predictions = [sample.prediction for sample in samples]
        reason = next((sample.unreadable for sample in samples if sample.unreadable is not None), None)
        if all(sample.unreadable is not None for sample in samples):
            raise FaultError(f"no confidence can be read: {reason}", again=False, code=400)
        guaranteed = threshold is not None and threshold.protocol == protocol and reason is None
        ranked, uncalibrated = self._ranked(predictions)
        if fitted is not None and fitted.protocol not in (None, protocol):
            fitted, reason = None, OTHER_PROTOCOL
        # All samples that were taken count, so the choice is that of a fixed k.
        taken = protocol.model_copy(update={"k": len(samples), "stop": None})
        (final,) = final_answers(predictions, taken, None if uncalibrated else fitted)
        confidence = None if uncalibrated or final.label is None else final.confidence
        abstained = threshold is not None and (confidence is None or confidence < threshold.threshold)
        generations = [sample.generation for sample in samples]
        chosen = generations[final.sample]
        promise = threshold and {
            "risk": threshold.risk,
            "confidence_level": 1.0 - threshold.delta,
            "coverage": threshold.coverage,
        }
        about: dict[str, Any] = {
            "confidence": confidence,
            "confidence_raw": final.confidence_raw,
            "label": final.label,
            "k": final.samples,
            "votes": final.votes,
            "rule": protocol.rule,
            "calibrator": {"name": fitted.calibrator.kind, "n": fitted.rows} if fitted else None,
            "threshold": threshold.threshold if threshold else None,
            "guarantee": promise if guaranteed else None,
            "abstained": abstained,
            "source": final.source,
            "reason": uncalibrated or reason or (NO_LABEL if final.label is None else None),
        }
        if asked.return_candidates:
            about["candidates"] = [
                {
                    **one.model_dump(include={"text", "label", "source"}),
                    "confidence": None if uncalibrated else new.confidence,
                    "confidence_raw": one.confidence,
                }
                for one, new in zip(predictions, ranked, strict=True)
            ]
        return Answered(
            self.abstention if abstained else chosen.text,
            "stop" if abstained else chosen.finish_reason or "stop",
            sum(one.prompt_tokens or 0 for one in generations),
            sum(one.tokens or 0 for one in generations),
            about,
        )
