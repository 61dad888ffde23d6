"""The tables of the ablation, of training costs and of reward margins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from catto.methods import method_sort_key
from catto.metrics.errors import accuracy, brier, ece, mean_confidence
from catto.metrics.ranking import auroc
from catto.report.cell_answers import CellAnswers
from catto.report.numbers import GroupNumbers, Training

from .load import MeasuredStudy
from .names import TUNED, scale_variant, variant_sort_key, variant_title
from .store import StoredCell, StudySummary
from .tables import SCALINGS, Place, make_table, select_places

# Training times above this number of seconds are shown in whole minutes.
LONG_TRAINING_SECONDS = 600


def tabulate_ablation(study: MeasuredStudy) -> Iterator[str]:
    """Yield a table for each place: the variants of its seed, after the terms with their usual options."""
    heads = ["method", "accuracy", "confidence", "ECE", "Brier", "AUROC"]
    heads += ["other answers than DPO", "mean change of confidence"]
    for place in select_places(study.numbers, ablation=True):
        seed = place.groups[0].seeds[0]
        references = find_references(study, place)
        dpo = find_run(study.answers, references[0], seed)
        rows = []
        for group in [*references, *place.groups]:
            run = find_run(study.answers, group, seed)
            rows.append([variant_title(group.method), *format_ablation(run, dpo)])
        yield f"**{place.title}**, seed {seed}:"
        yield ""
        yield from make_table(heads, rows)


def find_references(study: MeasuredStudy, place: Place) -> list[GroupNumbers]:
    """Return DPO and the terms with their usual options on the same task."""
    methods = ["dpo", "dpo+catto"]
    for variant in ("dpo+outcome", f"dpo+outcome{TUNED}"):
        methods.append(variant)
        methods += [scale_variant(variant, suffix) for suffix in SCALINGS]
    references = []
    for other in select_places(study.numbers, ablation=False):
        if other.title == place.title:
            references += [group for group in other.groups if group.method in methods]
    return references


def find_run(answers: Sequence[CellAnswers], group: GroupNumbers, seed: int) -> CellAnswers:
    """Return the answers of a method at one seed."""
    for run in answers:
        if group.holds(run.cell) and run.cell.seed == seed:
            return run
    raise ValueError(f"{group.method} has no seed {seed}")


def format_ablation(run: CellAnswers, dpo: CellAnswers) -> list[str]:
    """Format the scores of one run and its differences from DPO: changed answers, mean change of confidence."""
    changed_answers = 0
    for label, dpo_label in zip(run.label, dpo.label, strict=True):
        if label != dpo_label:
            changed_answers += 1
    confidence_change = float(np.abs(run.confidence - dpo.confidence).mean())
    return [
        f"{100 * accuracy(run.confidence, run.correct):.1f}",
        f"{100 * mean_confidence(run.confidence, run.correct):.1f}",
        f"{100 * ece(run.confidence, run.correct):.1f}",
        f"{brier(run.confidence, run.correct):.3f}",
        f"{100 * auroc(run.confidence, run.correct):.1f}",
        f"{changed_answers} of {len(run)}",
        f"{100 * confidence_change:.1f}",
    ]


# ---- training


def tabulate_costs(summary: StudySummary) -> list[str]:
    """Return a table with the steps, tokens, minutes and reward accuracy of each method: means over tasks and seeds."""
    models_by_method: dict[str, list[Training]] = {}
    for cell in summary.cells:
        if cell.training is not None and cell.setting == "in":
            models_by_method.setdefault(cell.method, []).append(cell.training)
    rows = []
    for method in sorted(models_by_method, key=method_sort_key):
        rows.append([variant_title(method), *format_costs(models_by_method[method])])
    heads = ["method", "models", "steps", "tokens", "minutes", "pairs ordered as preferred, %"]
    return make_table(heads, rows)


def format_costs(models: Sequence[Training]) -> list[str]:
    """Format the means over the models of one method."""
    steps = fmean(model.steps or 0 for model in models)
    tokens = fmean(model.tokens or 0 for model in models)
    seconds = fmean(model.seconds or 0 for model in models)
    decimals = 0 if seconds > LONG_TRAINING_SECONDS else 1
    minutes_text = f"{seconds / 60:.{decimals}f}"
    reward_accuracies = [model.reward_accuracy for model in models if model.reward_accuracy is not None]
    accuracy_text = f"{100 * fmean(reward_accuracies):.0f}" if reward_accuracies else "-"
    return [f"{len(models)}", f"{steps:.0f}", f"{tokens:,.0f}", minutes_text, accuracy_text]


def tabulate_margins(summary: StudySummary) -> list[str]:
    """Return a table with the reward margin and the validation scores at every checkpoint of each training run."""
    rows = []
    for cell in sorted(summary.cells, key=lambda cell: variant_sort_key(cell.method)):
        points = find_margin_points(cell)
        if len(points) < 2:
            continue
        # Only the first row of a training run names its method.
        title = variant_title(cell.method)
        for point in points:
            rows.append([title, *format_point(point)])
            title = ""
    heads = ["method", "step", "reward margin", "confidence", "accuracy", "ECE", "NLL of the gold label"]
    return make_table(heads, rows)


def find_margin_points(cell: StoredCell) -> list[dict[str, float]]:
    """Return the checkpoints of a training run at which its reward margin was measured."""
    if cell.training is None or cell.setting != "in":
        return []
    return [point for point in cell.training.history if "reward_margin" in point]


def format_point(point: dict[str, float]) -> list[str]:
    """Format the numbers of one checkpoint."""
    return [
        f"{point['step']:.0f}",
        f"{point['reward_margin']:.2f}",
        f"{100 * point['val_confidence']:.1f}",
        f"{100 * point['val_accuracy']:.1f}",
        f"{100 * point['val_ece']:.1f}",
        f"{point['val_nll']:.2f}",
    ]
