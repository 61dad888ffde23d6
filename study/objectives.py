"""The tables that compare objectives in the embedded world, where the true probability of every answer is known."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from catto.report.measuring import PREFERENCE
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers

from .names import list_seeds, short_title, unscale_variant
from .tables import format_chance, format_preference, list_place_seeds, list_places, make_table

# Objective -> what it optimises, and the label probability at its optimum. Shown in docs/method.md.
OPTIMA = {
    "dpo": ("the reward margin of whole responses", "certainty: the margin has no finite optimum"),
    "dpo+catto": (
        "DPO, and an affine function of each token's confidence",
        "certainty: an affine function is least at an end",
    ),
    "ipo": ("the squared distance of the margin to 1 / (2 beta)", "wherever the margin has that value"),
    "dpo+robust": (
        "DPO, for preferences of which a tenth is wrong",
        "certainty: it falls without bound as the margin grows",
    ),
    "dpo+sft": ("DPO, and the likelihood of the chosen responses", "certainty of the chosen label"),
    "dpo+reasoning": ("the margin of the reasoning", "nothing acts on the label"),
    "dpo+outcome": (
        "the margin of whole responses, and a proper score of the label",
        "between certainty and the true probability",
    ),
    "dpo+decoupled": (
        "the margin of the reasoning, and a proper score of the label",
        "the true probability given the reasoning",
    ),
    "dpo+decoupled+sft": (
        "the same, and the likelihood of the chosen responses",
        "between certainty and the true probability",
    ),
    "dpo+decoupled-target-mix": (
        "the same as decoupled, with soft targets",
        "the mean of the truth and the start model's votes",
    ),
    "dpo+decoupled-target-votes": ("the same as decoupled, with soft targets", "the start model's votes"),
    "sft+outcome": ("a proper score of the label", "the true probability given the reasoning"),
    "outcome+decoupled": (
        "first the score, then decoupled with a calibrated reference",
        "the true probability given the reasoning",
    ),
    "outcome+dpo": ("first the score, then DPO", "certainty: the margin has no finite optimum"),
    "outcome+dpo+outcome": (
        "first the score, then DPO + outcome with a calibrated reference",
        "between certainty and the true probability",
    ),
}
# The rows of the README's table.
FINDINGS = ("sft", "dpo", "dpo+catto", "dpo+tl", "dpo+outcome-score-log", "outcome+dpo+outcome-score-log")


def tabulate_objectives(numbers: Numbers) -> Iterator[str]:
    """Yield a table with the scores of every objective, and how much of DPO's preference accuracy it keeps."""
    heads = ["method", "accuracy", "ECE", "by chance", "Brier", "AUROC", "true error", "held-out pairs", "kept"]
    for place in list_places(numbers):
        dpo = place.by_method["dpo"]
        rows = []
        for group in place.groups:
            title = short_title(group.method)
            if group.seeds != dpo.seeds:
                title += f" ({list_seeds(group.seeds)} alone)"
            dpo_preference = mean_preference(numbers, dpo, group.seeds)
            rows.append([title, *format_objective(group, dpo_preference)])
        yield from make_table([*heads, "forced, %"], rows)


def mean_preference(numbers: Numbers, group: GroupNumbers, seeds: tuple[int, ...]) -> float:
    """Return the mean held-out preference accuracy of a method over the given seeds."""
    accuracies = []
    for cell in numbers.cells:
        if group.holds(cell) and cell.seed in seeds:
            accuracies.append(cell.metrics["preference_accuracy"].value)
    return fmean(accuracies)


def format_objective(group: GroupNumbers, dpo_preference: float) -> list[str]:
    """Format the numbers of a method.

    Args:
        group: The method.
        dpo_preference: Held-out preference accuracy of DPO with the same seeds.
    """
    preference = group.number("preference_accuracy")
    # Share of DPO's preference accuracy above chance (0.5).
    kept = "-"
    if preference is not None and dpo_preference > 0.5:
        kept = f"{(preference.mean - 0.5) / (dpo_preference - 0.5):.2f}"
    return [
        f"{100 * group.metrics['accuracy'].mean:.1f}",
        f"{100 * group.metrics['ece'].mean:.1f}",
        format_chance(group),
        f"{group.metrics['brier'].mean:.3f}",
        f"{100 * group.metrics['auroc'].mean:.1f}",
        f"{100 * group.others['true_error'].mean:.1f}",
        format_preference(group, "preference_accuracy"),
        kept,
        f"{100 * group.others['fallback_rate'].mean:.1f}",
    ]


def tabulate_objective_seeds(numbers: Numbers) -> Iterator[str]:
    """Yield a table with the ECE, true error and held-out preference accuracy of every seed."""
    for place in list_places(numbers):
        seeds = list_place_seeds(place)
        rows = []
        for group in place.groups:
            texts = dict.fromkeys(seeds, "-")
            for cell in numbers.cells:
                if group.holds(cell):
                    texts[cell.seed] = format_seed(cell)
            rows.append([short_title(group.method), *texts.values()])
        heads = [f"seed {seed}" for seed in seeds]
        yield from make_table(["ECE / true error / held-out pairs", *heads], rows)


def format_seed(cell: CellNumbers) -> str:
    """Format the numbers of one seed. Models that were not trained from another model have no preference accuracy."""
    shares = [cell.metrics["ece"].value, cell.others["true_error"]]
    if "preference_accuracy" in cell.metrics:
        shares.append(cell.metrics["preference_accuracy"].value)
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def tabulate_optima(numbers: Numbers) -> Iterator[str]:
    """Yield a table with what each objective optimises, where its optimum is, and what was measured."""
    heads = ["objective", "optimises", "best label probability", "true error"]
    heads += ["held-out pairs, %", "by their reasoning, %"]
    for place in list_places(numbers):
        known = {group.method.replace("-score-log", ""): group for group in place.groups}
        rows = []
        for method, (optimised, optimum) in OPTIMA.items():
            if method not in known:
                continue
            group = known[method]
            row = [short_title(group.method), optimised, optimum, f"{100 * group.others['true_error'].mean:.1f}"]
            for metric in PREFERENCE:
                preference = group.number(metric)
                row.append("-" if preference is None else f"{100 * preference.mean:.1f}")
            rows.append(row)
        yield from make_table(heads, rows)


def tabulate_findings(numbers: Numbers) -> Iterator[str]:
    """Yield the README's table: a few methods, means over seeds."""
    known = {group.method: group for group in numbers.groups}
    rows = []
    for method in FINDINGS:
        group = known[method]
        # Scaling does not change the model, so scaled methods have the preference accuracy of their model.
        preference = known[unscale_variant(method)].number("preference_accuracy")
        row = [
            short_title(method),
            f"{100 * group.metrics['accuracy'].mean:.1f}",
            f"{100 * group.metrics['ece'].mean:.1f} ({format_chance(group)})",
            f"{100 * group.others['true_error'].mean:.1f}",
            "-" if preference is None else f"{100 * preference.mean:.1f}",
        ]
        rows.append(row)
    yield from make_table(["method", "accuracy", "ECE (by chance)", "true error", "preference accuracy"], rows)
    dpo = known["dpo"]
    yield "*A synthetic task whose true probabilities are known:"
    yield f"{dpo.n:,} test questions per seed, means over {list_seeds(dpo.seeds)}.*"
