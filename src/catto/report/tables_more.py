"""The other tables: Confidence@k, all metrics, the known world, fallback, learning rates, training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from catto.evaluation.metrics import METRICS
from catto.report import paper
from catto.report.names import budget_title, task_order, task_title
from catto.report.names import setting as setting_title
from catto.report.numbers import GroupNumbers, Numbers, Spread
from catto.report.results import Results
from catto.report.selected import CONFIDENCE, MAJORITY, RULE_TITLES
from catto.report.tables import (
    EMPTY,
    Better,
    Column,
    Entry,
    Table,
    deviation_tables,
    grouped,
    of_setting,
    papers,
    percent,
    score_tables,
    spread_entry,
    stem,
    tasks_of,
)
from catto.report.tables_training import rate_tables, training_tables

__all__ = ["all_tables"]

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
