"""Files that are whole or not there: atomic writes, one lock, and the seal of a finished folder.

Every file that the package writes goes through `replacing` and every folder through `building`: written beside its
place, flushed to the disk, then renamed. A kill or a full disk leaves the old file or none, never half of the new one.
Files that grow (responses, predictions) are appended line by line by their own classes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from catto.problems import DataError

__all__ = [
    "BUSY",
    "Seal",
    "building",
    "damage",
    "hold",
    "locked",
    "replacing",
    "replacing_bytes",
    "sealed",
    "sync_folder",
]

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
