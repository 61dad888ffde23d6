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
from catto.errors import describe_first_problem, shorten_text
from catto.records import Key, Message, Refusal

# Seconds: before the first and the last retries, and the longest Retry-After that is heeded.
FIRST_DELAY = 0.5
LONGEST_DELAY = 8.0
LONGEST_WAIT = 120.0
# Seconds to cancel the requests in flight when a caller stops.
LONGEST_CLOSING = 5.0
# So many requests in a row that run out of retries stop a run.
IN_A_ROW = 20
# Until the server has replied once, connections are retried for so many seconds: a dead address is reported within 5.
STARTING = 1.0
CONNECTING = 4.0
# 32,000 tokens with 20 candidates each are some 60 MB of JSON.
MOST_BYTES = 256 * 2**20
# What every server gives. Of one token llama.cpp gives as many candidates as are asked for (its n_probs), and vLLM as
# many as its --max-logprobs allows.
MOST_TOPS = 20
MORE_TOPS = 1000
FEWER_TOPS = 5
PROBE_RETRIES = 2
# At this temperature log-probabilities that are scaled by it lie twice as far apart, others as before up to noise.
COLD = 0.5
NOISE = 0.2
SCALED = "the server scales log-probabilities by the temperature, so requests are answered at temperature 0 and 1 only"
# What vLLM and SGLang call it; other servers refuse it or ignore it, which `ServerEngine.probe` finds out.
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}

AGAIN = {408, 409, 425, 429}
# The upstream's status -> the status that a gateway returns; 502 for all others.
GATEWAY_CODES = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503, 408: 504, 504: 504}
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
        super().__init__()  # without the reason: a traceback must not show it before `ask` has cleaned it
        self.reason = reason
        self.again = again
        self.of_all = of_all
        self.wait = wait
        self.code = code


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
        # Nothing that leaves the replies unchanged is part of the name: neither the version nor the concurrency.
        self.name = "server"
        self.model = model_name(model)  # as it is stored and shown
        self.served = model  # the server's own name, which may be a path
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.deadline = deadline
        self.max_retries = max_retries
        self.retries = 0
        self.top_logprobs = top_logprobs
        self.extra_body = dict(extra_body or {})
        # `probe` finds these out: candidates after a begun answer, whether the server continues one, and whether the
        # temperature scales log-probabilities
        self.more_tops = top_logprobs or MOST_TOPS
        self.continues = False
        self.scales = False
        self.base_url, login = server_address(base_url)
        try:  # parsed once: parsing takes 0.1 ms, which every request would pay
            self._chat = httpx.URL(f"{self.base_url}/chat/completions")
        except httpx.InvalidURL:
            raise ServerError(f"base_url: {urlsplit(self.base_url).hostname} is no host") from None
        self._key = _read_key(api_key_env)
        basic = ""
        if login is not None:
            basic = base64.b64encode(":".join(login).encode()).decode()
        # No message may show them. The longest comes first, since one may be part of another.
        self._secrets = sorted((self._key, basic, *(login or ()), *hidden), key=len, reverse=True)
        headers = {"User-Agent": f"catto/{__version__}", "Content-Type": "application/json"}
        if basic:
            headers["Authorization"] = f"Basic {basic}"
        elif self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._http: Any = {"headers": headers, "follow_redirects": True}
        self._has_warned = False
        self._reached = False
        self._exhausted_in_a_row = 0  # requests that ran out of retries with no reply between them

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive, at most `concurrency` at a time.

        A request that cannot be answered, but does not speak against the others, yields a `Refusal`. A fault of the
        server or of the settings, or 20 requests in a row that run out of retries, stops the run; what is in flight
        is still awaited and yielded, then a `ServerError` is raised. A deque is emptied as its requests are sent, and
        may be given more of them meanwhile.
        """
        if isinstance(requests, deque):
            todo = requests
        else:
            todo = deque(request for request in requests if request.key not in done)
        for outcome in in_thread(self._receive_outcomes(todo)):
            yield outcome
            if isinstance(outcome, Generation) and not outcome.temperature_acts and not self._has_warned:
                self._has_warned = True
                name = shorten_text(outcome.model, 80)  # the server chose it
                warnings.warn(f"{name} thinks before it answers: the temperature does not act", stacklevel=2)

    async def _receive_outcomes(self, todo: deque[Request]) -> AsyncGenerator[Generation | Refusal, None]:
        """Yield outcomes as they arrive.

        The next request is sent after an outcome was taken, so a caller that stops has not paid for more.
        """
        in_flight: dict[asyncio.Task[Generation], Request] = {}
        failure: ServerError | None = None
        async with self.client() as client:
            while True:
                while failure is None and len(in_flight) < self.concurrency and todo:
                    request = todo.popleft()
                    task = asyncio.create_task(self.ask(client, request))
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as seen
                    in_flight[task] = request
                if not in_flight:
                    break
                arrived, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                task = arrived.pop()
                request = in_flight.pop(task)
                try:
                    outcome = self._read_outcome(task, request)
                except ServerError as error:
                    failure = failure or error
                    continue
                yield outcome
        if failure is not None:
            raise failure

    def _read_outcome(self, task: asyncio.Task[Generation], request: Request) -> Generation | Refusal:
        """Return the generation of a finished task, or a refusal; ServerError if the fault stops the run."""
        try:
            generation = task.result()
        except FaultError as fault:
            if fault.again:
                self._exhausted_in_a_row += 1
            else:
                self._exhausted_in_a_row = 0
            if fault.of_all or self._exhausted_in_a_row >= IN_A_ROW:
                raise ServerError(f"{self.base_url} {request.name}: {fault.reason}") from None
            return Refusal(refused=fault.reason, question=request.question, sample=request.sample)
        self._exhausted_in_a_row = 0
        return generation

    def probe(self, warn: Callable[[str], object] = warnings.warn) -> None:
        """Find out what the server can do by a few one-token requests, and `warn` of what it cannot do.

        Raises:
            ServerError: The server does not answer, or returns no log-probabilities.
        """
        plain = self._ask_probe("", tops=0)
        if isinstance(plain, Refusal):
            raise ServerError(f"{self.base_url}: a first request was refused: {plain.refused}")
        self._probe_logprobs(warn)
        self._probe_continuation(plain, warn)

    def _ask_probe(self, text: str, *, tops: int, temperature: float = 0.0) -> Generation | Refusal:
        """Ask for one token with this many candidates, after `text` as the beginning of the response."""
        chat = [Message(role="user", content="Count.")]
        if text:
            chat.append(Message(role="assistant", content=text))
        request = Request(
            question="probe", messages=tuple(chat), max_tokens=1, temperature=temperature, begun=bool(text)
        )
        twin = copy.copy(self)
        twin.top_logprobs = tops
        twin.more_tops = tops
        twin.scales = False
        twin.max_retries = min(self.max_retries, PROBE_RETRIES)
        return next(iter(twin.generate([request])))

    def _probe_logprobs(self, warn: Callable[[str], object]) -> None:
        """Find out how many candidates the server returns, and whether it scales them by the temperature."""
        for asked in (MORE_TOPS, self.top_logprobs or MOST_TOPS, FEWER_TOPS):
            reply = self._ask_probe("", tops=asked)
            if isinstance(reply, Generation):
                break
        warm = _list_candidates(reply)
        if not warm:
            reason = reply.refused if isinstance(reply, Refusal) else "none came"
            raise ServerError(f"{self.base_url}: no log-probabilities: {reason}")
        cold = _list_candidates(self._ask_probe("", tops=asked, temperature=COLD))
        tops = min(len(warm), asked)  # a drawn token outside the best is counted too
        self.more_tops = min(max(tops, self.top_logprobs or MOST_TOPS), asked)
        self.top_logprobs = min(self.top_logprobs, asked)
        if tops < 2:
            warn(f"{self.model}: top_logprobs gives {tops} candidates: other labels may be unknown")
        shared = warm.keys() & cold.keys()
        warm_spread = _spread([warm[token] for token in shared])
        cold_spread = _spread([cold[token] for token in shared])
        self.scales = cold_spread > 1.5 * warm_spread + NOISE
        if self.scales:
            warn(f"{self.model}: {SCALED}")

    def _probe_continuation(self, plain: Generation, warn: Callable[[str], object]) -> None:
        """Find out whether the server continues a partial message, by the lengths of prompts.

        If it does, twice the text costs twice the tokens; a server that ignores the request adds the end of a turn. If
        a line break costs nothing, the chat template trims messages: a label after `<answer>` and a line break would
        then be asked for at another position.
        """
        start = plain.prompt_tokens or 0
        once = self._count_prompt_tokens("A A A A")
        twice = self._count_prompt_tokens("A A A A A A A A")
        with_line_break = self._count_prompt_tokens("A A A A\n")
        is_continued = min(start, once) > 0 and 0 < twice - once >= once - start
        self.continues = is_continued and once < with_line_break
        if self.continues:
            return
        reason = "the server ignores or refuses the wish"
        if is_continued:
            reason = "its chat template trims the message"
        warn(f"{self.model}: cannot continue a partial message ({reason}), so unanswered responses stay unanswered")

    def _count_prompt_tokens(self, text: str) -> int:
        """Return the length of a prompt with this beginning of a response; 0 if it is unknown."""
        reply = self._ask_probe(text, tops=0)
        if isinstance(reply, Refusal):
            return 0
        return reply.prompt_tokens or 0

    def find_model(self) -> None:
        """Take the one model that the server lists; ServerError if it lists none, or several."""
        try:
            names = self._list_models()
        except (httpx.HTTPError, ImportError, OSError, ValueError) as error:
            reason = describe_first_problem(error) if isinstance(error, ValidationError) else str(error)
            reason = clean_message(reason, self._secrets)
            if type(error).__name__ in _UNREACHED:
                raise ServerError(f"{self.base_url}: no connection: {reason}") from None
            raise ServerError(f"{self.base_url}: it lists no models: {reason}; name one") from None
        if len(names) != 1:
            raise ServerError(f"{self.base_url}: serves {', '.join(names[:5]) or 'no model'}; name one")
        self.served = names[0]
        self.model = model_name(self.served)

    def _list_models(self) -> list[str]:
        reply = httpx.get(f"{self.base_url}/models", timeout=CONNECTING, verify=_certificates(), **self._http)
        if not reply.is_success:
            problem = error_message(reply.content) or reply.reason_phrase or "no message"
            raise ValueError(f"{reply.status_code}: {problem}")
        return [model.id for model in ModelList.model_validate_json(reply.content).data]

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
        started = time.monotonic()
        tries = 0
        fault: FaultError | None = None
        try:
            async with asyncio.timeout(self.deadline):
                while True:
                    fault = None
                    tries += 1
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
        body = self._make_body(request)
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

    def _make_body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "model": self.served,
            "messages": [message.model_dump() for message in request.messages],
        }
        tops = self.more_tops if request.begun else self.top_logprobs
        if tops:
            if self.scales and request.temperature not in (0, 1):
                raise FaultError(SCALED, again=False, of_all=True, code=400)
            body |= {"logprobs": True, "top_logprobs": tops}
        body |= self.extra_body
        if request.begun:
            body |= CONTINUE
        return body

    def _read_content(self, content: bytes, request: Request, tries: int) -> Generation:
        """Read a reply with status 200; FaultError where it is no usable completion."""
        try:
            reply = Reply.model_validate_json(content)
        except ValidationError as error:
            problem = error_message(content)
            if not problem:
                is_html = content.lstrip()[:1] == b"<"
                problem = "HTML" if is_html else describe_first_problem(error)
            raise FaultError(f"unusable reply in try {tries}: {problem}", again=True) from None
        choice = reply.choices[0]
        message = choice.message
        if choice.finish_reason == "content_filter" and not message.text:
            raise FaultError("the reply was withheld: finish_reason content_filter", again=False)
        # A thinking model that ran out of tokens has reasoning and no content: a response, though without an answer.
        if message.content is None and message.refusal is None and message.reasoned is None:
            raise FaultError(f"unusable reply in try {tries}: neither content nor reasoning", again=True)
        cut_reply = cut_after_stop(choice, request.stop)
        model = model_name(reply.model or self.served)
        # DeepSeek's own service takes a temperature in thinking mode and ignores it. It is known by its host, or behind
        # a proxy by the one model name that only thinks; the same weights on vLLM or SGLang heed the temperature.
        host = f".{urlsplit(self.base_url).hostname}"
        ignores = message.reasoned and (host.endswith(".deepseek.com") or model == "deepseek-reasoner")
        return Generation(
            question=request.question,
            sample=request.sample,
            text=cut_reply.text,
            reasoning=message.reasoned,
            tops=cut_reply.tops,
            mean_logprob=cut_reply.mean_logprob,
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.completion_tokens,
            finish_reason=choice.finish_reason,
            model=model,
            temperature_acts=not ignores,
        )

    def _status_fault(self, status: int, headers: Mapping[str, str], said: str, tries: int) -> FaultError:
        """Return what an HTTP error means for the request and for the others."""
        if status == 401:
            problem = "was refused" if self._key else "is not set"
            reason = f"401: the key in environment variable {self.api_key_env} {problem}"
            return FaultError(reason, again=False, of_all=True)
        wait = read_retry_after(headers)
        header = headers.get("retry-after")
        too_long = wait is not None and wait > LONGEST_WAIT
        forbidden = status == 403 and not _FILTERED.search(said)
        unknown = status == 404 and _MODEL.search(said) is not None  # a model; a 404 of one request does not name it
        of_all = status in OF_ALL or too_long or forbidden or unknown
        again = (status in AGAIN or status >= 500) and not too_long
        shown_wait = f", Retry-After {header}" if header else ""
        reason = f"{status} in try {tries}{shown_wait}: {said}"
        return FaultError(reason, again=again, of_all=of_all, wait=wait, code=GATEWAY_CODES.get(status, 502))

    def _connection_fault(self, cause: BaseException, tries: int) -> FaultError:
        """Return what a failed connection means; before the first reply it means that there is no server."""
        kind = type(cause).__name__
        why = str(cause) or kind
        if kind == "TooManyRedirects":
            return FaultError(f"redirected without end in try {tries}", again=False, of_all=True)
        if kind in _UNREACHED or not (self._reached or isinstance(cause, httpx.ReadTimeout)):
            return FaultError(f"no connection in try {tries}: {why}", again=True, of_all=True, code=503)
        if isinstance(cause, httpx.TimeoutException):
            return FaultError(f"nothing came for {self.timeout:g} s in try {tries}", again=True, code=504)
        return FaultError(f"the connection broke in try {tries}: {why}", again=True)


def _read_key(variable: str) -> str:
    """Return the key in an environment variable, or an empty text."""
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ServerError(f"environment variable {variable}: not a key that an HTTP header can carry")
    return key


def _list_candidates(reply: Generation | Refusal) -> dict[str, float]:
    """Return the candidates of all tokens of a reply: token -> log-probability."""
    candidates: dict[str, float] = {}
    if isinstance(reply, Generation):
        for _, tops in reply.tops or ():
            candidates.update(tops)
    return candidates


def _spread(values: list[float]) -> float:
    if not values:
        return 0.0
    return max(values) - min(values)


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
    """Return the seconds before retry 1, 2, ...: doubling from 0.5 to 8, minus up to a quarter at random."""
    longest = float(min(FIRST_DELAY * 2 ** (retry - 1), LONGEST_DELAY))
    return longest * (1 - 0.25 * random.random())
