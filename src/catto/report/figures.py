"""The figures of the report: which there are, and for each kind a function that draws numbers on axes."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from catto.methods import Budget, ScalingKind, scaled_kind, unscaled
from catto.metrics.binning import reliability
from catto.metrics.ranking import RiskCoverage, risk_coverage
from catto.metrics.statistics import Interval, NullBand
from catto.report import tables
from catto.report.drawing import BLUE, GREY, INK, RED, Panel, percent, reliability_figure
from catto.report.measuring import CellAnswers
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers, Results, Training
from catto.report.tables import Row, method_order, method_title, row_order, setting_title, task_order, task_title

# Methods differ by marker too, for grey print and colour blindness.
LOOKS = {
    "sft": ("#6B7C8C", "o"),
    "sft+ts": ("#56A4D8", "v"),
    "sft+ls": ("#1B6CA8", "s"),
    "sft+outcome": ("#4D6A2E", "p"),
    "dpo": (RED, "D"),
    "dpo+ts": ("#E08E0B", "^"),
    "cft": ("#C37FB0", "<"),
    "rcft": ("#8A4B94", ">"),
    "dpo+bce": ("#A8871C", "P"),
    "dpo+catto": ("#0E9F6E", "*"),
    "dpo+outcome": (INK, "X"),
    "dpo+outcome-pairs": ("#2A9DA8", "h"),
    "dpo+replay": ("#9C5A33", "8"),
    "dpo+decoupled": ("#B5179E", "X"),
    "dpo+decoupled+sft": ("#6A4C93", "p"),
    "dpo+reasoning": ("#D36B4A", "d"),
    "ipo": ("#7A7A1F", "h"),
    "dpo+robust": ("#C98BA0", "s"),
    "dpo+sft": ("#4F7F7A", "o"),
}
# How much paler than its start a rescaled method is, and its marker.
SCALED_LOOKS: dict[ScalingKind, tuple[float, str]] = {
    "raw": (0.38, "d"),
    "normalized": (0.62, "P"),
    "vector": (0.5, "H"),
}
RULES = {
    "most confident": ("#0E9F6E", "o-"),
    "majority vote": ("#1B6CA8", "s-"),
    "confidence-weighted vote": ("#8A4B94", "^--"),
    "mean log-probability": ("#E08E0B", "v-."),
    "one random sample": (GREY, ":"),
    "oracle": (INK, ":"),
}
PAPER_PANELS = ("sft", "dpo", "rcft", "dpo+catto", "dpo+outcome")  # the paper's four, and ours beside them
ECE, ACCURACY = "ECE, per cent", "Accuracy, per cent"

Groups = Mapping[Row, Sequence[GroupNumbers]]
Looks = Mapping[str, tuple[str, str]]  # method -> colour, marker


@dataclass(frozen=True)
class Picture:
    """A figure of the report. `subject`: what it shows, in words; `tag`: the same for its file; `contents`: its panels,
    as (title, content) or, of reliability diagrams, as `Panel`.

    The page has a title and a caption for each kind, puts the picture into a section and hides it by its budget, tasks
    and methods.
    """

    kind: str  # "reliability" or an entry of KINDS
    section: str
    tag: str
    subject: str
    contents: Any
    budget: Budget | None = None
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The stem of its file."""
        return "-".join(filter(None, (self.kind, self.tag, self.budget)))

    def draw(self, looks: Looks) -> Figure:
        """Draw one panel for each entry of `contents`, with one legend below. Axes in per cent end at 100."""
        if self.kind == "reliability":
            return reliability_figure(self.contents)
        kind = KINDS[self.kind]
        columns = min(kind.columns, len(self.contents))
        rows, width = -(-len(self.contents) // columns), min(5.8, 12.4 / columns)
        figure = Figure()
        grid = figure.subplots(rows, columns, squeeze=False, sharex=kind.share, sharey=kind.share).flat
        for place, (title, content) in enumerate(self.contents):
            axes = grid[place]
            axes.set_title(textwrap.fill(title, int(10 * width)), fontsize=8 if width < 3.5 else 10)
            axes.set_ylabel("" if place % columns else kind.y)
            if place + columns >= len(self.contents):  # no panel below
                axes.set_xlabel(kind.x)
                axes.tick_params(labelbottom=True)
            axes.grid(True)
            kind.draw(axes, content, looks)
            if kind.shares:
                axes.set_xlim(0, 1)
                axes.xaxis.set_major_formatter(percent)
                axes.yaxis.set_major_formatter(percent)
            axes.update_datalim([(0, 0)], updatex=kind.x == ECE, updatey=kind.y == ECE)
            for line in axes.lines:
                line.sticky_edges.x.extend([0, 100] if kind.x in (ECE, ACCURACY) else [])
                line.sticky_edges.y.extend([0, 100] if kind.y in (ECE, ACCURACY) else [])
        for axes in grid[len(self.contents) :]:
            axes.set_visible(False)
        legends = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid)
        handles = {label: handle for legend in legends for handle, label in legend}
        across = max(1, int(columns * width / 2))
        height = rows * (kind.height or 0.9 + 0.3 * len(grid[0].get_yticks()))
        # The panels keep their height below a long legend, which takes its own from the figure.
        figure.set_size_inches(columns * width, height + 0.2 * max(0, -(-len(handles) // across) - 3))
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across)
        return figure


def score_pictures(numbers: Numbers, budget: Budget | None) -> Iterator[Picture]:
    """The numbers of the score tables, and Confidence@k."""
    for setting, title in tables.SETTING_TITLES.items():
        groups = numbers.block(setting, budget)
        kinds: dict[str, Sequence[GroupNumbers | CellNumbers]] = {
            "ece": groups,
            "scatter": groups,
            "seeds": [cell for cell in numbers.cells if cell.setting == setting and cell.budget in (None, budget)],
            "world": [group for group in groups if "true_error" in group.others],
        }
        for kind, shown in kinds.items():
            if contents := by_task((record.task, (record.method, None), record) for record in shown):
                tasks = tuple(dict.fromkeys(record.task for record in shown))
                yield Picture(kind, setting, title.lower().replace(" ", "-"), title, contents, budget, tasks)
    sampled = [group for group in numbers.block("in", budget) if group.selection]
    for task in tables.tasks_of(sampled):
        by_method = [(method_title(group.method), group) for group in sampled if group.task == task]
        yield Picture("confidence-at-k", "", task, task_title(task), by_method, budget, (task,))


def answer_pictures(numbers: Numbers, answers: Sequence[CellAnswers], budget: Budget | None) -> Iterator[Picture]:
    """Reliability, histograms and risk-coverage of the first seed, for each training set and task."""
    places: dict[tuple[object, ...], list[tuple[CellNumbers, CellAnswers]]] = {}
    for cell, given in zip(numbers.cells, answers, strict=True):
        if cell.budget in (None, budget):
            places.setdefault((cell.setting, task_order(cell.task), cell.trained_on), []).append((cell, given))
    for _, pairs in sorted(places.items()):
        seed, (first, _) = min(cell.seed for cell, _ in pairs), pairs[0]
        shown = sorted((pair for pair in pairs if pair[0].seed == seed), key=lambda pair: method_order(pair[0].method))
        diagrams, histograms, curves = {}, {}, {}
        for cell, given in shown:
            bins = reliability(given.confidence, given.correct, numbers.bins)
            diagrams[cell.method] = Panel(method_title(cell.method), bins, cell.null, cell.sources)
            histograms[method_title(cell.method)] = given, numbers.bins
            curves[cell.method] = risk_coverage(given.confidence, given.correct)
        paper = [diagrams[name] for name in PAPER_PANELS if name in diagrams]
        contents: dict[str, Any] = {"reliability": paper or [*diagrams.values()][:5]}
        contents |= {"histogram": [*histograms.items()], "risk": [("", curves)]}
        tag, subject = first.stem, f"{setting_title(first)}, seed {seed}"
        for kind, content in contents.items():
            yield Picture(kind, "", tag, subject, content, budget, (first.task,))
        for cell, _ in shown:
            if cell.budget is not None or budget == numbers.budgets[0]:  # a model that both budgets share: once
                name, panel = f"{tag}-{cell.method}", diagrams[cell.method]
                title = f"{panel.title}, {subject}"
                yield Picture("reliability", "one", name, title, [panel], cell.budget, (cell.task,), (cell.method,))


def pictures(results: Results, numbers: Numbers, answers: Sequence[CellAnswers]) -> Iterator[Picture]:
    """Yield every figure of the report; at the end validation over training.

    answers: those of `numbers.cells`, in the same order.
    """
    for budget in numbers.budgets:
        yield from score_pictures(numbers, budget)
        yield from answer_pictures(numbers, answers, budget)
    trained = [pair for pair in tables.trained_cells(results) if pair[1].history]
    tasks = sorted({cell.trained_on for cell, _ in trained}, key=task_order)
    for task, budget in product(tasks, numbers.budgets):
        followed = [pair for pair in trained if pair[0].trained_on == task and pair[0].budget in (None, budget)]
        for _, rows in by_task((task, (cell.method, None), training) for cell, training in followed):
            metrics = [("Validation ECE", ("val_ece", rows)), ("Validation accuracy", ("val_accuracy", rows))]
            yield Picture("history", "", task, task_title(task), metrics, budget, (task,))


def by_task(entries: Iterable[tuple[str, Row, Any]]) -> list[tuple[str, dict[Row, list[Any]]]]:
    """Sort (task, row, item) into one titled panel per task, each with the same rows in the order of the tables."""
    entries = list(entries)
    rows = sorted({row for _, row, _ in entries}, key=row_order)
    return [
        (task_title(task), {row: [item for *place, item in entries if place == [task, row]] for row in rows})
        for task in sorted({task for task, _, _ in entries}, key=task_order)
    ]


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method. A rescaled one without its own has its start's colour, paler.

    Other methods take a hue far from the last one, and the markers in turn.

    >>> looks(["mine", "dpo+catto"])
    {'dpo+catto': ('#0E9F6E', '*'), 'mine': ('#4767b2', 'v')}
    """
    found, markers = {}, [marker for _, marker in LOOKS.values()]
    for place, method in enumerate(sorted({*methods}, key=method_order)):
        own = to_hex(colorsys.hsv_to_rgb(0.618 * place % 1, 0.6, 0.7)), markers[place % len(markers)]
        found[method] = LOOKS.get(method, own)
        if method not in LOOKS and (start := unscaled(method)) in LOOKS:
            paler, marker = SCALED_LOOKS[scaled_kind(method)]
            red, green, blue = ((1 - paler) * part + paler for part in to_rgb(LOOKS[start][0]))
            found[method] = to_hex((red, green, blue)), marker
    return found


def named_rows(axes: Axes, rows: Mapping[Row, Sequence[Any]], looks: Looks) -> Iterator[tuple[int, str, Any]]:
    """Name the rows of a panel, the first on top; yield the place, colour and items of each."""
    names = [method_title(method) + (f" ({budget})" if budget else "") for method, budget in rows]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for row, ((method, _), items) in enumerate(rows.items()):
        yield row, looks[method][0], items


def ends(band: Interval | NullBand) -> tuple[float, float]:
    """The ends in per cent; nan, which is not drawn, where there are none."""
    return 100 * band.low, 100 * band.high


def draw_chance(axes: Axes, rows: Groups, looks: Looks) -> None:
    """ECE and its interval, the null band (grey), debiased ECE (bar) and smooth ECE (open).

    Forced answers are named in place of their numbers, which describe the fallback and could dwarf all others.
    """
    for row, shade, groups in named_rows(axes, rows, looks):
        for group in groups:
            if group.sources.forced:
                share = f"{100 * group.others['fallback_rate'].mean:.0f} % forced"
                axes.annotate(share, (0, row), (8, 0), textcoords="offset points", va="center", fontsize=7, color=INK)
                continue
            ece, debiased, smooth = (100 * group.metrics[name].mean for name in ("ece", "debiased_ece", "smooth_ece"))
            low, high = ends(group.null)
            axes.barh(row, high - low, 0.62, low, color=GREY, alpha=0.35, linewidth=0)
            axes.plot(ends(group.intervals["ece"]), (row, row), color=shade, linewidth=1.4)
            axes.plot(ece, row, "o", color=shade, markersize=6.5)
            axes.plot(debiased, row, "|", color=shade, markersize=11)
            axes.plot(smooth, row, "o", color=shade, markersize=6.5, markerfacecolor="none")


def draw_scatter(axes: Axes, rows: Groups, looks: Looks) -> None:
    """Accuracy against ECE with their intervals, and the null band of the ECE (grey), without forced answers."""
    for (method, _), groups in rows.items():
        shade, mark = looks[method]
        for group in (group for group in groups if not group.sources.forced):
            x, y = 100 * group.metrics["accuracy"].mean, 100 * group.metrics["ece"].mean
            axes.plot((x, x), ends(group.null), color=GREY, linewidth=5, alpha=0.35)
            axes.plot(ends(group.intervals["accuracy"]), (y, y), color=shade, linewidth=0.8, alpha=0.5)
            axes.plot((x, x), ends(group.intervals["ece"]), color=shade, linewidth=0.8, alpha=0.5)
            (point,) = axes.plot(x, y, mark, color=shade, markersize=10 if mark == "*" else 7)
            point.set(markeredgecolor=INK, markeredgewidth=0.4, label=method_title(method))


def draw_seeds(axes: Axes, rows: Mapping[Row, Sequence[CellNumbers]], looks: Looks) -> None:
    """ECE of every seed, and a long mark at their mean."""
    for row, shade, cells in named_rows(axes, rows, looks):
        values = [100 * cell.metrics["ece"].value for cell in cells]
        axes.plot(values, [row] * len(values), "o", color=shade, alpha=0.55, markersize=6)
        if values:
            axes.plot(np.mean(values), row, "|", color=shade, markersize=15, markeredgewidth=2.0)


def draw_world(axes: Axes, rows: Groups, looks: Looks) -> None:
    """Measured ECE (filled) and true calibration error (open)."""
    for row, shade, groups in named_rows(axes, rows, looks):
        for group in groups:
            ece, true = 100 * group.metrics["ece"].mean, 100 * group.others["true_error"].mean
            axes.plot((ece, true), (row, row), color=GREY, linewidth=2.0, zorder=1)
            axes.plot(ece, row, "o", color=shade, markersize=7)
            axes.plot(true, row, "o", color=shade, markersize=7, markerfacecolor="#ffffff")


def draw_selection(axes: Axes, group: GroupNumbers, _: Looks) -> None:
    """Accuracy of each way to pick one of k answers, and of the greedy answer."""
    sizes = sorted(group.selection)
    for rule, (shade, line) in RULES.items():
        values = [100 * group.selection[k][rule].mean for k in sizes]
        axes.plot(sizes, values, line, color=shade, markersize=4, linewidth=1.3, label=rule)
    greedy = 100 * group.metrics["accuracy"].mean
    axes.axhline(greedy, color=RED, linewidth=1.0, linestyle=(0, (5, 2)), label="one greedy answer")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(k) for k in sizes])


def draw_histogram(axes: Axes, content: tuple[CellAnswers, int], _: Looks) -> None:
    """How often each confidence occurs: right answers, and wrong ones on top of them."""
    answers, bins = content
    parts = [answers.confidence[answers.correct], answers.confidence[~answers.correct]]
    weights = [np.full(len(part), 1 / len(answers)) for part in parts]
    style: dict[str, Any] = {"stacked": True, "histtype": "stepfilled", "color": [BLUE, RED]}
    axes.hist(parts, np.linspace(0, 1, bins + 1).tolist(), weights=weights, label=["right", "wrong"], **style)
    for patch in axes.patches:
        patch.sticky_edges.y.extend([0, 1])


def draw_risk(axes: Axes, curves: Mapping[str, RiskCoverage], looks: Looks) -> None:
    """How often answers are wrong when only the most confident are given, one curve per method."""
    for place, (method, curve) in enumerate(curves.items()):
        line, label = ("-", "--", ":", "-.")[place % 4], method_title(method)  # for grey print
        axes.step(curve.coverage, curve.risk, line, where="pre", color=looks[method][0], linewidth=1.4, label=label)
    axes.set_ylim(0, min(1, axes.get_ylim()[1]))


def draw_history(axes: Axes, content: tuple[str, Mapping[Row, Sequence[Training]]], looks: Looks) -> None:
    """A validation metric over the steps, one line per method: the mean over seeds where they have the value."""
    metric, rows = content
    for (method, _), trainings in rows.items():
        points = [point for training in trainings for point in training.history if {"step", metric} <= point.keys()]
        steps = sorted({point["step"] for point in points})
        means = [100 * np.mean([point[metric] for point in points if point["step"] == step]) for step in steps]
        shade, mark = looks[method]
        axes.plot(steps, means, f"{mark}-", color=shade, markersize=4, linewidth=1.3, label=method_title(method))


class Kind(NamedTuple):
    """How a kind of figure is drawn: the content of a panel, the labels of its axes, and its height in inches."""

    draw: Callable[[Axes, Any, Looks], None]
    x: str
    y: str = ""
    height: float | None = None  # None: by the number of rows
    share: bool = True  # whether all panels have the same axes
    columns: int = 5  # most panels side by side
    shares: bool = False  # whether both axes are shares of answers


KINDS = {
    "ece": Kind(draw_chance, ECE),
    "scatter": Kind(draw_scatter, ACCURACY, ECE, 3.6, share=False, columns=3),
    "seeds": Kind(draw_seeds, ECE),
    "world": Kind(draw_world, ECE),
    "confidence-at-k": Kind(draw_selection, "k", ACCURACY, 2.6),
    "histogram": Kind(draw_histogram, "Confidence", "Share of answers", 2.3, shares=True),
    "risk": Kind(draw_risk, "Coverage (share answered)", "Risk (share of those wrong)", 5.0, shares=True),
    "history": Kind(draw_history, "Step", "Per cent", 3.6, share=False),
}
