"""The figures of the report: the list of all figures, and a drawing function for each kind of figure."""

from __future__ import annotations

import colorsys
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from catto.methods import Budget, ScalingKind, scaled_kind, strip_scaling
from catto.metrics.binning import reliability
from catto.metrics.intervals import Interval, NullBand
from catto.metrics.ranking import RiskCoverage, risk_coverage
from catto.report import tables
from catto.report.cell_answers import CellAnswers
from catto.report.drawing import BLUE, GREY, INK, RED, Panel, format_percent, reliability_figure
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers, Results, Training
from catto.report.tables import (
    PlaceOrder,
    TrainedCell,
    method_order,
    method_title,
    place_order,
    setting_title,
    task_order,
    task_title,
)


class MethodLook(NamedTuple):
    """Colour and marker of a method. Markers distinguish methods in grey print and for colour-blind readers."""

    colour: str
    marker: str


class PalerLook(NamedTuple):
    """How a rescaled method differs from the method it starts from. white: share of white mixed in, 0 to 1."""

    white: float
    marker: str


class RuleLook(NamedTuple):
    """Look of a rule that picks one of k answers. line: format string of matplotlib, such as `s-`."""

    colour: str
    line: str


LOOKS = {
    "sft": MethodLook("#6B7C8C", "o"),
    "sft+ts": MethodLook("#56A4D8", "v"),
    "sft+ls": MethodLook("#1B6CA8", "s"),
    "sft+outcome": MethodLook("#4D6A2E", "p"),
    "dpo": MethodLook(RED, "D"),
    "dpo+ts": MethodLook("#E08E0B", "^"),
    "cft": MethodLook("#C37FB0", "<"),
    "rcft": MethodLook("#8A4B94", ">"),
    "dpo+bce": MethodLook("#A8871C", "P"),
    "dpo+catto": MethodLook("#0E9F6E", "*"),
    "dpo+outcome": MethodLook(INK, "X"),
    "dpo+outcome-pairs": MethodLook("#2A9DA8", "h"),
    "dpo+replay": MethodLook("#9C5A33", "8"),
    "dpo+decoupled": MethodLook("#B5179E", "X"),
    "dpo+decoupled+sft": MethodLook("#6A4C93", "p"),
    "dpo+reasoning": MethodLook("#D36B4A", "d"),
    "ipo": MethodLook("#7A7A1F", "h"),
    "dpo+robust": MethodLook("#C98BA0", "s"),
    "dpo+sft": MethodLook("#4F7F7A", "o"),
    "outcome+decoupled": MethodLook("#3A0CA3", "D"),
    "outcome+dpo": MethodLook("#B08968", "^"),
}
SCALED_LOOKS: dict[ScalingKind, PalerLook] = {
    "raw": PalerLook(0.38, "d"),
    "normalized": PalerLook(0.62, "P"),
    "vector": PalerLook(0.5, "H"),
}
RULE_LOOKS = {
    "most confident": RuleLook("#0E9F6E", "o-"),
    "majority vote": RuleLook("#1B6CA8", "s-"),
    "confidence-weighted vote": RuleLook("#8A4B94", "^--"),
    "mean log-probability": RuleLook("#E08E0B", "v-."),
    "one random sample": RuleLook(GREY, ":"),
    "oracle": RuleLook(INK, ":"),
}
CURVE_STYLES = ("-", "--", ":", "-.")  # distinguish curves in grey print
PAPER_PANELS = ("sft", "dpo", "rcft", "dpo+catto", "dpo+outcome")  # the paper's four methods, and ours
MAX_RELIABILITY_PANELS = 5  # side by side, if none of PAPER_PANELS was run
MAX_PANEL_WIDTH = 5.8  # in inches
MAX_FIGURE_WIDTH = 12.4  # in inches
ECE = "ECE, per cent"
ACCURACY = "Accuracy, per cent"

Looks = Mapping[str, MethodLook]
GroupsByMethod = Mapping[str, Sequence[GroupNumbers]]


def choose_looks(methods: Iterable[str]) -> dict[str, MethodLook]:
    """Choose the colour and marker of each method.

    A method that is not in LOOKS gets a paler colour of the method that it rescales, if that one is in LOOKS. Otherwise
    it gets a colour and a marker by its position in the tables, with different hues for neighbours.

    Args:
        methods: names of methods in any order; repeated names count once.

    Returns:
        method -> look, in the order of the tables.

    >>> choose_looks(["mine", "dpo+catto"])["mine"]
    MethodLook(colour='#4767b2', marker='v')
    """
    looks = {}
    for position, method in enumerate(sorted(set(methods), key=method_order)):
        unscaled = strip_scaling(method)  # the method itself if it does not rescale
        if method in LOOKS:
            looks[method] = LOOKS[method]
        elif unscaled in LOOKS:
            looks[method] = _make_paler(LOOKS[unscaled], SCALED_LOOKS[scaled_kind(method)])
        else:
            looks[method] = _invent_look(position)
    return looks


def _make_paler(look: MethodLook, paler: PalerLook) -> MethodLook:
    """Return a look with white mixed into the colour of `look`, and with the marker of `paler`."""
    red, green, blue = [(1 - paler.white) * part + paler.white for part in to_rgb(look.colour)]
    return MethodLook(to_hex((red, green, blue)), paler.marker)


def _invent_look(position: int) -> MethodLook:
    """Return a look for a position in the order of methods; steps of 0.618 keep neighbouring hues far apart."""
    hue = 0.618 * position % 1
    markers = [look.marker for look in LOOKS.values()]
    colour = to_hex(colorsys.hsv_to_rgb(hue, 0.6, 0.7))
    return MethodLook(colour, markers[position % len(markers)])


# ---- which figures there are


class TitledContent(NamedTuple):
    """One panel of a figure: its title, and the data for the drawing function of the figure's kind."""

    title: str
    content: Any


class HistogramContent(NamedTuple):
    """The answers to show, and the number of bins for their confidences."""

    answers: CellAnswers
    bins: int


class HistoryContent(NamedTuple):
    """A validation metric to plot, and the training runs of each method."""

    metric: str
    runs_of: Mapping[str, Sequence[Training]]


@dataclass(frozen=True)
class Picture:
    """A figure of the report.

    The page has a title and a caption for each kind of figure. Its filters hide a figure by budget, tasks and methods.

    Attributes:
        kind: "reliability" or a key of `KINDS`.
        section: the part of the page that shows it, if the page shows this kind in several places: a setting of
            `SETTING_TITLES`, or "one" for the reliability diagram of a single method; otherwise empty.
        tag: what the figure shows, as part of its file name.
        subject: what the figure shows, in words.
        panels: `Panel` objects for the kind "reliability", otherwise `TitledContent`.
        budget: the budget of the numbers; None if they belong to all budgets.
        tasks: the tasks that the figure shows.
        methods: the methods that the figure shows; empty means all.
    """

    kind: str
    section: str
    tag: str
    subject: str
    panels: Any
    budget: Budget | None = None
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The stem of its file name: kind, tag, and the budget if it has one."""
        parts = [self.kind, self.tag, self.budget]
        return "-".join(part for part in parts if part)

    def draw(self, looks: Looks) -> Figure:
        """Draw the panels. Reliability diagrams have their own colours and ignore `looks`."""
        if self.kind == "reliability":
            return reliability_figure(self.panels)
        return draw_panels(KINDS[self.kind], self.panels, looks)


def make_pictures(results: Results, numbers: Numbers, answers: Sequence[CellAnswers]) -> Iterator[Picture]:
    """Yield every figure of the report, those about training last.

    Args:
        results: the experiment.
        numbers: the numbers measured on it.
        answers: the answers of `numbers.cells`, in the same order.
    """
    for budget in numbers.budgets:
        yield from make_score_pictures(numbers, budget)
        yield from make_selection_pictures(numbers, budget)
        yield from make_answer_pictures(numbers, answers, budget)
    yield from make_history_pictures(results, numbers)


def make_score_pictures(numbers: Numbers, budget: Budget | None) -> Iterator[Picture]:
    """Yield the figures of ECE and accuracy, for each setting (in and out of distribution) that has such numbers.

    Args:
        numbers: the numbers of the report.
        budget: the budget to show. Cells without a budget belong to every budget.

    Yields:
        Up to four figures per setting: ECE against chance, ECE against accuracy, the ECE of every seed and, for tasks
        with known posteriors, ECE against the true error. Each has one panel per task.
    """
    for setting, title in tables.SETTING_TITLES.items():
        groups = numbers.find_groups(setting, budget)
        cells = [cell for cell in numbers.cells if cell.setting == setting and cell.budget in (None, budget)]
        with_true_error = [group for group in groups if "true_error" in group.others]
        records_of_kind: dict[str, Sequence[GroupNumbers | CellNumbers]] = {
            "ece": groups,
            "scatter": groups,
            "seeds": cells,
            "world": with_true_error,  # of generated tasks, whose posteriors are known
        }
        for kind, records in records_of_kind.items():
            if not records:
                continue
            yield Picture(
                kind=kind,
                section=setting,
                tag=title.lower().replace(" ", "-"),
                subject=title,
                panels=split_by_task(records),
                budget=budget,
                tasks=tuple(dict.fromkeys(record.task for record in records)),
            )


def make_selection_pictures(numbers: Numbers, budget: Budget | None) -> Iterator[Picture]:
    """Yield a figure of Confidence@k for each task with sampled answers."""
    with_samples = [group for group in numbers.find_groups("in", budget) if group.selection]
    for task in tables.list_report_tasks(with_samples):
        of_task = [group for group in with_samples if group.task == task]
        yield Picture(
            kind="confidence-at-k",
            section="",
            tag=task,
            subject=task_title(task),
            panels=[TitledContent(method_title(group.method), group) for group in of_task],
            budget=budget,
            tasks=(task,),
        )


def split_by_task(records: Iterable[GroupNumbers | CellNumbers]) -> list[TitledContent]:
    """Return one panel for each task; its content is method -> records.

    Every panel lists the same methods, which aligns their rows; a method may have no records on a task.
    """
    records = list(records)
    methods = sorted({record.method for record in records}, key=method_order)
    records_at: dict[str, dict[str, list[GroupNumbers | CellNumbers]]] = {}  # task -> method -> records
    for task in sorted({record.task for record in records}, key=task_order):
        records_at[task] = {method: [] for method in methods}
    for record in records:
        records_at[record.task][record.method].append(record)
    return [TitledContent(task_title(task), records_of) for task, records_of in records_at.items()]


class MeasuredAnswers(NamedTuple):
    """The numbers and the answers of one cell."""

    cell: CellNumbers
    answers: CellAnswers


def make_answer_pictures(numbers: Numbers, answers: Sequence[CellAnswers], budget: Budget | None) -> Iterator[Picture]:
    """Yield reliability diagrams, histograms and risk-coverage curves of one budget, by task and training set.

    Only the first seed of each task and training set is shown. A cell without a budget belongs to every budget.

    The figures in distribution come first, then those out of distribution, each in the order of the tables' tasks.

    Args:
        numbers: the numbers of the report.
        answers: the answers of `numbers.cells`, in the same order.
        budget: the budget to show.

    Yields:
        For each task and training set, the figures that compare the methods, then one reliability diagram per method.
    """
    cells_at: dict[PlaceOrder, list[MeasuredAnswers]] = {}
    for cell, cell_answers in zip(numbers.cells, answers, strict=True):
        if cell.budget in (None, budget):
            cells_at.setdefault(place_order(cell), []).append(MeasuredAnswers(cell, cell_answers))
    is_first_budget = budget == numbers.budgets[0]
    for place in sorted(cells_at):
        cells = cells_at[place]
        first_seed = min(measured.cell.seed for measured in cells)
        of_first_seed = [measured for measured in cells if measured.cell.seed == first_seed]
        of_first_seed.sort(key=lambda measured: method_order(measured.cell.method))
        # These figures show all methods, of which some have different cells in every budget.
        yield from _compare_answers(of_first_seed, numbers.bins, budget)
        for measured in of_first_seed:
            # The diagram of a cell without a budget is the same in all budgets, so it is drawn only for the first one.
            has_own_budget = measured.cell.budget is not None
            if has_own_budget or is_first_budget:
                yield _make_single_diagram(measured, numbers.bins)


def _compare_answers(cells: Sequence[MeasuredAnswers], bins: int, budget: Budget | None) -> Iterator[Picture]:
    """Yield the three figures that compare methods: reliability diagrams, histograms and risk-coverage curves.

    Args:
        cells: one cell for each method, all of the same training set, task and seed.
        bins: number of bins of the diagrams and histograms.
        budget: the budget of the figures; the cells have this budget or none.
    """
    diagrams: dict[str, Panel] = {}
    histograms: list[TitledContent] = []
    curves: dict[str, RiskCoverage] = {}
    for cell, answers in cells:
        diagrams[cell.method] = _make_diagram(cell, answers, bins)
        histograms.append(TitledContent(method_title(cell.method), HistogramContent(answers, bins)))
        curves[cell.method] = risk_coverage(answers.confidence, answers.correct)
    # Diagrams are side by side, so there is room for a few methods only. Each method also has a figure of its own.
    shown_diagrams = [diagrams[method] for method in PAPER_PANELS if method in diagrams]
    if not shown_diagrams:
        shown_diagrams = list(diagrams.values())[:MAX_RELIABILITY_PANELS]
    panels_of_kind: dict[str, Sequence[Any]] = {
        "reliability": shown_diagrams,
        "histogram": histograms,
        "risk": [TitledContent("", curves)],
    }
    any_cell = cells[0].cell  # training set, task and seed are the same for all cells
    for kind, panels in panels_of_kind.items():
        yield Picture(
            kind=kind,
            section="",
            tag=any_cell.stem,
            subject=_describe_test(any_cell),
            panels=panels,
            budget=budget,
            tasks=(any_cell.task,),
        )


def _make_single_diagram(measured: MeasuredAnswers, bins: int) -> Picture:
    """Make the reliability diagram of a single cell, with the cell's own budget, which may be None."""
    cell, answers = measured
    diagram = _make_diagram(cell, answers, bins)
    return Picture(
        kind="reliability",
        section="one",
        tag=f"{cell.stem}-{cell.method}",
        subject=f"{diagram.title}, {_describe_test(cell)}",
        panels=[diagram],
        budget=cell.budget,
        tasks=(cell.task,),
        methods=(cell.method,),
    )


def _make_diagram(cell: CellNumbers, answers: CellAnswers, bins: int) -> Panel:
    binned = reliability(answers.confidence, answers.correct, bins)
    return Panel(title=method_title(cell.method), bins=binned, null=cell.null, sources=cell.sources)


def _describe_test(cell: CellNumbers) -> str:
    return f"{setting_title(cell)}, seed {cell.seed}"


def make_history_pictures(results: Results, numbers: Numbers) -> Iterator[Picture]:
    """Yield a figure of the validation metrics over the course of training, for each training task and budget.

    There are none if no training run recorded its history.

    Args:
        results: the experiment, which has the histories.
        numbers: the numbers measured on it; only their budgets are used.

    Yields:
        The figures, each with a panel for the ECE and one for the accuracy.
    """
    with_history = [trained for trained in tables.list_trained_cells(results) if trained.training.history]
    training_tasks = sorted({trained.cell.trained_on for trained in with_history}, key=task_order)
    for task, budget in product(training_tasks, numbers.budgets):
        runs_of = _group_runs(with_history, task, budget)
        if not runs_of:
            continue
        panels = [
            TitledContent("Validation ECE", HistoryContent("val_ece", runs_of)),
            TitledContent("Validation accuracy", HistoryContent("val_accuracy", runs_of)),
        ]
        yield Picture(
            kind="history",
            section="",
            tag=task,
            subject=task_title(task),
            panels=panels,
            budget=budget,
            tasks=(task,),
        )


def _group_runs(trained: Iterable[TrainedCell], task: str, budget: Budget | None) -> dict[str, list[Training]]:
    """Return method -> its training runs on a task in a budget, in the order of the tables.

    A run without a budget belongs to both budgets.
    """
    runs_of: dict[str, list[Training]] = {}
    for cell, training in sorted(trained, key=lambda one: method_order(one.cell.method)):
        if cell.trained_on == task and cell.budget in (None, budget):
            runs_of.setdefault(cell.method, []).append(training)
    return runs_of


# ---- drawing


def draw_panels(kind: FigureKind, panels: Sequence[TitledContent], looks: Looks) -> Figure:
    """Draw one or more panels in a grid, with a single legend below them.

    Args:
        kind: how the panels are drawn.
        panels: at least one panel, in the order of reading: row by row, from left to right.
        looks: colour and marker of each method.

    Returns:
        The figure. Its size in inches follows from the number of panels and the kind.
    """
    columns = min(kind.max_columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    panel_width = min(MAX_PANEL_WIDTH, MAX_FIGURE_WIDTH / columns)
    figure = Figure()
    grid = figure.subplots(rows, columns, squeeze=False, sharex=kind.same_axes, sharey=kind.same_axes).flat
    for index, (title, content) in enumerate(panels):
        axes = grid[index]
        _title_panel(axes, title, panel_width)
        is_leftmost = index % columns == 0
        if is_leftmost:
            axes.set_ylabel(kind.y)
        has_panel_below = index + columns < len(panels)
        if not has_panel_below:
            axes.set_xlabel(kind.x)
            # matplotlib shows the tick labels of shared axes in the last row only, where the grid may have a gap.
            axes.tick_params(labelbottom=True)
        axes.grid(True)
        kind.draw(axes, content, looks)
        _limit_axes(axes, kind)
    for unused_axes in grid[len(panels) :]:  # the gap at the end of the last row
        unused_axes.set_visible(False)
    panel_height = kind.height
    if panel_height is None:  # the panels have one row per method
        methods = len(grid[0].get_yticks())
        panel_height = 0.9 + 0.3 * methods  # in inches: the title and the axis, and a row for each method
    figure.set_size_inches(columns * panel_width, rows * panel_height)
    _add_legend(figure, grid)
    return figure


def _add_legend(figure: Figure, grid: Iterable[Axes]) -> None:
    """Add one legend below the panels, with each label once; a long legend makes the figure higher."""
    handle_of_label = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handle_of_label[label] = handle
    if not handle_of_label:
        return
    width, height = figure.get_size_inches()
    entries_per_line = max(1, int(width / 2))  # an entry needs about two inches
    legend_lines = math.ceil(len(handle_of_label) / entries_per_line)
    # The panels can spare the height of three lines. Each further line makes the figure higher, so they do not shrink.
    figure.set_size_inches(width, height + 0.2 * max(0, legend_lines - 3))
    figure.legend(handle_of_label.values(), handle_of_label.keys(), loc="outside lower center", ncols=entries_per_line)


def _title_panel(axes: Axes, title: str, width: float) -> None:
    """Set the title, broken into lines that fit a panel of the given width in inches."""
    if width < 3.5:
        size = 8
    else:
        size = 10
    axes.set_title(textwrap.fill(title, int(10 * width)), fontsize=size)


def _limit_axes(axes: Axes, kind: FigureKind) -> None:
    """Make axes of shares run from 0 to 1, include 0 on axes of ECE, and allow no margin beyond 0 and 100 per cent."""
    if kind.in_shares:
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(format_percent)
        axes.yaxis.set_major_formatter(format_percent)
    axes.update_datalim([(0, 0)], updatex=kind.x == ECE, updatey=kind.y == ECE)
    for line in axes.lines:
        if kind.x in (ECE, ACCURACY):
            line.sticky_edges.x.extend([0, 100])
        if kind.y in (ECE, ACCURACY):
            line.sticky_edges.y.extend([0, 100])


def _name_rows(axes: Axes, methods: Iterable[str]) -> None:
    """Label the rows of a panel with methods, the first on top."""
    titles = [method_title(method) for method in methods]
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.5, -0.5)


def _ends_in_percent(band: Interval | NullBand) -> tuple[float, float]:
    """Return both ends in per cent; undefined ends are nan, which matplotlib does not draw."""
    return 100 * band.low, 100 * band.high


def draw_chance(axes: Axes, groups_of: GroupsByMethod, looks: Looks) -> None:
    """Draw ECE and its interval, the null band (grey), debiased ECE (vertical bar) and smooth ECE (open circle).

    For a group with too many forced answers, their share is written instead.
    """
    _name_rows(axes, groups_of)
    for row, (method, groups) in enumerate(groups_of.items()):
        for group in groups:
            if group.sources.has_too_many_forced:
                _write_forced_share(axes, row, group)
            else:
                _draw_chance_row(axes, row, group, colour=looks[method].colour)


def _write_forced_share(axes: Axes, row: int, group: GroupNumbers) -> None:
    """Write the share of forced answers in place of the numbers, which describe the fallback and not the model."""
    axes.annotate(
        f"{100 * group.others['fallback_rate'].mean:.0f} % forced",
        xy=(0, row),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
    )


def _draw_chance_row(axes: Axes, row: int, group: GroupNumbers, *, colour: str) -> None:
    """Draw one group in the row of its method."""
    ece = 100 * group.metrics["ece"].mean
    debiased = 100 * group.metrics["debiased_ece"].mean
    smooth = 100 * group.metrics["smooth_ece"].mean
    low, high = _ends_in_percent(group.null)
    axes.barh(row, width=high - low, height=0.62, left=low, color=GREY, alpha=0.35, linewidth=0)
    axes.plot(_ends_in_percent(group.intervals["ece"]), (row, row), color=colour, linewidth=1.4)
    axes.plot(ece, row, "o", color=colour, markersize=6.5)
    axes.plot(debiased, row, "|", color=colour, markersize=11)
    axes.plot(smooth, row, "o", color=colour, markersize=6.5, markerfacecolor="none")


def draw_scatter(axes: Axes, groups_of: GroupsByMethod, looks: Looks) -> None:
    """Draw ECE against accuracy with their intervals, and the null band of the ECE (grey).

    Groups with too many forced answers are left out.
    """
    for method, groups in groups_of.items():
        for group in groups:
            if not group.sources.has_too_many_forced:
                _draw_scatter_point(axes, group, look=looks[method], label=method_title(method))


def _draw_scatter_point(axes: Axes, group: GroupNumbers, *, look: MethodLook, label: str) -> None:
    """Draw one group; all groups of a method have the same label, which the legend shows once."""
    accuracy = 100 * group.metrics["accuracy"].mean
    ece = 100 * group.metrics["ece"].mean
    axes.plot((accuracy, accuracy), _ends_in_percent(group.null), color=GREY, linewidth=5, alpha=0.35)
    whisker: dict[str, Any] = {"color": look.colour, "linewidth": 0.8, "alpha": 0.5}
    axes.plot(_ends_in_percent(group.intervals["accuracy"]), (ece, ece), **whisker)
    axes.plot((accuracy, accuracy), _ends_in_percent(group.intervals["ece"]), **whisker)
    size = 7
    if look.marker == "*":  # a star of the same size looks smaller
        size = 10
    (point,) = axes.plot(accuracy, ece, look.marker, color=look.colour, markersize=size)
    point.set(markeredgecolor=INK, markeredgewidth=0.4, label=label)


def draw_seeds(axes: Axes, cells_of: Mapping[str, Sequence[CellNumbers]], looks: Looks) -> None:
    """Draw the ECE of every seed and a long mark at their mean; the row of a method without cells is empty."""
    _name_rows(axes, cells_of)
    for row, (method, cells) in enumerate(cells_of.items()):
        colour = looks[method].colour
        values = [100 * cell.metrics["ece"].value for cell in cells]
        axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.55, markersize=6)
        if values:
            axes.plot(np.mean(values), row, "|", color=colour, markersize=15, markeredgewidth=2.0)


def draw_true_error(axes: Axes, groups_of: GroupsByMethod, looks: Looks) -> None:
    """Draw the measured ECE (filled) and the true calibration error (open)."""
    _name_rows(axes, groups_of)
    for row, (method, groups) in enumerate(groups_of.items()):
        colour = looks[method].colour
        for group in groups:
            ece = 100 * group.metrics["ece"].mean
            true_error = 100 * group.others["true_error"].mean
            axes.plot((ece, true_error), (row, row), color=GREY, linewidth=2.0, zorder=1)
            axes.plot(ece, row, "o", color=colour, markersize=7)
            axes.plot(true_error, row, "o", color=colour, markersize=7, markerfacecolor="#ffffff")


def draw_selection(axes: Axes, group: GroupNumbers, _looks: Looks) -> None:
    """Draw the accuracy of each rule that picks one of k answers, and of the greedy answer.

    The group must have sampled answers, see `make_selection_pictures`. The looks of methods are not used: the curves
    are rules, which have the looks of RULE_LOOKS.
    """
    sizes = sorted(group.selection)
    for rule, look in RULE_LOOKS.items():
        values = [100 * group.selection[k][rule].mean for k in sizes]
        axes.plot(sizes, values, look.line, color=look.colour, markersize=4, linewidth=1.3, label=rule)
    greedy = 100 * group.metrics["accuracy"].mean
    axes.axhline(greedy, color=RED, linewidth=1.0, linestyle=(0, (5, 2)), label="one greedy answer")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(k) for k in sizes])


def draw_histogram(axes: Axes, content: HistogramContent, _looks: Looks) -> None:
    """Draw how often each confidence occurs, with the wrong answers stacked on the right ones.

    The looks of methods are not used, because a panel shows a single method.
    """
    answers = content.answers
    right = answers.confidence[answers.correct]
    wrong = answers.confidence[~answers.correct]
    edges = np.linspace(0, 1, content.bins + 1)
    share_of_answer = 1 / len(answers)  # so that the bars show shares of all answers and not counts
    axes.hist(
        [right, wrong],
        edges.tolist(),
        weights=[np.full(len(right), share_of_answer), np.full(len(wrong), share_of_answer)],
        label=["right", "wrong"],
        color=[BLUE, RED],
        stacked=True,
        histtype="stepfilled",
    )
    for patch in axes.patches:
        patch.sticky_edges.y.extend([0, 1])  # no margin below 0 % and above 100 %


def draw_risk(axes: Axes, curves: Mapping[str, RiskCoverage], looks: Looks) -> None:
    """Draw one curve per method: how many answers are wrong if only the most confident ones are given."""
    for position, (method, curve) in enumerate(curves.items()):
        axes.step(
            curve.coverage,
            curve.risk,
            CURVE_STYLES[position % len(CURVE_STYLES)],
            where="pre",  # a threshold below this coverage has the risk of this point
            color=looks[method].colour,
            linewidth=1.4,
            label=method_title(method),
        )
    highest = axes.get_ylim()[1]
    axes.set_ylim(0, min(1, highest))


def draw_history(axes: Axes, content: HistoryContent, looks: Looks) -> None:
    """Draw a validation metric over the steps: for each method, the mean over the seeds that have the value."""
    for method, runs in content.runs_of.items():
        values_at: dict[float, list[float]] = {}  # step -> values of the seeds
        for training in runs:
            for checkpoint in training.history:
                if "step" in checkpoint and content.metric in checkpoint:
                    values_at.setdefault(checkpoint["step"], []).append(checkpoint[content.metric])
        steps = sorted(values_at)
        means = [100 * np.mean(values_at[step]) for step in steps]
        look = looks[method]
        line = f"{look.marker}-"
        axes.plot(steps, means, line, color=look.colour, markersize=4, linewidth=1.3, label=method_title(method))


class FigureKind(NamedTuple):
    """How a kind of figure is drawn.

    Attributes:
        draw: draws the content of a panel on its axes.
        x: label of the x axis.
        y: label of the y axis.
        height: height of a panel in inches; None for panels with a row per method, whose number sets the height.
        same_axes: whether all panels share the same axes.
        max_columns: maximum number of panels side by side.
        in_shares: whether both axes are shares of answers.
    """

    draw: Callable[[Axes, Any, Looks], None]
    x: str
    y: str = ""
    height: float | None = None
    same_axes: bool = True
    max_columns: int = 5
    in_shares: bool = False


KINDS = {
    "ece": FigureKind(draw_chance, x=ECE),
    "scatter": FigureKind(draw_scatter, x=ACCURACY, y=ECE, height=3.6, same_axes=False, max_columns=3),
    "seeds": FigureKind(draw_seeds, x=ECE),
    "world": FigureKind(draw_true_error, x=ECE),  # for generated tasks, whose posteriors are known
    "confidence-at-k": FigureKind(draw_selection, x="k", y=ACCURACY, height=2.6),
    "histogram": FigureKind(draw_histogram, x="Confidence", y="Share of answers", height=2.3, in_shares=True),
    "risk": FigureKind(
        draw_risk, x="Coverage (share answered)", y="Risk (share of those wrong)", height=5.0, in_shares=True
    ),
    "history": FigureKind(draw_history, x="Step", y="Per cent", height=3.6, same_axes=False),
}
