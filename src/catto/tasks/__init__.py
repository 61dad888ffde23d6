"""Where questions come from: the table of benchmarks, a user's own file, and two generated tasks."""

from __future__ import annotations

from catto.tasks.benchmarks import TASKS, Task
from catto.tasks.fields import FieldMap
from catto.tasks.loading import Loaded, LoadReport, load_questions
from catto.tasks.own_file import from_file
from catto.tasks.splits import Draft

__all__ = ["TASKS", "Draft", "FieldMap", "LoadReport", "Loaded", "Task", "from_file", "load_questions"]
