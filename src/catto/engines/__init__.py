"""Who generates text: one small protocol; Transformers, vLLM or an OpenAI-compatible server behind it.

`generate` draws responses, one `Request` a response; `score` gives the log-probabilities of candidate tokens after a
context. A request carries its own temperature and seed, so a response depends on (question, sample) alone and a run
that was killed goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from pydantic import Field

from catto.records import Key as Key
from catto.records import Message, Record, Refusal, Sampled

# Temperatures at which the log-sum-exp is stored with a prediction: its confidence can be rescaled from the file.
TAU_GRID: tuple[float, ...] = (
    0.25,
    0.35,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.25,
    1.4,
    1.6,
    1.8,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
)


class Request(Sampled):
    """Ask for one response: sample `sample` of question `question`. Temperature 0 is greedy."""

    question: str
    sample: int = 0
    messages: tuple[Message, ...]
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    max_tokens: int = Field(default=512, gt=0)
    stop: tuple[str, ...] = ()  # generation ends after the first of these texts, which is kept


class Generation(Sampled):
    """One response as an engine gives it. What an engine cannot know stays None."""

    question: str
    sample: int
    text: str
    reasoning: str | None = None  # where the server returns it apart from the text
    token_ids: tuple[int, ...] | None = None
    # token texts with the log-probabilities of the best candidates, where a server returns them
    tops: tuple[tuple[str, dict[str, float]], ...] | None = None
    mean_logprob: float | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    model: str
    temperature_acts: bool = True
    seconds: float | None = None


class Context(Record):
    """Where to score: the prompt's messages, the response's tokens so far, the candidate next tokens."""

    messages: tuple[Message, ...]
    prefix: tuple[int, ...]  # token ids of the response up to the scored position
    candidates: tuple[int, ...]


class Scores(Record):
    """Full-vocabulary log-probabilities of a context's candidates (temperature 1) and, per tau of the grid,
    `logsumexp(logits / tau) - max(logits) / tau`."""

    logprobs: tuple[float, ...]
    logsumexp: dict[str, float] | None = None


class Engine(Protocol):
    """Generates responses and scores candidate tokens."""

    name: str  # stored with every prediction: engine, dtype, versions
    model: str

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield one generation for every request whose key is not in `done`, in any order, as they arrive.

        A server may refuse single requests: then a refusal stands in the generation's place.
        """
        ...

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        ...
