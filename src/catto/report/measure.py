"""Predictions -> numbers: measure every cell, then every group of seeds, each only if its files changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from catto.evaluation.metrics import METRICS, auroc, brier, ece, nll
from catto.evaluation.metrics import accuracy as share_right
from catto.evaluation.resampling import MetricFunction
from catto.evaluation.statistics import bootstrap_table, null_band, over_seeds
from catto.methods import Budget, order
from catto.records import DataError, Question, content_hash
from catto.report.loading import Answered, Protocol, file_hash
from catto.report.numbers import (
    Band,
    CellNumbers,
    GroupNumbers,
    Number,
    Numbers,
    Spread,
    Versus,
    World,
    finite,
)
from catto.report.results import VERSION, Cell, Results
from catto.report.seeds import Name, Scored, mean_difference, mean_interval, mean_null, scored
from catto.report.selected import selection_of

__all__ = ["BASELINE", "Tick", "blocks", "measure", "steps"]

BASELINE = "dpo"
COMPARED: tuple[Name, ...] = ("accuracy", "ece")
# With a bootstrap interval; the others are slow (a smooth ECE takes a millisecond) and read beside these.
WITH_INTERVAL = ("accuracy", "ece", "brier", "nll", "auroc")
VALUE_ONLY = ("mean_confidence", "debiased_ece", "smooth_ece", "aurc")

Tick = Callable[[], None]
Questions = Mapping[str, Mapping[str, Question]]
Place = tuple[str, str, str, Budget | None, int]


@dataclass(frozen=True)
class _Group:
    """Cells that differ by seed alone, with the DPO cells of the same seeds and budget."""

    budget: Budget | None
    cells: list[Answered]
    baseline: list[Answered]


def place_of(cell: Cell | CellNumbers) -> Place:
    """What tells a cell from all others."""
    return cell.task, cell.trained_on, cell.method, cell.budget, cell.seed


def blocks(cells: Sequence[Cell]) -> tuple[Budget | None, ...]:
    """The budgets that the tables show; a method that is the same in all of them stands in each."""
    found = {cell.budget for cell in cells if cell.budget is not None}
    return tuple(budget for budget in ("paper", "matched") if budget in found) or (None,)


def steps(results: Results) -> int:
    """How often `measure` ticks: once a cell and once a group."""
    return len(results.cells) + len(_places(results))


def measure(
    results: Results,
    folder: Path,
    cells: Sequence[Answered],
    questions: Questions,
    known: Numbers | None = None,
    tick: Tick = lambda: None,
) -> Numbers:
    """Measure all cells and groups; those of `known` whose files are the same are taken over."""
    protocol = Protocol.of(results)
    old_cells = {one.input: one for one in known.cells} if known else {}
    old_groups = {one.input: one for one in known.groups} if known else {}
    hashes = {place_of(one.cell): _cell_hash(one.cell, results, folder, protocol) for one in cells}
    measured: dict[Place, CellNumbers] = {}
    for one in cells:
        key = hashes[place_of(one.cell)]
        measured[place_of(one.cell)] = old_cells.get(key) or _cell(one, folder, questions, protocol, key)
        tick()
    groups: list[GroupNumbers] = []
    for group in _groups(results, cells):
        key = content_hash([group.budget, [hashes[place_of(one.cell)] for one in (*group.cells, *group.baseline)]])
        groups.append(old_groups.get(key) or _group(group, measured, protocol, key))
        tick()
    return Numbers(
        level=protocol.level,
        bins=protocol.bins,
        resamples=protocol.resamples,
        cells=tuple(measured.values()),
        groups=tuple(groups),
    )


def _cell_hash(cell: Cell, results: Results, folder: Path, protocol: Protocol) -> str:
    files = [cell.predictions, cell.candidates, *results.questions.get(cell.task, ())]
    digests = [None if name is None else file_hash(folder / name) for name in files]
    return content_hash([VERSION, asdict(protocol), place_of(cell), digests, cell.tau])


def _cell(one: Answered, folder: Path, questions: Questions, protocol: Protocol, key: str) -> CellNumbers:
    cell, c, z = one.cell, one.confidence, one.correct
    chosen: dict[str, MetricFunction] = {
        "accuracy": share_right,
        "ece": partial(ece, bins=protocol.bins),
        "brier": brier,
        "nll": nll,
        "auroc": auroc,
    }
    table = bootstrap_table(chosen, c, z, resamples=protocol.resamples, level=protocol.level)
    metrics = {name: Number.of(interval) for name, interval in table.items()}
    metrics |= {name: Number(value=finite(METRICS[name](c, z))) for name in VALUE_ONLY}
    null = null_band(chosen["ece"], c, simulations=protocol.resamples, level=protocol.level)
    return CellNumbers(
        **cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}),
        input=key,
        n=len(one),
        model=one.model,
        metrics=metrics,
        null=Band.of(null),
        fallback_rate=float(one.fallback.mean()),
        accuracy_unparsed_wrong=float((z & ~one.fallback).mean()),
        world=_world(one, questions.get(cell.task, {}), folder / cell.predictions),
        selection=selection_of(cell, folder),
    )


def _world(one: Answered, questions: Mapping[str, Question], source: Path) -> World | None:
    """Compare with the exact posterior; None where the questions carry none."""
    for row, name in enumerate(one.question, 1):
        if questions and name not in questions:
            raise DataError(source, row, f"question: {name!r} is not among the task's questions")
    asked = [questions[name] for name in one.question] if questions else []
    exact = [question.posterior for question in asked if question.posterior is not None]
    if not exact or len(exact) < len(asked):
        return None
    of_answer = np.array([row.get(label or "", 0.0) for row, label in zip(exact, one.label, strict=True)])
    best = [max(row, key=lambda label: row[label]) for row in exact]
    return World(
        true_error=float(np.abs(one.confidence - of_answer).mean()),
        bayes_accuracy=float(np.mean([label == question.gold for label, question in zip(best, asked, strict=True)])),
        regret=float(np.mean([row[label] for row, label in zip(exact, best, strict=True)] - of_answer)),
    )


def _places(results: Results) -> list[tuple[Budget | None, str, str, str]]:
    """Every (budget, trained_on, task, method) that has cells, in the order of the tables."""
    found: dict[tuple[Budget | None, str, str, str], None] = {}
    for budget in blocks(results.cells):
        for cell in sorted(results.cells, key=lambda cell: order(cell.method)):
            if cell.budget in (None, budget):
                found[budget, cell.trained_on, cell.task, cell.method] = None
    return list(found)


def _groups(results: Results, cells: Sequence[Answered]) -> list[_Group]:
    found = []
    for budget, trained_on, task, method in _places(results):
        same = [
            one
            for one in sorted(cells, key=lambda one: one.cell.seed)
            if (one.cell.trained_on, one.cell.task) == (trained_on, task) and one.cell.budget in (None, budget)
        ]
        mine = [one for one in same if one.cell.method == method]
        _check_seeds(mine)
        by_seed = {one.cell.seed: one for one in same if one.cell.method == BASELINE}
        paired = method != BASELINE and all(one.cell.seed in by_seed for one in mine)
        found.append(_Group(budget, mine, [by_seed[one.cell.seed] for one in mine] if paired else []))
    return found


def _check_seeds(cells: Sequence[Answered]) -> None:
    seeds = [one.cell.seed for one in cells]
    if len(set(seeds)) < len(seeds):
        cell = cells[0].cell
        raise ValueError(f"cells: {cell.method} on {cell.task} has several cells of one seed and budget")


def _group(group: _Group, by_place: Mapping[Place, CellNumbers], protocol: Protocol, key: str) -> GroupNumbers:
    numbers = [by_place[place_of(one.cell)] for one in group.cells]
    first = group.cells[0].cell
    return GroupNumbers(
        task=first.task,
        trained_on=first.trained_on,
        method=first.method,
        budget=group.budget,
        seeds=tuple(one.seed for one in numbers),
        input=key,
        n=max(one.n for one in numbers),
        metrics=_metric_spread(numbers),
        intervals=_intervals(group.cells, numbers, protocol),
        null=_null(group.cells, numbers, protocol),
        fallback_rate=_spread([one.fallback_rate for one in numbers]),
        accuracy_unparsed_wrong=_spread([one.accuracy_unparsed_wrong for one in numbers]),
        versus=_versus(group.cells, group.baseline, protocol),
        versus_seed={
            mine.cell.seed: _versus([mine], [base], protocol)
            for mine, base in zip(group.cells, group.baseline, strict=False)
        },
        world=_world_spread(numbers),
        selection=_selection_spread(numbers),
    )


def _metric_spread(numbers: Sequence[CellNumbers]) -> dict[str, Spread]:
    """The metrics that are defined at every seed."""
    found = {name: [one.metrics[name].value for one in numbers] for name in numbers[0].metrics}
    return {name: _spread([v for v in values if v is not None]) for name, values in found.items() if None not in values}


def _spread(values: Sequence[float]) -> Spread:
    found = over_seeds(values)
    return Spread(mean=found.mean, std=found.std)


def _intervals(cells: Sequence[Answered], numbers: Sequence[CellNumbers], protocol: Protocol) -> dict[str, Number]:
    """Of one seed the cell's own interval, of several that of their mean."""
    if len(cells) == 1:
        return {name: numbers[0].metrics[name] for name in COMPARED}
    return {
        name: Number.of(mean_interval(_scored(name, cells, protocol), protocol.resamples, protocol.level))
        for name in COMPARED
    }


def _null(cells: Sequence[Answered], numbers: Sequence[CellNumbers], protocol: Protocol) -> Band:
    if len(cells) == 1:
        return numbers[0].null
    found = mean_null([one.confidence for one in cells], protocol.bins, protocol.resamples, protocol.level)
    return Band.of(found)


def _scored(name: Name, cells: Sequence[Answered], protocol: Protocol) -> list[Scored]:
    return [scored(name, one.question, one.confidence, one.correct, protocol.bins) for one in cells]


def _versus(cells: Sequence[Answered], baseline: Sequence[Answered], protocol: Protocol) -> dict[str, Versus]:
    if not baseline:
        return {}
    return {
        name: Versus.of(
            mean_difference(
                _scored(name, cells, protocol), _scored(name, baseline, protocol), protocol.resamples, protocol.level
            )
        )
        for name in COMPARED
    }


def _world_spread(numbers: Sequence[CellNumbers]) -> dict[str, Spread]:
    worlds = [one.world for one in numbers if one.world is not None]
    if len(worlds) < len(numbers):
        return {}
    return {name: _spread([getattr(world, name) for world in worlds]) for name in World.model_fields}


def _selection_spread(numbers: Sequence[CellNumbers]) -> dict[int, dict[str, Spread]]:
    """Over the seeds, for every k that all of them have."""
    common = set.intersection(*(set(one.selection) for one in numbers))
    return {
        k: {rule: _spread([one.selection[k][rule].value or 0.0 for one in numbers]) for rule in numbers[0].selection[k]}
        for k in sorted(common)
    }
