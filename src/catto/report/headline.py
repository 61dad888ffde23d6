"""The report in words: whose confidence is best, which methods are miscalibrated, which numbers to mistrust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import NamedTuple

from catto import methods
from catto.recipe.settings import FEW_QUESTIONS
from catto.report.numbers import GroupNumbers, Numbers, Verdict, supported_decimals
from catto.report.tables import (
    BUDGET_TITLES,
    format_range,
    list_report_tasks,
    method_order,
    method_title,
    setting_title,
    task_title,
)

# The paper's method; the headline always says what its calibration term did.
PAPERS_TERM = "dpo+catto"


class Headline(NamedTuple):
    """The report in words.

    Attributes:
        question: the question that the report answers, in one sentence.
        answer: the answer, in up to three sentences.
        best: which methods are best by true error or Brier score; empty without a verdict.
        warnings: which numbers to mistrust.
        lead: which methods are miscalibrated.
        points: for each budget, how the methods compare with DPO.
    """

    question: str
    answer: str
    best: str
    warnings: tuple[str, ...]
    lead: str
    points: tuple[str, ...]


def write_headline(numbers: Numbers) -> Headline:
    """Summarise the numbers of the first screen in words."""
    groups = numbers.first_screen
    at_budget = ""
    if len(numbers.budgets) > 1:
        at_budget = f" at the {BUDGET_TITLES[groups[0].budget].lower()}"
    lead = _describe_calibration(groups, at_budget)
    question = "Does the stated confidence match the accuracy?"
    answer = lead
    best = ""
    if numbers.verdict is not None:
        best = _describe_leaders(numbers.verdict, numbers.baseline)
        answer = best
        stated = _describe_stated_confidence(groups, numbers.verdict, numbers.baseline)
        if stated is None:
            question = f"Which method's confidence {_describe_best(numbers.verdict)}?"
        else:
            answer = stated
    return Headline(
        question=question,
        answer=answer,
        best=best,
        warnings=_write_warnings(numbers.groups),
        lead=lead,
        points=_compare_budgets(numbers),
    )


# ---- stated confidence against accuracy


class StatedConfidence(NamedTuple):
    """The mean confidence that a method states, and its accuracy, in per cent, averaged over tasks."""

    confidence: float
    accuracy: float

    @property
    def gap(self) -> float:
        """Distance between confidence and accuracy, in points."""
        return abs(self.confidence - self.accuracy)


def _describe_stated_confidence(groups: Sequence[GroupNumbers], verdict: Verdict, baseline: str | None) -> str | None:
    """Compare stated confidence and accuracy of the baseline, the best method and the paper's method.

    Returns:
        One to three sentences; None if there is no baseline, or too many of its answers were forced.
    """
    stated = _average_over_tasks(groups)
    if baseline is None or baseline not in stated:
        return None
    digits = supported_decimals(min(group.n for group in groups))
    before = stated[baseline]
    sentences = [
        f"After {method_title(baseline)} the model states {before.confidence:.{digits}f} % "
        f"and is right {before.accuracy:.{digits}f} % of the time."
    ]
    best = _choose_best_leader(stated, verdict)
    if best is not None and best != baseline:
        after = stated[best]
        sentences.append(
            f"With {method_title(best)} it states {after.confidence:.{digits}f} % "
            f"and is right {after.accuracy:.{digits}f} % of the time."
        )
    if PAPERS_TERM in stated and PAPERS_TERM not in (baseline, best):
        sentences.append(_describe_papers_term(stated[PAPERS_TERM], before, digits))
    return " ".join(sentences)


def _average_over_tasks(groups: Sequence[GroupNumbers]) -> dict[str, StatedConfidence]:
    """Return method -> its mean confidence and accuracy, without methods with too many forced answers."""
    by_method: dict[str, list[GroupNumbers]] = {}
    forced = {group.method for group in groups if group.sources.forced}
    for group in groups:
        if group.method not in forced:
            by_method.setdefault(group.method, []).append(group)
    stated = {}
    for method, tasks in by_method.items():
        confidence = fmean(group.metrics["mean_confidence"].mean for group in tasks)
        accuracy = fmean(group.metrics["accuracy"].mean for group in tasks)
        stated[method] = StatedConfidence(100 * confidence, 100 * accuracy)
    return stated


def _choose_best_leader(stated: Mapping[str, StatedConfidence], verdict: Verdict) -> str | None:
    """Return the leader of the verdict whose mean confidence is closest to its accuracy; None if none is comparable."""
    leaders = [method for method in verdict.leaders if method in stated]
    if not leaders:
        return None
    return min(leaders, key=lambda method: stated[method].gap)


def _describe_papers_term(term: StatedConfidence, before: StatedConfidence, digits: int) -> str:
    shown = f"{term.confidence:.{digits}f} %"
    if abs(term.confidence - before.confidence) < 1:
        return f"The paper's term changes nothing here ({shown})."
    return f"With the paper's term it states {shown} and is right {term.accuracy:.{digits}f} % of the time."


# ---- warnings


def _write_warnings(groups: Sequence[GroupNumbers]) -> tuple[str, ...]:
    warnings = []
    for group in groups:
        if group.n < FEW_QUESTIONS:
            warnings.append(_warn_of_few_questions(group))
        if group.sources.forced:
            warnings.append(_warn_of_forced_answers(group))
    return tuple(dict.fromkeys(warnings))  # a model that both budgets share gives the same warning twice


def _warn_of_few_questions(group: GroupNumbers) -> str:
    noun = "questions"
    if group.n == 1:
        noun = "question"
    return (
        f"{task_title(group.task)}: only {group.n} {noun}; "
        f"below {FEW_QUESTIONS}, intervals are too narrow and miscalibration is hard to detect."
    )


def _warn_of_forced_answers(group: GroupNumbers) -> str:
    subject = f"{method_title(group.method)} on {setting_title(group)}"
    differs_by_budget = methods.is_known_method(group.method) and methods.find_method(group.method).budgeted
    if group.budget is not None and differs_by_budget:
        subject += f", {BUDGET_TITLES[group.budget].lower()}"
    return f"{subject}: {group.sources.summary}: its numbers describe the fallback, not the model."


# ---- the verdict


def _describe_best(verdict: Verdict) -> str:
    if verdict.metric == "true_error":
        return "is closest to the truth"
    return "best predicts correctness"


def _describe_leaders(verdict: Verdict, baseline: str | None) -> str:
    """Name the methods whose confidence is best; methods that are not significantly worse share the lead."""
    leaders = verdict.leaders
    lowest = _format_loss(verdict, leaders[0])
    highest = _format_loss(verdict, leaders[-1])
    loss = lowest
    if highest != lowest:
        loss = f"{lowest} to {highest}"
    if verdict.metric == "true_error":
        loss = f"{loss} points from the true probability"
    else:
        loss = f"Brier score {loss}"
    judged = len(verdict.losses)
    if len(leaders) == judged:
        count = str(judged)
        if judged == 2:
            count = "two"
        return f"{verdict.n:,} questions cannot tell the {count} methods apart: {loss}."
    titles = [method_title(method) for method in leaders]
    claim = f"The confidence of {_join_names(titles)} {_describe_best(verdict)}"
    if len(leaders) > 1:
        claim += f", as far as {verdict.n:,} questions can tell"
    if baseline is None or baseline in leaders or baseline not in verdict.losses:
        return f"{claim}: {loss}."
    return f"{claim}: {loss}; {method_title(baseline)}: {_format_loss(verdict, baseline)}."


def _format_loss(verdict: Verdict, method: str) -> str:
    """Format the loss of a method with the decimals that N supports: true error in points, Brier score from 0 to 1."""
    loss = verdict.losses[method]
    digits = supported_decimals(verdict.n)
    if verdict.metric == "true_error":
        return f"{100 * loss:.{digits}f}"
    return f"{loss:.{2 + digits}f}"


# ---- calibration


def _describe_calibration(groups: Sequence[GroupNumbers], at_budget: str) -> str:
    """Say which methods show no miscalibration and how far off the others are, ignoring those with forced answers."""
    forced = {group.method for group in groups if group.sources.forced}
    judged = [group for group in groups if group.method not in forced]
    if not judged:
        return "No verdict on calibration: too many answers had to be forced."
    gaps = _collect_gaps(judged)
    # A gap of 0 means that no miscalibration shows on the task; nan means gaps of both signs, and is true in any() and
    # all().
    clear = [title for title, values in gaps.items() if not any(values)]
    off = [title for title, values in gaps.items() if all(values)]
    mixed = [title for title in gaps if title not in clear and title not in off]
    clauses = []
    if clear:
        clauses.append(_describe_clear(clear, judged))
    if mixed:
        clauses.append(f"{_join_names(mixed)} {_choose_verb(mixed)} miscalibrated on some tasks")
    if off:
        gaps_off = []
        for title in off:
            gaps_off += gaps[title]
        clauses.append(f"{_join_names(off)} {_choose_verb(off)} {_describe_gaps(gaps_off, judged)}")
    clauses[0] += at_budget
    if len(judged) == 1:
        return f"{clauses[0]}: {_describe_single(judged[0])}."
    return f"{_open_with_accuracy(judged)}{'; '.join(clauses)}."


def _collect_gaps(groups: Sequence[GroupNumbers]) -> dict[str, list[float]]:
    """Return title of a method -> `shown_gap` in points, one per task; methods in the order of the tables."""
    gaps: dict[str, list[float]] = {}
    for group in sorted(groups, key=lambda group: method_order(group.method)):
        gaps.setdefault(method_title(group.method), []).append(100 * group.shown_gap)
    return gaps


def _describe_clear(titles: Sequence[str], judged: Sequence[GroupNumbers]) -> str:
    sizes = [group.n for group in judged]
    noun = "questions"
    if max(sizes) == 1:
        noun = "question"
    verb = "show"
    if len(titles) == 1:
        verb = "shows"
    clause = f"{_join_names(titles, most=len(titles))} {verb} no miscalibration in {format_range(sizes)} {noun}"
    if len(list_report_tasks(judged)) > 1:
        clause += " per task"
    return clause


def _describe_gaps(gaps: Sequence[float], judged: Sequence[GroupNumbers]) -> str:
    """Say by how much methods are over- or underconfident, if all gaps have the same sign."""
    all_over = all(gap > 0 for gap in gaps)
    all_under = all(gap < 0 for gap in gaps)
    if not all_over and not all_under:
        if len(judged) > 1:
            return "measurably miscalibrated"
        return "too sure of some answers and not sure enough of others"
    direction = "over"
    if all_under:
        direction = "under"
    digits = supported_decimals(min(group.n for group in judged))
    points = format_range([abs(gap) for gap in gaps], digits)
    unit = "points"
    if points == "1":
        unit = "point"
    return f"{direction}confident by {points} {unit}"


def _open_with_accuracy(judged: Sequence[GroupNumbers]) -> str:
    """Return a sentence if all answers are right or all are wrong; empty otherwise."""
    accuracies = {group.metrics["accuracy"].mean for group in judged}
    if accuracies == {1.0}:
        return "All answers are right. "
    if accuracies == {0.0}:
        return "No answer is right. "
    return ""


def _describe_single(group: GroupNumbers) -> str:
    digits = supported_decimals(group.n)
    stated = f"{100 * group.metrics['mean_confidence'].mean:.{digits}f}"
    right = f"{100 * group.metrics['accuracy'].mean:.{digits}f}"
    ece = f"{100 * group.metrics['ece'].mean:.{digits}f}"
    low = f"{100 * group.null.low:.{digits}f}"
    high = f"{100 * group.null.high:.{digits}f}"
    return f"it states {stated} % and is right {right} % of the time (ECE {ece}; by chance {low} to {high})"


# ---- against DPO


def _compare_budgets(numbers: Numbers) -> tuple[str, ...]:
    """Say for each budget how the methods differ from DPO; budgets with the same differences share a sentence."""
    setting = numbers.first_screen[0].setting
    openings: dict[str, list[str]] = {}  # differences -> how a sentence about each of their budgets begins
    for budget in numbers.budgets:
        groups = numbers.find_groups(setting, budget)
        judged = [group for group in groups if group.versus and not isnan(group.versus["ece"].p_corrected)]
        if not judged:
            continue
        opening = "Against"
        if budget:
            opening = f"{BUDGET_TITLES[budget]}, against"
        differences = _compare_with_dpo(judged, tasks=len(list_report_tasks(groups)))
        openings.setdefault(differences, []).append(opening)
    points = []
    for differences, openings_of_budgets in openings.items():
        opening = openings_of_budgets[0]
        if len(openings_of_budgets) > 1:
            opening = "Both budgets, against"
        points.append(f"{opening} DPO on the same questions: {differences}.")
    return tuple(points)


def _compare_with_dpo(judged: Sequence[GroupNumbers], tasks: int) -> str:
    """Say which methods differ from DPO in ECE and in accuracy."""
    in_ece = _compare_metric(judged, tasks, metric="ece", title="ECE", better="lower", worse="higher")
    in_accuracy = _compare_metric(judged, tasks, metric="accuracy", title="accuracy", better="higher", worse="lower")
    return f"{in_ece}; {in_accuracy}"


def _compare_metric(
    judged: Sequence[GroupNumbers], tasks: int, *, metric: str, title: str, better: str, worse: str
) -> str:
    parts = []
    for word, mark in ((better, "*"), (worse, "†")):
        marked = [group for group in judged if group.versus[metric].mark(metric) == mark]
        if marked:
            names = _name_methods(marked, tasks)
            parts.append(f"{word} for {_join_names(names, most=len(names))}")
    if not parts:
        return f"no significant difference in {title}"
    return f"{title} is significantly {' and '.join(parts)}"


def _name_methods(groups: Sequence[GroupNumbers], tasks: int) -> list[str]:
    """Return the titles of the methods, each with its number of tasks if it is not marked on all of them."""
    counts = Counter(group.method for group in groups)
    names = []
    for method in sorted(counts, key=method_order):
        name = method_title(method)
        if counts[method] != tasks:
            name += f" ({counts[method]} of {tasks} tasks)"
        names.append(name)
    return names


# ---- grammar


def _choose_verb(subjects: Sequence[str]) -> str:
    if len(subjects) == 1:
        return "is"
    return "are"


def _join_names(names: Sequence[str], most: int = 3) -> str:
    """Join names as `a, b and c`; more than `most` names become the first name and the number of the others."""
    if len(names) > most:
        return f"{names[0]} and {len(names) - 1} others"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
