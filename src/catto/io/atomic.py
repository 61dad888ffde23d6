"""Write files and folders atomically, lock them, and seal a finished folder.

Everything the package writes goes through `replace_file` or `build_folder`: it is written next to its target, flushed
to disk and renamed. After a kill or on a full disk there is the old file or none, never half of a new one.
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
    """Write a UTF-8 text file atomically. Newlines are not translated.

    Yields:
        An open file, which replaces `path` on a clean exit.

    Raises:
        DataError: The file cannot be written.

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
        text.detach()  # otherwise the wrapper would close `raw`, which `replace_binary_file` closes


def write_text(path: Path, text: str) -> None:
    """Write a text to a file, atomically."""
    with replace_file(path) as file:
        file.write(text)


@contextmanager
def replace_binary_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file atomically.

    Raises:
        DataError: The file cannot be written: the disk is full, permission is missing, or `path` is a folder or device.
    """
    if path.exists() and not path.is_file():
        raise DataError(path, None, "cannot be written: it exists and is not a regular file")
    with _write_then_rename(path) as temporary, temporary.open("wb") as file:
        yield file


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Build a folder atomically: yield an empty folder next to it, which is renamed to `folder` on a clean exit.

    An older folder at this path is deleted just before the rename.
    """
    target = folder.resolve()  # if `folder` is a link, replace the folder that it points to, not the link
    with _write_then_rename(target) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def _write_then_rename(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, where the caller creates a file or a folder; then rename it to `path`.

    Before the rename, everything is flushed to disk. After an error, the temporary file or folder is deleted. If the
    process is killed, it is left behind, and a stage deletes leftover `.*.part` files when it is published.

    Yields:
        The temporary path. Nothing exists there yet.

    Raises:
        DataError: Something cannot be written.
    """
    # With the process id and the suffix, 100 bytes of the name are short enough for every file system.
    name = path.name.encode(errors="ignore")[:100].decode(errors="ignore")
    temporary = path.with_name(f".{name}.{os.getpid()}.part")
    with write_errors_at(path, temporary):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed process that had the same id may have left a folder. A file would simply be overwritten.
            shutil.rmtree(temporary, ignore_errors=True)
            yield temporary
            for written in (*sorted(temporary.rglob("*")), temporary):
                _sync(written)
            if path.is_dir():  # unlike a file, a folder that is not empty cannot be replaced by a rename
                shutil.rmtree(path)
            temporary.replace(path)
        finally:  # after the rename, there is nothing left to delete
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file to a new name; copy it if the file system does not support links.

    Raises:
        FileExistsError: There is a file at `target`.
    """
    try:
        os.link(source, target)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:
        with source.open("rb") as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)


@contextmanager
def write_errors_at(path: Path, temporary: Path) -> Iterator[None]:
    """Turn an OSError from writing `path` by way of `temporary` into a DataError.

    An OSError about any other file comes from the caller's own code and is raised unchanged.
    """
    try:
        yield
    except OSError as error:
        name = os.fspath(error.filename) if error.filename is not None else str(temporary)
        is_at_or_below_temporary = name.startswith(str(temporary))
        is_at_or_above_path = str(path).startswith(name)
        if error.errno is None or not (is_at_or_below_temporary or is_at_or_above_path):
            raise
        raise DataError(path, None, f"cannot be written: {error.strerror}") from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: without it a power cut can undo a rename. Windows has no such call."""
    if hasattr(os, "O_DIRECTORY"):
        _sync(folder)


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for this process; the operating system releases the lock of a killed process."""
    with write_errors_at(path, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        lock_open_file(file, path.parent)
        yield


def lock_open_file(file: IO[bytes], shown_path: Path) -> None:
    """Lock an open file for this process until it is closed. Another process's lock is not waited for.

    Args:
        file: The file.
        shown_path: The path that an error names.

    Raises:
        DataError: Another process holds the lock, or the file system does not support locks.
    """
    import fcntl  # not available on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_held_by_other = error.errno in (errno.EWOULDBLOCK, errno.EACCES)  # which one depends on the system
        if is_held_by_other:
            raise DataError(shown_path, None, BUSY) from None
        raise DataError(shown_path, None, f"cannot be locked: {error.strerror}") from None


class Seal(NamedTuple):
    """The size in bytes and the SHA-256 of a finished file."""

    size: int
    sha256: str


def seal_folder(folder: Path, excluded: frozenset[str] = frozenset()) -> dict[str, Seal]:
    """Record size and hash of every file in a folder, so that `find_damage` can detect changes.

    Args:
        folder: The folder. Its subfolders are included.
        excluded: The files that may change later and get no seal, as paths relative to the folder.

    Returns:
        The seal of each file, by its path relative to the folder.
    """
    seals: dict[str, Seal] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in excluded:
            seals[name] = Seal(path.stat().st_size, sha256(path))
    return seals


def find_damage(folder: Path, seals: dict[str, Seal], *, contents: bool) -> str | None:
    """Describe the first file of a folder that is missing or differs from its seal.

    Args:
        folder: The folder.
        seals: The seals that `seal_folder` returned. Files without a seal are ignored.
        contents: Whether to read the files and compare their hashes too; sizes are always compared.

    Returns:
        The damage, such as `rows.jsonl is missing`; None if all files are intact.
    """
    for name, seal in seals.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != seal.size:
            return f"{name} has {size:,} bytes, expected {seal.size:,}"
        if contents and sha256(path) != seal.sha256:
            return f"{name} has changed since it was written"
    return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits. A gzipped file is hashed as it is."""
    with open_input(path, keep_compressed=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
