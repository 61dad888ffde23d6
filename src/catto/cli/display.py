"""Show the progress of a command on stderr: as bars in a terminal, otherwise as lines for long commands."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

# Without a terminal, the silence between two lines of progress is ten seconds at first, and later a twentieth of the
# elapsed time: a stage of one minute prints five lines, a stage of one day about 140.
MIN_SECONDS_BETWEEN_LINES = 10.0
MIN_SHARE_BETWEEN_LINES = 0.05
# The time left is estimated from the last hour, since batches of a large model may be minutes apart.
SECONDS_OF_PACE = 3600.0
# A lower bound of the time left is shown from this many seconds on: "more than 2 s left" says nothing.
MIN_LOWER_BOUND = 10.0


def format_duration(seconds: float) -> str:
    """Format a length of time.

    >>> format_duration(0.4), format_duration(12), format_duration(180), format_duration(7500)
    ('0.4 s', '12 s', '3 min', '2 h 5 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class TimeLeft(ProgressColumn):
    """The time left for a bar: its own field `left` if it has one, otherwise rich's estimate."""

    def render(self, task: Task) -> Text:
        """Return the text for one bar."""
        if "left" in task.fields:
            return Text(task.fields["left"])
        seconds = task.time_remaining
        return Text(f"{format_duration(seconds)} left" if seconds else "")


@contextmanager
def show_bars(stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Yield the progress bars of a command.

    If the stream is not a terminal, nothing is drawn. The bars still keep their numbers, which `Bar` prints as lines.

    Args:
        stream: Where the bars are drawn; None means stderr.
        clock: Returns the time in seconds.
    """
    # Keep the stream itself: while a stage runs, the name `sys.stderr` is redirected to the log of the stage.
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeLeft(),
        console=Console(file=stream, highlight=False),
        disable=not is_terminal,
        get_time=clock,
        speed_estimate_period=SECONDS_OF_PACE,
        redirect_stdout=False,  # otherwise rich would move the results on stdout to this stream
        transient=True,
    )
    if not is_terminal:
        yield shown
        return
    with shown:
        yield shown


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step of a short command. Without a terminal, nothing is shown."""
    with show_bars() as shown:
        task = shown.add_task(title, total=total, note="")
        yield lambda: shown.advance(task)


class Bar:
    """One progress bar in a terminal; without a terminal, lines with the same numbers, at growing intervals."""

    def __init__(self, shown: Progress, name: str) -> None:
        self.id = shown.add_task(name, total=None, note="")
        self._shown = shown
        self._task = shown.tasks[-1]
        self.began = shown.get_time()
        self._last_line = self.began

    def update(self, finished: int, total: int, note: str) -> None:
        """Show the progress. The pace is measured from the first call, since resumed work does not start at 0.

        Args:
            finished: Number of finished units of work.
            total: Number of all units.
            note: Text shown after the numbers.
        """
        has_new_total = self._task.total != total  # always true in the first call
        if has_new_total:
            self._shown.reset(self.id, total=total, completed=finished, note=note)
        else:
            is_finished = finished == total  # short work may end before the display refreshes itself
            self._shown.update(self.id, completed=finished, note=note, refresh=is_finished)
        if self._shown.disable:
            self._print_line_if_due()

    def _print_line_if_due(self) -> None:
        """Print the numbers as a line if the last line is long enough ago."""
        now = self._shown.get_time()
        elapsed = now - self.began
        shortest_silence = max(MIN_SECONDS_BETWEEN_LINES, MIN_SHARE_BETWEEN_LINES * elapsed)
        if now - self._last_line >= shortest_silence:
            self._last_line = now
            self.print_line()

    def print_line(self) -> None:
        """Print the numbers as a line, unless the bar is visible or there was no work to do."""
        if self._task.total is None:
            return
        parts = [f"{self._task.completed:.0f}/{self._task.total:.0f}"]
        for text in (self._task.fields["note"], TimeLeft().render(self._task).plain):
            if text:
                parts.append(text)
        _print_line(self._shown, f"{self._task.description}: {', '.join(parts)}")


def _print_line(shown: Progress, line: str) -> None:
    """Print a line if the bars are disabled."""
    if shown.disable:
        print(line, file=shown.console.file, flush=True)


class RunDisplay:
    """Shows the progress of `catto run`: one bar for all stages and one for each running stage, or lines.

    Failures stay visible. A missing stage is expected to take as long as the finished stages of the same method, or
    otherwise of the same kind.
    """

    def __init__(self, shown: Progress, root: Path, goals: Sequence[Stage]) -> None:
        self._shown = shown
        self._stages = shown.add_task("stages", total=None, note="", left="")
        self._bars: dict[str, Bar] = {}  # key of a running stage -> its bar
        self._seconds: dict[str, list[float]] = defaultdict(list)  # group of stages -> seconds of the finished ones
        self._missing: dict[str, Stage] = {}
        for stage in list_needed(list(goals)):
            if is_done(root, stage):
                self._record_seconds(stage, stage_seconds(root, stage) or 0.0)
            else:
                self._missing[stage.key] = stage

    def _record_seconds(self, stage: Stage, seconds: float) -> None:
        for group in _groups_of_similar_stages(stage):
            self._seconds[group].append(seconds)

    def _expect_seconds(self, stage: Stage) -> float | None:
        """Return the mean duration of the most similar finished stages; None if there are none."""
        for group in _groups_of_similar_stages(stage):
            if group in self._seconds:
                return fmean(self._seconds[group])
        return None

    def describe_time_left(self) -> str:
        """Estimate the time that the missing stages will take one after another.

        Returns:
            Text such as `about 3 min left`. If nothing is known about some missing stages, the others give a lower
            bound: `more than 3 min left`. Empty if no stage is missing, or if a lower bound is too short to be useful.
        """
        if not self._missing:
            return ""
        seconds_left = 0.0
        is_lower_bound = False
        now = self._shown.get_time()
        for key, stage in self._missing.items():
            expected = self._expect_seconds(stage)
            if expected is None:
                is_lower_bound = True
                continue
            is_running = key in self._bars
            spent = now - self._bars[key].began if is_running else 0.0
            seconds_left += max(0.0, expected - spent)
        if not is_lower_bound:
            return f"about {format_duration(seconds_left)} left"
        if seconds_left < MIN_LOWER_BOUND:
            return ""
        return f"more than {format_duration(seconds_left)} left"

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show that a stage starts.

        Args:
            stage: The stage.
            number: Its number among the stages of this run, from 1.
            total: Number of stages that this run starts.
        """
        numbered_name = f"[{number}/{total}] {stage.name}"
        self._shown.update(self._stages, total=total, left=self.describe_time_left())
        self._bars[stage.key] = Bar(self._shown, numbered_name if self._shown.disable else stage.name)
        _print_line(self._shown, numbered_name)

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show the progress of a running stage."""
        if stage.key in self._bars:
            self._bars[stage.key].update(finished, total, note)
            self._shown.update(self._stages, left=self.describe_time_left())

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Count a stage and show how it ended. Blocked stages are only counted: the end of the run reports them."""
        self._missing.pop(stage.key, None)
        if outcome == "done":
            self._record_seconds(stage, seconds)
        if stage.key in self._bars:
            self._shown.remove_task(self._bars.pop(stage.key).id)
        left = self.describe_time_left()
        line = f"{stage.name}: {outcome} in {format_duration(seconds)}"
        self._shown.update(self._stages, advance=1, left=left, refresh=True)
        if outcome == "failed" and not self._shown.disable:
            self._shown.console.print(line, markup=False)
        elif outcome != "blocked":
            _print_line(self._shown, f"{line}; {left}" if left else line)


def _groups_of_similar_stages(stage: Stage) -> tuple[str, str]:
    """Return two groups of stages that take about as long: those of the same method, then a wider group."""
    method = stage.method
    if stage.kind == "train" and method in METHODS:
        return f"train {method}", f"train {METHODS[method].stage}"
    return f"{stage.kind} {method or ''}", stage.kind
