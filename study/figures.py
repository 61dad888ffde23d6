"""The figure of docs/results.md: reliability diagrams of a few methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from catto.answer_columns import ParseCounts
from catto.metrics.binning import reliability
from catto.metrics.errors import ece
from catto.report.cell_answers import CellAnswers
from catto.report.drawing import Panel, reliability_figure, write_figure
from catto.report.tables import task_title

from .load import MeasuredStudy
from .names import TUNED, short_title

PANELS = ("sft", "dpo", "dpo+catto", "dpo+outcome", f"dpo+outcome{TUNED}")

# Seed -> answers.
SeedAnswers = dict[int, CellAnswers]


@dataclass(frozen=True)
class SeedsPanel(Panel):
    """A diagram of several seeds together.

    Attributes:
        mean_ece: Mean of the seeds' ECEs, as in the tables. It is shown instead of the ECE of the pooled answers.
    """

    mean_ece: float = math.nan

    def note(self) -> str:
        """Return the lines under the title, with the mean ECE."""
        lines = []
        for line in super().note().splitlines():
            if line.startswith("ECE "):
                line = f"ECE {100 * self.mean_ece:.1f}"
            lines.append(line)
        return "\n".join(lines)


def draw_reliability(study: MeasuredStudy, task: str, path: Path) -> None:
    """Draw reliability diagrams of the methods in PANELS on a task, over the seeds that all of them have.

    Args:
        study: The measured study.
        task: Name of the task.
        path: The file to write.
    """
    answers_by_method = group_answers(study.answers, task)
    method_seeds = [set(seed_answers) for seed_answers in answers_by_method.values()]
    common_seeds = sorted(set.intersection(*method_seeds))
    panels = []
    for method, seed_answers in answers_by_method.items():
        title = short_title(method)
        # Only the first panel names the task.
        if method == PANELS[0]:
            title += f", {task_title(task)}"
        runs = [seed_answers[seed] for seed in common_seeds]
        panels.append(make_panel(title, runs, bins=study.numbers.bins))
    write_figure(partial(reliability_figure, panels), path)


def group_answers(answers: Sequence[CellAnswers], task: str) -> Mapping[str, SeedAnswers]:
    """Return method -> seed -> answers, for the models trained and tested on a task, in the order of PANELS."""
    answers_by_method: dict[str, SeedAnswers] = {}
    for method in PANELS:
        for run in answers:
            cell = run.cell
            if cell.method == method and cell.task == task and cell.setting == "in":
                answers_by_method.setdefault(method, {})[cell.seed] = run
    return answers_by_method


def make_panel(title: str, runs: Sequence[CellAnswers], bins: int) -> SeedsPanel:
    """Return the diagram of a method.

    Args:
        title: Title of the diagram.
        runs: The answers of the method, one item per seed.
        bins: Number of confidence bins.
    """
    confidence = np.concatenate([run.confidence for run in runs])
    correct = np.concatenate([run.correct for run in runs])
    eces = [ece(run.confidence, run.correct, bins=bins) for run in runs]
    return SeedsPanel(
        title=title,
        bins=reliability(confidence, correct, bins),
        sources=ParseCounts.total_of(ParseCounts.of(run.read_as or ()) for run in runs),
        mean_ece=fmean(eces),
    )
