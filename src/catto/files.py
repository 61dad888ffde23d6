"""Files: read any format strictly, write whole or not at all, lock, and seal a finished folder.

Every file that the package writes goes through `replacing` and every folder through `building`: written beside its
place, flushed to the disk, then renamed. A kill or a full disk leaves the old file or none, never half of the new one.
Files that grow (responses, predictions) are in `catto.journal`.
"""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from catto.parquet_rows import MAX_ROWS, TOO_MANY_ROWS, read_parquet
from catto.problems import DataError, listed, locating, parse_json, shortened
from catto.records import SCHEMA_VERSION, Manifest, Record

BUSY = "another run is writing here"
# One record is a question or a response of a few kilobytes; a longer line is a broken or foreign file.
MAX_LINE_BYTES = 16 * 2**20
# A JSON file is held whole, also when it is unpacked; more rows than this belong into JSON lines.
MOST_JSON_BYTES = 2**29
# Values of such a file: an empty list takes three bytes of text and sixty of memory.
MOST_JSON_VALUES = 2**25
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")

R = TypeVar("R", bound=Record)
Rows = Iterator[tuple[int, dict[str, Any]]]


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Write a text file whole or not at all. UTF-8, newlines as they are written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replacing(path) as file:
    ...     _ = file.write("whole")
    ...     path.exists()
    False
    >>> path.read_text()
    'whole'
    """
    with replacing_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()


def write_text(path: Path, text: str) -> None:
    """Write a text as a file, whole or not at all."""
    with replacing(path) as file:
        file.write(text)


@contextmanager
def replacing_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Write a file whole or not at all.

    What cannot be written (disk full, no permission, a folder or a device in its place) is one DataError.
    """
    if path.exists() and not path.is_file():
        raise DataError(path, None, "cannot be written: it is there and is not a regular file")
    with _beside(path) as beside, beside.open("wb") as file:
        yield file


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Make a folder whole or not at all: yield an empty one beside it, which takes its place at the end.

    What was at its place, a part of an older attempt, is deleted at the last moment.
    """
    with _beside(folder.resolve()) as beside:  # a link to a folder stays one
        beside.mkdir()
        yield beside


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a place beside `path`; what is written there is flushed, renamed to `path`, and its folder flushed.

    The hidden name is short enough for every file system, which counts bytes; `.*.part` is cleared away.
    """
    name = path.name.encode(errors="ignore")[:100].decode(errors="ignore")
    beside = path.with_name(f".{name}.{os.getpid()}.part")
    with writing(path, beside):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            yield beside
            for written in (*sorted(beside.rglob("*")), beside):
                _sync(written)
            if path.is_dir():
                shutil.rmtree(path)
            beside.replace(path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):  # the first error is the one to report
                beside.unlink(missing_ok=True)
        sync_folder(path.parent)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, which must be free; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        with source.open("rb") as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)


@contextmanager
def writing(path: Path, beside: Path) -> Iterator[None]:
    """Report an error of writing `path` in one line. Errors of other files, raised by the caller's own code, pass."""
    try:
        yield
    except OSError as error:
        name = os.fspath(error.filename) if error.filename is not None else str(beside)
        if error.errno is None or not (name.startswith(str(beside)) or str(path).startswith(name)):
            raise
        raise DataError(path, None, f"cannot be written: {error.strerror}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: without it a power cut can undo a rename. Windows cannot, and need not."""
    if hasattr(os, "O_DIRECTORY"):
        _sync(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for this process; the system drops the lock of a killed one."""
    with writing(path, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        hold(file, path.parent)
        yield


def hold(file: IO[bytes], place: Path) -> None:
    """Lock an open file for this process until it is closed; `place` is what an error names.

    A lock that another process holds raises BUSY; a file system that cannot lock raises its own reason.
    """
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DataError(place, None, BUSY) from None
        raise DataError(place, None, f"cannot be locked: {error.strerror}") from None


class Seal(NamedTuple):
    """What a finished file was: its size in bytes and its SHA-256."""

    size: int
    sha256: str


def sealed(folder: Path, leave: frozenset[str] = frozenset()) -> dict[str, Seal]:
    """Seal every file below a folder, by its path from there; `leave` names files at the top that may change later.

    `damage` then finds what has changed.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: Seal(path.stat().st_size, sha256(path)) for name, path in files.items() if name not in leave}


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
        if contents and sha256(path) != seal.sha256:
            return f"{name} has other bytes than were written"
    return None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with opened(path, plain=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@contextmanager
def opened(path: Path, *, plain: bool = False) -> Iterator[IO[bytes]]:
    """Open a regular file, a gzipped one as what it holds unless `plain`; one that cannot be read is a DataError."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:  # a pipe would wait for ever, a device has no end
            names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
            raise ValueError(f"expected a file, got {names.get(kind, 'a device')}")
        file = gzip.open(path, "rb") if path.suffix == ".gz" and not plain else path.open("rb")  # noqa: SIM115 (closed below)
    except (OSError, ValueError) as error:
        raise DataError(path, None, getattr(error, "strerror", None) or str(error)) from None
    with file:
        try:
            yield file  # type: ignore[misc]
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(path, None, f"broken gzip file: {error}") from None
        except OSError as error:  # some files of /proc open and cannot be read
            raise DataError(path, None, error.strerror or str(error)) from None


def _text_lines(path: Path, unit: Literal["row", "line"] = "row") -> Iterator[tuple[int, str]]:
    """Yield (number, text) of every line, with its end. What is no UTF-8 text is a DataError.

    A quoted field of a CSV file may hold line breaks: there `unit` is `line`, which is not the row's number.
    """

    def problem(message: str) -> DataError:
        return DataError(path, number, message) if unit == "row" else DataError(path, None, f"line {number}: {message}")

    with opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise problem(f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if b"\0" in line:
                raise problem("holds a NUL byte, expected UTF-8 text (this may be UTF-16, or no text)")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise problem(f"not UTF-8 at byte {error.start} of the line") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of every non-empty line, rows counted from 1, streaming."""
    return ((row, text) for row, line in _text_lines(path) if (text := line.strip()))


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
    return _parse_whole(path, read_text(path, most))


def _parse_whole(path: Path, text: str) -> Any:
    """Return the value of the text of a JSON file; more values than memory may hold are refused."""
    check_value_count(path, None, text)
    try:
        return parse_json(text)
    except ValueError as error:
        hint = "; JSON lines must be named .jsonl" if "Extra data" in str(error) else ""
        raise DataError(path, None, f"{error}{hint}") from None


def check_value_count(path: Path, row: int | None, text: str) -> None:
    """Refuse a JSON text of more values than memory may hold. Every value follows a comma or an opening bracket."""
    if len(text) <= MAX_LINE_BYTES:
        return
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MOST_JSON_VALUES:
        raise DataError(path, row, f"holds more than {MOST_JSON_VALUES:,} values: write JSON lines")


def parse_object(path: Path, row: int, line: str) -> dict[str, Any]:
    """Parse one line; where the first is of another format, the error says so."""
    try:
        value = parse_json(line)
        if isinstance(value, dict):
            return value
        problem = f"expected a JSON object, got {type(value).__name__}"
    except ValueError as error:
        problem = str(error)
    if row == 1 and not line.startswith("{"):
        other = kind(path) in (".json", ".csv", ".tsv", ".parquet")
        problem += "; only JSON lines are read here" if other else "; JSON lists must be named .json and CSV named .csv"
    raise DataError(path, row, problem)


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records of a file, each validated; the error names file, row and field.

    >>> import tempfile
    >>> from catto.records import Message
    >>> path = Path(tempfile.mkdtemp()) / "messages.jsonl"
    >>> write_records(path, [Message(role="user", content="Hello")])
    1
    >>> [message.content for message in read_records(path, Message)]
    ['Hello']
    """
    for row, line in read_lines(path):
        try:  # a line that is exactly what we write for its record holds no repeated key: it needs no slow parser
            record = kind.model_validate_json(line)
            ours = record.model_dump_json() == line
        except ValidationError:
            ours = False
        if not ours:
            value = parse_object(path, row, line)
            with locating(path, row, value):
                record = kind.model_validate(value)
        yield record


def json_line(record: Record, path: Path, row: int) -> str:
    """A record as a line of the file that it goes to; one that could not be read back is refused."""
    line = record.model_dump_json() + "\n"
    if len(line) > MAX_LINE_BYTES // 4 and len(line.encode()) > MAX_LINE_BYTES:
        raise DataError(path, row, f"line would be longer than {MAX_LINE_BYTES // 2**20} MB, too long to be read back")
    return line


def write_records(path: Path, records: Iterable[Record], manifest: Manifest | None = None) -> int:
    """Write records as JSON lines, whole or not at all, then the manifest; return how many.

    An older manifest goes first: a kill leaves none, and never one that describes other records.
    """
    count = 0
    with replacing(path) as file:
        for count, record in enumerate(records, 1):
            file.write(json_line(record, path, count))
        manifest_path(path).unlink(missing_ok=True)
    if manifest is not None:
        write_manifest(path, manifest)
    return count


def write_record(path: Path, record: Record) -> None:
    """Write one record as a JSON file, whole or not at all."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    """Read and validate a JSON file of one record."""
    value = read_json(path)
    with locating(path, value=value):
        return kind.model_validate(value)


def manifest_path(path: Path) -> Path:
    """The manifest's place.

    >>> manifest_path(Path("rows.jsonl")).name
    'rows.manifest.json'
    """
    return path.parent / (path.name.removesuffix(".jsonl") + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest of the records at `path`."""
    write_record(manifest_path(path), manifest)


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest of the records at `path`."""
    manifest = read_record(place := manifest_path(path), Manifest)
    if manifest.schema_version != SCHEMA_VERSION:
        raise DataError(place, None, f"schema_version {manifest.schema_version}, this catto reads {SCHEMA_VERSION}")
    return manifest


@cache
def library_versions(*names: str) -> dict[str, str]:
    """Installed versions of catto and the named distributions; absent ones are left out."""
    versions: dict[str, str] = {}
    for name in ("catto", *names):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def kind(path: Path) -> str:
    """The format by the file's name, `.gz` aside; empty where it is none that we read.

    >>> kind(Path("rows.jsonl.gz")), kind(Path("rows.txt"))
    ('.jsonl', '')
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def read_rows(path: Path, columns: tuple[str, ...] | None = None) -> Rows:
    """Yield (row, fields), rows counted from 1. `columns` name the fields of a CSV file without a header."""
    for count, numbered in enumerate(_read_any(path, columns), 1):
        if count > MAX_ROWS:
            raise DataError(path, None, TOO_MANY_ROWS)
        yield numbered


def _read_any(path: Path, columns: tuple[str, ...] | None) -> Rows:
    match kind(path):
        case ".jsonl" | ".ndjson":
            yield from ((row, parse_object(path, row, line)) for row, line in read_lines(path))
        case ".json":
            yield from _read_json_rows(path)
        case ".csv" | ".tsv":
            yield from _read_csv(path, columns)
        case ".parquet":
            with opened(path) as file:
                yield from read_parquet(path, file)
        case _:
            with opened(path):  # refuses a folder, and what is missing
                raise DataError(path, None, f"expected a file that ends in {', '.join(SUFFIXES)} (or that and .gz)")


def _read_json_rows(path: Path) -> Rows:
    """Yield the rows of a JSON file: a list, JSON lines by another name, a log, or one of the layouts of pandas."""
    text = read_text(path, MOST_JSON_BYTES)
    if _holds_json_lines(text):
        del text
        yield from ((row, parse_object(path, row, line)) for row, line in read_lines(path))
        return
    value = _parse_whole(path, text)
    rows = _find_rows(path, value)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            hint = "; names of columns are needed: write objects" if isinstance(row, list) else ""
            raise DataError(path, number, f"expected a JSON object, got {type(row).__name__}{hint}")
        yield number, row


def _holds_json_lines(text: str) -> bool:
    """Whether the first line is a whole object and another one follows."""
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("{") or not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _find_rows(path: Path, value: Any) -> list[Any]:
    """Return the rows in the value of a JSON file; what has no rows, or leaves open which they are, is refused."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(path, None, EXPECTED_ROWS)
    if isinstance(value.get("samples"), list):
        check_finished(path, value)
    columns = value.get("columns")
    table = value.get("data")
    if isinstance(columns, list) and isinstance(table, list):  # pandas' orient="split"
        return _name_cells(path, columns, table)
    rows = value.get("data", value.get("samples", value))
    if isinstance(rows, dict):
        return _rows_of_object(path, rows)
    if isinstance(rows, list):
        return rows
    raise DataError(path, None, EXPECTED_ROWS)


def _name_cells(path: Path, columns: list[Any], table: list[Any]) -> list[dict[str, Any]]:
    names = [str(column) for column in columns]
    _refuse_twice(path, names)
    rows = []
    for number, cells in enumerate(table, 1):
        if not isinstance(cells, list) or len(cells) != len(names):
            raise DataError(path, number, f"expected a list of {len(names)} cells ({listed(names)})")
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def _rows_of_object(path: Path, table: dict[str, Any]) -> list[Any]:
    """Return the rows of an object of columns, or of pandas' orient="columns" or "index"."""
    entries = list(table.values())
    if not any(entries):
        raise DataError(path, None, EXPECTED_ROWS)
    if all(isinstance(entry, list) for entry in entries):
        lengths = {len(column) for column in entries}
        if len(lengths) > 1:
            expected = f"expected columns of equal length, got {listed(sorted(lengths))}"
            raise DataError(path, None, expected)
        return [dict(zip(table, cells, strict=True)) for cells in zip(*entries, strict=True)]
    if not all(isinstance(entry, dict) for entry in entries):
        raise DataError(path, None, EXPECTED_ROWS)
    # The index of a table that was not given another one is made of whole numbers, and columns have names.
    outer_numbers = all(name.isdecimal() for name in table)
    inner_numbers = all(name.isdecimal() for entry in entries for name in entry)
    if outer_numbers == inner_numbers:
        hint = 'either could be the rows; with pandas write orient="records", lines=True to a .jsonl file'
        raise DataError(path, None, f"an object of objects: {hint}")
    if outer_numbers:
        return entries
    index = list(entries[0])
    for name, entry in table.items():
        if list(entry) != index:
            raise DataError(path, None, f"{name}: expected the same rows as in {next(iter(table))}")
    return [{name: entry[place] for name, entry in table.items()} for place in index]


EXPECTED_ROWS = 'expected a JSON list of rows, or {"data": [...]}, or {"samples": [...]}, or an object of columns'


def check_finished(path: Path, log: dict[str, Any]) -> None:
    """Refuse a log of inspect_ai whose run failed, was cancelled or is still going on. log: its header."""
    status = log.get("status")
    if status is None or status == "success":
        return
    error = log.get("error")
    reason = error.get("message") if isinstance(error, dict) else None
    said = f": {shortened(str(reason), 200)}" if reason else ""
    outcome = "failed" if status == "error" else "did not finish"
    raise DataError(path, None, f"the run {outcome} (status {shortened(str(status), 40)}{said}): nothing to measure")


def _refuse_twice(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(path, None, f"column {twice[0]!r} occurs twice")


def _read_csv(path: Path, names: tuple[str, ...] | None) -> Rows:
    number, lines = 0, (line for _, line in _text_lines(path, "line"))
    first = next((line for line in lines if line.strip()), "")
    csv.field_size_limit(MAX_LINE_BYTES)
    if names is None and first.startswith(('{"', "[{")):
        raise DataError(path, None, "holds JSON, not CSV: JSON lines must be named .jsonl, a JSON list .json")
    # The header's most frequent one outside of quotes; a file without a header has commas.
    signs = "\t" if kind(path) == ".tsv" else ",;\t|" if names is None else ","
    sign = max(signs, key=re.sub('"[^"]*"', "", first).count)
    try:
        for values in csv.reader(chain([first], lines), delimiter=sign, strict=True):
            if names is None:
                names = tuple(map(str.strip, values))
                _refuse_twice(path, names)
            elif values:
                number += 1
                if len(values) != len(names):
                    expected = f"expected {len(names)} columns ({listed(names)}), got {len(values)}"
                    raise DataError(path, number, expected + _decimal_comma_hint(values, sign))
                yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _decimal_comma_hint(values: Sequence[str], sign: str) -> str:
    """Return a hint where decimal commas may have cut numbers of a comma-separated row in two: 0,9."""
    if sign != ",":
        return ""
    for left, right in pairwise(values):
        if left.strip() in ("0", "1") and right.strip().isdecimal():
            return "; decimal commas are not read: write 0.9, not 0,9"
    return ""


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
