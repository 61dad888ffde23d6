"""How tasks, budgets and settings are called in tables, figures and on the page.

Tables as data: columns, lines, and entries that carry value, interval, null band, mark and the paper's number.

How the models were trained, as tables: chosen learning rates, time and tokens.

The other tables: Confidence@k, all metrics, the known world, fallback, learning rates, training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from catto import methods
from catto.measure import MOST_FORCED
from catto.methods import Budget, known, method
from catto.metrics.catalogue import METRICS
from catto.metrics.statistics import ALPHA
from catto.report import paper
from catto.report.measuring import CONFIDENCE, MAJORITY, RULE_TITLES
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results, Spread, Training, Versus

# ---- names


TASK_TITLES = {
    "reward_bench_2": "Reward Bench 2",
    "snli": "SNLI",
    "anli": "ANLI",
    "tldr": "TL;DR",
    "commonsense_qa": "CommonsenseQA",
    "mmlu": "MMLU",
    "witnesses": "Witnesses",
}
# The paper's order of columns; other tasks follow by name.
TASK_ORDER = ("reward_bench_2", "snli", "anli", "tldr", "commonsense_qa", "mmlu", "witnesses")
BUDGET_TITLES: dict[Budget | None, str] = {"paper": "Paper's budget", "matched": "Matched budget", None: "One budget"}


def task_title(task: str) -> str:
    """A task as a column is headed."""
    return TASK_TITLES.get(task, task)


def task_order(task: str) -> tuple[int, str]:
    """Sort key of a task's column."""
    return (TASK_ORDER.index(task) if task in TASK_ORDER else len(TASK_ORDER), task)


def method_title(method: str) -> str:
    """A method as a row is headed."""
    return methods.method(method).title if methods.known(method) else method


def method_group(method: str) -> str:
    """The block of rows in which a method stands: SFT or DPO."""
    return methods.method(method).group if methods.known(method) else "Other"


def method_order(method: str) -> tuple[int, bool, str]:
    """Sort key of a method's row."""
    return methods.order(method)


def budget_title(budget: Budget | None) -> str:
    """A budget as a block is headed."""
    return BUDGET_TITLES[budget]


def setting_title(trained_on: str, task: str) -> str:
    """`SNLI`, or `SNLI, trained on MMLU`."""
    return task_title(task) if trained_on == task else f"{task_title(task)}, trained on {task_title(trained_on)}"


# ---- tables


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


# ---- tables_training


def trained_cells(results: Results) -> list[tuple[Cell, Training]]:
    """One cell a trained model: those tested where they were trained, else the first test of each."""
    found: dict[tuple[str, str, Budget | None, int], tuple[Cell, Training]] = {}
    for cell in sorted(results.cells, key=lambda cell: cell.task != cell.trained_on):
        if cell.training is not None:
            found.setdefault((cell.trained_on, cell.method, cell.budget, cell.seed), (cell, cell.training))
    return list(found.values())


def _row_title(name: str, budget: Budget | None) -> str:
    return method_title(name) + (f" ({budget_title(budget).lower()})" if budget else "")


def by_preferences(name: str) -> bool:
    """Whether a method is trained on pairs."""
    return known(name) and method(name).stage == "preference"


def rate_tables(results: Results) -> list[Table]:
    """The learning rate of every seed: one table a training set."""
    trained = [one for one in trained_cells(results) if by_preferences(one[0].method)]
    found = []
    for task in sorted({cell.trained_on for cell, _ in trained}, key=task_order):
        of_task = [one for one in trained if one[0].trained_on == task]
        seeds = sorted({cell.seed for cell, _ in of_task})
        columns = tuple(Column("Seed", str(seed), task, str(seed)) for seed in seeds)
        lines = []
        for name, budget in trained_rows(of_task):
            mine = {c.seed: t for c, t in of_task if (c.method, c.budget) == (name, budget)}
            entries = tuple(_rate(name, task, budget, seed, mine.get(seed)) for seed in seeds)
            lines.append(Line(name, _row_title(name, budget), method_group(name), entries))
        caption = (
            "Chosen by validation ECE, seed by seed. paper: the paper's choice for the same seed number, where pairs "
            "and epochs are the paper's."
        )
        title = f"Learning rates, trained on {task_title(task)}"
        found.append(Table(f"learning-rates-{task}", title, caption, columns, tuple(lines), None, "rates"))
    return found


def budget_note(results: Results, budget: Budget | None) -> str:
    """Say how long the preference methods of a budget trained, as recorded; empty where nothing is."""
    groups: dict[str, list[str]] = {}
    shown = [one for one in trained_cells(results) if one[0].budget in (None, budget)]
    for name, _ in trained_rows([one for one in shown if by_preferences(one[0].method)]):
        mine = [training for cell, training in shown if cell.method == name and training.rows and training.epochs]
        if mine:
            pairs, epochs = (_range([getattr(one, field) for one in mine]) for field in ("rows", "epochs"))
            kept = _range([one.epochs if one.kept_epochs is None else one.kept_epochs for one in mine])
            early = "" if kept == epochs else f", kept after {kept}"
            groups.setdefault(f"{pairs} pairs, epochs: {epochs}{early}", []).append(method_title(name))
    return "; ".join(f"{', '.join(names)}: {effort}" for effort, names in groups.items())


def _range(values: Sequence[float | None]) -> str:
    """The values from the lowest to the highest, with at most two decimals."""
    known = [round(value, 2) for value in values if value is not None]
    low, high = (f"{value:,.0f}" if value == int(value) else f"{value:,}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def trained_rows(trained: Sequence[tuple[Cell, Training]]) -> list[tuple[str, Budget | None]]:
    """The methods and budgets of the trained models, in the order of the tables."""
    found = {(cell.method, cell.budget) for cell, _ in trained}
    return sorted(found, key=lambda one: (method_order(one[0]), one[1] != "paper"))


def _rate(name: str, task: str, budget: Budget | None, seed: int, training: Training | None) -> Entry:
    if training is None:
        return EMPTY
    rate, printed = training.learning_rate, paper.learning_rate(name, task, seed)
    beside = printed is not None and paper.budget_is_the_papers(name, budget, training)
    return Entry(rate, "-" if rate is None else f"{rate:g}", paper=f"{printed:g}" if beside else "")


EFFORT = {
    "minutes": "Minutes",
    "each": "ms a row and epoch",
    "tokens": "Million tokens",
    "kept": "Kept step",
}


def training_tables(results: Results) -> list[Table]:
    """Minutes in all, milliseconds a row and epoch, and tokens, means over seeds; the step that was kept."""
    trained = trained_cells(results)
    tasks = sorted({cell.trained_on for cell, _ in trained}, key=task_order)
    columns = tuple(Column(task_title(task), title, task, metric) for task in tasks for metric, title in EFFORT.items())
    lines = []
    for name, budget in trained_rows(trained):
        mine = [one for one in trained if (one[0].method, one[0].budget) == (name, budget)]
        by_task = {task: [training for cell, training in mine if cell.trained_on == task] for task in tasks}
        entries = tuple(_effort(name, budget, column, by_task[column.task]) for column in columns)
        lines.append(Line(name, _row_title(name, budget), method_group(name), entries))
    caption = (
        "Each method's own stage, without that of the model it starts from; mean over seeds. A row is a pair for "
        "preference methods and a trace for supervised ones. Kept step: the one whose weights are tested, of all steps "
        f"(keep: {results.recipe.get('keep', 'as trained')}). paper: minutes on one A100, for the paper's budget."
    )
    return [Table("training", "Training time and tokens", caption, columns, tuple(lines), None, "training")]


def _effort(name: str, budget: Budget | None, column: Column, trainings: Sequence[Training]) -> Entry:
    if column.metric == "kept":
        return _kept(trainings)
    values = [value for training in trainings if (value := _effort_of(training, column.metric)) is not None]
    if not values:
        return EMPTY
    mean, printed = sum(values) / len(values), paper.minutes(name, column.task)
    same = all(paper.budget_is_the_papers(name, budget, training) for training in trainings)
    beside = column.metric == "minutes" and same and printed is not None
    return Entry(mean, f"{mean:.2f}", paper=f"{printed:g}" if beside else "")


def _kept(trainings: Sequence[Training]) -> Entry:
    """Say which step was kept of how many, over the seeds."""
    known = [one for one in trainings if one.kept_step is not None and one.steps]
    if not known:
        return EMPTY
    kept, steps = _range([one.kept_step for one in known]), _range([one.steps for one in known])
    return Entry(sum(one.kept_step or 0 for one in known) / len(known), f"{kept} of {steps}")


def _effort_of(training: Training, metric: str) -> float | None:
    if metric == "tokens":
        return None if training.tokens is None else training.tokens / 1e6
    if training.seconds is None:
        return None
    if metric == "minutes":
        return training.seconds / 60
    return None if not (training.rows and training.epochs) else 1e3 * training.seconds / training.rows / training.epochs


# ---- tables_more


SHOWN_K = (4, 8)  # the paper's
Groups = Sequence[tuple[int, GroupNumbers]]


def all_tables(numbers: Numbers, results: Results) -> list[Table]:
    """Every table of the report, in order; those without numbers are left out."""
    found = [
        *score_tables(numbers, "in"),
        *score_tables(numbers, "out"),
        *_confidence_tables(numbers, std=False),
        *_rule_tables(numbers),
        *_world_tables(numbers),
        *_metric_tables(numbers),
        *deviation_tables(numbers, "in"),
        *deviation_tables(numbers, "out"),
        *_confidence_tables(numbers, std=True),
        *_fallback_tables(numbers),
        *rate_tables(results),
        *training_tables(results),
    ]
    return [table for table in found if any(e.value is not None for line in table.lines for e in line.entries)]


def _confidence_tables(numbers: Numbers, std: bool) -> list[Table]:
    """Accuracy of the most confident of k candidates, in the paper's shape, or its deviation over seeds.

    Beside it, but not in the paper's shape, stands what tells whether it is worth sampling: the greedy answer, the
    majority vote, how well confidence orders the samples of a question, and how the samples were drawn.
    """
    found = []
    for budget in numbers.budgets:
        groups = [(place, group) for place, group in of_setting(numbers, "in", budget) if group.selection]
        columns: list[Column] = []
        for task in tasks_of(groups):
            better: Better = None if std else "higher"
            columns += [Column(task_title(task), f"k = {k}", task, str(k), better) for k in _shown(groups)]
            columns += [] if std else _beside(task, _shown(groups))
        name = "deviation-confidence-at-k" if std else "confidence-at-k"
        what = ": standard deviation over seeds" if std else ""
        title = f"Confidence@k{what}, {budget_title(budget).lower()}"
        caption = BESIDE_K
        if std:
            caption = "Standard deviation over seeds (n - 1), in points; the paper prints none for BCE."
        lines = grouped(groups, columns, _std_at_k if std else _at_k, _of_samples)
        kind = "std-k" if std else "k"
        found.append(Table(stem(name, budget), title, caption, tuple(columns), lines, budget, kind))
    return found


BESIDE_K = (
    "k: accuracy of the most confident of k sampled answers, in per cent, mean over seeds. Vote: of their majority. "
    "Greedy: of the one greedy answer, at a k-th of the cost. AUROC within: how often of a right and a wrong sample of "
    "the same question, the right one is the more confident; at 50 confidence cannot tell which to pick, whatever its "
    "AUROC over all answers. Fallback: share of the samples without a readable answer. Temp.: at which the samples "
    "were drawn; tau: at which their confidences are compared."
)


def _beside(task: str, sizes: Sequence[int]) -> list[Column]:
    """The columns beside Confidence@k."""
    top = task_title(task)
    return [
        *(Column(top, f"Vote, k = {k}", task, f"{k} {MAJORITY}", in_paper=False) for k in sizes),
        Column(top, "Greedy", task, "accuracy", in_paper=False),
        Column(top, "AUROC within", task, "auroc_within", in_paper=False),
        Column(top, "Fallback", task, "sample_fallback_rate", in_paper=False),
        Column(top, "Temp.", task, "sampling_temperature", in_paper=False),
        Column(top, "tau", task, "tau", in_paper=False),
    ]


def _of_samples(group: GroupNumbers) -> float:
    """The share of samples that had to be forced."""
    return group.sampled["sample_fallback_rate"].mean


def _shown(groups: Groups) -> list[int]:
    """The paper's k, as far as they were measured; else the largest that was."""
    measured = {k for _, group in groups for k in group.selection}
    return [k for k in SHOWN_K if k in measured] or [max(measured)]


def _at_k(place: int, group: GroupNumbers, column: Column) -> Entry:
    if not column.metric[0].isdigit():
        return _of_the_samples(place, group, column.metric)
    if not column.metric.isdigit():
        return _by_rule(place, group, column)
    spread = group.selection.get(int(column.metric), {}).get(CONFIDENCE)
    if spread is None:
        return EMPTY
    return _share(spread, papers(group, paper.confidence_at_k(group.method, group.task, int(column.metric))), place)


def _of_the_samples(place: int, group: GroupNumbers, metric: str) -> Entry:
    """A column beside Confidence@k: greedy accuracy, AUROC within questions, fallback, temperatures."""
    spread = group.metrics.get(metric) or group.sampled.get(metric)
    if spread is None:
        return EMPTY
    if metric in ("sampling_temperature", "tau"):
        return Entry(spread.mean, f"{spread.mean:.2f}", std=spread.std, group=place, scale=1.0)
    entry = _share(spread, place=place)
    if metric != "auroc_within":
        return entry
    return replace(entry, notes=(f"in {group.sampled['questions_with_both'].mean:g} of {group.n:,} questions",))


def _std_at_k(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread = group.selection.get(int(column.metric), {}).get(CONFIDENCE)
    known = paper.confidence_at_k(group.method, group.task, int(column.metric), std=True)
    return EMPTY if spread is None else spread_entry(spread, papers(group, known), place)


def _share(spread: Spread, known: str = "", place: int | None = None) -> Entry:
    std = None if spread.std is None else 100 * spread.std
    return Entry(100 * spread.mean, percent(spread.mean), std=std, paper=known, group=place)


def _rule_tables(numbers: Numbers) -> list[Table]:
    """Confidence@k beside the other ways to pick an answer: one table a task and budget."""
    found = []
    for budget in numbers.budgets:
        groups = [(place, group) for place, group in of_setting(numbers, "in", budget) if group.selection]
        for task in tasks_of(groups):
            columns = tuple(
                Column(f"k = {k}", title, task, f"{k} {rule}")
                for k in _shown(groups)
                for rule, title in RULE_TITLES.items()
            )
            lines = grouped([one for one in groups if one[1].task == task], columns, _by_rule, _of_samples)
            title = f"Ways to pick one of k answers: {task_title(task)}, {budget_title(budget).lower()}"
            caption = (
                "Accuracy in per cent, mean over seeds. The oracle is right if any of the k is: a bound, not a rule."
            )
            found.append(Table(stem(f"selection-{task}", budget), title, caption, columns, lines, budget, "rules"))
    return found


def _by_rule(place: int, group: GroupNumbers, column: Column) -> Entry:
    k, rule = column.metric.split(maxsplit=1)
    spread = group.selection.get(int(k), {}).get(rule)
    return EMPTY if spread is None else _share(spread, place=place)


WORLD_COLUMNS: tuple[tuple[str, str, Better], ...] = (
    ("accuracy", "Acc. ↑", "higher"),
    ("bayes_accuracy", "Bayes acc.", None),
    ("regret", "Regret ↓", "lower"),
    ("ece", "ECE ↓", "lower"),
    ("true_error", "True error ↓", "lower"),
)


def _world_tables(numbers: Numbers) -> list[Table]:
    """Where the posterior is known: the true calibration error and the regret to the Bayes answer."""
    found = []
    for budget in numbers.budgets:
        groups = [(place, group) for place, group in of_setting(numbers, "in", budget) if group.world]
        columns = tuple(
            Column(task_title(task), name, task, metric, better)
            for task in tasks_of(groups)
            for metric, name, better in WORLD_COLUMNS
        )
        title = f"Against the exact posterior, {budget_title(budget).lower()}"
        caption = (
            "True error: mean distance of confidence and exact posterior probability of the answer. Regret: how much "
            "less probable than the best answer the given one was. In per cent, mean over seeds."
        )
        found.append(
            Table(stem("world", budget), title, caption, columns, grouped(groups, columns, _truth), budget, "world")
        )
    return found


def _truth(place: int, group: GroupNumbers, column: Column) -> Entry:
    return _share(group.world.get(column.metric) or group.metrics[column.metric], place=place)


METRIC_COLUMNS = (
    *("accuracy", "mean_confidence", "ece", "debiased_ece", "smooth_ece"),
    *("brier", "nll", "auroc", "aurc"),
)


def _in_first(place: tuple[str, str]) -> tuple[bool, tuple[int, str], str]:
    """Sort key of (trained_on, task): in distribution first."""
    return place[0] != place[1], task_order(place[1]), place[0]


def _metric_tables(numbers: Numbers) -> list[Table]:
    """All metrics: one table a task, training set and budget."""
    found = []
    places = sorted({(g.trained_on, g.task) for g in numbers.groups}, key=_in_first)
    for budget in numbers.budgets:
        for trained_on, task in places:
            groups = [
                (place, group)
                for place, group in enumerate(numbers.groups)
                if (group.budget, group.trained_on, group.task) == (budget, trained_on, task)
            ]
            columns = tuple(
                Column("", METRICS[name].title, task, name, METRICS[name].better) for name in METRIC_COLUMNS
            )
            title = f"All metrics: {setting_title(trained_on, task)}, {budget_title(budget).lower()}"
            caption = "Mean over seeds. Per cent, except Brier score, NLL and AURC."
            name = stem(f"metrics-{task}" if task == trained_on else f"metrics-{task}-from-{trained_on}", budget)
            found.append(Table(name, title, caption, columns, grouped(groups, columns, _metric), budget, "metrics"))
    return found


def _metric(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread = group.metrics.get(column.metric)
    if spread is None:
        return EMPTY
    if METRICS[column.metric].percent:
        return _share(spread, place=place)
    return Entry(spread.mean, f"{spread.mean:.4f}", std=spread.std, group=place)


UNPARSED = {"fallback_rate": "Fallback", "accuracy_unparsed_wrong": "Acc. if wrong", "plain_rate": "Plain"}


def _fallback_tables(numbers: Numbers) -> list[Table]:
    """How often no answer could be read, and the accuracy if such answers count wrong."""
    found = []
    for setting, name in (("in", "fallback-in-distribution"), ("out", "fallback-out-of-distribution")):
        for budget in numbers.budgets:
            groups = of_setting(numbers, "in" if setting == "in" else "out", budget)
            columns = tuple(
                Column(task_title(task), title, task, metric)
                for task in tasks_of(groups)
                for metric, title in UNPARSED.items()
            )
            where = "in distribution" if setting == "in" else "out of distribution"
            title = f"Answers that could not be read, {where}, {budget_title(budget).lower()}"
            caption = (
                "Fallback: share of responses without a readable answer, which were then decoded over the label set. "
                "Acc. if wrong: accuracy with these counted wrong. Plain: share of responses without answer tags whose "
                "last line gave the answer. In per cent, mean over seeds."
            )
            lines = grouped(groups, columns, _unparsed)
            found.append(Table(stem(name, budget), title, caption, columns, lines, budget, "fallback"))
    return found


def _unparsed(place: int, group: GroupNumbers, column: Column) -> Entry:
    spread: Spread = getattr(group, column.metric)
    return _share(spread, place=place)
