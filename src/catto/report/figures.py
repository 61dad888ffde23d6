"""The figures of the scores: ECE against chance, accuracy against ECE, seeds, and the known world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from catto.methods import Budget
from catto.records import content_hash
from catto.report.names import budget_title, method_order, method_title, task_title
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers
from catto.report.plotting import Picture, canvas, colour, legend, marker, panel_width, styled, tidy
from catto.report.reliability import GREY, INK
from catto.report.tables import SETTING_STEMS, SETTING_TITLES, Setting, of_setting, stem, tasks_of

__all__ = ["score_pictures"]

Groups = Sequence[GroupNumbers]


def score_pictures(numbers: Numbers) -> list[Picture]:
    """The pictures of the score tables, of their deviations, and of the known world."""
    found: list[Picture] = []
    settings: tuple[Setting, ...] = ("in", "out")
    for setting in settings:
        for budget in numbers.budgets:
            groups = [group for _, group in of_setting(numbers, setting, budget)]
            if groups:
                found += _of_block(numbers, groups, setting, budget)
    return found


def _of_block(numbers: Numbers, groups: Groups, setting: Setting, budget: Budget | None) -> list[Picture]:
    where = f"{SETTING_TITLES[setting]}, {budget_title(budget).lower()}"
    known = [group for group in groups if group.world]
    cells = [cell for cell in numbers.cells if cell.budget in (None, budget)]
    chance, scatter = partial(_by_task, groups, _draw_chance), partial(_scatter, groups)
    seeds = partial(_by_task, groups, _seed_strip(cells))
    drawn = [
        _picture(
            chance, "ece", f"ECE against chance: {where}", groups, setting, budget,
            "Dot and whisker: ECE and its interval, where that holds the value. Grey bar: where a perfectly calibrated "
            "model with the same confidences would fall by chance. Bar |: debiased ECE. Open circle: smooth ECE.",
        ),
        _picture(
            scatter, "scatter", f"Accuracy against ECE: {where}", groups, setting, budget,
            "To the right and down is better. Whiskers: intervals over questions. Grey bars: the null band of each "
            "method's ECE.",
        ),
        _picture(
            seeds, "seeds", f"ECE of every seed: {where}", groups, setting, budget,
            "One mark a seed; the long mark is their mean.",
        ),
    ]  # fmt: skip
    if known:
        caption = "Filled: the measured ECE. Open: the mean distance of confidence and exact posterior."
        title = f"ECE and true calibration error: {where}"
        drawn_world = partial(_by_task, known, _draw_world)
        drawn.append(_picture(drawn_world, "world", title, known, setting, budget, caption))
    return drawn


def _picture(
    draw: Callable[[], Figure],
    kind: str,
    title: str,
    groups: Groups,
    setting: Setting,
    budget: Budget | None,
    caption: str,
) -> Picture:
    name = stem(f"{kind}-{SETTING_STEMS[setting]}", budget)
    tasks = tuple(dict.fromkeys(group.task for group in groups))
    inputs = content_hash([group.input for group in groups])
    return Picture(name, title, caption, draw, inputs, f"{kind}-{setting}", budget, tasks)


Draw = Callable[[Axes, GroupNumbers, int], None]


def _by_task(groups: Groups, draw: Draw) -> Figure:
    """Draw one panel a task with a line a method, the first on top."""
    tasks = tasks_of(enumerate(groups))
    methods = sorted({group.method for group in groups}, key=method_order)
    with styled():
        figure, axes = canvas(1, len(tasks), panel_width(len(tasks)), 0.9 + 0.3 * len(methods), sharey=True)
        for panel, task in zip(axes, tasks, strict=True):
            for group in groups:
                if group.task == task:
                    draw(panel, group, methods.index(group.method))
            tidy(panel, "ECE, per cent", title=task_title(task))
            panel.set_xlim(left=0)
            panel.set_yticks(range(len(methods)), [method_title(name) for name in methods])
            panel.set_ylim(len(methods) - 0.5, -0.5)
    return figure


def _draw_chance(axes: Axes, group: GroupNumbers, line: int) -> None:
    null, ece, shade = group.null, group.metrics["ece"].mean, colour(group.method)
    axes.barh(line, 100 * (null.high - null.low), 0.62, 100 * null.low, color=GREY, alpha=0.35, linewidth=0)
    _whisker(axes, group, line)
    axes.plot(100 * ece, line, marker="o", color=shade, markersize=6.5, linestyle="")
    axes.plot(100 * group.metrics["debiased_ece"].mean, line, marker="|", color=shade, markersize=11, linestyle="")
    smooth = 100 * group.metrics["smooth_ece"].mean
    axes.plot(smooth, line, marker="o", markerfacecolor="none", color=shade, markersize=6.5, linestyle="")
    _say_forced(axes, group, 100 * ece, line)


def _say_forced(axes: Axes, group: GroupNumbers, x: float, y: float) -> None:
    """Write beside a mark that it stands for the fallback."""
    if group.sources.forced:
        share = f"{100 * group.fallback_rate.mean:.0f} % forced"
        axes.annotate(share, (x, y), (8, 6), textcoords="offset points", fontsize=7, color=INK)


def _whisker(axes: Axes, group: GroupNumbers, line: int) -> None:
    interval = group.intervals["ece"]
    if interval.low is not None and interval.high is not None:
        axes.plot([100 * interval.low, 100 * interval.high], [line, line], color=colour(group.method), linewidth=1.4)


def _draw_world(axes: Axes, group: GroupNumbers, line: int) -> None:
    ece, true = 100 * group.metrics["ece"].mean, 100 * group.world["true_error"].mean
    axes.plot([ece, true], [line, line], color=GREY, linewidth=2.0, zorder=1)
    axes.plot(ece, line, marker="o", color=colour(group.method), markersize=7, linestyle="")
    axes.plot(true, line, marker="o", markerfacecolor="#ffffff", color=colour(group.method), markersize=7, linestyle="")


def _seed_strip(cells: Sequence[CellNumbers]) -> Draw:
    def draw(axes: Axes, group: GroupNumbers, line: int) -> None:
        values = [
            100 * (cell.metrics["ece"].value or 0.0)
            for cell in cells
            if (cell.task, cell.trained_on, cell.method) == (group.task, group.trained_on, group.method)
        ]
        style: dict[str, Any] = {"color": colour(group.method), "linestyle": ""}
        axes.plot(values, [line] * len(values), marker="o", alpha=0.55, markersize=6, **style)
        axes.plot(100 * group.metrics["ece"].mean, line, marker="|", markersize=15, markeredgewidth=2.0, **style)

    return draw


def _scatter(groups: Groups) -> Figure:
    tasks = tasks_of(enumerate(groups))
    methods = sorted({group.method for group in groups}, key=method_order)
    columns = min(3, len(tasks))
    with styled():
        figure, axes = canvas(-(-len(tasks) // columns), columns, panel_width(columns), 3.6)
        for panel in axes[len(tasks) :]:
            panel.set_visible(False)
        for panel, task in zip(axes, tasks, strict=False):
            for group in groups:
                if group.task == task:
                    _point(panel, group)
            tidy(panel, "Accuracy, per cent", "ECE, per cent", task_title(task))
            panel.set_ylim(bottom=0)
        legend(figure, methods)
    return figure


def _point(axes: Axes, group: GroupNumbers) -> None:
    x, y = 100 * group.metrics["accuracy"].mean, 100 * group.metrics["ece"].mean
    shade, across, along = colour(group.method), group.intervals["accuracy"], group.intervals["ece"]
    axes.plot([x, x], [100 * group.null.low, 100 * group.null.high], color=GREY, linewidth=5, alpha=0.35)
    if across.low is not None and across.high is not None:
        axes.plot([100 * across.low, 100 * across.high], [y, y], color=shade, linewidth=0.8, alpha=0.5)
    if along.low is not None and along.high is not None:
        axes.plot([x, x], [100 * along.low, 100 * along.high], color=shade, linewidth=0.8, alpha=0.5)
    size = 10 if marker(group.method) == "*" else 7
    axes.plot(x, y, marker=marker(group.method), color=shade, markersize=size, markeredgecolor=INK, markeredgewidth=0.4)
    _say_forced(axes, group, x, y)
