"""The one file that grows: an append-only file of JSON lines that a killed run resumes from and then publishes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Generic, Self, TypeVar

from catto import files
from catto.files import MAX_LINE_BYTES, manifest_path, read_manifest, write_manifest
from catto.problems import DataError, locating
from catto.records import Key, Manifest, Refusal, Sampled

# How the line of a refusal begins, and that of no other record.
_REFUSED = b'{"refused":'
_NO_MANIFEST = "has no manifest beside it: move it away"
S = TypeVar("S", bound=Sampled)


class Journal(Generic[S]):
    """The file of a run that grows: `<name>.part.jsonl`, appended line by line, published as `<name>.jsonl` at the end.

    A line is a record of `kind`, or a `Refusal` where the request was refused for good. Until `publish` the journal
    alone says what is done. A manifest beside it names the run. Only whole lines count: a last line without its newline
    was being written when the run was killed, and is cut off.

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
        self, path: Path, kind: type[S], manifest: Manifest, keys: Iterable[Key] = (), *, refused: Path, other: str
    ) -> None:
        self.path, self.manifest, self.refused_path, self.other = path, manifest, refused, other
        self.kind: type[S] = kind
        self.keys = dict.fromkeys(keys)
        self.part = journal_path(path)
        self.places: dict[Key, tuple[int, int]] = {}  # every stored key, in file order -> offset and length of its line
        self.refused: dict[Key, Refusal] = {}  # those of them that are refusals
        self._end = 0

    def finished(self) -> bool:
        """Whether the file is published; one of another run is refused."""
        if not manifest_path(self.path).exists():
            return False
        if read_manifest(self.path).recipe_hash != self.manifest.recipe_hash:
            raise DataError(self.path, None, self.other)
        return self.path.exists()

    def read(self) -> None:
        """Validate and index the stored lines; write nothing. Records of another run are refused."""
        self.places, self.refused, self._end = {}, {}, 0
        if not self.part.exists() or not self.part.stat().st_size:
            return
        if not manifest_path(self.part).exists():
            raise DataError(self.part, None, _NO_MANIFEST)
        if read_manifest(self.part).recipe_hash != self.manifest.recipe_hash:
            if any(not line.startswith(_REFUSED) for _, line in _whole_lines(self.part)):
                raise DataError(self.part, None, self.other)
            return
        for row, line in _whole_lines(self.part):
            with locating(self.part, row):
                outcome = (Refusal if line.startswith(_REFUSED) else self.kind).model_validate_json(line)
            if outcome.key in self.places and outcome.key not in self.refused:
                raise DataError(self.part, row, f"{outcome.name} is stored twice")
            if outcome.key not in self.keys:
                raise DataError(self.part, row, f"{outcome.name} was not asked")
            self._index(outcome, len(line))

    def __enter__(self) -> Self:
        """Lock the journal, read it, and cut off a torn line; or start it anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not manifest_path(self.path).exists():
            if not manifest_path(self.part).exists():
                raise DataError(self.path, None, _NO_MANIFEST)
            if not self.part.exists():  # the file was published, its manifest was not
                self.path.rename(self.part)
        self._file = self.part.open("ab", buffering=0)
        try:
            files.hold(self._file, self.part)
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
        """Store outcomes; once this returns a kill does not lose them, with `sync` a power cut neither.

        An outcome replaces an older refusal of its key. One that is too long to be read back is stored as a refusal;
        the outcomes are returned as they are stored.
        """
        stored: list[tuple[S | Refusal, bytes]] = []
        for outcome in outcomes:
            if outcome.key in self.places and outcome.key not in self.refused:
                raise ValueError(f"{outcome.name} is stored already")
            line = outcome.model_dump_json().encode() + b"\n"
            if len(line) > MAX_LINE_BYTES:
                why = f"the response is longer than {MAX_LINE_BYTES // 2**20} MB"
                outcome = Refusal(refused=why, question=outcome.question, sample=outcome.sample)
                line = outcome.model_dump_json().encode() + b"\n"
            stored.append((outcome, line))
        data = b"".join(line for _, line in stored)
        with files.writing(self.part, self.part):
            while data:  # unbuffered: after an error nothing is left that closing the file would write
                data = data[self._file.write(data) :]
        if sync:
            os.fsync(self._file.fileno())
        for outcome, line in stored:
            self._index(outcome, len(line))
        return [outcome for outcome, _ in stored]

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
            files.write_records(self.refused_path, refused)
        else:
            self.refused_path.unlink(missing_ok=True)
        with files.replacing_bytes(self.path) as file, self.part.open("rb") as source:
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
        """Turn a published file back into a journal, with its refusals, or without them to ask them again.

        On a journal that is not published yet it only drops the refusals.
        """
        published = manifest_path(self.path).exists()
        with files.replacing_bytes(self.part) as file:
            for source in (self.path, self.refused_path) if published else (self.part,):
                for _, line in _whole_lines(source) if source.exists() else ():
                    file.write(line if refusals or not line.startswith(_REFUSED) else b"")
        if published:
            write_manifest(self.part, read_manifest(self.path))
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
        for row, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.endswith(b"\n"):
                yield row, line
