"""What `catto run` shows while it works: one live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from catto.experiment.runner import Display, seconds_of
from catto.experiment.stages import Stage, done, ordered
from catto.methods import METHODS

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Left", "Lines", "Live", "Pace", "duration", "shown"]

# Where there is no terminal, a line of progress every ten seconds at first, then every twentieth of the stage's time:
# a stage of a minute has five lines, one of a day about 140.
QUIET, QUIET_SHARE = 10.0, 0.05
# Seconds of which it is not worth saying that there are more.
LITTLE = 10.0


@contextmanager
def shown(root: Path, goals: Sequence[Stage]) -> Iterator[Display]:
    """Yield the display of a run: live where stderr is a terminal, else lines."""
    left = Left(root, goals)
    if sys.stderr.isatty():
        with _progress() as bars:
            yield Live(bars, left)
    else:
        yield Lines(sys.stderr, left)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # The stream itself and not the name `stderr`, which a running stage has redirected to its log.
    return Progress(*columns, console=Console(file=sys.stderr, highlight=False), redirect_stdout=False)


def duration(seconds: float) -> str:
    """Write a length of time: `0.4 s`, `12 s`, `3 min`, `2 h 5 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Left:
    """How long the rest may take: a missing stage as long as finished ones of its kind, best of its own method."""

    def __init__(self, root: Path, goals: Sequence[Stage]) -> None:
        self._known: dict[str, list[float]] = defaultdict(list)
        self._missing: dict[str, Stage] = {}
        for stage in ordered(list(goals)):
            if done(root, stage):
                self._learn(stage, seconds_of(root, stage) or 0.0)
            else:
                self._missing[stage.key] = stage

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Learn from a stage that ended."""
        self._missing.pop(stage.key, None)
        if outcome == "done":
            self._learn(stage, seconds)

    def _learn(self, stage: Stage, seconds: float) -> None:
        for sort in _sorts(stage):
            self._known[sort].append(seconds)

    def text(self, running: Stage | None = None, spent: float = 0.0) -> str:
        """`about 3 min left`, `more than` where a kind of stage has not been seen yet; empty where that says little."""
        guesses = {stage.key: self._guess(stage) for stage in self._missing.values()}
        known = {key: seconds for key, seconds in guesses.items() if seconds is not None}
        total = sum(known.values()) - (min(spent, known.get(running.key, 0.0)) if running is not None else 0.0)
        if len(known) == len(guesses):
            return f"about {duration(total)} left" if guesses else ""
        return f"more than {duration(total)} left" if total >= LITTLE else ""

    def _guess(self, stage: Stage) -> float | None:
        return next((fmean(self._known[sort]) for sort in _sorts(stage) if sort in self._known), None)


def _sorts(stage: Stage) -> tuple[str, ...]:
    """What a stage is like, the closest first. Of a preference training's length a supervised one says nothing."""
    method = stage.method
    if stage.kind == "train" and method in METHODS:
        return f"train {method}", f"train {METHODS[method].stage}"
    return f"{stage.kind} {method or ''}", stage.kind


class Pace:
    """How long the running stage has left at its own pace, since it was first heard of: a resumed one begins midway."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def told(self, finished: int, total: int, note: str, now: float) -> str:
        """The note with the time left, once ten seconds have shown the pace."""
        self._first = self._first or (finished, now)
        first, then = self._first
        if now - then < QUIET or not first < finished < total:
            return note
        left = (now - then) * (total - finished) / (finished - first)
        return ", ".join(part for part in (note, f"{duration(left)} left") if part)


class Lines:
    """One line as a stage starts and as it ends, and some between."""

    def __init__(self, stream: TextIO, left: Left, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._left, self._clock = stream, left, clock
        self._place, self._began, self._last, self._pace = "", 0.0, 0.0, Pace()

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Say that a stage began."""
        self._place, self._pace = f"[{number}/{total}] {stage.name}", Pace()
        self._began = self._last = self._clock()
        self._say(self._place)

    def progress(self, finished: int, total: int, note: str) -> None:
        """Say how far the stage is, if the last line is old enough."""
        now = self._clock()
        told = self._pace.told(finished, total, note, now)
        if now - self._last >= max(QUIET, QUIET_SHARE * (now - self._began)):
            self._last = now
            self._say(f"{self._place}: {finished}/{total}{f', {told}' if told else ''}")

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Say how a stage ended; those that something failed for are counted at the end of the run."""
        self._left.ended(stage, outcome, seconds)
        if outcome != "blocked":
            left = self._left.text()
            self._say(f"{_ending(stage, outcome, seconds)}{f'; {left}' if left else ''}")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _ending(stage: Stage, outcome: str, seconds: float) -> str:
    return f"{stage.name}: {outcome} in {duration(seconds)}"


class Live:
    """Two bars: the stages, and the running stage with its note. What failed stays above them."""

    def __init__(self, bars: Progress, left: Left) -> None:
        self._bars, self._left = bars, left
        self._all: Any = bars.add_task("stages", total=None, note="")
        self._one: Any = bars.add_task("", total=None, visible=False, note="")
        self._stage: Stage | None = None
        self._began, self._pace = 0.0, Pace()

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show a new stage."""
        self._stage, self._began, self._pace = stage, time.monotonic(), Pace()
        self._bars.update(self._all, total=total, completed=number - 1, note=self._left.text())
        self._bars.remove_task(self._one)  # a task that was given a total cannot be made to forget it
        self._one = self._bars.add_task(stage.name, total=None, note="")

    def progress(self, finished: int, total: int, note: str) -> None:
        """Move the running stage's bar."""
        now = time.monotonic()
        self._bars.update(self._one, total=total, completed=finished, note=self._pace.told(finished, total, note, now))
        self._bars.update(self._all, note=self._left.text(self._stage, now - self._began))

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Count the stage; where it failed, say so above the bars."""
        self._left.ended(stage, outcome, seconds)
        self._bars.advance(self._all)
        self._bars.refresh()  # a short stage may end between two of the display's own refreshes
        self._bars.update(self._one, visible=False)
        if outcome == "failed":
            self._bars.console.print(_ending(stage, outcome, seconds), markup=False)
