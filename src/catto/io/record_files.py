"""Read and write files of records (JSON lines) and the manifests next to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from catto.errors import DataError, data_errors_at
from catto.io.atomic import replace_file, write_text
from catto.io.text_files import MAX_LINE_BYTES, parse_object, read_json, read_lines
from catto.records import SCHEMA_VERSION, Manifest, Record

R = TypeVar("R", bound=Record)


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the validated records of a file.

    Args:
        path: A file of JSON lines, which may have blank lines.
        kind: The class of its records.

    Raises:
        DataError: The file cannot be read, or a line is not a record. It names the file, the row and the field.

    >>> import tempfile
    >>> from catto.records import Message
    >>> path = Path(tempfile.mkdtemp()) / "messages.jsonl"
    >>> write_records(path, [Message(role="user", content="Hello")])
    1
    >>> [message.content for message in read_records(path, Message)]
    ['Hello']
    """
    for row, line in read_lines(path):
        record = _parse_own_line(line, kind)
        if record is None:  # a line that another program wrote, or a bad one
            value = parse_object(path, row, line)
            with data_errors_at(path, row, value):
                record = kind.model_validate(value)
        yield record


def _parse_own_line(line: str, kind: type[R]) -> R | None:
    """Return the record if the line is exactly what `write_records` writes for it, else None.

    Such a line has no repeated key, so the slow `parse_object`, which looks for one, is not needed.
    """
    try:
        record = kind.model_validate_json(line)
    except ValidationError:
        return None
    return record if record.model_dump_json() == line else None


def json_line(record: Record, path: Path, row: int) -> str:
    """Return a record as a line of JSON. Raise DataError if the line would be too long to be read back.

    Args:
        record: The record.
        path: The file that the line is written to, for the error.
        row: The number of the line, for the error.
    """
    line = record.model_dump_json() + "\n"
    may_be_too_long = len(line) > MAX_LINE_BYTES // 4  # a character has at most four bytes
    if may_be_too_long and len(line.encode()) > MAX_LINE_BYTES:
        raise DataError(path, row, f"line would be longer than {MAX_LINE_BYTES // 2**20} MB, too long to be read back")
    return line


def write_records(path: Path, records: Iterable[Record], manifest: Manifest | None = None) -> int:
    """Write records as JSON lines, atomically, then the manifest; return the number of records.

    An older manifest is deleted first: if the process is killed in between, no manifest describes the wrong records.
    """
    count = 0
    with replace_file(path) as file:
        for count, record in enumerate(records, 1):
            file.write(json_line(record, path, count))
        manifest_path(path).unlink(missing_ok=True)
    if manifest is not None:
        write_manifest(path, manifest)
    return count


def write_record(path: Path, record: Record) -> None:
    """Write one record as a JSON file, atomically."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    """Read and validate a JSON file with one record."""
    value = read_json(path)
    with data_errors_at(path, value=value):
        return kind.model_validate(value)


def manifest_path(path: Path) -> Path:
    """Return the path of the manifest of the records at `path`.

    >>> manifest_path(Path("rows.jsonl")).name
    'rows.manifest.json'
    """
    return path.parent / (path.name.removesuffix(".jsonl") + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest of the records at `path`."""
    write_record(manifest_path(path), manifest)


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest of the records at `path`."""
    own_path = manifest_path(path)
    manifest = read_record(own_path, Manifest)
    if manifest.schema_version != SCHEMA_VERSION:
        problem = f"schema_version {manifest.schema_version}, this catto reads {SCHEMA_VERSION}"
        raise DataError(own_path, None, problem)
    return manifest


@cache
def library_versions(*names: str) -> dict[str, str]:
    """Return the installed versions of catto and the named distributions; omit those that are not installed."""
    versions: dict[str, str] = {}
    for name in ("catto", *names):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
