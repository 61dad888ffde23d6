"""Attempts at a stage: several may overlap, on one machine or on many, and exactly one becomes the stage.

1.  An attempt works in its own folder, `<stage>.part-<inputs>-<random>`. `<inputs>` is the beginning of the hash of
    what determines the stage, so an attempt never continues work on different inputs.
2.  It starts from a copy of the earlier attempt that got furthest. The copy is made in `<folder>.half` and renamed.
3.  It holds a lock in its folder while its process lives. The operating system releases the lock of a killed process,
    so whoever can acquire the lock knows that the attempt was abandoned and may delete it.
4.  It publishes its result by renaming its folder to `<stage>`. An attempt that finishes second discards its work.

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
    ATTEMPT,
    ATTEMPT_LOCK,
    DONE,
    PROGRESS,
    Stage,
    digest_inputs,
    make_done,
    read_done,
    stage_dir,
    write_json,
)

PART = ".part-"
HALF = ".half"
STALE = ".stale-"
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
    paths = (root / "stages").glob(f"{stage.folder}{PART}*{inputs_digest[:8]}-*")
    return sorted((path for path in paths if path.suffix != HALF), key=measure_progress)


def attempts_by_stage(root: Path) -> dict[str, list[Path]]:
    """Return the folders of unfinished attempts and replaced results, by the folder name of their stage.

    One scan of the folder serves thousands of stages.
    """
    by_stage: dict[str, list[Path]] = {}
    for mark in (PART, STALE):
        for path in (root / "stages").glob(f"*{mark}*"):
            stage_folder = path.name.partition(mark)[0]
            by_stage.setdefault(stage_folder, []).append(path)
    return by_stage


def measure_progress(folder: Path) -> tuple[bool, int, int, str]:
    """Return a sort key for attempts: is trained, step of the newest checkpoint, bytes of the journals, folder name."""
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
    return root / "stages" / f"{stage.folder}{PART}{inputs_digest[:8]}-{secrets.token_hex(4)}"


def is_published(root: Path, stage: Stage, inputs_digest: str) -> bool:
    """Return whether the stage's folder has a result for these inputs. Raise DataError for a damaged done.json."""
    folder = stage_dir(root, stage)
    try:
        return bool(read_done(folder)["content"] == inputs_digest)
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
    for path in (root / "stages").glob(f"{stage.folder}{STALE}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (root / "stages").glob(f"{stage.folder}{PART}*"):
        lock = FileLock(path / ATTEMPT_LOCK, timeout=0)
        with contextlib.suppress(Timeout, OSError), lock:
            # attempt.json is deleted first: if the process is still alive after all, it can no longer publish.
            (path / ATTEMPT).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def reopen_stage(root: Path, stage: Stage) -> list[Path]:
    """Turn a finished stage back into an unfinished attempt; return all attempts at the stage."""
    with lock_stage(root, stage):
        folder = stage_dir(root, stage)
        if folder.exists():
            folder.rename(name_attempt(root, stage, read_done(folder)["content"]))
        attempts = attempt_folders(root, stage)
        for attempt in attempts:
            (attempt / DONE).unlink(missing_ok=True)
    return attempts


# ---- an attempt -----------------------------------------------------------------------------------------------------


class Attempt:
    """One attempt at a stage. Leaving it without `publish` keeps its folder for the next attempt."""

    def __init__(self, root: Path, stage: Stage, inputs_digest: str, source: Path | None = None) -> None:
        """Create the attempt's folder, lock it and copy earlier work into it.

        The folder has its final name only when the copy is complete. If the process is killed before, no later attempt
        continues from the partial copy.

        Args:
            root: The experiment's folder.
            stage: The stage.
            inputs_digest: What `digest_inputs` returns for the stage.
            source: Folder of a finished stage to copy; None copies the earlier attempt that got furthest, if any.
        """
        self.root = root
        self.stage = stage
        self.inputs_digest = inputs_digest
        self.out = name_attempt(root, stage, inputs_digest)
        self._reported_at = 0.0
        half = self.out.with_name(self.out.name + HALF)
        self._lock = FileLock(half / ATTEMPT_LOCK)
        with lock_stage(root, stage):
            half.mkdir(parents=True)
            self._lock.acquire()
            try:
                self._copy_earlier_work(half, source)
                write_json(half / ATTEMPT, {"token": self.out.name, "host": platform.node(), "pid": os.getpid()})
                half.rename(self.out)
            except BaseException:
                shutil.rmtree(half, ignore_errors=True)
                self._lock.release()
                raise
            # The work of the best abandoned attempt was copied; the checkpoints of all of them take space.
            delete_abandoned(root, stage)

    def _copy_earlier_work(self, half: Path, source: Path | None) -> None:
        """Copy `source`, or the earlier attempt that got furthest, into the new folder `half`."""
        if source is not None:
            copy_attempt(source, half, self.out)
            return
        for earlier in reversed(attempt_folders(self.root, self.stage, self.inputs_digest)):
            try:
                copy_attempt(earlier, half, self.out)
                return
            except OSError as error:
                if is_abandoned(earlier):  # nothing changes its files, so copying again would fail too
                    raise OSError(f"cannot copy {earlier}: {error}") from error
            # The earlier attempt is alive and changed during the copy: delete the partial copy and try the next one.
            for path in half.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != ATTEMPT_LOCK:
                    path.unlink()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check_folder(self) -> None:
        """Raise AttemptDeletedError if the folder was deleted.

        Files written later may create the folder again, but never attempt.json.
        """
        if not (self.out / ATTEMPT).exists():
            raise AttemptDeletedError("another attempt has taken over the stage")

    def report_progress(self, finished: int, total: int, note: str) -> None:
        """Write the progress for observers on other machines, at most once per `SECONDS_BETWEEN_REPORTS`.

        Raises:
            AttemptDeletedError: The folder was deleted.
        """
        now = time.monotonic()
        if now - self._reported_at < SECONDS_BETWEEN_REPORTS:
            return
        self._reported_at = now
        self.check_folder()
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
        self.check_folder()
        for leftover in self.out.rglob(".*.part"):  # temporary files of a killed attempt
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        if digest_inputs(self.root, self.stage) != self.inputs_digest:
            raise DataError(self.out, None, "an input of the stage changed while it ran; run it again")
        (self.out / PROGRESS).unlink(missing_ok=True)  # the published files must not depend on timing
        write_json(self.out / DONE, make_done(self.stage, self.out, self.inputs_digest, details))
        with lock_stage(self.root, self.stage):
            if is_published(self.root, self.stage, self.inputs_digest):
                shutil.rmtree(self.out, ignore_errors=True)
                return
            self.check_folder()
            final = stage_dir(self.root, self.stage)
            if final.exists():  # a result for different inputs, which `delete_abandoned` deletes after it is replaced
                final.rename(final.with_name(f"{final.name}{STALE}{secrets.token_hex(4)}"))
            self.out.rename(final)
            atomic.sync_folder(final.parent)
            delete_abandoned(self.root, self.stage)


def copy_attempt(earlier: Path, half: Path, out: Path) -> None:
    """Copy an earlier attempt, or a finished stage, into a new attempt.

    Args:
        earlier: The folder to copy.
        half: The folder to copy to.
        out: The path to which `half` will be renamed; the state of a checkpoint contains it.

    Raises:
        OSError: A file cannot be copied, or `earlier` changed during the copy.
    """
    if (earlier / "checkpoints").exists():
        from catto.training.checkpoints import copy_newest

        copy_newest(earlier / "checkpoints", half / "checkpoints", out / "checkpoints")
    ignored = shutil.ignore_patterns(".*.part", "checkpoints", ".lock", DONE, ATTEMPT, ATTEMPT_LOCK, PROGRESS)
    shutil.copytree(earlier, half, ignore=ignored, copy_function=_link_weights_copy_others, dirs_exist_ok=True)
    if (half / "training.json").exists():  # the training has finished, so its checkpoints are no longer needed
        shutil.rmtree(half / "checkpoints", ignore_errors=True)


def _link_weights_copy_others(source: str, target: str) -> None:
    """Hard-link weights, which are large and never modified; copy other files, which may be."""
    if source.endswith(".safetensors"):
        atomic.link_or_copy(Path(source), Path(target))
    else:
        shutil.copyfile(source, target)
