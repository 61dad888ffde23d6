"""Replies of an OpenAI-compatible server: the fields that are read, and requests that the server refuses for good.

A reply that does not match the models below is unusable. A refusal is reported in one line without secrets. A run stops
if too many of its questions are refused.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from itertools import accumulate
from math import inf, isfinite
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, AliasPath, BaseModel, Field
from pydantic_core import from_json

from catto.engines.base import find_stop_end
from catto.records import Key, LogProbability, Refusal, Sampled

# Default maximum share of refused questions.
MOST_REFUSED = 0.2
# The share is checked once this many questions have been asked.
MIN_QUESTIONS = 20
# Shorter matches between a server's message and the prompt are not treated as quotations.
MIN_QUOTED_CHARS = 20
MAX_REASON_CHARS = 300


class ServerError(RuntimeError):
    """A failure that stops a run. Its message is one line without the key."""


class RefusalCap:
    """Stops a run if too many questions are refused: then the settings are at fault, not single requests.

    Questions are counted, not requests, because a filtered question is refused in all of its samples. A run is also
    stopped if its first 20 requests are all refused.

    Args:
        most: Maximum share of refused questions, checked once 20 have been asked; 1 means no limit.
        answered: Keys of the answers that an earlier run stored. Their questions count as asked.
        refused: Keys of the refusals that an earlier run stored. Their questions count as asked and refused.
    """

    def __init__(self, most: float, answered: Iterable[Key] = (), refused: Iterable[Key] = ()) -> None:
        answered_questions = {question for question, _ in answered}
        self.most = most
        self._refused = {question for question, _ in refused}
        self._asked = self._refused | answered_questions
        self._has_answers = bool(answered_questions)
        self._refused_requests = 0

    def count(self, outcome: Sampled) -> None:
        """Count an answer or a refusal; raise ServerError if there are now too many refusals."""
        self._asked.add(outcome.question)
        if not isinstance(outcome, Refusal):
            self._has_answers = True
            return
        self._refused.add(outcome.question)
        self._refused_requests += 1
        if self.most >= 1:
            return
        if not self._has_answers and self._refused_requests >= MIN_QUESTIONS:
            raise self._error(f"all of the first {self._refused_requests} requests were refused", outcome)
        refused = len(self._refused)
        asked = len(self._asked)
        if asked >= MIN_QUESTIONS and refused > self.most * asked:
            share = f"{refused} of {asked} questions were refused, max_refused is {self.most:g}"
            raise self._error(share, outcome)

    @staticmethod
    def check_some(answered: int, refusals: Iterable[Refusal]) -> None:
        """Raise ServerError if there are refusals but no answers, even if there are few.

        Args:
            answered: Number of answers.
            refusals: The refusals. The message quotes the first one as an example.
        """
        if answered:
            return
        for refusal in refusals:
            raise RefusalCap._error("every request was refused (--retry-refused asks again)", refusal)

    @staticmethod
    def _error(problem: str, example: Refusal) -> ServerError:
        return ServerError(f"{problem}, such as {example.name}: {example.refused}")


def count_reasons(refusals: Iterable[Refusal]) -> str:
    """Describe how many refusals have each reason: the three most common ones, and `...` for the rest.

    >>> count_reasons([Refusal(refused="400 in try 1: flagged", question="q", sample=n) for n in range(2)])
    '2 x 400 in try 1: flagged'
    """
    reasons = Counter(refusal.refused for refusal in refusals)
    shown = [f"{count:,} x {reason}" for reason, count in reasons.most_common(3)]
    if len(reasons) > len(shown):
        shown.append("...")
    return "; ".join(shown)


def clean_message(text: str, secrets: Iterable[str] = (), prompt: Iterable[str] = ()) -> str:
    """Put a server's message on one line, without secrets and without quotations from the prompt.

    Args:
        text: The message.
        secrets: Texts to replace by `[key]`.
        prompt: The texts of the prompt. Quotations of at least 20 characters are replaced by `[prompt]`.

    Returns:
        The cleaned message, at most 300 characters long.

    >>> clean_message("bad key: k-77", ["k-77"])
    'bad key: [key]'
    """
    line = _join_spaces(text.replace("\\n", " ").replace('\\"', '"'))
    for secret in secrets:
        if secret:
            line = line.replace(secret, "[key]")
    prompt_text = "\n".join(_join_spaces(part) for part in prompt)
    return _replace_quotations(line, prompt_text)[:MAX_REASON_CHARS]


def _join_spaces(text: str) -> str:
    return " ".join(text.split())


def _replace_quotations(line: str, prompt: str) -> str:
    """Replace every quotation of at least 20 characters from the prompt by `[prompt]`.

    The result ends after at least 300 characters, because no more are shown. Searching a prompt of 1 MB takes about
    10 ms, so the search skips ahead. If characters 11 to 20 from here are not in the prompt, no quotation begins at
    characters 1 to 11, because it would contain them.
    """
    half = MIN_QUOTED_CHARS // 2
    kept = ""
    position = 0
    quotation_end = 0
    while position < len(line) and len(kept) < MAX_REASON_CHARS:
        next_chars = line[position : position + MIN_QUOTED_CHARS]
        is_long_enough = len(next_chars) == MIN_QUOTED_CHARS
        step = 1
        if next_chars[half:] not in prompt:
            step = half + 1
        elif is_long_enough and next_chars in prompt:
            length = _quotation_length(line[position:], prompt)
            if not kept.endswith("[prompt]"):
                kept += "[prompt]"
            quotation_end = position + length
            step = length - MIN_QUOTED_CHARS + 1  # a different quotation may begin inside this one
        kept += line[max(position, quotation_end) : position + step]  # characters inside a quotation are dropped
        position += step
    return kept


def _quotation_length(text: str, prompt: str) -> int:
    """Return the length of the longest beginning of a text that is in the prompt.

    Bisection works, because no longer beginning is in the prompt if a shorter one is not.
    """
    return bisect_left(range(len(text)), True, key=lambda length: text[: length + 1] not in prompt)


class ReplyMessage(BaseModel):
    """The assistant's message. DeepSeek and older versions of vLLM name the separate reasoning `reasoning_content`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def separate_reasoning(self) -> str | None:
        """The reasoning, if the server returns it separately from the text; None otherwise."""
        return self.reasoning_content or self.reasoning or None

    @property
    def text(self) -> str:
        """The content of the message, or else the model's refusal; empty without either."""
        if self.content is not None:
            return self.content
        return self.refusal or ""


def drop_noise(logprob: float) -> float:
    """Return a log-probability, or 0 if rounding noise made it positive."""
    return min(logprob, 0.0)


class TopToken(BaseModel):
    """A candidate token. Servers return minus infinity or null for one that cannot be drawn."""

    token: str
    logprob: LogProbability | None


class Token(BaseModel):
    """A token of the text, with the most probable candidates at its position."""

    token: str
    logprob: Annotated[LogProbability, Field(allow_inf_nan=False), AfterValidator(drop_noise)]
    top_logprobs: tuple[TopToken, ...] | None = None
    bytes: tuple[Annotated[int, Field(ge=0, lt=256)], ...] | None = None

    @property
    def candidates(self) -> dict[str, float]:
        """Text -> log-probability of the candidates and of the drawn token, which need not be among them."""
        possible: dict[str, float] = {}
        # Tokens may have the same text. The most probable one comes first, so the reversed order lets it win.
        for top in reversed(self.top_logprobs or ()):
            if top.logprob is not None and isfinite(top.logprob):
                possible[top.token] = drop_noise(top.logprob)
        possible[self.token] = self.logprob
        return possible


class Choice(BaseModel):
    """One completion: its message, and the tokens of the message if log-probabilities were requested."""

    message: ReplyMessage
    finish_reason: str | None = None
    tokens: tuple[Token, ...] | None = Field(default=None, validation_alias=AliasPath("logprobs", "content"))


class Reply(BaseModel):
    """A chat completion. Its token counts are those that the server bills."""

    model: str | None = None
    choices: tuple[Choice, ...] = Field(min_length=1)
    prompt_tokens: int | None = Field(default=None, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int | None = Field(default=None, validation_alias=AliasPath("usage", "completion_tokens"))


class ModelName(BaseModel):
    """A model that a server lists."""

    id: str


class ModelList(BaseModel):
    """The reply of /v1/models."""

    data: tuple[ModelName, ...]


def error_message(content: bytes | bytearray) -> str | None:
    """Return the message and code of an error reply in one of the usual forms; None if it has no message.

    >>> error_message(b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    'no such model (model_not_found)'
    """
    try:
        problem = from_json(bytes(content))
    except ValueError:
        return None
    if isinstance(problem, dict):
        problem = problem.get("error", problem)
    if isinstance(problem, str):
        return problem
    if not isinstance(problem, dict):
        return None
    text = problem.get("message") or problem.get("detail")
    if not isinstance(text, str):
        return None
    code = problem.get("code")
    if isinstance(code, str):
        return f"{text} ({code})"
    return text


class ReplyText(NamedTuple):
    """The text of a reply up to its stop text, with the log-probabilities of its tokens.

    Attributes:
        text: The text.
        tops: Each token's text, and the log-probabilities of its candidates. None if the server returned none.
        mean_logprob: Mean log-probability of the tokens. None if the server returned none.
    """

    text: str
    tops: tuple[tuple[str, dict[str, float]], ...] | None
    mean_logprob: float | None


def cut_after_stop(choice: Choice, stop: Sequence[str]) -> ReplyText:
    """Cut a completion after the first stop text, and read the log-probabilities of the tokens that are left.

    Args:
        choice: The completion.
        stop: The stop texts.

    Returns:
        The text up to and including the first stop text, or the whole text if it has none. For each token that begins
        in this text, its candidates with their log-probabilities, and the mean log-probability of these tokens. Both
        are None if the server returned no log-probabilities.
    """
    full_text = choice.message.text
    text = full_text[: find_stop_end(full_text, stop)]
    tokens = choice.tokens or ()
    tokens_make_up_text = full_text in "".join(token.token for token in tokens)
    if not tokens_make_up_text:  # the server may log an incomplete text for a part of a character
        tokens = _decode_token_bytes(tokens)
    logged_text = "".join(token.token for token in tokens)
    starts = [0, *accumulate(len(token.token) for token in tokens)]
    # Servers may also log tokens that are not in the text: those of separate reasoning, and the end of the turn.
    text_start = _find_text_start(logged_text, full_text, starts)
    # A request for one token may be answered with the end of the turn. The text is then empty, but the candidates are
    # needed all the same.
    is_text_empty = not text
    kept = []
    for token, start in zip(tokens, starts, strict=False):  # `starts` also has the end of the last token
        is_in_text = text_start <= start < text_start + len(text)
        if is_text_empty or is_in_text:
            kept.append(token)
    if not kept:
        return ReplyText(text, None, None)
    tops = tuple((token.token, token.candidates) for token in kept)
    mean_logprob = sum(token.logprob for token in kept) / len(kept)
    return ReplyText(text, tops, mean_logprob)


def _decode_token_bytes(tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Return the tokens with texts decoded from their bytes, if the server logs those.

    A character that is split over several tokens belongs to the text of the last one.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    decoded = []
    for token in tokens:
        text = token.token
        if token.bytes is not None:
            text = decoder.decode(bytes(token.bytes))
        decoded.append(token.model_copy(update={"token": text}))
    return tuple(decoded)


def _find_text_start(logged_text: str, text: str, starts: Sequence[int]) -> int:
    """Return where the text begins in the logged text: at the last possible start of a token, or 0 if there is none.

    Some servers also log the tokens of a reasoning that they return separately, and the token that ends the turn.
    """
    for start in reversed(starts):
        if logged_text.startswith(text, start):
            return start
    return 0


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before the next request; None if the headers contain no usable time.

    A date is compared with the `Date` header of the reply, or else with the local time.

    Example:
        >>> read_retry_after({"retry-after": "20"})
        20.0
    """
    try:
        seconds = _parse_retry_after(headers)
    except ValueError:
        return None
    if 0 < seconds < inf:
        return seconds
    return None


def _parse_retry_after(headers: Mapping[str, str]) -> float:
    """Read the seconds from a number or a date, which may be in the past; ValueError if neither is valid."""
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    value = headers.get("retry-after", "")
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    now = time.time()
    if "date" in headers:
        now = parsedate_to_datetime(headers["date"]).timestamp()
    return parsedate_to_datetime(value).timestamp() - now
