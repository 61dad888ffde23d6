"""Who generates text: one small protocol; Transformers, vLLM or an OpenAI-compatible server behind it.

`generate` draws responses, one per `Request`; `score` gives the log-probabilities of candidate tokens after a context.
A request carries its own temperature and seed, so a response depends on (question, sample) alone and a killed run
resumes with the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import Field

from catto.errors import DataError
from catto.io.text_files import read_json
from catto.records import Key as Key
from catto.records import Message, Record, Refusal, Sampled

# Temperatures at which the log-sum-exp is stored with a prediction: its confidence can be rescaled from the file.
TAU_GRID = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0)


class Request(Sampled):
    """Ask for one response: sample `sample` of question `question`. Temperature 0 is greedy."""

    question: str
    sample: int = 0
    messages: tuple[Message, ...]
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    max_tokens: int = Field(default=512, gt=0)
    stop: tuple[str, ...] = ()  # generation ends after the first of these texts, which is kept
    keep_states: bool = False  # the next `score` is of this response: an engine may keep what makes it cheap
    begun: bool = False  # the last message is the beginning of the response, which a server is to continue


class Generation(Sampled):
    """One response as an engine gives it. What an engine cannot know is None."""

    question: str
    sample: int
    text: str
    reasoning: str | None = None  # where the server returns it apart from the text
    token_ids: tuple[int, ...] | None = None
    # token texts with the log-probabilities of the best candidates, where a server returns them
    tops: tuple[tuple[str, dict[str, float]], ...] | None = None
    mean_logprob: float | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    model: str
    temperature_acts: bool = True
    seconds: float | None = None


class Context(Record):
    """Where to score: the prompt's messages, the response's tokens so far, the candidate next tokens."""

    messages: tuple[Message, ...]
    prefix: tuple[int, ...]  # token ids of the response up to the scored position
    candidates: tuple[int, ...]
    response: Key | None = None  # the response that this is a context of, where the engine generated it just before


class Scores(Record):
    """Full-vocabulary log-probabilities of a context's candidates (temperature 1) and, per tau of the grid,
    `logsumexp(logits / tau) - max(logits) / tau`."""

    logprobs: tuple[float, ...]
    logsumexp: dict[str, float] | None = None


class LabelScores(Scores):
    """Scores at a label of a stored response: after its first `kept` tokens and those `added` to close it."""

    kept: int
    added: tuple[int, ...]
    candidates: tuple[int, ...]


class ScoredGeneration(Generation):
    """A generation with the scores of the label that was read when it was written; none if only text is known."""

    labels: tuple[LabelScores, ...] = ()


class Engine(Protocol):
    """Generates responses and scores candidate tokens. A subclass inherits the defaults below.

    An engine with a tokenizer exchanges tokens: its generations carry token ids, and `score` takes them. One without
    exchanges text: its labels are read from `Generation.tops`, and `score` raises NotImplementedError.
    """

    name: str  # stored with every prediction: engine, dtype, versions
    model: str
    batch_size: int = 16  # how many responses it generates at once
    tokenizer: Any = None
    positions: int | None = None  # most tokens of prompt and response together, where there is a limit

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield one generation for every request whose key is not in `done`, in any order, as they arrive.

        Requests may be read more than once.
        A server may refuse single requests: it yields a refusal in place of the generation.
        """
        ...

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        message = f"{self.name} cannot score token ids; use a local engine"
        raise NotImplementedError(message)


def find_stop_end(text: str, stops: Collection[str]) -> int | None:
    """Find where the first stop text ends. The end of an answer that the reasoning quotes does not count.

    Args:
        text: A response, possibly unfinished.
        stops: The stop texts.

    Returns:
        The index after the stop text; None if there is none, so that `text[:end]` is the whole text.

    Example:
        >>> find_stop_end("one</b> two</a>", ("</a>", "</b>"))
        7
        >>> find_stop_end("<think>As <answer>A</answer>?</think><answer>B</answer>", ("</answer>",))
        55
    """
    first = min((text.index(stop) for stop in stops if stop in text), default=None)
    if first is None:
        return None
    start = 0
    if "</answer>" in stops:
        opened = text.find("<think>")
        closed = text.find("</think>")
        is_reasoning_unfinished = closed < 0 <= opened < first
        if is_reasoning_unfinished:
            return None
        is_in_reasoning = first < closed and not first < opened < closed
        if is_in_reasoning:
            start = closed
    ends = []
    for stop in stops:
        begin = text.find(stop, start)
        if begin >= 0:
            ends.append(begin + len(stop))
    return min(ends, default=None)


HUB_TIMEOUT = 10  # seconds
_CONFIGS = ("config.json", "adapter_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def is_hub_id(place: str) -> bool:
    """Whether this can be a name on the hub: `owner/name`, or one of the few names without an owner.

    >>> is_hub_id("Qwen/Qwen3-4B"), is_hub_id("../model")
    (True, False)
    """
    return _HUB_ID.fullmatch(place) is not None


def model_name(model: str) -> str:
    """A server's name for its model; of a local file or folder its own name, without the path to it.

    >>> model_name("/models/SmolLM2.gguf"), model_name("Qwen/Qwen3-4B")
    ('SmolLM2.gguf', 'Qwen/Qwen3-4B')
    """
    path = PureWindowsPath(model)  # reads both kinds of slashes
    return path.name if path.root and path.name else model


def check_model(place: str | Path) -> None:
    """Raise DataError for a place that no model can be loaded from. The hub is not asked whether it has an id."""
    path = Path(place)
    if not str(place).strip():
        raise DataError("model", None, "expected a folder with a model or a hub id, got an empty name")
    if path.is_dir():
        config = next((path / name for name in _CONFIGS if (path / name).exists()), None)
        if config is None:
            raise DataError(path, None, f"not a model: neither {' nor '.join(_CONFIGS)} in this folder")
        if not isinstance(read_json(config), dict):
            raise DataError(config, None, "expected a JSON object")
    elif path.exists():
        hint = "; convert it first with examples/import_gguf.py" if path.suffix == ".gguf" else ""
        raise DataError(path, None, f"expected a folder with a model, got a file{hint}")
    elif not is_hub_id(str(place)):
        raise DataError(place, None, "no such folder, and not a hub id, which is owner/name")


def check_hub(place: str | Path) -> None:
    """Raise DataError for a hub id that is not in the local cache if the hub does not have it, or cannot be reached.

    One request is made, without retries: loading a model would repeat it for half a minute before it fails. Anything
    but a missing model or a missing connection is left to the library that loads it.
    """
    if Path(place).exists():
        return
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        return
    name = str(place)
    for config in _CONFIGS:
        if isinstance(try_to_load_from_cache(name, config), str):
            return
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIGS[0]), timeout=HUB_TIMEOUT)
    except GatedRepoError:
        return
    except RepositoryNotFoundError:
        raise DataError(place, None, "no such folder, and the hub has no such model, or it is private") from None
    except HfHubHTTPError:
        return
    except Exception:  # the errors of a missing connection share no class
        reason = "no such folder, not in the local cache, and the hub cannot be reached"
        raise DataError(place, None, reason) from None


def server_address(url: str) -> tuple[str, tuple[str, str] | None]:
    """The address of a server without user and password, and those; ValueError, which shows neither, for no address.

    >>> server_address("http://me:secret@localhost:8000/v1/")
    ('http://localhost:8000/v1', ('me', 'secret'))
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if complete and not (parts.query or parts.fragment):
            login = (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None
            plain = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/"))
            return urlunsplit(plain), login
    shown = "another" if "@" in url or "?" in url else repr(url)
    raise ValueError(f"expected an address such as http://localhost:8000/v1, got {shown}")


def open_engine(name: Literal["transformers", "vllm"], model: str, **options: Any) -> Engine:
    """Load a model in this process with the library of that name; options: see its engine."""
    if name == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(model, **options)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(model, **options)
