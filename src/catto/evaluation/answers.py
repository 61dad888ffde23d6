"""Which label a response answers with and how probable it is, read from token ids and the model that wrote them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from catto.engines import Context, Generation, Scores
from catto.evaluation.fallback import closed_ids
from catto.labels import locate
from catto.prompts import messages
from catto.records import Question


class Answer(NamedTuple):
    """What a response answers, how that was found, and the log-probabilities at the label's place."""

    label: str | None
    source: Literal["free", "fallback"]
    confidence: float
    label_logprobs: dict[str, float] | None
    logsumexp: dict[str, float] | None


class _Spot(NamedTuple):
    """Where a label is read: after these tokens, as one of these candidates; `label` None: the best of them."""

    label: str | None
    prefix: tuple[int, ...]
    candidates: dict[str, int]


class TokenReader:
    """Reads labels in token ids and has the engine score them: any engine with `tokenizer`, token ids and `score`."""

    def __init__(self, engine: Any, reasoning: bool) -> None:
        self.engine, self.reasoning = engine, reasoning

    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> list[Answer]:
        """The answer of every response, all scored in one call."""
        spots = [self._spot(question, generation) for question, generation in pairs]
        contexts = [
            Context(
                messages=messages(question, reasoning=self.reasoning),
                prefix=spot.prefix,
                candidates=tuple(spot.candidates.values()),
            )
            for (question, _), spot in zip(pairs, spots, strict=True)
        ]
        scores = self.engine.score(contexts)
        return [_answer(pair[0].labels, spot, score) for pair, spot, score in zip(pairs, spots, scores, strict=True)]

    def _spot(self, question: Question, generation: Generation) -> _Spot:
        ids = generation.token_ids
        if ids is None:
            raise ValueError(f"{self.engine.name} gave no token ids for question {question.id}")
        place = locate(self.engine.tokenizer, ids, question.labels, [option.text for option in question.options])
        if place is not None:
            return _Spot(place.label, ids[: place.index], place.candidates)
        positions = _positions(self.engine)
        room = None if positions is None else positions - (generation.prompt_tokens or 0)
        closed = closed_ids(self.engine.tokenizer, ids, question.labels, room)
        return _Spot(None, closed.ids, closed.candidates)


def _positions(engine: Any) -> int | None:
    """How many tokens prompt and response may have together, where the engine tells."""
    if hasattr(engine, "network"):
        found: int | None = getattr(engine.network.config.get_text_config(), "max_position_embeddings", None)
        return found
    return getattr(engine, "positions", None)


def _answer(labels: Sequence[str], spot: _Spot, scores: Scores) -> Answer:
    """Take the written label, or the most probable one, the first of equals; its probability is never renormalised."""
    logprobs = dict(zip(spot.candidates, scores.logprobs, strict=True))
    label = spot.label if spot.label is not None else max(labels, key=lambda name: logprobs[name])
    complete = {name: logprobs[name] for name in labels} if set(labels) <= set(logprobs) else None
    source: Literal["free", "fallback"] = "free" if spot.label is not None else "fallback"
    # float64 may round log 1 to 1e-17
    return Answer(label, source, min(1.0, math.exp(logprobs[label])), complete, scores.logsumexp)
