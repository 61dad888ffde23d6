"""Labels from an OpenAI-compatible server: no token ids, only token texts with the best candidates at each place.

The answer's own log-probability always comes with the token that was drawn; the other labels are known where they stand
among the best 20. `label_logprobs` is null where one of them does not, and `logsumexp` always.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from catto.engines import Generation
from catto.engines.probing import next_tokens, probe
from catto.engines.server import ServerEngine, ServerError
from catto.evaluation.answers import NO_ANSWER, Answer, Source
from catto.evaluation.fallback import close
from catto.prompts import messages, parse_answer
from catto.records import Question, Refusal


class ServerReader:
    """Reads labels and their log-probabilities from a server's replies; what the server cannot do is said at once."""

    def __init__(self, engine: ServerEngine, reasoning: bool) -> None:
        if engine.top_logprobs == 0:
            raise ValueError("the server engine has top_logprobs 0: give up to 20, the confidence is read from them")
        self.engine, self.reasoning = engine, reasoning
        abilities = probe(engine)
        if not abilities.logprobs:
            raise ServerError(f"{engine.model}: {abilities.missing()[0]}")
        for line in abilities.missing():
            warnings.warn(f"{engine.model}: {line}", stacklevel=2)
        self._continues = abilities.continues

    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> list[Answer | Refusal]:
        """The answer of every response, those without one by constrained continuation.

        A response whose label has no readable log-probability is refused, and so is one whose continuation was.
        """
        free = [_read(question, generation) for question, generation in pairs]
        open_pairs = [pair for pair, answer in zip(pairs, free, strict=True) if answer is None]
        closed = iter(self._constrained(open_pairs))
        return [answer if answer is not None else next(closed) for answer in free]

    def _constrained(self, pairs: Sequence[tuple[Question, Generation]]) -> list[Answer | Refusal]:
        if not self._continues:
            return [NO_ANSWER for _ in pairs]
        begun = []
        for question, generation in pairs:
            keep, ending = close(generation.text)
            begun.append((messages(question, reasoning=self.reasoning), generation.text[:keep] + ending))
        tops = next_tokens(self.engine, begun)
        return [
            _refused(generation, found.refused) if isinstance(found, Refusal) else _best(question.labels, found)
            for (question, generation), found in zip(pairs, tops, strict=True)
        ]


def _refused(generation: Generation, why: str) -> Refusal:
    return Refusal(refused=why, question=generation.question, sample=generation.sample)


def _read(question: Question, generation: Generation) -> Answer | Refusal | None:
    try:
        return _free(question, generation)
    except ServerError as error:
        return _refused(generation, str(error))


def _free(question: Question, generation: Generation) -> Answer | None:
    """The answer as it was written; None where there is none."""
    parsed = parse_answer(generation.text, question, cut=generation.finish_reason == "length")
    if parsed.label is None or parsed.source is None or parsed.span is None:
        return None
    place = _place(generation, parsed.span)
    tops = place.tops
    logprobs = label_logprobs(question.labels, tops, place.lead, place.after)
    # The token that was drawn, and not the likeliest beginning of the label, is the one that counts.
    logprobs[parsed.label] = tops[place.token]
    return _answer(question.labels, parsed.label, parsed.source, logprobs)


class _Place(NamedTuple):
    token: str
    tops: Mapping[str, float]
    lead: str  # what stands in the token before the label
    after: str  # and after it


def _place(generation: Generation, span: tuple[int, int]) -> _Place:
    """The token that holds the label's first character."""
    begin = 0
    for token, tops in generation.tops or ():
        end = begin + len(token)
        if generation.text[begin:end] != token[: max(0, len(generation.text) - begin)]:
            break
        if begin <= span[0] < end:
            return _Place(token, tops, token[: span[0] - begin], token[span[1] - begin :] if end > span[1] else "")
        begin = end
    raise ServerError("the log-probabilities do not reach the label, or their tokens do not add up to the text")


def label_logprobs(
    labels: Sequence[str], tops: Mapping[str, float], lead: str = "", after: str = ""
) -> dict[str, float]:
    """Each label's log-probability among candidate tokens: that of the likeliest token that begins it in this form.

    Labels that no candidate begins are left out, and so are labels that share a token.
    """
    found: dict[str, tuple[float, str]] = {}
    for label in labels:
        begins = [(value, text) for text, value in tops.items() if _begins(text, lead, label + after)]
        if begins:
            found[label] = max(begins)
    texts = [text for _, text in found.values()]
    return {label: value for label, (value, text) in found.items() if texts.count(text) == 1}


def _begins(token: str, lead: str, label: str) -> bool:
    return len(token) > len(lead) and token.startswith(lead) and label.startswith(token[len(lead) :])


def _best(labels: Sequence[str], tops: Mapping[str, float]) -> Answer:
    logprobs = label_logprobs(labels, tops)
    if not logprobs:
        return NO_ANSWER
    return _answer(labels, max(logprobs, key=lambda label: logprobs[label]), "fallback", logprobs)


def _answer(labels: Sequence[str], label: str, source: Source, logprobs: dict[str, float]) -> Answer:
    complete = {name: logprobs[name] for name in labels} if set(labels) <= set(logprobs) else None
    return Answer(label, source, min(1.0, math.exp(logprobs[label])), complete, None)
