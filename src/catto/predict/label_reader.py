"""Close a response that gave no answer, so that the next token is a label.

Which label a response answers with and how probable it is, read from token ids and the model that wrote them.

Labels from an OpenAI-compatible server: no token ids, only token texts with the best candidates at each place.

The answer's own log-probability always comes with the token that was drawn; the other labels are known where they stand
among the best 20. `label_logprobs` is null where one of them does not, and `logsumexp` always.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from catto.engines import Context, Generation, Scores
from catto.engines.replies import ServerError
from catto.engines.server import ServerEngine, next_tokens, probe
from catto.labels import Opening, Rest, decoded, encoded, locate, opening, token_at
from catto.prompts import TAG, completion, messages, parse_answer, tag_name
from catto.records import Question, Refusal

# ---- fallback


_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Closed(NamedTuple):
    """How much of a text is kept (characters), and what is put after it."""

    keep: int
    ending: str


def close(text: str) -> Closed:
    """Keep a response up to its last `<answer>`, close an open think block, open the answer in the canonical form.

    A tag that was cut off at the end goes, and so does the white space before the cut.
    """
    openings = [tag.start() for tag in TAG.finditer(text) if tag_name(tag) == "answer"]
    kept = text[: openings[-1] if openings else _without_torn_tag(text)].rstrip()
    thinks = [tag_name(tag) for tag in TAG.finditer(kept) if tag_name(tag).endswith("think")]
    is_open = bool(thinks) and thinks[-1] == "think"
    ending = ("\n</think>" if is_open else "") + "\n" + completion(None, None)
    return Closed(len(kept), ending if kept else ending.lstrip("\n"))


def _without_torn_tag(text: str) -> int:
    """Where the text ends without the beginning of a tag."""
    start = text.rfind("<")
    torn = start >= 0 and any(tag.startswith(text[start:].lower()) and tag != text[start:].lower() for tag in _TAGS)
    return start if torn else len(text)


def closed_ids(tokenizer: Any, ids: Sequence[int], labels: Sequence[str], room: int | None = None) -> Opening | None:
    """Tokens of a response closed by `close`, ready for a label, and every label's next token.

    `room`: most tokens that it may have; the reasoning's end is given up where it has more. None where the answer's
    opening alone has more.
    """
    kept = list(ids)
    while True:
        found = _closed(tokenizer, kept, labels)
        longest = len(found.ids) + max(map(len, found.rest.values()), default=0)
        excess = 0 if room is None else longest - room
        if excess <= 0:
            return found
        if not kept:
            return None
        kept = kept[: max(0, len(kept) - excess)]


def _closed(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> Opening:
    text = decoded(tokenizer, ids)
    keep, ending = close(text)
    try:
        index, begin = token_at(tokenizer, ids, text, keep) if keep < len(text) else (len(ids), keep)
        # A token that holds kept and dropped characters is dropped; what it held of the kept ones is written again.
        found = opening(tokenizer, text[begin:keep] + ending, labels)
    except ValueError:
        # Tokens whose text cannot be cut, or a torn word that changes how the labels are written: encode it all anew.
        found = opening(tokenizer, ending, labels)
        return Opening((*encoded(tokenizer, text[:keep]), *found.ids), found.candidates, found.rest)
    return Opening((*ids[:index], *found.ids), found.candidates, found.rest)


# ---- answers


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


# ---- served


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
    return _served_answer(question.labels, parsed.label, parsed.source, logprobs)


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
    return _served_answer(labels, max(logprobs, key=lambda label: logprobs[label]), "fallback", logprobs)


def _served_answer(labels: Sequence[str], label: str, source: Source, logprobs: dict[str, float]) -> Answer:
    complete = {name: logprobs[name] for name in labels} if set(labels) <= set(logprobs) else None
    return Answer(label, source, min(1.0, math.exp(logprobs[label])), complete, None)
