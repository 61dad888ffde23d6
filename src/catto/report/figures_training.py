"""The figures of the training: validation over steps, learning rates, time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from catto.methods import Budget
from catto.records import content_hash
from catto.report.names import budget_title, method_order, method_title, task_order, task_title
from catto.report.numbers import Numbers
from catto.report.plotting import Picture, canvas, colour, legend, marker, panel_width, styled, tidy
from catto.report.results import Cell, Results, Training
from catto.report.tables import stem
from catto.report.tables_training import by_preferences, trained_cells, trained_rows

__all__ = ["training_pictures"]

Trained = Sequence[tuple[Cell, Training]]
HISTORY = (
    "Mean over seeds at every checkpoint; each method's own stage starts at step 0. Read after given reasoning, the "
    "teacher's for SFT and the starting model's for the others: a model whose own reasoning broke can look well here."
)


def training_pictures(results: Results, numbers: Numbers) -> list[Picture]:
    """ECE and accuracy over training, training time, and chosen learning rates."""
    trained, found = trained_cells(results), []
    for task in sorted({cell.trained_on for cell, _ in trained}, key=task_order):
        mine = [one for one in trained if one[0].trained_on == task]
        for budget in numbers.budgets:
            shown = [one for one in mine if one[0].budget in (None, budget) and one[1].history]
            if shown:
                title = f"Validation over training: {task_title(task)}, {budget_title(budget).lower()}"
                caption = HISTORY
                name = stem(f"history-{task}", budget)
                draw, inputs = partial(_history, shown), _inputs(shown)
                found.append(Picture(name, title, caption, draw, inputs, "history", budget, (task,)))
        if any(by_preferences(cell.method) for cell, _ in mine):
            caption = "Chosen by validation ECE, seed by seed."
            title = f"Learning rates: {task_title(task)}"
            name, draw = f"learning-rates-{task}", partial(_rates, mine)
            found.append(Picture(name, title, caption, draw, _inputs(mine), "rates", None, (task,)))
    if any(training.seconds for _, training in trained):
        caption = "Each method's own stage, mean over seeds."
        tasks = tuple(sorted({cell.trained_on for cell, _ in trained}, key=task_order))
        draw = partial(_minutes, trained, tasks)
        found.append(Picture("training", "Training time", caption, draw, _inputs(trained), "training", None, tasks))
    return found


def _inputs(trained: Trained) -> str:
    return content_hash(
        [[cell.model_dump(mode="json"), training.model_dump(mode="json")] for cell, training in trained]
    )


def _history(shown: Trained) -> Figure:
    methods = sorted({cell.method for cell, _ in shown}, key=method_order)
    with styled():
        figure, axes = canvas(1, 2, 6.2, 3.6)
        for panel, key, name in zip(axes, ("val_ece", "val_accuracy"), ("ECE", "accuracy"), strict=True):
            for method in methods:
                steps, values = _mean_history([t for cell, t in shown if cell.method == method], key)
                panel.plot(steps, values, color=colour(method), marker=marker(method), markersize=4, linewidth=1.3)
            tidy(panel, "Step", f"Validation {name}, per cent")
        legend(figure, methods)
    return figure


def _mean_history(trainings: Sequence[Training], key: str) -> tuple[list[float], list[float]]:
    """The mean over seeds at every step that has the value."""
    found: dict[float, list[float]] = {}
    for training in trainings:
        for point in training.history:
            if "step" in point and key in point:
                found.setdefault(point["step"], []).append(100 * point[key])
    return sorted(found), [float(np.mean(found[step])) for step in sorted(found)]


def _log_axis(axes: Axes) -> None:
    """A logarithmic axis with plain numbers; the default writes TeX, which stays unrendered in SVG text."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _row_axis(axes: Axes, rows: Sequence[tuple[str, Budget | None]]) -> None:
    names = [method_title(method) + (f" ({budget})" if budget else "") for method, budget in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _rates(trained: Trained) -> Figure:
    shown = [one for one in trained if by_preferences(one[0].method)]
    rows = trained_rows(shown)
    with styled():
        figure, (axes,) = canvas(1, 1, 4.8, 0.8 + 0.34 * len(rows))
        for cell, training in shown:
            if training.learning_rate:
                line = rows.index((cell.method, cell.budget))
                axes.plot(training.learning_rate, line, color=colour(cell.method), marker="o", alpha=0.4, markersize=9)
        rates = sorted({training.learning_rate for _, training in shown if training.learning_rate})
        _log_axis(axes)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        tidy(axes, "Learning rate (one disc a seed)")
        _row_axis(axes, rows)
    return figure


def _minutes(trained: Trained, tasks: Sequence[str]) -> Figure:
    rows = trained_rows(trained)
    with styled():
        figure, axes = canvas(1, len(tasks), panel_width(len(tasks)), 0.9 + 0.3 * len(rows), sharey=True)
        for panel, task in zip(axes, tasks, strict=True):
            for line, (method, budget) in enumerate(rows):
                seconds = [
                    training.seconds
                    for cell, training in trained
                    if (cell.trained_on, cell.method, cell.budget) == (task, method, budget) and training.seconds
                ]
                if seconds:
                    minutes = float(np.mean(seconds)) / 60
                    panel.barh(line, minutes, 0.62, color=colour(method))
                    panel.annotate(f"{minutes:.3g}", (minutes, line), (3, 0), textcoords="offset points", va="center")
            panel.margins(x=0.15)  # room for the numbers
            tidy(panel, "Minutes", title=task_title(task))
        _row_axis(axes[0], rows)
    return figure
