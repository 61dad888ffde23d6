"""How the models were trained, as tables: chosen learning rates, time and tokens."""

from __future__ import annotations

from collections.abc import Sequence

from catto.methods import Budget, known, method
from catto.report import paper
from catto.report.names import budget_title, method_group, method_order, method_title, task_order, task_title
from catto.report.results import Cell, Results, Training
from catto.report.tables import EMPTY, Column, Entry, Line, Table

__all__ = ["budget_note", "rate_tables", "trained_cells", "trained_rows", "training_tables"]


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
