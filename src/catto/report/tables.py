"""Tables as data: columns, lines, and entries that carry value, interval, null band, mark and the paper's number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from catto import methods
from catto.methods import Budget
from catto.report import paper
from catto.report.names import budget_title, method_group, method_order, method_title, task_order, task_title
from catto.report.numbers import GroupNumbers, Numbers, Spread, Versus

__all__ = ["LEGEND", "Column", "Entry", "Line", "Table", "grouped", "marked", "of_setting", "score_tables"]

Setting = Literal["in", "out"]
Better = Literal["higher", "lower"] | None
# Below this, and with an interval on its side of 0, a difference to DPO gets its mark.
ALPHA = 0.05
LEGEND = (
    "Mean over seeds, in per cent. [a, b]: 95 % bootstrap interval over questions. null a to b: where the ECE of a "
    "perfectly calibrated model with the same confidences falls 95 % of the time. "
    f"* better and † worse than DPO of the same budget on the same questions (swap test, p < {ALPHA}, and the 95 % "
    "interval of the difference lies on the same side of 0; not corrected for the number of comparisons). "
    "paper: the number printed in the paper."
)


@dataclass(frozen=True)
class Entry:
    """One number as it is printed; numbers are in the unit of the table (per cent, minutes, ...)."""

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

    def std_text(self) -> str:
        """The deviation with as many decimals as the value."""
        return f"{self.std or 0.0:.{len(self.text.partition('.')[2])}f}"


EMPTY = Entry(None, "-")


@dataclass(frozen=True)
class Column:
    """A column: the heading it shares with its neighbours, its own, and what it is about."""

    top: str
    name: str
    task: str = ""
    metric: str = ""
    better: Better = None


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


def marked(versus: Versus | None, better: str | None) -> str:
    """`*` where significantly better than DPO, a dagger where significantly worse.

    Both tests have to agree. Of two nearly equal models the swap test notices a shift of every confidence by 0.001,
    whatever that does to ECE in another draw of questions; the interval asks for that. It has to lie on the side of
    the difference: ECE grows under resampling, so an interval of a small difference can lie on the other one.
    """
    if versus is None or better is None or versus.p_value >= ALPHA:
        return ""
    more = versus.difference > 0
    if not (versus.low > 0 if more else versus.high < 0):
        return ""
    return "*" if more == (better == "higher") else "†"


def of_setting(numbers: Numbers, setting: Setting, budget: Budget | None) -> list[tuple[int, GroupNumbers]]:
    """The groups of one block, each with its place in `numbers.groups`."""
    return [
        (place, group)
        for place, group in enumerate(numbers.groups)
        if group.budget == budget and (group.trained_on == group.task) == (setting == "in")
    ]


Cellwise = Callable[[int, GroupNumbers, Column], Entry]


def grouped(groups: Sequence[tuple[int, GroupNumbers]], columns: Sequence[Column], entry: Cellwise) -> tuple[Line, ...]:
    """One line a method; a column takes the group of its task. The best of each block is told apart."""
    lines = []
    for method in sorted({group.method for _, group in groups}, key=method_order):
        by_task = {group.task: (place, group) for place, group in groups if group.method == method}
        entries = [entry(*by_task[column.task], column) if column.task in by_task else EMPTY for column in columns]
        lines.append(Line(method, method_title(method), method_group(method), tuple(entries)))
    return best_marked(lines, columns)


def best_marked(lines: Iterable[Line], columns: Sequence[Column]) -> tuple[Line, ...]:
    """Set `best` on the highest or lowest printed value of each block and column."""
    found = list(lines)
    best: set[tuple[str, int, str]] = set()
    for place, column in enumerate(columns):
        for block in {line.block for line in found}:
            entries = [line.entries[place] for line in found if line.block == block]
            values = [entry for entry in entries if entry.value is not None]
            if column.better and len(values) > 1:
                pick = max if column.better == "higher" else min
                best.add((block, place, pick(values, key=lambda entry: entry.value or 0.0).text))
    return tuple(
        replace(
            line,
            entries=tuple(
                replace(entry, best=(line.block, place, entry.text) in best) for place, entry in enumerate(line.entries)
            ),
        )
        for line in found
    )


def tasks_of(groups: Iterable[tuple[int, GroupNumbers]]) -> list[str]:
    """The tasks of the groups in the order of columns."""
    return sorted({group.task for _, group in groups}, key=task_order)


def paper_applies(group: GroupNumbers) -> bool:
    """The paper's models are those of its own budget; a method that both budgets share is the same model in both."""
    return group.budget != "matched" or not methods.known(group.method) or not methods.method(group.method).budgeted


def printed(value: float | None) -> str:
    """A number of the paper with its two decimals, empty where there is none."""
    return "" if value is None else f"{value:.2f}"


def _score(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread, interval = group.metrics[column.metric], group.intervals[column.metric]
    known = paper.score(
        "in" if group.task == group.trained_on else "out",
        group.method,
        group.task,
        "accuracy" if column.metric == "accuracy" else "ece",
    )
    versus = group.versus.get(column.metric)
    return Entry(
        value=100 * spread.mean,
        text=percent(spread.mean),
        std=None if spread.std is None else 100 * spread.std,
        interval=_span(interval.low, interval.high),
        null=_span(group.null.low, group.null.high) if column.metric == "ece" else None,
        versus=versus,
        mark=marked(versus, column.better),
        paper=printed(known) if paper_applies(group) else "",
        group=place,
    )


def _span(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (100 * low, 100 * high)


def score_columns(tasks: Iterable[str]) -> tuple[Column, ...]:
    """Accuracy and ECE of each task."""
    return tuple(
        column
        for task in tasks
        for column in (
            Column(task_title(task), "Acc. ↑", task, "accuracy", "higher"),
            Column(task_title(task), "ECE ↓", task, "ece", "lower"),
        )
    )


SETTING_TITLES: dict[Setting, str] = {"in": "In distribution", "out": "Out of distribution"}
SETTING_STEMS: dict[Setting, str] = {"in": "in-distribution", "out": "out-of-distribution"}


def stem(name: str, budget: Budget | None) -> str:
    """A table's file name."""
    return f"{name}-{budget}" if budget else name


def score_tables(numbers: Numbers, setting: Setting) -> list[Table]:
    """Accuracy and ECE of every method and task: one table a budget."""
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
    known = paper.score(
        "in" if group.task == group.trained_on else "out",
        group.method,
        group.task,
        "accuracy" if column.metric == "accuracy" else "ece",
        std=True,
    )
    return spread_entry(spread, printed(known) if paper_applies(group) else "", place)


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
            columns = tuple(replace(column, better=None) for column in score_columns(tasks_of(groups)))
            title = f"{SETTING_TITLES[setting]}: standard deviation over seeds, {budget_title(budget).lower()}"
            lines = grouped(groups, columns, _deviation)
            name = stem(f"deviation-{SETTING_STEMS[setting]}", budget)
            caption = "Standard deviation over seeds (n - 1), in points. paper: the number printed in the paper."
            found.append(Table(name, title, caption, columns, lines, budget, f"std-{setting}"))
    return found
