"""Read which label a response answers with and how probable that label is.

An engine that exchanges tokens scores the label at the position that `catto.answer.tokens` finds. A server returns only
token texts, with the most probable candidates at each position. The log-probability of the written label always comes
with the token that was drawn. Those of the other labels are known if they are among the best 20 candidates. If one is
not, a server that can return more candidates is asked again; otherwise `label_logprobs` is None. `logsumexp` is always
None for a server.

A response without an answer is closed, so that the next token is a label, and the most probable label is chosen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from catto.answer.response import LabelledQuestion, find_answer_tag, find_tags, find_turn_end, parse_answer
from catto.answer.tokens import (
    LabelPosition,
    ScoringPoint,
    TokenStart,
    UnreadableLabelError,
    encode_continuation,
    encode_opening,
    find_token,
    locate_label,
    restyle_labels,
)
from catto.engines import Context, Engine, Generation, Key, LabelScores, Request, ScoredGeneration, Scores
from catto.prompts import TAGS, render_completion
from catto.records import AnswerSource, Message, Question, Refusal
from catto.token_ids import count_common, decode_ids

if TYPE_CHECKING:
    from catto.engines.server import ServerEngine


class AskedQuestion(NamedTuple):
    """A question, and the messages in which the model is asked it."""

    question: Question
    chat: tuple[Message, ...]


class Case(NamedTuple):
    """A response, with the question and the messages that it answers."""

    question: LabelledQuestion
    chat: tuple[Message, ...]
    generation: Generation


class Answer(NamedTuple):
    """The answer of a response, how it was found, and the log-probabilities at the label's position.

    Attributes:
        label: The label; None if the response has no answer.
        source: How the label was found.
        confidence: Probability of the label over the full vocabulary; 0 without an answer.
        label_logprobs: Label -> log-probability; None unless it is known for every label.
        logsumexp: Temperature -> log-sum-exp of the logits, as in `Scores`; None if unknown.
    """

    label: str | None
    source: AnswerSource
    confidence: float
    label_logprobs: dict[str, float] | None
    logsumexp: dict[str, float] | None


class AnsweredCase(NamedTuple):
    """A response and its answer."""

    case: Case
    answer: Answer


NO_ANSWER = Answer(label=None, source="fallback", confidence=0.0, label_logprobs=None, logsumexp=None)
# A server may tokenize a continued text differently from how it had generated it; the drawn token then has a different
# log-probability. At the same position, even eight-bit arithmetic changes it by less than this.
MAX_LOGPROB_DIFFERENCE = 0.3


def _make_answer(
    question: LabelledQuestion,
    label: str,
    *,
    source: AnswerSource,
    logprobs: Mapping[str, float],
    logsumexp: dict[str, float] | None = None,
) -> Answer:
    """Make an answer whose confidence is the probability of its label, not renormalised over the labels."""
    label_logprobs = None  # unless it is known for every label
    if all(name in logprobs for name in question.labels):
        label_logprobs = {name: logprobs[name] for name in question.labels}
    confidence = min(1.0, math.exp(logprobs[label]))  # float64 may round log 1 to 1e-17
    return Answer(label, source, confidence, label_logprobs, logsumexp)


# Responses without an answer


class ClosedText(NamedTuple):
    """A response that was closed: the number of characters that are kept, and the text that is appended to them."""

    kept: int
    ending: str


def close_response(text: str, labels: Sequence[str] = ()) -> ClosedText:
    r"""Close a response so that a label comes next: end an open think block, and open the answer in the canonical form.

    The response is kept up to its answer or the next turn. A torn tag at its end is dropped, and so is white space.

    Args:
        text: The response.
        labels: The question's labels.

    Returns:
        The number of characters that are kept, and the text that is appended to them.

    Example:
        >>> close_response("<think>\nso\n</thi")
        ClosedText(kept=10, ending='\n</think>\n<answer>\n')
    """
    turn = text[: find_turn_end(text, labels)]
    tags = find_tags(turn)
    answer_tag = find_answer_tag(turn, tags)
    if answer_tag is None:
        end = _find_torn_tag(turn)
    else:
        end = answer_tag.start
    kept = turn[:end].rstrip()
    think_tags = [tag.name for tag in tags if tag.end <= end and tag.name.endswith("think")]
    is_reasoning_open = bool(think_tags) and think_tags[-1] == "think"
    ending = render_completion(None, None)  # without reasoning and label, this is the opening of an answer
    if is_reasoning_open:
        ending = "</think>\n" + ending
    if kept:
        ending = "\n" + ending
    return ClosedText(len(kept), ending)


def _find_torn_tag(text: str) -> int:
    """Return the index of an incomplete tag at the end of a text; the length of the text if there is none."""
    bracket = text.rfind("<")
    if bracket >= 0:
        torn = text[bracket:].lower()
        for tag in TAGS:
            if tag.startswith(torn) and tag != torn:
                return bracket
    return len(text)


def close_token_ids(
    tokenizer: Any, ids: Sequence[int], labels: tuple[str, ...], room: float = math.inf
) -> LabelPosition | None:
    """Close a response as `close_response` does, so that a label comes next.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids of the response.
        labels: The question's labels.
        room: Maximum number of tokens in the closed response. The end of a longer response is dropped.

    Returns:
        The tokens of the closed response, and the tokens with which every label would continue it. None if the
        answer's opening alone is longer than `room`.
    """
    kept_ids = list(ids)
    while True:
        closed = _close_all_ids(tokenizer, kept_ids, labels)
        excess = closed.needed_length - room
        if excess <= 0:
            return closed
        if not kept_ids:
            return None
        # Closing the shortened response may take more tokens than before, so its length is checked again.
        kept_ids = kept_ids[: max(0, len(kept_ids) - int(excess))]


def _close_all_ids(tokenizer: Any, ids: list[int], labels: tuple[str, ...]) -> LabelPosition:
    """Close a response of any length. Its own ids are kept if they can be cut where the text is cut."""
    text = decode_ids(tokenizer, ids)
    closed = close_response(text, labels)
    first_dropped = TokenStart(token_index=len(ids), begin=closed.kept)
    try:
        if closed.kept < len(text):
            first_dropped = find_token(tokenizer, ids, text, closed.kept)
        # A token with both kept and dropped characters is dropped, and its kept characters are encoded again.
        kept_of_dropped = text[first_dropped.begin : closed.kept]
        opening = encode_opening(tokenizer, kept_of_dropped + closed.ending, labels)
        kept_ids = ids[: first_dropped.token_index]
    except ValueError:
        # The tokens cannot be cut there, or part of a word changes how the labels are encoded: encode the whole text.
        opening = encode_opening(tokenizer, closed.ending, labels)
        kept_ids = encode_continuation(tokenizer, text[: closed.kept])
    return opening._replace(ids=(*kept_ids, *opening.ids))


# Answers from token ids


def read_token_answers(engine: Engine, cases: Sequence[Case]) -> list[Answer]:
    """Read the answer of every response: the written label, or else the most probable one.

    The probability of a label with several tokens is the product of theirs. It has no `logsumexp`, which applies to a
    single position.

    Args:
        engine: Scores the labels of responses that are stored without scores.
        cases: Responses with token ids.

    Returns:
        One answer for each case; `NO_ANSWER` if the prompt leaves no room for an answer.
    """
    answers = []
    for case, scored in zip(cases, _score_positions(engine, cases), strict=True):
        if scored.position is None:
            answers.append(NO_ANSWER)
        else:
            answers.append(_read_scored(case.question, scored.position, scored.scores))
    return answers


def _read_scored(question: LabelledQuestion, position: LabelPosition, scores: Mapping[ScoringPoint, Scores]) -> Answer:
    """Turn the scores at a label's position into an answer: the written label, or else the most probable one.

    A label is written by the tokens of its path. Its log-probability is the sum over these tokens, each after the
    tokens before it.

    Args:
        question: The question.
        position: The label's position, and the path of every label there.
        scores: The scores at each point of `position.list_scoring_points()`, where a point is a position in a path and
            the tokens that are possible there.

    Returns:
        The answer, with the log-probabilities of all labels if every label has a path.
    """
    logprobs_after = {}
    for point, score in scores.items():
        logprobs_after[point.prefix] = dict(zip(point.candidates, score.logprobs, strict=True))
    logprobs = {}
    for label, path in position.paths.items():
        token_logprobs = []
        for length, token in enumerate(path):
            prefix = position.ids + path[:length]
            token_logprobs.append(logprobs_after[prefix][token])
        logprobs[label] = sum(token_logprobs)
    answered = position.label
    if answered is None:
        answered = max(question.labels, key=lambda name: logprobs[name])
    logsumexp = None
    has_one_point = len(scores) == 1  # otherwise the label spans several positions, each with its own logsumexp
    if has_one_point:
        (score,) = scores.values()
        logsumexp = score.logsumexp
    return _make_answer(question, answered, source=position.source, logprobs=logprobs, logsumexp=logsumexp)


def score_labels(engine: Engine, cases: Sequence[Case]) -> list[ScoredGeneration]:
    """Score the labels at the answer of each response and store the scores with it.

    `read_token_answers` then needs no model later.

    Args:
        engine: The engine that has just generated the responses.
        cases: The responses.

    Returns:
        One generation for each case. It has no scores if the response has no position to score, for example because
        the engine exchanges only text.
    """
    generations = []
    for case, scored in zip(cases, _score_positions(engine, cases), strict=True):
        generation = case.generation
        labels = []
        for point, score in scored.scores.items():
            # The prefix repeats most of the response, so only its length there and the tokens after that are stored.
            kept = count_common(generation.token_ids or (), point.prefix)
            added = point.prefix[kept:]
            labels.append(LabelScores(**dict(score), kept=kept, added=added, candidates=point.candidates))
        generations.append(ScoredGeneration(**dict(generation), labels=tuple(labels)))
    return generations


class _ScoredPosition(NamedTuple):
    """The position at which a response's label is read, or None, and the scores there."""

    position: LabelPosition | None
    scores: dict[ScoringPoint, Scores]


def _score_positions(engine: Engine, cases: Sequence[Case]) -> list[_ScoredPosition]:
    """Score the label of each response: use the scores that are stored with it, and compute the rest in one call.

    A label that needs several tokens is scored at several points, one for each token. A stored score is used if its
    prefix and candidates equal those of a point, even if an older version of the parser found that point.

    Returns:
        For each case, the position of the label and the scores at its points. The position is None and there are no
        scores if the engine has no tokenizer, the question has no labels, or the prompt leaves no room for an answer.
    """
    positions = []
    stored_scores = []
    contexts = []
    for case in cases:
        position = None
        if engine.tokenizer is not None:
            position = _find_position(engine, case)
        stored = _read_stored_scores(case.generation)
        positions.append(position)
        stored_scores.append(stored)
        for point in _list_points(position):
            if point not in stored:
                contexts.append(_make_context(case, point))
    # The loop below visits the points in the same order, so it takes the new scores one after the other.
    new_scores = iter(engine.score(contexts) if contexts else ())
    scored = []
    for position, stored in zip(positions, stored_scores, strict=True):
        scores = {}
        for point in _list_points(position):
            if point in stored:
                scores[point] = stored[point]
            else:
                scores[point] = next(new_scores)
        scored.append(_ScoredPosition(position, scores))
    return scored


def _find_position(engine: Engine, case: Case) -> LabelPosition | None:
    """Find the label in the token ids of a response, or close the response.

    It is closed if it has no label, its label cannot be read from the tokens, or the label lies beyond the model's
    maximum length.

    Returns:
        The position; None if the question has no labels or the prompt leaves no room for an answer.

    Raises:
        ValueError: The engine returned no token ids.
    """
    question = case.question
    generation = case.generation
    if not question.labels:
        return None
    if generation.token_ids is None:
        raise ValueError(f"{engine.name} returned no token ids for question {question.id}")
    room = math.inf
    if engine.positions is not None:
        room = engine.positions - (generation.prompt_tokens or 0)
    option_texts = [option.text for option in question.options]
    is_cut = generation.finish_reason == "length"
    with suppress(UnreadableLabelError):
        position = locate_label(engine.tokenizer, generation.token_ids, question.labels, option_texts, cut=is_cut)
        if position is not None and position.needed_length <= room:
            return position
    return close_token_ids(engine.tokenizer, generation.token_ids, question.labels, room)


def _read_stored_scores(generation: Generation) -> dict[ScoringPoint, Scores]:
    stored: dict[ScoringPoint, Scores] = {}
    if isinstance(generation, ScoredGeneration):
        ids = generation.token_ids or ()
        for score in generation.labels:
            prefix = ids[: score.kept] + score.added
            stored[ScoringPoint(prefix, score.candidates)] = score
    return stored


def _list_points(position: LabelPosition | None) -> list[ScoringPoint]:
    if position is None:
        return []
    return position.list_scoring_points()


def _make_context(case: Case, point: ScoringPoint) -> Context:
    return Context(messages=case.chat, prefix=point.prefix, candidates=point.candidates, response=case.generation.key)


# Answers from a server's candidates


def read_replies(
    engine: ServerEngine,
    asked: Mapping[str, AskedQuestion],
    todo: deque[Request],
    outcomes: Iterable[Generation | Refusal],
) -> Iterator[AnsweredCase | Refusal]:
    """Read the answer of every reply as it arrives. Request a continuation of incomplete ones, if possible.

    The request is put at the front of `todo`, so that its reply is among the next outcomes. A response is refused if
    the log-probability of its label cannot be read, or if it has no answer and its continuation was refused.

    Args:
        engine: The server.
        asked: Question id -> the question and the messages in which it was asked.
        todo: The requests that the engine still has to send. Continuation requests are added to it.
        outcomes: The outcomes for `todo`, from which the engine takes requests while this runs.

    Yields:
        A response with its answer, or a refusal.
    """
    continued: dict[Key, Case] = {}  # replies whose continuation has been requested and not yet received
    for outcome in outcomes:
        is_continuation = outcome.key in continued
        if is_continuation:
            case = continued.pop(outcome.key)
            answer = read_reply(case, outcome)
        elif isinstance(outcome, Refusal):
            yield outcome
            continue
        else:
            question, chat = asked[outcome.question]
            case = Case(question, chat, outcome)
            answer = read_reply(case)
            continuation = request_continuation(engine, case, answer)
            if continuation is not None:
                continued[outcome.key] = case
                todo.appendleft(continuation)
                continue
        if isinstance(answer, Refusal):
            yield answer
        else:
            yield AnsweredCase(case, answer)


def request_continuation(engine: ServerEngine, case: Case, answer: Answer | Refusal) -> Request | None:
    """Make a request for the single token that is missing to read a reply completely.

    A reply without an answer is closed, and the label is read from the candidates for the next token. In a reply with
    an answer, a label may be missing from the candidates that the server returned. The label's token is then generated
    again with more candidates: `max_candidates` instead of `top_logprobs`.

    Args:
        engine: The server.
        case: The reply.
        answer: The result of `read_reply` for this reply, without a continuation.

    Returns:
        The request to continue the beginning of the reply by one token. None if nothing is missing, the reply was
        refused, or it cannot be continued.
    """
    text = case.generation.text
    # `label_logprobs` is None unless the log-probabilities of all labels are known.
    lacks_other_labels = isinstance(answer, Answer) and answer.label_logprobs is None
    gives_more_candidates = engine.max_candidates > engine.top_logprobs
    if answer is NO_ANSWER:
        closed = close_response(text, case.question.labels)
        prefix = text[: closed.kept] + closed.ending
    elif lacks_other_labels and gives_more_candidates:
        written = _find_written_label(case)
        assert isinstance(written, _WrittenLabel)  # this answer was read from it
        prefix = text[: written.token_start]
    else:
        return None
    # The prefix is empty if the label is at the very beginning. An empty message cannot be continued.
    if not prefix or not engine.can_continue:
        return None
    return Request(
        question=case.generation.question,
        sample=case.generation.sample,
        messages=(*case.chat, Message(role="assistant", content=prefix)),
        max_tokens=1,
        begun=True,  # the server continues the last message instead of beginning a new one
    )


def read_reply(case: Case, continuation: Generation | Refusal | None = None) -> Answer | Refusal:
    """Read the answer of a server's reply, at the token that contains the label's first character.

    Args:
        case: The reply.
        continuation: The outcome of the request that `request_continuation` made; None if it made none. With a written
            label it adds the log-probabilities of other labels. Without an answer it provides the most probable label.

    Returns:
        The answer; `NO_ANSWER` if neither the reply nor its continuation gives one. A refusal if the log-probability of
        the written label cannot be read, or if there is no written label and the continuation was refused.
    """
    next_candidates: Mapping[str, float] = {}
    if isinstance(continuation, Generation) and continuation.tops:
        _, next_candidates = continuation.tops[0]  # a continuation is a single token
    written = _find_written_label(case)
    if isinstance(written, Refusal):
        return written
    if written is not None:
        return _read_written_label(case.question, written, next_candidates)
    if isinstance(continuation, Refusal):
        return continuation
    return _read_most_probable(case.question, next_candidates)


class _WrittenLabel(NamedTuple):
    """A label as it is written in a server's reply, with the token in which it begins."""

    label: str
    source: AnswerSource
    token_start: int  # index of the token's first character in the text
    token: str
    lead: str  # the part of the token before the label
    after: str  # the part of the token after the label
    candidates: Mapping[str, float]  # text of each candidate for this token -> log-probability
    forms: Mapping[str, str]  # label -> as it would be written here


def _find_written_label(case: Case) -> _WrittenLabel | Refusal | None:
    """Find the label and its token; None if there is no answer, a refusal if its log-probability cannot be read."""
    generation = case.generation
    text = generation.text
    parsed = parse_answer(text, case.question, cut=generation.finish_reason == "length")
    if parsed.label is None or parsed.source is None or parsed.span is None:  # a label comes with all three
        return None
    label_start, label_end = parsed.span
    token = _find_token_at(generation, label_start)
    if token is None:
        reason = "the log-probabilities do not reach the label, or their tokens do not add up to the text"
        return Refusal(refused=reason, question=generation.question, sample=generation.sample)
    written = _WrittenLabel(
        label=parsed.label,
        source=parsed.source,
        token_start=token.start,
        token=token.text,
        lead=token.text[: label_start - token.start],
        after=token.text[label_end - token.start :],
        candidates=token.candidates,
        forms=restyle_labels(case.question.labels, parsed.label, text[label_start:label_end]),
    )
    rival = _find_ambiguous_rival(written)
    if rival is not None:  # the token's probability is that of both labels together
        shared = token.text[label_start - token.start :]
        reason = f"labels {parsed.label!r} and {rival!r} begin with the same token {shared!r}"
        return Refusal(refused=reason, question=generation.question, sample=generation.sample)
    return written


class _ReplyToken(NamedTuple):
    """A token of a server's reply: where it begins in the text, its text, and the log-probabilities at its position."""

    start: int
    text: str
    candidates: Mapping[str, float]


def _find_token_at(generation: Generation, index: int) -> _ReplyToken | None:
    """Find the token that contains a character of a reply.

    None if the log-probabilities do not reach the character, or their tokens do not add up to the text before it.
    """
    text = generation.text
    start = 0
    for token, candidates in generation.tops or ():
        end = start + len(token)
        # The text was cut after a stop text, which may end within the last token.
        token_in_text = token[: max(0, len(text) - start)]
        if text[start:end] != token_in_text:
            return None
        if start <= index < end:
            return _ReplyToken(start, token, candidates)
        start = end
    return None


def _find_ambiguous_rival(written: _WrittenLabel) -> str | None:
    """Find a different label that may also begin with this token; None if only the written label does.

    A label that begins in the same way does not count if it begins with a longer candidate: 10 next to 1.
    """
    own_beginning = written.token.removeprefix(written.lead)
    longer_beginnings = []
    for candidate in written.candidates:
        if candidate.startswith(written.lead) and len(candidate) > len(written.token):
            longer_beginnings.append(candidate.removeprefix(written.lead))
    for label, form in written.forms.items():
        rival = form + written.after
        has_own_token = rival.startswith(tuple(longer_beginnings))
        if label != written.label and rival.startswith(own_beginning) and not has_own_token:
            return label
    return None


def _read_written_label(
    question: LabelledQuestion, written: _WrittenLabel, next_candidates: Mapping[str, float]
) -> Answer:
    """Read the probability of a written label.

    The candidates of a continuation are used only if the drawn token has about the same probability there.
    """
    drawn_logprob = written.candidates[written.token]
    logprob_in_continuation = next_candidates.get(written.token, math.inf)
    candidates = written.candidates
    is_same_position = abs(logprob_in_continuation - drawn_logprob) <= MAX_LOGPROB_DIFFERENCE
    if is_same_position:
        candidates = {**next_candidates, **written.candidates}
    logprobs = read_label_logprobs(written.forms, candidates, written.lead, written.after)
    # The written label has the log-probability of the drawn token, even if a different beginning is more probable.
    logprobs[written.label] = drawn_logprob
    return _make_answer(question, written.label, source=written.source, logprobs=logprobs)


def _read_most_probable(question: LabelledQuestion, candidates: Mapping[str, float]) -> Answer:
    """Read the most probable label from the candidates for the next token; `NO_ANSWER` if they do not determine it."""
    forms = {label: label for label in question.labels}
    logprobs = read_label_logprobs(forms, candidates)
    if not logprobs:
        return NO_ANSWER
    best = max(logprobs, key=logprobs.__getitem__)
    # If a more probable token begins several labels, one of those may be the most probable label.
    for token, logprob in candidates.items():
        begins_label = token != "" and any(label.startswith(token) for label in question.labels)
        if begins_label and logprob > logprobs[best]:
            return NO_ANSWER
    return _make_answer(question, best, source="fallback", logprobs=logprobs)


def read_label_logprobs(
    forms: Mapping[str, str], candidates: Mapping[str, float], lead: str = "", after: str = ""
) -> dict[str, float]:
    """Read the log-probability of each label from the candidates for the token in which a label begins.

    A label has the log-probability of the most probable candidate that is its beginning. If a candidate is a complete
    label (`no`) and a different label has a longer candidate (`not` for `not sure`), the complete label does not count
    for the different one.

    Args:
        forms: Label -> as it would be written.
        candidates: Token text -> log-probability.
        lead: Text before the label in its token. Candidates with a different lead do not count, such as " A" without a
            lead.
        after: Text after the label in its token.

    Returns:
        Label -> log-probability. A label is left out if no candidate is its beginning, or if a different label has the
        same candidate.

    Example:
        >>> read_label_logprobs({"a": "A", "b": "B", "c": "C"}, {"A": -1.0, " A": -0.5, "B": -1.5})
        {'a': -1.0, 'b': -1.5}
    """
    whole_labels = {lead + form + after for form in forms.values()}
    token_of = {}
    for label, form in forms.items():
        written = lead + form + after
        beginnings = []
        for token in candidates:
            reaches_label = len(token) > len(lead)
            if reaches_label and written.startswith(token):
                beginnings.append(token)
        if not beginnings:
            continue
        longest = max(beginnings, key=len)
        eligible = [token for token in beginnings if token == longest or token not in whole_labels]
        token_of[label] = max(eligible, key=lambda token: (candidates[token], token))
    tokens = list(token_of.values())
    logprobs = {}
    for label, token in token_of.items():
        is_shared = tokens.count(token) > 1
        if not is_shared:
            logprobs[label] = candidates[token]
    return logprobs
