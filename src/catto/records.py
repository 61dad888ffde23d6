"""What the stages pass to each other: one JSON object a line, a manifest beside the file.

A stage reads records and writes records; it never reaches into another stage. Reading validates: a bad row is one
`DataError` that names the file, the row and the field.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from catto.files import replacing
from catto.problems import UNKNOWN, DataError, parse_json, shortened, validation_problem

SCHEMA_VERSION = 1
# One record is a question or a response of a few kilobytes; a longer line is a broken or foreign file.
MAX_LINE_BYTES = 16 * 2**20

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


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


class Refusal(Record):
    """A request that got no usable reply and is left out: one line of why, without key or prompt.

    `refused` stands first, so that a line of a file tells by its beginning what it is.
    """

    refused: str
    question: str
    sample: int = Field(ge=0)

    @property
    def key(self) -> tuple[str, int]:
        """(question, sample)."""
        return self.question, self.sample


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
                yield row, decoded(line, path, row).strip()


def decoded(line: bytes, path: Path, number: int, unit: Literal["row", "line"] = "row") -> str:
    """Return a line as text; one that is not UTF-8, or that no text file holds, is a DataError.

    A quoted field of a CSV file may hold line breaks: there `unit` is `line`, which is not the row's number.
    """
    row, place = (number, "") if unit == "row" else (None, f"line {number}: ")
    if b"\0" in line:
        raise DataError(path, row, f"{place}holds a NUL byte, expected UTF-8 text (this may be UTF-16, or no text)")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} of the line" if unit == "row" else f"byte {error.start}"
        raise DataError(path, row, f"{place}not UTF-8 at {where}") from None


@contextmanager
def opened(path: Path, *, plain: bool = False) -> Iterator[IO[bytes]]:
    """Open a regular file, a gzipped one as what it holds unless `plain`; one that cannot be read is a DataError."""
    import gzip
    import zlib

    try:
        check_regular(path)
        file = gzip.open(path, "rb") if path.suffix == ".gz" and not plain else path.open("rb")  # noqa: SIM115 (closed below)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, DataError) else unreadable(path, error) from None
    with file:
        try:
            yield file  # type: ignore[misc]
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(path, None, f"broken gzip file: {error}") from None
        except OSError as error:  # some files of /proc open and cannot be read
            raise unreadable(path, error) from None


KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file: a pipe would wait for ever, a device has no end."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise DataError(path, None, f"expected a file, got {KINDS.get(kind, 'a device')}")


def unreadable(path: Path, error: OSError | ValueError) -> DataError:
    """The error of a file that cannot be opened or read."""
    return DataError(path, None, getattr(error, "strerror", None) or str(error))


def read_text(path: Path, most: int = MAX_LINE_BYTES) -> str:
    """Return a whole small file as text; one of more than `most` bytes is refused."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(path, None, f"larger than {most / 2**20:g} MB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, None, f"not UTF-8 at byte {error.start}") from None


def read_json(path: Path, most: int = MAX_LINE_BYTES) -> Any:
    """Return the value of a JSON file."""
    text = read_text(path, most)
    try:
        return parse_json(text)
    except ValueError as error:
        hint = "; JSON lines must be named .jsonl" if "Extra data" in str(error) else ""
        raise DataError(path, None, f"{error}{hint}") from None


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row, object) of a JSON-lines file."""
    for row, line in read_lines(path):
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(path, row, f"{error}{_other_format(line) if row == 1 else ''}") from None
        if not isinstance(value, dict):
            hint = _other_format(line) if row == 1 else ""
            raise DataError(path, row, f"expected a JSON object, got {type(value).__name__}{hint}")
        yield row, value


def _other_format(line: str) -> str:
    """A hint where the first line is that of another format."""
    if line.startswith("["):
        return "; a JSON list must be named .json"
    return "; a CSV file must be named .csv" if "," in line and not line.startswith("{") else ""


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records of a file, each validated; the error names file, row and field."""
    for row, value in read_objects(path):
        try:
            yield kind.model_validate(value)
        except ValidationError as error:
            raise DataError(path, row, first_problem(error, value)) from None


def first_problem(error: ValidationError, value: object = UNKNOWN) -> str:
    """Say the first problem of a pydantic error in one line: field, what was expected, what is there."""
    place, message = validation_problem(error, value)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{'.'.join(place)}: {message}{more}" if place else f"{message}{more}"


def json_line(record: Record, path: Path, row: int) -> str:
    """A record as a line of the file that it goes to; one that could not be read back is refused."""
    line = record.model_dump_json() + "\n"
    if len(line) > MAX_LINE_BYTES // 4 and len(line.encode()) > MAX_LINE_BYTES:
        raise DataError(
            path, row, f"line would be longer than {MAX_LINE_BYTES // 2**20} MB, which could not be read back"
        )
    return line


def write_records(path: Path, records: Iterable[Record], manifest: Manifest | None = None) -> int:
    """Write records as JSON lines, whole or not at all, then the manifest; return how many."""
    count = 0
    with replacing(path) as file:
        for record in records:
            file.write(json_line(record, path, count + 1))
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
    value = read_json(place)
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        raise DataError(place, None, first_problem(error, value)) from None
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


# Folders, files and places in pages are named for recipes, tasks and methods.
MOST_NAME = 64
_NAME = re.compile(r"(?=.*[^.])[A-Za-z0-9._+-]{1,64}", re.ASCII)


def checked_name(name: str, what: str, plus: bool = False) -> str:
    """Return a name that is safe as a part of a path, or raise ValueError. plus: `+` is allowed, as in `dpo+catto`.

    >>> checked_name("../escaped", "task")
    Traceback (most recent call last):
    ValueError: task name '../escaped': expected letters, digits and ._-, at most 64, not dots alone
    """
    if not _NAME.fullmatch(name) or ("+" in name and not plus):
        signs = "._-+" if plus else "._-"
        shown = shortened(repr(name), 80)
        raise ValueError(
            f"{what} name {shown}: expected letters, digits and {signs}, at most {MOST_NAME}, not dots alone"
        )
    return name


def content_hash(value: object, length: int = 16) -> str:
    """A stable hex digest of any JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
