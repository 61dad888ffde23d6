"""Runs of a recipe as processes that can be killed: `python experiment_run.py RECIPE`, then a folder a line on stdin.

Importing the libraries takes several seconds, so it happens once, and each run is a fork of the process that did it.
A run writes one line for every event, and at the end its parent writes `exit` and the status.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from catto.cli.experiment import QUIET
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


def run(recipe_file: str, root: Path) -> int:
    from catto.experiment.graph import Graph
    from catto.experiment.runner import run as run_stages
    from catto.recipe_file import load

    recipe = load(recipe_file)
    return 0 if run_stages(recipe, root, [Graph(recipe).report()], Events()).ok else 1


def main() -> None:
    for module in ("experiment.data", "experiment.train", "experiment.measure", "experiment.collect", "report.build"):
        importlib.import_module(f"catto.{module}")
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.write(1, f"pid {os.getpid()}\n".encode())
                status = run(sys.argv[1], Path(line.strip()))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(f"exit {status}", flush=True)


if __name__ == "__main__":
    main()
