"""The web application of `catto serve`: routes in OpenAI's form, limits, a queue, authentication, metrics and a log.

A request passes the guard (key, size, time to send it, request id), waits for a place (429 where the queue is full) and
is answered by `Answerer`. A client that hangs up cancels its upstream requests. Nothing of a prompt, a response or a
key is logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from catto.engines.server import FaultError
from catto.metrics.errors import brier, ece
from catto.metrics.selection import RULES
from catto.problems import shortened
from catto.records import Message, Option, Protocol, Question
from catto.serve.answering import Answered, Answerer, Asked

LOG = logging.getLogger("catto.serve")
# Answers that wait for feedback, and graded answers that the rolling numbers are of.
MOST_PENDING, ROLLING = 50_000, 1000
# Seconds for the head of a request, and as many for its body.
SENDING = 10.0
MOST_LABELS = 64
LOGGED = ("confidence", "confidence_raw", "label", "source", "k", "rule", "abstained")
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "queue_full"),
    500: ("internal_error", None),
}


@dataclass(frozen=True)
class Limits:
    """What one client, and all together, may ask of the gateway. `key` None: no authentication."""

    concurrency: int = 16
    queue: int = 64
    max_k: int = 16
    max_tokens: int = 4096
    max_bytes: int = 1_000_000
    deadline: float = 120.0
    key: str | None = None


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Turn(_Closed):
    """A message whose content is text."""

    role: Literal["system", "user", "assistant"]
    content: str


class Wishes(_Closed):
    """The `catto` object of a request; `options` are its labels with their texts."""

    k: int | None = Field(default=None, ge=1)
    rule: str | None = None
    return_candidates: bool = False
    options: dict[Annotated[str, Field(min_length=1)], str] | None = Field(
        default=None, min_length=2, max_length=MOST_LABELS
    )


class StreamOptions(_Closed):
    """Whether a stream ends with the token counts."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(_Closed):
    """A chat completion as far as the gateway serves it; other fields are refused by name."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, le=2**53)
    n: Literal[1] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    catto: Wishes = Wishes()


class Feedback(_Closed):
    """Whether the answer of that id was right."""

    id: str
    correct: bool


def refused(status: int, message: str) -> FaultError:
    """What is not answered by a fault of the request, or of too many requests."""
    return FaultError(message, again=False, code=status)


def error(status: int, message: str, close: bool = False) -> JSONResponse:
    """An error in OpenAI's form; `close`: and the end of the connection."""
    kind, code = _KINDS.get(status, ("upstream_error" if status > 500 else "invalid_request_error", None))
    body = {"error": {"message": shortened(message), "type": kind, "param": None, "code": code}}
    headers = {"connection": "close"} if close else {"retry-after": "1"} if status == 429 else {}
    return JSONResponse(body, status, headers)


@dataclass
class Watch:
    """Counts for /metrics, and the answers that feedback completes.

    Answers wait in `<log>.pending.jsonl`; with feedback they are appended to the log, which `catto measure` reads.
    """

    log: Path | None
    counts: Counter[str] = field(default_factory=Counter)
    pending: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    graded: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=ROLLING))

    def __post_init__(self) -> None:
        if self.log is None:
            return
        done = set()
        for row in _rows(self.log, "correct"):
            done.add(row["id"])
            self.graded.append((row["confidence"], row["correct"]))
        for row in _rows(self._waiting(self.log)):
            if row["id"] not in done:
                self._keep(row)

    @staticmethod
    def _waiting(log: Path) -> Path:
        return log.with_name(log.name.removesuffix(".jsonl") + ".pending.jsonl")

    def _keep(self, row: dict[str, Any]) -> None:
        self.pending[row["id"]] = row
        if len(self.pending) > MOST_PENDING:
            self.pending.popitem(last=False)

    def answered(self, name: str, about: dict[str, Any]) -> None:
        """Count an answer, and keep it where it has a confidence."""
        self.counts["catto_samples_total"] += about["k"]
        self.counts["catto_abstained_total"] += about["abstained"]
        if about["confidence"] is None:
            return
        row = {"id": name, "time": int(time.time()), **{key: about[key] for key in LOGGED}}
        self._keep(row)
        if self.log is not None:
            _append(self._waiting(self.log), row)

    def feedback(self, name: str, correct: bool) -> None:
        """Complete an answer, or refuse an id that does not wait for feedback."""
        row = self.pending.pop(name, None)
        if row is None:
            raise refused(404, "no answer of this id waits for feedback")
        self.graded.append((row["confidence"], correct))
        if self.log is not None:
            _append(self.log, {**row, "correct": correct})

    def request(self, status: int, seconds: float) -> None:
        """Count a request that was replied to."""
        self.counts[f'catto_requests_total{{status="{status}"}}'] += 1
        self.counts["catto_request_seconds_count"] += 1
        self.counts["catto_request_seconds_sum"] += seconds  # type: ignore[assignment]
        for bound in (*BUCKETS, "+Inf"):
            self.counts[f'catto_request_seconds_bucket{{le="{bound}"}}'] += bound == "+Inf" or seconds <= float(bound)

    def text(self, **now: float) -> str:
        """All numbers in Prometheus' text format."""
        values: dict[str, float] = {**self.counts, **now, "catto_feedback_answers": len(self.graded)}
        if self.graded:
            confidence, correct = zip(*self.graded, strict=True)
            values["catto_rolling_confidence"] = sum(confidence) / len(confidence)
            values["catto_rolling_accuracy"] = sum(correct) / len(correct)
            values["catto_rolling_ece"] = ece(confidence, correct)
            values["catto_rolling_brier"] = brier(confidence, correct)
        lines, typed = [], set()
        for name in sorted(values, key=lambda name: (name.partition("{")[0], name)):
            family = re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0])
            if family not in typed:
                typed.add(family)
                kind = (
                    "histogram" if family.endswith("_seconds") else "counter" if family.endswith("_total") else "gauge"
                )
                lines.append(f"# TYPE {family} {kind}")
            lines.append(f"{name} {values[name]:.10g}")
        return "\n".join(lines) + "\n"


def _rows(path: Path, *more: str) -> Iterator[dict[str, Any]]:
    """The rows of a log; a line that a kill tore is skipped."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and {"id", "confidence", *more} <= row.keys():
                yield row


def _append(path: Path, row: dict[str, Any]) -> None:
    """Write a row; a full disk costs the row and not the answer."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as problem:
        LOG.warning("%s: %s", path, problem.strerror)


class Guard:
    """Everything that is refused before a request is read as JSON, and what is counted when it was replied to."""

    def __init__(self, app: Any, limits: Limits, watch: Watch) -> None:
        self.app, self.limits, self.watch = app, limits, watch
        self._key = None if limits.key is None else b"Bearer " + limits.key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request of the ASGI protocol."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = dict(scope["headers"]), time.monotonic()
        wished = headers.get(b"x-request-id", b"").decode("latin-1")
        name = wished if _ID.fullmatch(wished) else f"chatcmpl-{secrets.token_hex(12)}"
        scope["state"] = {**scope.get("state", {}), "id": name}

        async def reply(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                seconds = time.monotonic() - started
                self.watch.request(message["status"], seconds)
                LOG.info("%s %s %s %.0f ms", name, scope["path"], message["status"], 1000 * seconds)
            await send(message)

        refused, body = self._refused(scope["path"], headers), b""
        if refused is None:
            refused, body = await self._body(receive)
        if refused is not None:
            await refused(scope, receive, reply)
            return
        bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def received() -> Any:
            return next(bodies, None) or await receive()

        await self.app(scope, received, reply)

    def _refused(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        given = headers.get(b"authorization", b"")
        if path.startswith("/v1/") and self._key is not None and not hmac.compare_digest(given, self._key):
            return error(401, "missing or wrong API key", close=True)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.max_bytes:
            return self._too_long()
        return None

    def _too_long(self) -> Response:
        return error(413, f"the body is longer than {self.limits.max_bytes:,} bytes", close=True)

    async def _body(self, receive: Any) -> tuple[Response | None, bytes]:
        body = bytearray()
        try:
            async with asyncio.timeout(SENDING):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > self.limits.max_bytes:
                        return self._too_long(), b""
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            return error(408, f"the body did not arrive within {SENDING:g} s", close=True), b""
        return None, bytes(body)


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc]
    """uvicorn's HTTP, except that a connection whose request line and headers take too long is closed."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock with the connection."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Start the clock with the first byte of a request, stop it with its last header."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        reading = self.cycle is None or self.cycle.response_complete
        if self._late is not None and not reading:
            self._late.cancel()
            self._late = None
        elif self._late is None and reading:
            self._late = self.loop.call_later(SENDING, self.transport.close)


class Gateway:
    """The routes. A request without options has the labels of the task, one without wishes has this protocol."""

    def __init__(
        self, answerer: Answerer, labels: tuple[str, ...], protocol: Protocol, limits: Limits, log: Path | None = None
    ) -> None:
        self.answerer, self.labels, self.protocol, self.limits = answerer, labels, protocol, limits
        self.model, self.watch = answerer.engine.model, Watch(log)
        self._places = asyncio.Semaphore(limits.concurrency)
        self._inside = 0

    def app(self) -> FastAPI:
        """The application, which closes the upstream's client at its end."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await self.answerer.client.aclose()

        app = FastAPI(title="catto serve", lifespan=lifespan, docs_url=None, redoc_url=None)
        forms: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}, **_DESCRIBED}
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], responses=forms, response_model=None)
        app.add_api_route("/v1/feedback", self.feedback, methods=["POST"], responses=_DESCRIBED)
        app.add_api_route("/v1/models", self.models, methods=["GET"], responses=_DESCRIBED)
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_class=PlainTextResponse)
        app.add_exception_handler(RequestValidationError, _invalid)
        for kind in (HTTPException, FaultError, Exception):
            app.add_exception_handler(kind, _failed)
        app.add_middleware(Guard, limits=self.limits, watch=self.watch)
        return app

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer with a confidence, or abstain."""
        name = str(request.state.id)
        asked = self._asked(name, body)
        if self._inside >= self.limits.concurrency + self.limits.queue:
            raise refused(429, "the queue is full, try again later")
        self._inside += 1
        work = asyncio.ensure_future(self._answer(asked))
        gone = asyncio.ensure_future(request.receive())  # the body is read: what comes next is that the client left
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                LOG.info("%s the client hung up", name)
                return Response(status_code=499)
            answered = work.result()
        finally:
            self._inside -= 1
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        self.watch.answered(name, answered.catto)
        head = {"id": name, "created": int(time.time()), "model": self.model}
        if not body.stream:
            return JSONResponse(_completion(head, answered))
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(_chunks(head, answered, usage), media_type="text/event-stream")

    async def _answer(self, asked: Asked) -> Answered:
        try:
            async with asyncio.timeout(self.limits.deadline), self._places:
                return await self.answerer.answer(asked)
        except TimeoutError:
            raise FaultError(f"no answer within {self.limits.deadline:g} s", again=True, code=504) from None

    def _asked(self, name: str, body: ChatRequest) -> Asked:
        """What a request wants, or the refusal of what cannot be served."""
        wishes, protocol = body.catto, self.protocol
        if body.model != self.model:
            raise refused(404, f"model {body.model!r} is not served, {self.model!r} is")
        if wishes.rule is not None and wishes.rule not in RULES:
            raise refused(400, f"catto.rule: expected one of {', '.join(RULES)}")
        changed = {"k": wishes.k, "rule": wishes.rule, "temperature": body.temperature}
        protocol = protocol.model_copy(update={key: value for key, value in changed.items() if value is not None})
        if protocol.k > self.limits.max_k:
            raise refused(400, f"catto.k: at most {self.limits.max_k}")
        if protocol.k > 1 and protocol.temperature == 0:
            raise refused(400, f"{protocol.k} samples at temperature 0 are the same: give a temperature, or k = 1")
        most = body.max_completion_tokens or body.max_tokens or min(512, self.limits.max_tokens)
        if most > self.limits.max_tokens:
            raise refused(400, f"max_tokens: at most {self.limits.max_tokens}")
        texts = wishes.options or dict.fromkeys(self.labels, "")
        options = tuple(Option(label=label, text=text) for label, text in texts.items())
        question = Question(id=name, task="served", split="test", fields={}, options=options, gold=options[0].label)
        turns = tuple(Message(role=turn.role, content=turn.content) for turn in body.messages)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        return Asked(question, turns, protocol, most, seed, wishes.return_candidates)

    async def feedback(self, body: Feedback) -> dict[str, Any]:
        """Take whether an answer was right."""
        self.watch.feedback(body.id, body.correct)
        return {"id": body.id, "object": "catto.feedback"}

    async def models(self) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "catto"}]}

    async def health(self) -> dict[str, Any]:
        """Say that the gateway runs; the upstream is asked at the start only."""
        return {"status": "ok", "model": self.model}

    async def metrics(self) -> str:
        """Counts since the start, and how calibrated the last graded answers are."""
        waiting = max(0, self._inside - self.limits.concurrency)
        now = {"catto_in_flight": self._inside - waiting, "catto_queued": waiting}
        return self.watch.text(**now, catto_upstream_retries_total=self.answerer.engine.retries)


_DESCRIBED: dict[int | str, dict[str, Any]] = {
    code: {"description": HTTPStatus(code).phrase} for code in (400, 401, 404, 408, 413, 429, 502, 503, 504)
}


def run(gateway: Gateway, host: str, port: int) -> None:
    """Serve until a signal comes, then finish what is in flight."""
    logging.basicConfig(level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    ending = int(gateway.limits.deadline)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": ending}
    uvicorn.run(gateway.app(), host=host, port=port, http=PatientProtocol, **options)


def _completion(head: dict[str, Any], answered: Answered) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": answered.finish_reason, "logprobs": None}
    return {
        **head,
        "object": "chat.completion",
        "choices": [choice],
        "usage": _usage(answered),
        "catto": answered.catto,
    }


def _usage(answered: Answered) -> dict[str, int]:
    prompt, completion = answered.prompt_tokens, answered.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chunks(head: dict[str, Any], answered: Answered, usage: bool) -> Iterator[str]:
    """The chosen answer word by word; the last chunk has the `catto` object."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": word}, None) for word in re.findall(r"\s*\S+|\s+$", answered.text)]
    deltas += [({}, answered.finish_reason)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
        for delta, reason in deltas
    ]
    chunks[-1]["catto"] = answered.catto
    if usage:
        chunks.append({"choices": [], "usage": _usage(answered), "catto": answered.catto})
    for chunk in chunks:
        yield f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **chunk}, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


async def _invalid(_: Request, problem: Any) -> Response:
    """A body that is no request: its first problem, without the value, which may be a prompt."""
    first = problem.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    said = "this field is not supported" if first["type"] == "extra_forbidden" else first["msg"]
    return error(400, f"{place}: {said}" if place else said)


async def _failed(_: Request, problem: Any) -> Response:
    if isinstance(problem, FaultError):
        return error(problem.code, f"upstream: {problem.reason}" if problem.code > 500 else problem.reason)
    if isinstance(problem, HTTPException):
        reply = error(problem.status_code, str(problem.detail))
        reply.headers.update(problem.headers or {})  # Allow, with 405
        return reply
    return error(500, "the gateway failed; its log has the traceback")
