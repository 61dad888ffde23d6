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
import os
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from catto.engines.server import FaultError
from catto.errors import shorten_text
from catto.metrics.errors import brier, ece
from catto.metrics.selection import RULES
from catto.records import Message, Option, Protocol, Question, Record
from catto.serve.answering import Answered, Answerer, Asked, run_in_thread

LOG = logging.getLogger("catto.serve")
# Answers that wait for feedback, and graded answers that the rolling numbers are of.
MOST_PENDING, ROLLING = 50_000, 1000
# Seconds for the head of a request, and as many for its body.
SENDING = 10.0
# Bytes of a request line with its headers: they are held before the key is checked.
MOST_HEAD_BYTES = 32 * 1024
# What a client needs no key for.
OPEN_PATHS = ("/health", "/metrics")
LOGGED = ("confidence", "confidence_raw", "label", "source", "k", "rule", "abstained")
BUCKETS = ("0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "30", "60", "120", "+Inf")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "queue_full"),
    500: ("internal_error", None),
}
_CLOSE = {"Connection": "close"}
# What clients send with every request and what asks for nothing.
_NEUTRAL: dict[str, Any] = {"top_p": 1, "logprobs": False, "top_logprobs": 0, "store": False, "tool_choice": "none"}
_NEUTRAL |= {"frequency_penalty": 0, "presence_penalty": 0, "tools": [], "stop": [], "logit_bias": {}, "metadata": {}}
_NEUTRAL |= {"response_format": {"type": "text"}}


@dataclass(frozen=True)
class Limits:
    """What one client, and all together, may ask of the gateway. `key` None: no authentication."""

    concurrency: int = 16
    queue: int = 64
    max_k: int = 16
    max_tokens: int = 4096
    max_bytes: int = 1_000_000
    max_option_characters: int = 4000  # of a label, and of an option's text
    deadline: float = 120.0
    key: str | None = None


class Wishes(Record, strict=True):
    """The `catto` object of a request; `options` are its labels with their texts."""

    k: int | None = Field(default=None, ge=1)
    rule: str | None = None
    return_candidates: bool = False
    options: dict[Annotated[str, Field(min_length=1)], str] | None = Field(default=None, min_length=2, max_length=64)


class ChatRequest(Record, strict=True):
    """A chat completion as far as the gateway serves it; other fields are refused by name."""

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
    catto: Wishes = Wishes()

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """Leave out nulls and neutral values; join messages that come as parts of text."""
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None and value != _NEUTRAL.get(name)}
        if isinstance(messages := fields.get("messages"), list):
            fields["messages"] = [_joined(one) if isinstance(one, dict) else one for one in messages]
        return fields


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message without nulls, and with its content as one text, where it is a list of texts.

    >>> _joined({"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "so?"}]})
    {'role': 'user', 'content': 'Is it so?'}
    """
    message = {name: value for name, value in message.items() if value is not None}
    message |= {"role": "system"} if message.get("role") == "developer" else {}  # its newer name
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return {**message, "content": "".join(whole)} if len(whole) == len(parts) else message


class Feedback(Record, strict=True):
    """Whether the answer of that id was right."""

    id: str
    correct: bool


class LogRow(BaseModel, extra="allow", frozen=True):
    """An answer in the log, with what `LOGGED` names; `correct` once there is feedback."""

    id: str
    confidence: float = Field(ge=0, le=1)
    correct: bool | None = None
    model: str | None = None
    calibrator: str | None = None  # its digest


class Watch:
    """Counts for /metrics, and the answers that feedback completes.

    Answers wait in `<log>.pending.jsonl`; with feedback they are appended to the log, which `catto measure` reads.
    """

    def __init__(self, log: Path | None, model: str, calibrator: str | None) -> None:
        self.log, self.made = log, {"model": model, "calibrator": calibrator}
        self.waiting = log and log.with_name(log.name.removesuffix(".jsonl") + ".pending.jsonl")
        self.counts: Counter[str] = Counter()
        self.pending: OrderedDict[str, str] = OrderedDict()  # as JSON, which takes a fifth of a row's memory
        self.graded: deque[LogRow] = deque(maxlen=ROLLING)
        for row in _rows(self.waiting):
            self._keep(row)
        for row in _rows(self.log):
            self.pending.pop(row.id, None)
            self.graded.append(row)

    def _keep(self, row: LogRow) -> None:
        self.pending[row.id] = row.model_dump_json(exclude_none=True)
        if len(self.pending) > MOST_PENDING:
            self.pending.popitem(last=False)

    def answered(self, name: str, about: Mapping[str, Any]) -> None:
        """Count an answer, and keep it where it has a confidence."""
        self.counts["catto_samples_total"] += about["k"]
        self.counts["catto_abstained_total"] += about["abstained"]
        if about["confidence"] is not None:
            made = {"id": name, "time": int(time.time()), **self.made, **{key: about[key] for key in LOGGED}}
            self._keep(row := LogRow.model_validate(made))
            _append(self.waiting, row)

    def feedback(self, name: str, correct: bool) -> bool:
        """Complete an answer; False where none of this id waits for feedback."""
        waiting = self.pending.pop(name, None)
        if waiting is not None:
            self.graded.append(LogRow.model_validate_json(waiting).model_copy(update={"correct": correct}))
            _append(self.log, self.graded[-1])
        return waiting is not None

    def replied(self, status: int, seconds: float) -> None:
        """Count a request."""
        self.counts[f'catto_requests_total{{status="{status}"}}'] += 1
        for bound in BUCKETS:
            self.counts[f'catto_request_seconds_bucket{{le="{bound}"}}'] += seconds <= float(bound)
        self.counts["catto_request_seconds_sum"] += seconds  # type: ignore[assignment]
        self.counts["catto_request_seconds_count"] += 1

    def rolling(self) -> dict[str, float]:
        """How calibrated this model with this calibrator is, by the last graded answers."""
        rows = [row for row in self.graded if row.model_dump(include={*self.made}) == self.made]
        count, confidence, correct = len(rows), [row.confidence for row in rows], [bool(row.correct) for row in rows]
        if not count:
            return {"catto_feedback_answers": 0}
        return {
            "catto_feedback_answers": count,
            "catto_rolling_confidence": sum(confidence) / count,
            "catto_rolling_accuracy": sum(correct) / count,
            "catto_rolling_ece": ece(confidence, correct),
            "catto_rolling_brier": brier(confidence, correct),
        }


def _rows(path: Path | None) -> Iterator[LogRow]:
    """The rows of a log; a line that is none is skipped, and cut off where it is a last row torn by a power cut."""
    if path is not None and path.is_file():
        with path.open("rb") as file:
            for line in file:
                try:
                    yield LogRow.model_validate_json(line)
                except ValidationError:
                    if b'{"id":'.startswith(line[:6]) and not line.endswith(b"\n"):
                        os.truncate(path, file.tell() - len(line))


def _append(path: Path | None, row: LogRow) -> None:
    """Write a row; a full disk costs the row and not the answer, and leaves no half of a line."""
    if path is None:
        return
    line = row.model_dump_json(exclude_none=True).encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:  # opened anew, since logs are rotated
            size = file.tell()
            file.seek(max(0, size - 1))
            # A last line that was torn must not take this row with it.
            line = line if file.read(1) in (b"", b"\n") else b"\n" + line
            if file.write(line) < len(line):
                file.truncate(size)
                LOG.warning("%s: the disk is full", path)
    except OSError as problem:
        LOG.warning("%s: %s", path, problem.strerror)


def prometheus(values: Mapping[str, float]) -> str:
    """Numbers in Prometheus' text format; the name of a family tells its kind.

    >>> print(prometheus({"a_total{x=\\"1\\"}": 2, "b": 0.5, "a_total{x=\\"2\\"}": 3}), end="")
    # TYPE a_total counter
    a_total{x="1"} 2
    a_total{x="2"} 3
    # TYPE b gauge
    b 0.5
    """

    def family(name: str) -> str:
        return re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)

    lines = []
    for name, members in groupby(sorted(values, key=family), family):
        kind = "counter" if name.endswith("_total") else "histogram" if name.endswith("_seconds") else "gauge"
        lines += [f"# TYPE {name} {kind}", *(f"{member} {values[member]}" for member in members)]
    return "\n".join(lines) + "\n"


class Guard:
    """Refuses before a request is read as JSON, and counts and logs every reply."""

    def __init__(self, app: Any, limits: Limits, watch: Watch) -> None:
        self.app, self.limits, self.watch = app, limits, watch

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request of the ASGI protocol."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = dict(scope["headers"]), time.monotonic()
        wished = headers.get(b"x-request-id", b"").decode("latin-1")
        made = f"chatcmpl-{secrets.token_hex(12)}"  # a client's own may repeat, and feedback would reach another answer
        name = wished if _ID.fullmatch(wished) else made
        scope.setdefault("state", {})["id"] = made

        async def reply(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
                seconds = time.monotonic() - started
                self.watch.replied(message["status"], seconds)
                # A path may hold line breaks, which would forge lines of the log.
                LOG.info("%s %s %s %.0f ms", name, shorten_text(scope["path"], 80), message["status"], 1000 * seconds)
            await send(message)

        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")  # "Bearer", in whatever case
        known = scheme.lower() == b"bearer" and hmac.compare_digest(given, (self.limits.key or "").encode())
        allowed = known or self.limits.key is None or scope["path"] in OPEN_PATHS
        answer = self.app if allowed else error(401, "missing or wrong API key", _CLOSE)
        await answer(scope, self._limited(receive, int(headers.get(b"content-length", 0))), reply)

    def _limited(self, receive: Any, announced: int) -> Any:
        """`receive` with a limit of bytes, and of seconds until the whole body has arrived."""
        most, arrived, end = self.limits.max_bytes, 0, asyncio.get_running_loop().time() + SENDING

        async def received() -> Any:
            nonlocal arrived, end
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {SENDING:g} s", _CLOSE) from None
            arrived += len(message.get("body", b""))
            if max(announced, arrived) > most:
                raise HTTPException(413, f"the body is longer than {most:,} bytes", _CLOSE)
            if not message.get("more_body"):
                end = float("inf")
            return message

        return received


class PatientProtocol(H11Protocol):  # type: ignore[misc]
    """uvicorn's HTTP, except that a connection whose request line and headers take too long is closed.

    It is that of h11, which limits how much of an unfinished head, chunk or trailer is held. httptools, uvicorn's
    other parser, has no such limit.
    """

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
        self.model, fitted = answerer.engine.model, answerer.fitted
        self.watch = Watch(log, self.model, fitted.digest if fitted else None)
        self._places = asyncio.Semaphore(limits.concurrency)
        self._inside = 0

    def app(self) -> FastAPI:
        """The application, which closes the upstream's client at its end."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self.answerer.client:
                yield

        app = FastAPI(title="catto serve", lifespan=lifespan, docs_url=None, redoc_url=None)
        codes = (400, 401, 404, 408, 413, 429, 502, 503, 504)
        errors: dict[int | str, Any] = {code: {"description": HTTPStatus(code).phrase} for code in codes}
        forms = {200: {"content": {"text/event-stream": {}}}, **errors}
        app.post("/v1/chat/completions", responses=forms, response_model=None)(self.chat)
        app.post("/v1/feedback", responses=errors)(self.feedback)
        app.get("/v1/models", responses=errors)(self.models)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        for kind in (RequestValidationError, HTTPException, FaultError, Exception):
            app.add_exception_handler(kind, _failed)
        app.add_middleware(Guard, limits=self.limits, watch=self.watch)
        return app

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer with a confidence, or abstain."""
        asked = self._asked(str(request.state.id), body)
        if self._inside >= self.limits.concurrency + self.limits.queue:
            raise HTTPException(429, "the queue is full, try again later", {"Retry-After": "1"})
        self._inside += 1
        work = asyncio.create_task(self._answer(asked))
        gone = asyncio.create_task(request.receive())  # the body is read: what comes next is that the client left
        gone.add_done_callback(lambda _: work.cancel())
        try:
            answered = await work
        except asyncio.CancelledError:
            if not gone.done():
                raise
            return Response(status_code=499)
        finally:
            self._inside -= 1
            gone.cancel()
        self.watch.answered(asked.question.id, answered.catto)
        head = {"id": asked.question.id, "created": int(time.time()), "model": self.model}
        if body.stream:
            usage = (body.stream_options or {}).get("include_usage", False)
            # A long text has tens of thousands of words, and each is an event.
            events = await run_in_thread(_events, head, answered, usage)
            return Response(events, media_type="text/event-stream")
        return JSONResponse(_completion(head, answered))

    async def _answer(self, asked: Asked) -> Answered:
        try:
            async with asyncio.timeout(self.limits.deadline), self._places:
                return await self.answerer.answer(asked)
        except TimeoutError:
            raise FaultError(f"no answer within {self.limits.deadline:g} s", again=True, code=504) from None

    def _asked(self, name: str, body: ChatRequest) -> Asked:
        """What a request asks for, or the refusal of what cannot be served."""
        wishes, limits = body.catto, self.limits
        changed = {"k": wishes.k, "rule": wishes.rule, "temperature": body.temperature}
        protocol = self.protocol.model_copy(update={key: value for key, value in changed.items() if value is not None})
        most = body.max_completion_tokens or body.max_tokens or min(512, limits.max_tokens)
        if body.model != self.model:
            raise HTTPException(404, f"model {body.model!r} is not served, {self.model!r} is")
        if protocol.rule not in RULES:
            raise HTTPException(400, f"catto.rule: expected one of {', '.join(RULES)}")
        if protocol.k > limits.max_k:
            raise HTTPException(400, f"catto.k: at most {limits.max_k}")
        if protocol.k > 1 and protocol.temperature == 0:
            raise HTTPException(400, f"{protocol.k} samples at temperature 0 are the same: give a temperature or k = 1")
        if most > limits.max_tokens:
            raise HTTPException(400, f"max_tokens: at most {limits.max_tokens}")
        texts = wishes.options or dict.fromkeys(self.labels, "")
        longest = max(len(part) for option in texts.items() for part in option)
        if longest > limits.max_option_characters:
            allowed = f"a label or text has at most {limits.max_option_characters:,} characters"
            raise HTTPException(400, f"catto.options: {allowed}; leave a longer text empty")
        options = tuple(Option(label=label, text=text) for label, text in texts.items())
        question = Question(id=name, task="served", split="test", fields={}, options=options, gold=options[0].label)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        return Asked(
            question=question,
            messages=tuple(body.messages),
            protocol=protocol,
            max_tokens=most,
            seed=seed,
            return_candidates=wishes.return_candidates,
            has_other_labels=not texts.keys() <= set(self.labels),
        )

    async def feedback(self, body: Feedback) -> dict[str, Any]:
        """Take whether an answer was right."""
        if not self.watch.feedback(body.id, body.correct):
            raise HTTPException(404, "no answer of this id waits for feedback")
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
        retries = {"catto_upstream_retries_total": self.answerer.engine.retries}
        return prometheus({**self.watch.counts, **self.watch.rolling(), **now, **retries})


def server_options(limits: Limits) -> dict[str, Any]:
    """How uvicorn serves the gateway."""
    return {
        "http": PatientProtocol,
        "h11_max_incomplete_event_size": MOST_HEAD_BYTES,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": int(limits.deadline),
    }


def run(gateway: Gateway, host: str, port: int) -> None:
    """Serve until a signal comes, then finish what is in flight."""
    logging.basicConfig(level=logging.WARNING)
    LOG.setLevel(logging.INFO)
    uvicorn.run(gateway.app(), host=host, port=port, **server_options(gateway.limits))


def _completion(head: dict[str, Any], answered: Answered) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": answered.finish_reason, "logprobs": None}
    body = {**head, "object": "chat.completion", "choices": [choice]}
    return {**body, "usage": answered.usage, "catto": answered.catto}


def _events(head: dict[str, Any], answered: Answered, usage: bool) -> str:
    """The chosen answer as server-sent events, word by word; the last chunk has the `catto` object."""
    words = re.findall(r"\s*\S+|\s+$", answered.text)
    deltas: list[Any] = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    choices: list[Any] = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    choices[-1]["finish_reason"] = answered.finish_reason
    chunks: list[Any] = [{"choices": [choice]} for choice in choices]
    chunks[-1]["catto"] = answered.catto
    if usage:
        chunks.append({"choices": [], "usage": answered.usage, "catto": answered.catto})
    lines = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error in OpenAI's form."""
    kind, code = _KINDS.get(status, ("upstream_error" if status > 500 else "invalid_request_error", None))
    body = {"error": {"message": shorten_text(message), "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status, headers)


async def _failed(_: Request, problem: Any) -> Response:
    """What was raised, as a reply. Of a body that is no request its first problem, without the value: a prompt."""
    if isinstance(problem, FaultError):
        return error(problem.code, f"upstream: {problem.reason}" if problem.code > 500 else problem.reason)
    if isinstance(problem, HTTPException):
        return error(problem.status_code, str(problem.detail), problem.headers)
    if isinstance(problem, RequestValidationError):
        first = problem.errors()[0]
        if first["type"] == "json_invalid" or first["loc"] == ("body",):
            return error(400, "expected a JSON object, with Content-Type: application/json")
        place = ".".join(str(part) for part in first["loc"] if part not in ("body", "[key]"))
        unknown = first["type"] == "extra_forbidden" or first["loc"][-1] == "[key]"
        said = "this field is not supported" if unknown else first["msg"]
        return error(400, f"{place}: {said}" if place else said)
    return error(500, "the gateway failed; its log has the traceback")
