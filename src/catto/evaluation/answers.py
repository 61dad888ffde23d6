"""Which label a response answers with and how probable it is, read from token ids and the model that wrote them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from catto.engines import Context, Generation, Scores
from catto.evaluation.fallback import closed_ids
from catto.labels import Rest, locate
from catto.prompts import messages
from catto.records import Question

Source = Literal["free", "plain", "fallback"]


class Answer(NamedTuple):
    """What a response answers, how that was found, and the log-probabilities at the label's place."""

    label: str | None
    source: Source
    confidence: float
    label_logprobs: dict[str, float] | None
    logsumexp: dict[str, float] | None


NO_ANSWER = Answer(None, "fallback", 0.0, None, None)


class _Spot(NamedTuple):
    """Where a label is read: after these tokens, as one of these candidates; `label` None: the best of them.

    `rest`: the tokens after its candidate, for a label that the candidate alone does not tell apart.
    """

    label: str | None
    source: Source
    prefix: tuple[int, ...]
    candidates: dict[str, int]
    rest: Rest

    def asked(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The next tokens to score, by the tokens that go before them and after the prefix."""
        asked: dict[tuple[int, ...], dict[int, None]] = {(): dict.fromkeys(self.candidates.values())}
        for path in map(self.path, self.rest):
            for length in range(1, len(path)):
                asked.setdefault(path[:length], {})[path[length]] = None
        return {before: tuple(tokens) for before, tokens in asked.items()}

    def path(self, label: str) -> tuple[int, ...]:
        """All tokens of a label that are read."""
        return self.candidates[label], *self.rest.get(label, ())


class TokenReader:
    """Reads labels in token ids and has the engine score them: any engine with `tokenizer`, token ids and `score`."""

    def __init__(self, engine: Any, reasoning: bool) -> None:
        self.engine, self.reasoning = engine, reasoning

    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> list[Answer]:
        """The answer of every response, all scored in one call."""
        spots = [self._spot(question, generation) for question, generation in pairs]
        contexts = [
            Context(
                messages=messages(question, reasoning=self.reasoning), prefix=spot.prefix + before, candidates=tokens
            )
            for (question, _), spot in zip(pairs, spots, strict=True)
            if spot is not None
            for before, tokens in spot.asked().items()
        ]
        scores = iter(self.engine.score(contexts) if contexts else ())
        return [
            NO_ANSWER if spot is None else _answer(question.labels, spot, [next(scores) for _ in spot.asked()])
            for (question, _), spot in zip(pairs, spots, strict=True)
        ]

    def _spot(self, question: Question, generation: Generation) -> _Spot | None:
        """Where the label is read; None where the prompt leaves no room for an answer."""
        ids = generation.token_ids
        if ids is None:
            raise ValueError(f"{self.engine.name} gave no token ids for question {question.id}")
        tokenizer, positions = self.engine.tokenizer, _positions(self.engine)
        room = None if positions is None else positions - (generation.prompt_tokens or 0)
        texts = [option.text for option in question.options]
        place = locate(tokenizer, ids, question.labels, texts, cut=generation.finish_reason == "length")
        if place is not None:
            spot = _Spot(place.label, place.source, ids[: place.index], place.candidates, place.rest)
            if room is None or len(spot.prefix) + max(map(len, spot.asked())) <= room:
                return spot
        closed = closed_ids(tokenizer, ids, question.labels, room)
        return closed and _Spot(None, "fallback", closed.ids, closed.candidates, closed.rest)


def _positions(engine: Any) -> int | None:
    """How many tokens prompt and response may have together, where the engine tells."""
    if hasattr(engine, "network"):
        found: int | None = getattr(engine.network.config.get_text_config(), "max_position_embeddings", None)
        return found
    return getattr(engine, "positions", None)


def _answer(labels: Sequence[str], spot: _Spot, scores: Sequence[Scores]) -> Answer:
    """Take the written label, or the most probable one, the first of equals; its probability is never renormalised.

    A label of several tokens has the product of their probabilities, and then no `logsumexp`: that is of one place.
    """
    asked = spot.asked()
    found = {
        before: dict(zip(tokens, score.logprobs, strict=True))
        for (before, tokens), score in zip(asked.items(), scores, strict=True)
    }
    logprobs = {
        label: sum(found[path[:n]][token] for n, token in enumerate(path))
        for label, path in ((label, spot.path(label)) for label in spot.candidates)
    }
    label = spot.label if spot.label is not None else max(labels, key=lambda name: logprobs[name])
    complete = {name: logprobs[name] for name in labels} if set(labels) <= set(logprobs) else None
    # float64 may round log 1 to 1e-17
    confidence = min(1.0, math.exp(logprobs[label]))
    return Answer(label, spot.source, confidence, complete, None if spot.rest else scores[0].logsumexp)
