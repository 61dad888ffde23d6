"""What is read of a chat-completion reply; anything that does not fit is an unusable reply."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from pydantic import BaseModel, Field, field_validator

Tops = tuple[tuple[str, dict[str, float]], ...]


class Usage(BaseModel):
    """Token counts as the server bills them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


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

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all.

        A thinking model that ran out of tokens has reasoning and no content: a response, though without an answer.
        """
        return self.content is None and self.refusal is None and self.reasoned is None


class TopToken(BaseModel):
    """One candidate token."""

    token: str
    logprob: float = Field(allow_inf_nan=False)


class Token(TopToken):
    """One token of the text with its best rivals."""

    top_logprobs: tuple[TopToken, ...] = ()

    @field_validator("top_logprobs", mode="before")
    @classmethod
    def _possible(cls, value: Any) -> Any:
        """Leave out candidates that cannot be drawn: servers write minus infinity or null for them."""
        return [one for one in value or () if not _impossible(one)] if isinstance(value, list | None) else value


def _impossible(candidate: Any) -> bool:
    value = candidate.get("logprob", 0.0) if isinstance(candidate, dict) else 0.0
    return value is None or (isinstance(value, float) and not isfinite(value))


class Logprobs(BaseModel):
    """Log-probabilities of the text's tokens."""

    content: tuple[Token, ...] | None = None


class Choice(BaseModel):
    """One completion."""

    message: ReplyMessage
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Reply(BaseModel):
    """A chat completion."""

    model: str | None = None
    choices: tuple[Choice, ...] = Field(min_length=1)
    usage: Usage | None = None


def cut_after_stop(choice: Choice, stop: Sequence[str]) -> tuple[str, Tops | None, float | None]:
    """The text up to and with the first stop text, its tokens' candidates, and their mean log-probability."""
    text = choice.message.text
    ends = [text.index(end) + len(end) for end in stop if end in text]
    text = text[: min(ends)] if ends else text
    tokens = _tokens_of(choice, len(text))
    if not tokens:
        return text, None, None
    # The token that was drawn need not be among the best.
    tops = tuple((t.token, {t.token: t.logprob, **{top.token: top.logprob for top in t.top_logprobs}}) for t in tokens)
    return text, tops, sum(token.logprob for token in tokens) / len(tokens)


def _tokens_of(choice: Choice, length: int) -> tuple[Token, ...]:
    """The tokens that begin inside the first `length` characters."""
    tokens = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    kept, begin = [], 0
    for token in tokens:
        if begin >= length:
            break
        kept.append(token)
        begin += len(token.token)
    return tuple(kept)
