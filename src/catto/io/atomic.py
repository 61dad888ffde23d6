"""Write files and folders whole or not at all, lock them, and seal a finished folder.

Everything the package writes goes through `replace_file` or `build_folder`: it is written next to its target, flushed
to disk and renamed. A kill or a full disk leaves the old file or none, never half of a new one.
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

from catto.errors import DataError
from catto.io.text_files import open_input

BUSY = "another run is writing here"


@contextmanager
def replace_file(path: Path) -> Iterator[IO[str]]:
    """Write a text file whole or not at all. UTF-8, newlines as they are written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with replace_file(path) as file:
    ...     _ = file.write("whole")
    ...     path.exists()
    False
    >>> path.read_text()
    'whole'
    """
    with replace_binary_file(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        yield text
        text.flush()
        text.detach()


def write_text(path: Path, text: str) -> None:
    """Write a text as a file, whole or not at all."""
    with replace_file(path) as file:
        file.write(text)


@contextmanager
def replace_binary_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file whole or not at all.

    What cannot be written (disk full, no permission, a folder or a device in its place) is one DataError.
    """
    if path.exists() and not path.is_file():
        raise DataError(path, None, "cannot be written: it is there and is not a regular file")
    with _beside(path) as beside, beside.open("wb") as file:
        yield file


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
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
    with write_errors_at(path, beside):
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


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, which must be free; copy it where the file system has no links."""
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        with source.open("rb") as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)


@contextmanager
def write_errors_at(path: Path, beside: Path) -> Iterator[None]:
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
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for this process; the system drops the lock of a killed one."""
    with write_errors_at(path, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        lock_open_file(file, path.parent)
        yield


def lock_open_file(file: IO[bytes], place: Path) -> None:
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


def seal_folder(folder: Path, leave: frozenset[str] = frozenset()) -> dict[str, Seal]:
    """Seal every file below a folder, by its path from there; `leave` names files at the top that may change later.

    `find_damage` then finds what has changed.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: Seal(path.stat().st_size, sha256(path)) for name, path in files.items() if name not in leave}


def find_damage(folder: Path, seals: dict[str, Seal], *, contents: bool) -> str | None:
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
    with open_input(path, plain=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
