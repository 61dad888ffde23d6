"""Predictions -> numbers: measure every cell, then every group of seeds, each only where its files changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from catto.files import read_records, sha256
from catto.measure import GAP, GradedAnswers, MeasureSettings, Sources, Unparsed, compare_runs, measure_runs
from catto.methods import BUDGETS, METHODS, Budget, known, method, order, scaled_kind, unscaled
from catto.metrics.binning import Floats
from catto.metrics.catalogue import HEADLINE, Versus, holm
from catto.metrics.errors import brier_split
from catto.metrics.preference import Part, preference_interval
from catto.metrics.ranking import threshold_for_risk
from catto.metrics.selection import LEVEL, gather_candidates, measure_rules, within_questions
from catto.metrics.statistics import Answers, Interval, SeedSummary, summarise_seeds
from catto.metrics.temperature import rescaled
from catto.metrics.vector import scale_by_vector
from catto.problems import DataError, locating
from catto.records import PairMargin, Prediction, Question, content_hash
from catto.report import VERSION
from catto.report.numbers import Cell, CellNumbers, GroupNumbers, Numbers, Place, Results, Training, Verdict

BASELINE = "dpo"
COMPARED = ("accuracy", "ece", "brier", "auroc")
# The metrics with an interval; the other headline ones are slow to resample, and read beside these.
RESAMPLED = ("accuracy", "ece", "brier", "nll", "auroc", GAP)
# Held-out preference accuracy -> what of the responses it reads.
PREFERENCE: Mapping[str, Part] = {"preference_accuracy": "whole", "preference_accuracy_reasoning": "reasoning"}
# Swaps for each comparison of a table: m comparisons multiply the smallest p-value by m, which is then m / (1 + 50 m)
# < 0.02. With a fixed number of swaps nothing in a large table could be shown.
SWAPS = 50
# The error rate that a threshold keeps, and the probability that it fails to.
RISK, DELTA = 0.05, 0.05

Progress = Callable[[int, int], object]  # steps that are done, and their total


def silent(_done: int, _total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Answered(GradedAnswers):
    """The answers of one cell, one for each question. label: N texts, None for an answer that could not be read.

    asked: the N questions; empty where they are not known. margins: of held-out preference pairs, where there are any.
    """

    cell: Cell
    label: list[str | None]
    model: str
    asked: list[Question]
    margins: Sequence[PairMargin] = ()

    @property
    def posteriors(self) -> list[dict[str, float]]:
        """The exact posterior of each question; empty where one of them has none."""
        exact = [question.posterior for question in self.asked if question.posterior is not None]
        return exact if len(exact) == len(self) else []

    @property
    def truth(self) -> Floats:
        """The exact probability of each answer, where there are posteriors. (N,)."""
        pairs = zip(self.posteriors, self.label, strict=True)
        return np.array([posterior.get(label or "", 0.0) for posterior, label in pairs])


def read_cell(
    cell: Cell, folder: Path, asked: Mapping[str, Question], unparsed: Unparsed
) -> tuple[Answered, list[Prediction]]:
    """Read the predictions of a cell, each of its task and the only one of its question, and put them into columns.

    asked: the questions of its task by their id; empty where they are not known.
    """
    path, answers = folder / cell.predictions, dict[str, Prediction]()
    for row, prediction in enumerate(read_records(path, Prediction), 1):
        name = prediction.question
        if prediction.task != cell.task:
            raise DataError(path, row, f"task: expected {cell.task!r}, got {prediction.task!r}")
        if name in answers:
            raise DataError(path, row, f"question: {name!r} is answered twice; expected one line each")
        if asked and name not in asked:
            raise DataError(path, row, f"question: {name!r} is not among the task's questions")
        answers[name] = prediction
    if not answers:
        raise DataError(path, None, "holds no rows")
    predictions = list(answers.values())
    margins = [] if cell.preference is None else list(read_records(folder / cell.preference, PairMargin))
    answered = Answered(
        source=path,
        confidence=np.array([prediction.confidence for prediction in predictions], dtype=np.float64),
        question=list(answers),
        read_as=[prediction.source for prediction in predictions],
        by=None,
        correct=np.array([prediction.label == prediction.gold for prediction in predictions]),
        cell=cell,
        label=[prediction.label for prediction in predictions],
        model=predictions[0].model,
        asked=[asked[name] for name in answers if asked],
        margins=margins,
    )
    return answered.unparsed_wrong() if unparsed == "wrong" else answered, predictions


class Group(NamedTuple):
    """Cells that differ by seed alone, and the DPO cells of the same seeds and budget; both as indices of the cells.

    table: the budget, and whether the cells are tested on the task that they were trained on.
    """

    table: tuple[Budget | None, bool]
    cells: list[int]
    baseline: list[int]


def plan_groups(cells: Sequence[Cell]) -> list[Group]:
    """Group the cells by budget, method, training set and task, in the order of the tables.

    A method that is the same in both budgets has a group in each.
    """
    groups, used = [], {cell.budget for cell in cells}
    budgets: Sequence[Budget | None] = [budget for budget in BUDGETS if budget in used]
    for budget in budgets or [None]:
        places: dict[tuple[str, str, str], dict[int, int]] = {}  # -> seed -> index
        for index, cell in sorted(enumerate(cells), key=lambda pair: order(pair[1].method)):
            if cell.budget in (None, budget):
                seeds = places.setdefault((cell.trained_on, cell.task, cell.method), {})
                if seeds.setdefault(cell.seed, index) != index:
                    raise ValueError(f"cells: {cell.method} on {cell.task} has several cells of one seed and budget")
        for (trained_on, task, name), seeds in places.items():
            baseline = places.get((trained_on, task, BASELINE), {})
            paired = sorted(seeds) if name != BASELINE and seeds.keys() <= baseline.keys() else []
            mine = [seeds[seed] for seed in sorted(seeds)]
            groups.append(Group((budget, trained_on == task), mine, [baseline[seed] for seed in paired]))
    return groups


def measure_results(
    results: Results, folder: Path, cells: Sequence[Answered], known: Numbers | None = None, progress: Progress = silent
) -> Numbers:
    """Measure all cells and groups; the numbers of `known` whose files are the same are kept."""
    evaluation, total = results.evaluation, len(cells) + len(plan_groups([answered.cell for answered in cells]))
    settings = MeasureSettings(RESAMPLED, evaluation.bins, evaluation.resamples)
    old: dict[str, Any] = {measured.input: measured for measured in (*known.cells, *known.groups)} if known else {}
    protocol = [VERSION, evaluation.bins, evaluation.resamples, evaluation.unparsed]
    digests: dict[str | None, str | None] = {None: None}  # the questions of a task are those of many cells
    numbers: list[CellNumbers] = []
    groups: list[GroupNumbers] = []
    for answered in cells:
        cell = answered.cell
        files = [cell.predictions, cell.candidates, cell.validation, cell.preference]
        files += results.questions.get(cell.task, ())
        digests |= {name: sha256(folder / name)[:16] for name in files if name is not None and name not in digests}
        place = cell.model_dump(include={*Place.model_fields, "seed", "tau", "sampling_temperature"})
        key = content_hash([protocol, place, [digests[name] for name in files]])
        numbers.append(old.get(key) or measure_cell(answered, folder, settings, evaluation.unparsed, key))
        progress(len(numbers), total)
    for group in measure_groups(results, cells, numbers, settings, old):
        groups.append(group)
        progress(len(numbers) + len(groups), total)
    measured: Any = {"cells": tuple(numbers), "groups": tuple(correct_groups(groups))}
    made = Numbers(level=settings.level, bins=evaluation.bins, resamples=evaluation.resamples, **measured)
    return made.model_copy(update={"verdict": decide(made.first_screen, cells, settings, known)})


# ---- cells


def measure_cell(mine: Answered, folder: Path, settings: MeasureSettings, unparsed: Unparsed, key: str) -> CellNumbers:
    """Measure one method on one task at one seed."""
    resampled, sources = measure_runs([mine.by_question], settings), Sources.of(mine.read_as or ())
    metrics = {name: metric.interval for name, metric in resampled.items()}
    gap, null = metrics.pop(GAP), resampled["ece"].null
    assert null is not None  # as of every calibration metric
    others = replace(settings, metrics=tuple(name for name in HEADLINE if name not in metrics)).functions()
    split = brier_split(mine.confidence, mine.correct, bins=settings.bins)
    values = {name: metric(mine.confidence, mine.correct) for name, metric in others.items()}
    values |= {f"brier_{part}": getattr(split, part) for part in ("reliability", "resolution", "uncertainty")}
    metrics |= {name: Interval(value, nan, nan, settings.level) for name, value in values.items()}
    metrics |= preference_of([mine], settings)
    selection, sampled = selection_of(mine.cell, folder, unparsed)
    return CellNumbers(
        **mine.cell.model_dump(include={*Place.model_fields, "seed"}),
        input=key,
        n=len(mine),
        model=mine.model,
        metrics=metrics,
        gap=gap,
        null=null,
        sources=sources,
        selection=selection,
        others={
            **against_posterior(mine),
            "fallback_rate": sources.share("fallback"),
            "plain_rate": sources.share("plain"),
            "accuracy_unparsed_wrong": float(mine.unparsed_wrong().correct.mean()),
            **sampled,
            **risk_of(mine, folder, unparsed),
            **({"preference_pairs": float(len(mine.margins))} if mine.margins else {}),
        },
    )


def selection_of(
    cell: Cell, folder: Path, unparsed: Unparsed
) -> tuple[dict[int, dict[str, Interval]], dict[str, float]]:
    """Measure every rule at k = 1, 2, 4, ... and at the number of candidates: k -> rule -> accuracy.

    With it: AUROC within questions, the number of questions that have a right and a wrong sample, the fallback rate,
    and the temperatures at which the samples were drawn and are compared.
    """
    if cell.candidates is None:
        return {}, {}
    path = folder / cell.candidates
    predictions = list(read_records(path, Prediction))
    with locating(path):
        # Without the vocabulary's logsumexp a confidence is known at temperature 1 alone.
        scalable = any(prediction.logsumexp is not None for prediction in predictions)
        tau = (predictions[0].temperature or 1.0 if cell.tau is None else cell.tau) if scalable else 1.0
        scaled = rescaled(predictions, tau)  # while forced answers have a label, without which none is rescaled
        wrong = [row.model_copy(update={"label": None}) if row.source == "fallback" else row for row in scaled]
        given = gather_candidates(wrong if unparsed == "wrong" else scaled)
    sizes = sorted({*(2**power for power in range(given.label.shape[1].bit_length())), given.label.shape[1]})
    chosen = {k: measure_rules(given, k) for k in sizes}
    rules = {k: {each.rule: Interval(each.accuracy, each.low, each.high, LEVEL) for each in chosen[k]} for k in chosen}
    within = within_questions(given)
    drawn = predictions[0].temperature if cell.sampling_temperature is None else cell.sampling_temperature
    sampled = {
        "questions_with_both": float(within.questions),
        "sample_fallback_rate": Sources.of(prediction.source for prediction in predictions).share("fallback"),
        "sampling_temperature": drawn,
        "tau": tau,
    }
    return rules, sampled | ({"auroc_within": within.value} if within.pairs else {})


def risk_of(answered: Answered, folder: Path, unparsed: Unparsed) -> dict[str, float]:
    """Fit the threshold that keeps the RISK on the validation answers, and apply it to the test answers.

    risk_promised: 1, or 0 where no threshold can promise it and nothing is answered.
    """
    cell = answered.cell
    if cell.validation is None:
        return {}
    path = folder / cell.validation
    predictions = list(read_records(path, Prediction))
    with locating(path):
        is_scaled, kind = unscaled(cell.method) != cell.method, scaled_kind(cell.method)
        if cell.vector is not None:
            predictions = scale_by_vector(predictions, cell.vector)
        elif cell.tau is not None and is_scaled and kind != "vector":
            predictions = rescaled(predictions, cell.tau, kind)
        wrong = "fallback" if unparsed == "wrong" else None  # the source of answers that count as wrong
        correct = [prediction.label == prediction.gold and prediction.source != wrong for prediction in predictions]
        fitted = threshold_for_risk([prediction.confidence for prediction in predictions], correct, RISK, DELTA)
    if fitted.threshold is None:
        return {"risk_promised": 0.0, "risk_coverage": 0.0}
    right = answered.correct[answered.confidence >= fitted.threshold]
    numbers = {"risk_promised": 1.0, "risk_threshold": fitted.threshold, "risk_bound": fitted.bound}
    numbers["risk_coverage"] = len(right) / len(answered)
    return numbers | ({"risk_errors": float((~right).mean())} if len(right) else {})


def preference_of(runs: Sequence[Answered], settings: MeasureSettings) -> dict[str, Interval]:
    """Measure the held-out preference accuracy, a mean over runs; nothing where a run has no pairs.

    That of the reasoning is left out where no two responses of a run differ in their reasoning.
    """
    pairs = [run.margins for run in runs]
    if not all(pairs):
        return {}
    resamples = settings.draws(max(len(run) for run in pairs))
    intervals = {}
    for name, part in PREFERENCE.items():
        interval = preference_interval(pairs, part, resamples=resamples, level=settings.level, seed=settings.seed)
        if isfinite(interval.value):
            intervals[name] = interval
    return intervals


def against_posterior(answered: Answered) -> dict[str, float]:
    """Compare with the exact posterior; nothing where the questions carry none. All in [0, 1].

    true_error: mean |confidence - posterior(answer)|. bayes_accuracy: share of questions whose most probable label is
    the gold one. regret: mean of the largest posterior probability less that of the answer given.
    """
    posteriors = answered.posteriors
    if not posteriors:
        return {}
    best = [max(posterior, key=posterior.__getitem__) for posterior in posteriors]
    right = [label == question.gold for label, question in zip(best, answered.asked, strict=True)]
    return {
        "true_error": float(np.abs(answered.confidence - answered.truth).mean()),
        "bayes_accuracy": float(np.mean(right)),
        "regret": float(np.mean([max(posterior.values()) for posterior in posteriors] - answered.truth)),
    }


# ---- groups


def measure_groups(
    results: Results, cells: Sequence[Answered], numbers: Sequence[CellNumbers], settings: MeasureSettings, old: Any
) -> Iterator[GroupNumbers]:
    """Measure each method on each task over its seeds, and against DPO. old: groups of an earlier build, by input."""
    planned = plan_groups([answered.cell for answered in cells])
    methods = Counter(group.table for group in planned if group.baseline)
    for group in planned:
        budget, seeds = group.table[0], [numbers[index] for index in group.cells]
        swaps = max(results.evaluation.resamples, SWAPS * len(COMPARED) * methods[group.table])
        members = [cells[index].cell for index in group.cells]
        papers = all(papers_budget(cell.method, budget, trained_model(cell, budget, results)) for cell in members)
        key = content_hash([budget, swaps, papers, [numbers[index].input for index in (*group.cells, *group.baseline)]])
        if key in old:
            yield old[key]
            continue
        # The seeds of a method share their questions.
        runs, baseline = ([cells[index].by_question for index in indices] for indices in (group.cells, group.baseline))
        resampled = measure_runs(runs, replace(settings, metrics=(*COMPARED, GAP)))
        null, compared = resampled["ece"].null, replace(settings, metrics=COMPARED)
        assert null is not None  # as of every calibration metric
        yield GroupNumbers(
            **seeds[0].model_dump(include={"task", "trained_on", "method"}),
            budget=budget,
            seeds=tuple(cell.seed for cell in seeds),
            input=key,
            n=max(cell.n for cell in seeds),
            metrics=_spreads([cell.metrics for cell in seeds]),
            intervals={
                **{name: resampled[name].interval for name in COMPARED},
                **preference_of([cells[index] for index in group.cells], settings),
            },
            gap=resampled[GAP].interval,
            null=null,
            sources=Sources.total_of(cell.sources for cell in seeds),
            papers_budget=papers,
            versus=_versus(runs, baseline, compared, swaps),
            versus_seed={
                cell.seed: _versus([run], [base], compared)
                for cell, run, base in zip(seeds, runs, baseline, strict=False)
            },
            selection={
                k: _spreads([cell.selection[k] for cell in seeds])
                for k in sorted(set.intersection(*(set(cell.selection) for cell in seeds)))
            },
            others=_spreads([cell.others for cell in seeds]),
        )


def _spreads(seeds: Sequence[Mapping[str, Interval | float]]) -> dict[str, SeedSummary]:
    """Summarise each number that all seeds have; a threshold over the seeds that can promise one."""
    values: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        for name, number in seed.items():
            value = number.value if isinstance(number, Interval) else number
            values[name] += [value] if isfinite(value) else []
    full = {name: mine for name, mine in values.items() if len(mine) == len(seeds) or name.startswith("risk_")}
    return {name: summarise_seeds(mine) for name, mine in full.items()}


def _versus(
    runs: Sequence[Answers], baseline: Sequence[Answers], settings: MeasureSettings, swaps: int = 0
) -> dict[str, Versus]:
    """Compare with DPO, metric by metric; an AUROC that one side does not have is left out."""
    comparisons = compare_runs(runs, baseline, settings, swaps=swaps) if baseline else {}
    return {name: Versus(**vars(compared)) for name, compared in comparisons.items() if isfinite(compared.difference)}


def correct_groups(groups: Sequence[GroupNumbers]) -> list[GroupNumbers]:
    """Correct the p-values of each table by Holm; a comparison with mostly forced answers takes no part in it."""
    forced = {(group.budget, group.trained_on, group.task, group.method) for group in groups if group.sources.forced}
    families: dict[tuple[Budget | None, str], dict[tuple[int, str], float]] = defaultdict(dict)
    for index, group in enumerate(groups):
        place = group.budget, group.trained_on, group.task
        if not forced & {(*place, group.method), (*place, BASELINE)}:
            p_values = {(index, metric): versus.p_value for metric, versus in group.versus.items()}
            families[group.budget, group.setting] |= p_values
    corrected: dict[tuple[int, str], float] = {}
    for family in families.values():
        corrected |= zip(family, holm([*family.values()]), strict=True)
    judged = []
    for index, group in enumerate(groups):
        pairs = group.versus.items()
        versus = {name: replace(value, p_corrected=corrected.get((index, name), nan)) for name, value in pairs}
        judged.append(group.model_copy(update={"versus": versus}))
    return judged


def decide(
    groups: Sequence[GroupNumbers], answers: Sequence[Answered], settings: MeasureSettings, known: Numbers | None = None
) -> Verdict | None:
    """Compare the method with the lowest loss with all others; None where `Numbers` says that there is no verdict.

    The loss of an answer is |confidence - posterior| where every posterior is known, and the Brier score elsewhere:
    both are means over questions, which an ECE is not. The first is picked after the fact, so p-values are multiplied
    by the number of all pairs.
    """
    key = content_hash([[group.input, group.sources.forced] for group in groups])
    if known is not None and known.verdict is not None and known.verdict.input == key:
        return known.verdict
    forced = {group.method for group in groups if group.sources.forced}
    exact = all("true_error" in group.others for group in groups)
    runs: dict[str, dict[tuple[str, str, int], Answers]] = defaultdict(dict)
    for group, answered in product(groups, answers):
        if group.method not in forced and group.holds(answered.cell):
            loss = np.abs(answered.confidence - (answered.truth if exact else answered.correct))
            names = [(group.task, name) for name in answered.question or ()]
            place = group.task, group.trained_on, answered.cell.seed
            runs[group.method][place] = Answers(names, loss if exact else loss**2, answered.correct)
    places = sorted({place for mine in runs.values() for place in mine})
    complete = {name: [mine[place] for place in places] for name, mine in runs.items() if len(mine) == len(places)}
    means = {name: np.mean([np.asarray(run.confidence).mean() for run in mine]) for name, mine in complete.items()}
    losses = {name: float(loss) for name, loss in sorted(means.items(), key=lambda pair: pair[1])}
    outcomes = {right for mine in complete.values() for run in mine for right in np.unique(run.correct)}
    if len(losses) < 2 or (len(outcomes) == 1 and not exact):
        return None
    first, *others = losses
    pairs, settings = len(losses) * (len(losses) - 1) // 2, replace(settings, metrics=("mean_confidence",))
    behind = {}
    for name in others:  # the mean "confidence" is that of the losses
        (difference,) = compare_runs(complete[name], complete[first], settings, SWAPS * pairs).values()
        behind[name] = Versus(**vars(difference), p_corrected=min(1.0, pairs * difference.p_value))
    n = min(group.n for group in groups)
    return Verdict(input=key, metric="true_error" if exact else "brier", n=n, losses=losses, behind=behind)


def papers_budget(name: str, budget: Budget | None, training: Training | None) -> bool:
    """Return whether a model had the paper's training: its budget, and its epochs and pairs as far as recorded.

    A method that both budgets share is the same model in both. training: of the model itself, or of the one that is
    rescaled; None where nothing is recorded.
    """
    if not known(name) or (budget == "matched" and method(name).budgeted):
        return False
    if training is None:
        return True
    effort = METHODS[unscaled(name)].effort["paper"]
    return training.epochs in (None, effort.epochs) and (effort.pairs is None or training.rows in (None, effort.pairs))


def trained_model(cell: Cell, budget: Budget | None, results: Results) -> Training | None:
    """Return how the model of a cell, or the one that it rescales, was trained; None where nothing is recorded."""
    wanted = (cell.task, cell.trained_on, unscaled(cell.method), cell.seed)
    models = (other for other in results.cells if (other.task, other.trained_on, other.method, other.seed) == wanted)
    return next((other.training for other in models if other.budget in (None, budget)), None)
