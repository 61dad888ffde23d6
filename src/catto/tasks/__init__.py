"""Where questions come from: one table, one small module a dataset, `witnesses` the embedded world."""

from __future__ import annotations

from catto.tasks.benchmarks import TASKS
from catto.tasks.loading import Loaded, LoadReport, load
from catto.tasks.own_file import from_file
from catto.tasks.rows import Task

__all__ = ["TASKS", "LoadReport", "Loaded", "Task", "from_file", "load"]
