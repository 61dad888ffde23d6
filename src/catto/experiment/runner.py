"""Run what is missing of a graph, here and one stage after the other; stages of a local run share one process."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from catto.experiment import engine
from catto.experiment.stages import (
    DONE,
    LOG,
    Stage,
    Work,
    content,
    done,
    finish,
    finished,
    ordered,
    part,
    place,
    take_over,
)
from catto.problems import DataError
from catto.recipe import Recipe
from catto.records import library_versions

# kind -> module and function; imported when the first stage of the kind runs, since torch takes seconds.
RUN = {
    "questions": ("data", "run_questions"),
    "held_out": ("data", "run_held_out"),
    "responses": ("data", "run_responses"),
    "sampled": ("data", "run_sampled"),
    "rows": ("data", "run_rows"),
    "train": ("train", "run_train"),
    "chosen": ("measure", "run_chosen"),
    "generated": ("measure", "run_generated"),
    "predicted": ("measure", "run_predicted"),
    "tau": ("measure", "run_tau"),
    "sampling": ("measure", "run_sampling"),
    "scaled": ("measure", "run_scaled"),
    "report": ("collect", "run_report"),
}
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
    """Run the goals and what they need. A failed stage stops only what depends on it."""
    outcome = Outcome()
    with locked(root):
        missing = [stage for stage in ordered(list(goals)) if not done(root, stage)]
        known = finished(root)
        stopped: set[str] = set()
        for number, stage in enumerate(missing, start=1):
            if any(need.key in stopped for need in stage.needs.values()):
                stopped.add(stage.key)
                outcome.blocked.append(stage)
                display.ended(stage, "blocked", 0.0)
                continue
            display.started(stage, number, len(missing))
            began, found = time.monotonic(), content(root, stage)
            if found in known and take_over(root, stage, known[found]):
                outcome.finished.append(stage)
                display.ended(stage, "unchanged", time.monotonic() - began)
            elif not _run_stage(recipe, root, stage, display, outcome):
                stopped.add(stage.key)
    engine.release()
    return outcome


def _run_stage(recipe: Recipe, root: Path, stage: Stage, display: Display, outcome: Outcome) -> bool:
    work = Work(stage, root, recipe, display.progress)
    work.out.mkdir(parents=True, exist_ok=True)
    log, began = work.out / LOG, time.monotonic()
    if stage.kind in LOADING:
        engine.release()
    try:
        with _logging_to(log):
            module, function = RUN[stage.kind]
            getattr(importlib.import_module(f"catto.experiment.{module}"), function)(work)
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        outcome.failed[f"{stage.name}: {type(error).__name__}: {error}"] = log
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


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the experiment's folder; a second run on it is told so at once."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                root, None, "another run is working in this folder; wait for it, or give another --out"
            ) from None
        yield


def plan(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """Every stage with where it stands: done, begun or to do."""
    return [(stage, _standing(root, stage)) for stage in ordered(list(goals))]


def _standing(root: Path, stage: Stage) -> str:
    if done(root, stage):
        return "done"
    return "begun" if part(root, stage).exists() else "to do"


def seconds_of(root: Path, stage: Stage) -> float | None:
    """How long a finished stage took."""
    path = place(root, stage) / DONE
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) if path.exists() else None
