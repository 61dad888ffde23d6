"""Where generations are kept while they arrive: a line each, written at once, below a header that names the recipe."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from pydantic import ValidationError

from catto.engines import Generation, Key
from catto.records import MAX_LINE_BYTES, SCHEMA_VERSION, DataError, first_problem

OTHER_RECIPE = "belongs to other settings or questions: give those, or use a new folder"
Places = dict[Key, tuple[int, int]]  # (question, sample) -> offset, length


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a second run is refused. The system drops the lock of a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(folder, None, "another run is writing here") from None
        yield


class PartFile:
    """The generations so far, by key, in order of arrival. The first line is a header with the recipe's hash.

    Only the places of the lines are held in memory. A last line without its newline was being written when the run
    was killed: it is cut off, its response was never stored.
    """

    def __init__(self, path: Path, recipe_hash: str, expected: Container[Key]) -> None:
        self.path = path
        path.touch()
        self.places, self._end = index(path, recipe_hash, expected)
        self._file: IO[bytes] = path.open("r+b", buffering=0)
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self._write(json.dumps(_header(recipe_hash)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, generation: Generation) -> None:
        """Store a generation; once this returns, killing the process does not lose it."""
        key = generation.key
        if key in self.places:
            raise ValueError(f"question {generation.question} sample {generation.sample} is stored already")
        start = self._end
        self._write(generation.model_dump_json())
        self.places[key] = start, self._end - start

    def generations(self, order: Iterable[Key]) -> Iterator[Generation]:
        """Yield the stored generations in the given order; keys that were never stored are left out."""
        with self.path.open("rb") as file:
            for key in order:
                if key in self.places:
                    offset, length = self.places[key]
                    file.seek(offset)
                    yield Generation.model_validate_json(file.read(length))

    def _write(self, text: str) -> None:
        line = text.encode() + b"\n"
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        self._end += len(line)


def _header(recipe_hash: str) -> dict[str, object]:
    return {"kind": "generations", "schema_version": SCHEMA_VERSION, "recipe_hash": recipe_hash}


def index(path: Path, recipe_hash: str, expected: Container[Key]) -> tuple[Places, int]:
    """Check a part file's whole lines; return where each response stands and where the last one ends."""
    places: Places = {}
    end = 0
    for row, line in enumerate(_whole_lines(path), 1):
        if row == 1:
            _check_header(path, line, recipe_hash)
        else:
            places[_checked_key(path, row, line, places, expected)] = end, len(line)
        end += len(line)
    return places, end


def _check_header(path: Path, line: bytes, recipe_hash: str) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if header != _header(recipe_hash):
        raise DataError(path, 1, OTHER_RECIPE)


def _checked_key(path: Path, row: int, line: bytes, places: Places, expected: Container[Key]) -> Key:
    try:
        key = Generation.model_validate_json(line).key
    except ValidationError as error:
        raise DataError(path, row, first_problem(error)) from None
    if key in places:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} is stored twice")
    if key not in expected:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} was not asked")
    return key


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that end in a newline."""
    with path.open("rb") as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.endswith(b"\n"):
                yield line
