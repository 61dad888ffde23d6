"""Any OpenAI-compatible server as an engine: vLLM, SGLang, DeepSeek, OpenAI, ...

Every response is a request of its own, with its own temperature and seed, so no server needs to know `n`.
`stop` is applied here, to the finished text: servers drop the stop text, and some look for it in the reasoning too.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import random
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx
from pydantic import ValidationError

from catto import __version__
from catto.engines.base import Engine, Generation, Request
from catto.engines.locations import model_name, server_address
from catto.engines.replies import (
    ModelList,
    Reply,
    ServerError,
    clean_message,
    cut_after_stop,
    error_message,
    read_retry_after,
)
from catto.errors import first_problem, shorten_text
from catto.records import Key, Message, Refusal

FIRST_DELAY, LONGEST_DELAY, LONGEST_WAIT = 0.5, 8.0, 120.0
# Seconds to cancel the requests in flight when a caller stops.
LONGEST_CLOSING = 5.0
# So many requests in a row that run out of retries stop a run.
IN_A_ROW = 20
# Until the server has replied once, connections are retried for so many seconds: a dead address is reported within 5.
STARTING, CONNECTING = 1.0, 4.0
# 32,000 tokens with 20 candidates each are some 60 MB of JSON.
MOST_BYTES = 256 * 2**20
# What every server gives. Of one token llama.cpp gives as many candidates as are asked for (its n_probs), and vLLM as
# many as its --max-logprobs allows.
MOST_TOPS, MORE_TOPS, FEWER_TOPS = 20, 1000, 5
PROBE_RETRIES = 2
# At this temperature log-probabilities that are scaled by it lie twice as far apart, others as before up to noise.
COLD, NOISE = 0.5, 0.2
SCALED = "the server scales log-probabilities by the temperature, so requests are answered at temperature 0 and 1 only"
# What vLLM and SGLang call it; other servers refuse it or ignore it, which `ServerEngine.probe` finds out.
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}

AGAIN = {408, 409, 425, 429}
# The whole server is at fault, or the account, and not the one request.
OF_ALL = {401, 402, 407, 429, 502, 503, 504}
_FILTERED = re.compile(r"moderat|flagged|content.?(filter|polic|manag)|safety", re.IGNORECASE)
_MODEL = re.compile(r"model|deployment", re.IGNORECASE)
_UNREACHED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")

T = TypeVar("T")


class FaultError(Exception):
    """A try that failed: why, whether another one may help and after how long, and whether all requests would fail.

    `code` is the HTTP status with which a gateway passes it on: 400 the request itself was refused, 502 the reply is
    unusable, 503 no server, 504 too late.
    """

    def __init__(
        self, reason: str, *, again: bool, of_all: bool = False, wait: float | None = None, code: int = 502
    ) -> None:
        super().__init__()  # a traceback of it shows no reason, which `ask` has yet to clean
        self.reason, self.again, self.of_all, self.wait, self.code = reason, again, of_all, wait, code


class ServerEngine(Engine):
    """The generating half of the `Engine` protocol over HTTP.

    `timeout` is the longest wait for a byte, `deadline` for a whole reply, its retries included. At most `max_retries`
    follow 408, 409, 425, 429 with its Retry-After, 5xx, broken connections and unusable replies; `retries` counts them.
    `top_logprobs` (at most 20) asks for the best candidates of every token. A user and password in `base_url` are sent
    as basic authentication and shown nowhere. `extra_body` is sent with every request; no message shows a text of
    `hidden`, such as a key in that body.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        timeout: float = 600.0,
        deadline: float = 1800.0,
        max_retries: int = 8,
        top_logprobs: int = 0,
        extra_body: Mapping[str, Any] | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        if not 0 <= top_logprobs <= MOST_TOPS:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to {MOST_TOPS}")
        if concurrency < 1 or max_retries < 0 or timeout <= 0 or deadline <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0, timeout > 0 and deadline > 0")
        # What changes no reply is not part of the engine's name: the client's
        # version and how many requests are sent at once. `batch_size` keeps its default.
        self.name = "server"
        # the model's name as it is stored and shown, and the server's own, which may be a path
        self.model, self.served, self.concurrency = model_name(model), model, concurrency
        # candidates after a begun answer, whether the server continues one, and whether the temperature scales
        # log-probabilities: `probe` finds out
        self.more_tops, self.continues, self.scales = top_logprobs or MOST_TOPS, False, False
        self.base_url, login = server_address(base_url)
        try:  # parsed once: every request would take 0.1 ms for it
            self._chat = httpx.URL(f"{self.base_url}/chat/completions")
        except httpx.InvalidURL:
            raise ServerError(f"base_url: {urlsplit(self.base_url).hostname} is no host") from None
        self._key = os.environ.get(api_key_env, "").strip()
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise ServerError(f"environment variable {api_key_env}: not a key that an HTTP header can carry")
        basic = base64.b64encode(":".join(login).encode()).decode() if login else ""
        # No message may show them; the longest first, since one may be part of another.
        self._secrets = sorted((self._key, basic, *(login or ()), *hidden), key=len, reverse=True)
        headers = {"User-Agent": f"catto/{__version__}", "Content-Type": "application/json"}
        if basic or self._key:
            headers["Authorization"] = f"Basic {basic}" if basic else f"Bearer {self._key}"
        self._http: Any = {"headers": headers, "follow_redirects": True}
        self.api_key_env, self.timeout, self.deadline = api_key_env, timeout, deadline
        self.max_retries, self.retries = max_retries, 0
        self.top_logprobs, self.extra_body = top_logprobs, dict(extra_body or {})
        self._warned = self._reached = False
        self._in_a_row = 0  # requests that ran out of retries with no reply between them

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive, at most `concurrency` at a time.

        A request that cannot be answered, but does not speak against the others, yields a `Refusal`. A fault of the
        server or of the settings, or 20 requests in a row that run out of retries, stops the run; what is in flight
        is still awaited and yielded, then a `ServerError` is raised. A deque is emptied as its requests are sent, and
        may be given more of them meanwhile.
        """
        todo = requests if isinstance(requests, deque) else deque(one for one in requests if one.key not in done)
        for outcome in in_thread(self._arriving(todo)):
            yield outcome
            if isinstance(outcome, Generation) and not outcome.temperature_acts and not self._warned:
                self._warned = True
                name = shorten_text(outcome.model, 80)  # the server chose it
                warnings.warn(f"{name} thinks before it answers: the temperature does not act", stacklevel=2)

    async def _arriving(self, todo: deque[Request]) -> AsyncGenerator[Generation | Refusal, None]:
        """Yield outcomes as they arrive. The next request is sent once an outcome was taken: a caller that stops is
        never some paid requests behind.
        """
        flying: dict[asyncio.Task[Generation], Request] = {}
        failure: ServerError | None = None
        async with self.client() as client:
            while True:
                while failure is None and len(flying) < self.concurrency and todo:
                    request = todo.popleft()
                    flying[task := asyncio.create_task(self.ask(client, request))] = request
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as seen
                if not flying:
                    break
                arrived, _ = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
                task = arrived.pop()
                request = flying.pop(task)
                outcome: Generation | Refusal
                try:
                    outcome, self._in_a_row = task.result(), 0
                except FaultError as fault:
                    self._in_a_row = self._in_a_row + 1 if fault.again else 0
                    if fault.of_all or self._in_a_row >= IN_A_ROW:
                        failure = failure or ServerError(f"{self.base_url} {request.name}: {fault.reason}")
                        continue
                    outcome = Refusal(refused=fault.reason, question=request.question, sample=request.sample)
                yield outcome
        if failure is not None:
            raise failure

    def probe(self, warn: Callable[[str], object] = warnings.warn) -> None:
        """Find out by a few one-token requests what the server can do, and `warn` of what it cannot.

        One that cannot answer or gives no log-probabilities raises ServerError. Whether it continues a final message
        shows in the prompt's length: twice the text then costs twice the tokens, while a server that ignores the wish
        adds the end of a turn. If a line break costs nothing, the chat template trims messages: a label after
        `<answer>` and a line break would be asked for in another place.
        """

        def ask(text: str, tops: int, temperature: float = 0.0) -> Generation | Refusal:
            chat = [Message(role="user", content="Count.")]
            chat += [Message(role="assistant", content=text)] if text else []
            twin = copy.copy(self)
            twin.top_logprobs, twin.more_tops, twin.scales = tops, tops, False
            twin.max_retries = min(self.max_retries, PROBE_RETRIES)
            how: Any = {"max_tokens": 1, "temperature": temperature, "begun": bool(text)}
            return next(iter(twin.generate([Request(question="probe", messages=tuple(chat), **how)])))

        plain = ask("", 0)
        if isinstance(plain, Refusal):
            raise ServerError(f"{self.base_url}: a first request was refused: {plain.refused}")
        for asked in (MORE_TOPS, self.top_logprobs or MOST_TOPS, FEWER_TOPS):
            if isinstance(known := ask("", asked), Generation):
                break
        warm, cold = (
            {token: value for _, tops in getattr(reply, "tops", None) or () for token, value in tops.items()}
            for reply in (known, ask("", asked, COLD))
        )
        if not warm:
            raise ServerError(f"{self.base_url}: no log-probabilities: {getattr(known, 'refused', 'none came')}")
        tops = min(len(warm), asked)  # a drawn token outside the best is counted too
        self.more_tops = min(max(tops, self.top_logprobs or MOST_TOPS), asked)
        self.top_logprobs = min(self.top_logprobs, asked)
        if tops < 2:
            warn(f"{self.model}: top_logprobs gives {tops} candidates: other labels may be unknown")
        both = [[shown[token] for token in warm.keys() & cold.keys()] or [0.0] for shown in (warm, cold)]
        spread, spread_cold = (max(values) - min(values) for values in both)
        self.scales = spread_cold > 1.5 * spread + NOISE
        if self.scales:
            warn(f"{self.model}: {SCALED}")
        replies = [plain, *(ask(text, 0) for text in ("A A A A", "A A A A A A A A", "A A A A\n"))]
        start, once, twice, broken = (getattr(reply, "prompt_tokens", None) or 0 for reply in replies)
        goes_on = min(start, once) > 0 and 0 < twice - once >= once - start
        self.continues = goes_on and once < broken
        if not self.continues:
            what = "its chat template trims the message" if goes_on else "the server ignores or refuses the wish"
            warn(f"{self.model}: cannot continue a partial message ({what}), so unanswered responses stay unanswered")

    def find_model(self) -> None:
        """Take the one model that the server lists; ServerError where there are others, or none."""
        try:
            reply = httpx.get(f"{self.base_url}/models", timeout=CONNECTING, verify=_certificates(), **self._http)
            if not reply.is_success:
                said = error_message(reply.content) or reply.reason_phrase or "no message"
                raise ValueError(f"{reply.status_code}: {said}")
            names = [model.id for model in ModelList.model_validate_json(reply.content).data]
        except (httpx.HTTPError, ImportError, OSError, ValueError) as error:
            reason = clean_message(
                first_problem(error) if isinstance(error, ValidationError) else str(error), self._secrets
            )
            what = "no connection: {}" if type(error).__name__ in _UNREACHED else "it lists no models: {}; name one"
            raise ServerError(f"{self.base_url}: {what.format(reason)}") from None
        if len(names) != 1:
            raise ServerError(f"{self.base_url}: serves {', '.join(names[:5]) or 'no model'}; name one")
        self.model, self.served = model_name(names[0]), names[0]

    def client(self) -> httpx.AsyncClient:
        """A client for `ask`, to be closed by the caller."""
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECTING))
        # Idle connections are left before vLLM's own server closes them, after 5 s.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency, keepalive_expiry=4.0)
        try:
            return httpx.AsyncClient(timeout=timeout, limits=limits, verify=_certificates(), **self._http)
        except (ImportError, OSError) as error:  # a proxy that needs a further package; SSL_CERT_FILE
            raise ServerError(f"{self.base_url}: {clean_message(str(error), self._secrets)}") from None

    async def ask(self, client: httpx.AsyncClient, request: Request) -> Generation:
        """Ask until there is a usable reply; FaultError where no retry is left or the deadline is over.

        Its reason is one line without secrets or prompt.
        """
        started, tries = time.monotonic(), 0
        fault: FaultError | None = None
        try:
            async with asyncio.timeout(self.deadline):
                while True:
                    fault, tries = None, tries + 1
                    try:
                        generation = await self._post(client, request, tries)
                        return generation.model_copy(update={"seconds": time.monotonic() - started})
                    except FaultError as error:
                        fault = error
                    unreached = fault.of_all and not self._reached and time.monotonic() - started > STARTING
                    if not fault.again or tries > self.max_retries or unreached:
                        break
                    self.retries += 1
                    await asyncio.sleep(back_off(tries) if fault.wait is None else fault.wait)
        except TimeoutError:
            if fault is None or not fault.of_all:
                fault = FaultError(f"no whole reply within {self.deadline:g} s, try {tries}", again=True, code=504)
        fault.reason = clean_message(fault.reason, self._secrets, (turn.content for turn in request.messages))
        raise fault from None

    async def _post(self, client: httpx.AsyncClient, request: Request, tries: int) -> Generation:
        """Post once; whatever goes wrong is a `FaultError`. A reply emptied by a filter is not requested again."""
        messages = [message.model_dump() for message in request.messages]
        body: dict[str, Any] = {name: getattr(request, name) for name in ("temperature", "seed", "max_tokens")}
        body |= {"model": self.served, "messages": messages}
        if wanted := self.more_tops if request.begun else self.top_logprobs:
            if self.scales and request.temperature not in (0, 1):
                raise FaultError(SCALED, again=False, of_all=True, code=400)
            body |= {"logprobs": True, "top_logprobs": wanted}
        body |= self.extra_body | (CONTINUE if request.begun else {})
        content = bytearray()
        try:
            async with client.stream("POST", self._chat, content=json.dumps(body)) as answer:
                self._reached = True
                async for block in answer.aiter_bytes():
                    content += block
                    if len(content) > MOST_BYTES:
                        raise FaultError(f"the reply is longer than {MOST_BYTES // 2**20} MB", again=False)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._connection_fault(error, tries) from None
        if not answer.is_success:
            # Secrets go before anything is cut, since half of a key would not be recognised.
            page = content.decode(errors="replace")
            said = error_message(content) or shorten_text(clean_message(page, self._secrets)) or "no message"
            raise self._status_fault(answer.status_code, answer.headers, said, tries)
        # A long reply takes a tenth of a second to read, in which a gateway's event loop would serve nobody.
        return await asyncio.to_thread(self._read_content, bytes(content), request, tries)

    def _read_content(self, content: bytes, request: Request, tries: int) -> Generation:
        """Read a reply with status 200; FaultError where it is no usable completion."""
        try:
            reply = Reply.model_validate_json(content)
        except ValidationError as error:
            what = error_message(content) or ("HTML" if content.lstrip()[:1] == b"<" else first_problem(error))
            raise FaultError(f"unusable reply in try {tries}: {what}", again=True) from None
        choice, message = reply.choices[0], reply.choices[0].message
        if choice.finish_reason == "content_filter" and not message.text:
            raise FaultError("the reply was withheld: finish_reason content_filter", again=False)
        # A thinking model that ran out of tokens has reasoning and no content: a response, though without an answer.
        if message.content is None and message.refusal is None and message.reasoned is None:
            raise FaultError(f"unusable reply in try {tries}: neither content nor reasoning", again=True)
        text, tops, mean = cut_after_stop(choice, request.stop)
        model = model_name(reply.model or self.served)
        # DeepSeek's own service takes a temperature in thinking mode and ignores it. It is known by its host, or behind
        # a proxy by the one model name that only thinks; the same weights on vLLM or SGLang heed the temperature.
        host = f".{urlsplit(self.base_url).hostname}"
        ignores = message.reasoned and (host.endswith(".deepseek.com") or model == "deepseek-reasoner")
        return Generation(
            question=request.question,
            sample=request.sample,
            text=text,
            reasoning=message.reasoned,
            tops=tops,
            mean_logprob=mean,
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.completion_tokens,
            finish_reason=choice.finish_reason,
            model=model,
            temperature_acts=not ignores,
        )

    def _status_fault(self, status: int, headers: Mapping[str, str], said: str, tries: int) -> FaultError:
        """What an HTTP error says of the request and of the server."""
        if status == 401:
            key = f"the key in environment variable {self.api_key_env}"
            return FaultError(f"401: {key} {'was refused' if self._key else 'is not set'}", again=False, of_all=True)
        wait, header = read_retry_after(headers), headers.get("retry-after")
        too_long = wait is not None and wait > LONGEST_WAIT
        forbidden = status == 403 and not _FILTERED.search(said)
        unknown = status == 404 and _MODEL.search(said) is not None  # a model; a 404 of one request does not name it
        of_all = status in OF_ALL or too_long or forbidden or unknown
        again = (status in AGAIN or status >= 500) and not too_long
        reason = f"{status} in try {tries}{f', Retry-After {header}' if header else ''}: {said}"
        code = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503, 408: 504, 504: 504}.get(status, 502)
        return FaultError(reason, again=again, of_all=of_all, wait=wait, code=code)

    def _connection_fault(self, cause: BaseException, tries: int) -> FaultError:
        """What a failed connection says; before the first reply of all, it says that there is no server."""
        kind, why = type(cause).__name__, f"{cause or type(cause).__name__}"
        if kind == "TooManyRedirects":
            return FaultError(f"redirected without end in try {tries}", again=False, of_all=True)
        if kind in _UNREACHED or not (self._reached or isinstance(cause, httpx.ReadTimeout)):
            return FaultError(f"no connection in try {tries}: {why}", again=True, of_all=True, code=503)
        if isinstance(cause, httpx.TimeoutException):
            return FaultError(f"nothing came for {self.timeout:g} s in try {tries}", again=True, code=504)
        return FaultError(f"the connection broke in try {tries}: {why}", again=True)


# The trusted certificates, read once for all clients: each would take 0.04 s to read them.
_certificates = cache(httpx.create_ssl_context)


def in_thread(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate an async generator on an event loop in a thread of its own.

    The thread lets it work where a loop is already running (a notebook) and while the caller writes. An iterator that
    is dropped cancels what the generator has begun. One that is still open when the interpreter ends is left as it is:
    the thread no longer runs then, and waiting for it would never end.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def step() -> T | None:
        return await anext(stream, None)

    async def close() -> None:
        begun = asyncio.all_tasks() - {asyncio.current_task()}
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await stream.aclose()

    try:
        while (item := asyncio.run_coroutine_threadsafe(step(), loop).result()) is not None:
            yield item
    finally:
        if not sys.is_finalizing():
            closing = asyncio.run_coroutine_threadsafe(close(), loop)
            with suppress(TimeoutError):  # a connection that does not close must not hold the process
                closing.result(LONGEST_CLOSING)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(LONGEST_CLOSING)
            if not thread.is_alive():
                loop.close()


def back_off(retry: int) -> float:
    """Seconds before retry 1, 2, ...: doubling from half a second to eight, less up to a quarter at random."""
    return float(min(FIRST_DELAY * 2 ** (retry - 1), LONGEST_DELAY)) * (1 - 0.25 * random.random())
