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
from typing import Any, NamedTuple, TypeVar
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

# Delay before the first and the last retries, and the longest Retry-After that is respected.
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 8.0
LONGEST_RETRY_AFTER_SECONDS = 120.0
# Time to cancel the requests in flight when a caller stops.
CLOSING_TIMEOUT_SECONDS = 5.0
# A run stops if this many requests in a row run out of retries.
MAX_FAILURES_IN_A_ROW = 20
# Until the server has replied once, connections are retried for this long: a dead address is reported within 5 s.
STARTUP_RETRY_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 4.0
# 32,000 tokens with 20 candidates each are some 60 MB of JSON.
MAX_REPLY_BYTES = 256 * 2**20
# Candidates for every token of a response: OpenAI's limit. Some servers give 5 only.
MAX_TOP_LOGPROBS = 20
FEW_TOP_LOGPROBS = 5
# Candidates for a single token: llama.cpp gives as many as are requested (its n_probs), and vLLM as many as its
# --max-logprobs allows.
SINGLE_TOKEN_TOP_LOGPROBS = 1000
PROBE_RETRIES = 2
# Temperature 0 leaves log-probabilities as they are. Those that are scaled lie twice as far apart at 0.5; the others
# differ by noise. The limit is halfway between 1 and 2.
SCALING_TEMPERATURE = 0.5
SCALED_SPREAD_RATIO = 1.5
SPREAD_NOISE = 0.2
SCALED_LOGPROBS_MESSAGE = (
    "the server scales log-probabilities by the temperature, so requests are answered at temperature 0 and 1 only"
)
# Fields of vLLM and SGLang; other servers refuse or ignore them, which `ServerEngine.probe` finds out.
CONTINUATION_FIELDS = {"continue_final_message": True, "add_generation_prompt": False}

RETRYABLE_STATUSES = {408, 409, 425, 429}
# The upstream's status -> the status that a gateway returns; 502 for all others.
GATEWAY_CODES = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503, 408: 504, 504: 504}
# The server or the account is at fault, not the single request.
SHARED_FAULT_STATUSES = {401, 402, 407, 429, 502, 503, 504}
# A 403 with such a message is about the content of one request; any other is about the key.
_FILTERED = re.compile(r"moderat|flagged|content.?(filter|polic|manag)|safety", re.IGNORECASE)
_MODEL = re.compile(r"model|deployment", re.IGNORECASE)
# Errors of httpx before a server was reached.
_UNREACHED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")

T = TypeVar("T")


class AcceptedCandidates(NamedTuple):
    """A number of candidates for a single token that the server accepts, and the candidates that it returned."""

    requested: int
    logprobs: dict[str, float]  # token -> log-probability at temperature 0


class FaultError(Exception):
    """A request that failed.

    Attributes:
        reason: Why it failed.
        is_retryable: Whether another try may help.
        affects_all: Whether all other requests would fail too.
        retry_after: Seconds to wait before the next try; None if the server names none.
        code: HTTP status with which a gateway reports it. 400: the request itself was refused; 502: the reply is
            unusable; 503: no server; 504: too late.
    """

    def __init__(
        self,
        reason: str,
        *,
        is_retryable: bool,
        affects_all: bool = False,
        retry_after: float | None = None,
        code: int = 502,
    ) -> None:
        super().__init__()  # without the reason: a traceback must not show it before `ask` has cleaned it
        self.reason = reason
        self.is_retryable = is_retryable
        self.affects_all = affects_all
        self.retry_after = retry_after
        self.code = code


class ServerEngine(Engine):
    """The generating half of the `Engine` protocol over HTTP.

    Requests are retried after the status codes 408, 409, 425, 429 and 5xx, broken connections and unusable replies. A
    Retry-After is respected. `retries` counts all retries.

    Args:
        base_url: Address of the API. A user and password in it are sent as basic authentication and never shown.
        model: The server's name of the model.
        api_key_env: Name of the environment variable with the key.
        concurrency: Maximum number of requests in flight.
        timeout: Maximum number of seconds without a byte.
        deadline: Maximum number of seconds for a whole reply, including its retries.
        max_retries: Maximum number of retries of a request.
        top_logprobs: Number of candidates to request for every token, at most 20.
        extra_body: Fields that are sent with every request.
        hidden: Texts that no message shows, such as a key in `extra_body`.

    Raises:
        ValueError: A number is out of range, or `base_url` is no address.
        ServerError: The key cannot be sent, or `base_url` names no host.
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
        if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to {MAX_TOP_LOGPROBS}")
        if concurrency < 1 or max_retries < 0 or timeout <= 0 or deadline <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0, timeout > 0 and deadline > 0")
        # Nothing that leaves the replies unchanged is part of the name: neither the version nor the concurrency.
        self.name = "server"
        self.model = model_name(model)  # as it is stored and shown
        self.served_name = model  # the server's own name, which may be a path
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.deadline = deadline
        self.max_retries = max_retries
        self.retries = 0
        self.top_logprobs = top_logprobs
        self.extra_body = dict(extra_body or {})
        # `probe` finds these out: the number of candidates of a single token, whether the server continues a begun
        # answer, and whether the temperature scales log-probabilities.
        self.max_candidates = top_logprobs or MAX_TOP_LOGPROBS
        self.can_continue = False
        self.scales_logprobs = False
        self.base_url, login = server_address(base_url)
        try:  # parsed once: parsing takes 0.1 ms, which every request would pay
            self._chat_url = httpx.URL(f"{self.base_url}/chat/completions")
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
        self._has_replied = False
        self._exhausted_in_a_row = 0  # requests that ran out of retries with no reply between them

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive; at most `concurrency` are in flight.

        A request that cannot be answered for reasons of its own yields a `Refusal`. A fault of the server or of the
        settings, or 20 requests in a row that run out of retries, stops the run: requests in flight are still yielded,
        then a `ServerError` is raised. The first response that ignores the temperature causes a warning.

        If `requests` is a deque, it is emptied as requests are sent. The caller may add more meanwhile, and `done` is
        not read.
        """
        if isinstance(requests, deque):
            todo = requests
        else:
            todo = deque(request for request in requests if request.key not in done)
        for outcome in iterate_in_thread(self._receive_outcomes(todo)):
            yield outcome
            if self._has_warned or isinstance(outcome, Refusal):
                continue
            if not outcome.temperature_acts:
                self._has_warned = True
                name = shorten_text(outcome.model, 80)  # the server chose it
                warnings.warn(f"{name} thinks before it answers: the temperature does not act", stacklevel=2)

    async def _receive_outcomes(self, todo: deque[Request]) -> AsyncGenerator[Generation | Refusal, None]:
        """Yield outcomes as they arrive; raise the first failure that stops the run once nothing is in flight.

        The next request is sent after an outcome was taken, so a caller that stops has not paid for more.
        """
        in_flight: dict[asyncio.Task[Generation], Request] = {}
        failure: ServerError | None = None
        async with self.make_client() as client:
            while True:
                while failure is None and len(in_flight) < self.concurrency and todo:
                    request = todo.popleft()
                    task = asyncio.create_task(self.ask(client, request))
                    # Marks the exception as read: asyncio would log it if the caller stops first.
                    task.add_done_callback(lambda finished: finished.cancelled() or finished.exception())
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
        """Return the generation of a finished task, or a refusal; ServerError if the fault stops the run.

        Counts the requests in a row that ran out of retries.
        """
        try:
            generation = task.result()
        except FaultError as fault:
            if fault.is_retryable:
                self._exhausted_in_a_row += 1
            else:
                self._exhausted_in_a_row = 0  # the server works: it refuses this request for good
            if fault.affects_all or self._exhausted_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise ServerError(f"{self.base_url} {request.name}: {fault.reason}") from None
            return Refusal(refused=fault.reason, question=request.question, sample=request.sample)
        self._exhausted_in_a_row = 0
        return generation

    def probe(self, warn: Callable[[str], object] = warnings.warn) -> None:
        """Find out what the server can do by a few one-token requests, and `warn` of what it cannot do.

        Sets `max_candidates`, `scales_logprobs` and `can_continue`, and may lower `top_logprobs`.

        Raises:
            ServerError: The server does not answer, or returns no log-probabilities.
        """
        first_reply = self._ask_probe("", top_logprobs=0)
        if isinstance(first_reply, Refusal):
            raise ServerError(f"{self.base_url}: a first request was refused: {first_reply.refused}")
        self._probe_logprobs(warn)
        self._probe_continuation(first_reply.prompt_tokens or 0, warn)

    def _ask_probe(self, text: str, *, top_logprobs: int, temperature: float = 0.0) -> Generation | Refusal:
        """Ask for one token with this many candidates, after `text` as the beginning of the response.

        A copy of the engine asks, so that its settings do not change. ServerError if the server does not answer.
        """
        chat = [Message(role="user", content="Count.")]
        if text:
            chat.append(Message(role="assistant", content=text))
        request = Request(
            question="probe", messages=tuple(chat), max_tokens=1, temperature=temperature, begun=bool(text)
        )
        twin = copy.copy(self)
        twin.top_logprobs = top_logprobs
        twin.max_candidates = top_logprobs
        twin.scales_logprobs = False
        twin.max_retries = min(self.max_retries, PROBE_RETRIES)
        return next(iter(twin.generate([request])))

    def _probe_logprobs(self, warn: Callable[[str], object]) -> None:
        """Find out how many candidates the server returns, and whether it scales them by the temperature.

        Sets `max_candidates` and `scales_logprobs`, and lowers `top_logprobs` to what the server accepts.

        Raises:
            ServerError: The server refuses log-probabilities or returns none.
        """
        per_token = self.top_logprobs or MAX_TOP_LOGPROBS  # 0 requests candidates for labels only
        accepted = self._find_accepted_candidates(per_token)
        is_scaled = self._are_logprobs_scaled(accepted)
        received = min(len(accepted.logprobs), accepted.requested)  # a drawn token outside the best is counted too
        # For a label never fewer than for other tokens, and never more than the server accepts.
        wanted = max(received, per_token)
        self.max_candidates = min(wanted, accepted.requested)
        self.top_logprobs = min(self.top_logprobs, accepted.requested)
        self.scales_logprobs = is_scaled
        if received < 2:
            warn(f"{self.model}: top_logprobs gives {received} candidates: other labels may be unknown")
        if is_scaled:
            warn(f"{self.model}: {SCALED_LOGPROBS_MESSAGE}")

    def _find_accepted_candidates(self, per_token: int) -> AcceptedCandidates:
        """Request 1000 candidates, then `per_token`, then 5, until the server accepts; ServerError without any."""
        for requested in (SINGLE_TOKEN_TOP_LOGPROBS, per_token, FEW_TOP_LOGPROBS):
            reply = self._ask_probe("", top_logprobs=requested)
            if isinstance(reply, Generation):
                break
        logprobs = _list_candidates(reply)
        if not logprobs:
            reason = reply.refused if isinstance(reply, Refusal) else "none came"
            raise ServerError(f"{self.base_url}: no log-probabilities: {reason}")
        return AcceptedCandidates(requested, logprobs)

    def _are_logprobs_scaled(self, accepted: AcceptedCandidates) -> bool:
        """Return whether the log-probabilities lie further apart at temperature 0.5 than at 0.

        False if that cannot be seen: the server refuses the request, or both replies share fewer than two candidates.
        """
        reply = self._ask_probe("", top_logprobs=accepted.requested, temperature=SCALING_TEMPERATURE)
        logprobs = _list_candidates(reply)
        shared = logprobs.keys() & accepted.logprobs.keys()
        spread = _compute_spread([logprobs[token] for token in shared])
        spread_at_zero = _compute_spread([accepted.logprobs[token] for token in shared])
        return spread > SCALED_SPREAD_RATIO * spread_at_zero + SPREAD_NOISE

    def _probe_continuation(self, prompt_tokens: int, warn: Callable[[str], object]) -> None:
        """Find out whether the server continues a partial message, by the lengths of prompts; set `can_continue`.

        If it does, twice the text costs twice the tokens. A server that ignores the request adds the end of a turn, so
        the first text costs more than the second. If a line break costs nothing, the chat template trims messages: a
        label after `<answer>` and a line break would then be asked for at another position.

        Args:
            prompt_tokens: Length of the prompt without a partial message; 0 if the server does not report it.
            warn: Called with the reason if the server cannot continue.
        """
        once = self._count_prompt_tokens("A A A A")
        twice = self._count_prompt_tokens("A A A A A A A A")
        with_line_break = self._count_prompt_tokens("A A A A\n")
        are_lengths_known = prompt_tokens > 0 and once > 0
        first_text_tokens = once - prompt_tokens
        second_text_tokens = twice - once
        adds_no_turn = second_text_tokens > 0 and first_text_tokens <= second_text_tokens
        is_continued = are_lengths_known and adds_no_turn
        self.can_continue = is_continued and once < with_line_break
        if self.can_continue:
            return
        reason = "the server ignores or refuses the request for it"
        if is_continued:
            reason = "its chat template trims the message"
        warn(f"{self.model}: cannot continue a partial message ({reason}), so unanswered responses stay unanswered")

    def _count_prompt_tokens(self, text: str) -> int:
        """Return the length of a prompt with this beginning of a response; 0 if it is refused or not reported."""
        reply = self._ask_probe(text, top_logprobs=0)
        if isinstance(reply, Refusal):
            return 0
        return reply.prompt_tokens or 0

    def find_model(self) -> None:
        """Set `served_name` and `model` to the one model that the server lists.

        Raises:
            ServerError: The server cannot be reached, or lists no model or several.
        """
        try:
            names = self._list_models()
        except (httpx.HTTPError, ImportError, OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                reason = describe_first_problem(error)
            reason = clean_message(reason, self._secrets)
            if type(error).__name__ in _UNREACHED:
                raise ServerError(f"{self.base_url}: no connection: {reason}") from None
            raise ServerError(f"{self.base_url}: it lists no models: {reason}; name one") from None
        if len(names) != 1:
            served = ", ".join(names[:5]) or "no model"
            raise ServerError(f"{self.base_url}: serves {served}; name one")
        self.served_name = names[0]
        self.model = model_name(self.served_name)

    def _list_models(self) -> list[str]:
        """Return the names that the server lists; ValueError if it replies with an error or no list."""
        url = f"{self.base_url}/models"
        reply = httpx.get(url, timeout=CONNECT_TIMEOUT_SECONDS, verify=_certificates(), **self._http)
        if not reply.is_success:
            problem = error_message(reply.content) or reply.reason_phrase or "no message"
            raise ValueError(f"{reply.status_code}: {problem}")
        models = ModelList.model_validate_json(reply.content)
        return [model.id for model in models.data]

    def make_client(self) -> httpx.AsyncClient:
        """Make a client for `ask`, which the caller closes; ServerError if the proxy or certificates cannot be used."""
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_TIMEOUT_SECONDS))
        # Idle connections expire before vLLM's own server closes them, after 5 s.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency, keepalive_expiry=4.0)
        try:
            return httpx.AsyncClient(timeout=timeout, limits=limits, verify=_certificates(), **self._http)
        except (ImportError, OSError) as error:  # a proxy that needs a further package; SSL_CERT_FILE
            reason = clean_message(str(error), self._secrets)
            raise ServerError(f"{self.base_url}: {reason}") from None

    async def ask(self, client: httpx.AsyncClient, request: Request) -> Generation:
        """Ask until there is a usable reply.

        Raises:
            FaultError: The fault is final, no retry is left or the deadline is over. A fault of the whole server is
                reported even if the deadline ends the delay after it. The reason is one line without secrets or prompt.
        """
        started = time.monotonic()
        try_number = 0
        fault: FaultError | None = None
        try:
            async with asyncio.timeout(self.deadline):
                while True:
                    fault = None
                    try_number += 1
                    try:
                        generation = await self._post(client, request, try_number)
                        return generation.model_copy(update={"seconds": time.monotonic() - started})
                    except FaultError as error:
                        fault = error
                    if not fault.is_retryable or try_number > self.max_retries:
                        break
                    # Before the first reply, a fault that affects all requests is a failed connection.
                    has_no_server = fault.affects_all and not self._has_replied
                    is_startup_over = time.monotonic() - started > STARTUP_RETRY_SECONDS
                    if has_no_server and is_startup_over:
                        break
                    self.retries += 1
                    delay = fault.retry_after
                    if delay is None:
                        delay = retry_delay(try_number)
                    await asyncio.sleep(delay)
        except TimeoutError:
            # No fault: the deadline ended a try. A fault: it ended the delay after that fault. One that affects all
            # requests is kept, since it stops the run and the deadline would not.
            if fault is None or not fault.affects_all:
                reason = f"no whole reply within {self.deadline:g} s, try {try_number}"
                fault = FaultError(reason, is_retryable=True, code=504)
        prompt = [message.content for message in request.messages]
        fault.reason = clean_message(fault.reason, self._secrets, prompt)
        raise fault from None

    async def _post(self, client: httpx.AsyncClient, request: Request, try_number: int) -> Generation:
        """Post once and read the reply.

        Args:
            client: From `make_client`.
            request: What is asked.
            try_number: 1 for the first try; reasons name it.

        Raises:
            FaultError: Anything goes wrong. `ask` removes secrets and prompt from its reason.
        """
        body = self._make_body(request)
        content = bytearray()
        try:
            async with client.stream("POST", self._chat_url, content=json.dumps(body)) as response:
                self._has_replied = True
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_REPLY_BYTES:
                        raise FaultError(f"the reply is longer than {MAX_REPLY_BYTES // 2**20} MB", is_retryable=False)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._connection_fault(error, try_number) from None
        if not response.is_success:
            message = error_message(content)
            if not message:
                # Cleaned before it is shortened: `ask` would not recognise half of a key.
                page = clean_message(content.decode(errors="replace"), self._secrets)
                message = shorten_text(page) or "no message"
            raise self._status_fault(response.status_code, response.headers, message, try_number)
        # In a thread: a long reply takes a tenth of a second to read, which would block a gateway's event loop.
        return await asyncio.to_thread(self._read_content, bytes(content), request, try_number)

    def _make_body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request; FaultError if its temperature would scale log-probabilities."""
        body: dict[str, Any] = {
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "model": self.served_name,
            "messages": [message.model_dump() for message in request.messages],
        }
        # A begun response is continued by the single token of its label.
        top_logprobs = self.max_candidates if request.begun else self.top_logprobs
        if top_logprobs:
            if self.scales_logprobs and request.temperature not in (0, 1):
                raise FaultError(SCALED_LOGPROBS_MESSAGE, is_retryable=False, affects_all=True, code=400)
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        body |= self.extra_body
        if request.begun:
            body |= CONTINUATION_FIELDS
        return body

    def _read_content(self, content: bytes, request: Request, try_number: int) -> Generation:
        """Read a successful reply.

        Raises:
            FaultError: It is no usable completion, which is retried, or a filter emptied it, which is not.
        """
        try:
            reply = Reply.model_validate_json(content)
        except ValidationError as error:
            problem = error_message(content)
            if not problem:
                is_html = content.lstrip()[:1] == b"<"
                problem = "HTML" if is_html else describe_first_problem(error)
            raise FaultError(f"unusable reply in try {try_number}: {problem}", is_retryable=True) from None
        choice = reply.choices[0]
        message = choice.message
        if choice.finish_reason == "content_filter" and not message.text:
            raise FaultError("the reply was withheld: finish_reason content_filter", is_retryable=False)
        # A thinking model that ran out of tokens has reasoning and no content: a response, though without an answer.
        if message.content is None and message.refusal is None and message.separate_reasoning is None:
            raise FaultError(f"unusable reply in try {try_number}: neither content nor reasoning", is_retryable=True)
        cut_reply = cut_after_stop(choice, request.stop)
        model = model_name(reply.model or self.served_name)
        # DeepSeek's own service takes a temperature in thinking mode and ignores it. It is known by its host, or behind
        # a proxy by the one model name that only thinks; the same weights on vLLM or SGLang heed the temperature.
        host = f".{urlsplit(self.base_url).hostname}"
        is_deepseek = host.endswith(".deepseek.com") or model == "deepseek-reasoner"
        ignores_temperature = bool(message.separate_reasoning) and is_deepseek
        return Generation(
            question=request.question,
            sample=request.sample,
            text=cut_reply.text,
            reasoning=message.separate_reasoning,
            tops=cut_reply.tops,
            mean_logprob=cut_reply.mean_logprob,
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.completion_tokens,
            finish_reason=choice.finish_reason,
            model=model,
            temperature_acts=not ignores_temperature,
        )

    def _status_fault(self, status: int, headers: Mapping[str, str], message: str, try_number: int) -> FaultError:
        """Return what an HTTP error means for the request and for the others.

        A wait that is too long, a key without rights and an unknown model affect all requests.
        """
        if status == 401:
            problem = "was refused" if self._key else "is not set"
            reason = f"401: the key in environment variable {self.api_key_env} {problem}"
            return FaultError(reason, is_retryable=False, affects_all=True)
        retry_after = read_retry_after(headers)
        is_wait_too_long = retry_after is not None and retry_after > LONGEST_RETRY_AFTER_SECONDS
        has_no_rights = status == 403 and not _FILTERED.search(message)
        is_unknown_model = status == 404 and _MODEL.search(message) is not None
        is_shared_status = status in SHARED_FAULT_STATUSES
        is_retryable_status = status in RETRYABLE_STATUSES or status >= 500
        what = f"{status} in try {try_number}"
        header = headers.get("retry-after")
        if header:
            what = f"{what}, Retry-After {header}"
        return FaultError(
            f"{what}: {message}",
            is_retryable=is_retryable_status and not is_wait_too_long,
            affects_all=is_shared_status or is_wait_too_long or has_no_rights or is_unknown_model,
            retry_after=retry_after,
            code=GATEWAY_CODES.get(status, 502),
        )

    def _connection_fault(self, cause: BaseException, try_number: int) -> FaultError:
        """Return what a failed connection means; before the first reply it means that there is no server."""
        kind = type(cause).__name__
        detail = str(cause) or kind
        if kind == "TooManyRedirects":
            return FaultError(f"redirected without end in try {try_number}", is_retryable=False, affects_all=True)
        has_server = self._has_replied or isinstance(cause, httpx.ReadTimeout)
        if kind in _UNREACHED or not has_server:
            reason = f"no connection in try {try_number}: {detail}"
            return FaultError(reason, is_retryable=True, affects_all=True, code=503)
        if isinstance(cause, httpx.TimeoutException):
            reason = f"nothing came for {self.timeout:g} s in try {try_number}"
            return FaultError(reason, is_retryable=True, code=504)
        return FaultError(f"the connection broke in try {try_number}: {detail}", is_retryable=True)


def _read_key(variable: str) -> str:
    """Return the key in an environment variable, or an empty text; ServerError if HTTP cannot carry it."""
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ServerError(f"environment variable {variable}: not a key that an HTTP header can carry")
    return key


def _list_candidates(reply: Generation | Refusal) -> dict[str, float]:
    """Return the candidates of all tokens of a reply: token -> log-probability. A refusal has none."""
    candidates: dict[str, float] = {}
    if isinstance(reply, Generation):
        for _, tops in reply.tops or ():
            candidates.update(tops)
    return candidates


def _compute_spread(values: list[float]) -> float:
    """Return the largest value less the smallest; 0 without values."""
    if not values:
        return 0.0
    return max(values) - min(values)


# The trusted certificates, read once for all clients: each would take 0.04 s to read them.
_certificates = cache(httpx.create_ssl_context)


def iterate_in_thread(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate an async generator on an event loop in a thread of its own.

    Thanks to the thread, it works if a loop is already running (a notebook) and while the caller writes. Dropping the
    iterator cancels the generator's tasks. An iterator that is still open when the interpreter exits is left
    alone: the thread no longer runs, and waiting for it would never end.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def step() -> T | None:
        return await anext(stream, None)  # None: the stream has ended

    async def close() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stream.aclose()

    try:
        while True:
            item = asyncio.run_coroutine_threadsafe(step(), loop).result()
            if item is None:
                break
            yield item
    finally:
        if not sys.is_finalizing():
            closing = asyncio.run_coroutine_threadsafe(close(), loop)
            with suppress(TimeoutError):  # a connection that does not close must not hold the process
                closing.result(CLOSING_TIMEOUT_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSING_TIMEOUT_SECONDS)
            if not thread.is_alive():
                loop.close()


def retry_delay(retry: int) -> float:
    """Return the seconds before retry 1, 2, ...: doubling from 0.5 to 8, minus up to a quarter at random."""
    longest = float(min(FIRST_DELAY_SECONDS * 2 ** (retry - 1), LONGEST_DELAY_SECONDS))
    return longest * (1 - 0.25 * random.random())
