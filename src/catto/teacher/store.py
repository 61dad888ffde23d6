"""Where generations are kept while they arrive: a line each, written at once, below a header that names the recipe.

A request that was refused for good has a line too, a `Refusal`, so that a restart does not ask it again. When all have
come, refusals go into a file of their own and `generations.jsonl` holds generations alone.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from catto import files
from catto.engines import Generation, Key
from catto.files import replacing
from catto.problems import DataError
from catto.records import (
    MAX_LINE_BYTES,
    SCHEMA_VERSION,
    Refusal,
    first_problem,
    manifest_path,
    read_manifest,
    read_records,
)

GENERATIONS, REFUSED, PART = "generations.jsonl", "refused.jsonl", "generations.part.jsonl"

OTHER_RECIPE = "belongs to other settings or questions: give those, or use a new folder"
Places = dict[Key, tuple[int, int]]  # (question, sample) -> offset, length
_REFUSED = b'{"refused":'  # how a refusal's line begins; a generation's never does


R = TypeVar("R", Generation, Refusal)


class Index(NamedTuple):
    """What a part file holds: where each generation stands, the refusals, and where the last whole line ends."""

    places: Places
    refused: dict[Key, Refusal]
    end: int


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder for this process; a second run is refused."""
    return files.locked(folder / ".lock")


class PartFile:
    """The generations so far, by key, in order of arrival. The first line is a header with the recipe's hash.

    Only the places of the lines are held in memory. A last line without its newline was being written when the run
    was killed: it is cut off, its response was never stored.
    """

    def __init__(self, path: Path, recipe_hash: str, expected: Container[Key]) -> None:
        self.path = path
        path.touch()
        self.places, self.refused, self._end = index(path, recipe_hash, expected)
        self._file: IO[bytes] = path.open("r+b", buffering=0)
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self._write(json.dumps(_header(recipe_hash)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, outcome: Generation | Refusal) -> None:
        """Store a generation or a refusal; once this returns, killing the process does not lose it."""
        key = outcome.question, outcome.sample
        if key in self.places or key in self.refused:
            raise ValueError(f"question {key[0]} sample {key[1]} is stored already")
        start, line = self._end, outcome.model_dump_json()
        if len(line.encode()) >= MAX_LINE_BYTES:  # a restart could not read it back
            why = f"the response is longer than {MAX_LINE_BYTES // 2**20} MB"
            outcome = Refusal(refused=why, question=key[0], sample=key[1])
            line = outcome.model_dump_json()
        self._write(line)
        if isinstance(outcome, Refusal):
            self.refused[key] = outcome
        else:
            self.places[key] = start, self._end - start

    @property
    def stored(self) -> int:
        """How many requests have come to an end."""
        return len(self.places) + len(self.refused)

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


def index(path: Path, recipe_hash: str, expected: Container[Key]) -> Index:
    """Check a part file's whole lines and say what it holds; one of other settings without a generation is empty."""
    found = Index({}, {}, 0)
    for row, line in enumerate(_whole_lines(path), 1):
        if row == 1:
            if not _is_header(path, line, recipe_hash):
                return found
        elif line.startswith(_REFUSED):
            refusal = _checked(path, row, line, Refusal, found, expected)
            found.refused[refusal.key] = refusal
        else:
            generation = _checked(path, row, line, Generation, found, expected)
            found.places[generation.key] = found.end, len(line)
        found = found._replace(end=found.end + len(line))
    return found


def _is_header(path: Path, line: bytes, recipe_hash: str) -> bool:
    """Whether the header is this recipe's; another's is an error if there are generations below it."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if header == _header(recipe_hash):
        return True
    ours = isinstance(header, dict) and header.keys() == _header("").keys()
    below = (line for row, line in enumerate(_whole_lines(path), 1) if row > 1)
    if not ours or any(not line.startswith(_REFUSED) for line in below):
        raise DataError(path, 1, OTHER_RECIPE)
    return False


def _checked(path: Path, row: int, line: bytes, kind: type[R], found: Index, expected: Container[Key]) -> R:
    try:
        outcome = kind.model_validate_json(line)
    except ValidationError as error:
        raise DataError(path, row, first_problem(error)) from None
    key = outcome.question, outcome.sample
    if key in found.places or key in found.refused:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} is stored twice")
    if key not in expected:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} was not asked")
    return outcome


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


def refusals(folder: Path) -> list[Refusal]:
    """The requests that a folder of responses, finished or not, holds as refused."""
    if manifest_path(folder / GENERATIONS).exists():
        return list(read_records(folder / REFUSED, Refusal)) if (folder / REFUSED).exists() else []
    lines = _whole_lines(folder / PART) if (folder / PART).exists() else ()
    return [Refusal.model_validate_json(line) for line in lines if line.startswith(_REFUSED)]


def forget_refusals(folder: Path) -> None:
    """Make a folder of responses one in which nothing was refused: the next run asks those requests again.

    A finished folder gets its part file back, and loses the manifests of what was made without the missing responses. A
    kill leaves the folder as it was, or a part file to go on from.
    """
    if not refusals(folder):
        return
    part, whole = folder / PART, folder / GENERATIONS
    finished = manifest_path(whole).exists()
    with replacing(part) as file:
        if finished:
            file.write(json.dumps(_header(read_manifest(whole).recipe_hash or "")) + "\n")
        lines = _whole_lines(whole if finished else part)
        file.writelines(line.decode() for line in lines if not line.startswith(_REFUSED))
    for path in sorted(
        folder.glob("*.manifest.json")
    ):  # the generations' own last: without it the folder is unfinished
        if path != manifest_path(whole):
            path.unlink()
    manifest_path(whole).unlink(missing_ok=True)
