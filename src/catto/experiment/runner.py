"""Run what is missing of a graph, here and one stage after the other; stages of a local run share one process.

Ask again what a teacher's server refused.

A stage with refused requests becomes one that was begun and refused nothing. Run again it asks for what is missing, and
the stages that were made without it are stale if something new came: they are run again too.
"""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from catto import files
from catto.experiment import steps as engine
from catto.experiment.stages import (
    DONE,
    LOG,
    Stage,
    Work,
    account,
    check,
    content,
    done,
    finish,
    finished,
    ordered,
    part,
    place,
    sources,
    take_over,
)
from catto.files import library_versions
from catto.problems import DataError
from catto.recipe import Recipe
from catto.records import Refusal
from catto.teacher.responses import forget_refusals, refusals

# ---- runner


# kind -> module and function; imported when the first stage of the kind runs, since torch takes seconds.
RUN = {
    "questions": ("steps", "run_questions"),
    "held_out": ("steps", "run_held_out"),
    "responses": ("steps", "run_responses"),
    "sampled": ("steps", "run_sampled"),
    "rows": ("steps", "run_rows"),
    "train": ("train_step", "run_train"),
    "chosen": ("results", "run_chosen"),
    "generated": ("results", "run_generated"),
    "predicted": ("results", "run_predicted"),
    "tau": ("results", "run_tau"),
    "sampling": ("results", "run_sampling"),
    "scaled": ("results", "run_scaled"),
    "report": ("results", "run_report"),
}
# With fewer bytes left than this a failure is told as one of a full disk.
ROOM = 2**20
# What --repair moves aside keeps this suffix.
DAMAGED = ".damaged"
# These load a model of their own: the one that was generated with last is let go before.
LOADING = {"responses", "train"}


class Display(Protocol):
    """What shows a run to a person."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Tell that a stage began."""

    def progress(self, finished: int, total: int, note: str) -> None:
        """Tell how far the running stage is."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Tell that a stage ended: done, unchanged, failed or blocked."""


@dataclass
class Outcome:
    """What a run came to."""

    finished: list[Stage] = field(default_factory=list)
    failed: dict[str, Path] = field(default_factory=dict)  # stage name -> its log
    blocked: list[Stage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is there."""
        return not self.failed


def run(recipe: Recipe, root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Run the goals and what they need. A failed stage stops only what depends on it.

    A damaged stage is an error that names it, found before anything runs where sizes tell it and before it is read
    where only its bytes do.
    """
    outcome, stages = Outcome(), ordered(list(goals))
    with locked(root):
        missing, known = sum(standing != "done" for _, standing in plan(root, goals)), finished(root)
        stopped: set[str] = set()
        checked: set[Path] = set()
        number = 0
        for stage in stages:
            if any(need.key in stopped for need in stage.needs.values()):
                stopped.add(stage.key)
                outcome.blocked.append(stage)
                display.ended(stage, "blocked", 0.0)
                continue
            if done(root, stage):
                continue
            number += 1
            display.started(stage, number, max(missing, number))
            began, found = time.monotonic(), content(root, stage)
            if found in known and take_over(root, stage, known[found]):
                outcome.finished.append(stage)
                display.ended(stage, "unchanged", time.monotonic() - began)
            elif not _run_stage(recipe, root, stage, display, outcome, checked):
                stopped.add(stage.key)
    engine.release()
    return outcome


def set_damaged_aside(root: Path, goals: Sequence[Stage]) -> list[Stage]:
    """Rename the folder of every damaged stage to `<folder>.damaged`, so that it is run again; nothing is deleted."""
    moved = []
    with locked(root):
        for stage in ordered(list(goals)):
            folder = place(root, stage)
            try:
                if folder.exists():
                    check(folder, contents=True)
            except DataError:
                aside = folder.with_name(folder.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # of an earlier repair
                folder.rename(aside)
                moved.append(stage)
    return moved


def _check_needs(root: Path, stage: Stage, checked: set[Path]) -> None:
    """Compare the bytes of what a stage reads with what was written, each folder once a run."""
    for need in stage.needs.values():
        for folder in sources(root, need):
            if folder not in checked:
                check(folder, contents=True)
                checked.add(folder)


def _run_stage(
    recipe: Recipe, root: Path, stage: Stage, display: Display, outcome: Outcome, checked: set[Path]
) -> bool:
    work = Work(stage, root, recipe, display.progress)
    work.out.mkdir(parents=True, exist_ok=True)
    log, began = work.out / LOG, time.monotonic()
    if stage.kind in LOADING:
        engine.release()
    try:
        with _logging_to(log):
            _check_needs(root, stage, checked)
            module, function = RUN[stage.kind]
            getattr(importlib.import_module(f"catto.experiment.{module}"), function)(work)
    except Exception as error:
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:  # the disk may be full
            traceback.print_exc(file=file)
        # Libraries tell a full disk in words of their own, such as a position in an archive.
        full = " (the disk is full)" if shutil.disk_usage(root).free < ROOM else ""
        outcome.failed[f"{stage.name}: {type(error).__name__}: {error}{full}"] = log
        display.ended(stage, "failed", time.monotonic() - began)
        return False
    seconds = time.monotonic() - began
    finish(root, stage, {"seconds": seconds, "versions": library_versions()})
    outcome.finished.append(stage)
    display.ended(stage, "done", seconds)
    return True


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
    """Stands in for stdout and stderr. A library that keeps hold of it writes to stderr once the log is shut."""

    def __init__(self, log: TextIO | None) -> None:
        self.log = log

    def write(self, text: str) -> int:
        """Write to the log while its stage runs."""
        return (self.log or sys.stderr).write(text)

    def flush(self) -> None:
        """Flush what is written to."""
        (self.log or sys.stderr).flush()


def locked(root: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the experiment's folder; a second run on it is told so at once."""
    return files.locked(root / ".lock", "another run is working in this folder; wait for it, or give another --out")


def plan(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """Every stage with where it stands: done, begun or to do. What needs a stage that is to be run again is so too."""
    standing: dict[str, str] = {}
    stages = ordered(list(goals))
    for stage in stages:
        ready = all(standing[need.key] == "done" for need in stage.needs.values())
        begun = "begun" if part(root, stage).exists() else "to do"
        standing[stage.key] = "done" if ready and done(root, stage) else begun
    return [(stage, standing[stage.key]) for stage in stages]


def seconds_of(root: Path, stage: Stage) -> float | None:
    """How long a finished stage took."""
    folder = place(root, stage)
    return float(account(folder)["seconds"]) if folder.exists() else None


# ---- retry


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """The stages, finished or begun, some of whose requests were refused."""
    folders = [(stage, place(root, stage)) for stage in ordered(list(goals))]
    found = [(stage, refusals(folder if folder.exists() else part(root, stage))) for stage, folder in folders]
    return [(stage, refused) for stage, refused in found if refused]


def retry(recipe: Recipe, root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Ask refused requests again, then run what is missing of the goals."""
    with locked(root):
        for stage, _ in refused_stages(root, goals):
            finished, begun = place(root, stage), part(root, stage)
            if finished.exists():
                finished.rename(begun)
                (begun / DONE).unlink()
            forget_refusals(begun)
    return run(recipe, root, goals, display)
