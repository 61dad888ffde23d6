"""Any OpenAI-compatible server as an engine: vLLM, SGLang, DeepSeek, OpenAI, ...

Every response has a request of its own, with its own temperature and seed, so a server need not support `n`. `stop` is
applied here, to the finished text: servers remove the stop text, and some search the reasoning for it too.
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

# Delay before the first and the last retries, and the longest Retry-After to wait for.
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 8.0
LONGEST_RETRY_AFTER_SECONDS = 120.0
# Time to cancel the requests in flight when a caller stops.
CLOSING_TIMEOUT_SECONDS = 5.0
# A run stops if this many requests in a row run out of retries.
MAX_FAILURES_IN_A_ROW = 20
# Connections are retried for this long until the server replies for the first time, so that a dead address is reported
# within 5 s.
STARTUP_RETRY_SECONDS = 1.0
CONNECT_TIMEOUT_SECONDS = 4.0
# 32,000 tokens with 20 candidates each take about 60 MB of JSON.
MAX_REPLY_BYTES = 256 * 2**20
# Candidates for every token of a response: OpenAI's limit. Some servers return only 5.
MAX_TOP_LOGPROBS = 20
FEW_TOP_LOGPROBS = 5
# Candidates for a single token: llama.cpp returns as many as are requested (its n_probs), and vLLM as many as its
# --max-logprobs allows.
SINGLE_TOKEN_TOP_LOGPROBS = 1000
PROBE_RETRIES = 2
# To find out whether a server divides logits by the temperature before it computes log-probabilities: at temperature 0
# it cannot. At 0.5, scaled log-probabilities are twice as far apart; unscaled ones differ only by noise. The limit is
# halfway between the ratios 1 and 2.
SCALING_TEMPERATURE = 0.5
SCALED_SPREAD_RATIO = 1.5
SPREAD_NOISE = 0.2
SCALED_LOGPROBS_MESSAGE = (
    "the server scales log-probabilities by the temperature, so requests are answered at temperature 0 and 1 only"
)
# Fields of vLLM and SGLang. Other servers refuse or ignore them, which `ServerEngine.probe` detects.
CONTINUATION_FIELDS = {"continue_final_message": True, "add_generation_prompt": False}

RETRYABLE_STATUSES = {408, 409, 425, 429}
# Status of this server -> status that a gateway in front of it returns; 502 for all others.
GATEWAY_CODES = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503, 408: 504, 504: 504}
# The server or the account is at fault, not the single request.
SHARED_FAULT_STATUSES = {401, 402, 407, 429, 502, 503, 504}
# A 403 with such a message concerns the content of one request; any other 403 concerns the key.
_FILTERED = re.compile(r"moderat|flagged|content.?(filter|polic|manag)|safety", re.IGNORECASE)
_MODEL = re.compile(r"model|deployment", re.IGNORECASE)
# Errors of httpx that occur before a server is reached.
_UNREACHED = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")

T = TypeVar("T")


class AcceptedCandidates(NamedTuple):
    """A number of candidates for a single token that the server accepts, and the candidates that it returned.

    Attributes:
        requested: The number of candidates in the request.
        logprobs: Token -> log-probability at temperature 0.
    """

    requested: int
    logprobs: dict[str, float]


class FaultError(Exception):
    """A request that failed.

    Attributes:
        reason: Why it failed.
        is_retryable: Whether a retry may succeed.
        affects_all: Whether all other requests would fail too.
        retry_after: Seconds to wait before the next try; None if the server does not say.
        code: HTTP status that a gateway returns for it. 400: the request itself was refused. 502: the reply is
            unusable. 503: the server is unavailable. 504: the reply took too long.
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
        super().__init__()  # without the reason, which no traceback may show before `ask` has removed secrets from it
        self.reason = reason
        self.is_retryable = is_retryable
        self.affects_all = affects_all
        self.retry_after = retry_after
        self.code = code


class ServerEngine(Engine):
    """An engine that generates over HTTP. It cannot score token ids.

    Requests are retried after the status codes 408, 409, 425, 429 and 5xx, broken connections and unusable replies. A
    Retry-After header is respected. `retries` counts all retries.

    Args:
        base_url: Address of the API. A user and password in it are sent as basic authentication and never shown.
        model: Name of the model on the server.
        api_key_env: Name of the environment variable with the key.
        concurrency: Maximum number of requests in flight.
        timeout: Maximum number of seconds without receiving a byte.
        deadline: Maximum number of seconds for a complete reply, including retries and the delays before them.
        max_retries: Maximum number of retries of a request.
        top_logprobs: Number of candidates to request for every token, at most 20; 0 requests no log-probabilities.
        extra_body: Fields that are sent with every request; None for no other fields.
        extra_secrets: Texts that no message may show, such as a key in `extra_body`. The key and the login are never
            shown.

    Raises:
        ValueError: A number is out of range, or `base_url` is not an address.
        ServerError: The key cannot be sent, or the host of `base_url` is invalid.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        timeout: float = 600.0,  # seconds without receiving a byte
        deadline: float = 1800.0,  # seconds for a complete reply, including retries
        max_retries: int = 8,
        top_logprobs: int = 0,
        extra_body: Mapping[str, Any] | None = None,
        extra_secrets: Sequence[str] = (),
    ) -> None:
        if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to {MAX_TOP_LOGPROBS}")
        if concurrency < 1 or max_retries < 0 or timeout <= 0 or deadline <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0, timeout > 0 and deadline > 0")
        # The name is stored with every prediction. It contains neither the version nor settings such as the
        # concurrency, because these do not affect the replies.
        self.name = "server"
        self.model = model_name(model)  # the name that is stored and shown
        self.served_name = model  # the name on the server, which may be a path
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.deadline = deadline
        self.max_retries = max_retries
        self.retries = 0
        self.top_logprobs = top_logprobs
        self.extra_body = dict(extra_body or {})
        # Assumptions until `probe` replaces them by what it finds out about the server.
        self.max_candidates = top_logprobs  # number of candidates to request for the single token of a label
        if top_logprobs == 0:  # no candidates for the tokens of a response, but a label always needs them
            self.max_candidates = MAX_TOP_LOGPROBS
        self.can_continue = False  # whether the server continues a partial response
        self.scales_logprobs = False  # whether the temperature scales log-probabilities
        self.base_url, login = server_address(base_url)
        self._chat_url = _parse_chat_url(self.base_url)
        self._key = _read_key(api_key_env)
        credentials = _encode_login(login)
        secrets = [self._key, credentials, *(login or ()), *extra_secrets]
        # Texts that no message may show. The longest is replaced first, since it may contain a shorter one.
        self._secrets = sorted((secret for secret in secrets if secret), key=len, reverse=True)
        self._http_options: Any = {"headers": _make_headers(self._key, credentials), "follow_redirects": True}
        self._has_warned_about_temperature = False
        self._has_replied = False  # until then, a failed connection means that there is no server
        self._exhausted_in_a_row = 0  # requests that ran out of retries, with no reply between them

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield a generation for every request not in `done`, as they arrive. At most `concurrency` are in flight.

        A fault of the server or of the settings stops the run, and so do 20 requests in a row that run out of retries.
        The outcomes of requests in flight are still yielded before the error is raised. The first response from a
        server that ignores the temperature causes a warning.

        Args:
            requests: The requests. If they are a deque, each is removed from it as it is sent, and the caller may add
                more while iterating.
            done: Keys of the requests to leave out. It is ignored if `requests` is a deque.

        Yields:
            A generation, or a refusal for a request that is refused for good or runs out of retries.

        Raises:
            ServerError: The run has stopped, and nothing is in flight any more.
        """
        if isinstance(requests, deque):
            todo = requests
        else:
            todo = deque(request for request in requests if request.key not in done)
        for outcome in iterate_in_thread(self._receive_outcomes(todo)):
            yield outcome
            if self._has_warned_about_temperature or isinstance(outcome, Refusal):
                continue
            if not outcome.temperature_acts:
                self._has_warned_about_temperature = True
                name = shorten_text(outcome.model, 80)  # the server returned it, so it may be long
                warnings.warn(f"{name} thinks before it answers: the temperature has no effect", stacklevel=2)

    async def _receive_outcomes(self, todo: deque[Request]) -> AsyncGenerator[Generation | Refusal, None]:
        """Yield outcomes as they arrive. If a failure stops the run, raise it once nothing is in flight.

        Requests are sent only when the caller asks for the next outcome, so a caller that stops early pays for no
        further requests.

        Args:
            todo: The requests, which are removed as they are sent.
        """
        in_flight: dict[asyncio.Task[Generation], Request] = {}
        failure: ServerError | None = None
        async with self.make_client() as client:
            while True:
                while failure is None and len(in_flight) < self.concurrency and todo:
                    request = todo.popleft()
                    task = asyncio.create_task(self.ask(client, request))
                    # Marks the exception as retrieved. Otherwise asyncio would log it if the caller stops first.
                    task.add_done_callback(lambda finished: finished.cancelled() or finished.exception())
                    in_flight[task] = request
                if not in_flight:
                    break
                arrived, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                task = arrived.pop()  # if several have arrived, the next `wait` returns the others at once
                request = in_flight.pop(task)
                try:
                    outcome = self._read_outcome(task, request)
                except ServerError as error:
                    failure = failure or error  # the first one is reported
                    continue
                yield outcome
        if failure is not None:
            raise failure

    def _read_outcome(self, task: asyncio.Task[Generation], request: Request) -> Generation | Refusal:
        """Return the generation of a finished task, or a refusal if the request failed.

        Also counts the requests in a row that ran out of retries.

        Raises:
            ServerError: The fault affects all requests, or 20 requests in a row have run out of retries.
        """
        try:
            generation = task.result()
        except FaultError as fault:
            if fault.is_retryable:
                self._exhausted_in_a_row += 1
            else:
                self._exhausted_in_a_row = 0  # the server works, and refuses this request for good
            if fault.affects_all or self._exhausted_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise ServerError(f"{self.base_url} {request.name}: {fault.reason}") from None
            return Refusal(refused=fault.reason, question=request.question, sample=request.sample)
        self._exhausted_in_a_row = 0
        return generation

    def probe(self, warn: Callable[[str], object] = warnings.warn) -> None:
        """Determine what the server supports, by a few one-token requests.

        Sets `max_candidates`, `scales_logprobs` and `can_continue`, and may lower `top_logprobs`.

        Args:
            warn: Called with a message for every feature that the server lacks.

        Raises:
            ServerError: The server does not answer, or returns no log-probabilities.
        """
        # Without log-probabilities, any server that works answers, so a refusal is not about a missing feature.
        first_reply = self._ask_probe("", top_logprobs=0)
        if isinstance(first_reply, Refusal):
            raise ServerError(f"{self.base_url}: the first request was refused: {first_reply.refused}")
        self._probe_logprobs(warn)
        self._probe_continuation(first_reply.prompt_tokens or 0, warn)

    def _ask_probe(self, text: str, *, top_logprobs: int, temperature: float = 0.0) -> Generation | Refusal:
        """Request one token. A copy of the engine sends the request, so that the settings of this one do not change.

        Args:
            text: The partial response to continue; empty for an ordinary request.
            top_logprobs: Number of candidates to request.
            temperature: Sampling temperature.

        Returns:
            The reply; a refusal if the server refuses the request.

        Raises:
            ServerError: The server does not answer.
        """
        chat = [Message(role="user", content="Count.")]
        if text:
            chat.append(Message(role="assistant", content=text))
        request = Request(
            question="probe", messages=tuple(chat), max_tokens=1, temperature=temperature, begun=bool(text)
        )
        prober = copy.copy(self)
        prober.top_logprobs = top_logprobs
        prober.max_candidates = top_logprobs  # is used instead of `top_logprobs` if `text` is not empty
        prober.scales_logprobs = False  # otherwise `_make_body` would refuse temperatures other than 0 and 1
        prober.max_retries = min(self.max_retries, PROBE_RETRIES)
        return next(iter(prober.generate([request])))

    def _probe_logprobs(self, warn: Callable[[str], object]) -> None:
        """Determine how many candidates the server returns, and whether it scales them by the temperature.

        Sets `max_candidates` and `scales_logprobs`, and lowers `top_logprobs` to what the server accepts.

        Args:
            warn: Called with a message if the server returns too few candidates or scales them.

        Raises:
            ServerError: The server refuses log-probabilities or returns none.
        """
        wanted = self.top_logprobs
        if wanted == 0:  # no candidates for the tokens of a response, but a label always needs them
            wanted = MAX_TOP_LOGPROBS
        accepted = self._find_accepted_candidates(wanted)
        is_scaled = self._are_logprobs_scaled(accepted)
        # The server may return the drawn token in addition to the requested number of candidates.
        received = min(len(accepted.logprobs), accepted.requested)
        # For a label, request as many candidates as the server returned here. It may return more for another token, so
        # request at least `wanted`, but no more than it accepts.
        self.max_candidates = min(max(received, wanted), accepted.requested)
        self.top_logprobs = min(self.top_logprobs, accepted.requested)
        self.scales_logprobs = is_scaled
        if received < 2:
            warn(f"{self.model}: the server returns {received} candidate per token, so other labels may be unknown")
        if is_scaled:
            warn(f"{self.model}: {SCALED_LOGPROBS_MESSAGE}")

    def _find_accepted_candidates(self, wanted: int) -> AcceptedCandidates:
        """Request 1000 candidates, then `wanted`, then 5, until the server accepts the number.

        Raises:
            ServerError: The server refuses all three numbers, or returns no candidates.
        """
        for requested in (SINGLE_TOKEN_TOP_LOGPROBS, wanted, FEW_TOP_LOGPROBS):
            reply = self._ask_probe("", top_logprobs=requested)
            if isinstance(reply, Generation):
                break
        logprobs = _list_candidates(reply)
        if not logprobs:
            reason = reply.refused if isinstance(reply, Refusal) else "the server returned none"
            raise ServerError(f"{self.base_url}: no log-probabilities: {reason}")
        return AcceptedCandidates(requested, logprobs)

    def _are_logprobs_scaled(self, accepted: AcceptedCandidates) -> bool:
        """Return whether the log-probabilities are further apart at temperature 0.5 than at 0.

        Logits cannot be divided by a temperature of 0, so the log-probabilities at 0 are unscaled. If those at 0.5 are
        scaled, they are twice as far apart.

        False if this cannot be determined: the server refuses the request, or the replies share fewer than two
        candidates.
        """
        reply = self._ask_probe("", top_logprobs=accepted.requested, temperature=SCALING_TEMPERATURE)
        logprobs = _list_candidates(reply)
        shared = logprobs.keys() & accepted.logprobs.keys()
        spread = _compute_spread([logprobs[token] for token in shared])
        spread_at_zero = _compute_spread([accepted.logprobs[token] for token in shared])
        return spread > SCALED_SPREAD_RATIO * spread_at_zero + SPREAD_NOISE

    def _probe_continuation(self, prompt_tokens: int, warn: Callable[[str], object]) -> None:
        """Determine from the lengths of prompts whether the server continues a partial response; set `can_continue`.

        A server that continues it adds only the tokens of the text to the prompt: a text of four words costs as many
        tokens as four more words. A server that ignores the request also adds the end of the turn, so the first four
        words cost more.

        A final line break must cost a token too. Otherwise the chat template trims messages, and a label after
        `<answer>` and a line break would be read at a different position.

        Args:
            prompt_tokens: Length of the prompt without a partial response; 0 if the server does not report it.
            warn: Called with the reason if the server cannot continue a partial response.
        """
        length_of_four = self._count_prompt_tokens("A A A A")
        length_of_eight = self._count_prompt_tokens("A A A A A A A A")
        length_with_line_break = self._count_prompt_tokens("A A A A\n")
        are_lengths_known = prompt_tokens > 0 and length_of_four > 0
        first_four_tokens = length_of_four - prompt_tokens
        next_four_tokens = length_of_eight - length_of_four
        adds_only_text = next_four_tokens > 0 and first_four_tokens <= next_four_tokens
        is_continued = are_lengths_known and adds_only_text
        keeps_line_break = length_of_four < length_with_line_break
        self.can_continue = is_continued and keeps_line_break
        if self.can_continue:
            return
        reason = "the server ignores or refuses such a request"
        if is_continued:  # only the line break is missing
            reason = "its chat template trims the message"
        warn(f"{self.model}: cannot continue a partial message ({reason}), so unanswered responses stay unanswered")

    def _count_prompt_tokens(self, text: str) -> int:
        """Return the length of the prompt with this partial response; 0 if it is refused or not reported."""
        reply = self._ask_probe(text, top_logprobs=0)
        if isinstance(reply, Refusal):
            return 0
        return reply.prompt_tokens or 0

    def find_model(self) -> None:
        """Set `served_name` and `model` to the one model that the server lists.

        Raises:
            ServerError: The server cannot be reached, or does not list exactly one model.
        """
        try:
            names = self._list_models()
        # ImportError and OSError come from an unusable proxy or certificate, ValueError from an unusable reply.
        except (httpx.HTTPError, ImportError, OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, ValidationError):  # its text has several lines and quotes the reply
                reason = describe_first_problem(error)
            reason = clean_message(reason, self._secrets)
            if type(error).__name__ in _UNREACHED:
                raise ServerError(f"{self.base_url}: no connection: {reason}") from None
            raise ServerError(f"{self.base_url}: the server does not list its models: {reason}; name one") from None
        if len(names) != 1:
            first_names = ", ".join(names[:5]) or "no model"
            raise ServerError(f"{self.base_url}: the server lists {first_names}; name one")
        self.served_name = names[0]
        self.model = model_name(self.served_name)

    def _list_models(self) -> list[str]:
        """Return the names of the models that the server lists; ValueError if its reply is an error or not a list."""
        url = f"{self.base_url}/models"
        reply = httpx.get(url, timeout=CONNECT_TIMEOUT_SECONDS, verify=_certificates(), **self._http_options)
        if not reply.is_success:
            problem = error_message(reply.content) or reply.reason_phrase or "no message"
            raise ValueError(f"{reply.status_code}: {problem}")
        models = ModelList.model_validate_json(reply.content)
        return [model.id for model in models.data]

    def make_client(self) -> httpx.AsyncClient:
        """Make a client for `ask`, which the caller closes; ServerError if the proxy or certificates are unusable."""
        timeout = httpx.Timeout(self.timeout, connect=min(self.timeout, CONNECT_TIMEOUT_SECONDS))
        # Idle connections expire before vLLM's own server closes them, after 5 s.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency, keepalive_expiry=4.0)
        try:
            return httpx.AsyncClient(timeout=timeout, limits=limits, verify=_certificates(), **self._http_options)
        except (ImportError, OSError) as error:  # a proxy that needs a missing package, or a bad SSL_CERT_FILE
            reason = clean_message(str(error), self._secrets)
            raise ServerError(f"{self.base_url}: {reason}") from None

    async def ask(self, client: httpx.AsyncClient, request: Request) -> Generation:
        """Send a request until there is a usable reply.

        Args:
            client: A client from `make_client`.
            request: The request.

        Returns:
            The reply, with the seconds since the first try.

        Raises:
            FaultError: The fault is final, no retry is left, or the deadline has passed. A fault that affects all
                requests is raised even if the deadline passes during the delay after it. The reason is one line
                without secrets and without the prompt.
        """
        started = time.monotonic()
        try_number = 0
        fault: FaultError | None = None  # of the last try; None while a try is in progress
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
                    if self._is_last_try(fault, try_number, elapsed=time.monotonic() - started):
                        break
                    self.retries += 1
                    delay = fault.retry_after
                    if delay is None:
                        delay = retry_delay(try_number)
                    await asyncio.sleep(delay)
        except TimeoutError:
            # The deadline passed during a try, or during the delay after a fault. A fault that affects all requests is
            # kept, because it stops the run, which a missed deadline does not.
            if fault is None or not fault.affects_all:
                reason = f"no whole reply within {self.deadline:g} s, try {try_number}"
                fault = FaultError(reason, is_retryable=True, code=504)
        prompt = [message.content for message in request.messages]
        fault.reason = clean_message(fault.reason, self._secrets, prompt)
        raise fault from None

    def _is_last_try(self, fault: FaultError, try_number: int, *, elapsed: float) -> bool:
        """Whether a request is not retried after a fault.

        Args:
            fault: The fault of the last try.
            try_number: Number of tries so far.
            elapsed: Seconds since the first try began.
        """
        if not fault.is_retryable or try_number > self.max_retries:
            return True
        # Before the first reply, a fault that affects all requests is a failed connection.
        has_no_server = fault.affects_all and not self._has_replied
        return has_no_server and elapsed > STARTUP_RETRY_SECONDS

    async def _post(self, client: httpx.AsyncClient, request: Request, try_number: int) -> Generation:
        """Send a request once and read the reply.

        Args:
            client: A client from `make_client`.
            request: The request.
            try_number: 1 for the first try. The reasons of faults mention it.

        Raises:
            FaultError: Anything goes wrong. `ask` removes secrets and the prompt from its reason.
        """
        body = self._make_body(request)
        raw_reply = bytearray()
        try:
            async with client.stream("POST", self._chat_url, content=json.dumps(body)) as response:
                self._has_replied = True
                async for chunk in response.aiter_bytes():
                    raw_reply += chunk
                    if len(raw_reply) > MAX_REPLY_BYTES:
                        raise FaultError(f"the reply is longer than {MAX_REPLY_BYTES // 2**20} MB", is_retryable=False)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._connection_fault(error, try_number) from None
        if not response.is_success:
            message = error_message(raw_reply)
            if not message:  # perhaps the HTML page of a proxy
                # Secrets are removed before it is shortened, because `ask` would not recognise half of a key.
                page = clean_message(raw_reply.decode(errors="replace"), self._secrets)
                message = shorten_text(page) or "no message"
            raise self._status_fault(response.status_code, response.headers, message, try_number)
        # In a thread, because parsing a long reply takes a tenth of a second and would block a gateway's event loop.
        return await asyncio.to_thread(self._read_reply, bytes(raw_reply), request, try_number)

    def _make_body(self, request: Request) -> dict[str, Any]:
        """Make the body of a request; FaultError if its log-probabilities would be scaled by its temperature."""
        body: dict[str, Any] = {
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "model": self.served_name,
            "messages": [message.model_dump() for message in request.messages],
        }
        # A partial response is continued only by the single token of its label, which needs more candidates.
        top_logprobs = self.max_candidates if request.begun else self.top_logprobs
        if top_logprobs > 0:
            if self.scales_logprobs and request.temperature not in (0, 1):
                raise FaultError(SCALED_LOGPROBS_MESSAGE, is_retryable=False, affects_all=True, code=400)
            body |= {"logprobs": True, "top_logprobs": top_logprobs}
        body |= self.extra_body  # the user's fields take precedence over those above
        if request.begun:  # last, because the reply would not be a continuation without these fields
            body |= CONTINUATION_FIELDS
        return body

    def _read_reply(self, raw_reply: bytes, request: Request, try_number: int) -> Generation:
        """Read a successful reply.

        Raises:
            FaultError: The reply is not a usable completion (retried), or a filter emptied it (not retried).
        """
        try:
            reply = Reply.model_validate_json(raw_reply)
        except ValidationError as error:
            problem = error_message(raw_reply)
            if not problem:
                is_html = raw_reply.lstrip()[:1] == b"<"
                problem = "HTML" if is_html else describe_first_problem(error)
            raise FaultError(f"unusable reply in try {try_number}: {problem}", is_retryable=True) from None
        choice = reply.choices[0]
        message = choice.message
        if choice.finish_reason == "content_filter" and not message.text:
            raise FaultError("the reply was withheld: finish_reason content_filter", is_retryable=False)
        has_content = message.content is not None or message.refusal is not None
        is_thinking = message.separate_reasoning is not None
        # A thinking model that ran out of tokens returns reasoning without content. That is usable: a response without
        # an answer.
        if not has_content and not is_thinking:
            raise FaultError(f"unusable reply in try {try_number}: neither content nor reasoning", is_retryable=True)
        reply_text = cut_after_stop(choice, request.stop)
        model = model_name(reply.model or self.served_name)
        ignores_temperature = is_thinking and self._is_deepseek_service(model)
        return Generation(
            question=request.question,
            sample=request.sample,
            text=reply_text.text,
            reasoning=message.separate_reasoning,
            tops=reply_text.candidates,
            mean_logprob=reply_text.mean_logprob,
            prompt_tokens=reply.prompt_tokens,
            tokens=reply.completion_tokens,
            finish_reason=choice.finish_reason,
            model=model,
            temperature_acts=not ignores_temperature,
        )

    def _is_deepseek_service(self, model: str) -> bool:
        """Whether the server is DeepSeek's own service, which ignores the temperature in thinking mode.

        It is recognised by its host or, behind a proxy, by the name of the model that always thinks. On vLLM or SGLang
        the same weights respect the temperature.
        """
        host = urlsplit(self.base_url).hostname or ""
        is_deepseek_host = host == "deepseek.com" or host.endswith(".deepseek.com")
        return is_deepseek_host or model == "deepseek-reasoner"

    def _status_fault(self, status: int, headers: Mapping[str, str], message: str, try_number: int) -> FaultError:
        """Make the fault for an HTTP error.

        It affects all requests if the status does, or if the server wants a wait that is too long, the key lacks
        permission, or the model is unknown.

        Args:
            status: The status code.
            headers: The headers of the reply.
            message: The server's message.
            try_number: The number of the try, for the reason.
        """
        if status == 401:
            problem = "was refused" if self._key else "is not set"
            reason = f"401: the key in environment variable {self.api_key_env} {problem}"
            return FaultError(reason, is_retryable=False, affects_all=True)
        retry_after = read_retry_after(headers)
        is_wait_too_long = retry_after is not None and retry_after > LONGEST_RETRY_AFTER_SECONDS
        lacks_permission = status == 403 and not _FILTERED.search(message)
        is_unknown_model = status == 404 and _MODEL.search(message) is not None
        is_shared_status = status in SHARED_FAULT_STATUSES
        is_retryable_status = status in RETRYABLE_STATUSES or status >= 500
        status_and_try = f"{status} in try {try_number}"
        header = headers.get("retry-after")
        if header:
            status_and_try = f"{status_and_try}, Retry-After {header}"
        return FaultError(
            f"{status_and_try}: {message}",
            is_retryable=is_retryable_status and not is_wait_too_long,
            affects_all=is_shared_status or is_wait_too_long or lacks_permission or is_unknown_model,
            retry_after=retry_after,
            code=GATEWAY_CODES.get(status, 502),
        )

    def _connection_fault(self, cause: BaseException, try_number: int) -> FaultError:
        """Make the fault for a failed connection. Before the first reply, it means that there is no server."""
        kind = type(cause).__name__
        detail = str(cause) or kind
        if kind == "TooManyRedirects":
            return FaultError(f"redirected without end in try {try_number}", is_retryable=False, affects_all=True)
        has_server = self._has_replied or isinstance(cause, httpx.ReadTimeout)  # it took the request, but is slow
        if kind in _UNREACHED or not has_server:
            reason = f"no connection in try {try_number}: {detail}"
            return FaultError(reason, is_retryable=True, affects_all=True, code=503)
        if isinstance(cause, httpx.TimeoutException):
            reason = f"nothing came for {self.timeout:g} s in try {try_number}"
            return FaultError(reason, is_retryable=True, code=504)
        return FaultError(f"the connection broke in try {try_number}: {detail}", is_retryable=True)


def _parse_chat_url(base_url: str) -> httpx.URL:
    """Return the address of chat completions. It is parsed once per engine, since parsing takes 0.1 ms.

    Raises:
        ServerError: httpx refuses the address, mostly because the host is not a valid domain name.
    """
    try:
        return httpx.URL(f"{base_url}/chat/completions")
    except httpx.InvalidURL:
        raise ServerError(f"base_url: {urlsplit(base_url).hostname} is not a valid host") from None


def _encode_login(login: tuple[str, str] | None) -> str:
    """Encode user and password for basic authentication; empty without a login."""
    if login is None:
        return ""
    return base64.b64encode(":".join(login).encode()).decode()


def _read_key(variable: str) -> str:
    """Return the key in an environment variable, or an empty string; ServerError if HTTP cannot transmit it."""
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ServerError(f"environment variable {variable}: its value cannot be sent in an HTTP header")
    return key


def _make_headers(key: str, credentials: str) -> dict[str, str]:
    """Make the headers of all requests.

    Args:
        key: The API key; empty for none.
        credentials: The encoded login for basic authentication, which takes precedence over the key; empty for none.
    """
    headers = {"User-Agent": f"catto/{__version__}", "Content-Type": "application/json"}
    if credentials:
        headers["Authorization"] = f"Basic {credentials}"
    elif key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _list_candidates(reply: Generation | Refusal) -> dict[str, float]:
    """Return the candidates for all tokens of a reply: token -> log-probability. A refusal has none."""
    candidates: dict[str, float] = {}
    if isinstance(reply, Generation):
        for _, token_candidates in reply.tops or ():
            candidates.update(token_candidates)
    return candidates


def _compute_spread(values: list[float]) -> float:
    """Return the difference between the largest and the smallest value; 0 without values."""
    if not values:
        return 0.0
    return max(values) - min(values)


# The trusted certificates are read once for all clients, because reading them takes 0.04 s.
_certificates = cache(httpx.create_ssl_context)


def iterate_in_thread(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an async generator, on an event loop in a separate thread.

    The thread lets this work in a notebook, where a loop is already running, and lets requests proceed while the caller
    works. Dropping the iterator cancels the generator's tasks. If it is still open when the interpreter exits, nothing
    is closed: the thread no longer runs then, and waiting for it would never end.

    Args:
        stream: The generator. None marks its end here, so it must not yield None.

    Yields:
        What the generator yields.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def next_item() -> T | None:
        return await anext(stream, None)

    async def cancel_and_close() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # until all are cancelled
        await stream.aclose()

    try:
        while True:
            item = asyncio.run_coroutine_threadsafe(next_item(), loop).result()
            if item is None:
                break
            yield item
    finally:
        if not sys.is_finalizing():
            closing = asyncio.run_coroutine_threadsafe(cancel_and_close(), loop)
            with suppress(TimeoutError):  # a connection that does not close must not block the process
                closing.result(CLOSING_TIMEOUT_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSING_TIMEOUT_SECONDS)
            if not thread.is_alive():  # the loop of a thread that hangs cannot be closed
                loop.close()


def retry_delay(retry: int) -> float:
    """Return the seconds before retry 1, 2, ...: doubling from 0.5 to 8, less a random share of up to a quarter."""
    longest = float(min(FIRST_DELAY_SECONDS * 2 ** (retry - 1), LONGEST_DELAY_SECONDS))
    return longest * (1 - 0.25 * random.random())
