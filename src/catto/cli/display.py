"""The progress of a command on stderr: bars in a terminal; elsewhere, for long commands, lines."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from catto.methods import METHODS
from catto.pipeline.estimate import stage_seconds
from catto.pipeline.stage import Stage, is_done, list_needed

__all__ = ["Bar", "RunDisplay", "format_duration", "show_bars", "show_progress"]

# Without a terminal, a line of progress every ten seconds at first, then every twentieth of the elapsed time: a stage
# of a minute has five lines, one of a day about 140.
QUIET, QUIET_SHARE = 10.0, 0.05
# The time left is estimated from the last hour: batches of a large model may be minutes apart.
PACE = 3600.0
# Seconds below which "more than ... left" says nothing.
LITTLE = 10.0


def format_duration(seconds: float) -> str:
    """Format a length of time.

    >>> format_duration(0.4), format_duration(12), format_duration(180), format_duration(7500)
    ('0.4 s', '12 s', '3 min', '2 h 5 min')
    """
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class TimeLeft(ProgressColumn):
    """The time that a bar has left, in the words of the lines: the task's own field `left`, or rich's estimate."""

    def render(self, task: Task) -> Text:
        """Return the text of one bar."""
        seconds = task.time_remaining
        return Text(task.fields.get("left", f"{format_duration(seconds)} left" if seconds else ""))


@contextmanager
def show_bars(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Yield the bars of a command, disabled where the stream (stderr by default) is not a terminal."""
    # The stream itself and not the name `stderr`, which is redirected to the log while a stage runs.
    stream = stream or sys.stderr
    terminal = stream.isatty()
    name, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    shown = Progress(
        *(name, BarColumn(bar_width=24), MofNCompleteColumn(), note, TimeLeft()),
        console=Console(file=stream, highlight=False),
        disable=not terminal,
        get_time=clock,
        speed_estimate_period=PACE,
        redirect_stdout=False,
        transient=True,
    )
    with shown if terminal else nullcontext():
        yield shown


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step of a short command; without a terminal it shows nothing."""
    with show_bars() as shown:
        task = shown.add_task(title, total=total, note="")
        yield lambda: shown.advance(task)


class Bar:
    """One bar in a terminal; elsewhere lines with the same numbers, which become rarer."""

    def __init__(self, shown: Progress, name: str) -> None:
        self.id = shown.add_task(name, total=None, note="")
        self._shown, self._task = shown, shown.tasks[-1]
        self.began = self._last = shown.get_time()

    def update(self, finished: int, total: int, note: str) -> None:
        """Show how far the work is. The first call sets where the pace is measured from: resumed work starts midway."""
        if self._task.total != total:
            self._shown.reset(self.id, total=total, completed=finished, note=note)
        else:  # the end of short work falls between two of the display's own refreshes
            self._shown.update(self.id, completed=finished, note=note, refresh=finished == total)
        now = self._shown.get_time()
        if self._shown.disable and now - self._last >= max(QUIET, QUIET_SHARE * (now - self.began)):
            self._last = now
            self.print_line()

    def print_line(self) -> None:
        """Print the numbers as a line, unless there is a bar or nothing was to do."""
        if self._task.total is None:
            return
        left = TimeLeft().render(self._task).plain
        parts = f"{self._task.completed:.0f}/{self._task.total:.0f}", self._task.fields["note"], left
        _print_line(self._shown, f"{self._task.description}: {', '.join(filter(None, parts))}")


def _print_line(shown: Progress, line: str) -> None:
    if shown.disable:
        print(line, file=shown.console.file, flush=True)


class RunDisplay:
    """What `catto run` shows: a bar for the stages and one for each running stage, or lines. Failures stay visible.

    The missing stages take as long as finished ones of the same method, or else of the same kind.
    """

    def __init__(self, shown: Progress, root: Path, goals: Sequence[Stage]) -> None:
        self._shown, self._stages = shown, shown.add_task("stages", total=None, note="", left="")
        self._bars: dict[str, Bar] = {}  # key of a running stage -> its bar
        self._known: dict[str, list[float]] = defaultdict(list)  # sort of stage -> seconds of the finished ones
        self._missing: dict[str, Stage] = {}
        for stage in list_needed(list(goals)):
            if is_done(root, stage):
                self._learn(stage, stage_seconds(root, stage) or 0.0)
            else:
                self._missing[stage.key] = stage

    def _learn(self, stage: Stage, seconds: float) -> None:
        for sort in _sorts(stage):
            self._known[sort].append(seconds)

    def left(self) -> str:
        """Return `about 3 min left`; `more than` where no stage of a kind has finished yet; empty if that is little."""
        total, unknown, now = 0.0, False, self._shown.get_time()
        for key, stage in self._missing.items():
            known = next((self._known[sort] for sort in _sorts(stage) if sort in self._known), None)
            unknown |= known is None
            spent = now - self._bars[key].began if key in self._bars else 0.0
            total += max(0.0, fmean(known) - spent) if known else 0.0
        if not self._missing or (unknown and total < LITTLE):
            return ""
        return f"{'more than' if unknown else 'about'} {format_duration(total)} left"

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show that a stage starts."""
        name = f"[{number}/{total}] {stage.name}"
        self._shown.update(self._stages, total=total, left=self.left())
        self._bars[stage.key] = Bar(self._shown, name if self._shown.disable else stage.name)
        _print_line(self._shown, name)

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show how far a running stage is."""
        if stage.key in self._bars:
            self._bars[stage.key].update(finished, total, note)
            self._shown.update(self._stages, left=self.left())

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Count a stage and show how it ended; blocked stages are counted at the end of the run."""
        self._missing.pop(stage.key, None)
        if outcome == "done":
            self._learn(stage, seconds)
        if stage.key in self._bars:
            self._shown.remove_task(self._bars.pop(stage.key).id)
        left, line = self.left(), f"{stage.name}: {outcome} in {format_duration(seconds)}"
        self._shown.update(self._stages, advance=1, left=left, refresh=True)
        if outcome == "failed" and not self._shown.disable:
            self._shown.console.print(line, markup=False)
        elif outcome != "blocked":
            _print_line(self._shown, f"{line}; {left}" if left else line)


def _sorts(stage: Stage) -> tuple[str, str]:
    """Return the sorts of stages that take as long, the closest first: one method, then one kind of training."""
    method = stage.method
    if stage.kind == "train" and method in METHODS:
        return f"train {method}", f"train {METHODS[method].stage}"
    return f"{stage.kind} {method or ''}", stage.kind
