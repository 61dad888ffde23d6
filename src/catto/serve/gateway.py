"""The web application of `catto serve`: OpenAI-compatible routes, an API key, limits, metrics and a feedback log.

`RequestGuard` checks each request (key, size, request id), and `Answerer` answers it. A full gateway immediately
replies with status 429. If a client disconnects, its upstream requests are cancelled. Prompts, responses and keys are
never logged. TLS, slow clients and rate limits are left to a reverse proxy in front of the gateway.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from catto.engines.server import FaultError
from catto.errors import shorten_text
from catto.metrics.selection import RULES
from catto.records import Option, Protocol
from catto.serve.answering import Answerer, AnswerRequest, GatewayAnswer, ServedQuestion, run_in_thread
from catto.serve.feedback_log import FeedbackLog
from catto.serve.metrics import GatewayMetrics
from catto.serve.promise import make_promise, withdraw_promise
from catto.serve.requests import ChatRequest, Feedback

logger = logging.getLogger("catto.serve")

# Limits the request line and the headers, which are read into memory before the key is checked.
MAX_HEAD_BYTES = 32 * 1024
DEFAULT_MAX_TOKENS = 512
# These paths need no key.
OPEN_PATHS = ("/health", "/metrics")
ERROR_STATUSES = (400, 401, 404, 413, 429, 502, 503, 504)
CLIENT_CLOSED_REQUEST = 499
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# Status -> type and code of an error in OpenAI's format.
_ERROR_TYPES: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "gateway_full"),
    500: ("internal_error", None),
}
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Limits:
    """Limits of the gateway.

    Attributes:
        concurrency: Maximum number of chat requests in progress; further ones get status 429.
        max_k: Maximum number of samples per request.
        max_tokens: Maximum number of generated tokens per sample.
        max_bytes: Maximum length of a request body.
        max_option_characters: Maximum length of a label, and of the text of an option.
        deadline: Maximum number of seconds for an answer.
        key: The API key that clients must send; None means no authentication.
    """

    concurrency: int = 64
    max_k: int = 16
    max_tokens: int = 4096
    max_bytes: int = 1_000_000
    max_option_characters: int = 4000
    deadline: float = 120.0
    key: str | None = None


class RequestGuard:
    """ASGI middleware that checks the key and the size of the body, and counts and logs every reply.

    Args:
        app: The application behind it.
        limits: The limits, of which it uses key and body size.
        metrics: The metrics, in which it counts replies.
    """

    def __init__(self, app: Any, limits: Limits, metrics: GatewayMetrics) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request of a client, with the three arguments of an ASGI application."""
        if scope["type"] != "http":  # the server starts or stops the application
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = dict(scope["headers"])
        # Clients may repeat their own request ids, so feedback refers to an id that the gateway chooses. `answer_chat`
        # finds it in `request.state`.
        answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["id"] = answer_id
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):  # the client sent none, or one that may not be logged
            request_id = answer_id

        async def send_and_log(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                self._log_reply(request_id, scope["path"], message["status"], time.monotonic() - started)
            await send(message)

        application = self.app
        needs_key = scope["path"] not in OPEN_PATHS
        if needs_key and not self._has_key(headers):
            application = make_error(401, "missing or wrong API key", _CLOSE)  # a response is an ASGI application too
        announced_bytes = int(headers.get(b"content-length", 0))  # h11 has checked that it is a number
        await application(scope, self._limit_body(receive, announced_bytes), send_and_log)

    def _log_reply(self, request_id: str, path: str, status: int, seconds: float) -> None:
        self.metrics.count_reply(status, seconds)
        # A path may contain line breaks, which could forge lines in the log.
        path_on_one_line = shorten_text(path, 80)
        logger.info("%s %s %s %.0f ms", request_id, path_on_one_line, status, 1000 * seconds)

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        if self.limits.key is None:
            return True
        scheme, _, sent_key = headers.get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"
        return is_bearer and hmac.compare_digest(sent_key, self.limits.key.encode())

    def _limit_body(self, receive: Any, announced_bytes: int) -> Any:
        """Wrap `receive` so that a body above the limit raises HTTPException with status 413.

        The announced length is checked too, so that a body that is too long is refused at its first part. A client need
        not announce the length, so the received bytes are counted as well.

        Args:
            receive: The ASGI function that returns the next part of the body.
            announced_bytes: The length that the headers announce; 0 if they announce none.

        Returns:
            The wrapped function.
        """
        limit = self.limits.max_bytes
        received_bytes = 0

        async def receive_limited() -> Any:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if max(announced_bytes, received_bytes) > limit:
                raise HTTPException(413, f"the body is longer than {limit:,} bytes", _CLOSE)
            return message

        return receive_limited


class Gateway:
    """The routes of the gateway.

    Args:
        answerer: Answers requests by asking the upstream.
        labels: The labels for requests that have no options of their own.
        protocol: How answers are obtained, unless a request overrides it.
        limits: The limits.
        log: Path of the feedback log; None writes no file.
    """

    def __init__(
        self, answerer: Answerer, labels: tuple[str, ...], protocol: Protocol, limits: Limits, log: Path | None = None
    ) -> None:
        self.answerer = answerer
        self.labels = labels
        self.protocol = protocol
        self.limits = limits
        self.model = answerer.engine.model
        calibrator = answerer.fitted.digest if answerer.fitted else None
        promise = make_promise(answerer.fitted, answerer.threshold)
        self.log = FeedbackLog(log, self.model, calibrator, promise)
        self.metrics = GatewayMetrics(self.log, answerer.engine)
        self._in_flight = 0

    def make_app(self) -> FastAPI:
        """Build the application. It closes the HTTP client of the upstream when it shuts down."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self.answerer.client:
                yield

        app = FastAPI(title="catto serve", lifespan=lifespan, docs_url=None, redoc_url=None)
        # These describe the replies in the API schema at /openapi.json.
        error_replies: dict[int | str, Any] = {}
        for status in ERROR_STATUSES:
            error_replies[status] = {"description": HTTPStatus(status).phrase}
        chat_replies = {200: {"content": {"text/event-stream": {}}}, **error_replies}
        app.post("/v1/chat/completions", responses=chat_replies, response_model=None)(self.answer_chat)
        app.post("/v1/feedback", responses=error_replies)(self.take_feedback)
        app.get("/v1/models", responses=error_replies)(self.list_models)
        app.get("/health")(self.report_health)
        app.get("/metrics", response_class=PlainTextResponse)(self.show_metrics)
        for error_class in (RequestValidationError, HTTPException, FaultError, Exception):
            app.add_exception_handler(error_class, _handle_error)
        app.add_middleware(RequestGuard, limits=self.limits, metrics=self.metrics)
        return app

    async def answer_chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a chat request with a confidence, or abstain."""
        answer_id = str(request.state.id)  # set by `RequestGuard`
        client_request = self._read_request(answer_id, body)
        if self._in_flight >= self.limits.concurrency:
            raise HTTPException(429, "the gateway is full, try again later", {"Retry-After": "1"})
        self._in_flight += 1
        self.metrics.in_flight.set(self._in_flight)
        try:
            answer = await self._answer_unless_closed(client_request, request)
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.set(self._in_flight)
        if answer is None:  # nobody receives this response; its status is counted and logged
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if self.log.alarm.is_raised:  # feedback has shown more errors than promised
            answer = answer._replace(catto=withdraw_promise(answer.catto))
        self.metrics.count_answer(answer.catto)
        self.log.add_answer(answer_id, answer.catto, client_request.protocol)
        head = {"id": answer_id, "created": int(time.time()), "model": self.model}
        if not body.stream:
            return JSONResponse(_render_completion(head, answer))
        include_usage = (body.stream_options or {}).get("include_usage", False)
        # In a thread, since a long text may have tens of thousands of words, and each becomes an event.
        events = await run_in_thread(_render_events, head, answer, include_usage)
        return Response(events, media_type="text/event-stream")

    async def _answer_unless_closed(self, client_request: AnswerRequest, request: Request) -> GatewayAnswer | None:
        """Answer within the deadline; return None if the client disconnects, which cancels the upstream requests."""
        work = asyncio.create_task(self._answer_in_time(client_request))
        # The body has been read, so the next message can only be that the client has disconnected.
        disconnect = asyncio.create_task(request.receive())
        disconnect.add_done_callback(lambda _: work.cancel())
        try:
            return await work
        except asyncio.CancelledError:
            if disconnect.done():
                return None
            raise
        finally:
            disconnect.cancel()

    async def _answer_in_time(self, client_request: AnswerRequest) -> GatewayAnswer:
        try:
            async with asyncio.timeout(self.limits.deadline):
                return await self.answerer.answer(client_request)
        except TimeoutError:
            raise FaultError(f"no answer within {self.limits.deadline:g} s", is_retryable=True, code=504) from None

    def _read_request(self, answer_id: str, body: ChatRequest) -> AnswerRequest:
        """Check a request and fill in the defaults.

        Args:
            answer_id: Id of the answer, which also identifies its question.
            body: The body of the request.

        Raises:
            HTTPException: The request cannot be served.
        """
        if body.model != self.model:
            raise HTTPException(404, f"model {body.model!r} is not served; the served model is {self.model!r}")
        protocol = self._read_protocol(body)
        default_max_tokens = min(DEFAULT_MAX_TOKENS, self.limits.max_tokens)
        # `max_completion_tokens` is OpenAI's newer name, so it takes precedence.
        max_tokens = body.max_completion_tokens or body.max_tokens or default_max_tokens
        if max_tokens > self.limits.max_tokens:
            raise HTTPException(400, f"max_tokens: at most {self.limits.max_tokens}")
        seed = body.seed
        if seed is None:
            seed = secrets.randbits(31)  # repeated requests get different samples
        options = self._read_options(body)
        # Calibrator and threshold were not fitted on answers with such labels, so no guarantee covers them.
        has_other_labels = any(option.label not in self.labels for option in options)
        return AnswerRequest(
            question=ServedQuestion(answer_id, options),
            messages=tuple(body.messages),
            protocol=protocol,
            max_tokens=max_tokens,
            seed=seed,
            return_candidates=body.catto.return_candidates,
            has_other_labels=has_other_labels,
        )

    def _read_protocol(self, body: ChatRequest) -> Protocol:
        """Return the gateway's protocol, with the changes that the request asks for."""
        requested = {"k": body.catto.k, "rule": body.catto.rule, "temperature": body.temperature}
        changes = {name: value for name, value in requested.items() if value is not None}
        protocol = self.protocol.model_copy(update=changes)
        if protocol.rule not in RULES:
            raise HTTPException(400, f"catto.rule: expected one of {', '.join(RULES)}")
        if protocol.k > self.limits.max_k:
            raise HTTPException(400, f"catto.k: at most {self.limits.max_k}")
        if protocol.k > 1 and protocol.temperature == 0:
            raise HTTPException(400, f"{protocol.k} samples at temperature 0 are the same: raise it or set k = 1")
        return protocol

    def _read_options(self, body: ChatRequest) -> tuple[Option, ...]:
        """Return the request's options, or the labels of the task."""
        if body.catto.options and not self.labels:
            raise HTTPException(400, "catto.options: the served task has no options")
        texts = body.catto.options or dict.fromkeys(self.labels, "")
        limit = self.limits.max_option_characters
        options = []
        for label, text in texts.items():
            if max(len(label), len(text)) > limit:
                allowed = f"a label or text has at most {limit:,} characters"
                raise HTTPException(400, f"catto.options: {allowed}; leave a longer text empty")
            options.append(Option(label=label, text=text))
        return tuple(options)

    async def take_feedback(self, body: Feedback) -> dict[str, Any]:
        """Record whether an answer was right."""
        if not self.log.add_feedback(body.id, body.correct):
            raise HTTPException(404, "no answer with this id is waiting for feedback")
        return {"id": body.id, "object": "catto.feedback"}

    async def list_models(self) -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "catto"}]}

    async def report_health(self) -> dict[str, Any]:
        """Report that the gateway is running. The upstream is checked only at startup."""
        return {"status": "ok", "model": self.model}

    async def show_metrics(self) -> str:
        """Show the counts since startup and the calibration of the last graded answers."""
        return self.metrics.render_text()


def server_options(limits: Limits) -> dict[str, Any]:
    """Return uvicorn's options. The parser is h11 because httptools, the alternative, does not limit header size."""
    return {
        "http": "h11",
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": int(limits.deadline),
    }


def run_gateway(gateway: Gateway, host: str, port: int) -> None:
    """Serve until a signal arrives, then finish the requests in progress."""
    logging.basicConfig(level=logging.WARNING)
    logger.setLevel(logging.INFO)
    uvicorn.run(gateway.make_app(), host=host, port=port, **server_options(gateway.limits))


def _render_completion(head: dict[str, Any], answer: GatewayAnswer) -> dict[str, Any]:
    """Render an answer as a chat completion.

    Args:
        head: The fields `id`, `created` and `model`.
        answer: The answer.
    """
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _render_logprobs(answer),
    }
    return {
        **head,
        "object": "chat.completion",
        "choices": [choice],
        "usage": answer.usage,
        "catto": answer.catto,
    }


def _render_logprobs(answer: GatewayAnswer) -> dict[str, Any]:
    """Put the `catto` object into the log-probabilities of a choice: LangChain keeps these and drops unknown fields."""
    return {"content": None, "refusal": None, "catto": answer.catto}


def _render_events(head: dict[str, Any], answer: GatewayAnswer, include_usage: bool) -> str:
    """Render an answer as OpenAI's server-sent events, word by word.

    Args:
        head: The fields `id`, `created` and `model` of every chunk.
        answer: The answer. Its `catto` object is in the chunk with the finish reason, and in that with the usage.
        include_usage: Whether a last chunk without text reports the token counts.

    Returns:
        The text of all events.
    """
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
    # Each word with the white space before it, then the white space at the end of the text.
    for word in re.findall(r"\s*\S+|\s+$", answer.text):
        deltas.append({"content": word})
    deltas.append({})  # of the chunk with the finish reason
    chunks: list[dict[str, Any]] = []
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        chunks.append({"choices": [choice]})
    final_chunk = chunks[-1]
    final_choice = final_chunk["choices"][0]
    final_choice["finish_reason"] = answer.finish_reason
    final_choice["logprobs"] = _render_logprobs(answer)
    final_chunk["catto"] = answer.catto
    if include_usage:
        chunks.append({"choices": [], "usage": answer.usage, "catto": answer.catto})
    events = []
    for chunk in chunks:
        line = json.dumps({**head, "object": "chat.completion.chunk", **chunk})
        events.append(f"data: {line}\n\n")
    events.append("data: [DONE]\n\n")
    return "".join(events)


def make_error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Make an error reply in OpenAI's format."""
    default_type = "upstream_error" if status > 500 else "invalid_request_error"
    error_type, code = _ERROR_TYPES.get(status, (default_type, None))
    error = {"message": shorten_text(message), "type": error_type, "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


async def _handle_error(_: Request, error: Any) -> Response:
    if isinstance(error, FaultError):
        origin = "upstream: " if error.code > 500 else ""
        return make_error(error.code, origin + error.reason)
    if isinstance(error, HTTPException):
        return make_error(error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return make_error(400, _describe_invalid_body(error))
    return make_error(500, "the gateway failed; its log has the traceback")


def _describe_invalid_body(error: RequestValidationError) -> str:
    """Describe the first problem of a body, without the offending value, which may be a prompt."""
    first = error.errors()[0]
    location = first["loc"]
    if first["type"] == "json_invalid" or location == ("body",):
        return "expected a JSON object, with Content-Type: application/json"
    # pydantic appends "[key]" to the location if the key of a mapping is wrong, and not its value.
    names = [str(part) for part in location if part not in ("body", "[key]")]
    is_unknown_field = first["type"] == "extra_forbidden" or location[-1] == "[key]"
    problem = "this field is not supported" if is_unknown_field else str(first["msg"])
    if not names:
        return problem
    return f"{'.'.join(names)}: {problem}"
