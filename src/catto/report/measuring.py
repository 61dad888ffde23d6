"""Compute the numbers of a report: measure every cell, then every group of seeds, unless their files are unchanged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from catto.answer_columns import ParseCounts
from catto.errors import data_errors_at
from catto.io.atomic import sha256
from catto.io.record_files import read_records
from catto.measure import GAP, MeasureSettings, compare_runs, measure_runs
from catto.methods import (
    BUDGETS,
    METHODS,
    Budget,
    find_method,
    is_known_method,
    method_sort_key,
    scaled_kind,
    strip_scaling,
)
from catto.metrics.catalogue import HEADLINE, Versus, holm
from catto.metrics.errors import brier_split
from catto.metrics.intervals import Interval
from catto.metrics.preference import Part, preference_interval
from catto.metrics.resampling import Answers
from catto.metrics.risk import threshold_for_risk
from catto.metrics.selection import LEVEL, gather_candidates, measure_rules, within_questions
from catto.metrics.statistics import SeedSummary, summarise_seeds
from catto.metrics.temperature import rescale_predictions
from catto.metrics.vector import scale_by_vector
from catto.records import Prediction, Unparsed, content_hash
from catto.report import VERSION
from catto.report.cell_answers import CellAnswers
from catto.report.numbers import (
    BASELINE,
    Cell,
    CellIdentity,
    CellNumbers,
    GroupNumbers,
    Numbers,
    Results,
    Training,
)
from catto.report.verdict import SWAPS_PER_COMPARISON, decide_verdict

COMPARED = ("accuracy", "ece", "brier", "auroc")
# The metrics that get an interval. The other headline metrics are slow to resample and only complement these.
RESAMPLED = ("accuracy", "ece", "brier", "nll", "auroc", GAP)
# Held-out preference accuracy -> the part of the responses it is computed from.
PREFERENCE: Mapping[str, Part] = {"preference_accuracy": "whole", "preference_accuracy_reasoning": "reasoning"}
# The error rate that answers above a risk threshold should not exceed.
RISK = 0.05
# The accepted probability that they exceed it nevertheless.
DELTA = 0.05

# Called with the number of finished steps and their total.
ProgressCallback = Callable[[int, int], object]


def ignore_progress(_done: int, _total: int) -> None:
    """Ignore a progress report."""


class SeedGroup(NamedTuple):
    """Cells that differ only by seed, and the DPO cells of the same seeds and budget.

    Attributes:
        budget: The budget of the group; None if no cell has one.
        in_distribution: Whether the cells are tested on the task that they were trained on.
        cells: Indices of the group's cells, by seed.
        baseline: Indices of the baseline's cells with the same seeds; empty for the baseline itself, and if any of them
            is missing.
    """

    budget: Budget | None
    in_distribution: bool
    cells: list[int]
    baseline: list[int]

    @property
    def table(self) -> tuple[Budget | None, bool]:
        """Identifies the table of the group; groups with the same value are in the same table."""
        return self.budget, self.in_distribution


class _GroupPlace(NamedTuple):
    trained_on: str
    task: str
    method: str


def plan_groups(cells: Sequence[Cell], baseline: str | None = BASELINE) -> list[SeedGroup]:
    """Group the cells by budget, method, training set and task, in the order of the tables.

    A method that is the same in both budgets has a group in each.

    Args:
        cells: The cells of the experiment.
        baseline: The method that the others are compared with; None if nothing is compared.
    """
    used_budgets = {cell.budget for cell in cells}
    budgets: list[Budget | None] = [budget for budget in BUDGETS if budget in used_budgets]
    if not budgets:
        budgets = [None]
    groups = []
    for budget in budgets:
        cells_at = _index_cells(cells, budget)
        for place, cell_of_seed in cells_at.items():
            baseline_of_seed: dict[int, int] = {}
            if baseline is not None and place.method != baseline:
                baseline_of_seed = cells_at.get(_GroupPlace(place.trained_on, place.task, baseline), {})
            seeds = sorted(cell_of_seed)
            baseline_cells = []
            if cell_of_seed.keys() <= baseline_of_seed.keys():
                baseline_cells = [baseline_of_seed[seed] for seed in seeds]
            group = SeedGroup(
                budget=budget,
                in_distribution=place.trained_on == place.task,
                cells=[cell_of_seed[seed] for seed in seeds],
                baseline=baseline_cells,
            )
            groups.append(group)
    return groups


def _index_cells(cells: Sequence[Cell], budget: Budget | None) -> dict[_GroupPlace, dict[int, int]]:
    """Return place -> seed -> index of the cell, for the cells of a budget, in the order of the methods."""
    cells_at: dict[_GroupPlace, dict[int, int]] = {}
    in_order = sorted(range(len(cells)), key=lambda index: method_sort_key(cells[index].method))
    for index in in_order:
        cell = cells[index]
        if cell.budget not in (None, budget):
            continue
        cell_of_seed = cells_at.setdefault(_GroupPlace(cell.trained_on, cell.task, cell.method), {})
        if cell.seed in cell_of_seed:
            raise ValueError(f"cells: {cell.method} on {cell.task} has several cells of one seed and budget")
        cell_of_seed[cell.seed] = index
    return cells_at


def measure_results(
    results: Results,
    folder: Path,
    cells: Sequence[CellAnswers],
    known: Numbers | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Numbers:
    """Measure all cells and groups.

    Args:
        results: The experiment.
        folder: Its folder.
        cells: The answers of each of its cells.
        known: Numbers of an earlier build; those with unchanged inputs are kept.
        progress: Called after each cell and group.
    """
    evaluation = results.evaluation
    settings = MeasureSettings(RESAMPLED, evaluation.bins, evaluation.resamples)
    groups = plan_groups([answers.cell for answers in cells], results.baseline)
    total = len(cells) + len(groups)
    known_cells = {} if known is None else {cell.input: cell for cell in known.cells}
    known_groups = {} if known is None else {group.input: group for group in known.groups}

    keys = _hash_cells(results, folder, cells)
    cell_numbers: list[CellNumbers] = []
    for answers, key in zip(cells, keys, strict=True):
        measured = known_cells.get(key)
        if measured is None:
            measured = measure_cell(answers, folder, settings=settings, unparsed=evaluation.unparsed, key=key)
        cell_numbers.append(measured)
        progress(len(cell_numbers), total)

    group_numbers: list[GroupNumbers] = []
    for inputs in gather_group_inputs(groups, results, cells=cells, numbers=cell_numbers):
        group = known_groups.get(inputs.key)
        if group is None:
            group = measure_group(inputs, settings)
        group_numbers.append(group)
        progress(len(cell_numbers) + len(group_numbers), total)

    numbers = Numbers(
        level=settings.level,
        bins=evaluation.bins,
        resamples=evaluation.resamples,
        cells=tuple(cell_numbers),
        groups=tuple(correct_group_p_values(group_numbers, results.baseline)),
        baseline=results.baseline,
    )
    verdict = decide_verdict(numbers.first_screen, cells, settings, known)
    return numbers.model_copy(update={"verdict": verdict})


def _hash_cells(results: Results, folder: Path, cells: Sequence[CellAnswers]) -> Iterator[str]:
    """Yield, for each cell, a hash of everything that its numbers depend on."""
    evaluation = results.evaluation
    protocol = [VERSION, evaluation.bins, evaluation.resamples, evaluation.unparsed]
    digests: dict[str | None, str | None] = {None: None}  # a cache: many cells share their files of questions
    for answers in cells:
        cell = answers.cell
        files = [cell.predictions, cell.candidates, cell.validation, cell.preference]
        files += results.questions.get(cell.task, ())
        for name in files:
            if name is not None and name not in digests:
                digests[name] = sha256(folder / name)[:16]
        place = cell.model_dump(include={*CellIdentity.model_fields, "seed", "tau", "sampling_temperature"})
        yield content_hash([protocol, place, [digests[name] for name in files]])


# ---- cells


def measure_cell(
    answers: CellAnswers, folder: Path, *, settings: MeasureSettings, unparsed: Unparsed, key: str
) -> CellNumbers:
    """Measure one method on one task at one seed.

    Args:
        answers: The answers of the cell.
        folder: Folder of the experiment.
        settings: The resampled metrics, their bins and resamples.
        unparsed: Whether forced answers count as wrong.
        key: Hash of everything that the numbers depend on.
    """
    resampled = measure_runs([answers.by_question], settings)
    null = resampled["ece"].null
    assert null is not None  # every calibration metric has a null band
    metrics = {}
    for name, metric in resampled.items():
        if name != GAP:
            metrics[name] = metric.interval
    for name, value in _measure_without_interval(answers, settings).items():
        metrics[name] = Interval(value, nan, nan, settings.level)
    metrics |= measure_preference([answers], settings)

    sources = ParseCounts.of(answers.read_as or ())
    selection = measure_selection(answers.cell, folder, unparsed)
    others = compare_with_posterior(answers)
    others["fallback_rate"] = sources.share("fallback")
    others["plain_rate"] = sources.share("plain")
    others["accuracy_unparsed_wrong"] = float(answers.count_unparsed_as_wrong().correct.mean())
    others |= selection.others
    others |= measure_risk(answers, folder, unparsed)
    if answers.margins:
        others["preference_pairs"] = float(len(answers.margins))
    return CellNumbers(
        **answers.cell.model_dump(include={*CellIdentity.model_fields, "seed"}),
        input=key,
        n=len(answers),
        model=answers.model,
        metrics=metrics,
        gap=resampled[GAP].interval,
        null=null,
        sources=sources,
        selection=selection.accuracy,
        others=others,
    )


def _measure_without_interval(answers: CellAnswers, settings: MeasureSettings) -> dict[str, float]:
    """Measure the headline metrics that are not resampled, and the parts of the Brier score."""
    names = tuple(name for name in HEADLINE if name not in settings.metrics)
    values: dict[str, float] = {}
    for name, function in replace(settings, metrics=names).functions().items():
        values[name] = function(answers.confidence, answers.correct)
    split = brier_split(answers.confidence, answers.correct, bins=settings.bins)
    values["brier_reliability"] = split.reliability
    values["brier_resolution"] = split.resolution
    values["brier_uncertainty"] = split.uncertainty
    return values


class SelectionNumbers(NamedTuple):
    """The results of choosing among sampled answers.

    Attributes:
        accuracy: k -> rule -> accuracy of the chosen answers.
        others: auroc_within (only if some question has a right and a wrong sample), questions_with_both (their number),
            sample_fallback_rate, sampling_temperature (at which the samples were drawn) and tau (at which their
            confidences are compared).
    """

    accuracy: dict[int, dict[str, Interval]]
    others: dict[str, float]


def measure_selection(cell: Cell, folder: Path, unparsed: Unparsed) -> SelectionNumbers:
    """Measure every rule that chooses among k samples, at k = 1, 2, 4, ... and at the number of samples.

    Args:
        cell: The cell; both fields of the result are empty if it has no candidates.
        folder: Folder of the experiment.
        unparsed: Whether forced answers count as wrong.
    """
    if cell.candidates is None:
        return SelectionNumbers({}, {})
    path = folder / cell.candidates
    predictions = list(read_records(path, Prediction))
    with data_errors_at(path):
        tau = _comparison_temperature(cell, predictions)
        # Rescaling needs the label of a forced answer, so it comes before that label is dropped.
        compared = rescale_predictions(predictions, tau)
        if unparsed == "wrong":
            compared = _drop_forced_labels(compared)
        candidates = gather_candidates(compared)

    accuracy: dict[int, dict[str, Interval]] = {}
    for k in _sample_counts(candidates.label.shape[1]):
        accuracy[k] = {}
        for selected in measure_rules(candidates, k):
            accuracy[k][selected.rule] = Interval(selected.accuracy, selected.low, selected.high, LEVEL)

    within = within_questions(candidates)
    sources = ParseCounts.of(prediction.source for prediction in predictions)
    drawn_at = cell.sampling_temperature
    if drawn_at is None:
        drawn_at = predictions[0].temperature
    others = {
        "questions_with_both": float(within.questions),
        "sample_fallback_rate": sources.share("fallback"),
        "sampling_temperature": drawn_at,
        "tau": tau,
    }
    if within.pairs:
        others["auroc_within"] = within.value
    return SelectionNumbers(accuracy, others)


def _comparison_temperature(cell: Cell, predictions: Sequence[Prediction]) -> float:
    """Return the temperature at which the confidences of samples are compared."""
    # Without the logsumexp over the vocabulary, confidences are known only at temperature 1.
    can_rescale = any(prediction.logsumexp is not None for prediction in predictions)
    if not can_rescale:
        return 1.0
    if cell.tau is not None:
        return cell.tau
    return predictions[0].temperature or 1.0


def _drop_forced_labels(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions without the labels of forced answers: a missing label counts as wrong."""
    changed = []
    for prediction in predictions:
        if prediction.is_forced:
            changed.append(prediction.model_copy(update={"label": None}))
        else:
            changed.append(prediction)
    return changed


def _sample_counts(largest: int) -> list[int]:
    """Return the powers of two below `largest`, and `largest` itself."""
    counts = []
    count = 1
    while count < largest:
        counts.append(count)
        count *= 2
    return [*counts, largest]


def measure_risk(answers: CellAnswers, folder: Path, unparsed: Unparsed) -> dict[str, float]:
    """Fit the threshold for an error rate of RISK on the validation answers, and apply it to the test answers.

    Args:
        answers: The test answers.
        folder: Folder of the experiment.
        unparsed: Whether forced answers count as wrong.

    Returns:
        Empty without validation answers. Otherwise risk_promised, 0 if no threshold can promise the error rate and 1 if
        one can, and risk_coverage, the share of test questions that are then answered. With a threshold also
        risk_threshold, risk_bound and, if any question is answered, risk_errors.
    """
    cell = answers.cell
    if cell.validation is None:
        return {}
    path = folder / cell.validation
    predictions = list(read_records(path, Prediction))
    with data_errors_at(path):
        predictions = _rescale_like_cell(cell, predictions)
        confidence = []
        correct = []
        for prediction in predictions:
            confidence.append(prediction.confidence)
            correct.append(prediction.counts_as_correct(unparsed))
        fitted = threshold_for_risk(confidence, correct, RISK, DELTA)
    if fitted.threshold is None:
        return {"risk_promised": 0.0, "risk_coverage": 0.0}
    answered = answers.correct[answers.confidence >= fitted.threshold]
    numbers = {
        "risk_promised": 1.0,
        "risk_threshold": fitted.threshold,
        "risk_bound": fitted.bound,
        "risk_coverage": len(answered) / len(answers),
    }
    if len(answered) > 0:
        numbers["risk_errors"] = float((~answered).mean())
    return numbers


def _rescale_like_cell(cell: Cell, predictions: list[Prediction]) -> list[Prediction]:
    """Rescale the model's own confidences as the cell's method does; unchanged if the method does not rescale."""
    if cell.vector is not None:
        return scale_by_vector(predictions, cell.vector)
    is_scaled = strip_scaling(cell.method) != cell.method
    kind = scaled_kind(cell.method)
    if cell.tau is None or not is_scaled or kind == "vector":
        return predictions
    return rescale_predictions(predictions, cell.tau, kind)


def measure_preference(runs: Sequence[CellAnswers], settings: MeasureSettings) -> dict[str, Interval]:
    """Measure the held-out preference accuracy as a mean over runs.

    Args:
        runs: The cells of one method, one per seed.
        settings: Number of resamples, level and seed.

    Returns:
        Name in PREFERENCE -> accuracy. Empty if a run has no pairs. The accuracy of the reasoning is omitted if no
        two responses of a run differ in their reasoning.
    """
    pairs = [run.margins for run in runs]
    if not all(pairs):
        return {}
    resamples = settings.draws(max(len(margins) for margins in pairs))
    intervals = {}
    for name, part in PREFERENCE.items():
        interval = preference_interval(pairs, part, resamples=resamples, level=settings.level, seed=settings.seed)
        if isfinite(interval.value):
            intervals[name] = interval
    return intervals


def compare_with_posterior(answers: CellAnswers) -> dict[str, float]:
    """Compare the confidences with the exact posterior.

    Returns:
        Empty if a question has no posterior. Otherwise three numbers in [0, 1]: true_error, the mean
        |confidence - posterior(answer)|; bayes_accuracy, the share of questions whose most probable label is the gold
        label; regret, the mean of the largest posterior probability minus that of the given answer.
    """
    posteriors = answers.posteriors
    if not posteriors:
        return {}
    truth = answers.truth
    is_gold_likeliest = []
    largest = []
    for posterior, question in zip(posteriors, answers.asked, strict=True):
        likeliest = max(posterior, key=posterior.__getitem__)
        is_gold_likeliest.append(likeliest == question.gold)
        largest.append(posterior[likeliest])
    return {
        "true_error": float(np.abs(answers.confidence - truth).mean()),
        "bayes_accuracy": float(np.mean(is_gold_likeliest)),
        "regret": float(np.mean(np.array(largest) - truth)),
    }


# ---- groups


class GroupInputs(NamedTuple):
    """The inputs needed to measure a group.

    Attributes:
        key: Hash of all other fields.
        budget: The budget of the group.
        has_papers_budget: Whether every model of the group was trained like the paper's, see `has_papers_budget`.
        swaps: Number of swaps of each comparison with DPO.
        cells: The answers of each seed.
        numbers: The numbers of each seed.
        baseline: The answers of DPO for the same seeds; empty if there is no comparison.
    """

    key: str
    budget: Budget | None
    has_papers_budget: bool
    swaps: int
    cells: list[CellAnswers]
    numbers: list[CellNumbers]
    baseline: list[CellAnswers]


def gather_group_inputs(
    groups: Sequence[SeedGroup], results: Results, *, cells: Sequence[CellAnswers], numbers: Sequence[CellNumbers]
) -> Iterator[GroupInputs]:
    """Yield the inputs needed to measure each group.

    Args:
        groups: The groups, with indices into `cells` and `numbers`.
        results: The experiment.
        cells: The answers of each cell.
        numbers: The numbers of each cell, in the same order.
    """
    # Every group with a baseline is compared with it in each metric of COMPARED.
    compared_groups = Counter(group.table for group in groups if group.baseline)
    for group in groups:
        comparisons = len(COMPARED) * compared_groups[group.table]
        # The correction for more comparisons needs smaller p-values, which take more swaps.
        swaps = max(results.evaluation.resamples, SWAPS_PER_COMPARISON * comparisons)
        group_answers = [cells[index] for index in group.cells]
        all_like_paper = all(_had_papers_training(answers.cell, group.budget, results) for answers in group_answers)
        cell_hashes = [numbers[index].input for index in (*group.cells, *group.baseline)]
        yield GroupInputs(
            key=content_hash([group.budget, swaps, all_like_paper, cell_hashes]),
            budget=group.budget,
            has_papers_budget=all_like_paper,
            swaps=swaps,
            cells=group_answers,
            numbers=[numbers[index] for index in group.cells],
            baseline=[cells[index] for index in group.baseline],
        )


def measure_group(inputs: GroupInputs, settings: MeasureSettings) -> GroupNumbers:
    """Measure one method on one task over its seeds, and compare it with DPO."""
    seeds = inputs.numbers
    # The seeds of a method answer the same questions, which are resampled together.
    runs = [answers.by_question for answers in inputs.cells]
    baseline = [answers.by_question for answers in inputs.baseline]
    resampled = measure_runs(runs, replace(settings, metrics=(*COMPARED, GAP)))
    null = resampled["ece"].null
    assert null is not None  # every calibration metric has a null band
    intervals = {name: resampled[name].interval for name in COMPARED}
    intervals |= measure_preference(inputs.cells, settings)

    compared = replace(settings, metrics=COMPARED)
    versus = {}
    versus_seed = {}
    if baseline:
        versus = _compare_with_baseline(runs, baseline, compared, inputs.swaps)
        for cell, run, baseline_run in zip(seeds, runs, baseline, strict=True):
            versus_seed[cell.seed] = _compare_with_baseline([run], [baseline_run], compared)

    # The numbers of samples may differ between seeds; a mean needs every seed.
    shared_counts = set.intersection(*(set(cell.selection) for cell in seeds))
    selection = {}
    for k in sorted(shared_counts):
        selection[k] = _summarise_numbers([cell.selection[k] for cell in seeds])
    return GroupNumbers(
        **seeds[0].model_dump(include={"task", "trained_on", "method"}),
        budget=inputs.budget,
        seeds=tuple(cell.seed for cell in seeds),
        input=inputs.key,
        n=max(cell.n for cell in seeds),
        metrics=_summarise_numbers([cell.metrics for cell in seeds]),
        intervals=intervals,
        gap=resampled[GAP].interval,
        null=null,
        sources=ParseCounts.total_of(cell.sources for cell in seeds),
        papers_budget=inputs.has_papers_budget,
        versus=versus,
        versus_seed=versus_seed,
        selection=selection,
        others=_summarise_numbers([cell.others for cell in seeds]),
    )


def _summarise_numbers(seeds: Sequence[Mapping[str, Interval | float]]) -> dict[str, SeedSummary]:
    """Summarise the numbers that all seeds have. For a risk threshold, the seeds that have one are enough."""
    values: dict[str, list[float]] = {}
    for seed in seeds:
        for name, number in seed.items():
            value = number.value if isinstance(number, Interval) else number
            finite = values.setdefault(name, [])
            if isfinite(value):
                finite.append(value)
    summaries = {}
    for name, finite in values.items():
        if len(finite) == len(seeds) or name.startswith("risk_"):
            summaries[name] = summarise_seeds(finite)
    return summaries


def _compare_with_baseline(
    runs: Sequence[Answers], baseline: Sequence[Answers], settings: MeasureSettings, swaps: int = 0
) -> dict[str, Versus]:
    """Compare with DPO, metric by metric, without metrics (such as AUROC) that are undefined on one side."""
    versus = {}
    for name, comparison in compare_runs(runs, baseline, settings, swaps=swaps).items():
        if isfinite(comparison.difference):
            versus[name] = Versus(**vars(comparison))
    return versus


class _ComparisonId(NamedTuple):
    group: int
    metric: str


def correct_group_p_values(groups: Sequence[GroupNumbers], baseline: str | None = BASELINE) -> list[GroupNumbers]:
    """Correct the p-values of each table by Holm's method.

    A comparison is excluded, and its corrected p-value is nan, if more than a fifth of either side's answers were
    forced.

    Args:
        groups: The groups of all tables.
        baseline: The method that the others are compared with.
    """
    corrected: dict[_ComparisonId, float] = {}
    for p_values in _gather_p_values(groups, baseline):
        corrected |= zip(p_values, holm(list(p_values.values())), strict=True)
    judged = []
    for index, group in enumerate(groups):
        judged_versus = {}
        for metric, versus in group.versus.items():
            p_corrected = corrected.get(_ComparisonId(index, metric), nan)
            judged_versus[metric] = replace(versus, p_corrected=p_corrected)
        judged.append(group.model_copy(update={"versus": judged_versus}))
    return judged


def _gather_p_values(groups: Sequence[GroupNumbers], baseline: str | None) -> list[dict[_ComparisonId, float]]:
    """Return the p-values of each table, without comparisons that involve too many forced answers."""
    forced = set()
    for group in groups:
        if group.sources.forced:
            forced.add((group.budget, group.trained_on, group.task, group.method))
    tables: dict[tuple[Budget | None, str], dict[_ComparisonId, float]] = defaultdict(dict)
    for index, group in enumerate(groups):
        place = (group.budget, group.trained_on, group.task)
        is_forced = (*place, group.method) in forced or (*place, baseline) in forced
        if is_forced:
            continue
        p_values = tables[group.budget, group.setting]
        for metric, versus in group.versus.items():
            p_values[_ComparisonId(index, metric)] = versus.p_value
    return list(tables.values())


# ---- the paper's budget


def has_papers_budget(name: str, budget: Budget | None, training: Training | None) -> bool:
    """Return whether a model was trained as in the paper: with its budget, epochs and pairs, as far as recorded.

    Args:
        name: Name of the method.
        budget: The budget of the group. It does not matter for methods that are the same in both budgets.
        training: How the model, or the model that it rescales, was trained; None if nothing is recorded.
    """
    if not is_known_method(name):
        return False
    if budget == "matched" and find_method(name).budgeted:
        return False
    if training is None:
        return True
    effort = METHODS[strip_scaling(name)].effort["paper"]
    same_epochs = training.epochs is None or training.epochs == effort.epochs
    same_pairs = effort.pairs is None or training.rows is None or training.rows == effort.pairs
    return same_epochs and same_pairs


def _had_papers_training(cell: Cell, budget: Budget | None, results: Results) -> bool:
    training = find_training(cell, budget, results)
    return has_papers_budget(cell.method, budget, training)


def find_training(cell: Cell, budget: Budget | None, results: Results) -> Training | None:
    """Return how the model of a cell, or the model that it rescales, was trained; None if nothing is recorded."""
    model = strip_scaling(cell.method)
    for other in results.cells:
        same_place = other.task == cell.task and other.trained_on == cell.trained_on and other.seed == cell.seed
        if same_place and other.method == model and other.budget in (None, budget):
            return other.training
    return None
