"""The tables of the report: tables.toml describes them, and this module fills them with numbers.

`paper.csv` has the numbers that the paper prints, converted to the units of our tables. Its column `table` names the
kind of table, and `quantity` the metric of the column that shows the number. The numbers come from the paper's tables;
its text differs in places. What its captions call variance is the standard deviation over five seeds. The table of
standard deviations of Confidence@k prints RCFT twice and BCE not at all, so those of BCE are missing. Training minutes
were measured on one A100.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import product
from math import isnan
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from catto import methods
from catto.answer_columns import MAX_FORCED_SHARE
from catto.methods import Budget
from catto.metrics.intervals import Interval, NullBand
from catto.metrics.statistics import SeedSummary
from catto.report.measuring import PREFERENCE, has_papers_budget
from catto.report.numbers import (
    Cell,
    CellIdentity,
    GroupNumbers,
    Numbers,
    Results,
    Training,
    Verdict,
    supported_decimals,
)
from catto.report.render import Column, Entry, Line, Table

Setting = Literal["in", "out", "any"]  # see `CellIdentity.setting`

# In the order of the paper's columns; other tasks follow in alphabetical order.
TASK_TITLES = {
    "reward_bench_2": "Reward Bench 2",
    "snli": "SNLI",
    "anli": "ANLI",
    "tldr": "TL;DR",
    "commonsense_qa": "CommonsenseQA",
    "mmlu": "MMLU",
    "witnesses": "Witnesses",
    "readings": "Readings",
}
BUDGET_TITLES: dict[Budget | None, str] = {"paper": "Paper's budget", "matched": "Matched budget"}
SETTING_TITLES: dict[Setting, str] = {"in": "In distribution", "out": "Out of distribution"}
PAPERS_K = (4, 8)
PAPERS_SOURCE = "mmlu"  # the training task of the models in the paper's out-of-distribution table

method_order = methods.method_sort_key


# ---- titles and order


class TableRow(NamedTuple):
    """Identifies a row: a method, and its budget if the table shows both budgets."""

    method: str
    budget: Budget | None = None


def task_title(task: str) -> str:
    """Return the heading of a task's columns."""
    return TASK_TITLES.get(task, task)


def task_order(task: str) -> tuple[int, str]:
    """Return the sort key of a task's columns."""
    if task in TASK_TITLES:
        position = list(TASK_TITLES).index(task)
    else:
        position = len(TASK_TITLES)
    return position, task


def list_report_tasks(groups: Iterable[GroupNumbers]) -> list[str]:
    """Return the tasks of the groups in the order of their columns."""
    return sorted({group.task for group in groups}, key=task_order)


def method_title(method: str) -> str:
    """Return the heading of a method's row."""
    if methods.is_known_method(method):
        return methods.find_method(method).title
    return method


class PlaceOrder(NamedTuple):
    """Sort key of a task with its training set. `in` (distribution) sorts before `out`, and tasks by `task_order`."""

    setting: Literal["in", "out"]
    task: tuple[int, str]
    trained_on: str


def place_order(place: CellIdentity) -> PlaceOrder:
    """Return the sort key of a task with its training set; it is the same for all methods, budgets and seeds."""
    return PlaceOrder(place.setting, task_order(place.task), place.trained_on)


def row_order(row: TableRow) -> tuple[object, ...]:
    """Return the sort key of a row: by method, then the paper's budget first."""
    return *method_order(row.method), row.budget != "paper"


def setting_title(place: CellIdentity) -> str:
    """Name a task, and the training task if it is a different one: `SNLI, trained on MMLU`."""
    title = task_title(place.task)
    if place.setting == "in":
        return title
    return f"{title}, trained on {task_title(place.trained_on)}"


def format_range(values: Iterable[float | None], digits: int = 2) -> str:
    """Format the lowest and the highest value; a single number if both round to the same.

    Args:
        values: numbers, at least one of which is not None; None is skipped.
        digits: maximum number of decimals; whole numbers are printed without decimals.

    >>> format_range([3.14, 3.149]), format_range([3.14, 1400], 1)
    ('3.14 to 3.15', '3.1 to 1,400')
    """
    rounded = [round(value, digits) for value in values if value is not None]
    low = _format_with_commas(min(rounded))
    high = _format_with_commas(max(rounded))
    if low == high:
        return low
    return f"{low} to {high}"


def _format_with_commas(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,}"


# ---- files of the package


class PaperKey(NamedTuple):
    """Identifies a number of the paper. table: kind of our table; quantity: metric of our column."""

    table: str
    method: str
    quantity: str
    task: str


@cache
def read_papers_numbers() -> dict[PaperKey, str]:
    """Read the paper's numbers, as text.

    >>> read_papers_numbers()[PaperKey("in", "dpo+catto", "ece", "snli")]
    '19.13'
    """
    numbers = {}
    for row in csv.DictReader(_read_package_file("paper.csv").splitlines()):
        for task in row.keys() & TASK_TITLES.keys():
            key = PaperKey(table=row["table"], method=row["method"], quantity=row["quantity"], task=task)
            numbers[key] = row[task]
    return numbers


@dataclass(frozen=True)
class TableSpec:
    """One kind of table, as described in tables.toml: one table per setting and budget, with columns for each task.

    With `table_per_task`, each task and training set gets a table of its own instead.

    Attributes:
        kind: the part of the page that shows the table.
        stem: beginning of the table's file name.
        title: heading of the table.
        caption: sentences below the table.
        columns: the columns of one task.
        settings: the settings that have such a table; exactly one in the specs that `read_specs` returns.
        shows: "mean": the mean over seeds; "short": the mean and its mark; "all": the mean and its mark, with interval,
            null band and difference to the baseline; "std": the standard deviation over seeds.
        needs: name of a number; groups that lack it are left out.
        table_per_task: whether each task and training set gets its own table.
        notes: field of `Entry` -> sentence that is added to the caption if that field of any entry is set. It may
            contain {baseline}.
        baseline: title of the method that the others are compared with.
    """

    kind: str
    stem: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    settings: tuple[Setting, ...] = ("in",)
    shows: Literal["mean", "short", "all", "std"] = "mean"
    needs: str = "accuracy"
    table_per_task: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    baseline: str = ""


@cache
def read_specs() -> dict[str, TableSpec]:
    """Read tables.toml.

    Returns:
        stem -> spec, in the order of the file; an entry with several settings becomes one spec per setting.
    """
    content = tomllib.loads(_read_package_file("tables.toml"))
    described = TypeAdapter(tuple[TableSpec, ...]).validate_python(content["table"])
    specs = {}
    for spec in described:
        for setting in spec.settings:
            single = _restrict_to_setting(spec, setting)
            specs[single.stem] = single
    return specs


def _restrict_to_setting(spec: TableSpec, setting: Setting) -> TableSpec:
    """Return the spec for one setting, with the placeholders of tables.toml filled in."""
    setting_name = SETTING_TITLES.get(setting, "")  # the setting "any" has none
    text_of_placeholder = {
        "setting": setting,
        "stem": setting_name.lower().replace(" ", "-"),
        "place": setting_name,
        "where": setting_name.lower(),
    }
    return replace(
        spec,
        settings=(setting,),
        kind=spec.kind.format(**text_of_placeholder),
        stem=spec.stem.format(**text_of_placeholder),
        title=spec.title.format(**text_of_placeholder),
    )


def _name_baseline(spec: TableSpec, numbers: Numbers) -> TableSpec:
    """Return the spec with the title of the method that the others are compared with."""
    if numbers.baseline is None:
        return spec
    return replace(spec, baseline=method_title(numbers.baseline))


def _read_package_file(name: str) -> str:
    return (resources.files("catto.report") / name).read_text(encoding="utf-8")


# ---- all tables


def build_tables(numbers: Numbers, results: Results) -> list[Table]:
    """Build all tables of the report, in order; tables without any number are left out."""
    kinds = {spec.kind for spec in read_specs().values()}
    kinds -= {"summary", "rates", "training"}
    tables = [build_summary(numbers)]
    tables += build_group_tables(numbers, *kinds)
    tables += build_training_tables(results)
    return [table for table in tables if _has_number(table)]


def _has_number(table: Table) -> bool:
    return any(entry.value is not None for entry in _list_entries(table.lines))


def _list_entries(lines: Iterable[Line]) -> list[Entry]:
    entries: list[Entry] = []
    for line in lines:
        entries.extend(line.entries)
    return entries


def _fill_table(
    spec: TableSpec,
    columns: Sequence[Column],
    rows: Iterable[TableRow],
    make_entry: Callable[[TableRow, Column], Entry],
) -> Table:
    """Build a table with one line for each distinct row, in the order of the methods.

    Args:
        spec: The kind of table.
        columns: The columns.
        rows: The rows in any order; repeated rows count once.
        make_entry: Returns the entry of a row in a column.

    Returns:
        The table. Its budget is None; a caller whose table shows a single budget sets it.
    """
    lines = []
    for row in sorted(set(rows), key=row_order):
        entries = [make_entry(row, column) for column in columns]
        lines.append(_make_line(row, entries))
    return Table(
        name=spec.stem,
        title=spec.title,
        caption=_write_caption(spec, columns, lines),
        columns=tuple(columns),
        lines=tuple(lines),
        budget=None,
        kind=spec.kind,
    )


def _make_line(row: TableRow, entries: Iterable[Entry]) -> Line:
    title = method_title(row.method)
    if row.budget:
        title += f" ({BUDGET_TITLES[row.budget].lower()})"
    block: str = "Other"
    if methods.is_known_method(row.method):
        block = methods.find_method(row.method).group
    return Line(method=row.method, title=title, block=block, entries=tuple(entries))


def _write_caption(spec: TableSpec, columns: Iterable[Column], lines: Iterable[Line]) -> str:
    """Join the caption, the notes that apply to at least one entry, and the notes of the columns."""
    entries = _list_entries(lines)
    sentences = [spec.caption]
    for field_name, note in spec.notes.items():
        if any(getattr(entry, field_name) for entry in entries):
            sentences.append(note.replace("{baseline}", spec.baseline))
    # The same column occurs once for each task; its note is printed once.
    sentences += dict.fromkeys(column.note for column in columns if column.note)
    return " ".join(sentences)


def _note_averaging(spec: TableSpec, *, tasks: int, seeds: int) -> TableSpec:
    """Return the spec with a caption that says whether the numbers are means over tasks, seeds or both."""
    averaged = []
    if tasks > 1:
        averaged.append("tasks")
    if seeds > 1:
        averaged.append("seeds")
    if not averaged or spec.shows == "std":
        return spec
    return replace(spec, caption=f"{spec.caption} Mean over {' and '.join(averaged)}.")


def _count_seeds(groups: Iterable[GroupNumbers]) -> int:
    """Return the number of seeds of the group with the most seeds."""
    return max(len(group.seeds) for group in groups)


# ---- the summary


def build_summary(numbers: Numbers) -> Table:
    """Build the table of the first screen: one line per method, with means over tasks.

    Numbers are printed with the decimals that N supports. Methods that cannot be distinguished from the best one are
    bold, unless this applies to all of them.
    """
    groups = numbers.first_screen
    spec = _name_baseline(read_specs()["summary"], numbers)
    spec = replace(spec, title=_write_summary_title(groups))
    spec = _note_averaging(spec, tasks=len(list_report_tasks(groups)), seeds=_count_seeds(groups))

    def make_entry(row: TableRow, column: Column) -> Entry:
        groups_of_method = [group for group in groups if group.method == row.method]
        return _make_summary_entry(spec, column, groups=groups_of_method, verdict=numbers.verdict)

    columns = _choose_summary_columns(spec, groups)
    rows = [TableRow(group.method) for group in groups]
    return _fill_table(spec, columns, rows, make_entry)


def _write_summary_title(groups: Sequence[GroupNumbers]) -> str:
    """Name the tasks, the number of questions, and the budget if there is one."""
    facts = [task_title(task) for task in list_report_tasks(groups)]
    fewest_questions = min(group.n for group in groups)
    facts.append(f"N = {fewest_questions:,}")
    budget = groups[0].budget
    if budget:
        facts.append(BUDGET_TITLES[budget].lower())
    return ", ".join(facts)


def _choose_summary_columns(spec: TableSpec, groups: Sequence[GroupNumbers]) -> list[Column]:
    """Return the columns for which these groups have numbers, with k and decimals filled in.

    A column with a rule that chooses among samples is shown for the largest k only.
    """
    decimals_of_percentage = supported_decimals(min(group.n for group in groups))
    truth_is_known = all(group.number("true_error") for group in groups)
    largest_k = max(list_sizes(groups), default=0)  # 0: no answers were sampled
    columns = []
    for column in spec.columns:
        lacks_truth = column.metric == "true_error" and not truth_is_known
        lacks_samples = column.rule != "" and largest_k == 0
        if lacks_truth or lacks_samples or _is_left_out(column, groups):
            continue
        decimals = decimals_of_percentage
        if column.scale == 1:  # printed from 0 to 1, where one per cent is 0.01
            decimals += 2
        columns.append(column.fill(largest_k, decimals=decimals))
    return columns


def _make_summary_entry(
    spec: TableSpec, column: Column, *, groups: Sequence[GroupNumbers], verdict: Verdict | None
) -> Entry:
    """Make the entry of one method in the summary.

    Args:
        spec: The summary's spec.
        column: The column.
        groups: The groups of the method, one per task and training set.
        verdict: The verdict on all methods; None if there is none.

    Returns:
        With one group, its entry with all details; with several, the mean of their values without details. It is bold
        in the column that decides the verdict if the method is among the best.
    """
    if column.metric == "chance":
        return _make_chance_entry(groups, column.decimals)
    entries = [_make_entry(spec, column, group) for group in groups]
    has_forced_answers = any(entry.forced for entry in entries)
    if len(entries) == 1:
        entry = entries[0]
    else:
        entry = _average_entries(entries, column.decimals)
    # `_make_entry` warns in every column. Here the warning is only in the column with the share of forced answers.
    entry.forced = ""
    if column.metric == "fallback_rate" and has_forced_answers:
        entry.forced = "forced"
    if verdict is not None and column.metric == verdict.metric:
        all_methods_lead = len(verdict.leaders) == len(verdict.losses)
        entry.best = groups[0].method in verdict.leaders and not all_methods_lead
    return entry


def _make_chance_entry(groups: Sequence[GroupNumbers], decimals: int) -> Entry:
    """Print the null band of a single task, or in how many of several tasks the ECE is within its null band."""
    if len(groups) > 1:
        within = sum(group.within_null for group in groups)
        return Entry(text=f"in {within} of {len(groups)} tasks")
    low = 100 * groups[0].null.low
    high = 100 * groups[0].null.high
    return Entry(text=f"{low:.{decimals}f} to {high:.{decimals}f}", null=(low, high))


def _average_entries(entries: Sequence[Entry], decimals: int) -> Entry:
    """Return the mean over tasks; an empty entry if any task has no value."""
    values = [entry.value for entry in entries if entry.value is not None]
    if len(values) < len(entries):
        return Entry()
    mean = sum(values) / len(values)
    return Entry(value=mean, text=f"{mean:.{decimals}f}")


def _is_left_out(column: Column, groups: Iterable[GroupNumbers]) -> bool:
    """Return whether a column is optional and no group has its number."""
    return column.optional and not any(group.number(column.metric) for group in groups)


def list_sizes(groups: Iterable[GroupNumbers]) -> list[int]:
    """Return the values of k to show: those of the paper if they were measured, and the largest measured one."""
    measured: set[int] = set()
    for group in groups:
        measured.update(group.selection)
    if not measured:
        return []
    shown = {*PAPERS_K, max(measured)}
    return sorted(measured & shown)


# ---- tables of groups


def build_group_tables(numbers: Numbers, *kinds: str) -> list[Table]:
    """Build the tables of the given kinds, for every budget; there is none for groups that lack what the kind needs."""
    specs = [_name_baseline(spec, numbers) for spec in read_specs().values() if spec.kind in kinds]
    tables = []
    for spec, budget in product(specs, numbers.budgets):
        (setting,) = spec.settings  # `read_specs` returns one spec per setting
        groups = [group for group in numbers.find_groups(setting, budget) if group.number(spec.needs)]
        sizes = list_sizes(groups)
        for groups_of_table in _split_into_tables(spec, groups):
            tables.append(_build_group_table(spec, groups_of_table, budget=budget, sizes=sizes))
    return tables


def _split_into_tables(spec: TableSpec, groups: Sequence[GroupNumbers]) -> list[list[GroupNumbers]]:
    """Return the groups of each table: one table for all, or one for each task and training set."""
    if not groups:
        return []
    if not spec.table_per_task:
        return [list(groups)]
    groups_at: dict[PlaceOrder, list[GroupNumbers]] = {}
    for group in groups:
        groups_at.setdefault(place_order(group), []).append(group)
    return [groups_at[place] for place in sorted(groups_at)]


def _build_group_table(
    spec: TableSpec, groups: Sequence[GroupNumbers], *, budget: Budget | None, sizes: Sequence[int]
) -> Table:
    """Build one table, with a line for each method and columns for each task.

    Args:
        spec: The kind of table.
        groups: The groups of the table, one for each method and task; with `spec.table_per_task`, all of one task.
        budget: Their budget; None if the experiment has no budgets.
        sizes: The values of k for which a column with a rule is repeated.
    """
    group_at = {(group.method, group.task): group for group in groups}

    def make_entry(row: TableRow, column: Column) -> Entry:
        return _make_entry(spec, column, group_at.get((row.method, column.task)))

    stem = spec.stem
    title = spec.title
    if spec.table_per_task:
        stem += f"-{groups[0].stem}"
        title += f": {setting_title(groups[0])}"
    if budget:
        stem += f"-{budget}"
        title += f", {BUDGET_TITLES[budget].lower()}"
    named = replace(spec, stem=stem, title=title)
    named = _note_averaging(named, tasks=1, seeds=_count_seeds(groups))  # tasks have columns of their own
    columns = _fill_columns(spec, groups, sizes)
    rows = [TableRow(group.method) for group in groups]
    table = _fill_table(named, columns, rows, make_entry)
    return replace(table, budget=budget)


def _fill_columns(spec: TableSpec, groups: Sequence[GroupNumbers], sizes: Sequence[int]) -> list[Column]:
    """Return the columns of every task; a column with a rule is repeated for each k in `sizes`.

    The upper heading of a column is its task. With `spec.table_per_task`, the table has a single task and keeps the
    upper headings of its spec, such as `k = 4`. Columns with the same k share this heading. Columns without k come
    first.
    """
    columns_with_k: list[tuple[Column, int]] = []
    for column in spec.columns:
        if _is_left_out(column, groups):
            continue
        if column.rule:
            columns_with_k += [(column, k) for k in sizes]
        else:
            columns_with_k.append((column, 0))  # does not depend on k
    if spec.table_per_task:
        only_task = groups[0].task
        # Columns that share an upper heading must be next to each other.
        columns_with_k.sort(key=lambda column_and_k: column_and_k[1])
        return [column.fill(k, task=only_task) for column, k in columns_with_k]
    columns = []
    for task in list_report_tasks(groups):
        for column, k in columns_with_k:
            columns.append(column.fill(k, task=task, top=task_title(task)))
    return columns


# ---- entries


def _make_entry(spec: TableSpec, column: Column, group: GroupNumbers | None) -> Entry:
    """Make the entry of a group in a column, with the details that this kind of table shows.

    Args:
        spec: The kind of table.
        column: The column.
        group: The group; None if the method was not run on the task of the column.

    Returns:
        The entry. It has no value if there is no group, if the group lacks the number, or if the table shows standard
        deviations and there is a single seed.
    """
    if group is None:
        return Entry()
    summary = _find_summary(column, group)
    if summary is None:
        if column.metric == "risk_threshold":
            return Entry(text="none")  # no threshold can promise the error rate for any of the seeds
        return Entry()
    entry = Entry(group=group, scale=column.scale, paper=_find_papers_number(spec, column, group))
    value: float | None = summary.mean
    deviation = summary.std
    if spec.shows == "std":
        value = summary.std
        deviation = None
    if value is None:
        return entry
    entry.value = column.scale * value
    entry.text = f"{entry.value:.{column.decimals}f}"
    if deviation is not None:
        entry.std = column.scale * deviation
    entry.notes = _write_notes(spec, column.metric, group)
    _add_comparison(entry, spec, column, group)
    # Preference accuracy is measured on given responses, so it does not matter how many answers were forced.
    is_measured_on_answers = column.metric not in PREFERENCE
    forced_share = _find_forced_share(spec, group)
    if is_measured_on_answers and forced_share > MAX_FORCED_SHARE:
        entry.forced = f"{100 * forced_share:.0f} % forced"
        entry.mark = ""  # a difference between forced answers does not describe the models
    return entry


def _add_comparison(entry: Entry, spec: TableSpec, column: Column, group: GroupNumbers) -> None:
    """Set the mark, difference to the baseline, interval and null band, if this kind of table shows them."""
    versus = group.versus.get(column.metric)
    if spec.shows in ("short", "all") and versus is not None:
        entry.mark = versus.mark(column.metric)
    if spec.shows == "all":
        entry.versus = versus
        entry.baseline = spec.baseline
        entry.interval = _scale_ends(group.intervals[column.metric], column.scale)
        if column.metric == "ece":
            entry.null = _scale_ends(group.null, column.scale)


def _find_summary(column: Column, group: GroupNumbers) -> SeedSummary | None:
    """Return the number of the group that the column shows; None if the group does not have it."""
    if column.rule:
        return group.selection.get(column.k, {}).get(column.rule)
    return group.number(column.metric)


def _find_papers_number(spec: TableSpec, column: Column, group: GroupNumbers) -> str:
    """Return the number that the paper prints for this entry; empty if it has no comparable one."""
    is_comparable = group.papers_budget and group.trained_on in (group.task, PAPERS_SOURCE)
    if not is_comparable:
        return ""
    key = PaperKey(table=spec.kind, method=group.method, quantity=column.metric, task=group.task)
    return read_papers_numbers().get(key, "")


def _write_notes(spec: TableSpec, metric: str, group: GroupNumbers) -> tuple[str, ...]:
    """Return the notes below a value: what it is measured on, or numbers that replace an invalid interval."""
    if spec.shows == "all" and group.intervals[metric].reason is not None:
        return _replace_interval(group)
    if metric == "auroc_within":
        return (f"in {group.others['questions_with_both'].mean:g} of {group.n:,} questions",)
    if metric == "preference_accuracy" and spec.shows == "all":
        return (f"N = {group.others['preference_pairs'].mean:g}",)
    if metric == "risk_threshold":
        share_of_seeds = group.others["risk_promised"].mean  # 1 or 0 for each seed
        seeds = len(group.seeds)
        if share_of_seeds < 1:
            return (f"in {round(share_of_seeds * seeds)} of {seeds} seeds",)
    return ()


def _replace_interval(group: GroupNumbers) -> tuple[str, ...]:
    """Describe an ECE outside its own interval by the debiased ECE and by confidence minus accuracy."""
    notes = [f"debiased {100 * group.metrics['debiased_ece'].mean:.2f}"]
    gap = group.gap
    if not isnan(gap.low):
        ends = f"[{100 * gap.low:+z.2f}, {100 * gap.high:+z.2f}]"
        notes.append(f"conf. - acc. {100 * gap.value:+z.2f} {ends}")
    return tuple(notes)


def _find_forced_share(spec: TableSpec, group: GroupNumbers) -> float:
    """Return the share of forced answers among the samples if the table is about samples, else among greedy answers."""
    if spec.needs == "sample_fallback_rate":
        return group.others["sample_fallback_rate"].mean
    return group.others["fallback_rate"].mean


def _scale_ends(band: Interval | NullBand, scale: float) -> tuple[float, float] | None:
    """Return both ends in the unit of the column; None if they are undefined."""
    if isnan(band.low):
        return None
    return scale * band.low, scale * band.high


# ---- tables of training


class TrainedCell(NamedTuple):
    """A cell, and how its model was trained."""

    cell: Cell
    training: Training


def list_trained_cells(results: Results) -> list[TrainedCell]:
    """Return one cell for each trained model: the in-distribution test, or else the first out-of-distribution test."""
    models: dict[tuple[str, str, Budget | None, int], TrainedCell] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.setting):  # "in" comes before "out"
        if cell.training is None:
            continue
        model = (cell.trained_on, cell.method, cell.budget, cell.seed)
        models.setdefault(model, TrainedCell(cell, cell.training))
    return list(models.values())


def is_trained_on_pairs(method: str) -> bool:
    """Return whether a method is trained on preference pairs."""
    return methods.is_known_method(method) and methods.find_method(method).stage == "preference"


def describe_budget(results: Results, budget: Budget | None) -> str:
    """Describe how long the preference methods of a budget were trained; empty if nothing is recorded."""
    runs_of: dict[str, list[Training]] = {}
    for cell, training in sorted(list_trained_cells(results), key=lambda trained: method_order(trained.cell.method)):
        is_of_budget = cell.budget in (None, budget)
        is_recorded = training.rows and training.epochs
        if is_of_budget and is_recorded and is_trained_on_pairs(cell.method):
            runs_of.setdefault(cell.method, []).append(training)
    titles_of: dict[str, list[str]] = {}  # methods with the same effort share a clause
    for method, runs in runs_of.items():
        titles_of.setdefault(_describe_effort(runs), []).append(method_title(method))
    clauses = [f"{', '.join(titles)}: {effort}" for effort, titles in titles_of.items()]
    return "; ".join(clauses)


def _describe_effort(runs: Sequence[Training]) -> str:
    """Describe on how many pairs and epochs a method was trained, and which epoch was kept if it was not the last."""
    pairs = format_range(run.rows for run in runs)
    epochs = format_range(run.epochs for run in runs)
    kept_epochs = []
    for run in runs:
        if run.kept_epochs is None:
            kept_epochs.append(run.epochs)
        else:
            kept_epochs.append(run.kept_epochs)
    kept = format_range(kept_epochs)
    effort = f"{pairs} pairs, epochs: {epochs}"
    if kept != epochs:
        effort += f", kept after {kept}"
    return effort


def build_training_tables(results: Results) -> list[Table]:
    """Build a table of learning rates for each training set, then one of training time, tokens and kept steps.

    Each has a line for every method and budget. Numbers are means over the seeds that recorded them; kept steps are
    printed as a range.
    """
    trained = list_trained_cells(results)
    tasks = sorted({cell.trained_on for cell, _ in trained}, key=task_order)
    tables = [_build_rates_table(trained, task) for task in tasks]
    tables.append(_build_effort_table(results, trained, tasks))
    return tables


def _build_rates_table(trained: Sequence[TrainedCell], task: str) -> Table:
    """Build the table of learning rates of the preference methods trained on a task, with a column for each seed."""
    spec = read_specs()["learning-rates"]

    def make_entry(row: TableRow, column: Column) -> Entry:
        of_seed = [each for each in trained if str(each.cell.seed) == column.metric]  # the column's metric is its seed
        return _make_training_entry(spec, column, row=row, quantity="rate", trained=of_seed)

    cells = [cell for cell, _ in trained if cell.trained_on == task and is_trained_on_pairs(cell.method)]
    seeds = sorted({cell.seed for cell in cells})
    columns = [spec.columns[0].fill(seed=seed, task=task) for seed in seeds]
    rows = [TableRow(cell.method, cell.budget) for cell in cells]
    named = replace(spec, stem=f"{spec.stem}-{task}", title=f"{spec.title} {task_title(task)}")
    return _fill_table(named, columns, rows, make_entry)


def _build_effort_table(results: Results, trained: Sequence[TrainedCell], tasks: Sequence[str]) -> Table:
    """Build the table of training time, tokens and kept steps, with columns for each training set.

    Args:
        results: The experiment; its recipe says by which rule the kept step was chosen.
        trained: All trained cells.
        tasks: The training sets, in the order of their columns.
    """
    spec = read_specs()["training"]

    def make_entry(row: TableRow, column: Column) -> Entry:
        return _make_training_entry(spec, column, row=row, quantity=column.metric, trained=trained)

    columns = []
    for task in tasks:
        top = task_title(task)
        for column in spec.columns:
            columns.append(column.fill(top=top, task=task))
    rows = [TableRow(cell.method, cell.budget) for cell, _ in trained]
    seeds = {cell.seed for cell, _ in trained}
    kept_by = results.recipe.get("keep", "as trained")
    named = replace(spec, caption=spec.caption.format(keep=kept_by))
    named = _note_averaging(named, tasks=1, seeds=len(seeds))
    return _fill_table(named, columns, rows, make_entry)


def _make_training_entry(
    spec: TableSpec, column: Column, *, row: TableRow, quantity: str, trained: Iterable[TrainedCell]
) -> Entry:
    """Make the entry of a row: the mean of a quantity over the training runs that recorded it.

    Args:
        spec: the kind of table.
        column: the column; its task is the training set.
        row: the method and budget.
        quantity: "rate", "minutes", "each", "tokens" or "kept"; `_read_effort` defines them.
        trained: all trained cells, or those of one seed.

    Returns:
        The entry, with the paper's number if every run was trained like the paper's. Kept steps are printed as ranges,
        such as `50 to 60 of 100`. The entry is empty if no run recorded the quantity.
    """
    runs = []
    for cell, training in trained:
        if TableRow(cell.method, cell.budget) == row and cell.trained_on == column.task:
            runs.append(training)
    values = []
    steps = []  # of the same runs
    for training in runs:
        value = _read_effort(training, quantity)
        if value is not None:
            values.append(value)
            steps.append(training.steps)
    if not values:
        return Entry()
    mean = sum(values) / len(values)
    entry = Entry(value=mean, text=f"{mean:.2f}")
    if quantity == "rate":
        entry.text = f"{mean:g}"  # such as 5e-06
    elif quantity == "kept":
        entry.text = f"{format_range(values)} of {format_range(steps)}"
    if all(has_papers_budget(row.method, row.budget, training) for training in runs):
        key = PaperKey(table=spec.kind, method=row.method, quantity=column.metric, task=column.task)
        entry.paper = read_papers_numbers().get(key, "")
    return entry


def _read_effort(training: Training, quantity: str) -> float | None:
    """Return a quantity of a training run in the unit of its column; None if it was not recorded.

    Args:
        training: the record of the run.
        quantity: which one.

            - "rate": the learning rate.
            - "minutes": the duration.
            - "each": milliseconds per row and epoch.
            - "tokens": millions of tokens.
            - "kept": the step whose weights were kept; None if the number of all steps was not recorded.
    """
    if quantity == "rate":
        return training.learning_rate
    if quantity == "minutes" and training.seconds is not None:
        return training.seconds / 60
    if quantity == "each" and training.seconds and training.rows and training.epochs:
        return 1e3 * training.seconds / training.rows / training.epochs
    if quantity == "tokens" and training.tokens is not None:
        return training.tokens / 1e6
    if quantity == "kept" and training.steps:
        return training.kept_step
    return None
