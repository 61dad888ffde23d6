"""Files that are whole or not there: atomic writes, one lock, and the seal of a finished folder.

Every file that the package writes goes through `replacing` and every folder through `building`: written beside its
place, flushed to the disk, then renamed. A kill or a full disk leaves the old file or none, never half of the new one.
Files that grow (responses, predictions) are appended line by line by their own classes.

Records in files.

Read the rows of JSON lines, JSON, CSV and Parquet files, plain or gzipped, row by row where the format allows.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from catto.problems import UNKNOWN, DataError, listed, parse_json, validation_problem
from catto.records import SCHEMA_VERSION, Key, Manifest, Record, Refusal, Sampled

# ---- files


BUSY = "another run is writing here"


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Write a text file whole or not at all. UTF-8, newlines as they are written."""
    with replacing_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()


@contextmanager
def replacing_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Write a file whole or not at all: beside, flush, fsync, rename, fsync of the folder.

    What cannot be written (disk full, no permission, a folder or a device in its place) is one DataError.
    """
    if path.exists() and not path.is_file():
        raise DataError(path, None, "cannot be written: it is there and is not a regular file")
    beside = path.with_name(_beside(path))
    with _told(path, beside):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            with suppress(OSError):  # the first error is the one to tell
                beside.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Make a folder whole or not at all: yield an empty one beside it, which takes its place at the end.

    What was at its place, a part of an older attempt, goes away at the last moment.
    """
    beside = folder.with_name(_beside(folder))
    with _told(folder, beside):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            for file in sorted(beside.rglob("*")):
                _sync(file)
            sync_folder(beside)
            if folder.exists():
                shutil.rmtree(folder)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        sync_folder(folder.parent)


def _beside(path: Path) -> str:
    """A hidden name for the unfinished file, short enough for every file system; `.*.part` is cleared away."""
    return f".{path.name[:100]}.{os.getpid()}.part"


@contextmanager
def _told(path: Path, beside: Path) -> Iterator[None]:
    """Tell an error of writing `path` in one line. Errors of other files, raised by the caller's own code, pass."""
    try:
        yield
    except OSError as error:
        name = os.fspath(error.filename) if error.filename is not None else str(beside)
        ours = error.errno is not None and (name.startswith(str(beside)) or str(path).startswith(name))
        if not ours:
            raise
        raise DataError(path, None, f"cannot be written: {error.strerror}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk: without it a power cut can undo a rename. Windows cannot, and need not."""
    if hasattr(os, "O_DIRECTORY"):
        _sync(folder)


@contextmanager
def locked(path: Path, busy: str = BUSY) -> Iterator[None]:
    """Hold the lock file `path` for this process; the system drops the lock of a killed one."""
    with _told(path, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        hold(file, path.parent, busy)
        yield


def hold(file: IO[bytes], place: Path, busy: str = BUSY) -> None:
    """Lock an open file for this process until it is closed; `place` is what an error names.

    A lock that another process holds is told by `busy`; a file system that cannot lock is told as what it is.
    """
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DataError(place, None, busy) from None
        raise DataError(place, None, f"cannot be locked: {error.strerror}") from None


class Seal(NamedTuple):
    """What a finished file was: its size in bytes and its SHA-256."""

    size: int
    sha256: str


def sealed(folder: Path, leave: frozenset[str] = frozenset()) -> dict[str, Seal]:
    """Seal every file below a folder, by its path from there; `leave` names files at the top that may change later."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    named = ((path, path.relative_to(folder).as_posix()) for path in files)
    return {name: Seal(path.stat().st_size, _sha256(path)) for path, name in named if name not in leave}


def damage(folder: Path, seals: dict[str, Seal], *, contents: bool) -> str | None:
    """Say what is wrong with the first damaged file of a folder; None where all is well.

    Sizes are always compared; `contents`: the bytes too, at the cost of reading them.
    """
    for name, seal in seals.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != seal.size:
            return f"{name} has {size:,} bytes, expected {seal.size:,}"
        if contents and _sha256(path) != seal.sha256:
            return f"{name} has other bytes than were written"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- records_io


# One record is a question or a response of a few kilobytes; a longer line is a broken or foreign file.
MAX_LINE_BYTES = 16 * 2**20

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

# How the line of a refusal begins, and that of no other record.
_REFUSED = b'{"refused":'
_NO_MANIFEST = "has no manifest beside it: move it away"
S = TypeVar("S", bound=Sampled)


class Journal(Generic[S]):
    """The file of a run that grows: `<name>.part.jsonl`, appended line by line, published as `<name>.jsonl` at the end.

    A line is a record of `kind`, or a `Refusal` where the request was refused for good. Until `publish` the journal
    alone says what is done. A header names the run: the first line (`inline`) or a manifest beside the file. Only whole
    lines count: a last line without its newline was being written when the run was killed, and is cut off.

    keys: what the run asks, in the order of the published file. refused: where the refusals are published.
    other: the error for the file of another run. The places of the lines are held in memory, the records are not.

    >>> import tempfile
    >>> from catto.records import Response
    >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> run, keys = Manifest(kind="responses", counts={}, recipe_hash="abc"), [("q", 0), ("q", 1)]
    >>> def journal() -> Journal[Response]:
    ...     return Journal(path, Response, run, keys, refused=path.with_name("refused.jsonl"), other="other run")
    >>> with journal() as started:  # killed after its first record
    ...     _ = started.append(Response(question="q", sample=0, text="A", correct=True, model="m"))
    >>> with journal() as resumed:
    ...     list(resumed.places)
    ...     _ = resumed.append(Refusal(question="q", sample=1, refused="flagged"))
    ...     resumed.publish(run)
    [('q', 0)]
    >>> sorted(file.name for file in path.parent.iterdir())
    ['a.jsonl', 'a.manifest.json', 'refused.jsonl']
    """

    def __init__(
        self,
        path: Path,
        kind: type[S],
        manifest: Manifest,
        keys: Iterable[Key] = (),
        *,
        refused: Path,
        other: str,
        inline: bool = False,
    ) -> None:
        self.path, self.manifest, self.refused_path, self.other, self.inline = path, manifest, refused, other, inline
        self.kind: type[S] = kind
        self.keys = dict.fromkeys(keys)
        self.part = journal_path(path)
        self.places: dict[Key, tuple[int, int]] = {}  # every stored key, in file order -> offset and length of its line
        self.refused: dict[Key, Refusal] = {}  # those of them that are refusals
        self._end = 0
        fields = {"kind": manifest.kind, "schema_version": SCHEMA_VERSION, "recipe_hash": manifest.recipe_hash}
        self._header = json.dumps(fields).encode() + b"\n"

    def finished(self) -> bool:
        """Whether the file is published; one of another run is refused."""
        if not manifest_path(self.path).exists():
            return False
        if read_manifest(self.path).recipe_hash != self.manifest.recipe_hash:
            raise DataError(self.path, None, self.other)
        return self.path.exists()

    def read(self) -> None:
        """Validate and index the stored lines; write nothing."""
        self.places, self.refused, self._end = {}, {}, 0
        if not self.part.exists() or not self._continues():
            return
        for row, line in _whole_lines(self.part):
            if row == 1 and self.inline:
                self._end = len(line)
                continue
            try:
                outcome = (Refusal if line.startswith(_REFUSED) else self.kind).model_validate_json(line)
            except ValidationError as error:
                raise DataError(self.part, row, first_problem(error)) from None
            name = "question {} sample {}".format(*outcome.key)
            if outcome.key in self.places and outcome.key not in self.refused:
                raise DataError(self.part, row, f"{name} is stored twice")
            if outcome.key not in self.keys:
                raise DataError(self.part, row, f"{name} was not asked")
            self._index(outcome, len(line))

    def _continues(self) -> bool:
        """Whether the file is this run's. One of another run is refused, unless it stores nothing but refusals."""
        lines = (line for _, line in _whole_lines(self.part))
        foreign = False
        if self.inline:
            header = next(lines, b"")
            same = header == self._header
            foreign = header != b"" and not header.startswith(self._header.partition(b'"recipe_hash"')[0])
        elif manifest_path(self.part).exists():
            same = read_manifest(self.part).recipe_hash == self.manifest.recipe_hash
        elif self.part.stat().st_size:
            raise DataError(self.part, None, _NO_MANIFEST)
        else:
            return False
        if foreign or (not same and any(not line.startswith(_REFUSED) for line in lines)):
            raise DataError(self.part, 1 if self.inline else None, self.other)
        return same

    def __enter__(self) -> Self:
        """Lock the journal, read it, and cut off a torn line; or start it anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.inline and self.path.exists() and not manifest_path(self.path).exists():
            if not manifest_path(self.part).exists():
                raise DataError(self.path, None, _NO_MANIFEST)
            if not self.part.exists():  # the file was published, its manifest was not
                self.path.rename(self.part)
        self._file = self.part.open("ab", buffering=0)
        try:
            hold(self._file, self.part)
            self.read()
            self._file.truncate(self._end)
            if not self.inline and not self._end:
                write_manifest(self.part, self.manifest)
            elif not self._end:
                self._write(self._header)
                self._end = len(self._header)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, *outcomes: S | Refusal, sync: bool = False) -> list[S | Refusal]:
        """Store outcomes; once this returns a kill does not lose them, with `sync` a power cut neither.

        An outcome replaces an older refusal of its key. One that is too long to be read back is stored as a refusal;
        the outcomes are returned as they are stored.
        """
        stored: list[tuple[S | Refusal, bytes]] = []
        for outcome in outcomes:
            if outcome.key in self.places and outcome.key not in self.refused:
                raise ValueError("question {} sample {} is stored already".format(*outcome.key))
            line = outcome.model_dump_json().encode() + b"\n"
            if len(line) > MAX_LINE_BYTES:
                why = f"the response is longer than {MAX_LINE_BYTES // 2**20} MB"
                outcome = Refusal(refused=why, question=outcome.question, sample=outcome.sample)
                line = outcome.model_dump_json().encode() + b"\n"
            stored.append((outcome, line))
        self._write(b"".join(line for _, line in stored))
        if sync:
            os.fsync(self._file.fileno())
        for outcome, line in stored:
            self._index(outcome, len(line))
        return [outcome for outcome, _ in stored]

    def _write(self, data: bytes) -> None:
        """Write unbuffered: after an error nothing is left that closing the file would write."""
        with _told(self.part, self.part):
            while data:
                data = data[self._file.write(data) :]

    def _index(self, outcome: S | Refusal, length: int) -> None:
        self.places.pop(outcome.key, None)
        self.refused.pop(outcome.key, None)
        self.places[outcome.key] = self._end, length
        if isinstance(outcome, Refusal):
            self.refused[outcome.key] = outcome
        self._end += length

    def cut(self, count: int) -> None:
        """Drop all but the first `count` stored outcomes."""
        for key in list(self.places)[count:]:
            self._end = min(self._end, self.places.pop(key)[0])
            self.refused.pop(key, None)
        self._file.truncate(self._end)

    def outcomes(self) -> Iterator[S | Refusal]:
        """Yield what is stored, in the order of the keys."""
        with self.part.open("rb") as file:
            for key in self.keys:
                if key in self.refused:
                    yield self.refused[key]
                elif key in self.places:
                    file.seek(self.places[key][0])
                    yield self.kind.model_validate_json(file.read(self.places[key][1]))

    def publish(self, manifest: Manifest) -> None:
        """Write the records in the order of the keys, the refusals into their own file, then the manifest.

        A kill between any two of these leaves the journal, from which the next run publishes again.
        """
        keys = [key for key in self.keys if key in self.places]
        if refused := [self.refused[key] for key in keys if key in self.refused]:
            write_records(self.refused_path, refused)
        else:
            self.refused_path.unlink(missing_ok=True)
        with replacing_bytes(self.path) as file, self.part.open("rb") as source:
            for key in keys:
                if key not in self.refused:
                    source.seek(self.places[key][0])
                    file.write(source.read(self.places[key][1]))
        write_manifest(self.path, manifest)
        self.remove()

    def remove(self) -> None:
        """Delete the journal: the published file takes its place."""
        self.part.unlink(missing_ok=True)
        manifest_path(self.part).unlink(missing_ok=True)

    def reopen(self, *, refusals: bool) -> None:
        """Turn a published file back into a journal, with its refusals or without them, so that they are asked again.

        On a journal that is not published yet it only drops the refusals.
        """
        published = manifest_path(self.path).exists()
        with replacing_bytes(self.part) as file:
            if published and self.inline:
                file.write(self._header)
            for source in (self.path, self.refused_path) if published else (self.part,):
                for _, line in _whole_lines(source) if source.exists() else ():
                    file.write(line if refusals or not line.startswith(_REFUSED) else b"")
        if published and not self.inline:
            write_manifest(self.part, self.manifest)
        manifest_path(self.path).unlink(missing_ok=True)


def journal_path(path: Path) -> Path:
    """The journal's place: `rows.jsonl` -> `rows.part.jsonl`."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")


def read_refusals(path: Path) -> list[Refusal]:
    """The refusals in a file of them or in a journal; none where there is no file."""
    lines = _whole_lines(path) if path.exists() else ()
    return [Refusal.model_validate_json(line) for _, line in lines if line.startswith(_REFUSED)]


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (row, line) of the lines that end in a newline."""
    with path.open("rb") as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.endswith(b"\n"):
                yield row, line


# ---- readers


# A JSON file is held whole, also when it was gzipped from nothing; more rows than this belong into JSON lines.
MOST_JSON_BYTES = 2**29
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")

Rows = Iterator[tuple[int, dict[str, Any]]]


def kind(path: Path) -> str:
    """The format by the file's name, `.gz` aside; empty where it is none that we read."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def read_rows(path: Path, columns: tuple[str, ...] | None = None) -> Rows:
    """Yield (row, fields), rows counted from 1. `columns` name the fields of a CSV file without a header."""
    match kind(path):
        case ".jsonl" | ".ndjson":
            return read_objects(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path, columns)
        case ".parquet":
            return _read_parquet(path)
    raise DataError(path, None, f"expected a file that ends in {', '.join(SUFFIXES)} (or that and .gz)")


def _read_json(path: Path) -> Rows:
    value = read_json(path, MOST_JSON_BYTES)
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise DataError(path, None, 'expected a JSON list of rows, or {"data": [...]}')
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(path, number, f"expected a JSON object, got {type(row).__name__}")
        yield number, row


def _text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, since a quoted CSV field may hold line breaks."""
    with opened(path) as file:
        line_number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            line_number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, None, f"line {line_number} is longer than {MAX_LINE_BYTES // 2**20} MB")
            yield decoded(line, path, line_number, "line")


def _read_csv(path: Path, columns: tuple[str, ...] | None) -> Rows:
    number, names = 0, columns
    try:
        for values in csv.reader(_text_lines(path), strict=True):
            if names is None:
                names = _header(path, values)
            elif values:
                number += 1
                yield number, _named(path, number, names, values)
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _header(path: Path, names: list[str]) -> tuple[str, ...]:
    """Check the names of the columns; what is another format, or was separated by other signs, is told so."""
    whole = ",".join(names)
    if whole.startswith(("{", "[")) and _is_json(whole):
        raise DataError(path, None, "holds JSON, not CSV: JSON lines must be named .jsonl, a JSON list .json")
    if len(names) == 1:
        for sign, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if sign in whole:
                raise DataError(path, None, f"columns are separated by {word}, expected commas (and points in numbers)")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(path, None, f"column {twice[0]!r} stands twice in the header")
    return tuple(names)


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return text.startswith('{"')
    return True


def _named(path: Path, number: int, names: tuple[str, ...], values: list[str]) -> dict[str, Any]:
    if len(values) != len(names):
        raise DataError(path, number, f"expected {len(names)} columns ({listed(names)}), got {len(values)}")
    return dict(zip(names, values, strict=True))


def read_hub(
    place: str, trouble: str, name: str, split: str, config: str | None = None, revision: str | None = None
) -> Any:
    """The rows of a dataset on the hub. An error names `place` and reads `trouble`, where {} is the reason."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(place, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
    try:
        return load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # the errors of the hub, the network and the cache share no class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(place, None, trouble.format(reason)) from None


def _read_parquet(path: Path) -> Rows:
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise DataError(path, None, "reading Parquet needs pyarrow: pip install 'catto[train]'") from None
    number = 0
    with opened(path) as file:
        try:
            # One batch at a time: a batch is all that is held.
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except arrow.ArrowException as error:
            raise DataError(path, None, f"not Parquet: {str(error).splitlines()[0]}") from None
