"""A real HTTP server on loopback that speaks OpenAI's chat completions, with faults on demand."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

Body = dict[str, Any]


class Reply(NamedTuple):
    """What goes over the wire. `cut`: close the connection after half of the announced bytes; `reset`: break it there.

    `drip`: send a blank every so many seconds in place of the payload, for as long as the client listens.
    """

    status: int = 200
    payload: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    cut: bool = False
    reset: bool = False
    drip: float = 0.0
    content_type: str = "application/json"


class Seen(NamedTuple):
    """One request as it came in."""

    at: float
    body: Body
    headers: dict[str, str]  # names in lower case
    attempt: int  # how many requests with the same body came before


def chat(text: str | None, *, model: str = "tiny-teacher", **message: Any) -> Body:
    """A well-formed completion."""
    return {
        "id": "c-1",
        "object": "chat.completion",
        "model": model,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": len((text or "").split()), "total_tokens": 0},
    }


def counted(seen: Seen) -> int:
    """How long a prompt is for a server that continues a final message: words and line breaks."""
    return sum(len(re.findall(r"\S+|\n", message["content"])) for message in seen.body["messages"])


def ok(payload: Body | str, **more: Any) -> Reply:
    """A 200 reply."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return Reply(payload=text.encode(), **more)


def error(status: int, message: str = "no", **more: Any) -> Reply:
    """An error as OpenAI's servers put it."""
    return Reply(status, json.dumps({"error": {"message": message, "type": "x"}}).encode(), **more)


class OpenAIServer:
    """Serve `respond(seen) -> Reply` while the context lasts; every request is kept in `seen`."""

    def __init__(self, respond: Callable[[Seen], Reply], port: int = 0) -> None:
        self.respond = respond
        self.seen: list[Seen] = []
        self.models: list[str] = []  # that it lists
        self.flying = self.most_flying = 0
        self._attempts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, body: Body, headers: dict[str, str]) -> Reply:
        key = json.dumps(body, sort_keys=True)
        with self._lock:
            seen = Seen(time.monotonic(), body, headers, self._attempts[key])
            self._attempts[key] += 1
            self.seen.append(seen)
            self.flying += 1
            self.most_flying = max(self.most_flying, self.flying)
        try:
            reply = self.respond(seen)
            time.sleep(reply.delay)
            return reply
        finally:
            with self._lock:
                self.flying -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that were killed hang up."""


def _handler(server: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            models = [{"id": name, "object": "model"} for name in server.models]
            self._send(ok({"data": models}) if self.path == "/v1/models" and models else error(404, "no such path"))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                self._send(error(404, f"no such path: {self.path}"))
                return
            self._send(server.answer(body, {name.lower(): value for name, value in self.headers.items()}))

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(10**6 if reply.drip else len(reply.payload)))
            for name, value in reply.headers:
                self.send_header(name, value)
            self.end_headers()
            end = time.monotonic() + 20  # a client that never hangs up must not hold the test
            while reply.drip and time.monotonic() < end:
                self.wfile.write(b" ")
                time.sleep(reply.drip)
            torn = reply.cut or reply.reset
            self.wfile.write(reply.payload[: len(reply.payload) // 2] if torn else reply.payload)
            if reply.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = torn

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler
