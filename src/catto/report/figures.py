"""The risk-coverage figure: how often answers are wrong when only the most confident are given.

The figures of the training: validation over steps, learning rates, time.

The figures of the answers: reliability, histograms, risk and coverage, Confidence@k.

The figures of the scores: ECE against chance, accuracy against ECE, seeds, and the known world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from catto.methods import Budget
from catto.metrics.catalogue import reliability, risk_coverage
from catto.metrics.ranking import RiskCoverage, Threshold
from catto.metrics.statistics import NullBand
from catto.records import content_hash
from catto.report.measuring import CONFIDENCE, Answered, place_of
from catto.report.numbers import Cell, CellNumbers, GroupNumbers, Numbers, Results, Training
from catto.report.plotting import Picture, canvas, colour, legend, marker, panel_width, styled, tidy
from catto.report.reliability import BLUE, GREY, INK, RED, STYLE, Panel
from catto.report.reliability import figure as reliability_figure
from catto.report.tables import (
    SETTING_STEMS,
    SETTING_TITLES,
    Setting,
    budget_title,
    by_preferences,
    method_order,
    method_title,
    of_setting,
    stem,
    task_order,
    task_title,
    tasks_of,
    trained_cells,
    trained_rows,
)
from catto.report.tables import setting_title as setting_title

# ---- risk


# Solid, dashed, dotted and dash-dotted lines tell curves apart in grey print.
LINES: tuple[tuple[str, Any], ...] = ((BLUE, "-"), (RED, "--"), (INK, ":"), (GREY, "-."))


def draw_risk_coverage(curves: Mapping[str, RiskCoverage], threshold: Threshold | None = None) -> Figure:
    """Draw one curve a name, and where given the threshold's place and the risk that it keeps."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, curve) in enumerate(curves.items()):
            colour, line = LINES[place % len(LINES)]
            axes.step(curve.coverage, curve.risk, where="pre", color=colour, linestyle=line, label=name)
        if threshold is not None:
            _mark(axes, threshold)
        _label(axes)
    return figure


def _mark(axes: Axes, found: Threshold) -> None:
    axes.axhline(found.risk, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), label=f"risk {100 * found.risk:g} %")
    if found.threshold is not None:
        label = f"confidence >= {found.threshold:.4g}"
        axes.plot(found.coverage, found.errors / found.answered, "o", color=INK, markersize=5, label=label)


def _label(axes: Axes) -> None:
    axes.set_xlabel("Coverage (share answered)")
    axes.set_ylabel("Risk (share of those wrong)")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(fontsize=8.0, edgecolor=GREY)


# ---- figures_training


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


# ---- figures_more


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


# ---- figures


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
