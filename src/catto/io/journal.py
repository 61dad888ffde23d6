"""An append-only file of JSON lines, from which a killed run resumes and which a finished run publishes."""

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

# Only the line of a refusal begins like this.
_REFUSED = b'{"refused":'
_NO_MANIFEST = "has no manifest next to it: move it away"
S = TypeVar("S", bound=Sampled)


class LineSpan(NamedTuple):
    """The position of a line in a file: its offset and its length in bytes."""

    offset: int
    length: int


class NumberedLine(NamedTuple):
    """A line of a file and its number, counted from 1."""

    row: int
    line: bytes

    @property
    def is_refusal(self) -> bool:
        """Whether the line is a `Refusal`."""
        return self.line.startswith(_REFUSED)


class Journal(Generic[S]):
    """The growing file of a run: `<name>.part.jsonl`, appended line by line and published as `<name>.jsonl` at the end.

    A line is a record of `kind`, or a `Refusal` if the request was refused for good. Until `publish`, only the journal
    shows what is done. A manifest next to it identifies the run. A last line without a newline is cut off: the run was
    killed while it wrote that line. Only the positions of the lines are kept in memory, not the records.

    Args:
        path: The file to publish.
        kind: The class of its records.
        manifest: Identifies the run; the files of a run with a different `recipe_hash` are refused.
        keys: The keys of all the outcomes that the run will store, in the order of the published file.
        refused: The file in which the refusals are published.
        other_run_error: The error message for a file that a different run wrote.

    Attributes:
        places: The position of the line of every stored key, in file order.
        refused: The stored refusals, by key.

    >>> import tempfile
    >>> from catto.records import Response
    >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> run, keys = Manifest(kind="responses", counts={}, recipe_hash="abc"), [("q", 0), ("q", 1)]
    >>> def journal() -> Journal[Response]:
    ...     refused = path.with_name("refused.jsonl")
    ...     return Journal(path, Response, run, keys, refused=refused, other_run_error="other run")
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
        other_run_error: str,
    ) -> None:
        self.path = path
        self.kind: type[S] = kind
        self.manifest = manifest
        self.keys = dict.fromkeys(keys)
        self.refused_path = refused
        self.other_run_error = other_run_error
        self.part = journal_path(path)
        self.places: dict[Key, LineSpan] = {}
        self.refused: dict[Key, Refusal] = {}
        self._end = 0  # of the last whole line, in bytes

    def finished(self) -> bool:
        """Return whether the file is published. Raise DataError if a different run published it."""
        if not manifest_path(self.path).exists():
            return False
        if read_manifest(self.path).recipe_hash != self.manifest.recipe_hash:
            raise DataError(self.path, None, self.other_run_error)
        return self.path.exists()

    def read(self) -> None:
        """Validate and index the stored lines; write nothing.

        Raises:
            DataError: A line is invalid, repeated or about an unknown key, or a different run stored records.
        """
        self.places = {}
        self.refused = {}
        self._end = 0
        if not self.part.exists() or self.part.stat().st_size == 0:
            return
        if not manifest_path(self.part).exists():
            raise DataError(self.part, None, _NO_MANIFEST)
        if read_manifest(self.part).recipe_hash != self.manifest.recipe_hash:
            has_records = any(not line.is_refusal for line in _whole_lines(self.part))
            if has_records:
                raise DataError(self.part, None, self.other_run_error)
            return  # no record is lost: the refusals of the other run are not indexed, so `__enter__` cuts them off
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
        """Lock the journal, read it and cut off an incomplete last line; or start a new one.

        Raises:
            DataError: Another process holds the lock, or the files belong to a different run or are invalid.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # `publish` writes the manifest last, and `reopen` deletes it.
        is_half_published = self.path.exists() and not manifest_path(self.path).exists()
        if is_half_published:
            if not manifest_path(self.part).exists():  # nothing shows that this run wrote the file
                raise DataError(self.path, None, _NO_MANIFEST)
            if not self.part.exists():  # only the published file has the records
                self.path.rename(self.part)
        self._file = self.part.open("ab", buffering=0)
        try:
            atomic.lock_open_file(self._file, self.part)
            self.read()
            self._file.truncate(self._end)
            if not self._end:  # no line was read, so this run starts a new journal
                write_manifest(self.part, self.manifest)
        except BaseException:  # even an interrupt: `__exit__` is not called if this method raises
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, *outcomes: S | Refusal, sync: bool = False) -> list[S | Refusal]:
        """Store outcomes. Once this returns, they are not lost if the process is killed.

        Args:
            outcomes: The records and refusals. They replace older refusals with the same keys. Two records of one call
                must not have the same key: this is not checked here, but `read` would refuse the file.
            sync: Whether to flush to disk, so that they are not lost in a power cut either.

        Returns:
            The outcomes as stored: one that is too long to be read back becomes a refusal.

        Raises:
            ValueError: A record with one of the keys is stored already. Nothing is written then.
            DataError: The file cannot be written.
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
        """Append bytes to the unbuffered file. With a buffer, closing the file after an error would try again."""
        with atomic.write_errors_at(self.part, self.part):
            while data:
                written = self._file.write(data)
                data = data[written:]

    def _index(self, outcome: S | Refusal, length: int) -> None:
        """Record the position of a line of `length` bytes at the end of the file."""
        self.places.pop(outcome.key, None)  # moves the key to the end, which keeps `places` in file order
        self.refused.pop(outcome.key, None)
        self.places[outcome.key] = LineSpan(self._end, length)
        if isinstance(outcome, Refusal):
            self.refused[outcome.key] = outcome
        self._end += length

    def keep_first(self, count: int) -> None:
        """Drop all but the first `count` stored outcomes, in file order."""
        for key in list(self.places)[count:]:
            span = self.places.pop(key)
            self._end = min(self._end, span.offset)
            self.refused.pop(key, None)
        self._file.truncate(self._end)

    def outcomes(self) -> Iterator[S | Refusal]:
        """Yield the stored outcomes, in the order of the keys."""
        with self.part.open("rb") as file:
            for key in self.keys:
                if key in self.refused:
                    yield self.refused[key]
                elif key in self.places:
                    yield self.kind.model_validate_json(_read_span(file, self.places[key]))

    def publish(self, manifest: Manifest) -> None:
        """Write the refusals to their own file, then the records in the order of the keys, then the manifest.

        If the process is killed in between, the journal is still there and the next run publishes again.

        Args:
            manifest: The manifest of the published file.
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
        """Turn a published file back into a journal, or rewrite a journal that is not published.

        This object must not be open then.

        Args:
            refusals: Whether to keep the refusals; otherwise the next run sends the refused requests again.
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
        manifest_path(self.path).unlink(missing_ok=True)  # without it, the file is not published


def journal_path(path: Path) -> Path:
    """Return the path of a file's journal: `rows.jsonl` -> `rows.part.jsonl`."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")


def read_refusals(path: Path) -> list[Refusal]:
    """Return the refusals in a file of refusals or in a journal; an empty list if there is no such file."""
    if not path.exists():
        return []
    return [Refusal.model_validate_json(line.line) for line in _whole_lines(path) if line.is_refusal]


def _encode_line(outcome: Sampled) -> bytes:
    return outcome.model_dump_json().encode() + b"\n"


def _read_span(file: IO[bytes], span: LineSpan) -> bytes:
    file.seek(span.offset)
    return file.read(span.length)


def _whole_lines(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines that end in a newline; only the last one can lack it. Raise DataError for a line too long."""
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
