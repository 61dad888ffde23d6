"""Attempts at a stage. Several may overlap, on one machine or on many; exactly one of them becomes the stage.

Attempts know of each other only by files on the file system that they share. No file is locked.

1.  An attempt has a fencing token, `<number>-<content>-<random>`, and a folder of its own, `<stage>.part-<token>`. The
    content is what determines the stage (`stages.content`), so work on other inputs is never continued.
2.  It starts from a copy of the earlier attempt that came furthest: of a training the newest whole checkpoint, of other
    stages the journal. Files that are never changed are linked, others copied. The copy is made in `<folder>.half` and
    renamed, so every `.part-` folder with an attempt.json is a whole copy, and what a paused attempt still writes goes
    into its own folder. If a dead attempt cannot be copied, the new one does not begin.
3.  `attempt.json` in the folder is its heartbeat: a counter that moves every BEAT seconds, with the progress. The
    attempt is dead if the file says that it has ended, or if its process was on this machine and is gone.
4.  To publish, an attempt writes `done.json` and renames its folder to `<stage>`. A folder cannot take the place of one
    that holds files, so one attempt becomes the stage; it deletes the folders of the others. A stale stage is renamed
    to `<stage>.stale-<random>` first. If what was renamed is no longer the stale one, it is put back, by whoever finds
    it; others are deleted once the stage is there.
5.  An attempt that begins deletes the dead ones, once what it needs of them is copied; those of other machines are
    deleted when the stage is published. Whatever is deleted is renamed first, to a name that ends in `.half`, so none
    of it can be published.
6.  An attempt whose attempt.json is gone has lost, since nothing creates that file again: it stops at its next report
    of progress, or when it publishes, and deletes what it wrote. Until then it may create its folder again, from which
    no attempt starts and which no attempt publishes without that file.

A run as a whole says in `running.json`, with the same heartbeat, that it works in a folder, so that a second one is
refused. That saves work; no result depends on it. A run on another machine is dead if its counter did not move for
STALE seconds on the observer's monotonic clock; clocks of machines are not compared. An NFS client may show attributes
that are 60 s old (acregmax), so STALE is that, some beats and a margin.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from catto.errors import DataError
from catto.io import atomic
from catto.pipeline import stage as stages
from catto.pipeline.stage import DONE, Stage, place

BEAT, STALE = 5.0, 90.0
ATTEMPT, RUNNING = stages.ATTEMPT, "running.json"
PART, HALF, ASIDE = ".part-", ".half", ".stale-"
LOST = "another attempt has taken the stage over"
logger = logging.getLogger(__name__)


class LostError(Exception):
    """Another attempt has become the stage, or takes this one for dead."""


# ---- heartbeats -----------------------------------------------------------------------------------------------------


class Heart(threading.Thread):
    """Moves a counter in a file for as long as this process lives and works."""

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(daemon=True)
        self.path, self.token = path, token
        self.beats, self.lost, self.ended = 0, False, False
        self.progress: tuple[int, int, str] | None = None
        self._stopped = threading.Event()

    def text(self) -> str:
        """Return what the file holds."""
        ours = {"token": self.token, "host": _host(), "pid": os.getpid(), "started": _started(os.getpid())}
        return json.dumps({**ours, "beats": self.beats, "progress": self.progress, "ended": self.ended})

    def run(self) -> None:
        """Beat until stopped."""
        while not self._stopped.wait(BEAT):
            self.beat()

    def beat(self) -> None:
        """Write the next count; a file that was taken away is not created again."""
        self.beats += 1
        if self.lost or heartbeat(self.path).get("token", self.token) != self.token:
            self.lost = True
            return
        try:
            with self.path.open("r+", encoding="utf-8") as file:
                file.write(self.text())
                file.truncate()
        except OSError as error:  # a full disk stops the work itself, where it writes
            self.lost = error.errno in (errno.ENOENT, errno.ESTALE)
            if not self.lost:
                logger.warning("%s: %s", self.path, error)

    def stop(self) -> None:
        """Stop, so that the file stays as it is."""
        self._stopped.set()
        self.join()


def _host() -> str:
    """Name the machine and, on Linux, its boot (clones share a name) and the container of these process numbers."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    return platform.node()


def _started(pid: int) -> str | None:
    """Return when a process of this machine started; None where it is gone. A number alone may be another's by now."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(PermissionError):  # another user's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return ""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else fields[18]


def heartbeat(path: Path) -> dict[str, Any]:
    """Return what a heartbeat says; nothing where it is gone or being written."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


class Watch:
    """What one observer has seen of heartbeats."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[object, float]] = {}  # what was seen last, and since when

    def alive(self, path: Path) -> bool | None:
        """Whether the writer of a heartbeat lives; None while that is not known."""
        now = time.monotonic()  # before the file is read: the observer too may be paused in between
        record = heartbeat(path)
        if record.get("ended"):
            return False
        if record.get("host") == _host():
            return _started(int(record["pid"])) == str(record["started"])
        before, since = self._seen.setdefault(path, (record, now))
        if record != before:
            self._seen[path] = record, now
            return True if record else None
        return False if now - since > STALE else None


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Work in an experiment's folder as its only run; a second one is refused.

    A run on the same machine is known to live or not at once; the heartbeat of one on another machine is watched.
    """
    path, watch, told = root / RUNNING, Watch(), False
    heart = Heart(path, secrets.token_hex(8))
    mine, aside = (path.with_name(f"{path.name}.{heart.token}{end}") for end in ("", ".dead"))
    with atomic.write_errors_at(path, path):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                mine.write_text(heart.text(), encoding="utf-8")
                atomic.link_or_copy(mine, path)
                break
            except FileExistsError:
                record = heartbeat(path)
            finally:
                mine.unlink(missing_ok=True)
            host, pid = (str(record.get(name, "?")).partition(" ")[0] for name in ("host", "pid"))
            alive, who = watch.alive(path), f"another run (process {pid} on {host})"
            if alive:
                raise DataError(root, None, f"{who} is working in this folder; wait for it, or give another --out")
            if alive is None:
                if not told:
                    logger.warning("%s: waiting up to %.0f s to see whether %s is alive", root, STALE, who)
                told = True
                time.sleep(min(1.0, BEAT))
                continue
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
                if heartbeat(aside).get("token") != record.get("token"):  # another run's has come into its place
                    with contextlib.suppress(FileExistsError):
                        atomic.link_or_copy(aside, path)
                aside.unlink()
    heart.start()
    try:
        yield
    finally:
        heart.stop()
        if not heart.lost:
            path.unlink(missing_ok=True)


# ---- folders --------------------------------------------------------------------------------------------------------


def folders(root: Path, stage: Stage, content: str = "*") -> list[Path]:
    """Return the folders of the attempts at a stage, the newest last."""
    paths = (root / "stages").glob(f"{stage.folder}{PART}*-{content[:8]}-*")
    return sorted(path for path in paths if path.suffix != HALF)


def begun(root: Path) -> dict[str, list[Path]]:
    """Return the folders of all attempts, by the names of their stages' folders; one look for thousands of stages."""
    by_stage: dict[str, list[Path]] = {}
    for mark in (PART, ASIDE):
        for path in (root / "stages").glob(f"*{mark}*"):
            by_stage.setdefault(path.name.partition(mark)[0], []).append(path)
    return by_stage


def _new(root: Path, stage: Stage, content: str) -> Path:
    """Name the folder of a new attempt."""
    earlier = [folder.name.rpartition(PART)[2].partition("-")[0] for folder in folders(root, stage)]
    number = max(map(int, earlier), default=0) + 1
    return root / "stages" / f"{stage.folder}{PART}{number:04d}-{content[:8]}-{secrets.token_hex(3)}"


def settled(root: Path, stage: Stage, content: str) -> bool:
    """Whether the stage is published with this content. If so, delete the other attempts at it."""
    final = place(root, stage)
    # Before the stage is looked at: what is moved aside later may be the stage itself, and is not deleted.
    asides = list((root / "stages").glob(f"{stage.folder}{ASIDE}*"))
    for aside in asides:
        if _current(aside, content):
            with contextlib.suppress(OSError):
                _move_in(aside, final, content)
    if not _current(final, content):
        return False
    for aside in asides:
        _delete(aside, final)
    for folder in (root / "stages").glob(f"{stage.folder}{PART}*"):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _current(folder: Path, content: str) -> bool:
    try:
        return bool(stages.account(folder)["content"] == content)
    except DataError:
        if folder.exists():
            raise
        return False


def _move_in(folder: Path, final: Path, content: str) -> None:
    """Rename an attempt to the stage; a stale stage makes way. OSError where another one is there, or it is gone.

    The stage may be replaced between the look at it and its rename, so what was moved aside is looked at again.
    """
    aside = final.with_name(f"{final.name}{ASIDE}{secrets.token_hex(3)}")
    if final.exists() and not _current(final, content):
        with contextlib.suppress(OSError):
            final.rename(aside)
            if _current(aside, content):
                aside.rename(final)
    folder.rename(final)
    atomic.sync_folder(final.parent)
    if aside.exists() and not _current(aside, content):
        _delete(aside, final)


def _delete(folder: Path, final: Path) -> None:
    """Delete a folder that another process may rename or write to: first it gets a name that only this one knows."""
    gone = final.with_name(f"{final.name}{PART}gone-{secrets.token_hex(3)}{HALF}")
    with contextlib.suppress(OSError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


# ---- an attempt -----------------------------------------------------------------------------------------------------


class Attempt:
    """One attempt at a stage, from its folder to its result; leaving it without `publish` keeps the folder."""

    def __init__(self, root: Path, stage: Stage, content: str, source: Path | None = None) -> None:
        """Begin from the earlier attempt that came furthest, or from a finished stage (`source`); delete the dead ones.

        What those hold was copied by then, or is of other inputs, and their checkpoints take space.
        """
        self.root, self.stage, self.content = root, stage, content
        self.out = _new(root, stage, content)
        self.heart = Heart(self.out / ATTEMPT, self.out.name)
        half, begun = self.out.with_name(self.out.name + HALF), (root / "stages").glob(f"{stage.folder}{PART}*")
        dead = [folder for folder in begun if Watch().alive(folder / ATTEMPT) is False]
        whole = [folder for folder in folders(root, stage, content) if (folder / ATTEMPT).exists()]
        try:
            for start in [source] if source is not None else [*sorted(whole, key=_reached, reverse=True), None]:
                half.mkdir(parents=True)
                (half / ATTEMPT).write_text(self.heart.text(), encoding="utf-8")
                if start is None:
                    break
                try:
                    _inherit(start, half, self.out)
                    break
                except OSError as error:
                    if start == source or (start.exists() and Watch().alive(start / ATTEMPT) is False):
                        raise OSError(f"cannot copy {start}: {error}") from error
                    shutil.rmtree(half)  # the earlier one is alive after all and moves on, or was deleted
            (half / ATTEMPT).stat()  # gone if another attempt has published meanwhile and deleted the copy
            half.rename(self.out)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise
        for folder in dead:
            _delete(folder, place(root, stage))
        self.heart.start()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.heart.stop()
        self.heart.ended = True
        self.heart.beat()

    def progress(self, finished: int, total: int, note: str) -> None:
        """Put the progress into the heartbeat; raise LostError if this attempt has lost."""
        self.heart.progress = finished, total, note
        if self.heart.lost:
            raise LostError(LOST)

    def publish(self, details: Mapping[str, Any]) -> None:
        """Make this attempt the stage, if no other one is by now; LostError if another one will be."""
        if not (self.out / ATTEMPT).exists():
            raise LostError(LOST)
        for left in self.out.rglob(".*.part"):  # what a killed run was writing
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if stages.content(self.root, self.stage) != self.content:
            raise DataError(self.out, None, "what the stage needs was changed while it ran; run it again")
        stages.write(self.out / DONE, stages.record(self.stage, self.out, self.content, details))
        here = self.root, self.stage, self.content
        # attempt.json is looked for after done.json was written, which may have created a discarded folder again.
        if not settled(*here) and (self.out / ATTEMPT).exists():
            try:
                _move_in(self.out, place(self.root, self.stage), self.content)
            except OSError:  # it was discarded, another one came first, NFS repeated the rename; or the disk is full
                if not settled(*here) and (self.out / ATTEMPT).exists():
                    raise
        if not settled(*here):
            raise LostError(LOST)


def _reached(folder: Path) -> tuple[bool, int, int, str]:
    """Order attempts by how far they came: trained, the newest whole checkpoint, the journals, the number."""
    step = journals = 0
    with contextlib.suppress(OSError):  # it may be discarded meanwhile
        journals = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    if (folder / "checkpoints").exists():
        from catto.training.checkpoints import newest_complete

        newest = newest_complete(folder / "checkpoints")
        step = 0 if newest is None else int(newest.name.rpartition("-")[2])
    return (folder / "training.json").exists(), step, journals, folder.name


def _inherit(earlier: Path, half: Path, out: Path) -> None:
    """Copy an earlier attempt to `half`, which will be `out`; raise OSError if it changes meanwhile."""

    def copy(source: str, target: str) -> None:
        """Link weights, which are large and never written to again; copy what may be."""
        (atomic.link_or_copy if source.endswith(".safetensors") else shutil.copyfile)(Path(source), Path(target))

    if (earlier / "checkpoints").exists():
        from catto.training.checkpoints import copy_newest

        copy_newest(earlier / "checkpoints", half / "checkpoints", out / "checkpoints")
    ignored = shutil.ignore_patterns(".*.part", "checkpoints", ".lock", DONE, ATTEMPT)
    shutil.copytree(earlier, half, ignore=ignored, copy_function=copy, dirs_exist_ok=True)
    if (half / "training.json").exists():  # the checkpoints are being deleted
        shutil.rmtree(half / "checkpoints", ignore_errors=True)


def reopen(root: Path, stage: Stage) -> list[Path]:
    """Make a finished stage an attempt again; return the folders of the attempts, any of which may be continued."""
    final = place(root, stage)
    if final.exists():
        final.rename(_new(root, stage, stages.account(final)["content"]))
    attempts = folders(root, stage)
    for folder in attempts:
        (folder / DONE).unlink(missing_ok=True)
    return attempts
