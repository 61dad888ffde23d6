"""What a server replies: the fields of a chat completion that are read, and requests that it refuses for good.

A reply that does not fit the models below is unusable. A refusal is reported in one line without secrets, and a run of
which too much is refused is stopped.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from itertools import accumulate
from math import inf, isfinite
from typing import Annotated

from pydantic import AfterValidator, AliasPath, BaseModel, Field
from pydantic_core import from_json

from catto.engines.base import find_stop_end
from catto.records import Key, LogProbability, Refusal, Sampled

MOST_REFUSED = 0.2
# A share is judged from so many questions on.
ENOUGH = 20
# A server that throws a prompt back quotes at least so many characters of it.
QUOTED = 20
LONGEST_REASON = 300


class ServerError(RuntimeError):
    """What stops a run, in one line and without the key."""


class RefusalCap:
    """Stop a run of which too much is refused: then the settings are at fault, and not single requests.

    Questions are counted, not requests: the samples of one filtered question are all refused. `most` is the largest
    share of refused questions, judged from 20 on; 1 is no limit. A run whose first 20 requests are all refused is
    stopped as well. What an earlier run has stored counts in the share.
    """

    def __init__(self, most: float, answered: Iterable[Key] = (), refused: Iterable[Key] = ()) -> None:
        self.most = most
        self._refused = {question for question, _ in refused}
        stored = {question for question, _ in answered}
        self._asked, self._some, self._requests = self._refused | stored, bool(stored), 0

    def count(self, outcome: Sampled) -> None:
        """Count an answer or a refusal; raise ServerError where there is one refusal too many."""
        self._asked.add(outcome.question)
        if not isinstance(outcome, Refusal):
            self._some = True
            return
        self._refused.add(outcome.question)
        self._requests += 1
        if self.most >= 1:
            return
        if not self._some and self._requests >= ENOUGH:
            raise self._error(f"all of the first {self._requests} requests were refused", outcome)
        if len(self._asked) >= ENOUGH and len(self._refused) > self.most * len(self._asked):
            share = f"{len(self._refused)} of {len(self._asked)} questions were refused, max_refused is {self.most:g}"
            raise self._error(share, outcome)

    @staticmethod
    def check_some(answered: int, refusals: Iterable[Refusal]) -> None:
        """Raise ServerError where everything was refused, however few requests there were."""
        if not answered and (last := next(iter(refusals), None)) is not None:
            raise RefusalCap._error("every request was refused (--retry-refused asks again)", last)

    @staticmethod
    def _error(what: str, last: Refusal) -> ServerError:
        return ServerError(f"{what}, such as {last.name}: {last.refused}")


def count_reasons(refusals: Iterable[Refusal]) -> str:
    """Count the refusals by reason, the commonest first.

    >>> count_reasons([Refusal(refused="400 in try 1: flagged", question="q", sample=n) for n in range(2)])
    '2 x 400 in try 1: flagged'
    """
    reasons = Counter(refusal.refused for refusal in refusals)
    shown = [f"{count:,} x {reason}" for reason, count in reasons.most_common(3)]
    return "; ".join(shown + ["..."] * (len(reasons) > 3))


def one_line(text: str, secrets: Iterable[str] = (), prompt: Iterable[str] = ()) -> str:
    """Put a server's message on one line, without secrets and without what it quotes of the prompt.

    Every stretch of at least 20 characters that is also in the prompt is replaced.

    >>> one_line("bad key: k-77", ["k-77"])
    'bad key: [key]'
    """
    line = " ".join(text.replace("\\n", " ").replace('\\"', '"').split())
    for secret in filter(None, secrets):
        line = line.replace(secret, "[key]")
    told = "\n".join(" ".join(part.split()) for part in prompt)
    kept, place, end = "", 0, 0  # where the last quotation ends
    while place < len(line) and len(kept) < LONGEST_REASON:
        step = 1
        # A prompt of 1 MB is searched in about 10 ms: characters are skipped whose successors rule out a quotation.
        if line[place + QUOTED // 2 : place + QUOTED] not in told:
            step += QUOTED // 2
        elif place + QUOTED <= len(line) and line[place : place + QUOTED] in told:
            rest = range(len(line) - place)
            longest = bisect_left(rest, True, key=lambda more: line[place : place + more + 1] not in told)
            kept += "" if kept.endswith("[prompt]") else "[prompt]"
            end = place + longest
            step = longest - QUOTED + 1  # the next quotation may begin within this one
        kept += line[max(place, end) : place + step]
        place += step
    return kept[:LONGEST_REASON]


class ReplyMessage(BaseModel):
    """The assistant's turn. DeepSeek and older vLLM call the separate reasoning `reasoning_content`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def reasoned(self) -> str | None:
        """The reasoning that came apart from the text."""
        return self.reasoning_content or self.reasoning or None

    @property
    def text(self) -> str:
        """The text; a refusal is a text too."""
        return self.content if self.content is not None else self.refusal or ""


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
    """One completion."""

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
    """The message of an error reply in one of its usual forms, with its code; None where it has none.

    >>> error_message(b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    'no such model (model_not_found)'
    """
    try:
        body = from_json(bytes(content))
    except ValueError:
        return None
    problem = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(problem, str):
        return problem
    text = (problem.get("message") or problem.get("detail")) if isinstance(problem, dict) else None
    if not isinstance(text, str):
        return None
    return f"{text} ({problem['code']})" if isinstance(problem.get("code"), str) else text


Tops = tuple[tuple[str, dict[str, float]], ...]


def cut_after_stop(choice: Choice, stop: Sequence[str]) -> tuple[str, Tops | None, float | None]:
    """The text up to and with the first stop text, its tokens' candidates, and their mean log-probability."""
    text = choice.message.text
    text = text[: find_stop_end(text, stop)]
    tokens = choice.tokens or ()
    if choice.message.text not in "".join(token.token for token in tokens):  # a character of several tokens is in bytes
        decode = getincrementaldecoder("utf-8")("replace").decode
        texts = [token.token if token.bytes is None else decode(bytes(token.bytes)) for token in tokens]
        tokens = tuple(one.model_copy(update={"token": text}) for one, text in zip(tokens, texts, strict=True))
    written, begins = "".join(one.token for one in tokens), [*accumulate((len(one.token) for one in tokens), initial=0)]
    # Some servers log the tokens of a reasoning that they report apart, and one that ends the turn.
    first = max((begin for begin in begins if written.startswith(choice.message.text, begin)), default=0)
    kept = [one for one, begin in zip(tokens, begins, strict=False) if 0 <= begin - first < len(text) or not text]
    if not kept:
        return text, None, None
    tops = tuple((token.token, token.candidates) for token in kept)
    return text, tops, sum(token.logprob for token in kept) / len(kept)


def wished_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds after which a server asks to be called again, from its headers; None where they say nothing usable.

    A date is compared with the `Date` of the reply, where it has one.

    Example:
        >>> wished_wait({"retry-after": "20"})
        20.0
    """
    wait = 0.0
    with contextlib.suppress(ValueError):
        if "retry-after-ms" in headers:
            wait = float(headers["retry-after-ms"]) / 1000
        elif (given := headers.get("retry-after", "")).replace(".", "", 1).isdecimal():
            wait = float(given)
        else:
            now = parsedate_to_datetime(headers["date"]).timestamp() if "date" in headers else time.time()
            wait = parsedate_to_datetime(given).timestamp() - now
    return wait if 0 < wait < inf else None
