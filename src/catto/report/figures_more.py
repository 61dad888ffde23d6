"""The figures of the answers: reliability, histograms, risk and coverage, Confidence@k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from catto.evaluation.metrics import reliability, risk_coverage
from catto.evaluation.statistics import NullBand
from catto.methods import Budget
from catto.records import content_hash
from catto.report.loading import Answered
from catto.report.measure import place_of
from catto.report.names import budget_title, method_order, method_title, task_order, task_title
from catto.report.names import setting as setting_title
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers
from catto.report.plotting import Picture, canvas, colour, styled, tidy
from catto.report.reliability import BLUE, GREY, INK, RED, Panel
from catto.report.reliability import figure as reliability_figure
from catto.report.results import Cell
from catto.report.risk import draw_risk_coverage
from catto.report.selected import CONFIDENCE
from catto.report.tables import of_setting, stem, tasks_of

__all__ = ["answer_pictures", "selection_pictures"]

# The four panels of the paper's figure, and ours beside them.
PANELS = ("sft", "dpo", "rcft", "dpo+catto", "dpo+outcome")


def answer_pictures(numbers: Numbers, cells: Sequence[Answered]) -> list[Picture]:
    """Reliability, histograms and risk-coverage of the first seed, a set for each task and budget."""
    found = []
    for budget in numbers.budgets:
        for trained_on, task in _places(cells):
            mine = [one for one in cells if (one.cell.trained_on, one.cell.task) == (trained_on, task)]
            first = min(one.cell.seed for one in mine)
            shown = [one for one in mine if one.cell.seed == first and one.cell.budget in (None, budget)]
            shown.sort(key=lambda one: method_order(one.cell.method))
            found += _of_answers(numbers, shown, budget)
    return found


def _places(cells: Iterable[Answered]) -> list[tuple[str, str]]:
    found = {(one.cell.trained_on, one.cell.task) for one in cells}
    return sorted(found, key=lambda place: (place[0] != place[1], task_order(place[1]), place[0]))


def _of_answers(numbers: Numbers, shown: Sequence[Answered], budget: Budget | None) -> list[Picture]:
    cell = shown[0].cell
    tag = cell.task if cell.task == cell.trained_on else f"{cell.task}-from-{cell.trained_on}"
    where = f"{setting_title(cell.trained_on, cell.task)}, {budget_title(budget).lower()}, seed {cell.seed}"
    records = {one.cell.method: _record(one.cell, numbers) for one in shown}
    panels = [one for one in shown if one.cell.method in PANELS] or shown[: len(PANELS)]
    panels = sorted(panels, key=lambda one: (*PANELS, one.cell.method).index(one.cell.method))
    inputs = content_hash([numbers.bins, [record.input for record in records.values()]])
    told = "Bars: accuracy by confidence; red: the gap to the mean confidence. Below: how often each confidence occurs."
    common = (budget, (cell.task,))
    found = [
        Picture(stem(f"reliability-{tag}", budget), f"Reliability: {where}", told,
                partial(_reliability, panels, numbers), inputs, "reliability", *common),
        Picture(stem(f"histogram-{tag}", budget), f"Confidence of right and wrong answers: {where}",
                "A well ordered model has its wrong answers (red) on the left.",
                partial(_histograms, shown, numbers.bins), inputs, "histogram", *common),
        Picture(stem(f"risk-{tag}", budget), f"Risk and coverage: {where}",
                "Answer only the most confident share: how many of those are wrong? Lower is better.",
                partial(_risk, shown), inputs, "risk", *common),
    ]  # fmt: skip
    for one in shown:
        # A model that both budgets share is drawn once.
        if budget == numbers.budgets[0] or one.cell.budget is not None:
            method = one.cell.method
            name, title = stem(f"reliability-{tag}-{method}", one.cell.budget), f"{method_title(method)}: {where}"
            draw, key = partial(_reliability, [one], numbers), content_hash([numbers.bins, records[method].input])
            found.append(Picture(name, title, told, draw, key, "reliability-one", *common, (method,)))
    return found


def _record(cell: Cell, numbers: Numbers) -> CellNumbers:
    return next(one for one in numbers.cells if place_of(one) == place_of(cell))


def _reliability(shown: Sequence[Answered], numbers: Numbers) -> Figure:
    return reliability_figure([_panel(one, numbers) for one in shown])


def _panel(one: Answered, numbers: Numbers) -> Panel:
    null = _record(one.cell, numbers).null
    band = NullBand(null.mean, null.low, null.high, numbers.level)
    bins = reliability(one.confidence, one.correct, numbers.bins)
    return Panel(method_title(one.cell.method), bins, band, one.sources)


def _histograms(shown: Sequence[Answered], bins: int) -> Figure:
    columns = min(5, len(shown))
    edges = np.linspace(0, 1, bins + 1)
    with styled():
        figure, axes = canvas(-(-len(shown) // columns), columns, 2.5, 1.9, sharex=True, sharey=True)
        for panel in axes[len(shown) :]:
            panel.set_visible(False)
        for panel, one in zip(axes, shown, strict=False):
            parts = [one.confidence[one.correct], one.confidence[~one.correct]]
            weights = [np.full(len(part), 1 / len(one)) for part in parts]
            panel.hist(parts, edges.tolist(), weights=weights, stacked=True, histtype="stepfilled", color=[BLUE, RED])
            tidy(panel, title=_narrow(one.cell.method))
            panel.title.set_fontsize(8)
            panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[0].legend(["wrong", "right"], frameon=False, loc="upper left", fontsize=8)
        figure.supxlabel("Confidence", fontsize=9)
    return figure


def _narrow(method: str) -> str:
    """A method as a small panel is headed: scaling on a line of its own."""
    return method_title(method).replace(" + temperature scaling", "\n+ temperature scaling")


def _risk(shown: Sequence[Answered]) -> Figure:
    curves = {method_title(one.cell.method): risk_coverage(one.confidence, one.correct) for one in shown}
    with styled():
        figure = draw_risk_coverage(curves)
        figure.set_size_inches(8.6, 4.4)
        axes = figure.axes[0]
        for line, one in zip(axes.lines, shown, strict=True):
            line.set(color=colour(one.cell.method), linewidth=1.4)
        axes.set_ylim(bottom=0)
        tidy(axes, axes.get_xlabel(), axes.get_ylabel())
        if (old := axes.get_legend()) is not None:
            old.remove()
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


RULE_LINES = {
    CONFIDENCE: ("#0E9F6E", "-", "o"),
    "majority vote": ("#1B6CA8", "-", "s"),
    "confidence-weighted vote": ("#8A4B94", "--", "^"),
    "mean log-probability": ("#E08E0B", "-.", "v"),
    "one random sample": (GREY, ":", ""),
    "oracle": (INK, ":", ""),
}


def selection_pictures(numbers: Numbers) -> list[Picture]:
    """Accuracy over k of each way to pick, a panel a method; a figure for each task and budget."""
    found = []
    for budget in numbers.budgets:
        groups = [(place, group) for place, group in of_setting(numbers, "in", budget) if group.selection]
        for task in tasks_of(groups):
            shown = [group for _, group in groups if group.task == task]
            title = f"Picking one of k answers: {task_title(task)}, {budget_title(budget).lower()}"
            caption = (
                "The oracle is right if any of the k answers is: an upper bound for every rule. Red, the same at every "
                "k: the one greedy answer."
            )
            name = stem(f"confidence-at-k-{task}", budget)
            inputs = content_hash([group.input for group in shown])
            found.append(Picture(name, title, caption, partial(_over_k, shown), inputs, "k", budget, (task,)))
    return found


def _over_k(groups: Sequence[GroupNumbers]) -> Figure:
    columns = min(5, len(groups))
    with styled():
        figure, axes = canvas(-(-len(groups) // columns), columns, 2.5, 2.2, sharex=True, sharey=True)
        for panel in axes[len(groups) :]:
            panel.set_visible(False)
        for panel, group in zip(axes, groups, strict=False):
            _rule_lines(panel, group)
        handles, labels = axes[0].get_legend_handles_labels()
        width = figure.get_size_inches()[0]
        figure.legend(handles, labels, loc="outside lower center", ncols=max(1, int(width / 1.9)), frameon=False)
        figure.supylabel("Accuracy, per cent", fontsize=9)
    return figure


def _rule_lines(axes: Axes, group: GroupNumbers) -> None:
    sizes = sorted(group.selection)
    for rule, (shade, line, mark) in RULE_LINES.items():
        values = [100 * group.selection[k][rule].mean for k in sizes]
        axes.plot(sizes, values, color=shade, linestyle=line, marker=mark, markersize=4, linewidth=1.3, label=rule)
    greedy = 100 * group.metrics["accuracy"].mean
    axes.axhline(greedy, color=RED, linewidth=1.0, linestyle=(0, (5, 2)), label="one greedy answer")
    tidy(axes, title=_narrow(group.method))
    axes.title.set_fontsize(8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(k) for k in sizes])
