"""Requests and engines for tests against the local server."""

from __future__ import annotations

from openai_server import OpenAIServer, Reply, Seen, chat, ok

from catto.engines import Request
from catto.engines.server import ServerEngine
from catto.records import Message, Refusal


def request(sample: int = 0, *, temperature: float = 0.7, stop: tuple[str, ...] = ()) -> Request:
    prompt = (Message(role="system", content="s"), Message(role="user", content="u"))
    return Request(
        question="q",
        sample=sample,
        messages=prompt,
        temperature=temperature,
        seed=100 + sample,
        max_tokens=9,
        stop=stop,
    )


def engine(server: OpenAIServer, **more: object) -> ServerEngine:
    return ServerEngine(server.url, "m", **{"max_retries": 4, "timeout": 120.0, **more})  # type: ignore[arg-type]


def by_seed(seen: Seen) -> Reply:
    return ok(chat(f"text {seen.body['seed']}"))


def refused(server: OpenAIServer, **more: object) -> str:
    """Why the one request is refused."""
    (found,) = engine(server, **more).generate([request()])
    assert isinstance(found, Refusal)
    assert found.key == ("q", 0)
    return found.refused
