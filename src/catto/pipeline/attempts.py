"""Attempts at a stage: several may overlap, on one machine or on many, and exactly one becomes the stage.

1.  An attempt works in its own folder, `<stage>.part-<inputs>-<random>`. `<inputs>` is the beginning of the hash that
    `digest_inputs` returns, so an attempt never continues work on different inputs.
2.  It starts from a copy of the earlier attempt that got furthest. The copy is made in `<folder>.half` and renamed to
    `<folder>` when it is complete.
3.  It holds a lock in its folder while its process lives. The operating system releases the lock of a killed process,
    so whoever can acquire the lock knows that the attempt was abandoned and may delete it.
4.  It publishes its result by renaming its folder to `<stage>`. An older result for different inputs is first renamed
    to `<stage>.stale-<random>` and then deleted. An attempt that finishes second discards its work.

Attempts at one stage begin, publish and delete one at a time, under the lock `.locks/<stage>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from catto.errors import DataError
from catto.io import atomic
from catto.pipeline.stage import (
    ATTEMPT_FILE,
    ATTEMPT_LOCK,
    DONE,
    PROGRESS,
    Stage,
    digest_inputs,
    make_done,
    read_inputs_digest,
    stage_dir,
    write_json,
)

ATTEMPT_MARK = ".part-"
REPLACED_MARK = ".stale-"
INCOMPLETE_SUFFIX = ".half"
RUN_LOCK = "run.lock"
SECONDS_BETWEEN_REPORTS = 1.0


class AttemptDeletedError(Exception):
    """Another attempt at the same stage deleted the folder of this one."""


@contextlib.contextmanager
def lock_run(root: Path) -> Iterator[None]:
    """Hold the lock of an experiment's folder; raise DataError if another run holds it."""
    path = root / ".locks" / RUN_LOCK
    with atomic.write_errors_at(path, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            message = "another run is working in this folder; wait for it, or use a different --out"
            raise DataError(root, None, message) from None
    try:
        yield
    finally:
        lock.release()


def lock_stage(root: Path, stage: Stage) -> FileLock:
    """Return the lock under which attempts at a stage begin, publish and are deleted."""
    folder = root / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / stage.folder)


# ---- folders --------------------------------------------------------------------------------------------------------


def attempt_folders(root: Path, stage: Stage, inputs_digest: str = "") -> list[Path]:
    """Return the folders of the unfinished attempts at a stage; the one that got furthest is last.

    Args:
        root: The experiment's folder.
        stage: The stage.
        inputs_digest: Return only the attempts on these inputs; if empty, return all.
    """
    inputs = inputs_digest[:8] or "*"  # in the name of the folder, see `name_attempt`
    paths = (root / "stages").glob(f"{stage.folder}{ATTEMPT_MARK}{inputs}-*")
    return sorted((path for path in paths if path.suffix != INCOMPLETE_SUFFIX), key=measure_progress)


def attempts_by_stage(root: Path) -> dict[str, list[Path]]:
    """Return the folders of unfinished attempts and replaced results, by the folder name of their stage.

    One scan of the folder serves thousands of stages.
    """
    by_stage: dict[str, list[Path]] = {}
    for mark in (ATTEMPT_MARK, REPLACED_MARK):
        for path in (root / "stages").glob(f"*{mark}*"):
            stage_folder = path.name.partition(mark)[0]
            by_stage.setdefault(stage_folder, []).append(path)
    return by_stage


def measure_progress(folder: Path) -> tuple[bool, int, int, str]:
    """Return a sort key for attempts; the one that got furthest has the largest.

    Its parts, in their order, are: whether training has finished (training.json exists), the step of the newest
    checkpoint, the size of all journals of responses in bytes, and the name of the folder, which only decides ties.
    """
    step = 0
    journal_bytes = 0
    with contextlib.suppress(OSError):  # another attempt may be deleting the folder
        journal_bytes = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    if (folder / "checkpoints").exists():
        from catto.training.checkpoints import newest_complete

        newest = newest_complete(folder / "checkpoints")
        if newest is not None:
            step = int(newest.name.rpartition("-")[2])
    return (folder / "training.json").exists(), step, journal_bytes, folder.name


def read_progress(folder: Path) -> list[Any] | None:
    """Return the last progress report of an attempt: finished units, total units and a note. None before the first."""
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads((folder / PROGRESS).read_text(encoding="utf-8")))
    return None


def name_attempt(root: Path, stage: Stage, inputs_digest: str) -> Path:
    """Return the path of a new attempt's folder."""
    return root / "stages" / f"{stage.folder}{ATTEMPT_MARK}{inputs_digest[:8]}-{secrets.token_hex(4)}"


def is_published(root: Path, stage: Stage, inputs_digest: str) -> bool:
    """Return whether the stage's folder has a result for these inputs. Raise DataError for a damaged done.json."""
    folder = stage_dir(root, stage)
    try:
        return read_inputs_digest(folder) == inputs_digest
    except DataError:
        if folder.exists():
            raise
        return False


def is_abandoned(folder: Path) -> bool:
    """Return whether the process of an attempt has ended: its lock can then be acquired."""
    try:
        with FileLock(folder / ATTEMPT_LOCK, timeout=0):
            return True
    except (Timeout, OSError):
        return False


def delete_abandoned(root: Path, stage: Stage) -> None:
    """Delete replaced results, and attempts whose process has ended. The caller must hold the lock of the stage."""
    for path in (root / "stages").glob(f"{stage.folder}{REPLACED_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (root / "stages").glob(f"{stage.folder}{ATTEMPT_MARK}*"):
        lock = FileLock(path / ATTEMPT_LOCK, timeout=0)
        with contextlib.suppress(Timeout, OSError), lock:
            # attempt.json is deleted first: if the process is still alive after all, it can no longer publish.
            (path / ATTEMPT_FILE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def reopen_stage(root: Path, stage: Stage) -> list[Path]:
    """Turn a finished stage back into an unfinished attempt; return all attempts at the stage."""
    with lock_stage(root, stage):
        folder = stage_dir(root, stage)
        if folder.exists():
            folder.rename(name_attempt(root, stage, read_inputs_digest(folder)))
        attempts = attempt_folders(root, stage)
        for attempt in attempts:
            (attempt / DONE).unlink(missing_ok=True)
    return attempts


# ---- an attempt -----------------------------------------------------------------------------------------------------


class Attempt:
    """One attempt at a stage. Leaving it without `publish` keeps its folder for the next attempt."""

    def __init__(self, root: Path, stage: Stage, inputs_digest: str, finished_stage: Path | None = None) -> None:
        """Create the attempt's folder, lock it and copy earlier work into it.

        The folder is built under a temporary name and renamed when the copy is complete. If the process is killed
        before the rename, no later attempt continues from the partial copy.

        Args:
            root: The experiment's folder.
            stage: The stage.
            inputs_digest: What `digest_inputs` returns for the stage.
            finished_stage: Folder of a finished stage with the same inputs, whose result is copied. If None, the work
                of the earlier attempt that got furthest is copied; without one, the attempt starts empty.
        """
        self.root = root
        self.stage = stage
        self.inputs_digest = inputs_digest
        self.out = name_attempt(root, stage, inputs_digest)
        self._last_report_time = 0.0  # by `time.monotonic`
        incomplete = self.out.with_name(self.out.name + INCOMPLETE_SUFFIX)
        self._lock = FileLock(incomplete / ATTEMPT_LOCK)
        with lock_stage(root, stage):
            incomplete.mkdir(parents=True)
            self._lock.acquire()  # before the rename, so that the folder is never seen unlocked under its final name
            try:
                if finished_stage is not None:
                    copy_attempt(finished_stage, incomplete, self.out)
                else:
                    self._copy_earlier_work(incomplete)
                # For users: which attempt this is, even after `publish` renames the folder, and which process runs it.
                description = {"token": self.out.name, "host": platform.node(), "pid": os.getpid()}
                write_json(incomplete / ATTEMPT_FILE, description)
                incomplete.rename(self.out)
            except BaseException:
                shutil.rmtree(incomplete, ignore_errors=True)
                self._lock.release()
                raise
            # Nothing more is needed from abandoned attempts, whose checkpoints take space: either their best work was
            # copied, or a finished result makes it unnecessary. Work on different inputs is never continued.
            delete_abandoned(root, stage)

    def _copy_earlier_work(self, incomplete: Path) -> None:
        """Copy the earlier attempt that got furthest into the folder `incomplete`; nothing if there is none.

        A live attempt may change while it is copied. Then the one that got second furthest is copied, and so on.
        """
        for earlier in reversed(attempt_folders(self.root, self.stage, self.inputs_digest)):
            try:
                copy_attempt(earlier, incomplete, self.out)
                return
            except OSError as error:
                # An abandoned attempt cannot change during the copy, so the error has a different cause, such as a full
                # disk. To continue without its work would lose it, since abandoned attempts are deleted next.
                if is_abandoned(earlier):
                    raise OSError(f"cannot copy {earlier}: {error}") from error
            _delete_partial_copy(incomplete)

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check_not_deleted(self) -> None:
        """Raise AttemptDeletedError if another attempt deleted the folder of this one.

        A stage that still runs may create the folder again by writing to it, but never its attempt.json.
        """
        if not (self.out / ATTEMPT_FILE).exists():
            raise AttemptDeletedError("another attempt has taken over the stage")

    def report_progress(self, finished: int, total: int, note: str) -> None:
        """Write the progress for observers on other machines, at most once per `SECONDS_BETWEEN_REPORTS`.

        Args:
            finished: Number of finished units, such as training steps or responses.
            total: Number of all units.
            note: A short text to show next to the numbers; may be empty.

        Raises:
            AttemptDeletedError: The folder was deleted.
        """
        now = time.monotonic()
        if now - self._last_report_time < SECONDS_BETWEEN_REPORTS:
            return
        self._last_report_time = now
        self.check_not_deleted()
        with contextlib.suppress(OSError):  # on a full disk the stage fails when it writes its results
            (self.out / PROGRESS).write_text(json.dumps([finished, total, note]), encoding="utf-8")

    def publish(self, details: Mapping[str, Any]) -> None:
        """Make this attempt the finished stage, or discard it if another attempt was published meanwhile.

        Args:
            details: How the stage ran, such as its seconds; stored in done.json.

        Raises:
            AttemptDeletedError: Another attempt deleted the folder.
            DataError: The inputs of the stage changed while it ran.
        """
        self.check_not_deleted()
        _delete_unfinished_writes(self.out)  # otherwise `make_done` would record them as results
        if digest_inputs(self.root, self.stage) != self.inputs_digest:
            raise DataError(self.out, None, "an input of the stage changed while it ran; run it again")
        (self.out / PROGRESS).unlink(missing_ok=True)  # a finished stage has no progress to show
        write_json(self.out / DONE, make_done(self.stage, self.out, self.inputs_digest, details))
        with lock_stage(self.root, self.stage):
            if is_published(self.root, self.stage, self.inputs_digest):
                shutil.rmtree(self.out, ignore_errors=True)
                return
            self.check_not_deleted()  # again: the folder may have been deleted before the lock was acquired
            final = stage_dir(self.root, self.stage)
            if final.exists():  # the result for different inputs
                # A folder cannot be renamed to the name of one that is not empty. The old result is deleted below.
                final.rename(final.with_name(f"{final.name}{REPLACED_MARK}{secrets.token_hex(4)}"))
            self.out.rename(final)
            atomic.sync_folder(final.parent)  # so that the rename survives a power failure
            delete_abandoned(self.root, self.stage)


def _delete_partial_copy(incomplete: Path) -> None:
    """Delete everything in the folder of a new attempt except its lock."""
    for path in incomplete.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ATTEMPT_LOCK:
            path.unlink()


def _delete_unfinished_writes(folder: Path) -> None:
    """Delete the temporary files and folders of writes that were interrupted (see `catto.io.atomic`)."""
    for path in folder.rglob(".*.part"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def copy_attempt(earlier: Path, target: Path, final: Path) -> None:
    """Copy an earlier attempt, or a finished stage, into the folder of a new attempt.

    Of several checkpoints, only the newest complete one and the best one are copied.

    Args:
        earlier: The folder to copy.
        target: The folder to copy to, which exists.
        final: The path to which the caller will rename `target`. Checkpoints store the path of the best checkpoint, so
            the copies need the final path.

    Raises:
        OSError: A file cannot be copied, or `earlier` changed during the copy.
    """
    if (earlier / "checkpoints").exists():
        from catto.training.checkpoints import copy_newest

        copy_newest(earlier / "checkpoints", target / "checkpoints", final / "checkpoints")
    ignored = shutil.ignore_patterns(".*.part", "checkpoints", ".lock", DONE, ATTEMPT_FILE, ATTEMPT_LOCK, PROGRESS)
    shutil.copytree(earlier, target, ignore=ignored, copy_function=_link_weights_copy_others, dirs_exist_ok=True)
    if (target / "training.json").exists():  # the training has finished, so its checkpoints are no longer needed
        shutil.rmtree(target / "checkpoints", ignore_errors=True)


def _link_weights_copy_others(source: str, target: str) -> None:
    """Hard-link weights, which are large and never modified; copy other files, which may be."""
    if source.endswith(".safetensors"):
        atomic.link_or_copy(Path(source), Path(target))
    else:
        shutil.copyfile(source, target)
