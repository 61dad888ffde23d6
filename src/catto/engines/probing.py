"""What a server can do besides answering: log-probabilities, and going on with a message that was begun.

`n` is never asked for: every response is a request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from catto.engines import Generation, Request
from catto.engines.server import ServerEngine, ServerError
from catto.records import Message, Refusal

# What vLLM and SGLang call it; other servers refuse it or ignore it, which `probe` finds out.
CONTINUE: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
MOST_TOPS = 20
PROBE_RETRIES = 2


class Abilities(NamedTuple):
    """Whether log-probabilities come, for how many candidates a token, and whether a begun message is gone on with."""

    logprobs: bool
    tops: int
    continues: bool

    def missing(self) -> list[str]:
        """What is missing, a sentence each."""
        lines = {
            "no log-probabilities: the confidence cannot be read": not self.logprobs,
            f"top_logprobs gives {self.tops} candidates: other labels may be unknown": self.logprobs and self.tops < 2,
            "a begun message is not gone on with: responses without an answer stay without": not self.continues,
        }
        return [line for line, is_missing in lines.items() if is_missing]


def probe(engine: ServerEngine) -> Abilities:
    """Ask the server a few tokens to see what it can do. A server that cannot answer at all raises ServerError."""
    plain = _asked(_twin(engine, 0), "")
    if isinstance(plain, Refusal):
        raise ServerError(f"{engine.place}: a first request was refused: {plain.refused}")
    known = _asked(_twin(engine, engine.top_logprobs or MOST_TOPS), "")
    tops = known.tops if isinstance(known, Generation) else None
    most = max((len(candidates) for _, candidates in tops), default=0) if tops else 0
    return Abilities(bool(tops), most, _continues(engine, plain.prompt_tokens))


def _continues(engine: ServerEngine, bare: int | None) -> bool:
    """Whether a final message is gone on with, told by the prompt's length.

    Twice the text costs twice the tokens then; a server that ignores the wish adds the end of a turn and a new one.
    """
    found = [_asked(_twin(engine, 0, CONTINUE), " ".join(["one"] * n)) for n in (4, 8)]
    lengths = [one.prompt_tokens if isinstance(one, Generation) else None for one in found]
    if bare is None or lengths[0] is None or lengths[1] is None:
        return False
    return lengths[0] - bare <= lengths[1] - lengths[0] + 1


def _asked(engine: ServerEngine, begun: str) -> Generation | Refusal:
    chat = [Message(role="user", content="Count."), *([Message(role="assistant", content=begun)] if begun else [])]
    return next(iter(engine.generate([Request(question="probe", messages=tuple(chat), max_tokens=1)])))


def _twin(engine: ServerEngine, top_logprobs: int, extra: Mapping[str, Any] | None = None) -> ServerEngine:
    """The same server with other settings; what a probe asks in vain is not asked for long."""
    retries = min(engine.max_retries, PROBE_RETRIES)
    return engine.twin(top_logprobs=top_logprobs, max_retries=retries, extra_body=extra or {})


def next_tokens(
    engine: ServerEngine, begun: Sequence[tuple[tuple[Message, ...], str]]
) -> list[dict[str, float] | Refusal]:
    """Best next tokens after each (chat, begun answer), text -> log-probability; empty where the server gave none."""
    twin = engine.twin(
        top_logprobs=engine.top_logprobs or MOST_TOPS, max_retries=engine.max_retries, extra_body=CONTINUE
    )
    requests = [
        Request(question=str(place), messages=(*chat, Message(role="assistant", content=text)), max_tokens=1)
        for place, (chat, text) in enumerate(begun)
    ]
    found = {int(one.question): one for one in twin.generate(requests)}
    engine.retries += twin.retries
    return [_candidates(found[place]) for place in range(len(begun))]


def _candidates(outcome: Generation | Refusal) -> dict[str, float] | Refusal:
    if isinstance(outcome, Refusal):
        return outcome
    return dict(outcome.tops[0][1]) if outcome.tops else {}
