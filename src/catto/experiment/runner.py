"""Run what is missing of a graph, here and one stage after the other; all stages of a run share one process."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from catto import files
from catto.experiment import stages, steps
from catto.experiment.stages import DONE, LOG, Stage, Work, ordered, part, place
from catto.problems import DataError
from catto.records import Refusal
from catto.teacher.responses import forget_refusals, refusals

# kind -> module and function; imported when the first stage of the kind runs, since torch takes seconds.
RUN = {
    "questions": "steps.run_questions",
    "held_out": "steps.run_questions",
    "responses": "steps.run_responses",
    "sampled": "steps.run_responses",
    "rows": "steps.run_rows",
    "train": "train_step.run_train",
    "chosen": "results.run_chosen",
    "generated": "results.run_generated",
    "predicted": "results.run_predicted",
    "tau": "results.run_tau",
    "sampling": "results.run_sampling",
    "scaled": "results.run_scaled",
    "report": "results.run_report",
}
# With fewer bytes left than this a failure is attributed to a full disk.
ROOM = 2**20
# What --repair moves aside gets this suffix.
DAMAGED = ".damaged"
# These load a model of their own: the last one that was generated with is released first.
LOADING = {"responses", "train"}
Progress = Callable[[int, int, str], None]


class Display(Protocol):
    """What shows a run to a person."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show that a stage began."""

    def progress(self, finished: int, total: int, note: str) -> None:
        """Show how far the running stage is."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Show that a stage ended: done, unchanged, failed or blocked."""


@dataclass
class Outcome:
    """How a run ended; without a failed stage everything is there."""

    finished: list[Stage] = field(default_factory=list)
    failed: dict[str, Path] = field(default_factory=dict)  # stage name and problem -> its log
    blocked: list[Stage] = field(default_factory=list)


def run(root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Run the goals and what they need. A failed stage stops only what depends on it.

    A damaged stage is an error that names it: before anything runs where sizes show it, and before it is read where
    only its bytes do.
    """
    outcome, number = Outcome(), 0
    stopped: set[str] = set()
    checked: set[Path] = set()
    with locked(root):
        missing, known = sum(standing != "done" for _, standing in plan(root, goals)), stages.finished(root)
        for stage in ordered(list(goals)):
            if any(need.key in stopped for need in stage.needs.values()):
                stopped.add(stage.key)
                outcome.blocked.append(stage)
                display.ended(stage, "blocked", 0.0)
            elif not stages.done(root, stage):
                number += 1
                display.started(stage, number, max(missing, number))
                began, twin = time.monotonic(), known.get(stages.content(root, stage))
                if twin is not None and stages.take_over(root, stage, twin):
                    ending = "unchanged"
                else:
                    problem = run_stage(root, stage, display.progress, checked)
                    ending = "done" if problem is None else "failed"
                    if problem is not None:
                        stopped.add(stage.key)
                        outcome.failed[f"{stage.name}: {problem}"] = part(root, stage) / LOG
                if ending != "failed":
                    outcome.finished.append(stage)
                display.ended(stage, ending, time.monotonic() - began)
    steps.release()
    return outcome


def run_stage(root: Path, stage: Stage, progress: Progress, checked: set[Path]) -> str | None:
    """Run a stage and finish it; return the problem of a failed one, whose log has the traceback.

    checked: folders whose bytes were compared with what was written; each is compared once a run.
    """
    work: Work = Work(stage, root, progress)
    work.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if stage.kind in LOADING:
        steps.release()
    try:
        with _logging_to(work.out / LOG):
            for folder in dict.fromkeys(path for need in stage.needs.values() for path in stages.sources(root, need)):
                if folder not in checked:
                    stages.check(folder, contents=True)
                    checked.add(folder)
            module, _, function = RUN[stage.kind].partition(".")
            getattr(importlib.import_module(f"catto.experiment.{module}"), function)(work)
    except Exception as error:
        with contextlib.suppress(OSError), (work.out / LOG).open("a", encoding="utf-8") as file:  # the disk may be full
            traceback.print_exc(file=file)
        # Libraries report a full disk in words of their own, such as a position in an archive.
        full = " (the disk is full)" if shutil.disk_usage(root).free < ROOM else ""
        return f"{type(error).__name__}: {error}{full}"
    stages.finish(root, stage, {"seconds": time.monotonic() - began, "versions": files.library_versions()})
    return None


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
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


def locked(root: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the experiment's folder; a second run in it is refused at once."""
    return files.locked(root / ".lock", "another run is working in this folder; wait for it, or give another --out")


def plan(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """Return every stage with its state: done, begun or to do. What needs a stage that is not done is not done."""
    standing: dict[str, str] = {}
    all_stages = ordered(list(goals))
    for stage in all_stages:
        ready = all(standing[need.key] == "done" for need in stage.needs.values())
        begun = "begun" if part(root, stage).exists() else "to do"
        standing[stage.key] = "done" if ready and stages.done(root, stage) else begun
    return [(stage, standing[stage.key]) for stage in all_stages]


def seconds_of(root: Path, stage: Stage) -> float | None:
    """Return how long a finished stage took."""
    folder = place(root, stage)
    return float(stages.account(folder)["seconds"]) if folder.exists() else None


# ---- repairing and retrying -----------------------------------------------------------------------------------------


def set_damaged_aside(root: Path, goals: Sequence[Stage]) -> list[Stage]:
    """Rename the folder of every damaged stage to `<folder>.damaged`, so that it runs again; nothing is deleted."""
    moved = []
    with locked(root):
        for stage in ordered(list(goals)):
            folder = place(root, stage)
            try:
                if folder.exists():
                    stages.check(folder, contents=True)
            except DataError:
                aside = folder.with_name(folder.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier repair
                folder.rename(aside)
                moved.append(stage)
    return moved


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """Return the stages, finished or begun, in which the teacher's server refused requests, with those."""
    refused = []
    for stage in ordered(list(goals)):
        folder = place(root, stage)
        if requests := refusals(folder if folder.exists() else part(root, stage)):
            refused.append((stage, requests))
    return refused


def retry(root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Ask refused requests again, then run what is missing of the goals.

    A stage with refused requests becomes an unfinished one without refusals, so it asks for what is missing. If a
    response came, the stages that were made without it are stale and run again too.
    """
    with locked(root):
        for stage, _ in refused_stages(root, goals):
            finished, begun = place(root, stage), part(root, stage)
            if finished.exists():
                finished.rename(begun)
                (begun / DONE).unlink()
            forget_refusals(begun)
    return run(root, goals, display)
