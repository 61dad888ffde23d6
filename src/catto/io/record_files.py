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
            with data_errors_at(path, row, value):
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
    with replace_file(path) as file:
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
    with data_errors_at(path, value=value):
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
