"""The gateway serves everyone else while it works on the worst request that it accepts."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from gateway_world import MODEL, always, gateway, stating, until
from openai_server import OpenAIServer, Reply, Seen, chat, ok
from test_gateway import body, free_port, get, post, serving

from catto.serve.gateway import MAX_HEAD_BYTES, Limits

pytestmark = pytest.mark.slow

BODY_BYTES = 64 * 1024
# A letter and marks that Unicode's normal form keeps joining to it, and marks that it has to put in order.
JOINING = "\u0301\uff9e"
UNORDERED = "\u0301\u0316"
MOST_MARKS = Limits().max_option_characters // 2 - 1
# The upstream repeats it. It is not the plain label, so it is compared with the options.
QUESTION = [{"role": "user", "content": "<answer>(B)</answer>"}]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def fill(make: Any) -> bytes:
    """The longest body of at most 64 KB that `make` gives for a count."""
    low, high = 1, BODY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(make(middle))) <= BODY_BYTES else (low, middle - 1)
    return encode(make(low))


def encode(fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def long_options(marks: str, count: int) -> dict[str, Any]:
    """As many of the longest texts that are accepted as there is room for."""
    whole, rest = divmod(count, MOST_MARKS)
    options = {f"L{number}": "x" + marks * MOST_MARKS for number in range(min(whole, 62))}
    options |= {"last": "x" + marks * rest, "B": ""}
    return body(messages=QUESTION, catto={"options": options})


def joining_options(count: int) -> dict[str, Any]:
    return long_options(JOINING, count)


def unordered_options(count: int) -> dict[str, Any]:
    return long_options(UNORDERED, count)


def many_options(count: int) -> dict[str, Any]:
    texts = {f"L{number}": "x" + JOINING * (count // 64) for number in range(64)}
    return body(messages=QUESTION, catto={"options": texts})


def echoed_text(count: int) -> dict[str, Any]:
    """The upstream repeats the last message: a client chooses the text of the reply too."""
    most = Limits().max_option_characters
    options = {"A": "y" * most, "B": ""}
    text = "x" + UNORDERED * min(count, most)  # a reply that is longer than twice an option has no form
    return body(messages=[{"role": "user", "content": text}], catto={"options": options})


def echoed_tags(count: int) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "<answer></think>" * count}], stream=True)


def echoed_words(count: int) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "<answer>A</answer>" + " x" * count}], stream=True)


def many_messages(count: int) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": ""}] * count)


BODIES = [joining_options, unordered_options, many_options, echoed_text, echoed_tags, echoed_words, many_messages]


def echo(seen: Seen) -> Reply:
    """Answer the probe as any server; repeat the last message of other requests, one token for the whole text."""
    text = seen.body["messages"][-1]["content"]
    if seen.body["messages"][0]["content"] == "Count." or not text or text == "Which?":
        return ok(stating("B"))
    reply = chat(text, model=MODEL)
    reply["choices"][0]["logprobs"] = {"content": [{"token": text, "logprob": -0.5, "top_logprobs": []}]}
    return ok(reply)


@contextmanager
def served(upstream: OpenAIServer) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`catto serve` in a process of its own: its address and the process."""
    port = free_port()
    process = serving("--upstream", upstream.url, "--model", MODEL, "--port", str(port), "--deadline", "5")
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return bool(get(url, "/health")[0] == 200)
        except OSError:
            return False

    try:
        until(ready, 120)
        yield url, process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("make", BODIES, ids=lambda make: make.__name__)
def test_health_answers_while_the_worst_body_is_worked_on(make: Any) -> None:
    """Four such requests at once. The limit is wide, since other processes may take the processor."""
    data = fill(make)
    with OpenAIServer(echo) as upstream, served(upstream) as (url, _):
        threads = [threading.Thread(target=post, args=(url, data)) for _ in range(4)]
        for thread in threads:
            thread.start()
        slowest = 0.0
        for _ in range(20):
            started = time.monotonic()
            assert get(url, "/health")[0] == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.05)
        print(f"{make.__name__}: {len(data)} bytes, slowest /health {slowest:.3f} s")
        assert slowest < 10
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_option_texts_are_limited() -> None:
    most = Limits().max_option_characters
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        for options in ({"A": "x" * (most + 1), "B": ""}, {"A" * (most + 1): "", "B": ""}):
            status, reply, _ = post(url, body(catto={"options": options}))
            assert status == 400
            assert "catto.options: a label or text has at most 4,000 characters" in reply["error"]["message"]
        assert not upstream.seen
        assert post(url, body(catto={"options": {"A": "x" * most, "B": ""}}))[0] == 200


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that the process holds now."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


REQUEST_LINE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = REQUEST_LINE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
HEADS = {
    "one long header": (REQUEST_LINE + b"X-Long: ", b"x" * 65536),
    "many headers": (REQUEST_LINE, b"x-a: b\r\n" * 8192),
    "a long path": (b"GET /", b"x" * 65536),
    "trailers after a body": (CHUNKED + b"0\r\n", b"x-a: b\r\n" * 8192),
    "a long extension of a chunk": (CHUNKED + b"1;", b"x" * 65536),
    "a second request behind the first": (
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + REQUEST_LINE,
        b"x-a: b\r\n" * 8192,
    ),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_headers_are_limited_before_the_key_is_checked() -> None:
    """Each connection sends up to 64 MB in the place of a head; it is closed early, and the memory stays."""
    with OpenAIServer(always("B")) as upstream, served(upstream) as (url, process):
        port = int(url.rsplit(":", 1)[1])
        before = resident(process)
        for name, (start, block) in HEADS.items():
            sent = 0
            with socket.create_connection(("127.0.0.1", port), timeout=30) as line, suppress(OSError):
                line.sendall(start)
                while sent < 64 * 2**20:
                    line.sendall(block)
                    sent += len(block)
            assert sent < 16 * 2**20, name  # what fits into the buffers of the two sockets, not more
            assert get(url, "/health")[0] == 200
        grown = resident(process) - before
        print(f"resident {before / 2**20:.0f} MB, {grown / 2**20:.1f} MB more after the floods")
        assert grown < 32 * 2**20
    assert MAX_HEAD_BYTES <= 64 * 1024


def test_nothing_but_health_and_metrics_is_open_without_the_key() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream, limits=Limits(key="k-1")) as url:
        for path in ("/openapi.json", "/v1/models", "/docs", "/nowhere", "/V1/models", "//v1/models", "/health/"):
            assert get(url, path)[0] == 401, path
        assert get(url, "/openapi.json", Authorization="Bearer k-1")[0] == 200
        assert get(url, "/health")[0] == 200
        assert get(url, "/metrics")[0] == 200
