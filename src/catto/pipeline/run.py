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
from catto.pipeline.attempts import AttemptDeletedError, lock_run
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
    """How a stage ended.

    Attributes:
        outcome: done, unchanged (an earlier result of equal inputs was copied), failed or blocked.
        problem: Why it failed.
        log: The log of a failed stage; the experiment's folder where it failed before it had one.
    """

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

    Raises:
        DataError: Another run works in the folder, or a finished stage is damaged. Files of another size are noticed
            before anything runs, other bytes before a stage reads them.
    """
    outcome = Outcome()
    checked: set[Path] = set()  # folders, see `run_stage`
    number = 0
    with lock_run(root):
        missing = sum(state != "done" for _, state in list_states(root, goals))
        leftovers = attempts.attempts_by_stage(root)
        for stage in list_needed(list(goals)):
            if outcome.blocks(stage):
                display.ended(stage, "blocked", 0.0)
            elif not stages.is_done(root, stage):
                number += 1
                # More than were missing may run: a need with another result makes a finished stage stale.
                display.started(stage, number, max(missing, number))
                began = time.monotonic()
                ending = run_stage(root, stage, partial(display.progress, stage), checked)
                outcome.add(stage, ending)
                display.ended(stage, ending.outcome, time.monotonic() - began)
            elif stage.folder in leftovers:  # the run that finished the stage was killed while it deleted them
                with attempts.lock_stage(root, stage):
                    attempts.delete_abandoned(root, stage)
    release_engine()
    return outcome


def run_stage(root: Path, stage: Stage, progress: Progress, checked: set[Path]) -> Ending:
    """Run a stage whose needs are done, in an attempt of its own, unless its result is there already.

    Args:
        root: The experiment's folder.
        stage: The stage.
        progress: Called with the finished and total units of the stage, and a note.
        checked: Folders whose bytes were compared with what was written. The folders that this stage reads are added,
            so each is compared once a run.

    Returns:
        How the stage ended: `done` also where another process finished it meanwhile. An exception of the stage is an
        Ending too, and its traceback is in the log.

    Raises:
        DataError: The done.json of the stage, or of one that it needs, is damaged.
    """
    inputs_digest = stages.digest_inputs(root, stage)
    if attempts.is_published(root, stage, inputs_digest):
        return Ending("done")
    try:
        if reuse_earlier_result(root, stage, inputs_digest):
            return Ending("unchanged")
        attempt = attempts.Attempt(root, stage, inputs_digest)
    except (OSError, AttemptDeletedError, DataError) as error:
        # Another attempt that publishes deletes this one, which may raise any of these.
        if attempts.is_published(root, stage, inputs_digest):
            return Ending("done")
        return Ending("failed", f"cannot begin: {error}", log=root)
    try:
        with attempt:  # holds its lock
            _run_and_publish(attempt, progress, checked)
    except Exception as error:
        # Another attempt that publishes deletes the files of this one, which may raise anything.
        if attempts.is_published(root, stage, inputs_digest):
            return Ending("done")
        if isinstance(error, AttemptDeletedError):
            # The stage may have written into its deleted folder again.
            shutil.rmtree(attempt.out, ignore_errors=True)
            return Ending("failed", str(error), log=root)
        return _describe_failure(error, attempt)
    return Ending("done")


def _run_and_publish(attempt: attempts.Attempt, progress: Progress, checked: set[Path]) -> None:
    """Run a stage in the folder of an attempt, and publish it with its time, versions and threads."""

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
    return Ending("failed", problem, log=log)


def reuse_earlier_result(root: Path, stage: Stage, inputs_digest: str) -> bool:
    """Publish a copy of another stage's result as this stage's, if that stage had the same name and inputs.

    It is of another recipe, or of this one before a setting changed: its key differs, but what the needs hold is the
    same. So its folder differs from this stage's, in which `is_published` looks, only in the key at its end.

    Returns:
        Whether there was such a result. A damaged one is passed over.
    """
    readable_name = stage.folder.rpartition("-")[0]
    any_key = "[0-9a-f]" * 8
    for finished in (root / "stages").glob(f"{readable_name}-{any_key}"):
        try:
            done_record = stages.read_done(finished)
            if done_record["content"] != inputs_digest:
                continue
            stages.check_stage(finished, contents=True)
        except DataError:  # deleted or damaged
            continue
        details = {name: value for name, value in done_record.items() if name in ("seconds", "versions", "threads")}
        with attempts.Attempt(root, stage, inputs_digest, source=finished) as attempt:
            attempt.publish({**details, "taken_over": finished.name})
        return True
    return False


def wait_for_stages(root: Path, wanted: Collection[Stage], waiting_name: str) -> list[str]:
    """Wait until the stages are done, up to `SECONDS_TO_WAIT`.

    A network file system may show what another machine has just finished up to a minute later.

    Args:
        root: The experiment's folder.
        wanted: The stages.
        waiting_name: What waits for them, for the log.

    Returns:
        The names of the stages that are still not done.
    """
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        missing = [stage.name for stage in wanted if not stages.is_done(root, stage)]
        if not missing or time.monotonic() > deadline:
            return missing
        logger.warning("%s waits up to %.0f s for %s", waiting_name, deadline - time.monotonic(), missing[0])
        time.sleep(min(SECONDS_BETWEEN_LOOKS, SECONDS_TO_WAIT))


def _run_work(work: Work, checked: set[Path]) -> None:
    """Check the bytes of what a stage reads, except in the `checked` folders, and call the function of its kind.

    Folders without damage are added to `checked`.
    """
    kind = STAGE_KINDS[work.stage.kind]
    if kind.loads_model:
        release_engine()  # two models may not fit into memory
    for need in work.stage.needs.values():
        for folder in stages.list_folders_read(work.root, need):
            if folder not in checked:
                stages.check_stage(folder, contents=True)
                checked.add(folder)
    kind.run(work)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send logging, warnings and whatever libraries print during a stage to its log, which is appended to."""
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
    """Rename the folder of every damaged stage to `<folder>.damaged`, so that it runs again; return those stages.

    Only the folder that an earlier repair moved aside is deleted.
    """
    moved = []
    with lock_run(root):
        for stage in list_needed(list(goals)):
            folder = stage_dir(root, stage)
            try:
                if folder.exists():
                    stages.check_stage(folder, contents=True)
            except DataError:
                aside = folder.with_name(folder.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # an earlier repair may have left one
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
            folders = attempts.attempt_folders(root, stage)
        # Of several attempts the one that came furthest counts, which is the last.
        for folder in reversed(folders):
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
