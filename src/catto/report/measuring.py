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
    """Cells that differ only by seed, and the cells of the baseline that they are compared with.

    Attributes:
        budget: The budget of the group; None if no cell has one.
        in_distribution: Whether the cells are tested on the task that they were trained on.
        cells: Indices of the group's cells, in increasing order of their seeds.
        baseline: Indices of the baseline's cells on the same task, training set and budget, for the same seeds in the
            same order. Empty for the baseline's own group, without a baseline, and if the baseline lacks a seed.
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
    """Group the cells that differ only by seed.

    A cell has no budget if its method is the same in both budgets. It is then in one group of each budget.

    Args:
        cells: The cells of the experiment, at least one.
        baseline: The method that the others are compared with; None if nothing is compared.

    Returns:
        The groups in the order of the tables: by budget, then by method. If no cell has a budget, no group has one.

    Raises:
        ValueError: Two cells have the same method, training set, task, seed and budget.
    """
    used_budgets = {cell.budget for cell in cells}
    budgets: list[Budget | None] = [budget for budget in BUDGETS if budget in used_budgets]
    if not budgets:
        budgets = [None]
    groups = []
    for budget in budgets:
        cells_at = _index_cells(cells, budget)
        for place, cell_of_seed in cells_at.items():
            baseline_of_seed: dict[int, int] = {}  # stays empty for the baseline: it is not compared with itself
            if baseline is not None and place.method != baseline:
                baseline_of_seed = cells_at.get(place._replace(method=baseline), {})
            seeds = sorted(cell_of_seed)
            # A comparison pairs the cells of the same seed, so the baseline needs all seeds of the group.
            baseline_has_all_seeds = baseline_of_seed.keys() >= cell_of_seed.keys()
            group = SeedGroup(
                budget=budget,
                in_distribution=place.trained_on == place.task,
                cells=[cell_of_seed[seed] for seed in seeds],
                baseline=[baseline_of_seed[seed] for seed in seeds] if baseline_has_all_seeds else [],
            )
            groups.append(group)
    return groups


def _index_cells(cells: Sequence[Cell], budget: Budget | None) -> dict[_GroupPlace, dict[int, int]]:
    """Return place -> seed -> index of the cell, for cells of this budget and without one, in the order of methods."""
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
    earlier: Numbers | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Numbers:
    """Measure all cells, then all groups, and decide the verdict.

    Args:
        results: The experiment.
        folder: Folder of the experiment.
        cells: The answers of each cell of the experiment.
        earlier: The numbers of an earlier build of the report; cells and groups with the same inputs are not measured
            again. None if there is no earlier build.
        progress: Called after each cell and each group with the number of those that are done, and their total.

    Returns:
        The numbers of the report, with p-values that are corrected for the comparisons in each table.
    """
    evaluation = results.evaluation
    settings = MeasureSettings(RESAMPLED, bins=evaluation.bins, resamples=evaluation.resamples)
    groups = plan_groups([answers.cell for answers in cells], results.baseline)
    total = len(cells) + len(groups)
    earlier_cells: dict[str, CellNumbers] = {}
    earlier_groups: dict[str, GroupNumbers] = {}
    if earlier is not None:
        earlier_cells = {cell.input: cell for cell in earlier.cells}
        earlier_groups = {group.input: group for group in earlier.groups}

    keys = _hash_cells(results, folder, cells)
    cell_numbers: list[CellNumbers] = []
    for answers, key in zip(cells, keys, strict=True):
        measured = earlier_cells.get(key)
        if measured is None:
            measured = measure_cell(answers, folder, settings=settings, unparsed=evaluation.unparsed, key=key)
        cell_numbers.append(measured)
        progress(len(cell_numbers), total)

    group_numbers: list[GroupNumbers] = []
    for inputs in gather_group_inputs(groups, results, cells=cells, numbers=cell_numbers):
        group = earlier_groups.get(inputs.key)
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
    verdict = decide_verdict(numbers.first_screen, cells, settings, earlier)
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
        settings: The metrics that get an interval, their bins and the number of resamples. The other headline metrics
            are measured without an interval.
        unparsed: "wrong" if forced samples and validation answers count as wrong, "fallback" if they count as they are.
            `answers` already follow it.
        key: Hash of everything that the numbers depend on, which becomes their `input`.

    Returns:
        The numbers of the cell.
    """
    resampled = measure_runs([answers.by_question], settings)
    null = resampled["ece"].null
    assert null is not None  # every calibration metric has a null band
    metrics = {}
    for name, metric in resampled.items():
        if name != GAP:  # a field of its own
            metrics[name] = metric.interval
    for name, value in _measure_without_interval(answers, settings).items():
        metrics[name] = Interval(value, low=nan, high=nan, level=settings.level)
    metrics |= measure_preference([answers], settings)

    sources = answers.sources
    assert sources is not None  # every prediction says how its answer was parsed
    selection = measure_selection(answers.cell, folder, unparsed)
    others = compare_with_posterior(answers)
    others |= _measure_parsing(answers, sources)
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


def _measure_parsing(answers: CellAnswers, sources: ParseCounts) -> dict[str, float]:
    """Return the shares of forced answers and of answers without tags, and the accuracy if forced answers are wrong."""
    return {
        "fallback_rate": sources.share("fallback"),
        "plain_rate": sources.share("plain"),
        "accuracy_unparsed_wrong": float(answers.count_unparsed_as_wrong().correct.mean()),
    }


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
        accuracy: k -> rule -> accuracy of the chosen answers, with its interval.
        others: auroc_within (only if some question has a right and a wrong sample), questions_with_both (their number),
            sample_fallback_rate, sampling_temperature (at which the samples were drawn) and tau (at which their
            confidences are compared).
    """

    accuracy: dict[int, dict[str, Interval]]
    others: dict[str, float]


def measure_selection(cell: Cell, folder: Path, unparsed: Unparsed) -> SelectionNumbers:
    """Measure every rule that chooses among k of a cell's n samples, for k = 1, 2, 4, ... below n, and for k = n.

    Args:
        cell: The cell.
        folder: Folder of the experiment.
        unparsed: "wrong" if forced samples count as wrong, "fallback" if they count as they are.

    Returns:
        The results; both fields are empty if the cell has no samples.
    """
    if cell.candidates is None:
        return SelectionNumbers({}, {})
    path = folder / cell.candidates
    samples = list(read_records(path, Prediction))
    with data_errors_at(path):
        tau = _choose_comparison_temperature(cell, samples)
        # Rescaling needs the label of a forced sample, so it comes before that label is dropped.
        rescaled = rescale_predictions(samples, tau)
        if unparsed == "wrong":
            rescaled = _drop_forced_labels(rescaled)
        candidates = gather_candidates(rescaled)

    samples_per_question = candidates.label.shape[1]
    accuracy: dict[int, dict[str, Interval]] = {}
    for k in _list_sample_counts(samples_per_question):
        accuracy[k] = {}
        for selected in measure_rules(candidates, k):
            accuracy[k][selected.rule] = Interval(selected.accuracy, selected.low, selected.high, LEVEL)

    sources = ParseCounts.of(sample.source for sample in samples)
    sampling_temperature = cell.sampling_temperature
    if sampling_temperature is None:
        sampling_temperature = samples[0].temperature  # all samples of a cell are drawn at the same temperature
    within = within_questions(candidates)
    others = {
        "questions_with_both": float(within.questions),
        "sample_fallback_rate": sources.share("fallback"),
        "sampling_temperature": sampling_temperature,
        "tau": tau,
    }
    if within.pairs > 0:
        others["auroc_within"] = within.value
    return SelectionNumbers(accuracy, others)


def _choose_comparison_temperature(cell: Cell, samples: Sequence[Prediction]) -> float:
    """Return the temperature at which the confidences of samples are compared.

    It is the temperature that was fitted for the cell, or else the one at which the samples were drawn (1 for greedy
    samples). It is always 1 if the confidences cannot be rescaled.
    """
    # Without the logsumexp over the vocabulary, confidences are known only at temperature 1.
    can_rescale = any(sample.logsumexp is not None for sample in samples)
    if not can_rescale:
        return 1.0
    if cell.tau is not None:
        return cell.tau
    return samples[0].temperature or 1.0


def _drop_forced_labels(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions without the labels of forced answers: a missing label counts as wrong."""
    changed = []
    for prediction in predictions:
        if prediction.is_forced:
            changed.append(prediction.model_copy(update={"label": None}))
        else:
            changed.append(prediction)
    return changed


def _list_sample_counts(largest: int) -> list[int]:
    """Return the powers of two below `largest`, and `largest` itself: 1, 2, 4 and 6 for 6."""
    counts = []
    count = 1
    while count < largest:
        counts.append(count)
        count *= 2
    return [*counts, largest]


def measure_risk(answers: CellAnswers, folder: Path, unparsed: Unparsed) -> dict[str, float]:
    """Fit a confidence threshold for an error rate of RISK on the validation answers; apply it to the test answers.

    Only answers whose confidence reaches the threshold are given.

    Args:
        answers: The test answers.
        folder: Folder of the experiment.
        unparsed: "wrong" if forced validation answers count as wrong, "fallback" if they count as they are. The test
            answers already follow it.

    Returns:
        Name -> number; empty if the cell has no validation answers.

        - risk_promised: 1 if a threshold was found, 0 if none can promise the error rate.
        - risk_coverage: Share of the test questions that are answered; 0 without a threshold.
        - risk_threshold: The threshold. This and the following numbers are missing if there is none.
        - risk_bound: Upper bound of the error rate above the threshold, from the validation answers.
        - risk_errors: Share of the given test answers that are wrong; missing if none is given.
    """
    cell = answers.cell
    if cell.validation is None:
        return {}
    path = folder / cell.validation
    predictions = list(read_records(path, Prediction))
    with data_errors_at(path):
        # The threshold is applied to the confidences of the cell, so it is fitted to confidences on the same scale.
        predictions = _rescale_like_cell(cell, predictions)
        confidence = [prediction.confidence for prediction in predictions]
        correct = [prediction.counts_as_correct(unparsed) for prediction in predictions]
        fitted = threshold_for_risk(confidence, correct, RISK, DELTA)
    if fitted.threshold is None:
        return {"risk_promised": 0.0, "risk_coverage": 0.0}
    is_given = answers.confidence >= fitted.threshold
    numbers = {
        "risk_promised": 1.0,
        "risk_threshold": fitted.threshold,
        "risk_bound": fitted.bound,
        "risk_coverage": int(is_given.sum()) / len(answers),
    }
    if is_given.any():
        is_wrong = ~answers.correct
        numbers["risk_errors"] = float(is_wrong[is_given].mean())
    return numbers


def _rescale_like_cell(cell: Cell, predictions: list[Prediction]) -> list[Prediction]:
    """Rescale validation predictions, which have the model's own confidences, as the cell's method does.

    They are returned unchanged if the method does not rescale.
    """
    if cell.vector is not None:
        return scale_by_vector(predictions, cell.vector)
    is_scaled = strip_scaling(cell.method) != cell.method
    kind = scaled_kind(cell.method)
    if cell.tau is None or not is_scaled or kind == "vector":
        return predictions
    return rescale_predictions(predictions, cell.tau, kind)


def measure_preference(runs: Sequence[CellAnswers], settings: MeasureSettings) -> dict[str, Interval]:
    """Measure the held-out preference accuracy as a mean over runs: how often the chosen response has a higher reward.

    The margin of a pair is the reward of the chosen response minus that of the rejected one. There is one margin for
    the whole responses and one for their reasoning, the parts in PREFERENCE.

    Args:
        runs: The cells of one method, one per seed.
        settings: Number of resamples, level and seed.

    Returns:
        Name in PREFERENCE -> accuracy with its interval. Empty if a run has no pairs. The accuracy of the reasoning is
        left out if, in every pair of some run, both responses have the same reasoning.
    """
    margins_of_runs = [run.margins for run in runs]
    if not all(margins_of_runs):  # an empty list of margins counts as False
        return {}
    # The default number of resamples is smaller for very large runs.
    resamples = settings.draws(max(len(margins) for margins in margins_of_runs))
    intervals = {}
    for name, part in PREFERENCE.items():
        interval = preference_interval(
            margins_of_runs, part, resamples=resamples, level=settings.level, seed=settings.seed
        )
        if isfinite(interval.value):  # nan if this part is the same in all responses of a run
            intervals[name] = interval
    return intervals


def compare_with_posterior(answers: CellAnswers) -> dict[str, float]:
    """Compare answers and confidences with the exact posterior probabilities of the labels.

    Returns:
        Name -> number in [0, 1]; empty if a question has no posterior.

        - true_error: Mean of |confidence - posterior probability of the answer|.
        - bayes_accuracy: Share of questions whose most probable label is the gold label. If several labels are equally
          probable, the first one counts.
        - regret: Mean of the posterior probability of the most probable label minus that of the answer.
    """
    posteriors = answers.posteriors
    if not posteriors:
        return {}
    probability_of_answer = answers.truth
    probability_of_best = []
    is_best_gold = []
    for posterior, question in zip(posteriors, answers.asked, strict=True):
        best_label = max(posterior, key=lambda label: posterior[label])
        probability_of_best.append(posterior[best_label])
        is_best_gold.append(best_label == question.gold)
    return {
        "true_error": float(np.abs(answers.confidence - probability_of_answer).mean()),
        "bayes_accuracy": float(np.mean(is_best_gold)),
        "regret": float(np.mean(np.array(probability_of_best) - probability_of_answer)),
    }


# ---- groups


class GroupInputs(NamedTuple):
    """The inputs needed to measure a group.

    Attributes:
        key: Hash of everything that the numbers of the group depend on.
        budget: The budget of the group; None if the experiment has no budgets.
        has_papers_budget: Whether every model of the group was trained with the paper's budget, epochs and number of
            pairs.
        swaps: Maximum number of swaps in each comparison with the baseline.
        cells: The answers of each seed.
        numbers: The numbers of each seed.
        baseline: The answers of the baseline for the same seeds; empty if there is no comparison.
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

    Yields:
        The inputs of each group, in the order of `groups`.
    """
    compared_groups = Counter(group.table for group in groups if group.baseline)
    for group in groups:
        # P-values are corrected for all comparisons in the table: each of its groups with a baseline is compared in
        # each metric. The more there are, the smaller a p-value has to be, and small p-values take many swaps.
        comparisons_in_table = len(COMPARED) * compared_groups[group.table]
        swaps = max(results.evaluation.resamples, SWAPS_PER_COMPARISON * comparisons_in_table)
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
    """Measure one method on one task over its seeds, and compare it with the baseline.

    Args:
        inputs: What is measured.
        settings: The bins of the metrics, and how they are resampled; the metrics are those of COMPARED, and the gap.

    Returns:
        The numbers of the group. P-values are not corrected yet, see `correct_group_p_values`.
    """
    cells = inputs.numbers
    # A question that several seeds answer is drawn for all of them at once: `by_question` has the ids of the questions.
    runs = [answers.by_question for answers in inputs.cells]
    resampled = measure_runs(runs, replace(settings, metrics=(*COMPARED, GAP)))
    null = resampled["ece"].null
    assert null is not None  # every calibration metric has a null band
    intervals = {name: resampled[name].interval for name in COMPARED}
    intervals |= measure_preference(inputs.cells, settings)

    compared_metrics = replace(settings, metrics=COMPARED)
    versus: dict[str, Versus] = {}
    versus_seed: dict[int, dict[str, Versus]] = {}
    if inputs.baseline:
        baseline_runs = [answers.by_question for answers in inputs.baseline]
        versus = _compare_with_baseline(runs, baseline_runs, compared_metrics, inputs.swaps)
        # Without further swaps: only the comparison over all seeds is corrected, which needs small p-values.
        for cell, run, baseline_run in zip(cells, runs, baseline_runs, strict=True):
            versus_seed[cell.seed] = _compare_with_baseline([run], [baseline_run], compared_metrics)

    return GroupNumbers(
        **cells[0].model_dump(include={"task", "trained_on", "method"}),  # the same for all cells of the group
        budget=inputs.budget,
        seeds=tuple(cell.seed for cell in cells),
        input=inputs.key,
        n=max(cell.n for cell in cells),
        metrics=_summarise_numbers([cell.metrics for cell in cells]),
        intervals=intervals,
        gap=resampled[GAP].interval,
        null=null,
        sources=ParseCounts.total_of(cell.sources for cell in cells),
        papers_budget=inputs.has_papers_budget,
        versus=versus,
        versus_seed=versus_seed,
        selection=_summarise_selection(cells),
        others=_summarise_numbers([cell.others for cell in cells]),
    )


def _summarise_selection(cells: Sequence[CellNumbers]) -> dict[int, dict[str, SeedSummary]]:
    """Return k -> rule -> accuracy over the seeds, for every k that all seeds have.

    Seeds with different numbers of samples have different values of k.
    """
    shared_k = set.intersection(*(set(cell.selection) for cell in cells))
    return {k: _summarise_numbers([cell.selection[k] for cell in cells]) for k in sorted(shared_k)}


def _summarise_numbers(seeds: Sequence[Mapping[str, Interval | float]]) -> dict[str, SeedSummary]:
    """Summarise each number over the seeds. A number that is missing or undefined for a seed is left out.

    The numbers of the risk threshold are summarised over the seeds that have a threshold.
    """
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
    runs: Sequence[Answers], baseline_runs: Sequence[Answers], settings: MeasureSettings, swaps: int = 0
) -> dict[str, Versus]:
    """Compare with the baseline, metric by metric, without metrics that are undefined for either of the two.

    The AUROC, for example, is undefined if all answers are right. P-values are not corrected.
    """
    versus = {}
    for name, comparison in compare_runs(runs, baseline_runs, settings, swaps=swaps).items():
        if isfinite(comparison.difference):
            versus[name] = Versus(**vars(comparison))
    return versus


class _ComparisonId(NamedTuple):
    """Identifies a comparison with the baseline: the index of the group, and the metric."""

    group: int
    metric: str


def correct_group_p_values(groups: Sequence[GroupNumbers], baseline: str | None = BASELINE) -> list[GroupNumbers]:
    """Correct the p-values of the comparisons with the baseline by Holm's method, separately for each table.

    A comparison is not judged if too many responses of the method or of the baseline had no readable answer, so that
    one was forced. It then does not count in the correction of the others, and its corrected p-value is nan.

    Args:
        groups: The groups of all tables.
        baseline: The method that the others are compared with; None if nothing is compared.

    Returns:
        The groups in the same order, with corrected p-values.
    """
    corrected: dict[_ComparisonId, float] = {}
    for p_values_of_table in _gather_p_values(groups, baseline):
        corrected_of_table = holm(list(p_values_of_table.values()))
        corrected.update(zip(p_values_of_table, corrected_of_table, strict=True))
    corrected_groups = []
    for index, group in enumerate(groups):
        versus_of_metric = {}
        for metric, versus in group.versus.items():
            p_corrected = corrected.get(_ComparisonId(index, metric), nan)  # nan: not judged
            versus_of_metric[metric] = replace(versus, p_corrected=p_corrected)
        corrected_groups.append(group.model_copy(update={"versus": versus_of_metric}))
    return corrected_groups


def _gather_p_values(groups: Sequence[GroupNumbers], baseline: str | None) -> list[dict[_ComparisonId, float]]:
    """Return the p-values of each table, except for comparisons in which either side has too many forced answers."""
    forced_groups = set()
    for group in groups:
        if group.sources.has_too_many_forced:
            forced_groups.add((group.budget, group.trained_on, group.task, group.method))
    p_values_of_table: dict[tuple[Budget | None, str], dict[_ComparisonId, float]] = defaultdict(dict)
    for index, group in enumerate(groups):
        place = (group.budget, group.trained_on, group.task)
        method_is_forced = (*place, group.method) in forced_groups
        baseline_is_forced = (*place, baseline) in forced_groups
        if method_is_forced or baseline_is_forced:
            continue
        p_values = p_values_of_table[group.budget, group.setting]
        for metric, versus in group.versus.items():
            p_values[_ComparisonId(index, metric)] = versus.p_value
    return list(p_values_of_table.values())


# ---- the paper's budget


def has_papers_budget(name: str, budget: Budget | None, training: Training | None) -> bool:
    """Return whether a model was trained with the paper's budget, epochs and number of pairs.

    Epochs and pairs are checked only if they are recorded.

    Args:
        name: Name of the method; the result is False for a method that is not in METHODS.
        budget: The budget of the group: "paper", "matched" or None. It does not matter for methods that are the same in
            both budgets.
        training: How the model, or the model that it rescales, was trained; None if nothing is recorded.
    """
    if not is_known_method(name):
        return False
    differs_by_budget = find_method(name).budgeted
    if differs_by_budget and budget == "matched":
        return False
    if training is None:
        return True
    effort = METHODS[strip_scaling(name)].effort["paper"]
    same_epochs = training.epochs is None or training.epochs == effort.epochs
    uses_all_pairs = effort.pairs is None  # their number depends on the data
    same_pairs = uses_all_pairs or training.rows is None or training.rows == effort.pairs
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
