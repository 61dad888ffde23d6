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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Make an answer whose confidence is the probability of its label, not renormalised over the labels.

    `logprobs` contains at least the log-probability of `label`. Unless it has those of all labels, the answer's
    `label_logprobs` is None.
    """
    label_logprobs = None
    if all(name in logprobs for name in question.labels):
        label_logprobs = {name: logprobs[name] for name in question.labels}
    confidence = min(1.0, math.exp(logprobs[label]))  # rounding can make the log-probability as large as 1e-17
    return Answer(label, source, confidence, label_logprobs, logsumexp)


# Responses without an answer


class ClosedText(NamedTuple):
    """How to close a response: keep its first `kept` characters and append the text `ending`."""

    kept: int
    ending: str


def close_response(text: str, labels: Sequence[str] = ()) -> ClosedText:
    r"""Close a response so that a label comes next: end an open think block, and open the answer in the canonical form.

    Everything from the answer or the next turn on is dropped. So are an incomplete tag and white space at the end of
    the rest.

    Args:
        text: The response.
        labels: The question's labels. A line such as "Q: the dog" does not begin the next turn if Q is one of them.

    Returns:
        The number of characters to keep, and the text to append to them.

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
    kept_text = turn[:end].rstrip()
    kept_think_tags = [tag.name for tag in tags if tag.end <= end and tag.name in ("think", "/think")]
    is_reasoning_open = bool(kept_think_tags) and kept_think_tags[-1] == "think"
    ending = render_completion(None, None)  # without reasoning and label, this is the opening of an answer
    if is_reasoning_open:
        ending = "</think>\n" + ending
    if kept_text:
        ending = "\n" + ending
    return ClosedText(len(kept_text), ending)


def _find_torn_tag(text: str) -> int:
    """Return the index of a torn tag such as "</thi" at the end of a text; the length of the text if there is none."""
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
        room: Maximum number of response tokens that the model reads to score the labels. To stay within it, tokens are
            dropped from the end of the response, before the answer's opening.

    Returns:
        The tokens of the closed response, and the tokens with which every label would continue it. None if the
        answer's opening alone is longer than `room`.

    Raises:
        ValueError: The tokenizer does not distinguish the labels after the answer's opening.
    """
    kept_ids = list(ids)
    while True:
        closed = _close_all_ids(tokenizer, kept_ids, labels)
        excess = closed.needed_length - room
        if excess <= 0:
            return closed
        if not kept_ids:
            return None
        # The shortened response may need a longer ending, such as `</think>`, so the loop checks its length again.
        kept_ids = kept_ids[: max(0, len(kept_ids) - int(excess))]


def _close_all_ids(tokenizer: Any, ids: list[int], labels: tuple[str, ...]) -> LabelPosition:
    """Close a response of any length. Keep its own ids if possible; otherwise encode the kept text again."""
    text = decode_ids(tokenizer, ids)
    closed = close_response(text, labels)
    first_dropped = TokenStart(token_index=len(ids), begin=closed.kept)  # no token, if the whole text is kept
    try:
        if closed.kept < len(text):
            first_dropped = find_token(tokenizer, ids, text, closed.kept)
        # The first dropped token may begin with kept characters. These are encoded again, together with the ending.
        kept_of_dropped = text[first_dropped.begin : closed.kept]
        opening = encode_opening(tokenizer, kept_of_dropped + closed.ending, labels)
        kept_ids = ids[: first_dropped.token_index]
    except ValueError:
        # The tokens cannot be cut there, or these characters change how the labels are encoded. Encode all kept text.
        opening = encode_opening(tokenizer, closed.ending, labels)
        kept_ids = encode_continuation(tokenizer, text[: closed.kept])
    return opening._replace(ids_before=(*kept_ids, *opening.ids_before))


# Answers from token ids


def read_token_answers(engine: Engine, cases: Sequence[Case]) -> list[Answer]:
    """Read the answer of every response: the written label, or else the most probable one.

    The probability of a label with several tokens is the product of the probabilities of its tokens. `logsumexp` is
    then None, since it belongs to a single position.

    Args:
        engine: Scores the labels of responses that are stored without scores.
        cases: Responses with token ids.

    Returns:
        One answer for each case; `NO_ANSWER` if the question has no labels, the engine exchanges only text, or the
        prompt leaves no room for an answer.
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

    The path of a label is its tokens, usually a single one. The log-probability of the label is the sum over the tokens
    of its path, each given the response and the path's tokens before it.

    Args:
        question: The question.
        position: The label's position, and the path of every label there. If no label was written there, every label of
            the question has a path.
        scores: Scores at all points of `position.list_scoring_points()`. A point is the tokens before a token of a
            path, and the candidates for that token.

    Returns:
        The answer. Its `label_logprobs` is None if a label has no path, and its `logsumexp` is None if a path has
        several tokens. Of equally probable labels, the first is chosen.
    """
    logprobs_after = {}  # prefix -> log-probability of each candidate for the next token
    for point, score in scores.items():
        logprobs_after[point.prefix] = dict(zip(point.candidates, score.logprobs, strict=True))
    logprobs = {}
    for label, path in position.paths.items():
        token_logprobs = []
        for length, token in enumerate(path):
            prefix = position.ids_before + path[:length]
            token_logprobs.append(logprobs_after[prefix][token])
        logprobs[label] = sum(token_logprobs)
    answered = position.label
    if answered is None:
        answered = max(question.labels, key=lambda name: logprobs[name])
    logsumexp = None
    has_one_point = len(scores) == 1  # otherwise there are several positions, each with its own logsumexp
    if has_one_point:
        (score,) = scores.values()
        logsumexp = score.logsumexp
    return _make_answer(question, answered, source=position.source, logprobs=logprobs, logsumexp=logsumexp)


def score_labels(engine: Engine, cases: Sequence[Case]) -> list[ScoredGeneration]:
    """Score the labels at the answer of each response, and store the scores with the response.

    `read_token_answers` can then read the answers later, without the model.

    Args:
        engine: The engine that has just generated the responses.
        cases: The responses.

    Returns:
        One generation for each case. It has no scores if the question has no labels, the engine exchanges only text, or
        the prompt leaves no room for an answer.
    """
    generations = []
    for case, scored in zip(cases, _score_positions(engine, cases), strict=True):
        generation = case.generation
        labels = []
        for point, score in scored.scores.items():
            # The prefix begins with tokens of the response: store their number, and only the other tokens in full.
            kept = count_common(generation.token_ids or (), point.prefix)
            added = point.prefix[kept:]
            labels.append(LabelScores(**dict(score), kept=kept, added=added, candidates=point.candidates))
        generations.append(ScoredGeneration(**dict(generation), labels=tuple(labels)))
    return generations


class _ScoredPosition(NamedTuple):
    """The position at which a response's label is read, and the scores there; None and no scores without a position."""

    position: LabelPosition | None
    scores: dict[ScoringPoint, Scores]


def _score_positions(engine: Engine, cases: Sequence[Case]) -> list[_ScoredPosition]:
    """Score the label of each response: use the scores that are stored with it, and compute the others in one call.

    A label that needs several tokens is scored at several points, one for each token. A stored score is used if its
    prefix and candidates equal those of a point, even if an older version of the parser found that point.

    Returns:
        For each case, the position of the label and the scores at its points. The position is None and there are no
        scores if the engine has no tokenizer, the question has no labels, or the prompt leaves no room for an answer.
    """
    positions = []
    stored_scores = []  # the stored scores of each case
    contexts = []  # for all cases, the points without a stored score
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

    It is closed if it has no label, if its label cannot be read from the tokens, or if the label lies beyond the
    model's maximum length.

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
    room = math.inf  # maximum number of response tokens
    if engine.positions is not None:
        room = engine.positions - (generation.prompt_tokens or 0)
    option_texts = [option.text for option in question.options]
    is_cut = generation.finish_reason == "length"
    with suppress(UnreadableLabelError):  # the response is then closed below
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

    A continuation is one more token after the reply or after a part of it, from which missing log-probabilities of
    labels are read. Its request is put at the front of `todo`, so that few replies wait for theirs at the same time.

    Args:
        engine: The server.
        asked: Question id -> the question and the messages in which it was asked.
        todo: The requests that the engine still has to send. Continuation requests are added to it.
        outcomes: Yields the outcome of every request in `todo`, including those that are added meanwhile.

    Yields:
        A response with its answer, or a refusal. A response is refused if the server refused the request, if the
        log-probability of its label cannot be read, or if it has no answer and its continuation was refused.
    """
    awaiting: dict[Key, Case] = {}  # replies whose continuation has been requested and not yet received
    for outcome in outcomes:
        is_continuation = outcome.key in awaiting  # a continuation has the key of its reply
        if is_continuation:
            case = awaiting.pop(outcome.key)
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
                awaiting[outcome.key] = case
                todo.appendleft(continuation)
                continue
        if isinstance(answer, Refusal):
            yield answer
        else:
            yield AnsweredCase(case, answer)


def request_continuation(engine: ServerEngine, case: Case, answer: Answer | Refusal) -> Request | None:
    """Make a request for a single token that lets the server return the log-probabilities missing from a reply.

    If a reply has no answer, an ending is added that leads to one, and the server generates the next token: the label.

    If a reply has an answer, the log-probability of another label may be missing, because the server returned only the
    `top_logprobs` most probable candidates. The server then generates the label's token once more. For a request with
    `begun`, the engine asks for `max_candidates` candidates instead.

    Args:
        engine: The server.
        case: The reply.
        answer: The result of `read_reply` for this reply, without a continuation.

    Returns:
        The request. None if no log-probability is missing, the server cannot continue this text, or the reply has an
        answer and `max_candidates` is not larger than `top_logprobs`. None as well if `answer` is a refusal, because
        `read_reply` then returns the same refusal with any continuation.
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
        assert isinstance(written, _WrittenLabel)  # `answer` was read from it
        prefix = text[: written.token_start]
    else:
        return None
    # If the label is in the first token, there is no text to continue.
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
        continuation: The outcome of the request that `request_continuation` made; None if it made none. If the reply
            has a written label, the continuation adds the log-probabilities of other labels. Otherwise the most
            probable label is read from it.

    Returns:
        The answer; `NO_ANSWER` if neither the reply nor its continuation gives one. A refusal if the log-probability of
        the written label cannot be read, or if there is no written label and the continuation was refused.
    """
    new_candidates: Mapping[str, float] = {}
    if isinstance(continuation, Generation) and continuation.tops:
        _, new_candidates = continuation.tops[0]  # a continuation is a single token
    written = _find_written_label(case)
    if isinstance(written, Refusal):
        return written
    if written is not None:
        return _read_written_label(case.question, written, new_candidates)
    if isinstance(continuation, Refusal):
        return continuation
    return _read_most_probable(case.question, new_candidates)


class _WrittenLabel(NamedTuple):
    """A label as it is written in a server's reply, with the token in which it begins."""

    label: str
    source: AnswerSource
    token_start: int  # index of the token's first character in the text
    token: str
    lead: str  # the text before the label in its token
    after: str  # the text after the label in its token
    candidates: Mapping[str, float]  # text of each candidate for this token -> log-probability
    forms: Mapping[str, str]  # label -> its text in the case in which this label is written


def _find_written_label(case: Case) -> _WrittenLabel | Refusal | None:
    """Find the label that a reply gives as its answer, and the token in which it begins.

    Returns:
        The label; None if the reply has no answer. A refusal if the log-probability of the label cannot be read: no
        token with log-probabilities contains its beginning, or a different label may begin with the same token.
    """
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
    if rival is not None:  # the token's probability is the sum over both labels
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
    """Find the token that contains the character at an index of a reply's text.

    None if the server returned no log-probabilities for this token, or if the texts of the tokens up to it do not add
    up to the text of the reply.
    """
    text = generation.text
    start = 0
    for token, candidates in generation.tops or ():
        end = start + len(token)
        # The last token may be longer than the rest of the text, which was cut at a stop text.
        token_in_text = token[: max(0, len(text) - start)]
        if text[start:end] != token_in_text:
            return None
        if start <= index < end:
            return _ReplyToken(start, token, candidates)
        start = end
    return None


def _find_ambiguous_rival(written: _WrittenLabel) -> str | None:
    """Find a different label that may also begin with this token; None if only the written label does.

    For example, the token "ent" may begin both "entailment" and "entitled". The token "1" may begin the label 10, but
    not if the longer token "10" is among the candidates: the model would have written label 10 with that token.
    """
    longer_tokens = [candidate for candidate in written.candidates if len(candidate) > len(written.token)]
    for label, form in written.forms.items():
        rival_text = written.lead + form + written.after
        begins_with_same_token = rival_text.startswith(written.token)
        begins_with_longer_token = rival_text.startswith(tuple(longer_tokens))
        if label != written.label and begins_with_same_token and not begins_with_longer_token:
            return label
    return None


def _read_written_label(
    question: LabelledQuestion, written: _WrittenLabel, new_candidates: Mapping[str, float]
) -> Answer:
    """Read the probabilities of a written label and of the other labels at its position.

    Args:
        question: The question.
        written: The label and its token, with the candidates in the reply.
        new_candidates: More candidates for the label's token, text -> log-probability. They come from a second request,
            in which the server generates this token again; empty if there was none. They are ignored if the written
            token has a different log-probability there: the server has then divided the text into different tokens,
            and the candidates belong to a different position.

    Returns:
        The answer. Its `label_logprobs` is None unless the candidates give the log-probabilities of all labels.
    """
    drawn_logprob = written.candidates[written.token]
    new_logprob = new_candidates.get(written.token, math.inf)  # if missing, the difference is infinite
    is_same_position = abs(new_logprob - drawn_logprob) <= MAX_LOGPROB_DIFFERENCE
    candidates = written.candidates
    if is_same_position:
        candidates = {**new_candidates, **written.candidates}  # the reply's own log-probabilities take precedence
    logprobs = read_label_logprobs(written.forms, candidates, written.lead, written.after)
    # The written label gets the log-probability of the token that was drawn: the model wrote it with this confidence,
    # even if another candidate that also begins the label is more probable.
    logprobs[written.label] = drawn_logprob
    return _make_answer(question, written.label, source=written.source, logprobs=logprobs)


def _read_most_probable(question: LabelledQuestion, candidates: Mapping[str, float]) -> Answer:
    """Read the most probable label from the candidates for the next token; `NO_ANSWER` if they do not determine it."""
    forms = {label: label for label in question.labels}  # no label was written whose case the others would follow
    logprobs = read_label_logprobs(forms, candidates)
    if not logprobs:
        return NO_ANSWER
    best = max(logprobs, key=logprobs.__getitem__)
    # A label that shares its token with another one was left out. If that token is more probable than the best label,
    # one of those labels may be the most probable.
    for token, logprob in candidates.items():
        begins_label = token != "" and any(label.startswith(token) for label in question.labels)
        if begins_label and logprob > logprobs[best]:
            return NO_ANSWER
    return _make_answer(question, best, source="fallback", logprobs=logprobs)


def read_label_logprobs(
    forms: Mapping[str, str], candidates: Mapping[str, float], lead: str = "", after: str = ""
) -> dict[str, float]:
    """Read the log-probability of each label from the candidates for the token in which a label begins.

    A label has the log-probability of a single candidate, the most probable one that it begins with. Several are not
    added up: a label's probability is that of one token, as in an engine that exchanges tokens.

    If a candidate is itself a complete label, such as "no", it stands for that label. A different label that begins
    with it, such as "not sure", has the log-probability of a longer candidate, such as "not". Without a longer
    candidate the two labels cannot be told apart.

    Args:
        forms: Label -> its text, in the case in which it would be written.
        candidates: Token text -> log-probability.
        lead: Text before the label in its token. Only candidates that begin with it are read. For example, with the
            lead " " the candidate " A" is read for label A, and the candidate "A" is not.
        after: Text after the label in its token.

    Returns:
        Label -> log-probability. A label is left out if it begins with no candidate, or if a different label has the
        same candidate.

    Example:
        >>> read_label_logprobs({"a": "A", "b": "B", "c": "C"}, {"A": -1.0, " A": -0.5, "B": -1.5})
        {'a': -1.0, 'b': -1.5}
        >>> forms = {"no": "no", "not sure": "not sure"}
        >>> read_label_logprobs(forms, {"no": -0.5, "not": -1.0})
        {'no': -0.5, 'not sure': -1.0}
        >>> read_label_logprobs(forms, {"no": -0.5, "yes": -1.0})
        {}
    """
    texts = {label: lead + form + after for label, form in forms.items()}
    complete_labels = set(texts.values())
    token_of = {}
    for label, text in texts.items():
        beginnings = []
        for token in candidates:
            reaches_label = len(token) > len(lead)
            if reaches_label and text.startswith(token):
                beginnings.append(token)
        if beginnings:
            token_of[label] = _choose_token(beginnings, candidates, complete_labels)
    tokens = list(token_of.values())
    logprobs = {}
    for label, token in token_of.items():
        is_shared = tokens.count(token) > 1
        if not is_shared:
            logprobs[label] = candidates[token]
    return logprobs


def _choose_token(beginnings: Sequence[str], logprobs: Mapping[str, float], complete_labels: Collection[str]) -> str:
    """Choose the most probable of the tokens that a label begins with.

    A token that is a complete label is skipped if there is a longer token: it then is a different label.
    """
    longest = max(beginnings, key=len)
    eligible = []
    for token in beginnings:
        is_different_label = token in complete_labels and token != longest
        if not is_different_label:
            eligible.append(token)
    return max(eligible, key=lambda token: (logprobs[token], token))  # the text makes ties independent of the order
