"""The request bodies that the gateway accepts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from catto.records import Message, Record

# Values of unsupported fields that change nothing. Some clients send them with every request.
NEUTRAL_VALUES: dict[str, Any] = {
    "top_p": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "store": False,
    "tool_choice": "none",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "tools": [],
    "stop": [],
    "logit_bias": {},
    "metadata": {},
    "response_format": {"type": "text"},
}


class CattoOptions(Record, strict=True):
    """The `catto` object of a request.

    Attributes:
        k: Number of samples; None means the gateway's default.
        rule: The rule that chooses among samples; None means the gateway's default.
        return_candidates: Whether the reply lists all samples.
        options: Label -> text of its option; None means the labels of the served task.
    """

    k: int | None = Field(default=None, ge=1)
    rule: str | None = None
    return_candidates: bool = False
    options: dict[Annotated[str, Field(min_length=1)], str] | None = Field(default=None, min_length=2, max_length=64)


class ChatRequest(Record, strict=True):
    """The supported part of OpenAI's chat completion request. Unsupported fields are refused by name."""

    model: str
    messages: list[Message] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, le=2**53)
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] | None = None
    user: str | None = None
    catto: CattoOptions = CattoOptions()

    @model_validator(mode="before")
    @classmethod
    def _simplify_body(cls, body: Any) -> Any:
        """Drop nulls and neutral values, and join message contents that are lists of texts."""
        if not isinstance(body, dict):
            return body
        fields = {}
        for name, value in body.items():
            if value is not None and value != NEUTRAL_VALUES.get(name):
                fields[name] = value
        messages = fields.get("messages")
        if isinstance(messages, list):
            fields["messages"] = [simplify_message(message) for message in messages]
        return fields


def simplify_message(message: Any) -> Any:
    """Drop the nulls of a message, and join its content if that is a list of texts.

    Any other content is left unchanged; validation refuses it later unless it is a text.

    >>> parts = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "so?"}]
    >>> simplify_message({"role": "user", "content": parts})
    {'role': 'user', 'content': 'Is it so?'}
    """
    if not isinstance(message, dict):
        return message
    message = {name: value for name, value in message.items() if value is not None}
    if message.get("role") == "developer":  # OpenAI's newer name for the system role
        message["role"] = "system"
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            return message
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


class Feedback(Record, strict=True):
    """Whether the answer with this id was right."""

    id: str
    correct: bool
