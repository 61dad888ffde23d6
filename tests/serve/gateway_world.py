"""The gateway on a real uvicorn in a thread, in front of a real upstream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import uvicorn
from openai_server import Body, OpenAIServer, Reply, Seen, chat, ok

from catto.calibrate import Fitted, RiskThreshold
from catto.engines.server import ServerEngine
from catto.records import Grade, Protocol
from catto.serve.answering import Answerer
from catto.serve.gateway import Gateway, Limits, server_options
from catto.serve.short_answering import ShortAnswerer

MODEL = "tiny-answerer"
ONE = Protocol(rule="most confident", k=1, temperature=0.0, fallback="answer")
FOUR = Protocol(rule="most confident", k=4, temperature=1.0, fallback="answer")
LABELS = tuple("ABCD")


def threshold(value: float, protocol: Protocol = ONE, fitted: Fitted | None = None) -> RiskThreshold:
    digest = fitted.digest if fitted else None
    numbers = {"coverage": 0.7, "answered": 700, "errors": 10, "bound": 0.03, "rows": 1000}
    return RiskThreshold(threshold=value, risk=0.05, delta=0.05, protocol=protocol, calibrator=digest, **numbers)  # type: ignore[arg-type]


@contextmanager
def gateway(
    upstream: OpenAIServer | str,
    *,
    protocol: Protocol = ONE,
    fitted: Fitted | None = None,
    limit: RiskThreshold | None = None,
    limits: Limits | None = None,
    labels: tuple[str, ...] = LABELS,
    continues: bool = True,
    log: Path | None = None,
    grade: Grade | None = None,
    **engine: Any,
) -> Iterator[str]:
    """Its address, without /v1."""
    url = upstream if isinstance(upstream, str) else upstream.url
    asking = ServerEngine(url, MODEL, top_logprobs=20, **{"max_retries": 1, "deadline": 30.0, **engine})
    asking.can_continue = continues
    answerer = Answerer(asking, asking.make_client(), fitted, limit, "I do not know.")
    if grade is not None:
        answerer = ShortAnswerer(asking, asking.make_client(), fitted, limit, "I do not know.", grade=grade, brief=True)
    limits = limits or Limits()
    app = Gateway(answerer, labels, protocol, limits, log).make_app()
    config = uvicorn.Config(app, port=0, **server_options(limits))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(true: Any, seconds: float = 30.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def client(url: str, key: str = "none") -> openai.OpenAI:
    """The official client; without certificates, which take 50 ms to read and are not used on loopback."""
    plain = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60, http_client=plain)


def ask(url: str, text: str = "Which?", *, wishes: dict[str, Any] | None = None, **more: Any) -> Any:
    """One chat completion by the official client, a stream as the list of its chunks."""
    extra = {"catto": wishes} if wishes is not None else None
    messages = more.pop("messages", [{"role": "user", "content": text}])
    with client(url) as asking:
        reply = asking.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **more)
        return list(reply) if more.get("stream") else reply


def stating(label: str, logprob: float = -0.25, others: dict[str, float] | None = None) -> Body:
    """A completion that answers with a label, as tokens."""
    body = chat(f"<answer>\n{label}\n</answer>", model=MODEL)
    tops = [{"token": other, "logprob": value} for other, value in (others or {}).items()]
    tokens = [("<answer>", -0.0), ("\n", -0.0), (label, logprob), ("\n", -0.0), ("</answer>", -0.0)]
    content = [
        {"token": token, "logprob": value, "top_logprobs": tops if token == label else []} for token, value in tokens
    ]
    body["choices"][0]["logprobs"] = {"content": content}
    return body


def always(label: str, logprob: float = -0.25, **more: Any) -> Any:
    """An upstream that always gives this answer."""

    def respond(_: Seen) -> Reply:
        return ok(stating(label, logprob), **more)

    return respond
