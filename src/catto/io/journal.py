"""The one file that grows: an append-only file of JSON lines that a killed run resumes from and then publishes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Generic, NamedTuple, Self, TypeVar

from catto.errors import DataError, data_errors_at
from catto.io import atomic, record_files
from catto.io.record_files import manifest_path, read_manifest, write_manifest
from catto.io.text_files import MAX_LINE_BYTES
from catto.records import Key, Manifest, Refusal, Sampled

# The line of a refusal begins like this, and that of no other record.
_REFUSED = b'{"refused":'
_NO_MANIFEST = "has no manifest beside it: move it away"
S = TypeVar("S", bound=Sampled)


class LineSpan(NamedTuple):
    """Where a line is in a file: its offset and its length in bytes."""

    offset: int
    length: int


class NumberedLine(NamedTuple):
    """A line of a file and its number, from 1."""

    row: int
    line: bytes

    @property
    def is_refusal(self) -> bool:
        """Whether the line holds a `Refusal`."""
        return self.line.startswith(_REFUSED)


class Journal(Generic[S]):
    """The file of a run that grows: `<name>.part.jsonl`, appended line by line, published as `<name>.jsonl` at the end.

    A line is a record of `kind`, or a `Refusal` if the request was refused for good. Until `publish` the journal alone
    says what is done. A manifest next to it names the run. Only whole lines count: a last line without its newline was
    being written when the run was killed, and is cut off. The positions of the lines are held in memory, the records
    are not.

    Args:
        path: The file to publish.
        kind: The class of its records.
        manifest: Names the run; the files of a run with another `recipe_hash` are refused.
        keys: What the run asks, in the order of the published file.
        refused: The file in which the refusals are published.
        other: The error for the file of another run.

    Attributes:
        places: Every stored key, in file order -> the position of its line.
        refused: The refusals among them, by key.

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
        self, path: Path, kind: type[S], manifest: Manifest, keys: Iterable[Key] = (), *, refused: Path, other: str
    ) -> None:
        self.path = path
        self.kind: type[S] = kind
        self.manifest = manifest
        self.keys = dict.fromkeys(keys)
        self.refused_path = refused
        self.other = other
        self.part = journal_path(path)
        self.places: dict[Key, LineSpan] = {}
        self.refused: dict[Key, Refusal] = {}
        self._end = 0  # of the last whole line, in bytes

    def finished(self) -> bool:
        """Return whether the file is published; DataError if it is that of another run."""
        if not manifest_path(self.path).exists():
            return False
        if read_manifest(self.path).recipe_hash != self.manifest.recipe_hash:
            raise DataError(self.path, None, self.other)
        return self.path.exists()

    def read(self) -> None:
        """Validate and index the stored lines; write nothing. DataError if they are records of another run."""
        self.places = {}
        self.refused = {}
        self._end = 0
        if not self.part.exists() or not self.part.stat().st_size:
            return
        if not manifest_path(self.part).exists():
            raise DataError(self.part, None, _NO_MANIFEST)
        if read_manifest(self.part).recipe_hash != self.manifest.recipe_hash:
            has_records = any(not line.is_refusal for line in _whole_lines(self.part))
            if has_records:
                raise DataError(self.part, None, self.other)
            return  # refusals alone are not worth keeping
        for line in _whole_lines(self.part):
            self._read_line(line)

    def _read_line(self, line: NumberedLine) -> None:
        record_class = Refusal if line.is_refusal else self.kind
        with data_errors_at(self.part, line.row):
            outcome = record_class.model_validate_json(line.line)
        if self._is_answered(outcome.key):
            raise DataError(self.part, line.row, f"{outcome.name} is stored twice")
        if outcome.key not in self.keys:
            raise DataError(self.part, line.row, f"{outcome.name} was not asked")
        self._index(outcome, len(line.line))

    def _is_answered(self, key: Key) -> bool:
        """Return whether a record is stored for the key; a refusal may still be replaced."""
        return key in self.places and key not in self.refused

    def __enter__(self) -> Self:
        """Lock the journal, read it, and cut off a torn line; or start it anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_half_published = self.path.exists() and not manifest_path(self.path).exists()
        if is_half_published:
            if not manifest_path(self.part).exists():
                raise DataError(self.path, None, _NO_MANIFEST)
            if not self.part.exists():
                self.path.rename(self.part)
        self._file = self.part.open("ab", buffering=0)
        try:
            atomic.lock_open_file(self._file, self.part)
            self.read()
            self._file.truncate(self._end)
            if not self._end:
                write_manifest(self.part, self.manifest)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, *outcomes: S | Refusal, sync: bool = False) -> list[S | Refusal]:
        """Store outcomes; once this returns a kill does not lose them, with `sync` not even a power cut.

        An outcome replaces an older refusal of its key. One that is too long to be read back is stored as a refusal.

        Returns:
            The outcomes as they are stored.
        """
        stored: list[S | Refusal] = []
        lines: list[bytes] = []
        for outcome in outcomes:
            if self._is_answered(outcome.key):
                raise ValueError(f"{outcome.name} is stored already")
            line = _encode_line(outcome)
            if len(line) > MAX_LINE_BYTES:
                reason = f"the response is longer than {MAX_LINE_BYTES // 2**20} MB"
                outcome = Refusal(refused=reason, question=outcome.question, sample=outcome.sample)
                line = _encode_line(outcome)
            stored.append(outcome)
            lines.append(line)
        self._write_bytes(b"".join(lines))
        if sync:
            os.fsync(self._file.fileno())
        for outcome, line in zip(stored, lines, strict=True):
            self._index(outcome, len(line))
        return stored

    def _write_bytes(self, data: bytes) -> None:
        """Write without a buffer: after an error nothing is left that closing the file would write."""
        with atomic.write_errors_at(self.part, self.part):
            while data:
                written = self._file.write(data)
                data = data[written:]

    def _index(self, outcome: S | Refusal, length: int) -> None:
        self.places.pop(outcome.key, None)
        self.refused.pop(outcome.key, None)
        self.places[outcome.key] = LineSpan(self._end, length)
        if isinstance(outcome, Refusal):
            self.refused[outcome.key] = outcome
        self._end += length

    def cut(self, count: int) -> None:
        """Drop all but the first `count` stored outcomes."""
        for key in list(self.places)[count:]:
            span = self.places.pop(key)
            self._end = min(self._end, span.offset)
            self.refused.pop(key, None)
        self._file.truncate(self._end)

    def outcomes(self) -> Iterator[S | Refusal]:
        """Yield what is stored, in the order of the keys."""
        with self.part.open("rb") as file:
            for key in self.keys:
                if key in self.refused:
                    yield self.refused[key]
                elif key in self.places:
                    yield self.kind.model_validate_json(_read_span(file, self.places[key]))

    def publish(self, manifest: Manifest) -> None:
        """Write the records in the order of the keys, the refusals into their own file, then the manifest.

        A kill between any two of these leaves the journal, from which the next run publishes again.
        """
        refused = [self.refused[key] for key in self.keys if key in self.refused]
        if refused:
            record_files.write_records(self.refused_path, refused)
        else:
            self.refused_path.unlink(missing_ok=True)
        with atomic.replace_binary_file(self.path) as file, self.part.open("rb") as source:
            for key in self.keys:
                if self._is_answered(key):
                    file.write(_read_span(source, self.places[key]))
        write_manifest(self.path, manifest)
        self.remove()

    def remove(self) -> None:
        """Delete the journal: the published file takes its place."""
        self.part.unlink(missing_ok=True)
        manifest_path(self.part).unlink(missing_ok=True)

    def reopen(self, *, refusals: bool) -> None:
        """Turn a published file back into a journal. On a journal that is not published it only drops the refusals.

        Args:
            refusals: Whether to keep the refusals; otherwise those requests are asked again.
        """
        is_published = manifest_path(self.path).exists()
        sources = [self.path, self.refused_path] if is_published else [self.part]
        with atomic.replace_binary_file(self.part) as file:
            for source in sources:
                if not source.exists():
                    continue
                for line in _whole_lines(source):
                    if refusals or not line.is_refusal:
                        file.write(line.line)
        if is_published:
            write_manifest(self.part, read_manifest(self.path))
        manifest_path(self.path).unlink(missing_ok=True)


def journal_path(path: Path) -> Path:
    """Return the path of a file's journal: `rows.jsonl` -> `rows.part.jsonl`."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")


def read_refusals(path: Path) -> list[Refusal]:
    """Return the refusals in a file of them or in a journal; none if there is no file."""
    if not path.exists():
        return []
    return [Refusal.model_validate_json(line.line) for line in _whole_lines(path) if line.is_refusal]


def _encode_line(outcome: Sampled) -> bytes:
    return outcome.model_dump_json().encode() + b"\n"


def _read_span(file: IO[bytes], span: LineSpan) -> bytes:
    file.seek(span.offset)
    return file.read(span.length)


def _whole_lines(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines that end in a newline."""
    with path.open("rb") as file:
        row = 0
        while True:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.endswith(b"\n"):
                yield NumberedLine(row, line)
