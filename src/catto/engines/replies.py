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
    stopped if its first 20 requests are all refused, even if they belong to fewer questions.

    Args:
        max_share: Maximum share of refused questions, checked once 20 have been asked; 1 means no limit.
        answered: Keys of the answers that an earlier run stored. Their questions count as asked.
        refused: Keys of the refusals that an earlier run stored. Their questions count as asked and refused.
    """

    def __init__(self, max_share: float, answered: Iterable[Key] = (), refused: Iterable[Key] = ()) -> None:
        answered_questions = {question for question, _ in answered}
        self.max_share = max_share
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
        has_limit = self.max_share < 1
        if not has_limit:
            return
        # With many samples per question, 20 requests are sent long before 20 questions have been asked.
        if not self._has_answers and self._refused_requests >= MIN_QUESTIONS:
            raise self._error(f"all of the first {self._refused_requests} requests were refused", outcome)
        refused = len(self._refused)
        asked = len(self._asked)
        if asked >= MIN_QUESTIONS and refused > self.max_share * asked:
            share = f"{refused} of {asked} questions were refused, max_refused is {self.max_share:g}"
            raise self._error(share, outcome)

    @staticmethod
    def require_answers(answered: int, refusals: Iterable[Refusal]) -> None:
        """Raise ServerError if there are refusals but no answers, even if there are few refusals.

        Args:
            answered: Number of answers.
            refusals: The refusals. The message quotes the first one as an example.
        """
        first_refusal = next(iter(refusals), None)
        if answered == 0 and first_refusal is not None:
            raise RefusalCap._error("every request was refused (--retry-refused asks again)", first_refusal)

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

    The line may then be printed, logged, returned by the gateway and stored as the reason of a refusal.

    Args:
        text: The message.
        secrets: Texts to replace by `[key]`, in this order; empty ones are ignored.
        prompt: The texts of the prompt. Quotations of at least 20 characters are replaced by `[prompt]`.

    Returns:
        The cleaned message, at most 300 characters long.

    >>> clean_message("bad key: k-77", ["k-77"])
    'bad key: [key]'
    """
    # A server may quote the prompt as JSON, in which line breaks and quotation marks are escaped.
    unescaped = text.replace("\\n", " ").replace('\\"', '"')
    line = _join_spaces(unescaped)
    for secret in secrets:
        if secret:
            line = line.replace(secret, "[key]")
    prompt_text = "\n".join(_join_spaces(part) for part in prompt)
    return _replace_quotations(line, prompt_text)[:MAX_REASON_CHARS]


def _join_spaces(text: str) -> str:
    return " ".join(text.split())


def _replace_quotations(line: str, prompt: str) -> str:
    """Replace every quotation of at least 20 characters from the prompt by `[prompt]`.

    Prompts may be confidential, but this line is shown in messages and logs and stored with refusals. Quotations that
    overlap or follow each other directly are replaced by a single `[prompt]`.

    Returns:
        The line with replaced quotations. The search stops after 300 characters of the result, because the caller cuts
        it there; the rest of the line is then left out.
    """
    result = ""
    position = 0  # everything in `line` before it has been copied to `result` or replaced
    search_start = 0
    while position < len(line) and len(result) < MAX_REASON_CHARS:
        search_end = position + MAX_REASON_CHARS - len(result)
        quotation = _find_quotation(line, prompt, start=search_start, end=search_end)
        if quotation is None:
            return result + line[position:search_end]
        quotation_start, quotation_end = quotation
        result += line[position:quotation_start]  # empty if this quotation overlaps with the previous one
        if not result.endswith("[prompt]"):
            result += "[prompt]"
        position = quotation_end
        # A different quotation may begin in the last 19 characters of this one, and end after it.
        search_start = quotation_end - MIN_QUOTED_CHARS + 1
    return result


def _find_quotation(line: str, prompt: str, *, start: int, end: int) -> tuple[int, int] | None:
    """Find the first quotation that begins in line[start:end]: at least 20 characters that are also in the prompt.

    Looking for a text in a prompt of 1 MB takes about 10 ms, so the search skips positions where possible. A quotation
    that begins at the current position, or at one of the 10 after it, contains the last 10 of the next 20 characters.
    If these 10 are not in the prompt, all 11 positions are skipped.

    Returns:
        Start and end of the longest quotation that begins there; None if no quotation begins in this range.
    """
    half = MIN_QUOTED_CHARS // 2
    last_start = len(line) - MIN_QUOTED_CHARS  # fewer than 20 characters follow every later position
    position = start
    while position < end and position <= last_start:
        next_chars = line[position : position + MIN_QUOTED_CHARS]
        second_half = next_chars[half:]
        if second_half not in prompt:
            position += half + 1
        elif next_chars not in prompt:
            position += 1
        else:
            return position, position + _measure_quotation(line[position:], prompt)
    return None


def _measure_quotation(text: str, prompt: str) -> int:
    """Return the length of the longest beginning of a text that is in the prompt.

    Bisection works: if a beginning is not in the prompt, no longer one is.
    """
    return bisect_left(range(len(text)), True, key=lambda index: text[: index + 1] not in prompt)


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
    """Return the message of an error reply, followed by its code if the code is a text.

    The usual forms are `{"error": {"message": ..., "code": ...}}`, the same without the outer object, `{"error": ...}`
    with a text, and FastAPI's `{"detail": ...}`.

    Args:
        content: The body of the reply.

    Returns:
        The message; None if the body is not JSON in one of these forms.

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
        candidates: For each token, its text and the candidates at its position (text -> log-probability). None if the
            server returned no log-probabilities of tokens in the text.
        mean_logprob: Mean log-probability of these tokens; None if there are none.
    """

    text: str
    candidates: tuple[tuple[str, dict[str, float]], ...] | None
    mean_logprob: float | None


def cut_after_stop(choice: Choice, stop: Sequence[str]) -> ReplyText:
    """Cut a completion after the first stop text, and read the log-probabilities of the tokens that are left.

    Args:
        choice: The completion.
        stop: The stop texts.

    Returns:
        The text up to and including the first stop text, or the whole text if it has none. With it the candidates and
        the mean log-probability of the tokens that begin in the text, or None and None if there are no such tokens. If
        the text is empty, these are all tokens that the server returned.
    """
    full_text = choice.message.text
    text = full_text[: find_stop_end(full_text, stop)]
    tokens = choice.tokens or ()
    # The tokens may have more text: that of reasoning which the server returns in a field of its own.
    tokens_contain_text = full_text in "".join(token.token for token in tokens)
    if not tokens_contain_text:
        # A token may have only some of the bytes of a character. Its text is then incomplete, but its bytes are not.
        tokens = _decode_token_bytes(tokens)
    if text:
        tokens = _select_tokens(tokens, full_text, length=len(text))
    # With an empty text, all tokens are kept: if one token was requested, it may be the end of the turn, which has no
    # text, but whose candidates are needed. Tokens of separate reasoning cannot be told apart from it.
    if not tokens:
        return ReplyText(text, None, None)
    candidates = tuple((token.token, token.candidates) for token in tokens)
    mean_logprob = sum(token.logprob for token in tokens) / len(tokens)
    return ReplyText(text, candidates, mean_logprob)


def _decode_token_bytes(tokens: Iterable[Token]) -> tuple[Token, ...]:
    """Return the tokens with texts decoded from their bytes. A token without bytes keeps its text.

    A character whose bytes are split over several tokens belongs to the text of the last of them.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    decoded = []
    for token in tokens:
        text = token.token
        if token.bytes is not None:
            text = decoder.decode(bytes(token.bytes))
        decoded.append(token.model_copy(update={"token": text}))
    return tuple(decoded)


def _select_tokens(tokens: Sequence[Token], text: str, *, length: int) -> tuple[Token, ...]:
    """Select the tokens that begin in the first `length` characters of the text.

    Some servers also log the tokens of separate reasoning before the text, and the end of the turn after it.
    """
    token_starts = []
    logged_text = ""
    for token in tokens:
        token_starts.append(len(logged_text))
        logged_text += token.token
    # The text begins with a token. The reasoning may quote it, so it begins where it occurs last. If it does not occur,
    # the tokens are selected from the first one on, and reading a label from them fails with a reason.
    text_start = 0
    for start in reversed(token_starts):
        if logged_text.startswith(text, start):
            text_start = start
            break
    selected = []
    for token, start in zip(tokens, token_starts, strict=True):
        if text_start <= start < text_start + length:
            selected.append(token)
    return tuple(selected)


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before the next request.

    They are a number or the time until a date. A date is compared with the `Date` header of the reply, which does not
    depend on the local clock, or else with the local time.

    Args:
        headers: The headers of the reply. Names are looked up in lower case.

    Returns:
        The seconds; None if the headers name no time in the future.

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
