"""An asynchronous producer as a plain iterator.

Any OpenAI-compatible server as an engine: vLLM, SGLang, DeepSeek, OpenAI, ...

Every response is a request of its own, with its own temperature and seed, so no server needs to know `n`.
`stop` is applied here, to the finished text: servers drop the stop text, and some look for it in the reasoning too.

What a server can do besides answering: log-probabilities, and going on with a message that was begun.

`n` is never asked for: every response is a request of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import queue
import random
import re
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import openai
from pydantic import ValidationError

from catto.engines import Context, Generation, Key, Request, Scores
from catto.engines.replies import ENOUGH, Reply, ServerError, cut_after_stop, one_line
from catto.files import first_problem
from catto.records import Message, Refusal

# ---- arrivals


T = TypeVar("T")
Put = Callable[[T], None]


class _End:
    """The producer is done; `error` is what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def arrivals(produce: Callable[[Put[T]], Awaitable[None]]) -> Iterator[T]:
    """Run `produce(put)` on an event loop in a thread of its own and yield what it puts, then raise what it raised.

    The thread lets it work where a loop is already running (a notebook) and while the caller writes. An iterator that
    is dropped cancels the producer.
    """
    arrived: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    started: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    thread = threading.Thread(target=_drive, args=(produce, arrived, started), daemon=True)
    thread.start()
    cancel = started.get()
    try:
        while not isinstance(item := arrived.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            cancel()
        thread.join()


def _drive(
    produce: Callable[[Put[T]], Awaitable[None]],
    arrived: queue.SimpleQueue[T | _End],
    started: queue.SimpleQueue[Callable[[], object]],
) -> None:
    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.put(lambda: loop.call_soon_threadsafe(task.cancel))
        await produce(arrived.put)

    try:
        asyncio.run(main())
        arrived.put(_End(None))
    except BaseException as error:  # handed over to the caller's thread
        arrived.put(_End(error))


# ---- server


try:  # what the client speaks through: httpx2 from openai 3 on
    import httpx2 as httpx
except ImportError:  # pragma: no cover
    import httpx  # type: ignore[import-not-found,no-redef]


# A key-less local server gets this in place of a key: the client insists on one.
NO_KEY = "none"
FIRST_DELAY, LONGEST_DELAY, LONGEST_WAIT = 0.5, 8.0, 120.0
# Until the server has shown itself, connections are tried again for so many seconds: a dead address is told within 5.
STARTING, CONNECTING = 1.0, 4.0
# 32,000 tokens with 20 candidates each are some 60 MB of JSON.
MOST_BYTES = 256 * 2**20

AGAIN = {408, 409, 425, 429}
# The whole server is at fault, or the account, and not the one request.
OF_ALL = {401, 402, 407, 429, 502, 503, 504}
_FILTERED = re.compile(r"moderat|flagged|content.?(filter|polic|manag)|safety", re.IGNORECASE)
_MODEL = re.compile(r"model|deployment", re.IGNORECASE)
_UNREACHED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")


class _FaultError(Exception):
    """A try that failed: why, whether another one may help and after how long, and whether all requests would fail."""

    def __init__(self, reason: str, *, again: bool, of_all: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.again, self.of_all, self.wait = reason, again, of_all, wait


class ServerEngine:
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
        if not 0 <= top_logprobs <= 20:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to 20")
        if concurrency < 1 or max_retries < 0 or timeout <= 0 or deadline <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0, timeout > 0 and deadline > 0")
        self.name = f"server openai-{openai.__version__}"
        self.model = model
        self.base_url, self._login = parted(base_url)
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.deadline = deadline
        self.max_retries = max_retries
        self.top_logprobs = top_logprobs
        self.extra_body = dict(extra_body or {})
        self.retries = 0
        self._warned = self._reached = False
        self._in_a_row = 0  # requests that ran out of retries with no reply between them

    def twin(self, *, top_logprobs: int, max_retries: int, extra_body: Mapping[str, Any]) -> ServerEngine:
        """The same server with other settings."""
        made = ServerEngine(
            self.base_url,
            self.model,
            api_key_env=self.api_key_env,
            concurrency=self.concurrency,
            timeout=self.timeout,
            deadline=self.deadline,
            max_retries=max_retries,
            top_logprobs=top_logprobs,
            extra_body={**self.extra_body, **extra_body},
        )
        made._login = self._login
        return made

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive, at most `concurrency` at a time.

        A request that cannot be answered, but does not speak against the others, yields a `Refusal`. A fault of the
        server or of the settings, or 20 requests in a row that run out of retries, stops the asking; what is in flight
        is still awaited and yielded, then a `ServerError` is raised.
        """
        todo = (request for request in requests if request.key not in done)
        arriving: Iterator[Generation | Refusal] = arrivals(lambda put: self._ask_all(todo, put))
        for outcome in arriving:
            yield outcome
            if isinstance(outcome, Generation) and not outcome.temperature_acts and not self._warned:
                self._warned = True
                warnings.warn(f"{outcome.model} thinks before it answers: the temperature does not act", stacklevel=2)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Refuse: chat servers take texts, not token ids."""
        raise NotImplementedError("a server cannot score token ids; use a local engine")

    async def _ask_all(self, todo: Iterator[Request], put: Put[Generation | Refusal]) -> None:
        failures: list[ServerError] = []
        async with self._client() as client:
            await asyncio.gather(*(self._work(client, todo, put, failures) for _ in range(self.concurrency)))
        if failures:
            raise failures[0] from None

    async def _work(
        self,
        client: openai.AsyncOpenAI,
        todo: Iterator[Request],
        put: Put[Generation | Refusal],
        failures: list[ServerError],
    ) -> None:
        """Take requests from the shared iterator until it is empty or someone failed."""
        while not failures and (request := next(todo, None)) is not None:
            try:
                put(await self._ask(client, request))
            except ServerError as error:
                failures.append(error)

    def _client(self) -> openai.AsyncOpenAI:
        key = self._key() or NO_KEY
        if not (key.isascii() and key.isprintable()):
            raise ServerError(f"environment variable {self.api_key_env}: not a key that an HTTP header can carry")
        timeout = openai.Timeout(self.timeout, connect=min(self.timeout, CONNECTING))
        headers = {"Authorization": f"Basic {_encoded(self._login)}"} if self._login else None
        try:  # retries are ours: those of the client know no deadline and no unusable replies
            return openai.AsyncOpenAI(
                base_url=self.base_url, api_key=key, timeout=timeout, max_retries=0, default_headers=headers
            )
        except httpx.InvalidURL:
            raise ServerError(f"base_url: {urlsplit(self.base_url).hostname} is no host") from None

    def _key(self) -> str | None:
        return os.environ.get(self.api_key_env, "").strip() or None

    async def _ask(self, client: openai.AsyncOpenAI, request: Request) -> Generation | Refusal:
        """Ask until there is a usable reply, no retry is left, or the deadline is over."""
        started, tries = time.monotonic(), 0
        fault: _FaultError | None = None
        try:
            async with asyncio.timeout(self.deadline):
                while True:
                    fault, tries = None, tries + 1
                    try:
                        reply = await self._post(client, request, tries)
                        self._in_a_row = 0
                        return self._generation(request, reply, time.monotonic() - started)
                    except _FaultError as error:
                        fault = error
                    unreached = fault.of_all and not self._reached and time.monotonic() - started > STARTING
                    if not fault.again or tries > self.max_retries or unreached:
                        break
                    self.retries += 1
                    await asyncio.sleep(back_off(tries) if fault.wait is None else fault.wait)
        except TimeoutError:
            if fault is None or not fault.of_all:
                fault = _FaultError(f"no whole reply within {self.deadline:g} s, try {tries}", again=True)
        self._in_a_row = self._in_a_row + 1 if fault.again else 0
        if fault.of_all or self._in_a_row >= ENOUGH:
            where = f"{self.place} question {request.question} sample {request.sample}"
            raise ServerError(f"{where}: {self._told(fault, request)}") from None
        return Refusal(refused=self._told(fault, request), question=request.question, sample=request.sample)

    async def _post(self, client: openai.AsyncOpenAI, request: Request, tries: int) -> Reply:
        """Post once; whatever goes wrong is a `_FaultError`."""
        try:
            api = client.chat.completions.with_streaming_response
            async with api.create(**self._body(request)) as raw:
                self._reached = True
                content = bytearray()
                async for block in raw.iter_bytes():
                    content += block
                    if len(content) > MOST_BYTES:
                        raise _FaultError(f"the reply is longer than {MOST_BYTES // 2**20} MB", again=False)
        except openai.APIStatusError as error:
            self._reached = True
            raise self._status_fault(error, tries) from None
        except openai.APIConnectionError as error:
            raise self._connection_fault(error.__cause__ or error, tries) from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._connection_fault(error, tries) from None
        except openai.OpenAIError as error:
            raise _FaultError(str(error), again=False, of_all=True) from None
        return _usable(bytes(content), tries)

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [message.model_dump() for message in request.messages],
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
        }
        if self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return body | ({"extra_body": self.extra_body} if self.extra_body else {})

    def _generation(self, request: Request, reply: Reply, seconds: float) -> Generation:
        choice = reply.choices[0]
        text, tops, mean = cut_after_stop(choice, request.stop)
        model = reply.model or self.model
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

    def _told(self, fault: _FaultError, request: Request) -> str:
        """Why it failed, in one line without secrets or prompt."""
        user, password = self._login or ("", "")
        secrets = [self._key() or "", _encoded(self._login) if self._login else "", password or user]
        return one_line(fault.reason, secrets, [message.content for message in request.messages])

    def _status_fault(self, error: openai.APIStatusError, tries: int) -> _FaultError:
        """What an HTTP error says of the request and of the server."""
        status, said = error.status_code, _said(error)
        if status == 401:
            what = "was refused" if self._key() else "is not set"
            return _FaultError(
                f"401: the key in environment variable {self.api_key_env} {what}", again=False, of_all=True
            )
        headers = error.response.headers
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
        return _FaultError(reason, again=again and not too_long, of_all=of_all, wait=wait)

    def _connection_fault(self, cause: BaseException, tries: int) -> _FaultError:
        """What a failed connection says; before the first reply of all, it says that there is no server."""
        kind, why = type(cause).__name__, f"{cause or type(cause).__name__}"
        if kind == "TooManyRedirects":
            return _FaultError(f"redirected without end in try {tries}", again=False, of_all=True)
        if kind in _UNREACHED or not (self._reached or isinstance(cause, httpx.ReadTimeout)):
            return _FaultError(f"no connection in try {tries}: {why}", again=True, of_all=True)
        if isinstance(cause, httpx.TimeoutException):
            return _FaultError(f"nothing came for {self.timeout:g} s in try {tries}", again=True)
        return _FaultError(f"the connection broke in try {tries}: {why}", again=True)


def parted(base_url: str) -> tuple[str, tuple[str, str] | None]:
    """The address without user and password, and those; what is no HTTP address is a ValueError that shows nothing.

    Example:
        >>> parted("http://me:secret@localhost:8000/v1")
        ('http://localhost:8000/v1', ('me', 'secret'))
    """
    with contextlib.suppress(ValueError):
        url = urlsplit(base_url)
        _ = url.port  # raises where it is no number
        if url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment):
            login = (unquote(url.username or ""), unquote(url.password or "")) if "@" in url.netloc else None
            return urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2])), login
    raise ValueError("base_url: expected http:// or https://, a host and a path, such as http://localhost:8000/v1")


def _encoded(login: tuple[str, str]) -> str:
    return base64.b64encode(":".join(login).encode()).decode()


def _usable(content: bytes, tries: int) -> Reply:
    """Read a reply; one that cannot be used is a fault, and one that a filter has emptied is not asked for again."""
    try:
        reply = Reply.model_validate_json(content)
    except ValidationError as error:
        what = "HTML" if content.lstrip()[:1] == b"<" else first_problem(error)
        raise _FaultError(f"unusable reply in try {tries}: {what}", again=True) from None
    choice = reply.choices[0]
    if choice.finish_reason == "content_filter" and not choice.message.text:
        raise _FaultError("the reply was withheld: finish_reason content_filter", again=False)
    if choice.message.is_empty:
        raise _FaultError(f"unusable reply in try {tries}: neither content nor reasoning", again=True)
    return reply


def _said(error: openai.APIStatusError) -> str:
    """The message of an HTTP error, with its code where there is one."""
    body: Any = error.body
    if not isinstance(body, dict):
        return error.message
    said, code = body.get("message") or body.get("detail"), body.get("code")
    return error.message if not isinstance(said, str) else f"{said} ({code})" if isinstance(code, str) else said


def wished_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds after which a server wants to be asked again, from its headers; None where they say nothing usable.

    Example:
        >>> wished_wait({"retry-after": "20"})
        20.0
    """
    wait = 0.0
    with contextlib.suppress(ValueError):
        if "retry-after-ms" in headers:
            wait = float(headers["retry-after-ms"]) / 1000
        elif (given := headers.get("retry-after", "")).replace(".", "", 1).isdecimal():
            wait = float(given)
        else:
            wait = parsedate_to_datetime(given).timestamp() - time.time()
    return wait if 0 < wait < math.inf else None


def back_off(retry: int) -> float:
    """Seconds before retry 1, 2, ...: doubling from half a second to eight, less up to a quarter at random."""
    return float(min(FIRST_DELAY * 2 ** (retry - 1), LONGEST_DELAY)) * (1 - 0.25 * random.random())


# ---- probing


# What vLLM and SGLang call it; other servers refuse it or ignore it, which `probe` finds out.
CONTINUE: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
MOST_TOPS = 20
PROBE_RETRIES = 2


class Abilities(NamedTuple):
    """Whether log-probabilities come, for how many candidates a token, and whether a begun message is gone on with."""

    logprobs: bool
    tops: int
    continues: bool

    def missing(self) -> list[str]:
        """What is missing, a sentence each."""
        lines = {
            "no log-probabilities: the confidence cannot be read": not self.logprobs,
            f"top_logprobs gives {self.tops} candidates: other labels may be unknown": self.logprobs and self.tops < 2,
            "a begun message is not gone on with: responses without an answer stay without": not self.continues,
        }
        return [line for line, is_missing in lines.items() if is_missing]


def probe(engine: ServerEngine) -> Abilities:
    """Ask the server a few tokens to see what it can do. A server that cannot answer at all raises ServerError."""
    plain = _asked(_twin(engine, 0), "")
    if isinstance(plain, Refusal):
        raise ServerError(f"{engine.place}: a first request was refused: {plain.refused}")
    known = _asked(_twin(engine, engine.top_logprobs or MOST_TOPS), "")
    tops = known.tops if isinstance(known, Generation) else None
    most = max((len(candidates) for _, candidates in tops), default=0) if tops else 0
    return Abilities(bool(tops), most, _continues(engine, plain.prompt_tokens))


def _continues(engine: ServerEngine, bare: int | None) -> bool:
    """Whether a final message is gone on with, told by the prompt's length.

    Twice the text costs twice the tokens then; a server that ignores the wish adds the end of a turn and a new one.
    """
    found = [_asked(_twin(engine, 0, CONTINUE), " ".join(["one"] * n)) for n in (4, 8)]
    lengths = [one.prompt_tokens if isinstance(one, Generation) else None for one in found]
    if bare is None or lengths[0] is None or lengths[1] is None:
        return False
    return lengths[0] - bare <= lengths[1] - lengths[0] + 1


def _asked(engine: ServerEngine, begun: str) -> Generation | Refusal:
    chat = [Message(role="user", content="Count."), *([Message(role="assistant", content=begun)] if begun else [])]
    return next(iter(engine.generate([Request(question="probe", messages=tuple(chat), max_tokens=1)])))


def _twin(engine: ServerEngine, top_logprobs: int, extra: Mapping[str, Any] | None = None) -> ServerEngine:
    """The same server with other settings; what a probe asks in vain is not asked for long."""
    retries = min(engine.max_retries, PROBE_RETRIES)
    return engine.twin(top_logprobs=top_logprobs, max_retries=retries, extra_body=extra or {})


def next_tokens(
    engine: ServerEngine, begun: Sequence[tuple[tuple[Message, ...], str]]
) -> list[dict[str, float] | Refusal]:
    """Best next tokens after each (chat, begun answer), text -> log-probability; empty where the server gave none."""
    twin = engine.twin(
        top_logprobs=engine.top_logprobs or MOST_TOPS, max_retries=engine.max_retries, extra_body=CONTINUE
    )
    requests = [
        Request(question=str(place), messages=(*chat, Message(role="assistant", content=text)), max_tokens=1)
        for place, (chat, text) in enumerate(begun)
    ]
    found = {int(one.question): one for one in twin.generate(requests)}
    engine.retries += twin.retries
    return [_candidates(found[place]) for place in range(len(begun))]


def _candidates(outcome: Generation | Refusal) -> dict[str, float] | Refusal:
    if isinstance(outcome, Refusal):
        return outcome
    return dict(outcome.tops[0][1]) if outcome.tops else {}
