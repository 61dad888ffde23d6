"""Runs of a recipe as processes that can be killed: `python experiment_run.py RECIPE`, then a folder a line on stdin.

`FOLDER|N` lets the disk be full from the N-th time on that something is flushed to it.

Importing the libraries takes several seconds, so it happens once, and each run is a fork of the process that did it.
A run writes one line for every event, and at the end its parent writes `exit` and the status.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import sys
from pathlib import Path

from catto.cli.run import QUIET
from catto.experiment.stages import Stage

os.environ.update(QUIET)


class Events:
    """A display for programs."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        self._say(f"started {stage.name}")

    def progress(self, finished: int, total: int, note: str) -> None:
        if finished % max(1, total // 8) == 0:  # the teacher alone tells hundreds
            self._say(f"progress {finished}/{total}")

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        self._say(f"ended {stage.name} {outcome}")

    def _say(self, line: str) -> None:
        os.write(1, f"{line}\n".encode())


def fill_disk(calls: int) -> None:
    """Let every flush fail from call number `calls` on, as those of a full disk do."""
    fsync, counted = os.fsync, itertools.count(1)

    def full(descriptor: int) -> None:
        if next(counted) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    os.fsync = full


def run(recipe_file: str, root: Path) -> int:
    from catto.experiment.graph import Graph
    from catto.experiment.runner import run as run_stages
    from catto.recipe_file import load

    recipe = load(recipe_file)
    return 0 if run_stages(recipe, root, [Graph(recipe).report()], Events()).ok else 1


def main() -> None:
    for module in ("experiment.steps", "experiment.train_step", "experiment.results", "report.build"):
        importlib.import_module(f"catto.{module}")
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.write(1, f"pid {os.getpid()}\n".encode())
                folder, _, calls = line.strip().partition("|")
                if calls:
                    fill_disk(int(calls))
                status = run(sys.argv[1], Path(folder))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(f"exit {status}", flush=True)


if __name__ == "__main__":
    main()
