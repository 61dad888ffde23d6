"""What the stages pass to each other: one JSON object a line, a manifest beside the file.

A stage reads records and writes records; it never reaches into another stage. Reading validates: a bad row is one
`DataError` that names the file, the row and the field.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SCHEMA_VERSION = 1
# One record is a question or a response of a few kilobytes; a longer line is a broken or foreign file.
MAX_LINE_BYTES = 16 * 2**20

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class DataError(ValueError):
    """Bad input, told in one line: `file row 17: field: what was expected`."""

    def __init__(self, source: str | Path, row: int | None, message: str) -> None:
        place = f"{source} row {row}" if row is not None else f"{source}"
        super().__init__(f"{place}: {message}")


class Record(BaseModel):
    """A closed, immutable record: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Option(Record):
    """One choice of a question: the label that answers with it, and its text."""

    label: str
    text: str


class Question(Record):
    """A multiple-choice question. `fields` are its text parts by name (`question`, or `premise` and `hypothesis`)."""

    id: str
    task: str
    split: Split
    fields: dict[str, str]
    options: tuple[Option, ...] = Field(min_length=2)
    gold: str
    posterior: dict[str, float] | None = None  # label -> exact probability, where the world is known

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order in which the options stand."""
        return tuple(option.label for option in self.options)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels {', '.join(self.labels)} repeat")
        if self.gold not in self.labels:
            raise ValueError(f"gold {self.gold!r} is not one of {', '.join(self.labels)}")
        return self


class Response(Record):
    """One answer of a teacher to one question, right or wrong, with how it was sampled."""

    question: str
    sample: int = Field(ge=0)
    text: str
    reasoning: str | None = None
    label: str | None = None
    correct: bool
    model: str
    temperature: float | None = Field(default=None, ge=0)
    temperature_acts: bool = True  # False where the server is known to ignore the temperature
    seed: int | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    mean_logprob: float | None = None
    finish_reason: str | None = None
    seconds: float | None = None


class Message(Record):
    """One turn of a chat, as Transformers' chat templates take it."""

    role: Literal["system", "user", "assistant"]
    content: str


class SftRow(Record):
    """TRL's conversational prompt-completion format with our columns. `label` is what the completion answers."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    question: str
    task: str
    labels: tuple[str, ...]
    gold: str
    label: str | None
    correctness_rate: float = Field(ge=0, le=1)


class PreferenceRow(Record):
    """TRL's conversational preference format with our columns."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    question: str
    task: str
    labels: tuple[str, ...]
    gold: str
    chosen_label: str
    rejected_label: str | None
    correctness_rate: float = Field(ge=0, le=1)


class Prediction(Record):
    """One candidate answer of one question; k candidates are k lines. Docs: docs/conventions.md."""

    question: str
    task: str
    split: Split
    gold: str
    sample: int = Field(ge=0)
    text: str
    label: str | None
    source: Literal["free", "plain", "fallback"]
    confidence: float = Field(ge=0, le=1)
    confidence_raw: float | None = None  # before a calibrator, where one was applied
    label_logprobs: dict[str, float] | None = None
    logsumexp: dict[str, float] | None = None  # tau -> log-sum-exp(logits / tau) - max / tau
    mean_logprob: float | None = None
    tokens: int | None = None
    temperature: float = Field(ge=0)
    seed: int
    engine: str
    model: str


class Manifest(Record):
    """What stands beside a file of records: what it is, how it came to be, how many."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    counts: dict[str, int]
    recipe_hash: str | None = None
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    notes: dict[str, Any] = Field(default_factory=dict)


R = TypeVar("R", bound=Record)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of every non-empty line, rows counted from 1, streaming."""
    with opened(path) as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.strip():
                yield row, _decoded(line, path, row)


def _decoded(line: bytes, path: Path, row: int) -> str:
    try:
        return line.decode("utf-8-sig" if row == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(path, row, f"not UTF-8 at byte {error.start} of the line") from None


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open plain or gzipped bytes; a file that cannot be read is a DataError."""
    import gzip
    import zlib

    try:
        file = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise DataError(path, None, error.strerror or str(error)) from None
    with file:
        try:
            yield file  # type: ignore[misc]
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(path, None, f"broken gzip file: {error}") from None


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row, object) of a JSON-lines file."""
    for row, line in read_lines(path):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(path, row, f"not JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataError(path, row, f"expected a JSON object, got {type(value).__name__}")
        yield row, value


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records of a file, each validated; the error names file, row and field."""
    for row, line in read_lines(path):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise DataError(path, row, first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Say the first problem of a pydantic error in one line: field, what is wrong."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {message}{more}" if place else f"{message}{more}"


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Write beside `path` and rename on success, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_records(path: Path, records: Iterable[Record], manifest: Manifest | None = None) -> int:
    """Write records as JSON lines, whole or not at all, then the manifest; return how many."""
    count = 0
    with replacing(path) as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    if manifest is not None:
        write_manifest(path, manifest)
    return count


def manifest_path(path: Path) -> Path:
    """The manifest's place: `rows.jsonl` -> `rows.manifest.json`."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest of the records at `path`."""
    with replacing(manifest_path(path)) as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest of the records at `path`."""
    place = manifest_path(path)
    try:
        manifest = Manifest.model_validate_json(place.read_bytes())
    except OSError as error:
        raise DataError(place, None, error.strerror or str(error)) from None
    except ValidationError as error:
        raise DataError(place, None, first_problem(error)) from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise DataError(place, None, f"schema_version {manifest.schema_version}, this catto reads {SCHEMA_VERSION}")
    return manifest


def library_versions(*names: str) -> dict[str, str]:
    """Installed versions of catto and the named distributions; absent ones are left out."""
    found: dict[str, str] = {}
    for name in ("catto", *names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def content_hash(value: object, length: int = 16) -> str:
    """A stable hex digest of any JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
