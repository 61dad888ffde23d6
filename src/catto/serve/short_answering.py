"""Answer requests for tasks without options: short answers and numbers, with the protocol's kind of confidence.

Once the samples are taken, everything is the same as for labels. A sample costs one upstream request. The confidence
P(True) needs a second one, which asks whether the answer is right: it is the probability of the reply "True".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from catto.answer.confidence import NO_ANSWER, Answer, Case, read_reply, request_continuation
from catto.answer.short_answers import ShortAnswer, measure_agreement, read_short_answer
from catto.answer.verbal import read_stated_confidence
from catto.elicit import JUDGEMENT_TOKENS, read_ptrue
from catto.engines import Generation, Request
from catto.predict import STOP, STOP_STATED, describe_answer
from catto.prompts import JUDGEMENT_LABELS, add_judgement
from catto.records import Grade, Message, Option, Prediction, Refusal
from catto.serve.answering import (
    Answerer,
    AnswerRequest,
    GatewayAnswer,
    Sample,
    ServedQuestion,
    make_unreadable_fault,
    run_in_thread,
)

JUDGEMENT_OPTIONS = tuple(Option(label=label, text=label) for label in JUDGEMENT_LABELS)


class Judgement(NamedTuple):
    """The upstream's judgement of its own answer.

    Attributes:
        ptrue: P(True); None if the upstream was not asked, or if its reply is neither True nor False.
        replies: The upstream's replies to the question whether the answer is right.
    """

    ptrue: float | None
    replies: tuple[Generation, ...]


NOT_JUDGED = Judgement(None, ())


class _JudgementReply(NamedTuple):
    """A reply to the question whether an answer is right.

    Attributes:
        reply: The upstream's reply.
        verdict: The label True or False that was read from it, or `NO_ANSWER` if it gives neither. A refusal if the
            log-probability of the label cannot be read.
    """

    reply: Generation
    verdict: Answer | Refusal


@dataclass(frozen=True)
class ShortAnswerer(Answerer):
    """Answers requests whose answer is a short text or a number.

    Attributes:
        grade: How answers are compared, which decides which samples agree.
        brief: Whether the task's prompts omit the explanation of how to write a judgement.
    """

    grade: Grade = "exact"
    brief: bool = False

    async def _take_sample(self, client_request: AnswerRequest, number: int) -> Sample:
        """Take one sample and, for P(True), ask whether its answer is right.

        The confidence by agreement needs all samples, so `_compose_answer` computes it.

        Args:
            client_request: The client's request.
            number: The number of the sample, counted from 0.

        Raises:
            FaultError: The upstream fails, or its judgement cannot be read.
        """
        kind = client_request.protocol.confidence_kind
        # A stated confidence follows the answer, so generation must not stop before it.
        stop = STOP_STATED if kind == "verbal" else STOP
        upstream_request = self._make_upstream_request(client_request, number, stop=stop)
        response = await self.engine.ask(self.client, upstream_request)
        is_cut = response.finish_reason == "length"
        answer = await run_in_thread(partial(read_short_answer, response.text, self.grade, cut=is_cut))
        confidence = None
        judgement = NOT_JUDGED
        if kind == "ptrue" and answer.text is not None:
            judgement = await self._judge_answer(client_request, number, answer.text)
            confidence = judgement.ptrue
        elif kind == "verbal":
            confidence = await run_in_thread(read_stated_confidence, response.text)
        return self._make_short_sample(upstream_request, response, answer, confidence=confidence, judgement=judgement)

    async def _judge_answer(self, client_request: AnswerRequest, number: int, answer_text: str) -> Judgement:
        """Ask the upstream whether an answer is right.

        Args:
            client_request: The client's request.
            number: The number of the sample.
            answer_text: The answer of the sample, as it was written.

        Returns:
            P(True), and the upstream's reply, whose tokens are counted.

        Raises:
            FaultError: The upstream fails, or the log-probability of the label True or False cannot be read.
        """
        question = ServedQuestion(client_request.question.id, JUDGEMENT_OPTIONS)
        messages = add_judgement(client_request.messages, answer_text, brief=self.brief)
        if self.engine.can_continue:
            judged = await self._request_label(question, messages, number)
        else:
            judged = await self._request_whole_judgement(question, messages, number)
        if isinstance(judged.verdict, Refusal):
            raise make_unreadable_fault(judged.verdict.refused)
        return Judgement(read_ptrue(judged.verdict), (judged.reply,))

    async def _request_label(
        self, question: ServedQuestion, messages: tuple[Message, ...], number: int
    ) -> _JudgementReply:
        """Let the upstream generate a single token of a judgement: the label, after an answer block opened for it.

        As in evaluation, this is the continuation of a response without an answer: here, of an empty one.
        """
        empty_response = Generation(question=question.id, sample=number, text="", model=self.engine.model)
        case = Case(question, messages, empty_response)
        label_request = request_continuation(self.engine, case, NO_ANSWER)
        assert label_request is not None  # any response without an answer is continued if the upstream can do so
        reply = await self.engine.ask(self.client, label_request)
        verdict = await run_in_thread(read_reply, case, reply)
        return _JudgementReply(reply, verdict)

    async def _request_whole_judgement(
        self, question: ServedQuestion, messages: tuple[Message, ...], number: int
    ) -> _JudgementReply:
        """Let the upstream write a judgement with its tags, since it cannot continue a response."""
        request = Request(
            question=question.id, sample=number, messages=messages, max_tokens=JUDGEMENT_TOKENS, stop=STOP
        )
        reply = await self.engine.ask(self.client, request)
        verdict = await run_in_thread(read_reply, Case(question, messages, reply))
        return _JudgementReply(reply, verdict)

    def _make_short_sample(
        self,
        upstream_request: Request,
        response: Generation,
        answer: ShortAnswer,
        *,
        confidence: float | None,
        judgement: Judgement,
    ) -> Sample:
        """Make a sample from a short answer.

        Args:
            upstream_request: The upstream request that gave the response.
            response: The response.
            answer: The short answer in it.
            confidence: The confidence of the answer. None if the response gives none, or if it is not known yet; the
                prediction then has the confidence 0.
            judgement: The upstream's judgement of the answer.
        """
        unlabelled = Answer(
            label=None,
            source=answer.source or "none",
            confidence=confidence or 0.0,
            label_logprobs=None,
            logsumexp=None,
        )
        is_answered = answer.key is not None
        if is_answered:  # even if max_tokens was reached, only text after the answer was cut
            response = response.model_copy(update={"finish_reason": "stop"})
        prediction = Prediction(
            question=upstream_request.question,
            task="served",
            split="test",
            gold="",  # unknown
            answer=answer.key,
            correct=False,  # unknown too, but an answer without a label needs a value
            **describe_answer(response, unlabelled),
            temperature=upstream_request.temperature,
            seed=upstream_request.seed,
            engine=self.engine.name,
        )
        return Sample(prediction, (response, *judgement.replies), None)

    def _compose_answer(self, client_request: AnswerRequest, samples: list[Sample]) -> GatewayAnswer:
        """Set the confidence of each sample by the protocol's kind, then choose as with labels."""
        kind = client_request.protocol.confidence_kind
        confidences = [sample.prediction.confidence for sample in samples]
        if kind == "agreement":
            confidences = measure_agreement([sample.prediction.answer for sample in samples])
        finished = []
        for sample, confidence in zip(samples, confidences, strict=True):
            # A calibrator checks the kind: it must be the one that it was fitted on.
            update = {"confidence": confidence, "confidence_kind": kind}
            prediction = sample.prediction.model_copy(update=update)
            finished.append(sample._replace(prediction=prediction))
        answer = super()._compose_answer(client_request, finished)
        return answer._replace(catto={**answer.catto, "confidence_kind": kind})
