"""Runs of a recipe, to be called in processes that can be killed or whose disk is full."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import sys
from pathlib import Path

from catto.cli.run import QUIET
from catto.pipeline.plan import Graph
from catto.pipeline.run import run_goals as run_stages
from catto.pipeline.stage import Stage
from catto.recipe.load import load_recipe


class Events:
    """A display for programs."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        self._say(f"started {stage.name}")

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        if finished % max(1, total // 8) == 0:  # the teacher alone tells hundreds
            self._say(f"progress {finished}/{total}")

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        self._say(f"ended {stage.name} {outcome}")

    def _say(self, line: str) -> None:
        os.write(1, f"{line}\n".encode())  # a stage prints into its log


def fill_disk(calls: int) -> None:
    """Let every flush fail from call number `calls` on, as those of a full disk do."""
    fsync, counted = os.fsync, itertools.count(1)

    def full(descriptor: int) -> None:
        if next(counted) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    os.fsync = full


def import_stages() -> None:
    """Import what the stages import when they begin: in every process that is forked later, it is there."""
    modules = [f"catto.pipeline.{name}" for name in ("kinds.table", "training_job")]
    for module in (*modules, "catto.engines.transformers", "catto.report.build", "scipy.stats"):
        importlib.import_module(module)


def run(recipe_file: Path, root: Path, full_from: int | None = None) -> None:
    """Run all stages, and print one line for every event. From flush number `full_from` on, the disk is full."""
    os.environ.update(QUIET)
    if full_from is not None:
        fill_disk(full_from)
    recipe = load_recipe(str(recipe_file))
    if run_stages(root, [Graph(recipe).plan_report()], Events()).failed:
        sys.exit(1)
