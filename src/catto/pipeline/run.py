"""Run the missing stages of a graph on this machine, one after the other, or a single stage for another scheduler."""

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

# If fewer bytes than this are free, a failure is attributed to a full disk.
MIN_FREE_BYTES = 2**20
# Suffix of the folders that --repair moves aside.
DAMAGED = ".damaged"
# Called with the finished units of a stage, all units and a note.
Progress = Callable[[int, int, str], None]
# An NFS client may cache the entries of a folder for 60 s (acdirmax).
SECONDS_TO_WAIT = 75.0
SECONDS_BETWEEN_LOOKS = 5.0
logger = logging.getLogger(__name__)


class Display(Protocol):
    """Shows a run to the user."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show that a stage began."""

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show the progress of a running stage."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Show that a stage ended: done, unchanged, failed or blocked."""


class Ending(NamedTuple):
    """How a stage ended.

    Attributes:
        outcome: done, unchanged (an earlier result for the same inputs was copied), failed or blocked.
        problem: Why it failed.
        log: The log of a failed stage; the experiment's folder if it failed before it had a log.
    """

    outcome: str
    problem: str = ""
    log: Path = Path()


@dataclass
class Outcome:
    """How a run ended. If no stage failed, all goals are done.

    Attributes:
        finished: The stages that ran without an error.
        failed: The log of each failed stage, by its name and problem.
        blocked: The stages that did not run, because a stage they need failed or was blocked.
        stopped: The keys of the failed and the blocked stages.
    """

    finished: list[Stage] = field(default_factory=list)
    failed: dict[str, Path] = field(default_factory=dict)
    blocked: list[Stage] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def add(self, stage: Stage, ending: Ending) -> None:
        """Record the ending of a stage that ran."""
        if ending.outcome == "failed":
            self.failed[f"{stage.name}: {ending.problem}"] = ending.log
            self.stopped.add(stage.key)
        else:
            self.finished.append(stage)

    def record_if_blocked(self, stage: Stage) -> bool:
        """Record a stage as blocked if a stage that it needs failed or is blocked; return whether it is blocked."""
        is_blocked = any(need.key in self.stopped for need in stage.needs.values())
        if is_blocked:
            self.blocked.append(stage)
            self.stopped.add(stage.key)
        return is_blocked


def run_goals(root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Run the goals and the stages they need. A failed stage stops only what depends on it.

    Args:
        root: The experiment's folder.
        goals: The stages whose results are wanted.
        display: Shows the run.

    Returns:
        How the run ended.

    Raises:
        DataError: Another run works in the folder, or a finished stage is damaged. A changed file size is detected
            before anything runs; changed content only before a stage reads the file.
    """
    with lock_run(root):
        try:
            return _run_in_order(root, list_needed(list(goals)), display)
        finally:
            release_engine()  # free the memory of the last model


def _run_in_order(root: Path, needed: Sequence[Stage], display: Display) -> Outcome:
    """Run the stages that are not done, in the given order, and return how the run ended.

    Args:
        root: The experiment's folder.
        needed: The stages, each after the stages it needs.
        display: Shows the run.
    """
    outcome = Outcome()
    verified_folders: set[Path] = set()  # see `run_stage`
    started_count = 0
    missing_count = sum(state != "done" for _, state in list_states(root, needed))
    earlier_attempts = attempts.attempts_by_stage(root)
    for stage in needed:
        if outcome.record_if_blocked(stage):
            display.ended(stage, "blocked", 0.0)
        elif not stages.is_done(root, stage):
            started_count += 1
            # More stages may run than were missing: if a need has a different result now, a finished stage is stale.
            display.started(stage, started_count, max(missing_count, started_count))
            began = time.monotonic()
            ending = run_stage(root, stage, partial(display.progress, stage), verified_folders)
            outcome.add(stage, ending)
            display.ended(stage, ending.outcome, time.monotonic() - began)
        elif stage.folder in earlier_attempts:
            # An earlier run published this stage but was killed before it could delete the other attempts at it.
            with attempts.lock_stage(root, stage):
                attempts.delete_abandoned(root, stage)
    return outcome


def run_stage(root: Path, stage: Stage, progress: Progress, verified_folders: set[Path]) -> Ending:
    """Run a stage whose needs are done, as a new attempt, unless its result already exists.

    Args:
        root: The experiment's folder.
        stage: The stage.
        progress: Called with the finished and total units of the stage, and a note.
        verified_folders: Folders whose files are known to match the hashes in their done.json. The folders that this
            stage reads are verified and added, so that each folder is verified once per run.

    Returns:
        `done` if this call or a different process has finished the stage; `unchanged` if the result was copied from an
        earlier stage with the same inputs; `failed` if the stage could not begin, or if it raised an exception, whose
        traceback is in the log.

    Raises:
        DataError: The done.json of the stage, or of one of its needs, is damaged.
    """
    inputs_digest = stages.digest_inputs(root, stage)
    if attempts.is_published(root, stage, inputs_digest):
        return Ending("done")
    try:
        if reuse_earlier_result(root, stage, inputs_digest):
            return Ending("unchanged")
        attempt = attempts.Attempt(root, stage, inputs_digest)
    except (OSError, AttemptDeletedError, DataError) as error:
        # Another attempt may have published its result and deleted this one, which causes any of these errors.
        if attempts.is_published(root, stage, inputs_digest):
            return Ending("done")
        return Ending("failed", f"cannot begin: {error}", log=root)
    try:
        with attempt:  # keeps its lock until the end
            _run_and_publish(attempt, progress, verified_folders)
    except Exception as error:
        # Another attempt may have published its result and deleted the files of this one, which causes any error.
        if attempts.is_published(root, stage, inputs_digest):
            return Ending("done")
        if isinstance(error, AttemptDeletedError):
            # After the deletion, the stage may have created the folder again by writing to it.
            shutil.rmtree(attempt.out, ignore_errors=True)
            return Ending("failed", str(error), log=root)
        return _describe_failure(error, attempt)
    return Ending("done")


def _run_and_publish(attempt: attempts.Attempt, progress: Progress, verified_folders: set[Path]) -> None:
    """Run a stage in the folder of an attempt and publish it, with its duration, library versions and thread count."""

    def report(finished: int, total: int, note: str) -> None:
        attempt.report_progress(finished, total, note)
        progress(finished, total, note)

    began = time.monotonic()
    with logging_to(attempt.out / LOG):
        _run_work(Work(attempt.stage, attempt.root, attempt.out, report), verified_folders)
    # The last bits of torch's results depend on its number of threads.
    torch = sys.modules.get("torch")
    details = {
        "seconds": time.monotonic() - began,
        "versions": record_files.library_versions(),
        "threads": None if torch is None else torch.get_num_threads(),
    }
    attempt.publish(details)


def _describe_failure(error: Exception, attempt: attempts.Attempt) -> Ending:
    """Return the Ending of a failed attempt, and append the traceback of the current exception to its log."""
    log = attempt.out / LOG
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:  # the disk may be full
        traceback.print_exc(file=file)
    problem = f"{type(error).__name__}: {error}"
    # Libraries describe a full disk in different ways, for example as an unexpected position in an archive.
    if shutil.disk_usage(attempt.root).free < MIN_FREE_BYTES:
        problem += " (the disk is full)"
    return Ending("failed", problem, log=log)


def reuse_earlier_result(root: Path, stage: Stage, inputs_digest: str) -> bool:
    """Publish a copy of an earlier result that was computed from the same inputs, if there is one.

    The key of a stage depends on its own settings and on those of all stages before it. `inputs_digest` depends on its
    own name and settings, and on the files that it reads. So two stages with different keys have the same result if
    their `inputs_digest` is the same. For example, one more learning rate in the recipe changes the key of every stage
    that uses the chosen model. If the same model is chosen as before, the results of these stages are copied.

    Args:
        root: The experiment's folder.
        stage: The stage, whose needs are done.
        inputs_digest: What `digest_inputs` returns for the stage.

    Returns:
        Whether a result was copied. Damaged results are skipped.
    """
    # The digest includes the name, so the folder has the same name, except for the beginning of the key at its end.
    readable_name = stage.folder.rpartition("-")[0]
    any_key = "[0-9a-f]" * 8
    for finished in (root / "stages").glob(f"{readable_name}-{any_key}"):
        try:
            if stages.read_inputs_digest(finished) != inputs_digest:
                continue
            stages.check_stage(finished, contents=True)
            done_record = stages.read_done(finished)
        except DataError:  # damaged, or deleted meanwhile
            continue
        details = {name: value for name, value in done_record.items() if name in ("seconds", "versions", "threads")}
        details["taken_over"] = finished.name  # the stage whose result was copied
        with attempts.Attempt(root, stage, inputs_digest, finished_stage=finished) as attempt:  # copies the result
            attempt.publish(details)
        return True
    return False


def wait_for_stages(root: Path, wanted: Collection[Stage], waiting_name: str) -> list[str]:
    """Wait until the stages are done, but not longer than `SECONDS_TO_WAIT`.

    A network file system may take up to a minute to show what another machine has written.

    Args:
        root: The experiment's folder.
        wanted: The stages to wait for.
        waiting_name: The name of what waits for them, for the log.

    Returns:
        The names of the stages that are still not done; empty if all are done.
    """
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        missing = [stage.name for stage in wanted if not stages.is_done(root, stage)]
        seconds_left = deadline - time.monotonic()
        if not missing or seconds_left <= 0:
            return missing
        logger.warning("%s waits up to %.0f s for %s", waiting_name, seconds_left, missing[0])
        time.sleep(min(SECONDS_BETWEEN_LOOKS, seconds_left))


def _run_work(work: Work, verified_folders: set[Path]) -> None:
    """Verify the folders that a stage reads, unless they are in `verified_folders`, and run the stage.

    The folders are added to `verified_folders`.
    """
    kind = STAGE_KINDS[work.stage.kind]
    if kind.loads_model:
        release_engine()  # two models may not fit into memory
    for need in work.stage.needs.values():
        for folder in stages.list_folders_read(work.root, need):
            if folder not in verified_folders:
                stages.check_stage(folder, contents=True)
                verified_folders.add(folder)
    kind.run(work)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append log messages, warnings and everything that libraries print to a log file.

    At the end, the logging of the process is as before.
    """
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    root_logger = logging.getLogger()
    earlier_level = root_logger.level
    root_logger.addHandler(handler)
    root_logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    stream = _LogStream(handler.stream)
    try:
        # `catch_warnings` restores the filters of warnings, which libraries change.
        with warnings.catch_warnings(), contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
    finally:
        stream.log = None  # a library may have kept the stream
        logging.captureWarnings(False)
        root_logger.setLevel(earlier_level)
        root_logger.removeHandler(handler)
        handler.close()


class _LogStream(io.TextIOBase):
    """Replaces stdout and stderr during a stage.

    A library may keep a reference to it. When the log is closed, such a library writes to stderr instead.
    """

    def __init__(self, log: TextIO | None) -> None:
        self.log = log

    def write(self, text: str) -> int:
        """Write to the log; to stderr if the log is closed."""
        return (self.log or sys.stderr).write(text)

    def flush(self) -> None:
        """Flush the log; stderr if the log is closed."""
        (self.log or sys.stderr).flush()


def list_states(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """Return the goals and the stages they need, each with its state: done, begun or to do.

    A stage is done only if all its needs are done, and begun if there is an unfinished attempt at it.
    """
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
    """Rename the folder of every damaged stage to `<folder>.damaged`, so that the next run runs the stage again.

    The stages that depend on a damaged one are not moved. They run again only if its new result is different.

    Args:
        root: The experiment's folder.
        goals: The stages to check, together with all stages that they need.

    Returns:
        The damaged stages; a stage without a folder is not damaged.

    Raises:
        DataError: Another run works in the folder.
        OSError: A damaged folder cannot be renamed, or one from an earlier repair cannot be deleted.
    """
    damaged = []
    with lock_run(root):
        for stage in list_needed(list(goals)):
            folder = stage_dir(root, stage)
            if folder.exists() and _is_damaged(folder):
                aside = folder.with_name(folder.name + DAMAGED)
                if aside.exists():  # from an earlier repair
                    shutil.rmtree(aside)
                folder.rename(aside)
                damaged.append(stage)
    return damaged


def _is_damaged(folder: Path) -> bool:
    """Return whether the files of a finished stage differ from what it wrote. All of them are read and hashed."""
    try:
        stages.check_stage(folder, contents=True)  # without `contents`, it compares only the sizes of the files
    except DataError:
        return True
    return False


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """Return the stages in which the teacher's server refused requests, each with the refusals.

    Args:
        root: The experiment's folder.
        goals: The stages to look at, finished or begun, together with all stages that they need.
    """
    stages_with_refusals = []
    begun = attempts.attempts_by_stage(root)
    for stage in list_needed(list(goals)):
        folders: list[Path] = []
        if stage_dir(root, stage).exists():
            folders = [stage_dir(root, stage)]
        elif stage.folder in begun:
            folders = attempts.attempt_folders(root, stage)
        # Of several attempts with refusals, report only the one that got furthest. The furthest attempt is the last.
        for folder in reversed(folders):
            refused_requests = refusals(folder)
            if refused_requests:
                stages_with_refusals.append((stage, refused_requests))
                break
    return stages_with_refusals


def forget_refused(root: Path, goals: Sequence[Stage]) -> None:
    """Let the next run send refused requests again.

    A stage with refused requests becomes unfinished and forgets them, so that the next run sends them again. If a
    response arrives, the stages that depend on it are stale and run again too.
    """
    with lock_run(root):
        for stage, _ in refused_stages(root, goals):
            for folder in attempts.reopen_stage(root, stage):
                forget_refusals(folder)
