"""The engine protocol and its records: requests, generations, contexts and scores.

`generate` draws one response per `Request`; `score` returns the log-probabilities of candidate tokens after a context.
A request carries its own temperature and seed. A response therefore depends only on its request, and a killed run
resumes with the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pydantic import Field

from catto.records import Key, Message, Record, Refusal, Sampled

# Temperatures at which the log-sum-exp is stored with a prediction, so that its confidence can be rescaled later.
TAU_GRID = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0)


class Request(Sampled):
    """A request for one response: sample `sample` of question `question`. Temperature 0 means greedy decoding."""

    question: str
    sample: int = 0
    messages: tuple[Message, ...]
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    max_tokens: int = Field(default=512, gt=0)
    stop: tuple[str, ...] = ()  # generation ends after the first of these texts, which stays in the response
    keep_states: bool = False  # the response will be scored, so the engine may keep its hidden states
    begun: bool = False  # the last message is a partial response, which the server continues


class Generation(Sampled):
    """One generated response. A field is None if the engine does not know its value."""

    question: str
    sample: int
    text: str
    reasoning: str | None = None  # if the server returns it separately from the text
    token_ids: tuple[int, ...] | None = None
    # From a server: for each token, its text and the candidates at its position (text -> log-probability).
    tops: tuple[tuple[str, dict[str, float]], ...] | None = None
    mean_logprob: float | None = None  # over the response's tokens
    prompt_tokens: int | None = None
    tokens: int | None = None  # number of generated tokens
    finish_reason: str | None = None
    model: str
    temperature_acts: bool = True  # whether the temperature has an effect; False if the server ignores it
    seconds: float | None = None


class Context(Record):
    """A position to score: the prompt's messages, the response's tokens so far, and the candidate next tokens."""

    messages: tuple[Message, ...]
    prefix: tuple[int, ...]  # token ids of the response up to the scored position
    candidates: tuple[int, ...]
    # Key of the response that begins with `prefix`, if the engine has just generated it and may have kept its states.
    response: Key | None = None


class Scores(Record):
    """Scores of a context's candidates, computed over the full vocabulary.

    Attributes:
        logprobs: Log-probability of each candidate at temperature 1.
        logsumexp: tau -> `logsumexp(logits / tau) - max(logits) / tau`, for every tau of `TAU_GRID`.
    """

    logprobs: tuple[float, ...]
    logsumexp: dict[str, float] | None = None


class LabelScores(Scores):
    """Scores at the label of a stored response.

    Attributes:
        kept: Number of tokens at the beginning of the response that precede the scored position.
        added: Tokens inserted between these and the scored position, such as the ones that close the response.
        candidates: The tokens that were scored.
    """

    kept: int
    added: tuple[int, ...]
    candidates: tuple[int, ...]


class ScoredGeneration(Generation):
    """A generation with the scores of its label. There are none if the engine exchanges text only."""

    labels: tuple[LabelScores, ...] = ()


class Engine(Protocol):
    """Generates responses and scores candidate tokens. A class that derives from it inherits the defaults below.

    An engine with a tokenizer exchanges tokens: its generations have token ids, and so do the contexts of `score`. An
    engine without one exchanges text: labels are read from `Generation.tops`, and `score` raises NotImplementedError.
    """

    name: str  # engine, dtype and versions, stored with every prediction
    model: str
    batch_size: int = 16  # number of responses generated at once
    tokenizer: Any = None
    positions: int | None = None  # maximum number of tokens in prompt and response together; None for no limit

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield one generation for every request whose key is not in `done`, in any order, as they arrive.

        `requests` may be iterated more than once. If a server refuses a request, a refusal is yielded instead.
        """
        ...

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        message = f"{self.name} cannot score token ids; use a local engine"
        raise NotImplementedError(message)


def find_stop_end(text: str, stops: Collection[str]) -> int | None:
    """Find where the first stop text ends.

    If `</answer>` is a stop text, stop texts in the reasoning are ignored, because reasoning may quote an answer.

    Args:
        text: A response, possibly unfinished.
        stops: The stop texts.

    Returns:
        The index after the stop text that ends first. None if there is no stop text or the reasoning is unfinished. The
        result can be used as the end of a slice: with None, `text[:None]` is the whole text.

    Example:
        >>> find_stop_end("one</b> two</a>", ("</a>", "</b>"))
        7
        >>> find_stop_end("<think>As <answer>A</answer>?</think><answer>B</answer>", ("</answer>",))
        55
    """
    starts = [text.index(stop) for stop in stops if stop in text]
    if not starts:
        return None
    search_start: int | None = 0
    if "</answer>" in stops:
        search_start = _find_search_start(text, first_stop=min(starts))
        if search_start is None:
            return None
    ends = []
    for stop in stops:
        start = text.find(stop, search_start)
        if start >= 0:
            ends.append(start + len(stop))
    return min(ends, default=None)


def _find_search_start(text: str, *, first_stop: int) -> int | None:
    """Return where to search for a stop text that is not in the reasoning.

    Args:
        text: A response.
        first_stop: Where its first stop text starts, in the reasoning or elsewhere.

    Returns:
        The end of the reasoning if the first stop text is in it, otherwise 0. None if the reasoning starts before the
        first stop text and does not end.
    """
    think_start = text.find("<think>")
    think_end = text.find("</think>")
    if think_end < 0:
        is_reasoning_unfinished = 0 <= think_start < first_stop
        return None if is_reasoning_unfinished else 0
    # A reasoning without `<think>` was opened by the prompt, so it starts with the response.
    is_before_reasoning = first_stop < think_start < think_end
    is_in_reasoning = first_stop < think_end and not is_before_reasoning
    return think_end if is_in_reasoning else 0
