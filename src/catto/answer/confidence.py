"""Read which label a response answers with and how probable that label is.

From an engine that exchanges tokens: the label is located in the token ids and the engine scores it there. From a
server: only token texts with the best candidates at each place are known. The answer's own log-probability always comes
with the token that was drawn, and the other labels are known where they are among the best 20. Where one is not, a
server that gives more candidates is asked again; else `label_logprobs` is None. `logsumexp` is None always.

A response without an answer is closed, so that the next token is a label, and the most probable label is taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from catto.answer.response import find_answer_tag, find_tags, find_turn_end, parse_answer
from catto.answer.tokens import (
    AnswerSource,
    LabelPosition,
    TokenIds,
    UnreadableLabelError,
    encode_continuation,
    encode_opening,
    find_token,
    locate_label,
    restyle_labels,
)
from catto.engines import Context, Engine, Generation, Key, LabelScores, Request, ScoredGeneration, Scores
from catto.prompts import TAGS, completion
from catto.records import Message, Question, Refusal
from catto.token_ids import count_common, decode_ids

if TYPE_CHECKING:
    from catto.engines.server import ServerEngine


class Case(NamedTuple):
    """A response with the question and the messages that it answers."""

    question: Question
    chat: tuple[Message, ...]
    generation: Generation


class Answer(NamedTuple):
    """What a response answers, how that was found, and the log-probabilities at the label's place."""

    label: str | None
    source: AnswerSource
    confidence: float
    label_logprobs: dict[str, float] | None
    logsumexp: dict[str, float] | None


Asked = tuple[Question, tuple[Message, ...]]
NO_ANSWER = Answer(None, "fallback", 0.0, None, None)
# A server that reads a text otherwise than it had written it gives the drawn token another log-probability; one in
# eight-bit arithmetic moves it by less than this.
SAME = 0.3


def _answer(
    question: Question,
    label: str,
    source: AnswerSource,
    logprobs: Mapping[str, float],
    logsumexp: dict[str, float] | None,
) -> Answer:
    """An answer with the probability of its label, never renormalised."""
    complete = {name: logprobs[name] for name in question.labels} if set(question.labels) <= set(logprobs) else None
    # float64 may round log 1 to 1e-17
    return Answer(label, source, min(1.0, math.exp(logprobs[label])), complete, logsumexp)


def close(text: str, labels: Sequence[str] = ()) -> tuple[int, str]:
    r"""Keep a response up to its answer, close an open think block, open the answer in the canonical form.

    A next turn after the response is dropped. So are a tag that was cut off at the end and the white space before it.

    Returns:
        How many characters of the response are kept, and the text that follows them.

    >>> close("<think>\nso\n</thi")
    (10, '\n</think>\n<answer>\n')
    """
    turn = text[: find_turn_end(text, labels)]
    tags = find_tags(turn)
    opened = find_answer_tag(turn, tags)
    end = len(turn)
    if opened is not None:
        end = opened.start
    else:
        bracket = turn.rfind("<")
        torn = turn[bracket:].lower() if bracket >= 0 else ""
        if torn and any(tag.startswith(torn) and tag != torn for tag in TAGS):
            end = bracket
    kept = turn[:end].rstrip()
    thinks = [tag.name for tag in tags if tag.end <= end and tag.name.endswith("think")]
    ending = ("\n</think>\n" if thinks[-1:] == ["think"] else "\n") + completion(None, None)
    return len(kept), ending if kept else ending.lstrip("\n")


def closed_ids(
    tokenizer: Any, ids: Sequence[int], labels: tuple[str, ...], room: float = math.inf
) -> LabelPosition | None:
    """Tokens of a response closed by `close`, ready for a label, and every label's next token.

    `room`: most tokens that it may have; a longer reasoning loses its end. None where the answer's opening alone has
    more.
    """
    kept = list(ids)
    while True:
        text = decode_ids(tokenizer, kept)
        keep, ending = close(text, labels)
        try:
            index, begin = find_token(tokenizer, kept, text, keep) if keep < len(text) else (len(kept), keep)
            # A token that holds kept and dropped characters is dropped; what it held of the kept ones is written again.
            start, before = encode_opening(tokenizer, text[begin:keep] + ending, labels), kept[:index]
        except ValueError:
            # Tokens whose text cannot be cut, or a torn word that changes how the labels are written: encode it again.
            start, before = encode_opening(tokenizer, ending, labels), encode_continuation(tokenizer, text[:keep])
        closed = start._replace(ids=(*before, *start.ids))
        if closed.needed_length <= room:
            return closed
        if not kept:
            return None
        kept = kept[: max(0, len(kept) - int(closed.needed_length - room))]


def _place(engine: Engine, case: Case) -> LabelPosition | None:
    """Find the label in the token ids, else close the response; None where the prompt leaves no room for an answer."""
    question, _, generation = case
    ids, labels = generation.token_ids, question.labels
    if ids is None:
        raise ValueError(f"{engine.name} gave no token ids for question {question.id}")
    room = math.inf if engine.positions is None else engine.positions - (generation.prompt_tokens or 0)
    texts = [option.text for option in question.options]
    with suppress(UnreadableLabelError):
        place = locate_label(engine.tokenizer, ids, labels, texts, cut=generation.finish_reason == "length")
        if place is not None and place.needed_length <= room:
            return place
    return closed_ids(engine.tokenizer, ids, labels, room)


def _scored(
    engine: Engine, cases: Sequence[Case]
) -> list[tuple[LabelPosition | None, dict[tuple[TokenIds, TokenIds], Scores]]]:
    """Where each response's label is read, and the scores there: those stored with it, else the engine's, in one call.

    Stored scores apply where they are of the same tokens and the same candidates, whichever parser found that place.
    """
    places = [_place(engine, case) if engine.tokenizer is not None else None for case in cases]
    rows: list[dict[tuple[TokenIds, TokenIds], Scores | Context]] = []
    for (_, chat, generation), place in zip(cases, places, strict=True):
        ids, key = generation.token_ids or (), generation.key
        labels = generation.labels if isinstance(generation, ScoredGeneration) else ()
        stored = {(ids[: score.kept] + score.added, score.candidates): score for score in labels}
        rows.append({})
        for prefix, tokens in place.list_scoring_points() if place is not None else ():
            context = Context(messages=chat, prefix=prefix, candidates=tokens, response=key)
            rows[-1][prefix, tokens] = stored.get((prefix, tokens), context)
    missing = [entry for row in rows for entry in row.values() if isinstance(entry, Context)]
    scores = iter(engine.score(missing) if missing else ())
    scored = [{spot: next(scores) if isinstance(e, Context) else e for spot, e in row.items()} for row in rows]
    return list(zip(places, scored, strict=True))


def read_tokens(engine: Engine, cases: Sequence[Case]) -> list[Answer]:
    """The answer of every response: the written label, else the most probable one.

    A label of several tokens has the product of their probabilities, and then no `logsumexp`, which is of one place.
    """
    answers = []
    for case, (place, scores) in zip(cases, _scored(engine, cases), strict=True):
        if place is None:
            answers.append(NO_ANSWER)
            continue
        at = {prefix: dict(zip(tokens, score.logprobs, strict=True)) for (prefix, tokens), score in scores.items()}
        logprobs = {
            label: sum(at[place.ids + path[:length]][token] for length, token in enumerate(path))
            for label, path in place.paths.items()
        }
        label = place.label if place.label is not None else max(case.question.labels, key=lambda name: logprobs[name])
        logsumexp = next(iter(scores.values())).logsumexp if len(scores) == 1 else None
        answers.append(_answer(case.question, label, place.source, logprobs, logsumexp))
    return answers


def score_labels(engine: Engine, cases: Sequence[Case]) -> list[ScoredGeneration]:
    """Responses that were just generated, each with the scores at its label: `read_tokens` then needs no model.

    A response of which only the text is known has none.
    """
    generations = []
    for (_, _, generation), (_, scores) in zip(cases, _scored(engine, cases), strict=True):
        labels = []
        for (prefix, tokens), score in scores.items():
            kept = count_common(generation.token_ids or (), prefix)
            labels.append(LabelScores(**dict(score), kept=kept, added=prefix[kept:], candidates=tokens))
        generations.append(ScoredGeneration(**dict(generation), labels=tuple(labels)))
    return generations


def read_replies(
    engine: ServerEngine, asked: Mapping[str, Asked], todo: deque[Request], outcomes: Iterable[Generation | Refusal]
) -> Iterator[tuple[Case, Answer] | Refusal]:
    """The answer of every reply, as they arrive; what one leaves open is asked by continuing it, where the server can.

    Such a request is the next of `todo`, and its reply one of the outcomes. A response whose label has no readable
    log-probability is refused, and so is one without an answer whose continuation was.
    """
    continued: dict[Key, Case] = {}
    for outcome in outcomes:
        if (case := continued.pop(outcome.key, None)) is not None:
            answer = read_reply(case, outcome)
        elif isinstance(outcome, Refusal):
            yield outcome
            continue
        else:
            case = Case(*asked[outcome.question], outcome)
            answer = read_reply(case)
            if (more := left_open(engine, case, answer)) is not None:
                continued[outcome.key] = case
                todo.appendleft(more)
                continue
        yield answer if isinstance(answer, Refusal) else (case, answer)


def left_open(engine: ServerEngine, case: Case, answer: Answer | Refusal) -> Request | None:
    """Ask for the token that tells what a reply leaves open; None where that is nothing or the server cannot continue.

    It is the one after the response closed, where there is no answer, or the label's, where other labels are not among
    the candidates and the server gives more of them than it gave.
    """
    generation = case.generation
    if answer is NO_ANSWER:
        keep, ending = close(generation.text, case.question.labels)
        begun = generation.text[:keep] + ending
    elif isinstance(answer, Answer) and answer.label_logprobs is None and engine.more_tops > engine.top_logprobs:
        written = _written(case)
        assert isinstance(written, _Written)
        begun = generation.text[: written.begin]
    else:
        return None
    if not (begun and engine.continues):
        return None
    chat = (*case.chat, Message(role="assistant", content=begun))
    return Request(question=generation.question, sample=generation.sample, messages=chat, max_tokens=1, begun=True)


def read_reply(case: Case, reply: Generation | Refusal | None = None) -> Answer | Refusal:
    """The answer as it was written, at the token that holds the label's first character.

    `reply`: to the request for what is `left_open`. It tells more labels, unless the drawn token is not as probable
    there, or the most probable one of a response without an answer.
    """
    question, written = case.question, _written(case)
    more = reply.tops[0][1] if isinstance(reply, Generation) and reply.tops else {}
    if isinstance(written, _Written):
        drawn = written.tops[written.token]
        tops = {**more, **written.tops} if abs(more.get(written.token, math.inf) - drawn) <= SAME else written.tops
        logprobs = label_logprobs(written.forms, tops, written.lead, written.after)
        # The token that was drawn counts, and not the likeliest beginning of the label.
        logprobs[written.label] = drawn
        return _answer(question, written.label, written.source, logprobs, None)
    refusal = written or reply
    if isinstance(refusal, Refusal):
        return refusal
    logprobs = label_logprobs({label: label for label in question.labels}, more)
    best = max(logprobs, key=lambda label: logprobs[label], default="")
    # A likelier token that begins two labels tells neither, and rules out the others.
    begun = [value for token, value in more.items() if token and any(one.startswith(token) for one in question.labels)]
    told = best and max(begun) <= logprobs[best]
    return _answer(question, best, "fallback", logprobs, None) if told else NO_ANSWER


class _Written(NamedTuple):
    """The token that a label begins in: its place, its text around the label, candidates; every label so written."""

    label: str
    source: AnswerSource
    begin: int
    token: str
    lead: str
    after: str
    tops: Mapping[str, float]
    forms: Mapping[str, str]


def _written(case: Case) -> _Written | Refusal | None:
    question, _, generation = case
    parsed = parse_answer(generation.text, question, cut=generation.finish_reason == "length")
    if parsed.label is None or parsed.source is None or parsed.span is None:
        return None
    begin, (start, stop) = 0, parsed.span
    why = "the log-probabilities do not reach the label, or their tokens do not add up to the text"
    for token, tops in generation.tops or ():
        end = begin + len(token)
        if generation.text[begin:end] != token[: max(0, len(generation.text) - begin)]:
            break
        if begin <= start < end:
            lead, own, after = token[: start - begin], token[start - begin :], token[stop - begin :]
            forms = restyle_labels(question.labels, parsed.label, generation.text[start:stop])
            rivals = {x: form for x, form in forms.items() if x != parsed.label and (form + after).startswith(own)}
            # A rival that begins alike has a token of its own where a longer candidate begins it: 10 beside 1.
            longer = [rest[len(lead) :] for rest in tops if rest.startswith(lead) and len(rest) > len(token)]
            other = next((x for x, form in rivals.items() if not (form + after).startswith(tuple(longer))), None)
            if other is None:
                return _Written(parsed.label, parsed.source, begin, token, lead, after, tops, forms)
            why = f"labels {parsed.label!r} and {other!r} begin with the same token {own!r}"
            break
        begin = end
    return Refusal(refused=why, question=generation.question, sample=generation.sample)


def label_logprobs(
    forms: Mapping[str, str], tops: Mapping[str, float], lead: str = "", after: str = ""
) -> dict[str, float]:
    """Each label's log-probability among candidate tokens: that of the likeliest token that begins it as written.

    forms: label -> as it would be written. Labels that no candidate begins are left out, and so are labels that share
    a token. The whole of another label (`no`) does not begin one that a longer token begins (`not` of `not sure`).

    >>> label_logprobs({"a": "A", "b": "B", "c": "C"}, {"A": -1.0, " A": -0.5, "B": -1.5})
    {'a': -1.0, 'b': -1.5}
    """
    rests = {token: token[len(lead) :] for token in tops if token.startswith(lead) and len(token) > len(lead)}
    best, whole = {}, {lead + form + after for form in forms.values()}
    for label, form in forms.items():
        if begins := sorted((token for token, rest in rests.items() if (form + after).startswith(rest)), key=len):
            best[label] = max((tops[token], token) for token in begins if token == begins[-1] or token not in whole)
    shared = [token for _, token in best.values()]
    return {label: logprob for label, (logprob, token) in best.items() if shared.count(token) == 1}
