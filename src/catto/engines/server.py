"""Any OpenAI-compatible server as an engine: vLLM, SGLang, DeepSeek, OpenAI, ...

Every response is a request of its own, with its own temperature and seed, so no server needs to know `n`.
`stop` is applied here, to the finished text: servers drop the stop text, and some look for it in the reasoning too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import os
import queue
import random
import re
import ssl
import threading
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx2 as httpx
from pydantic import ValidationError

from catto import __version__
from catto.engines import Context, Engine, Generation, Key, Request, Scores, model_name, server_address
from catto.engines.replies import (
    ENOUGH,
    ModelList,
    Reply,
    ServerError,
    cut_after_stop,
    error_message,
    one_line,
    wished_wait,
)
from catto.problems import first_problem, shortened
from catto.records import Message, Refusal

FIRST_DELAY, LONGEST_DELAY, LONGEST_WAIT = 0.5, 8.0, 120.0
# Until the server has replied once, connections are retried for so many seconds: a dead address is reported within 5.
STARTING, CONNECTING = 1.0, 4.0
# 32,000 tokens with 20 candidates each are some 60 MB of JSON.
MOST_BYTES = 256 * 2**20
# What every server gives. Of one token llama.cpp gives as many candidates as are asked for (its n_probs), and vLLM as
# many as its --max-logprobs allows.
MOST_TOPS, MORE_TOPS = 20, 1000
# Bytes of an error reply that is no JSON.
MOST_SAID = 2**16
PROBE_RETRIES = 2
# What vLLM and SGLang call it; other servers refuse it or ignore it, which `ServerEngine.probe` finds out.
CONTINUE: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}

AGAIN = {408, 409, 425, 429}
# The whole server is at fault, or the account, and not the one request.
OF_ALL = {401, 402, 407, 429, 502, 503, 504}
_FILTERED = re.compile(r"moderat|flagged|content.?(filter|polic|manag)|safety", re.IGNORECASE)
_MODEL = re.compile(r"model|deployment", re.IGNORECASE)
_UNREACHED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")

T = TypeVar("T")
Put = Callable[[T], Awaitable[None]]


class Abilities(NamedTuple):
    """Whether a server gives log-probabilities, of how many candidates a token, and whether it continues a message."""

    logprobs: bool
    tops: int
    continues: bool

    def missing(self) -> list[str]:
        """What is missing, a sentence each.

        >>> Abilities(True, 20, False).missing()
        ['the server cannot continue a partial message, so unanswered responses stay unanswered']
        """
        lines = {
            "no log-probabilities: the confidence cannot be read": not self.logprobs,
            f"top_logprobs gives {self.tops} candidates: other labels may be unknown": self.logprobs and self.tops < 2,
            "the server cannot continue a partial message, so unanswered responses stay unanswered": not self.continues,
        }
        return [line for line, is_missing in lines.items() if is_missing]


class FaultError(Exception):
    """A try that failed: why, whether another one may help and after how long, and whether all requests would fail.

    `code` is the HTTP status with which a gateway passes it on: 400 the request itself was refused, 502 the reply is
    unusable, 503 no server, 504 too late.
    """

    def __init__(
        self, reason: str, *, again: bool, of_all: bool = False, wait: float | None = None, code: int = 502
    ) -> None:
        super().__init__(reason)
        self.reason, self.again, self.of_all, self.wait, self.code = reason, again, of_all, wait, code


class ServerEngine(Engine):
    """The generating half of the `Engine` protocol over HTTP.

    `timeout` is the longest wait for a byte, `deadline` for a whole reply, its retries included. At most `max_retries`
    follow 408, 409, 425, 429 with its Retry-After, 5xx, broken connections and unusable replies; `retries` counts them.
    `top_logprobs` (at most 20) asks for the best candidates of every token. A user and password in `base_url` are sent
    as basic authentication and shown nowhere.
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
    ) -> None:
        if not 0 <= top_logprobs <= MOST_TOPS:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to {MOST_TOPS}")
        if concurrency < 1 or max_retries < 0 or timeout <= 0 or deadline <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0, timeout > 0 and deadline > 0")
        self.name = f"server httpx2-{httpx.__version__}"
        self.model, self.batch_size = model, concurrency
        self.more_tops = top_logprobs or MOST_TOPS  # candidates after a begun answer; `probe` may find more
        self.base_url, login = server_address(base_url)
        # the login as basic authentication carries it, and the part of it that no message may show
        self._login = (base64.b64encode(":".join(login).encode()).decode(), login[1] or login[0]) if login else ()
        self.api_key_env, self.timeout, self.deadline = api_key_env, timeout, deadline
        self.max_retries, self._counts = max_retries, Counter[str]()  # shared by the twins
        self.top_logprobs, self.extra_body = top_logprobs, dict(extra_body or {})
        self._warned = self._reached = False
        self._in_a_row = 0  # requests that ran out of retries with no reply between them

    @property
    def retries(self) -> int:
        """How many requests were sent again."""
        return self._counts["retries"]

    @property
    def model(self) -> str:
        """The model's name as it is stored and shown; requests carry the server's own, which may be a path."""
        return model_name(self._served)

    @model.setter
    def model(self, served: str) -> None:
        self._served = served

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive, at most `concurrency` at a time.

        A request that cannot be answered, but does not speak against the others, yields a `Refusal`. A fault of the
        server or of the settings, or 20 requests in a row that run out of retries, stops the run; what is in flight
        is still awaited and yielded, then a `ServerError` is raised.
        """
        todo = (request for request in requests if request.key not in done)
        failures: list[ServerError] = []

        async def work(client: httpx.AsyncClient, put: Put[Generation | Refusal]) -> None:
            while not failures and (request := next(todo, None)) is not None:
                try:
                    await put(await self.ask(client, request))
                    self._in_a_row = 0
                except FaultError as fault:
                    self._in_a_row = self._in_a_row + 1 if fault.again else 0
                    if fault.of_all or self._in_a_row >= ENOUGH:
                        where = f"{self.place} question {request.question} sample {request.sample}"
                        failures.append(ServerError(f"{where}: {fault.reason}"))
                    else:
                        await put(Refusal(refused=fault.reason, question=request.question, sample=request.sample))

        async def ask_all(put: Put[Generation | Refusal]) -> None:
            async with self.client() as client:
                await asyncio.gather(*(work(client, put) for _ in range(self.batch_size)))
            if failures:
                raise failures[0] from None

        for outcome in arrivals(ask_all):
            yield outcome
            if isinstance(outcome, Generation) and not outcome.temperature_acts and not self._warned:
                self._warned = True
                warnings.warn(f"{outcome.model} thinks before it answers: the temperature does not act", stacklevel=2)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Refuse: chat servers take texts, not token ids."""
        raise NotImplementedError("a server cannot score token ids; use a local engine")

    def probe(self) -> Abilities:
        """Find out by a few one-token requests what the server can do. One that cannot answer raises ServerError.

        Whether it continues a final message shows in the prompt's length: twice the text then costs twice the tokens,
        while a server that ignores the wish adds the end of a turn and a new one.
        """

        def ask(text: str, top_logprobs: int, **extra_body: Any) -> Generation | Refusal:
            chat = [Message(role="user", content="Count.")]
            chat += [Message(role="assistant", content=text)] if text else []
            request = Request(question="probe", messages=tuple(chat), max_tokens=1)
            twin = self._twin(top_logprobs, min(self.max_retries, PROBE_RETRIES), extra_body)
            return next(iter(twin.generate([request])))

        plain = ask("", 0)
        if isinstance(plain, Refusal):
            raise ServerError(f"{self.place}: a first request was refused: {plain.refused}")
        asked, known = MORE_TOPS, ask("", MORE_TOPS)
        if isinstance(known, Refusal):
            known = ask("", asked := self.top_logprobs or MOST_TOPS)
        tops = max((len(tops) for _, tops in (isinstance(known, Generation) and known.tops) or ()), default=0)
        tops = min(tops, asked)  # a drawn token outside the best is counted too
        self.more_tops = min(max(tops, self.top_logprobs or MOST_TOPS), asked)
        longer = [ask(" ".join(["one"] * words), 0, **CONTINUE) for words in (4, 8)]
        bare, *lengths = [reply.prompt_tokens if isinstance(reply, Generation) else None for reply in (plain, *longer)]
        if bare is None or lengths[0] is None or lengths[1] is None:
            continues = False
        else:
            continues = lengths[0] - bare <= lengths[1] - lengths[0] + 1
        return Abilities(tops > 0, tops, continues)

    def only_model(self) -> str:
        """The name of the one model that the server lists; ServerError where there are others, or none."""
        settings: Any = {"headers": self._headers(), "verify": _certificates(), "follow_redirects": True}
        try:
            reply = httpx.get(f"{self.base_url}/models", timeout=CONNECTING, **settings)
            if not reply.is_success:
                said = error_message(reply.content) or reply.reason_phrase or "no message"
                raise ValueError(f"{reply.status_code}: {said}")
            names = [model.id for model in ModelList.model_validate_json(reply.content).data]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
            reason = one_line(problem, self._secrets())
            raise ServerError(f"{self.place}: it does not list its models: {reason}; name one") from None
        if len(names) != 1:
            raise ServerError(f"{self.place}: serves {', '.join(names[:5]) or 'no model'}; name one")
        return names[0]

    def next_tokens(self, begun: Sequence[tuple[tuple[Message, ...], str]]) -> list[dict[str, float] | Refusal]:
        """Best next tokens after each (chat, begun answer), text -> log-probability; empty where there are none."""
        requests = [_begun(str(place), chat, text) for place, (chat, text) in enumerate(begun)]
        outcomes = {int(outcome.question): outcome for outcome in self._continuing().generate(requests)}
        ordered = [outcomes[place] for place in range(len(begun))]
        return [reply if isinstance(reply, Refusal) else best_next(reply) for reply in ordered]

    async def continuation(self, client: httpx.AsyncClient, chat: tuple[Message, ...], text: str) -> Generation:
        """One more token of a begun answer, by a client of the caller; FaultError as `ask` raises it."""
        return await self._continuing().ask(client, _begun("", chat, text))

    def _continuing(self) -> ServerEngine:
        return self._twin(self.more_tops, self.max_retries, CONTINUE)

    def _twin(self, top_logprobs: int, max_retries: int, extra_body: Mapping[str, Any]) -> ServerEngine:
        """The same server with other settings."""
        twin = copy.copy(self)
        twin.top_logprobs, twin.max_retries = top_logprobs, max_retries
        twin.extra_body = {**self.extra_body, **extra_body}
        return twin

    def client(self) -> httpx.AsyncClient:
        """A client for `ask`, to be closed by the caller."""
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECTING))
        # Idle connections are left before vLLM's own server closes them, after 5 s.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.batch_size, keepalive_expiry=4.0)
        try:
            _chat(self.base_url)
            settings: Any = {"headers": self._headers(), "verify": _certificates(), "follow_redirects": True}
            return httpx.AsyncClient(timeout=timeout, limits=limits, **settings)
        except httpx.InvalidURL:
            raise ServerError(f"base_url: {urlsplit(self.base_url).hostname} is no host") from None
        except (ImportError, OSError) as error:  # a proxy that needs a further package; SSL_CERT_FILE
            raise ServerError(f"{self.place}: {one_line(str(error), self._secrets())}") from None

    def _headers(self) -> dict[str, str]:
        key = self._key()
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ServerError(f"environment variable {self.api_key_env}: not a key that an HTTP header can carry")
        credentials = f"Basic {self._login[0]}" if self._login else f"Bearer {key}" if key else None
        headers = {"User-Agent": f"catto/{__version__}", "Content-Type": "application/json"}
        return headers if credentials is None else {**headers, "Authorization": credentials}

    def _secrets(self) -> tuple[str, ...]:
        return (self._key() or "", *self._login)

    def _key(self) -> str | None:
        return os.environ.get(self.api_key_env, "").strip() or None

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
                        reply = await self._post(client, request, tries)
                        return self._generation(request, reply, time.monotonic() - started)
                    except FaultError as error:
                        fault = error
                    unreached = fault.of_all and not self._reached and time.monotonic() - started > STARTING
                    if not fault.again or tries > self.max_retries or unreached:
                        break
                    self._counts["retries"] += 1
                    await asyncio.sleep(back_off(tries) if fault.wait is None else fault.wait)
        except TimeoutError:
            if fault is None or not fault.of_all:
                fault = FaultError(f"no whole reply within {self.deadline:g} s, try {tries}", again=True, code=504)
        told = [turn.content for turn in request.messages]
        fault.reason = one_line(fault.reason, self._secrets(), told)
        raise fault from None

    async def _post(self, client: httpx.AsyncClient, request: Request, tries: int) -> Reply:
        """Post once; whatever goes wrong is a `FaultError`. A reply emptied by a filter is not requested again."""
        body: dict[str, Any] = {
            "model": self._served,
            "messages": [message.model_dump() for message in request.messages],
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
        }
        if self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        content = bytearray()
        try:
            data = json.dumps(body | self.extra_body)
            async with client.stream("POST", _chat(self.base_url), content=data) as answer:
                self._reached = True
                async for block in answer.aiter_bytes():
                    content += block
                    if len(content) > MOST_BYTES:
                        raise FaultError(f"the reply is longer than {MOST_BYTES // 2**20} MB", again=False)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._connection_fault(error, tries) from None
        if not answer.is_success:
            # Secrets go before anything is cut, since half of a key would not be recognised; no long page is shown.
            page = one_line(content.decode(errors="replace"), self._secrets()) if len(content) <= MOST_SAID else ""
            said = error_message(content) or shortened(page) or "no message"
            raise self._status_fault(answer.status_code, answer.headers, said, tries)
        try:
            reply = Reply.model_validate_json(bytes(content))
        except ValidationError as error:
            what = error_message(content) or ("HTML" if content.lstrip()[:1] == b"<" else first_problem(error))
            raise FaultError(f"unusable reply in try {tries}: {what}", again=True) from None
        choice, message = reply.choices[0], reply.choices[0].message
        if choice.finish_reason == "content_filter" and not message.text:
            raise FaultError("the reply was withheld: finish_reason content_filter", again=False)
        # A thinking model that ran out of tokens has reasoning and no content: a response, though without an answer.
        if message.content is None and message.refusal is None and message.reasoned is None:
            raise FaultError(f"unusable reply in try {tries}: neither content nor reasoning", again=True)
        return reply

    def _generation(self, request: Request, reply: Reply, seconds: float) -> Generation:
        choice = reply.choices[0]
        text, tops, mean = cut_after_stop(choice, request.stop)
        model = model_name(reply.model or self.model)
        return Generation(
            question=request.question,
            sample=request.sample,
            text=text,
            reasoning=choice.message.reasoned,
            tops=tops if self.top_logprobs else None,
            mean_logprob=mean,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else None,
            tokens=reply.usage.completion_tokens if reply.usage else None,
            finish_reason=choice.finish_reason,
            model=model,
            temperature_acts=not (choice.message.reasoned and self._is_deepseek(model)),
            seconds=seconds,
        )

    def _is_deepseek(self, model: str) -> bool:
        """DeepSeek's own service, whose thinking mode takes a temperature and ignores it.

        Told by its host, or behind a proxy by the one model name that only thinks. The same weights on vLLM or SGLang
        also return their reasoning apart, but there the temperature acts.
        """
        host = urlsplit(self.base_url).hostname or ""
        return host == "deepseek.com" or host.endswith(".deepseek.com") or model == "deepseek-reasoner"

    @property
    def place(self) -> str:
        """The server's address with its port."""
        url = urlsplit(self.base_url)
        host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
        return f"{url.scheme}://{host}:{url.port or (443 if url.scheme == 'https' else 80)}{url.path}"

    def _status_fault(self, status: int, headers: Mapping[str, str], said: str, tries: int) -> FaultError:
        """What an HTTP error says of the request and of the server."""
        if status == 401:
            key = f"the key in environment variable {self.api_key_env}"
            return FaultError(f"401: {key} {'was refused' if self._key() else 'is not set'}", again=False, of_all=True)
        wait, header = wished_wait(headers), headers.get("retry-after")
        too_long = wait is not None and wait > LONGEST_WAIT
        of_all = (
            status in OF_ALL
            or too_long
            or (status == 403 and not _FILTERED.search(said))
            # An unknown model; a 404 of one request does not name it.
            or (status == 404 and _MODEL.search(said) is not None)
        )
        wish = headers.get("x-should-retry")
        again = wish == "true" or (wish != "false" and (status in AGAIN or status >= 500))
        reason = f"{status} in try {tries}{f', Retry-After {header}' if header else ''}: {said}"
        code = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503, 408: 504, 504: 504}.get(status, 502)
        return FaultError(reason, again=again and not too_long, of_all=of_all, wait=wait, code=code)

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


def _begun(question: str, chat: tuple[Message, ...], text: str) -> Request:
    """Ask for the token after an answer that was begun."""
    return Request(question=question, messages=(*chat, Message(role="assistant", content=text)), max_tokens=1)


def best_next(reply: Generation) -> dict[str, float]:
    """The candidates of a reply's first token, text -> log-probability; none where the server gave none."""
    return dict(reply.tops[0][1]) if reply.tops else {}


@cache
def _chat(base_url: str) -> httpx.URL:
    """The address of chat completions, parsed once: every request would take 0.1 ms for it."""
    return httpx.URL(f"{base_url}/chat/completions")


@cache
def _certificates() -> ssl.SSLContext:
    """The trusted certificates, read once for all clients: each would take 0.04 s to read them."""
    return httpx.create_ssl_context()


def arrivals(produce: Callable[[Put[T]], Awaitable[None]]) -> Iterator[T]:
    """Run `produce(put)` on an event loop in a thread of its own and yield what it puts, then raise what it raised.

    The thread lets it work where a loop is already running (a notebook) and while the caller writes. `put` returns once
    the caller asks for the next item: a caller that stops is never some paid requests behind. An iterator that is
    dropped cancels the producer.
    """
    arrived: queue.SimpleQueue[tuple[T, Callable[[], object]] | Future[None]] = queue.SimpleQueue()
    cancel: Future[Callable[[], object]] = Future()
    ended: Future[None] = Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.set_result(lambda: loop.call_soon_threadsafe(task.cancel))

        async def put(item: T) -> None:
            taken = asyncio.Event()
            arrived.put((item, lambda: loop.call_soon_threadsafe(taken.set)))
            await taken.wait()

        await produce(put)

    def drive() -> None:
        try:
            ended.set_result(asyncio.run(main()))
        except BaseException as error:  # raised in the caller's thread
            ended.set_exception(error)
        cancel.cancel()  # where the loop did not even start
        arrived.put(ended)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    try:
        while not isinstance(entry := arrived.get(), Future):
            item, take = entry
            yield item
            with contextlib.suppress(RuntimeError):  # the producer failed meanwhile, and the loop is closed
                take()
        entry.result()
    finally:
        with contextlib.suppress(RuntimeError, CancelledError):  # the loop is closed already
            cancel.result()()
        thread.join()


def back_off(retry: int) -> float:
    """Seconds before retry 1, 2, ...: doubling from half a second to eight, less up to a quarter at random."""
    return float(min(FIRST_DELAY * 2 ** (retry - 1), LONGEST_DELAY)) * (1 - 0.25 * random.random())
