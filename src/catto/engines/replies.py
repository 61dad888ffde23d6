"""Replies of an OpenAI-compatible server: the fields that are read, and the requests that it refuses for good.

A reply that does not fit the models below is unusable. A refusal is reported in one line without secrets. A run stops
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

MOST_REFUSED = 0.2
# The share of refused questions is checked from this number of questions on.
MIN_QUESTIONS = 20
# A server that repeats a prompt quotes at least this many characters of it.
MIN_QUOTED_CHARS = 20
MAX_REASON_CHARS = 300


class ServerError(RuntimeError):
    """A failure that stops a run: one line without the key."""


class RefusalCap:
    """Stop a run if too many questions are refused: then the settings are at fault, not single requests.

    Questions are counted, not requests: the samples of one filtered question are all refused. A run whose first 20
    requests are all refused is stopped as well.

    Args:
        most: Maximum share of refused questions, checked from 20 questions on; 1 means no limit.
        answered: Keys of the answers that an earlier run has stored; they count in the share.
        refused: Keys of the refusals that an earlier run has stored; they count too.
    """

    def __init__(self, most: float, answered: Iterable[Key] = (), refused: Iterable[Key] = ()) -> None:
        answered_questions = {question for question, _ in answered}
        self.most = most
        self._refused = {question for question, _ in refused}
        self._asked = self._refused | answered_questions
        self._has_answers = bool(answered_questions)
        self._refused_requests = 0

    def count(self, outcome: Sampled) -> None:
        """Count an answer or a refusal; raise ServerError at one refusal too many."""
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
        """Raise ServerError if there are refusals but no answers, however few there were.

        Args:
            answered: Number of answers.
            refusals: The refusals; the first is the example in the message.
        """
        if answered:
            return
        for refusal in refusals:
            raise RefusalCap._error("every request was refused (--retry-refused asks again)", refusal)

    @staticmethod
    def _error(problem: str, example: Refusal) -> ServerError:
        return ServerError(f"{problem}, such as {example.name}: {example.refused}")


def count_reasons(refusals: Iterable[Refusal]) -> str:
    """Describe how many refusals have each reason: the three commonest, and `...` for the others.

    >>> count_reasons([Refusal(refused="400 in try 1: flagged", question="q", sample=n) for n in range(2)])
    '2 x 400 in try 1: flagged'
    """
    reasons = Counter(refusal.refused for refusal in refusals)
    shown = [f"{count:,} x {reason}" for reason, count in reasons.most_common(3)]
    if len(reasons) > len(shown):
        shown.append("...")
    return "; ".join(shown)


def clean_message(text: str, secrets: Iterable[str] = (), prompt: Iterable[str] = ()) -> str:
    """Put a server's message on one line, without secrets and without what it quotes of the prompt.

    Args:
        text: The message.
        secrets: Texts that are replaced by `[key]`.
        prompt: The texts of the prompt. A quotation of at least 20 characters is replaced by `[prompt]`.

    Returns:
        At most 300 characters.

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
    """Replace every stretch of at least 20 characters that is in the prompt; stop after 300 characters of result.

    A prompt of 1 MB is searched in about 10 ms: if the second half of the next 20 characters is not in the prompt, no
    quotation begins in the first half, which is skipped.
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
            step = length - MIN_QUOTED_CHARS + 1  # the next quotation may begin within this one
        kept += line[max(position, quotation_end) : position + step]  # nothing inside a quotation
        position += step
    return kept


def _quotation_length(text: str, prompt: str) -> int:
    """Return the length of the longest beginning of a text that is in the prompt, by bisection.

    If a beginning is not in the prompt, no longer one is.
    """
    return bisect_left(range(len(text)), True, key=lambda length: text[: length + 1] not in prompt)


class ReplyMessage(BaseModel):
    """The assistant's turn. DeepSeek and older vLLM call the separate reasoning `reasoning_content`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def separate_reasoning(self) -> str | None:
        """The reasoning that the server returns separately from the text; None without one."""
        return self.reasoning_content or self.reasoning or None

    @property
    def text(self) -> str:
        """The text; a refusal is a text too."""
        if self.content is not None:
            return self.content
        return self.refusal or ""


def drop_noise(logprob: float) -> float:
    """Return a log-probability, with rounding noise above 0 as 0."""
    return min(logprob, 0.0)


class TopToken(BaseModel):
    """One candidate token. Servers write minus infinity or null for one that cannot be drawn."""

    token: str
    logprob: LogProbability | None


class Token(BaseModel):
    """One token of the text with its best rivals."""

    token: str
    logprob: Annotated[LogProbability, Field(allow_inf_nan=False), AfterValidator(drop_noise)]
    top_logprobs: tuple[TopToken, ...] | None = None
    bytes: tuple[Annotated[int, Field(ge=0, lt=256)], ...] | None = None

    @property
    def candidates(self) -> dict[str, float]:
        """Text -> log-probability; the token that was drawn need not be among the best."""
        possible: dict[str, float] = {}
        # Two tokens may have one text: the likeliest, which comes first, counts.
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
    """A chat completion, with token counts as the server bills them."""

    model: str | None = None
    choices: tuple[Choice, ...] = Field(min_length=1)
    prompt_tokens: int | None = Field(default=None, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int | None = Field(default=None, validation_alias=AliasPath("usage", "completion_tokens"))


class ModelName(BaseModel):
    """A model that a server lists."""

    id: str


class ModelList(BaseModel):
    """What /v1/models lists."""

    data: tuple[ModelName, ...]


def error_message(content: bytes | bytearray) -> str | None:
    """Return the message of an error reply in one of its usual forms, with its code; None if it has none.

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
    """The text of a reply up to its stop text. What follows is None if the server returned no log-probabilities."""

    text: str
    tops: tuple[tuple[str, dict[str, float]], ...] | None  # tokens with the log-probabilities of their candidates
    mean_logprob: float | None


def cut_after_stop(choice: Choice, stop: Sequence[str]) -> ReplyText:
    """Return a completion up to and with the first stop text; the whole one if it has none."""
    full_text = choice.message.text
    text = full_text[: find_stop_end(full_text, stop)]
    tokens = choice.tokens or ()
    is_text_whole = full_text in "".join(token.token for token in tokens)
    if not is_text_whole:
        tokens = _decode_token_bytes(tokens)
    logged_text = "".join(token.token for token in tokens)
    starts = [0, *accumulate(len(token.token) for token in tokens)]
    text_start = _find_text_start(logged_text, full_text, starts)
    # The one token of a short reply may have no text, and its candidates are wanted all the same.
    keeps_all = not text
    kept = []
    for token, start in zip(tokens, starts, strict=False):  # the last start is the end of the last token
        is_in_text = text_start <= start < text_start + len(text)
        if keeps_all or is_in_text:
            kept.append(token)
    if not kept:
        return ReplyText(text, None, None)
    tops = tuple((token.token, token.candidates) for token in kept)
    mean_logprob = sum(token.logprob for token in kept) / len(kept)
    return ReplyText(text, tops, mean_logprob)


def _decode_token_bytes(tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Return the tokens with the texts of their bytes, where those are logged.

    A character that is split over several tokens is whole in the text of the last one, and the others have none of it.
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
    """Return the last token start where the text begins in the logged text; 0 if it begins at none.

    Some servers also log the tokens of a reasoning that they report separately, and the token that ends the turn.
    """
    for start in reversed(starts):
        if logged_text.startswith(text, start):
            return start
    return 0


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before the next request; None if the headers hold no usable time.

    A date is compared with the `Date` of the reply, if it has one.

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
    """Return the seconds in a number or a date, which may be in the past; ValueError without a valid one."""
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    value = headers.get("retry-after", "")
    if value.replace(".", "", 1).isdecimal():
        return float(value)
    now = time.time()
    if "date" in headers:
        now = parsedate_to_datetime(headers["date"]).timestamp()
    return parsedate_to_datetime(value).timestamp() - now
