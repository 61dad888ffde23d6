"""Tests of what the pages claim: `outcome` against DPO (goals), and against its controls.

All p-values of one list are corrected together. ‡ marks a comparison in which more than a fifth of a method's answers
were forced, so that its numbers describe the fallback too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from catto.measure import MeasureSettings, compare_runs
from catto.methods import AMONG_LABELS
from catto.metrics.catalogue import METRICS, Versus, holm
from catto.report.numbers import GroupNumbers

from .load import MeasuredStudy
from .names import list_seeds, scale_variant, short_title, variant_title
from .tables import SCALINGS, Place, list_places, make_table

SCALED_OVER = {"+ts": "whole vocabulary", AMONG_LABELS: "labels"}
GOAL_METRICS = ("brier", "auroc", "accuracy", "ece")
CONTROL_METRICS = ("ece", "brier", "auroc", "accuracy")
# Swaps of a test for each bootstrap resample.
SWAPS_PER_RESAMPLE = 5


class Verdict(NamedTuple):
    """The outcome of one comparison as texts: both values, the interval of their difference, and whether it holds."""

    values: str
    difference: str
    reached: str


def compare_groups(first: GroupNumbers, second: GroupNumbers, metric: str, study: MeasuredStudy) -> Versus:
    """Compare two methods over the seeds that both have."""
    seeds = find_common_seeds(first, second)
    runs = []
    for group in (first, second):
        of_group = []
        for run in study.answers:
            if group.holds(run.cell) and run.cell.seed in seeds:
                of_group.append(run.by_question)
        runs.append(of_group)
    numbers = study.numbers
    settings = MeasureSettings((metric,), numbers.bins, numbers.resamples)
    compared = compare_runs(runs[0], runs[1], settings, swaps=SWAPS_PER_RESAMPLE * numbers.resamples)
    return Versus(**vars(compared[metric]))


def find_common_seeds(first: GroupNumbers, second: GroupNumbers) -> list[int]:
    """Return the seeds that both methods have."""
    return sorted(set(first.seeds) & set(second.seeds))


def forced_mark(first: GroupNumbers, second: GroupNumbers) -> str:
    """Return ‡ if so many answers of one method were forced that its numbers describe the fallback too."""
    return " ‡" if first.sources.forced or second.sources.forced else ""


def judge_comparisons(metrics: Sequence[str], comparisons: Sequence[Versus]) -> list[Verdict]:
    """Judge N comparisons, one of each metric in `metrics`, with p-values corrected for all of them."""
    corrected = holm([comparison.p_value for comparison in comparisons])
    verdicts = []
    for metric, comparison, p_value in zip(metrics, comparisons, corrected, strict=True):
        judged = replace(comparison, p_corrected=p_value)
        verdicts.append(describe_comparison(metric, judged))
    return verdicts


def describe_comparison(metric: str, judged: Versus) -> Verdict:
    """Put a comparison into words."""
    scale = 1
    decimals = 3
    if METRICS[metric].percent:
        scale = 100
        decimals = 1
    is_lower = judged.difference < 0
    is_higher = judged.difference > 0
    is_better = is_lower if METRICS[metric].better == "lower" else is_higher
    mark = judged.mark(metric)
    if mark == "*":
        reached = "yes"
    elif mark == "†":
        reached = "no, worse"
    elif is_better:
        reached = "better, within noise"
    else:
        reached = "no"
    return Verdict(
        values=f"{scale * judged.a:.{decimals}f}, {scale * judged.b:.{decimals}f}",
        difference=f"{scale * judged.low:+.{decimals}f} to {scale * judged.high:+.{decimals}f}"
        f", p = {judged.p_corrected:.3f}",
        reached=reached,
    )


# ---- goals: `outcome` against DPO


class Goal(NamedTuple):
    """One comparison of a variant of `outcome` with DPO, both unscaled ("") or scaled in the same way."""

    task: str
    method: str
    scaling: str
    metric: str
    values: str
    difference: str
    reached: str


def check_goals(study: MeasuredStudy, variants: Sequence[str]) -> list[Goal]:
    """Check what `outcome` was meant to reach, for each task and variant."""
    goals = []
    tested: list[Goal] = []
    comparisons: list[Versus] = []
    for place in list_places(study.numbers):
        known = place.by_method
        for variant in variants:
            if variant not in known or "dpo" not in known:
                continue
            goals.append(check_quarter(study, place, variant))
            mark = forced_mark(known[variant], known["dpo"])
            for suffix in SCALINGS:
                ours = known[scale_variant(variant, suffix)]
                dpo = known[scale_variant("dpo", suffix)]
                for metric in GOAL_METRICS:
                    tested.append(Goal(place.title, variant_title(variant), suffix, metric, "", "", mark))
                    comparisons.append(compare_groups(ours, dpo, metric, study))
    verdicts = judge_comparisons([goal.metric for goal in tested], comparisons)
    for goal, verdict in zip(tested, verdicts, strict=True):
        reached = verdict.reached
        if goal.metric == "accuracy":
            reached = "no, lower" if reached == "no, worse" else "yes"
        goals.append(goal._replace(**verdict._replace(reached=reached + goal.reached)._asdict()))
    return sorted(goals, key=lambda goal: (goal.task, goal.method))


def check_quarter(study: MeasuredStudy, place: Place, variant: str) -> Goal:
    """Check whether the debiased ECE of a variant is at most a quarter of DPO's."""
    ours = place.by_method[variant]
    dpo = place.by_method["dpo"]
    seeds = find_common_seeds(ours, dpo)
    means = []
    for group in (ours, dpo):
        errors = []
        for cell in study.numbers.cells:
            if group.holds(cell) and cell.seed in seeds:
                errors.append(cell.metrics["debiased_ece"].value)
        means.append(100 * fmean(errors))
    reached = "yes" if means[0] <= means[1] / 4 else "no"
    return Goal(
        task=place.title,
        method=variant_title(variant),
        scaling="",
        metric="debiased_ece",
        values=f"{means[0]:.1f}, {means[1]:.1f}",
        difference="",
        reached=reached + forced_mark(ours, dpo),
    )


def tabulate_goals(goals: Sequence[Goal]) -> list[str]:
    """Return a table with a line for each goal."""
    rows = []
    for goal in goals:
        rows.append([goal.task, goal.method, describe_goal(goal), goal.values, goal.difference, goal.reached])
    return make_table(["task", "method", "goal", "values", "difference", "reached"], rows)


def describe_goal(goal: Goal) -> str:
    """Put a goal into words."""
    if not goal.scaling:
        return "debiased ECE at most a quarter of DPO's"
    scaled = "scaled among labels" if goal.scaling == AMONG_LABELS else "scaled"
    relation = "not lower" if goal.metric == "accuracy" else "better"
    return f"{METRICS[goal.metric].title}, both {scaled}: {relation} than DPO's"


def tabulate_reached(goal_lists: Sequence[tuple[str, Sequence[Goal]]]) -> list[str]:
    """Return a table with two lines for each task and variant, one per scaling.

    Args:
        goal_lists: How to title the tasks of a list, such as `{} with reasoning`, and the list.
    """
    rows = []
    for title, goals in goal_lists:
        by_variant: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
        for goal in goals:
            text = f"{goal.reached.replace('better, ', '')}: {goal.values}"
            by_variant.setdefault((goal.task, goal.method), {})[goal.scaling, goal.metric] = text
        for (task, method), texts in by_variant.items():
            row = [title.format(task), method, texts["", "debiased_ece"]]
            for scaling in SCALINGS:
                scaled_texts = [texts[scaling, metric] for metric in ("brier", "auroc", "ece", "accuracy")]
                rows.append([*row, SCALED_OVER[scaling], *scaled_texts])
                row = ["", "", ""]
    heads = ["task", "method", "debiased ECE at most a quarter", "both scaled over", "lower Brier score"]
    return make_table([*heads, "higher AUROC", "lower ECE", "accuracy not lower"], rows)


# ---- controls: `outcome` against more supervision, or a part of itself


class Control(NamedTuple):
    """One comparison of two methods, both unscaled ("") or scaled in the same way. about: the seeds, and ‡."""

    first: str
    second: str
    scaling: str
    about: str
    metric: str
    values: str
    difference: str
    reached: str


def compare_controls(
    study: MeasuredStudy, pairs: Sequence[tuple[str, str]], scalings: Sequence[str] = ("", AMONG_LABELS)
) -> list[Control]:
    """Compare the first method of each pair with the second one, with every metric."""
    known = {group.method: group for group in study.numbers.groups}
    tested = []
    comparisons = []
    for first, second in pairs:
        for scaling in scalings:
            first_group = known[scale_variant(first, scaling)]
            second_group = known[scale_variant(second, scaling)]
            seeds = list_seeds(find_common_seeds(first_group, second_group))
            about = f"({seeds}){forced_mark(first_group, second_group)}"
            for metric in CONTROL_METRICS:
                tested.append(Control(first, second, scaling, about, metric, "", "", ""))
                comparisons.append(compare_groups(first_group, second_group, metric, study))
    verdicts = judge_comparisons([control.metric for control in tested], comparisons)
    return [control._replace(**verdict._asdict()) for control, verdict in zip(tested, verdicts, strict=True)]


def tabulate_controls(controls: Sequence[Control]) -> list[str]:
    """Return a table with a line for each comparison."""
    rows = []
    for control in controls:
        first = variant_title(scale_variant(control.first, control.scaling))
        second = variant_title(scale_variant(control.second, control.scaling))
        compared = f"{first}; {second} {control.about}"
        metric = METRICS[control.metric].title
        rows.append([compared, metric, control.values, control.difference, control.reached])
    return make_table(["compared", "metric", "values", "difference", "the first is better"], rows)


def tabulate_controls_briefly(controls: Sequence[Control]) -> list[str]:
    """Return a table with a line for each pair and scaling."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for control in controls:
        line = lines.setdefault((control.first, control.second, control.scaling), [])
        if not line and control.scaling:
            line += ["", "", "labels"]
        elif not line:
            line += [f"{short_title(control.first)} {control.about}", short_title(control.second), "-"]
        line.append(f"{control.reached.replace('better, ', '')}: {control.values}")
    heads = ["method", "compared with", "scaled over", "lower ECE", "lower Brier score", "higher AUROC"]
    return make_table([*heads, "higher accuracy"], list(lines.values()))
