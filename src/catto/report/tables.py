"""The tables of the report: tables.toml describes them, and here they are filled with numbers.

The paper's printed numbers are in `paper.csv`, in the units of our tables: `table` is the kind of table and `quantity`
the metric of the column that they are printed beside. They are copied from its tables (its text differs in places);
what its captions call variance is the standard deviation over five seeds. Of the deviations of Confidence@k, one row is
printed twice (RCFT) and none for BCE, which is therefore missing. Minutes are those of one A100.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import isnan
from typing import Literal

from pydantic import TypeAdapter

from catto import methods
from catto.measure import MOST_FORCED
from catto.methods import Budget
from catto.metrics.statistics import Interval, NullBand
from catto.report.measuring import papers_budget
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results, Training, supported_decimals
from catto.report.render import EMPTY, Column, Entry, Line, Table

Setting = Literal["in", "out", "any"]  # in distribution: tested on the task that it was trained on

# In the paper's order of columns; other tasks follow by name.
TASK_TITLES = {
    "reward_bench_2": "Reward Bench 2",
    "snli": "SNLI",
    "anli": "ANLI",
    "tldr": "TL;DR",
    "commonsense_qa": "CommonsenseQA",
    "mmlu": "MMLU",
    "witnesses": "Witnesses",
}
BUDGET_TITLES: dict[Budget | None, str] = {"paper": "Paper's budget", "matched": "Matched budget", None: "One budget"}
SETTING_TITLES: dict[Setting, str] = {"in": "In distribution", "out": "Out of distribution"}
SETTING_STEMS: dict[Setting, str] = {"in": "in-distribution", "out": "out-of-distribution"}
PAPERS_K = (4, 8)
PAPERS_SOURCE = "mmlu"  # what the models of the paper's out-of-distribution table were trained on

method_order = methods.order


def task_title(task: str) -> str:
    """Return the heading of a task's columns."""
    return TASK_TITLES.get(task, task)


def task_order(task: str) -> tuple[int, str]:
    """Return the sort key of a task's columns."""
    return (list(TASK_TITLES).index(task) if task in TASK_TITLES else len(TASK_TITLES), task)


def method_title(method: str) -> str:
    """Return the heading of a method's row."""
    return methods.method(method).title if methods.known(method) else method


def method_group(method: str) -> str:
    """Return the block of rows that a method belongs to: SFT, DPO or Other."""
    return methods.method(method).group if methods.known(method) else "Other"


def setting_title(trained_on: str, task: str) -> str:
    """Name a task, and what the model was trained on where that is another.

    >>> setting_title("mmlu", "snli")
    'SNLI, trained on MMLU'
    """
    return task_title(task) if trained_on == task else f"{task_title(task)}, trained on {task_title(trained_on)}"


def place_stem(trained_on: str, task: str) -> str:
    """Return the part of a file's name that says what was tested, and what it was trained on where that is another."""
    return task if trained_on == task else f"{task}-from-{trained_on}"


def printed(kind: str, method: str, quantity: str, task: str) -> str:
    """Return the paper's number as it prints it; empty where it prints none.

    >>> printed("in", "dpo+catto", "ece", "snli")
    '19.13'
    """
    return _papers_numbers().get((kind, method, quantity, task), "")


@cache
def _papers_numbers() -> dict[tuple[str, str, str, str], str]:
    text = (resources.files("catto.report") / "paper.csv").read_text(encoding="utf-8")
    return {
        (row["table"], row["method"], row["quantity"], task): row[task]
        for row in csv.DictReader(text.splitlines())
        for task in row.keys() & TASK_TITLES.keys()
    }


# ---- tables of results


@dataclass(frozen=True)
class Spec:
    """One kind of table, as tables.toml describes it: a table for each setting and budget, columns for each task.

    shows: the mean over seeds, the mean with its mark, these with interval, null band and difference to DPO, or the
    deviation over seeds. needs: what a group without it is left out for. each: one table for each task and
    training set.
    """

    kind: str
    stem: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    settings: tuple[Setting, ...] = ("in",)
    shows: Literal["mean", "short", "all", "std"] = "mean"
    needs: str = "accuracy"  # a number, "selection" or "training"
    each: bool = False


@cache
def specs() -> tuple[Spec, ...]:
    """Read tables.toml: one Spec for each setting."""
    text = (resources.files("catto.report") / "tables.toml").read_text(encoding="utf-8")
    single = []
    for spec in TypeAdapter(tuple[Spec, ...]).validate_python(tomllib.loads(text)["table"]):
        for setting in spec.settings:
            place = SETTING_TITLES.get(setting, "")
            texts = {"setting": setting, "stem": SETTING_STEMS.get(setting), "place": place, "where": place.lower()}
            named = {key: getattr(spec, key).format(**texts) for key in ("kind", "stem", "title")}
            single.append(replace(spec, settings=(setting,), **named))
    return tuple(single)


def of_setting(numbers: Numbers, setting: Setting, budget: Budget | None) -> list[tuple[int, GroupNumbers]]:
    """Return the groups of one block, each with its index in `numbers.groups`."""
    return [
        (index, group)
        for index, group in enumerate(numbers.groups)
        if group.budget == budget and setting in ("any", "in" if group.trained_on == group.task else "out")
    ]


def tasks_of(groups: Iterable[tuple[int, GroupNumbers]]) -> list[str]:
    """Return the tasks of the groups in the order of columns."""
    return sorted({group.task for _, group in groups}, key=task_order)


def all_tables(numbers: Numbers, results: Results) -> list[Table]:
    """Build every table of the report, in order, without those that have no number."""
    tables = [
        summary(numbers),
        *group_tables(numbers, *{spec.kind for spec in specs()} - {"summary", "rates", "training"}),
        *training_tables(results),
    ]
    return [table for table in tables if any(e.value is not None for line in table.lines for e in line.entries)]


def summary(numbers: Numbers) -> Table:
    """Build the table of the first screen: the groups that it shows, a line for each method, with means over the tasks.

    Decimals are those that N supports. Bold marks all that cannot be told apart from the best, unless these are all.
    """
    groups, verdict = numbers.first_screen, numbers.verdict
    (spec,) = (spec for spec in specs() if spec.kind == "summary")
    tasks, sizes, n = tasks_of(groups), _sizes(groups), min(group.n for _, group in groups)
    columns = []
    for column in spec.columns:
        if (column.metric != "true_error" or all(group.named("true_error") for _, group in groups)) and (
            sizes or not column.rule
        ):
            texts = {key: getattr(column, key).format(k=max(sizes, default=0)) for key in ("name", "metric")}
            digits = supported_decimals(n) + (0 if column.scale == 100 else 2)
            columns.append(replace(column, k=max(sizes, default=0), decimals=digits, **texts))
    lines = []
    for method in sorted({group.method for _, group in groups}, key=method_order):
        mine = [(index, group) for index, group in groups if group.method == method]
        entries = [_over_tasks(spec, column, mine) for column in columns]
        if verdict is not None and method in verdict.leaders and len(verdict.leaders) < len(verdict.losses):
            entries = [
                replace(entry, best=column.metric == verdict.metric)
                for entry, column in zip(entries, columns, strict=True)
            ]
        lines.append(Line(method, method_title(method), method_group(method), tuple(entries)))
    budget = groups[0][1].budget
    facts = [", ".join(map(task_title, tasks)), f"N = {n:,}", *([BUDGET_TITLES[budget].lower()] if budget else [])]
    return Table(spec.stem, ", ".join(facts), spec.caption, tuple(columns), tuple(lines), None, spec.kind)


def _over_tasks(spec: Spec, column: Column, groups: Sequence[tuple[int, GroupNumbers]]) -> Entry:
    """Print the mean over tasks; of chance the null band, or in how many of several tasks the ECE is within it.

    The share of forced answers alone says where numbers describe the fallback.
    """
    (_, first), count = groups[0], len(groups)
    if column.metric == "chance" and count > 1:
        return Entry(None, f"in {sum(group.within_null for _, group in groups)} of {count} tasks")
    if column.metric == "chance":
        low, high = 100 * first.null.low, 100 * first.null.high
        return Entry(None, f"{low:.{column.decimals}f} to {high:.{column.decimals}f}", null=(low, high))
    entries = [_entry(spec, column, index, group) for index, group in groups]
    forced = "forced" if column.metric == "fallback_rate" and any(entry.forced for entry in entries) else ""
    if count == 1:
        return replace(entries[0], forced=forced)
    values = [entry.value for entry in entries if entry.value is not None]
    value = sum(values) / count
    return Entry(value, f"{value:.{column.decimals}f}", forced=forced) if len(values) == count else EMPTY


def _sizes(groups: Iterable[tuple[int, GroupNumbers]]) -> list[int]:
    """Return the numbers of candidates to show: the paper's where they were measured, else the largest."""
    measured = {k for _, group in groups for k in group.selection}
    return [k for k in PAPERS_K if k in measured] or sorted(measured)[-1:]


def group_tables(numbers: Numbers, *kinds: str) -> list[Table]:
    """Build the tables of these kinds, in the order of tables.toml, for every budget."""
    tables = []
    for spec in (spec for spec in specs() if spec.kind in kinds):
        for budget in numbers.budgets:
            groups = of_setting(numbers, spec.settings[0], budget)
            groups = [
                one for one in groups if (one[1].selection if spec.needs == "selection" else one[1].named(spec.needs))
            ]
            parts: dict[tuple[bool, tuple[int, str], str], list[tuple[int, GroupNumbers]]] = {}
            for index, group in groups:
                apart = group.trained_on != group.task, task_order(group.task), group.trained_on
                parts.setdefault(apart if spec.each else (False, (0, ""), ""), []).append((index, group))
            tables += [_group_table(spec, parts[key], budget, _sizes(groups)) for key in sorted(parts)]
    return tables


def _group_table(
    spec: Spec, groups: Sequence[tuple[int, GroupNumbers]], budget: Budget | None, sizes: Sequence[int]
) -> Table:
    """Build one table: a line for each method; a column takes the group of its task."""
    name, title, tasks = spec.stem, spec.title, tasks_of(groups)
    if spec.each:
        trained_on = groups[0][1].trained_on
        name += f"-{place_stem(trained_on, tasks[0])}"
        title += f": {setting_title(trained_on, tasks[0])}"
    repeated = [(column, k) for column in spec.columns for k in (sizes if column.rule else [0])]
    if spec.each:
        repeated.sort(key=lambda pair: pair[1])
    columns = []
    for task in tasks:
        for column, k in repeated:
            texts = {key: getattr(column, key).format(k=k) for key in ("name", "metric", "top")}
            texts["top"] = texts["top"] if spec.each else task_title(task)
            columns.append(replace(column, task=task, k=k, **texts))
    lines = []
    for method in sorted({group.method for _, group in groups}, key=method_order):
        by_task = {group.task: (index, group) for index, group in groups if group.method == method}
        entries = (
            _entry(spec, column, *by_task[column.task]) if column.task in by_task else EMPTY for column in columns
        )
        lines.append(Line(method, method_title(method), method_group(method), tuple(entries)))
    title += f", {BUDGET_TITLES[budget].lower()}"
    name += f"-{budget}" if budget else ""
    return Table(name, title, spec.caption, tuple(columns), _best_marked(lines, columns), budget, spec.kind)


def _entry(spec: Spec, column: Column, place: int, group: GroupNumbers) -> Entry:
    """Print a group's number with what this kind of table shows of it."""
    spread = group.selection.get(column.k, {}).get(column.rule) if column.rule else group.named(column.metric)
    if spread is None:
        return replace(EMPTY, text="none") if column.metric == "risk_threshold" else EMPTY
    papers = group.papers_budget and group.trained_on in (group.task, PAPERS_SOURCE)
    paper = printed(spec.kind, group.method, column.metric, group.task) if papers else ""
    value, std, scale = spread.mean, spread.std, column.scale
    if spec.shows == "std":
        if std is None:
            return replace(EMPTY, paper=paper)
        value, std = std, None
    std = None if std is None else scale * std
    entry = Entry(scale * value, f"{scale * value:.{column.decimals}f}", std, paper=paper, group=place, scale=scale)
    if column.metric == "auroc_within":
        entry = replace(entry, notes=(f"in {group.others['questions_with_both'].mean:g} of {group.n:,} questions",))
    if column.metric == "risk_threshold" and group.others["risk_promised"].mean < 1:
        promised = round(group.others["risk_promised"].mean * len(group.seeds))
        entry = replace(entry, notes=(f"in {promised} of {len(group.seeds)} seeds",))
    versus = group.versus.get(column.metric)
    if spec.shows in ("short", "all") and versus is not None:
        entry = replace(entry, mark=versus.mark(column.metric))
    if spec.shows == "all":
        interval = group.intervals[column.metric]
        entry = replace(
            entry,
            interval=_span(interval, scale),
            null=_span(group.null, scale) if column.metric == "ece" else None,
            versus=versus,
            notes=_instead_of_interval(group) if interval.reason is not None else (),
        )
    share = group.others["sample_fallback_rate" if spec.needs == "selection" else "fallback_rate"].mean
    return replace(entry, forced=f"{100 * share:.0f} % forced", mark="") if share > MOST_FORCED else entry


def _instead_of_interval(group: GroupNumbers) -> tuple[str, ...]:
    """Return what is printed below an ECE outside its own interval, besides its null band."""
    notes = [f"debiased {100 * group.metrics['debiased_ece'].mean:.2f}"]
    gap = group.gap
    if not isnan(gap.low):
        notes.append(f"conf. - acc. {100 * gap.value:+.2f} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]")
    return tuple(notes)


def _span(band: Interval | NullBand, scale: float) -> tuple[float, float] | None:
    return None if isnan(band.low) else (scale * band.low, scale * band.high)


def _best_marked(lines: Sequence[Line], columns: Sequence[Column]) -> tuple[Line, ...]:
    """Set `best` on the highest or lowest printed value of each block and column; forced answers cannot win."""

    def wins(line: Line, place: int) -> bool:
        rivals = [other.entries[place] for other in lines if other.block == line.block]
        rivals = [entry for entry in rivals if entry.value is not None and not entry.forced]
        if line.entries[place] not in rivals or len(rivals) < 2 or columns[place].better is None:
            return False
        pick = max if columns[place].better == "higher" else min
        return line.entries[place].text == pick(rivals, key=lambda entry: entry.value or 0.0).text

    marked = []
    for line in lines:
        entries = (replace(entry, best=wins(line, place)) for place, entry in enumerate(line.entries))
        marked.append(replace(line, entries=tuple(entries)))
    return tuple(marked)


# ---- tables of training


def trained_cells(results: Results) -> list[tuple[Cell, Training]]:
    """Return one cell for each trained model: the one tested where it was trained, else its first test."""
    models: dict[tuple[str, str, Budget | None, int], tuple[Cell, Training]] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.task != cell.trained_on):
        if cell.training is not None:
            models.setdefault((cell.trained_on, cell.method, cell.budget, cell.seed), (cell, cell.training))
    return list(models.values())


def trained_rows(trained: Sequence[tuple[Cell, Training]]) -> list[tuple[str, Budget | None]]:
    """Return the methods and budgets of the trained models, in the order of the tables."""
    rows = {(cell.method, cell.budget) for cell, _ in trained}
    return sorted(rows, key=lambda row: (method_order(row[0]), row[1] != "paper"))


def by_preferences(name: str) -> bool:
    """Return whether a method is trained on pairs."""
    return methods.known(name) and methods.method(name).stage == "preference"


def budget_note(results: Results, budget: Budget | None) -> str:
    """Say how long the preference methods of a budget trained, as recorded; empty where nothing is."""
    efforts: dict[str, list[str]] = {}
    shown = [one for one in trained_cells(results) if one[0].budget in (None, budget) and by_preferences(one[0].method)]
    for name, _ in trained_rows(shown):
        trainings = [training for cell, training in shown if cell.method == name and training.rows and training.epochs]
        if trainings:
            pairs, epochs = _range([one.rows for one in trainings]), _range([one.epochs for one in trainings])
            kept = _range([one.epochs if one.kept_epochs is None else one.kept_epochs for one in trainings])
            early = "" if kept == epochs else f", kept after {kept}"
            efforts.setdefault(f"{pairs} pairs, epochs: {epochs}{early}", []).append(method_title(name))
    return "; ".join(f"{', '.join(names)}: {effort}" for effort, names in efforts.items())


def _range(values: Iterable[float | None]) -> str:
    """Print the lowest and the highest value, with at most two decimals."""
    known = [round(value, 2) for value in values if value is not None]
    low, high = (f"{value:,.0f}" if value == int(value) else f"{value:,}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def training_tables(results: Results) -> list[Table]:
    """Build the learning rates of every seed, a table for each training set; then time, tokens and kept steps."""
    rates, effort = (spec for spec in specs() if spec.needs == "training")
    trained, tables = trained_cells(results), []
    tasks = sorted({cell.trained_on for cell, _ in trained}, key=task_order)
    for task in tasks:
        shown = [one for one in trained if one[0].trained_on == task and by_preferences(one[0].method)]
        seeds = map(str, sorted({cell.seed for cell, _ in shown}))
        columns = tuple(replace(rates.columns[0], name=seed, metric=seed, task=task) for seed in seeds)
        name, title = f"{rates.stem}-{task}", f"{rates.title} {task_title(task)}"
        lines = _training_lines("rates", shown, columns)
        tables.append(Table(name, title, rates.caption, columns, lines, None, rates.kind))
    columns = tuple(replace(one, top=task_title(task), task=task) for task in tasks for one in effort.columns)
    caption, lines = effort.caption, _training_lines("training", trained, columns)
    caption = caption.format(keep=results.recipe.get("keep", "as trained"))
    return [*tables, Table(effort.stem, effort.title, caption, columns, lines, None, effort.kind)]


def _training_lines(kind: str, trained: Sequence[tuple[Cell, Training]], columns: Sequence[Column]) -> tuple[Line, ...]:
    """Build a line for each method and budget; a column of learning rates takes the training of its seed."""
    lines = []
    for name, budget in trained_rows(trained):
        entries = []
        for column in columns:
            trainings = [
                training
                for cell, training in trained
                if (cell.method, cell.budget, cell.trained_on) == (name, budget, column.task)
                and (kind != "rates" or str(cell.seed) == column.metric)
            ]
            entry = _effort("rate" if kind == "rates" else column.metric, trainings)
            if entry.value is not None and all(papers_budget(name, budget, training) for training in trainings):
                entry = replace(entry, paper=printed(kind, name, column.metric, column.task))
            entries.append(entry)
        title = method_title(name) + (f" ({BUDGET_TITLES[budget].lower()})" if budget else "")
        lines.append(Line(name, title, method_group(name), tuple(entries)))
    return tuple(lines)


# What a training says of its effort; None where it was not recorded.
EFFORTS: dict[str, Callable[[Training], float | None]] = {
    "rate": lambda one: one.learning_rate,
    "minutes": lambda one: None if one.seconds is None else one.seconds / 60,
    "each": lambda one: 1e3 * one.seconds / one.rows / one.epochs if one.seconds and one.rows and one.epochs else None,
    "tokens": lambda one: None if one.tokens is None else one.tokens / 1e6,
    "kept": lambda one: one.kept_step if one.steps else None,
}


def _effort(quantity: str, trainings: Sequence[Training]) -> Entry:
    """Print the mean of a quantity over the seeds that recorded it; kept steps as a range, a rate as it is."""
    recorded = [(one, value) for one in trainings if (value := EFFORTS[quantity](one)) is not None]
    if not recorded:
        return EMPTY
    values = [value for _, value in recorded]
    mean = sum(values) / len(values)
    if quantity == "kept":
        return Entry(mean, f"{_range(values)} of {_range(one.steps for one, _ in recorded)}")
    return Entry(mean, f"{mean:g}" if quantity == "rate" else f"{mean:.2f}")
