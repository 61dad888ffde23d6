"""Run stages: what is missing of a graph, here and one after the other; or a single one, for whoever orders them."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

from catto.errors import DataError
from catto.io import record_files
from catto.pipeline import attempts
from catto.pipeline import stage as stages
from catto.pipeline.attempts import LostError, lock_run
from catto.pipeline.kinds.generating import release_engine
from catto.pipeline.kinds.table import STAGE_KINDS
from catto.pipeline.stage import LOG, Stage, Work, list_needed, stage_dir
from catto.records import Refusal
from catto.teacher.responses import forget_refusals, refusals

# With fewer bytes left than this a failure is attributed to a full disk.
ROOM = 2**20
# What --repair moves aside gets this suffix.
DAMAGED = ".damaged"
Progress = Callable[[int, int, str], None]
# An NFS client looks again after 60 s (acdirmax).
SECONDS_TO_WAIT = 75.0
SECONDS_BETWEEN_LOOKS = 5.0
logger = logging.getLogger(__name__)


class Display(Protocol):
    """What shows a run to a person."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show that a stage began."""

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show how far a running stage is."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Show that a stage ended: done, unchanged, failed or blocked."""


class Ending(NamedTuple):
    """How a stage ended: done, unchanged (its files are those of a finished one) or failed, why, and its log."""

    outcome: str
    problem: str = ""
    log: Path = Path()


@dataclass
class Outcome:
    """How a run ended; without a failed stage everything is there."""

    finished: list[Stage] = field(default_factory=list)
    failed: dict[str, Path] = field(default_factory=dict)  # stage name and problem -> its log
    blocked: list[Stage] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)  # keys of the failed and the blocked

    def add(self, stage: Stage, ending: Ending) -> None:
        """Count a stage that ran."""
        if ending.outcome == "failed":
            self.failed[f"{stage.name}: {ending.problem}"] = ending.log
            self.stopped.add(stage.key)
        else:
            self.finished.append(stage)

    def blocks(self, stage: Stage) -> bool:
        """Whether a stage cannot run, since it needs one that failed; count it if so."""
        is_blocked = any(need.key in self.stopped for need in stage.needs.values())
        if is_blocked:
            self.blocked.append(stage)
            self.stopped.add(stage.key)
        return is_blocked


def run_goals(root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Run the goals and what they need. A failed stage stops only what depends on it.

    A damaged stage is an error that names it: before anything runs where sizes show it, and before it is read where
    only its bytes do.
    """
    outcome = Outcome()
    checked: set[Path] = set()
    number = 0
    with lock_run(root):
        missing = sum(state != "done" for _, state in list_states(root, goals))
        leftovers = attempts.attempts_by_stage(root)
        for stage in list_needed(list(goals)):
            if outcome.blocks(stage):
                display.ended(stage, "blocked", 0.0)
            elif not stages.is_done(root, stage):
                number += 1
                display.started(stage, number, max(missing, number))
                began = time.monotonic()
                ending = run_stage(root, stage, partial(display.progress, stage), checked)
                outcome.add(stage, ending)
                display.ended(stage, ending.outcome, time.monotonic() - began)
            elif stage.folder in leftovers:  # of a run that was killed while it deleted them
                with attempts.lock_stage(root, stage):
                    attempts.delete_abandoned(root, stage)
    release_engine()
    return outcome


def run_stage(root: Path, stage: Stage, progress: Progress, checked: set[Path]) -> Ending:
    """Run a stage whose needs are done, in an attempt of its own; the log of a failed one has the traceback.

    checked: folders whose bytes were compared with what was written; each is compared once a run.
    """
    content = stages.digest_inputs(root, stage)
    if attempts.is_published(root, stage, content):
        return Ending("done")
    try:
        if take_over(root, stage, content):
            return Ending("unchanged")
        attempt = attempts.Attempt(root, stage, content)
    except (OSError, LostError, DataError) as error:
        if attempts.is_published(root, stage, content):  # by another attempt, which deletes what has begun
            return Ending("done")
        return Ending("failed", f"cannot begin: {error}", root)
    try:
        with attempt:
            _run_attempt(attempt, progress, checked)
    except Exception as error:
        if attempts.is_published(root, stage, content):  # by another attempt, which deleted the files of this one
            return Ending("done")
        if isinstance(error, LostError):
            shutil.rmtree(attempt.out, ignore_errors=True)  # what it created again
            return Ending("failed", str(error), root)
        return _describe_failure(error, attempt)
    return Ending("done")


def _run_attempt(attempt: attempts.Attempt, progress: Progress, checked: set[Path]) -> None:
    """Run a stage in the folder of an attempt, and publish it."""

    def report(finished: int, total: int, note: str) -> None:
        attempt.report_progress(finished, total, note)
        progress(finished, total, note)

    began = time.monotonic()
    with logging_to(attempt.out / LOG):
        _run_work(Work(attempt.stage, attempt.root, attempt.out, report), checked)
    # The last bits of what torch computes depend on how many threads it has.
    torch = sys.modules.get("torch")
    details = {
        "seconds": time.monotonic() - began,
        "versions": record_files.library_versions(),
        "threads": None if torch is None else torch.get_num_threads(),
    }
    attempt.publish(details)


def _describe_failure(error: Exception, attempt: attempts.Attempt) -> Ending:
    """Return how a failed attempt ended, and add the traceback of the current exception to its log."""
    log = attempt.out / LOG
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:  # the disk may be full
        traceback.print_exc(file=file)
    problem = f"{type(error).__name__}: {error}"
    # Libraries report a full disk in words of their own, such as a position in an archive.
    if shutil.disk_usage(attempt.root).free < ROOM:
        problem += " (the disk is full)"
    return Ending("failed", problem, log)


def take_over(root: Path, stage: Stage, content: str) -> bool:
    """Make the stage from the files of a finished one, of any recipe, with the same content, if one is whole.

    The name is part of the content, so the other one's folder differs in the key at its end.
    """
    readable_name = stage.folder.rpartition("-")[0]
    for finished in (root / "stages").glob(f"{readable_name}-" + "[0-9a-f]" * 8):
        try:
            record = stages.read_done(finished)
            if record["content"] != content:
                continue
            stages.check_stage(finished, contents=True)
        except DataError:  # deleted or damaged
            continue
        details = {name: value for name, value in record.items() if name in ("seconds", "versions", "threads")}
        with attempts.Attempt(root, stage, content, finished) as attempt:
            attempt.publish({**details, "taken_over": finished.name})
        return True
    return False


def wait_for_stages(root: Path, wanted: Collection[Stage], name: str) -> list[str]:
    """Return the names of stages that are not done. name: of what waits for them.

    A network file system may show what another machine has just finished up to a minute later, so this waits for it.
    """
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        missing = [stage.name for stage in wanted if not stages.is_done(root, stage)]
        if not missing or time.monotonic() > deadline:
            return missing
        logger.warning("%s waits up to %.0f s for %s", name, deadline - time.monotonic(), missing[0])
        time.sleep(min(SECONDS_BETWEEN_LOOKS, SECONDS_TO_WAIT))


def _run_work(work: Work, checked: set[Path]) -> None:
    """Check what a stage reads, and call the function of its kind."""
    kind = STAGE_KINDS[work.stage.kind]
    if kind.loads_model:
        release_engine()
    for need in work.stage.needs.values():
        for folder in stages.list_folders_read(work.root, need):
            if folder not in checked:
                stages.check_stage(folder, contents=True)
                checked.add(folder)
    kind.run(work)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send logging, warnings and whatever libraries print during a stage to its log."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    top = logging.getLogger()
    level = top.level
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    logging.captureWarnings(True)
    printed = _Printed(handler.stream)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        printed.log = None
        logging.captureWarnings(False)
        top.setLevel(level)
        top.removeHandler(handler)
        handler.close()


class _Printed(io.TextIOBase):
    """Replaces stdout and stderr. A library that keeps a reference writes to stderr once the log is closed."""

    def __init__(self, log: TextIO | None) -> None:
        self.log = log

    def write(self, text: str) -> int:
        """Write to the log while its stage runs."""
        return (self.log or sys.stderr).write(text)

    def flush(self) -> None:
        """Flush the stream that is written to."""
        (self.log or sys.stderr).flush()


def list_states(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """Return every stage with its state: done, begun or to do. What needs a stage that is not done is not done."""
    states: dict[str, str] = {}
    all_stages = list_needed(list(goals))
    begun = attempts.attempts_by_stage(root)
    for stage in all_stages:
        needs_are_done = all(states[need.key] == "done" for need in stage.needs.values())
        if needs_are_done and stages.is_done(root, stage):
            states[stage.key] = "done"
        else:
            states[stage.key] = "begun" if stage.folder in begun else "to do"
    return [(stage, states[stage.key]) for stage in all_stages]


# ---- repairing and retrying -----------------------------------------------------------------------------------------


def set_damaged_aside(root: Path, goals: Sequence[Stage]) -> list[Stage]:
    """Rename the folder of every damaged stage to `<folder>.damaged`, so that it runs again; nothing is deleted."""
    moved = []
    with lock_run(root):
        for stage in list_needed(list(goals)):
            folder = stage_dir(root, stage)
            try:
                if folder.exists():
                    stages.check_stage(folder, contents=True)
            except DataError:
                aside = folder.with_name(folder.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier repair
                folder.rename(aside)
                moved.append(stage)
    return moved


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """Return the stages, finished or begun, in which the teacher's server refused requests, with those."""
    refused = []
    begun = attempts.attempts_by_stage(root)
    for stage in list_needed(list(goals)):
        folders: list[Path] = []
        if stage_dir(root, stage).exists():
            folders = [stage_dir(root, stage)]
        elif stage.folder in begun:
            folders = attempts.attempt_folders(root, stage)[::-1]
        for folder in folders:
            requests = refusals(folder)
            if requests:
                refused.append((stage, requests))
                break
    return refused


def forget_refused(root: Path, goals: Sequence[Stage]) -> None:
    """Let the next run ask refused requests again.

    A stage with refused requests becomes an unfinished one without refusals, so it asks for what is missing. If a
    response came, the stages that were made without it are stale and run again too.
    """
    with lock_run(root):
        for stage, _ in refused_stages(root, goals):
            for folder in attempts.reopen_stage(root, stage):
                forget_refusals(folder)
