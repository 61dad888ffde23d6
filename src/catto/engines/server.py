"""Any OpenAI-compatible server as an engine: vLLM, SGLang, DeepSeek, OpenAI, ...

Every response is a request of its own, with its own temperature and seed, so no server needs to know `n`.
`stop` is applied here, to the finished text: servers drop the stop text, and some look for it in the reasoning too.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
from pydantic import ValidationError

from catto.engines import Context, Generation, Key, Request, Scores
from catto.engines.arrivals import Put, arrivals
from catto.engines.replies import Reply, cut_after_stop
from catto.records import first_problem

# A key-less local server gets this in place of a key: the client insists on one.
NO_KEY = "none"
FIRST_DELAY, LONGEST_DELAY = 0.5, 8.0


class ServerError(RuntimeError):
    """What a server refused for good, in one line and without the key."""


class ServerEngine:
    """The generating half of the `Engine` protocol over HTTP.

    `max_retries` bounds the repeats of one request: the client's own (429 with its Retry-After, 408, 409, 5xx, no
    connection, no byte for `timeout` seconds) and ours (broken JSON, no choices, no content) draw on the same budget.
    `retries` counts both. `top_logprobs` (at most 20) asks for the best candidates of every token.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        timeout: float = 600.0,
        max_retries: int = 8,
        top_logprobs: int = 0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 <= top_logprobs <= 20:
            raise ValueError(f"top_logprobs is {top_logprobs}, expected 0 to 20")
        if concurrency < 1 or max_retries < 0 or timeout <= 0:
            raise ValueError("expected concurrency >= 1, max_retries >= 0 and timeout > 0")
        self.name = f"server openai-{openai.__version__}"
        self.model = model
        self.base_url = base_url
        self.api_key_env = api_key_env
        self.concurrency = concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self.top_logprobs = top_logprobs
        self.extra_body = dict(extra_body or {})
        self.retries = 0
        self._warned = False

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield a generation for every request not in `done`, as they arrive, at most `concurrency` at a time.

        A request that fails for good stops the asking; what is in flight is still awaited and yielded, then a
        `ServerError` is raised.
        """
        todo = (request for request in requests if request.key not in done)
        arriving: Iterator[Generation] = arrivals(lambda put: self._ask_all(todo, put))
        for generation in arriving:
            yield generation
            if not generation.temperature_acts and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{generation.model} thinks before it answers: the temperature does not act", stacklevel=2
                )

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Refuse: chat servers take texts, not token ids."""
        raise NotImplementedError("a server cannot score token ids; use a local engine")

    async def _ask_all(self, todo: Iterator[Request], put: Put[Generation]) -> None:
        failures: list[ServerError] = []
        async with self._client() as client:
            await asyncio.gather(*(self._work(client, todo, put, failures) for _ in range(self.concurrency)))
        if failures:
            raise failures[0] from None

    async def _work(
        self, client: openai.AsyncOpenAI, todo: Iterator[Request], put: Put[Generation], failures: list[ServerError]
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
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, timeout=self.timeout)

    def _key(self) -> str | None:
        return os.environ.get(self.api_key_env, "").strip() or None

    async def _ask(self, client: openai.AsyncOpenAI, request: Request) -> Generation:
        """Ask until there is a usable reply or no retry is left."""
        started, left, ours = time.monotonic(), self.max_retries, 0
        while True:
            content, taken = await self._post(client, request, left)
            self.retries += taken
            left -= taken
            try:
                reply = Reply.model_validate_json(content)
            except ValidationError as error:
                problem = first_problem(error)
            else:
                return self._generation(request, reply, time.monotonic() - started)
            if left <= 0:
                raise self._failure(request, f"unusable reply in try {self.max_retries + 1}: {problem}")
            left, ours, self.retries = left - 1, ours + 1, self.retries + 1
            await asyncio.sleep(back_off(ours))

    async def _post(self, client: openai.AsyncOpenAI, request: Request, left: int) -> tuple[bytes, int]:
        """Post once, with the client's own retries; return the reply's bytes and how many retries it took."""
        try:
            api = client.with_options(max_retries=left).chat.completions.with_raw_response
            raw = await api.create(**self._body(request))
        except openai.OpenAIError as error:
            taken = _retries_of(error)
            self.retries += taken
            raise self._failure(request, self._reason(error, self.max_retries - left + taken + 1)) from None
        return raw.content, raw.retries_taken

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
            prompt_tokens=reply.usage.prompt_tokens,
            tokens=reply.usage.completion_tokens,
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

    def _failure(self, request: Request, reason: str) -> ServerError:
        url = urlsplit(self.base_url)
        place = f"{url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}{url.path}"
        line = " ".join(f"{place} question {request.question} sample {request.sample}: {reason}".split())
        key = self._key()
        return ServerError((line.replace(key, "[key]") if key else line)[:500])

    def _reason(self, error: openai.OpenAIError, tries: int) -> str:
        """Say why the client gave up."""
        if isinstance(error, openai.AuthenticationError):
            what = "was refused" if self._key() else "is not set"
            return f"401: the key in environment variable {self.api_key_env} {what}"
        if isinstance(error, openai.APITimeoutError):
            return f"nothing came for {self.timeout:g} s in try {tries}"
        if isinstance(error, openai.APIConnectionError):
            return f"no connection in try {tries}: {error.__cause__ or error}"
        if isinstance(error, openai.APIStatusError):
            wait = error.response.headers.get("retry-after")
            return f"{error.status_code} in try {tries}{f', Retry-After {wait}' if wait else ''}: {error.message}"
        return str(error)


def _retries_of(error: openai.OpenAIError) -> int:
    """How often the client repeated the request before it raised this: it numbers its requests in a header."""
    request = getattr(error, "request", None)
    return int(request.headers.get("x-stainless-retry-count", 0)) if request is not None else 0


def back_off(retry: int) -> float:
    """Seconds before retry 1, 2, ...: doubling from half a second to eight, less up to a quarter at random."""
    return float(min(FIRST_DELAY * 2 ** (retry - 1), LONGEST_DELAY)) * (1 - 0.25 * random.random())
