"""Tables as data: columns, lines, and entries that carry value, interval, null band, mark and the paper's number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from catto.evaluation.metrics import METRICS
from catto.evaluation.sources import MOST_FORCED
from catto.evaluation.statistics import ALPHA
from catto.methods import Budget
from catto.report import paper
from catto.report.names import budget_title, method_group, method_order, method_title, task_order, task_title
from catto.report.numbers import GroupNumbers, Numbers, Spread, Versus

__all__ = ["LEGEND", "MARKS", "Column", "Entry", "Line", "Table", "grouped", "of_setting", "score_tables"]

Setting = Literal["in", "out"]
Better = Literal["higher", "lower"] | None
MARKS = (
    f"p < {ALPHA} in a swap test after Holm's correction for all comparisons of the table, the 95 % interval of the "
    "difference on its side of 0, and a difference of at least 0.5 points (Brier score 0.005)"
)
LEGEND = (
    "Mean over seeds, in per cent; Brier score from 0 to 1. [a, b]: 95 % bootstrap interval over questions. null a to "
    "b: where the ECE of a perfectly calibrated model with the same confidences falls 95 % of the time. An ECE outside "
    "its own bootstrap interval has none; in its place stand the debiased ECE and the mean confidence less the "
    "accuracy with its interval. to DPO: the difference to DPO of the same budget on the same questions, its interval "
    f"and its corrected p-value. * better and † worse than DPO: {MARKS}. forced: above a fifth of the answers had to "
    "be forced, so the numbers describe the fallback and get no mark. paper: the number printed in the paper, where "
    "task, training set and budget are the paper's."
)


@dataclass(frozen=True)
class Entry:
    """One number as it is printed; numbers are in the unit of the table (per cent, minutes, ...).

    scale: what makes a share a number of this unit. notes: what else stands under the value. forced: stands above it,
    where the number describes the fallback.
    """

    value: float | None
    text: str
    std: float | None = None
    interval: tuple[float, float] | None = None
    null: tuple[float, float] | None = None
    versus: Versus | None = None
    mark: str = ""
    paper: str = ""
    best: bool = False
    group: int | None = None
    scale: float = 100.0
    notes: tuple[str, ...] = ()
    forced: str = ""

    def printed(self, number: float, signed: bool = False) -> str:
        """A number with as many decimals as the value."""
        return f"{number:{'+' if signed else ''}.{len(self.text.partition('.')[2])}f}"

    def details(self) -> list[str]:
        """What stands under the value: interval or deviation, null band, notes, the difference to DPO."""
        found = []
        if self.interval is not None:
            found.append(f"[{', '.join(map(self.printed, self.interval))}]")
        elif self.std is not None:
            found.append(f"± {self.printed(self.std)}")
        if self.null is not None:
            found.append(f"null {' to '.join(map(self.printed, self.null))}")
        found += self.notes
        if self.versus is not None:
            found += self._difference(self.versus)
        return found

    def _difference(self, versus: Versus) -> list[str]:
        p = versus.p_corrected
        judged = "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.2g}"
        found = [f"to DPO {self.printed(self.scale * versus.difference, signed=True)}{judged}"]
        if versus.low is not None and versus.high is not None:
            ends = (self.printed(self.scale * end, signed=True) for end in (versus.low, versus.high))
            found.append(f"[{', '.join(ends)}]")
        return found


EMPTY = Entry(None, "-")


@dataclass(frozen=True)
class Column:
    """A column: the heading it shares with its neighbours, its own, and what it is about.

    in_paper: whether a table in the paper's shape has it too.
    """

    top: str
    name: str
    task: str = ""
    metric: str = ""
    better: Better = None
    in_paper: bool = True


@dataclass(frozen=True)
class Line:
    """A row: the method it is about (or another heading) and one entry a column."""

    method: str
    title: str
    block: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """A table; `name` is its file's stem."""

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    budget: Budget | None = None
    kind: str = ""

    def in_papers_shape(self) -> Table:
        """The table without the columns that the paper's has not, for a page as narrow."""
        kept = [place for place, column in enumerate(self.columns) if column.in_paper]
        lines = (replace(line, entries=tuple(line.entries[place] for place in kept)) for line in self.lines)
        return replace(self, columns=tuple(self.columns[place] for place in kept), lines=tuple(lines))

    def blocks(self) -> list[tuple[str, list[Line]]]:
        """The lines by block, in order."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.block, []).append(line)
        return list(found.items())

    def tops(self) -> list[tuple[str, int]]:
        """The shared headings and how many columns each spans."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.top:
                found[-1] = (column.top, found[-1][1] + 1)
            else:
                found.append((column.top, 1))
        return found


def percent(value: float) -> str:
    """A share in per cent with two decimals, as the paper prints."""
    return f"{100 * value:.2f}"


def of_setting(numbers: Numbers, setting: Setting, budget: Budget | None) -> list[tuple[int, GroupNumbers]]:
    """The groups of one block, each with its place in `numbers.groups`."""
    return [
        (place, group)
        for place, group in enumerate(numbers.groups)
        if group.budget == budget and (group.trained_on == group.task) == (setting == "in")
    ]


Cellwise = Callable[[int, GroupNumbers, Column], Entry]


def of_answers(group: GroupNumbers) -> float:
    """The share of answers that had to be forced."""
    return group.fallback_rate.mean


def grouped(
    groups: Sequence[tuple[int, GroupNumbers]],
    columns: Sequence[Column],
    entry: Cellwise,
    forced: Callable[[GroupNumbers], float] = of_answers,
) -> tuple[Line, ...]:
    """One line a method; a column takes the group of its task. The best of each block is told apart.

    `forced`: the share of forced answers behind the numbers; where it is too high, the entry says so first and gets
    neither a mark nor the print of the best.
    """
    lines = []
    for name in sorted({group.method for _, group in groups}, key=method_order):
        by_task = {group.task: (place, group) for place, group in groups if group.method == name}
        entries = []
        for column in columns:
            found = entry(*by_task[column.task], column) if column.task in by_task else EMPTY
            share = forced(by_task[column.task][1]) if column.task in by_task else 0.0
            if share > MOST_FORCED and found.value is not None:
                found = replace(found, forced=f"{100 * share:.0f} % forced", mark="")
            entries.append(found)
        lines.append(Line(name, method_title(name), method_group(name), tuple(entries)))
    return best_marked(lines, columns)


def best_marked(lines: Iterable[Line], columns: Sequence[Column]) -> tuple[Line, ...]:
    """Set `best` on the highest or lowest printed value of each block and column."""
    found = list(lines)
    best: set[tuple[str, int, str]] = set()
    for place, column in enumerate(columns):
        for block in {line.block for line in found}:
            entries = [line.entries[place] for line in found if line.block == block]
            values = [entry for entry in entries if entry.value is not None and not entry.forced]
            if column.better and len(values) > 1:
                pick = max if column.better == "higher" else min
                best.add((block, place, pick(values, key=lambda entry: entry.value or 0.0).text))
    return tuple(
        replace(
            line,
            entries=tuple(
                replace(entry, best=not entry.forced and (line.block, place, entry.text) in best)
                for place, entry in enumerate(line.entries)
            ),
        )
        for line in found
    )


def tasks_of(groups: Iterable[tuple[int, GroupNumbers]]) -> list[str]:
    """The tasks of the groups in the order of columns."""
    return sorted({group.task for _, group in groups}, key=task_order)


def papers(group: GroupNumbers, value: float | None) -> str:
    """A number of the paper with its two decimals; empty where there is none, or the budget is not the paper's."""
    return "" if value is None or not group.papers_budget else f"{value:.2f}"


def _papers_score(group: GroupNumbers, metric: str, std: bool = False) -> str:
    setting = paper.setting_of(group.trained_on, group.task)
    return papers(group, paper.score(setting, group.method, group.task, metric, std))


def _score(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread, interval = group.metrics.get(column.metric), group.intervals[column.metric]
    if spread is None:
        return EMPTY
    percents = METRICS[column.metric].percent
    scale = 100.0 if percents else 1.0
    versus = group.versus.get(column.metric)
    return Entry(
        value=scale * spread.mean,
        text=percent(spread.mean) if percents else f"{spread.mean:.4f}",
        std=None if spread.std is None else scale * spread.std,
        interval=_span(interval.low, interval.high, scale),
        null=_span(group.null.low, group.null.high, scale) if column.metric == "ece" else None,
        versus=versus,
        mark="" if versus is None else versus.mark(column.metric),
        paper=_papers_score(group, column.metric),
        group=place,
        scale=scale,
        notes=_in_place_of_interval(group) if interval.reason is not None else (),
    )


def _in_place_of_interval(group: GroupNumbers) -> tuple[str, ...]:
    """What stands beside an ECE outside its own interval, with the null band that every ECE has."""
    debiased, gap = group.metrics["debiased_ece"].mean, group.gap
    found = [f"debiased {percent(debiased)}"]
    if gap.value is not None and gap.low is not None and gap.high is not None:
        found.append(f"conf. - acc. {100 * gap.value:+.2f} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]")
    return tuple(found)


def _span(low: float | None, high: float | None, scale: float) -> tuple[float, float] | None:
    return None if low is None or high is None else (scale * low, scale * high)


def score_columns(tasks: Iterable[str]) -> tuple[Column, ...]:
    """Accuracy and ECE of each task, which the paper's table has too, and beside them Brier score and AUROC."""
    return tuple(
        column
        for task in tasks
        for column in (
            Column(task_title(task), "Acc. ↑", task, "accuracy", "higher"),
            Column(task_title(task), "ECE ↓", task, "ece", "lower"),
            Column(task_title(task), "Brier ↓", task, "brier", "lower", in_paper=False),
            Column(task_title(task), "AUROC ↑", task, "auroc", "higher", in_paper=False),
        )
    )


SETTING_TITLES: dict[Setting, str] = {"in": "In distribution", "out": "Out of distribution"}
SETTING_STEMS: dict[Setting, str] = {"in": "in-distribution", "out": "out-of-distribution"}


def stem(name: str, budget: Budget | None) -> str:
    """A table's file name."""
    return f"{name}-{budget}" if budget else name


def score_tables(numbers: Numbers, setting: Setting) -> list[Table]:
    """Accuracy, ECE, Brier score and AUROC of every method and task: one table a budget."""
    found = []
    for budget in numbers.budgets:
        groups = of_setting(numbers, setting, budget)
        if groups:
            columns = score_columns(tasks_of(groups))
            title = f"{SETTING_TITLES[setting]}, {budget_title(budget).lower()}"
            lines = grouped(groups, columns, _score)
            found.append(Table(stem(SETTING_STEMS[setting], budget), title, LEGEND, columns, lines, budget, setting))
    return found


def _deviation(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread = group.metrics[column.metric]
    return spread_entry(spread, _papers_score(group, column.metric, std=True), place)


def spread_entry(spread: Spread, known: str, place: int) -> Entry:
    """A standard deviation over seeds; a dash where there is one seed."""
    if spread.std is None:
        return replace(EMPTY, paper=known)
    return Entry(value=100 * spread.std, text=percent(spread.std), paper=known, group=place)


def deviation_tables(numbers: Numbers, setting: Setting) -> list[Table]:
    """Standard deviations over seeds of accuracy and ECE."""
    found = []
    for budget in numbers.budgets:
        groups = of_setting(numbers, setting, budget)
        if groups:
            wanted = score_columns(tasks_of(groups))
            columns = tuple(replace(column, better=None) for column in wanted if column.in_paper)
            title = f"{SETTING_TITLES[setting]}: standard deviation over seeds, {budget_title(budget).lower()}"
            lines = grouped(groups, columns, _deviation)
            name = stem(f"deviation-{SETTING_STEMS[setting]}", budget)
            caption = "Standard deviation over seeds (n - 1), in points. paper: the number printed in the paper."
            found.append(Table(name, title, caption, columns, lines, budget, f"std-{setting}"))
    return found
