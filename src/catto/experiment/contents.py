"""What the local files hold that a recipe names: part of a stage's key, so that an edited file is read again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from catto.experiment.data import task_of
from catto.problems import DataError
from catto.recipe import TaskSettings
from catto.records import content_hash, opened
from catto.tasks.sources import LocalFiles, find

# Files up to this size are read whole, larger ones (weights) in so many pieces from the first byte to the last.
WHOLE, PIECES, PIECE = 2**28, 64, 2**20


def task_contents(name: str, settings: TaskSettings) -> str | None:
    """Hash of the files that a task's questions are read from; None where they are generated, or the hub's."""
    try:
        source = find(task_of(name, settings.model_dump()), settings.files, settings.data_dir)
    except (DataError, ValueError):  # what is not there is told by the stage that reads it
        return None
    return _hash(path for paths in source.paths.values() for path in paths) if isinstance(source, LocalFiles) else None


def contents(place: str | None) -> str | None:
    """Hash of a file, or of the files in a folder; None where there is neither, as for a name on the hub."""
    path = Path(place or "")
    if place is None or not (path.is_file() or path.is_dir()):
        return None
    return _hash([path] if path.is_file() else (file for file in path.iterdir() if file.is_file()))


def _hash(files: Iterable[Path]) -> str | None:
    """Names, sizes and bytes. No dates: a copy on another machine has the same key."""
    found = sorted(set(files))
    return content_hash([[path.name, path.stat().st_size, _digest(path)] for path in found]) if found else None


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with opened(path, plain=True) as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        for number in range(PIECES):
            file.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(file.read(PIECE))
    return digest.hexdigest()
