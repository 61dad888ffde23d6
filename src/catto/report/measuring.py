"""Read the files of an experiment: each cell's answers as columns, and the questions they answer.

Confidence@k of a cell: the accuracy of each way to pick one of k candidates, and what is known of the candidates.

Predictions -> numbers: measure every cell, then every group of seeds, each only if its files changed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from catto.files import read_lines, read_records
from catto.measure import Sources
from catto.methods import METHODS, Budget, known, method, order
from catto.metrics.binning import Bools, Floats
from catto.metrics.catalogue import METRICS, auroc, brier, confidence_gap, ece, nll
from catto.metrics.catalogue import accuracy as share_right
from catto.metrics.selection import candidates, select, within_questions
from catto.metrics.statistics import Answers, MetricFunction, bootstrap_table, holm, null_band, over_seeds
from catto.problems import DataError
from catto.records import Prediction, Question, content_hash
from catto.report import VERSION
from catto.report.numbers import (
    Band,
    Cell,
    CellNumbers,
    GroupNumbers,
    Number,
    Numbers,
    Results,
    Spread,
    Training,
    Versus,
    World,
    finite,
)
from catto.report.seeds import Name, Seed, mean_difference, mean_interval, mean_null, scored

# ---- loading


@dataclass(frozen=True)
class Protocol:
    """How the numbers are made: bins of the ECE, resamples and simulations, whether unparsed answers count wrong."""

    bins: int = 20
    resamples: int = 1000
    level: float = 0.95
    unparsed_wrong: bool = False

    @classmethod
    def of(cls, results: Results) -> Protocol:
        """Read the recipe's evaluation block; what it leaves out is the default."""
        block: dict[str, Any] = results.recipe.get("evaluation") or {}
        return cls(
            bins=int(block.get("bins", cls.bins)),
            resamples=int(block.get("resamples", cls.resamples)),
            unparsed_wrong=block.get("unparsed") == "wrong",
        )


@dataclass(frozen=True)
class Answered:
    """The answers of one cell, one a question. question, label: N texts; confidence, correct, fallback: (N,)."""

    cell: Cell
    question: list[str]
    label: list[str | None]
    confidence: Floats
    correct: Bools
    fallback: Bools
    sources: Sources
    model: str

    def __len__(self) -> int:
        return len(self.question)


def predictions_of(cell: Cell, folder: Path) -> Iterator[Prediction]:
    """Yield the cell's predictions, each checked to be of its task and to stand once."""
    path, seen = folder / cell.predictions, set[str]()
    for row, prediction in enumerate(read_records(path, Prediction), 1):
        if prediction.task != cell.task:
            raise DataError(path, row, f"task: expected {cell.task!r}, got {prediction.task!r}")
        if prediction.question in seen:
            raise DataError(path, row, f"question: {prediction.question!r} is answered twice; expected one line each")
        seen.add(prediction.question)
        yield prediction


def answered(cell: Cell, predictions: Sequence[Prediction], folder: Path, unparsed_wrong: bool = False) -> Answered:
    """Put a cell's predictions into columns."""
    if not predictions:
        raise DataError(folder / cell.predictions, None, "holds no rows")
    fallback = np.array([one.source == "fallback" for one in predictions])
    correct = np.array([one.label == one.gold for one in predictions])
    return Answered(
        cell=cell,
        question=[one.question for one in predictions],
        label=[one.label for one in predictions],
        confidence=np.array([one.confidence for one in predictions], dtype=np.float64),
        correct=correct & ~fallback if unparsed_wrong else correct,
        fallback=fallback,
        sources=Sources.of(one.source for one in predictions),
        model=predictions[0].model,
    )


def questions_of(results: Results, folder: Path) -> dict[str, dict[str, Question]]:
    """Read the test questions: task -> id -> question."""
    return {
        task: {question.id: question for path in paths for question in read_records(folder / path, Question)}
        for task, paths in results.questions.items()
    }


def row_count(path: Path) -> int:
    """How many records a file holds."""
    return sum(1 for _ in read_lines(path))


def file_hash(path: Path) -> str:
    """A digest of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(path, None, error.strerror or str(error)) from None


# ---- selected


CONFIDENCE, MAJORITY = "most confident", "majority vote"
# Rule -> how a column is headed.
RULE_TITLES = {
    CONFIDENCE: "Confidence",
    MAJORITY: "Majority",
    "confidence-weighted vote": "Weighted vote",
    "mean log-probability": "Mean log-prob.",
    "one random sample": "Random",
    "oracle": "Oracle",
}


@dataclass(frozen=True)
class Selection:
    """rules: k -> rule -> accuracy. sampled: AUROC within questions, how many have pairs, fallback, temperatures."""

    rules: dict[int, dict[str, Number]] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)


def selection_of(cell: Cell, folder: Path) -> Selection:
    """Measure every rule at k = 1, 2, 4, ... up to the number of candidates."""
    if cell.candidates is None:
        return Selection()
    path = folder / cell.candidates
    try:
        predictions = list(read_records(path, Prediction))
        tau = _ranking_tau(cell, predictions)
        given = candidates(predictions, tau)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
    samples = given.label.shape[1]
    sizes = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    rules = {k: {one.rule: _number(one.accuracy, one.low, one.high) for one in select(given, k)} for k in sizes}
    within = within_questions(given)
    drawn = predictions[0].temperature if cell.sampling_temperature is None else cell.sampling_temperature
    sampled = {
        "questions_with_both": float(within.questions),
        "sample_fallback_rate": Sources.of(one.source for one in predictions).share("fallback"),
        "sampling_temperature": drawn,
        "tau": tau,
    }
    return Selection(rules, sampled | ({"auroc_within": within.value} if within.pairs else {}))


def _ranking_tau(cell: Cell, predictions: Sequence[Prediction]) -> float:
    """The temperature at which confidences are compared: the cell's; 1 where the files do not allow another."""
    if not any(one.logsumexp is not None for one in predictions):
        return 1.0
    return predictions[0].temperature or 1.0 if cell.tau is None else cell.tau


def _number(value: float, low: float, high: float) -> Number:
    return Number(value=value, low=finite(low), high=finite(high))


# ---- measure


BASELINE = "dpo"
COMPARED: tuple[Name, ...] = ("accuracy", "ece", "brier", "auroc")
# Swaps a comparison of a table: m comparisons multiply the smallest p-value by m, which is then m / (1 + 50 m) < 0.02.
# With a fixed number of swaps nothing in a large table could be shown.
SWAPS = 50
# Without a bootstrap interval: they are slow (a smooth ECE takes a millisecond) and read beside the others.
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

    @property
    def table(self) -> tuple[Budget | None, bool]:
        """The table in which the group stands: its budget, and whether in distribution."""
        return self.budget, self.cells[0].cell.task == self.cells[0].cell.trained_on


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
    found = _groups(results, cells)
    tables = Counter(group.table for group in found if group.baseline)
    for group in found:
        inputs = [hashes[place_of(one.cell)] for one in (*group.cells, *group.baseline)]
        swaps = max(protocol.resamples, SWAPS * len(COMPARED) * tables[group.table])
        papers = _papers_budget(group, results)
        key = content_hash([group.budget, swaps, papers, inputs])
        groups.append(old_groups.get(key) or _group(group, measured, protocol, swaps, papers, key))
        tick()
    return Numbers(
        level=protocol.level,
        bins=protocol.bins,
        resamples=protocol.resamples,
        cells=tuple(measured.values()),
        groups=tuple(_corrected(groups)),
    )


def _corrected(groups: Sequence[GroupNumbers]) -> list[GroupNumbers]:
    """Correct the p-values of each table, by Holm; a comparison with mostly forced answers is left out of it."""
    forced = {
        (group.budget, group.trained_on, group.task)
        for group in groups
        if group.method == BASELINE and group.sources.forced
    }
    families: dict[tuple[Budget | None, bool], list[tuple[int, str]]] = {}
    for place, group in enumerate(groups):
        if not group.sources.forced and (group.budget, group.trained_on, group.task) not in forced:
            family = families.setdefault((group.budget, group.task == group.trained_on), [])
            family += [(place, metric) for metric in group.versus]
    corrected: dict[tuple[int, str], float] = {}
    for members in families.values():
        p_values = holm([groups[place].versus[metric].p_value for place, metric in members])
        corrected |= dict(zip(members, p_values, strict=True))
    return [
        group.model_copy(
            update={
                "versus": {
                    metric: one.model_copy(update={"p_corrected": corrected.get((place, metric))})
                    for metric, one in group.versus.items()
                }
            }
        )
        for place, group in enumerate(groups)
    ]


def _cell_hash(cell: Cell, results: Results, folder: Path, protocol: Protocol) -> str:
    files = [cell.predictions, cell.candidates, *results.questions.get(cell.task, ())]
    digests = [None if name is None else file_hash(folder / name) for name in files]
    return content_hash([VERSION, asdict(protocol), place_of(cell), digests, cell.tau, cell.sampling_temperature])


def _cell(one: Answered, folder: Path, questions: Questions, protocol: Protocol, key: str) -> CellNumbers:
    cell, c, z = one.cell, one.confidence, one.correct
    chosen: dict[str, MetricFunction] = {
        "accuracy": share_right,
        "ece": partial(ece, bins=protocol.bins),
        "brier": brier,
        "nll": nll,
        "auroc": auroc,
        "gap": confidence_gap,
    }
    table = bootstrap_table(chosen, [Answers(None, c, z)], resamples=protocol.resamples, level=protocol.level)
    metrics = {name: Number.of(interval) for name, interval in table.items()}
    gap, selection = metrics.pop("gap"), selection_of(cell, folder)
    metrics |= {name: Number(value=finite(METRICS[name](c, z))) for name in VALUE_ONLY}
    null = null_band(chosen["ece"], c, simulations=protocol.resamples, level=protocol.level)
    return CellNumbers(
        **cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}),
        input=key,
        n=len(one),
        model=one.model,
        metrics=metrics,
        gap=gap,
        null=Band.of(null),
        sources=one.sources,
        fallback_rate=float(one.fallback.mean()),
        plain_rate=one.sources.share("plain"),
        accuracy_unparsed_wrong=float((z & ~one.fallback).mean()),
        world=_world(one, questions.get(cell.task, {}), folder / cell.predictions),
        selection=selection.rules,
        sampled=selection.sampled,
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
    for budget, trained_on, task, name in _places(results):
        same = [
            one
            for one in sorted(cells, key=lambda one: one.cell.seed)
            if (one.cell.trained_on, one.cell.task) == (trained_on, task) and one.cell.budget in (None, budget)
        ]
        mine = [one for one in same if one.cell.method == name]
        _check_seeds(mine)
        by_seed = {one.cell.seed: one for one in same if one.cell.method == BASELINE}
        paired = name != BASELINE and all(one.cell.seed in by_seed for one in mine)
        found.append(_Group(budget, mine, [by_seed[one.cell.seed] for one in mine] if paired else []))
    return found


def _check_seeds(cells: Sequence[Answered]) -> None:
    seeds = [one.cell.seed for one in cells]
    if len(set(seeds)) < len(seeds):
        cell = cells[0].cell
        raise ValueError(f"cells: {cell.method} on {cell.task} has several cells of one seed and budget")


def _group(
    group: _Group, by_place: Mapping[Place, CellNumbers], protocol: Protocol, swaps: int, papers: bool, key: str
) -> GroupNumbers:
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
        gap=_gap(group.cells, numbers, protocol),
        null=_null(group.cells, numbers, protocol),
        sources=Sources.total_of(one.sources for one in numbers),
        fallback_rate=_spread([one.fallback_rate for one in numbers]),
        plain_rate=_spread([one.plain_rate for one in numbers]),
        accuracy_unparsed_wrong=_spread([one.accuracy_unparsed_wrong for one in numbers]),
        papers_budget=papers,
        versus=_versus(group.cells, group.baseline, protocol, swaps),
        versus_seed={
            mine.cell.seed: _versus([mine], [base], protocol, protocol.resamples)
            for mine, base in zip(group.cells, group.baseline, strict=False)
        },
        world=_world_spread(numbers),
        selection=_selection_spread(numbers),
        sampled=_sampled_spread(numbers),
    )


def _papers_budget(group: _Group, results: Results) -> bool:
    """Whether every seed's model was trained as the paper's; of a rescaled one, the model that is rescaled."""
    return all(
        papers_budget(one.cell.method, group.budget, trained_model(one.cell, group.budget, results))
        for one in group.cells
    )


def papers_budget(name: str, budget: Budget | None, training: Training | None) -> bool:
    """Return whether a model had the paper's training: its budget, and its epochs and pairs as far as recorded.

    A method that both budgets share is the same model in both. training: of the model itself, or of the one that is
    rescaled; None where nothing is recorded.
    """
    if not known(name) or (budget == "matched" and method(name).budgeted):
        return False
    if training is None:
        return True
    of = method(name)
    effort = (METHODS[of.start] if of.stage == "scaling" else of).effort["paper"]
    pairs = training.rows is None or effort.pairs is None or training.rows == effort.pairs
    return pairs and training.epochs in (None, effort.epochs)


def trained_model(cell: Cell, budget: Budget | None, results: Results) -> Training | None:
    """How the model of a cell was trained, or that which it rescales; None where nothing is recorded."""
    if cell.training is not None or not known(cell.method) or method(cell.method).stage != "scaling":
        return cell.training
    start = (cell.task, cell.trained_on, method(cell.method).start, cell.seed)
    return next(
        (
            one.training
            for one in results.cells
            if (one.task, one.trained_on, one.method, one.seed) == start and one.budget in (None, budget)
        ),
        None,
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


def _gap(cells: Sequence[Answered], numbers: Sequence[CellNumbers], protocol: Protocol) -> Number:
    if len(cells) == 1:
        return numbers[0].gap
    return Number.of(mean_interval(_scored("gap", cells, protocol), protocol.resamples, protocol.level))


def _null(cells: Sequence[Answered], numbers: Sequence[CellNumbers], protocol: Protocol) -> Band:
    if len(cells) == 1:
        return numbers[0].null
    found = mean_null([one.confidence for one in cells], protocol.bins, protocol.resamples, protocol.level)
    return Band.of(found)


def _scored(name: Name, cells: Sequence[Answered], protocol: Protocol) -> list[Seed]:
    return [scored(name, one.question, one.confidence, one.correct, protocol.bins) for one in cells]


def _versus(
    cells: Sequence[Answered], baseline: Sequence[Answered], protocol: Protocol, swaps: int
) -> dict[str, Versus]:
    """The metrics less those of DPO; an AUROC that one side does not have is left out."""
    found = {}
    for name in COMPARED if baseline else ():
        mine, other = (_scored(name, side, protocol) for side in (cells, baseline))
        comparison = mean_difference(mine, other, protocol.resamples, protocol.level, swaps=swaps)
        if isfinite(comparison.difference):
            found[str(name)] = Versus.of(comparison)
    return found


def _world_spread(numbers: Sequence[CellNumbers]) -> dict[str, Spread]:
    worlds = [one.world for one in numbers if one.world is not None]
    if len(worlds) < len(numbers):
        return {}
    return {name: _spread([getattr(world, name) for world in worlds]) for name in World.model_fields}


def _sampled_spread(numbers: Sequence[CellNumbers]) -> dict[str, Spread]:
    """What is known of the samples, as far as every seed knows it."""
    common = set.intersection(*(set(one.sampled) for one in numbers))
    return {name: _spread([one.sampled[name] for one in numbers]) for name in numbers[0].sampled if name in common}


def _selection_spread(numbers: Sequence[CellNumbers]) -> dict[int, dict[str, Spread]]:
    """Over the seeds, for every k that all of them have."""
    common = set.intersection(*(set(one.selection) for one in numbers))
    return {
        k: {rule: _spread([one.selection[k][rule].value or 0.0 for one in numbers]) for rule in numbers[0].selection[k]}
        for k in sorted(common)
    }
