"""Where questions come from: one table, one small module a dataset, `witnesses` the embedded world."""

from __future__ import annotations

from catto.tasks.loading import Loaded, LoadReport, load
from catto.tasks.own import from_file
from catto.tasks.rows import Task
from catto.tasks.table import TASKS

__all__ = ["TASKS", "LoadReport", "Loaded", "Task", "from_file", "load"]
