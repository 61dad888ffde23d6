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
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from itertools import product
from math import isnan
from typing import Literal

from pydantic import TypeAdapter

from catto import methods
from catto.measure import MOST_FORCED
from catto.methods import Budget
from catto.metrics.statistics import Interval, NullBand
from catto.report.measuring import PREFERENCE, has_papers_budget
from catto.report.numbers import Cell, CellPlace, GroupNumbers, Numbers, Results, Training, supported_decimals
from catto.report.render import Column, Entry, Line, Table

Setting = Literal["in", "out", "any"]  # see `CellPlace.setting`
Row = tuple[str, Budget | None]  # a method, and its budget where both are shown

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
BUDGET_TITLES: dict[Budget | None, str] = {"paper": "Paper's budget", "matched": "Matched budget"}
SETTING_TITLES: dict[Setting, str] = {"in": "In distribution", "out": "Out of distribution"}
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


def row_order(row: Row) -> tuple[object, ...]:
    """Return the sort key of a row."""
    return *method_order(row[0]), row[1] != "paper"


def setting_title(place: CellPlace) -> str:
    """Name a task, and what the model was trained on where that is another: `SNLI, trained on MMLU`."""
    return task_title(place.task) + ("" if place.setting == "in" else f", trained on {task_title(place.trained_on)}")


@cache
def papers_numbers() -> dict[tuple[str, str, str, str], str]:
    """Read the paper's numbers as it prints them: table, method, quantity, task -> text.

    >>> papers_numbers()["in", "dpo+catto", "ece", "snli"]
    '19.13'
    """
    text = (resources.files("catto.report") / "paper.csv").read_text(encoding="utf-8")
    return {
        (row["table"], row["method"], row["quantity"], task): row[task]
        for row in csv.DictReader(text.splitlines())
        for task in row.keys() & TASK_TITLES.keys()
    }


@dataclass(frozen=True)
class Spec:
    """One kind of table, as tables.toml describes it: a table for each setting and budget, columns for each task.

    shows: the mean over seeds, the mean with its mark, these with interval, null band and difference to DPO, or the
    deviation over seeds. needs: the number that a group without it is left out for. each: one table for each task and
    training set. notes: field of Entry -> what the caption says where an entry of the table has it.
    """

    kind: str
    stem: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    settings: tuple[Setting, ...] = ("in",)
    shows: Literal["mean", "short", "all", "std"] = "mean"
    needs: str = "accuracy"
    each: bool = False
    notes: dict[str, str] = field(default_factory=dict)


@cache
def specs() -> dict[str, Spec]:
    """Read tables.toml: stem -> Spec, one for each setting, in their order."""
    text = (resources.files("catto.report") / "tables.toml").read_text(encoding="utf-8")
    single = {}
    for spec in TypeAdapter(tuple[Spec, ...]).validate_python(tomllib.loads(text)["table"]):
        for setting in spec.settings:
            where = (place := SETTING_TITLES.get(setting, "")).lower()
            texts = {"setting": setting, "stem": where.replace(" ", "-"), "place": place, "where": where}
            named = {key: getattr(spec, key).format(**texts) for key in ("kind", "stem", "title")}
            single[named["stem"]] = replace(spec, settings=(setting,), **named)
    return single


def tasks_of(groups: Iterable[GroupNumbers]) -> list[str]:
    """Return the tasks of the groups in the order of columns."""
    return sorted({group.task for group in groups}, key=task_order)


def all_tables(numbers: Numbers, results: Results) -> list[Table]:
    """Build every table of the report, in order, without those that have no number."""
    kinds = {spec.kind for spec in specs().values()} - {"summary", "rates", "training"}
    tables = [summary(numbers), *group_tables(numbers, *kinds), *training_tables(results)]
    return [table for table in tables if any(e.value is not None for line in table.lines for e in line.entries)]


def _name_mean(spec: Spec, *, tasks: int, seeds: int) -> Spec:
    """Return the spec with a caption that names what its numbers are means over: only of what there are several."""
    averaged = []
    if tasks > 1:
        averaged.append("tasks")
    if seeds > 1:
        averaged.append("seeds")
    if not averaged or spec.shows == "std":
        return spec
    return replace(spec, caption=f"{spec.caption} Mean over {' and '.join(averaged)}.")


def _filled(spec: Spec, columns: Iterable[Column], rows: Iterable[Row], entry: Callable[[Row, Column], Entry]) -> Table:
    """Build a table with a line for each row, in order, of what `entry` says of each column."""
    columns, lines = tuple(columns), []
    for method, budget in sorted(set(rows), key=row_order):
        title = method_title(method) + (f" ({BUDGET_TITLES[budget].lower()})" if budget else "")
        block = methods.method(method).group if methods.known(method) else "Other"
        lines.append(Line(method, title, block, tuple(entry((method, budget), column) for column in columns)))
    entries = [entry for line in lines for entry in line.entries]
    notes = [note for name, note in spec.notes.items() if any(getattr(entry, name) for entry in entries)]
    explained = dict.fromkeys(column.note for column in columns if column.note)  # once for the columns of all tasks
    caption = " ".join([spec.caption, *notes, *explained])
    return Table(spec.stem, spec.title, caption, columns, tuple(lines), None, spec.kind)


# ---- tables of results


def summary(numbers: Numbers) -> Table:
    """Build the table of the first screen: the groups that it shows, a line for each method, with means over the tasks.

    Decimals are those that N supports. Bold marks all that cannot be told apart from the best, unless these are all.
    """
    spec, groups, verdict = specs()["summary"], numbers.first_screen, numbers.verdict
    n, k = min(group.n for group in groups), max(_sizes(groups), default=0)
    columns = []
    for column in spec.columns:
        unknown_truth = column.metric == "true_error" and not all(group.number("true_error") for group in groups)
        nothing_sampled = column.rule and not k
        if unknown_truth or nothing_sampled or _is_empty(column, groups):
            continue
        decimals = supported_decimals(n) + (0 if column.scale == 100 else 2)
        columns.append(column.fill(k, decimals=decimals))

    def entry(row: Row, column: Column) -> Entry:
        """Print the mean over tasks; of chance the null band, or in how many of several tasks the ECE is within it."""
        mine = [group for group in groups if group.method == row[0]]
        count, null, digits = len(mine), mine[0].null, column.decimals
        if column.metric == "chance" and count > 1:
            return Entry(text=f"in {sum(group.within_null for group in mine)} of {count} tasks")
        if column.metric == "chance":
            low, high = 100 * null.low, 100 * null.high
            return Entry(text=f"{low:.{digits}f} to {high:.{digits}f}", null=(low, high))
        entries = [_entry(spec, column, group) for group in mine]
        made, values = entries[0], [entry.value for entry in entries if entry.value is not None]
        if count > 1:
            mean = sum(values) / count
            made = Entry(mean, f"{mean:.{digits}f}") if len(values) == count else Entry()
        # The share of forced answers alone says where numbers describe the fallback.
        made.forced = "forced" if column.metric == "fallback_rate" and any(entry.forced for entry in entries) else ""
        if verdict is not None and len(verdict.leaders) < len(verdict.losses):
            made.best = column.metric == verdict.metric and row[0] in verdict.leaders
        return made

    budget = groups[0].budget
    facts = [*map(task_title, tasks_of(groups)), f"N = {n:,}", *([BUDGET_TITLES[budget].lower()] if budget else [])]
    spec = replace(spec, title=", ".join(facts))
    spec = _name_mean(spec, tasks=len(tasks_of(groups)), seeds=max(len(group.seeds) for group in groups))
    return _filled(spec, columns, ((group.method, None) for group in groups), entry)


def _is_empty(column: Column, groups: Iterable[GroupNumbers]) -> bool:
    """Return whether a column is left out: it is optional and no group has its number."""
    return column.optional and not any(group.number(column.metric) for group in groups)


def _sizes(groups: Iterable[GroupNumbers]) -> list[int]:
    """Return the numbers of candidates to show: the paper's where they were measured, and the largest."""
    measured = sorted({k for group in groups for k in group.selection})
    return [k for k in measured if k in (*PAPERS_K, measured[-1])]


def group_tables(numbers: Numbers, *kinds: str) -> list[Table]:
    """Build the tables of these kinds for every budget."""
    tables = []
    for spec, budget in product((spec for spec in specs().values() if spec.kind in kinds), numbers.budgets):
        groups = [group for group in numbers.block(spec.settings[0], budget) if group.number(spec.needs)]
        parts: dict[tuple[object, ...], list[GroupNumbers]] = {}
        for group in groups:
            apart = (group.setting, task_order(group.task), group.trained_on) if spec.each else ()
            parts.setdefault(apart, []).append(group)
        tables += [_group_table(spec, part, budget, _sizes(groups)) for _, part in sorted(parts.items())]
    return tables


def _group_table(spec: Spec, groups: Sequence[GroupNumbers], budget: Budget | None, sizes: Sequence[int]) -> Table:
    """Build one table: a line for each method; a column takes the group of its task."""
    name, title = spec.stem, spec.title
    repeated = [(column, k) for column in spec.columns for k in (sizes if column.rule else [0])]
    if spec.each:
        name, title = f"{name}-{groups[0].stem}", f"{title}: {setting_title(groups[0])}"
        repeated.sort(key=lambda pair: pair[1])
    columns = [
        column.fill(k, task=task, top=column.top if spec.each else task_title(task))
        for task in tasks_of(groups)
        for column, k in repeated
        if not _is_empty(column, groups)
    ]
    places = {(group.method, group.task): group for group in groups}
    if budget:
        name, title = f"{name}-{budget}", f"{title}, {BUDGET_TITLES[budget].lower()}"
    named = replace(spec, stem=name, title=title)
    named = _name_mean(named, tasks=1, seeds=max(len(group.seeds) for group in groups))
    rows = ((group.method, None) for group in groups)
    table = _filled(named, columns, rows, lambda row, column: _entry(spec, column, places.get((row[0], column.task))))
    return replace(table, budget=budget)


def _entry(spec: Spec, column: Column, group: GroupNumbers | None) -> Entry:
    """Print a group's number with what this kind of table shows of it."""
    if group is None:
        return Entry()
    spread = group.selection.get(column.k, {}).get(column.rule) if column.rule else group.number(column.metric)
    if spread is None:
        return Entry(text="none" if column.metric == "risk_threshold" else "-")
    value, std, scale = spread.mean, spread.std, column.scale
    entry = Entry(group=group, scale=scale)
    if group.papers_budget and group.trained_on in (group.task, PAPERS_SOURCE):
        entry.paper = papers_numbers().get((spec.kind, group.method, column.metric, group.task), "")
    if spec.shows == "std":
        if std is None:
            return entry
        value, std = std, None
    entry.value, entry.text = scale * value, f"{scale * value:.{column.decimals}f}"
    entry.std = None if std is None else scale * std
    if column.metric == "auroc_within":
        entry.notes = (f"in {group.others['questions_with_both'].mean:g} of {group.n:,} questions",)
    if column.metric == "preference_accuracy" and spec.shows == "all":
        entry.notes = (f"N = {group.others['preference_pairs'].mean:g}",)
    if column.metric == "risk_threshold" and (promised := group.others["risk_promised"].mean) < 1:
        entry.notes = (f"in {round(promised * len(group.seeds))} of {len(group.seeds)} seeds",)
    versus = group.versus.get(column.metric)
    if spec.shows in ("short", "all") and versus is not None:
        entry.mark = versus.mark(column.metric)
    if spec.shows == "all":
        interval, gap, entry.versus = group.intervals[column.metric], group.gap, versus
        entry.interval = _ends(interval, scale)
        entry.null = _ends(group.null, scale) if column.metric == "ece" else None
        if interval.reason is not None:  # an ECE outside its own interval: what holds instead
            entry.notes = (f"debiased {100 * group.metrics['debiased_ece'].mean:.2f}",)
            if not isnan(gap.low):
                ends = f"[{100 * gap.low:+z.2f}, {100 * gap.high:+z.2f}]"
                entry.notes += (f"conf. - acc. {100 * gap.value:+z.2f} {ends}",)
    share = group.others["sample_fallback_rate" if spec.needs == "sample_fallback_rate" else "fallback_rate"].mean
    if share > MOST_FORCED and column.metric not in PREFERENCE:  # which reads no answers of the model
        entry.forced, entry.mark = f"{100 * share:.0f} % forced", ""
    return entry


def _ends(band: Interval | NullBand, scale: float) -> tuple[float, float] | None:
    return None if isnan(band.low) else (scale * band.low, scale * band.high)


# ---- tables of training


def trained_cells(results: Results) -> list[tuple[Cell, Training]]:
    """Return one cell for each trained model: the one tested where it was trained, else its first test."""
    models: dict[tuple[str, str, Budget | None, int], tuple[Cell, Training]] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.setting):
        if cell.training is not None:
            models.setdefault((cell.trained_on, cell.method, cell.budget, cell.seed), (cell, cell.training))
    return list(models.values())


def by_preferences(name: str) -> bool:
    """Return whether a method is trained on pairs."""
    return methods.known(name) and methods.method(name).stage == "preference"


def budget_note(results: Results, budget: Budget | None) -> str:
    """Say how long the preference methods of a budget trained, as recorded; empty where nothing is."""
    trained: dict[str, list[Training]] = {}
    for cell, run in sorted(trained_cells(results), key=lambda pair: method_order(pair[0].method)):
        if cell.budget in (None, budget) and by_preferences(cell.method) and run.rows and run.epochs:
            trained.setdefault(cell.method, []).append(run)
    efforts: dict[str, list[str]] = {}
    for name, runs in trained.items():
        pairs, epochs = span([run.rows for run in runs]), span([run.epochs for run in runs])
        kept = span([run.epochs if run.kept_epochs is None else run.kept_epochs for run in runs])
        early = "" if kept == epochs else f", kept after {kept}"
        efforts.setdefault(f"{pairs} pairs, epochs: {epochs}{early}", []).append(method_title(name))
    return "; ".join(f"{', '.join(names)}: {effort}" for effort, names in efforts.items())


def span(values: Iterable[float | None], digits: int = 2) -> str:
    """Print the lowest and the highest value, with at most so many decimals, or the one that both are.

    >>> span([3.14, 3.149]), span([3.14, 1400], 1)
    ('3.14 to 3.15', '3.1 to 1,400')
    """
    known = [round(value, digits) for value in values if value is not None]
    low, high = (f"{value:,.0f}" if value == int(value) else f"{value:,}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


# What a training says of its effort; None where it was not recorded.
EFFORTS: dict[str, Callable[[Training], float | None]] = {
    "rate": lambda run: run.learning_rate,
    "minutes": lambda run: None if run.seconds is None else run.seconds / 60,
    "each": lambda run: 1e3 * run.seconds / run.rows / run.epochs if run.seconds and run.rows and run.epochs else None,
    "tokens": lambda run: None if run.tokens is None else run.tokens / 1e6,
    "kept": lambda run: run.kept_step if run.steps else None,
}


def training_tables(results: Results) -> list[Table]:
    """Build the learning rates of every seed, a table for each training set; then time, tokens and kept steps.

    There is a line for each method and budget: means over the seeds that recorded a quantity, kept steps as a range.
    """
    rates, effort, trained = specs()["learning-rates"], specs()["training"], trained_cells(results)
    tasks, tables = sorted({cell.trained_on for cell, _ in trained}, key=task_order), []

    def entry(spec: Spec, row: Row, column: Column) -> Entry:
        """Print the mean over the trainings of a row; a column of learning rates takes the training of its seed."""
        quantity, seed = ("rate", column.metric) if spec.kind == "rates" else (column.metric, None)
        here = [pair for pair in trained if (pair[0].method, pair[0].budget, pair[0].trained_on) == (*row, column.task)]
        trainings = [training for cell, training in here if seed in (None, str(cell.seed))]
        recorded = [(training, value) for training in trainings if (value := EFFORTS[quantity](training)) is not None]
        if not recorded:
            return Entry()
        values = [value for _, value in recorded]
        mean = sum(values) / len(values)
        made = Entry(mean, f"{mean:g}" if quantity == "rate" else f"{mean:.2f}")
        if quantity == "kept":
            made.text = f"{span(values)} of {span(training.steps for training, _ in recorded)}"
        if all(has_papers_budget(*row, training) for training in trainings):
            made.paper = papers_numbers().get((spec.kind, row[0], column.metric, column.task), "")
        return made

    for task in tasks:
        mine = [cell for cell, _ in trained if cell.trained_on == task and by_preferences(cell.method)]
        columns = [rates.columns[0].fill(seed=seed, task=task) for seed in sorted({cell.seed for cell in mine})]
        spec = replace(rates, stem=f"{rates.stem}-{task}", title=f"{rates.title} {task_title(task)}")
        tables.append(_filled(spec, columns, ((cell.method, cell.budget) for cell in mine), partial(entry, spec)))
    columns = [column.fill(top=task_title(task), task=task) for task in tasks for column in effort.columns]
    effort = replace(effort, caption=effort.caption.format(keep=results.recipe.get("keep", "as trained")))
    effort = _name_mean(effort, tasks=1, seeds=len({cell.seed for cell, _ in trained}))
    rows = ((cell.method, cell.budget) for cell, _ in trained)
    return [*tables, _filled(effort, columns, rows, partial(entry, effort))]
