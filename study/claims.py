"""Tests of what the pages claim: comparisons of `outcome` with DPO (goals) and with its controls.

All p-values of one list are corrected together. ‡ marks a comparison in which more than a fifth of the answers of a
method were forced, so its numbers also describe the fallback.
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
# Number of swaps in a test per bootstrap resample.
SWAPS_PER_RESAMPLE = 5


class Verdict(NamedTuple):
    """The outcome of one comparison, formatted.

    Attributes:
        values: The values of both methods.
        difference: The interval of their difference, and the corrected p-value.
        reached: Whether the first method is better.
    """

    values: str
    difference: str
    reached: str


def compare_groups(first: GroupNumbers, second: GroupNumbers, metric: str, study: MeasuredStudy) -> Versus:
    """Compare two methods by one metric over the seeds that both have.

    Args:
        first: One method.
        second: The other method.
        metric: A name in `catto.metrics.catalogue.METRICS`.
        study: The study that both methods belong to.
    """
    seeds = find_common_seeds(first, second)
    group_runs = []
    for group in (first, second):
        runs = []
        for run in study.answers:
            if group.holds(run.cell) and run.cell.seed in seeds:
                runs.append(run.by_question)
        group_runs.append(runs)
    first_runs, second_runs = group_runs
    numbers = study.numbers
    settings = MeasureSettings((metric,), numbers.bins, numbers.resamples)
    comparisons = compare_runs(first_runs, second_runs, settings, swaps=SWAPS_PER_RESAMPLE * numbers.resamples)
    return Versus(**vars(comparisons[metric]))


def find_common_seeds(first: GroupNumbers, second: GroupNumbers) -> list[int]:
    """Return the seeds that both methods have."""
    return sorted(set(first.seeds) & set(second.seeds))


def forced_mark(first: GroupNumbers, second: GroupNumbers) -> str:
    """Return ‡ if so many answers of either method were forced that its numbers also describe the fallback."""
    return " ‡" if first.sources.has_too_many_forced or second.sources.has_too_many_forced else ""


def judge_comparisons(metrics: Sequence[str], comparisons: Sequence[Versus]) -> list[Verdict]:
    """Judge N comparisons, with their p-values corrected together.

    Args:
        metrics: The metric of each comparison, N.
        comparisons: The comparisons, N.
    """
    corrected = holm([comparison.p_value for comparison in comparisons])
    verdicts = []
    for metric, comparison, p_value in zip(metrics, comparisons, corrected, strict=True):
        judged = replace(comparison, p_corrected=p_value)
        verdicts.append(describe_comparison(metric, judged))
    return verdicts


def describe_comparison(metric: str, judged: Versus) -> Verdict:
    """Format a comparison and state whether the first method is better."""
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
    interval = f"{scale * judged.low:+.{decimals}f} to {scale * judged.high:+.{decimals}f}"
    return Verdict(
        values=f"{scale * judged.a:.{decimals}f}, {scale * judged.b:.{decimals}f}",
        difference=f"{interval}, p = {judged.p_corrected:.3f}",
        reached=reached,
    )


# ---- goals: `outcome` against DPO


class Goal(NamedTuple):
    """One comparison of a variant of `outcome` with DPO.

    Attributes:
        task: Title of the task.
        method: Title of the variant.
        scaling: Suffix of the scaling that both confidences have; empty if they are unscaled.
        metric: The metric that is compared.
        values: As in `Verdict`.
        difference: As in `Verdict`.
        reached: Whether the goal is reached, and ‡ if many answers were forced.
    """

    task: str
    method: str
    scaling: str
    metric: str
    values: str
    difference: str
    reached: str


class GoalTest(NamedTuple):
    """A comparison behind a goal, before its p-value is corrected; `mark` is ‡ or empty. Other fields as in `Goal`."""

    task: str
    method: str
    scaling: str
    metric: str
    mark: str
    comparison: Versus


def check_goals(study: MeasuredStudy, variants: Sequence[str]) -> list[Goal]:
    """Check the goals of `outcome` on every task.

    Args:
        study: The measured study.
        variants: Variants of `outcome`. A place that lacks the variant or DPO has no goals.
    """
    goals = []
    tests: list[GoalTest] = []
    for place in list_places(study.numbers):
        known = place.by_method
        for variant in variants:
            if variant not in known or "dpo" not in known:
                continue
            goals.append(check_quarter(study, place, variant))
            tests += compare_scaled(study, place, variant)
    verdicts = judge_comparisons([test.metric for test in tests], [test.comparison for test in tests])
    for test, verdict in zip(tests, verdicts, strict=True):
        goals.append(make_goal(test, verdict))
    return sorted(goals, key=lambda goal: (goal.task, goal.method))


def compare_scaled(study: MeasuredStudy, place: Place, variant: str) -> list[GoalTest]:
    """Compare a variant with DPO by every metric of the goals, both scaled in the same way."""
    known = place.by_method
    mark = forced_mark(known[variant], known["dpo"])
    tests = []
    for suffix in SCALINGS:
        ours = known[scale_variant(variant, suffix)]
        dpo = known[scale_variant("dpo", suffix)]
        for metric in GOAL_METRICS:
            comparison = compare_groups(ours, dpo, metric, study)
            tests.append(GoalTest(place.title, variant_title(variant), suffix, metric, mark, comparison))
    return tests


def make_goal(test: GoalTest, verdict: Verdict) -> Goal:
    """Return a goal with its verdict. Accuracy only has to be not measurably lower than DPO's."""
    reached = verdict.reached
    if test.metric == "accuracy":
        reached = "no, lower" if reached == "no, worse" else "yes"
    return Goal(
        task=test.task,
        method=test.method,
        scaling=test.scaling,
        metric=test.metric,
        values=verdict.values,
        difference=verdict.difference,
        reached=reached + test.mark,
    )


def check_quarter(study: MeasuredStudy, place: Place, variant: str) -> Goal:
    """Check whether the debiased ECE of a variant is at most a quarter of DPO's."""
    ours = place.by_method[variant]
    dpo = place.by_method["dpo"]
    seeds = find_common_seeds(ours, dpo)
    means = []
    for group in (ours, dpo):
        eces = []
        for cell in study.numbers.cells:
            if group.holds(cell) and cell.seed in seeds:
                eces.append(cell.metrics["debiased_ece"].value)
        means.append(100 * fmean(eces))
    our_mean, dpo_mean = means
    reached = "yes" if our_mean <= dpo_mean / 4 else "no"
    return Goal(
        task=place.title,
        method=variant_title(variant),
        scaling="",
        metric="debiased_ece",
        values=f"{our_mean:.1f}, {dpo_mean:.1f}",
        difference="",
        reached=reached + forced_mark(ours, dpo),
    )


def tabulate_goals(goals: Sequence[Goal]) -> list[str]:
    """Return a table with one row per goal."""
    rows = []
    for goal in goals:
        rows.append([goal.task, goal.method, describe_goal(goal), goal.values, goal.difference, goal.reached])
    return make_table(["task", "method", "goal", "values", "difference", "reached"], rows)


def describe_goal(goal: Goal) -> str:
    """Describe a goal in words."""
    if not goal.scaling:
        return "debiased ECE at most a quarter of DPO's"
    scaled = "scaled among labels" if goal.scaling == AMONG_LABELS else "scaled"
    relation = "not lower" if goal.metric == "accuracy" else "better"
    return f"{METRICS[goal.metric].title}, both {scaled}: {relation} than DPO's"


def tabulate_reached(goal_lists: Sequence[tuple[str, Sequence[Goal]]]) -> list[str]:
    """Return a table with two rows for each task and variant, one per scaling.

    Args:
        goal_lists: Pairs of a title and goals. `{}` in the title is the task, as in `{} with reasoning`.
    """
    rows = []
    for title, goals in goal_lists:
        # (task, variant) -> (scaling, metric) -> text.
        texts_by_variant: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
        for goal in goals:
            text = f"{goal.reached.replace('better, ', '')}: {goal.values}"
            texts_by_variant.setdefault((goal.task, goal.method), {})[goal.scaling, goal.metric] = text
        for (task, method), texts in texts_by_variant.items():
            # Only the first of the two rows names the task and the variant.
            row_start = [title.format(task), method, texts["", "debiased_ece"]]
            for scaling in SCALINGS:
                scaled_texts = [texts[scaling, metric] for metric in ("brier", "auroc", "ece", "accuracy")]
                rows.append([*row_start, SCALED_OVER[scaling], *scaled_texts])
                row_start = ["", "", ""]
    heads = ["task", "method", "debiased ECE at most a quarter", "both scaled over", "lower Brier score"]
    return make_table([*heads, "higher AUROC", "lower ECE", "accuracy not lower"], rows)


# ---- controls: `outcome` against more supervision, or against a part of itself


class Control(NamedTuple):
    """One comparison of two methods.

    Attributes:
        first: Name of one variant, unscaled.
        second: Name of the other variant, unscaled.
        scaling: Suffix of the scaling that both confidences have; empty if they are unscaled.
        about: The seeds that both have, and ‡ if many answers were forced.
        metric: The metric that is compared.
        values: As in `Verdict`.
        difference: As in `Verdict`.
        reached: As in `Verdict`.
    """

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
    """Compare the first method of each pair with the second one, by every metric of the controls.

    Args:
        study: The measured study.
        pairs: Pairs of unscaled variants.
        scalings: Suffixes of the scalings to compare them with; empty for the unscaled confidence.
    """
    known = {group.method: group for group in study.numbers.groups}
    metrics = []
    comparisons = []
    unjudged = []
    for first, second in pairs:
        for scaling in scalings:
            first_group = known[scale_variant(first, scaling)]
            second_group = known[scale_variant(second, scaling)]
            seeds = list_seeds(find_common_seeds(first_group, second_group))
            about = f"({seeds}){forced_mark(first_group, second_group)}"
            for metric in CONTROL_METRICS:
                metrics.append(metric)
                comparisons.append(compare_groups(first_group, second_group, metric, study))
                unjudged.append(Control(first, second, scaling, about, metric, values="", difference="", reached=""))
    controls = []
    for control, verdict in zip(unjudged, judge_comparisons(metrics, comparisons), strict=True):
        controls.append(control._replace(**verdict._asdict()))
    return controls


def tabulate_controls(controls: Sequence[Control]) -> list[str]:
    """Return a table with one row per comparison."""
    rows = []
    for control in controls:
        first = variant_title(scale_variant(control.first, control.scaling))
        second = variant_title(scale_variant(control.second, control.scaling))
        compared = f"{first}; {second} {control.about}"
        metric = METRICS[control.metric].title
        rows.append([compared, metric, control.values, control.difference, control.reached])
    return make_table(["compared", "metric", "values", "difference", "the first is better"], rows)


def tabulate_controls_briefly(controls: Sequence[Control]) -> list[str]:
    """Return a table with one row for each pair and scaling; only the unscaled row names the methods."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for control in controls:
        row = rows.setdefault((control.first, control.second, control.scaling), [])
        is_new = not row
        if is_new and control.scaling:
            row += ["", "", "labels"]
        elif is_new:
            row += [f"{short_title(control.first)} {control.about}", short_title(control.second), "-"]
        row.append(f"{control.reached.replace('better, ', '')}: {control.values}")
    heads = ["method", "compared with", "scaled over", "lower ECE", "lower Brier score", "higher AUROC"]
    return make_table([*heads, "higher accuracy"], list(rows.values()))
