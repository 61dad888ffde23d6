"""The report in words: whose confidence is best, which methods are miscalibrated, which numbers to mistrust."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import NamedTuple

from catto import methods
from catto.methods import Budget
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
        answer: the answer, in up to three sentences. Without a verdict it is the same as `lead`, and without a baseline
            the same as `best`.
        best: which methods are best by true error or Brier score; empty without a verdict.
        warnings: which numbers to mistrust.
        lead: which methods are miscalibrated.
        points: how the methods compare with the baseline, one sentence per budget; budgets with the same result share
            one.
    """

    question: str
    answer: str
    best: str
    warnings: tuple[str, ...]
    lead: str
    points: tuple[str, ...]


def write_headline(numbers: Numbers) -> Headline:
    """Summarise the numbers of the first screen in words.

    The answer is the first of these that there is:
    1. What confidence the baseline, the best method and the paper's method state, and how often they are right.
    2. Which methods are best by the verdict.
    3. Which methods are miscalibrated.
    """
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
        stated = _describe_stated_confidence(groups, numbers.verdict, numbers.baseline)
        if stated is not None:
            answer = stated
        else:
            # `best` does not say whether confidence and accuracy match, so it answers a different question.
            question = f"Which method's confidence {_describe_best(numbers.verdict)}?"
            answer = best
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

    def describe(self, digits: int) -> str:
        """Return both numbers as the rest of a sentence, with this number of decimals."""
        return f"states {self.confidence:.{digits}f} % and is right {self.accuracy:.{digits}f} % of the time"


def _describe_stated_confidence(groups: Sequence[GroupNumbers], verdict: Verdict, baseline: str | None) -> str | None:
    """Compare the stated confidence with the accuracy: of the baseline, the best method and the paper's method.

    Methods that are the same get one sentence, and methods that were not run or have too many forced answers get none.

    Args:
        groups: The groups of the first screen.
        verdict: The verdict on these groups. The best method is the one of its leaders whose mean confidence is closest
            to its accuracy.
        baseline: The method that the others are compared with; None if nothing is compared.

    Returns:
        One to three sentences; None if there is no baseline, or if too many of its answers were forced.
    """
    stated_of_method = _average_over_tasks(groups)
    if baseline is None or baseline not in stated_of_method:
        return None
    digits = supported_decimals(min(group.n for group in groups))
    stated_by_baseline = stated_of_method[baseline]
    sentences = [f"After {method_title(baseline)} the model {stated_by_baseline.describe(digits)}."]
    best = _choose_best_leader(stated_of_method, verdict)
    if best is not None and best != baseline:
        sentences.append(f"With {method_title(best)} it {stated_of_method[best].describe(digits)}.")
    if PAPERS_TERM in stated_of_method and PAPERS_TERM not in (baseline, best):
        sentences.append(_describe_papers_term(stated_of_method[PAPERS_TERM], stated_by_baseline, digits))
    return " ".join(sentences)


def _average_over_tasks(groups: Sequence[GroupNumbers]) -> dict[str, StatedConfidence]:
    """Return method -> its mean confidence and accuracy, without methods with too many forced answers."""
    forced_methods = {group.method for group in groups if group.sources.has_too_many_forced}
    groups_of_method: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        if group.method not in forced_methods:
            groups_of_method.setdefault(group.method, []).append(group)
    stated_of_method = {}
    for method, groups_of_tasks in groups_of_method.items():
        confidence = fmean(group.metrics["mean_confidence"].mean for group in groups_of_tasks)
        accuracy = fmean(group.metrics["accuracy"].mean for group in groups_of_tasks)
        stated_of_method[method] = StatedConfidence(100 * confidence, 100 * accuracy)
    return stated_of_method


def _choose_best_leader(stated_of_method: Mapping[str, StatedConfidence], verdict: Verdict) -> str | None:
    """Return the leader of the verdict whose mean confidence is closest to its accuracy; None if none is in both."""
    leaders = [method for method in verdict.leaders if method in stated_of_method]
    if not leaders:
        return None
    return min(leaders, key=lambda method: stated_of_method[method].gap)


def _describe_papers_term(with_term: StatedConfidence, by_baseline: StatedConfidence, digits: int) -> str:
    if abs(with_term.confidence - by_baseline.confidence) < 1:
        return f"The paper's term changes nothing here ({with_term.confidence:.{digits}f} %)."
    return f"With the paper's term it {with_term.describe(digits)}."


# ---- warnings


def _write_warnings(groups: Sequence[GroupNumbers]) -> tuple[str, ...]:
    warnings = []
    for group in groups:
        if group.n < FEW_QUESTIONS:
            warnings.append(_warn_of_few_questions(group))
        if group.sources.has_too_many_forced:
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
    """Name the methods whose confidence is best, with their losses and, if it is not among them, that of the baseline.

    Methods that are not significantly worse than the one with the lowest loss are named too. If that is true of all
    methods, the sentence says so.
    """
    leaders = verdict.leaders
    losses = _format_leaders_losses(verdict)
    methods_in_verdict = len(verdict.losses)
    if len(leaders) == methods_in_verdict:
        count = str(methods_in_verdict)
        if methods_in_verdict == 2:
            count = "two"
        return f"{verdict.n:,} questions cannot tell the {count} methods apart: {losses}."
    titles = [method_title(method) for method in leaders]
    claim = f"The confidence of {_join_names(titles)} {_describe_best(verdict)}"
    if len(leaders) > 1:
        claim += f", as far as {verdict.n:,} questions can tell"
    baseline_is_behind = baseline in verdict.behind and baseline not in leaders
    if baseline is None or not baseline_is_behind:
        return f"{claim}: {losses}."
    return f"{claim}: {losses}; {method_title(baseline)}: {_format_loss(verdict, baseline)}."


def _format_leaders_losses(verdict: Verdict) -> str:
    """Return the lowest and the highest loss of the leaders with their unit, such as `18 to 22 points from ...`."""
    leaders = verdict.leaders  # in the order of their losses
    lowest = _format_loss(verdict, leaders[0])
    highest = _format_loss(verdict, leaders[-1])
    losses = lowest
    if highest != lowest:
        losses = f"{lowest} to {highest}"
    if verdict.metric == "true_error":
        return f"{losses} points from the true probability"
    return f"Brier score {losses}"


def _format_loss(verdict: Verdict, method: str) -> str:
    """Format the loss of a method with the decimals that N supports: true error in points, Brier score from 0 to 1."""
    loss = verdict.losses[method]
    digits = supported_decimals(verdict.n)
    if verdict.metric == "true_error":
        return f"{100 * loss:.{digits}f}"
    return f"{loss:.{2 + digits}f}"


# ---- calibration


def _describe_calibration(groups: Sequence[GroupNumbers], at_budget: str) -> str:
    """Say which methods show no miscalibration, and how far off the others are.

    Args:
        groups: The groups of the first screen. Methods with too many forced answers are left out.
        at_budget: Text that names the budget, put after the first clause; empty if there is only one budget.
    """
    forced_methods = {group.method for group in groups if group.sources.has_too_many_forced}
    judged = [group for group in groups if group.method not in forced_methods]
    if not judged:
        return "No verdict on calibration: too many answers had to be forced."
    gaps_of = _collect_gaps(judged)  # title of a method -> its gap on each task, 0 if chance can explain it
    calibrated = []
    off_on_some_tasks = []
    off_on_all_tasks = []
    for title, gaps in gaps_of.items():
        is_off = [gap != 0 for gap in gaps]  # also true of nan, which stands for gaps of both signs
        if not any(is_off):
            calibrated.append(title)
        elif all(is_off):
            off_on_all_tasks.append(title)
        else:
            off_on_some_tasks.append(title)

    clauses = []
    if calibrated:
        clauses.append(_describe_calibrated(calibrated, judged))
    if off_on_some_tasks:
        verb = _choose_verb(off_on_some_tasks)
        clauses.append(f"{_join_names(off_on_some_tasks)} {verb} miscalibrated on some tasks")
    if off_on_all_tasks:
        gaps_off = []
        for title in off_on_all_tasks:
            gaps_off += gaps_of[title]
        verb = _choose_verb(off_on_all_tasks)
        clauses.append(f"{_join_names(off_on_all_tasks)} {verb} {_describe_gaps(gaps_off, judged)}")
    clauses[0] += at_budget
    if len(judged) == 1:
        return f"{clauses[0]}: {_describe_single(judged[0])}."
    return f"{_open_with_accuracy(judged)}{'; '.join(clauses)}."


def _collect_gaps(groups: Sequence[GroupNumbers]) -> dict[str, list[float]]:
    """Return title of a method -> `shown_gap` of each of its groups in points; methods in the order of the tables."""
    gaps: dict[str, list[float]] = {}
    for group in sorted(groups, key=lambda group: method_order(group.method)):
        gaps.setdefault(method_title(group.method), []).append(100 * group.shown_gap)
    return gaps


def _describe_calibrated(titles: Sequence[str], judged: Sequence[GroupNumbers]) -> str:
    """Say that these methods show no miscalibration; `judged` are the groups of all methods, for their sizes."""
    sizes = [group.n for group in judged]
    noun = "questions"
    if max(sizes) == 1:
        noun = "question"
    verb = "show"
    if len(titles) == 1:
        verb = "shows"
    clause = f"{_join_names(titles, max_names=len(titles))} {verb} no miscalibration in {format_range(sizes)} {noun}"
    if len(list_report_tasks(judged)) > 1:
        clause += " per task"
    return clause


def _describe_gaps(gaps: Sequence[float], judged: Sequence[GroupNumbers]) -> str:
    """Say by how much methods are over- or underconfident; without a number if the gaps have different signs.

    Args:
        gaps: The gaps of these methods on all tasks, in points; nan stands for gaps of both signs.
        judged: The groups of all methods that are judged.
    """
    all_over = all(gap > 0 for gap in gaps)
    all_under = all(gap < 0 for gap in gaps)
    have_different_signs = not all_over and not all_under
    if have_different_signs:
        if len(judged) == 1:  # the only gap is nan
            return "too sure of some answers and not sure enough of others"
        return "measurably miscalibrated"
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


# ---- against the baseline


def _compare_budgets(numbers: Numbers) -> tuple[str, ...]:
    """Say for each budget how the methods differ from the baseline; budgets with the same differences share a sentence.

    Returns:
        The sentences. A budget has none if no method in it could be compared with the baseline.
    """
    if numbers.baseline is None:
        return ()
    setting = numbers.first_screen[0].setting
    budgets_with: dict[str, list[Budget | None]] = {}  # text about the differences -> budgets that it is true of
    for budget in numbers.budgets:
        groups = numbers.find_groups(setting, budget)
        # The corrected p-value is nan if too many answers were forced for the comparison to be judged.
        judged = [group for group in groups if group.versus and not isnan(group.versus["ece"].p_corrected)]
        if not judged:
            continue
        differences = _compare_with_baseline(judged, tasks=len(list_report_tasks(groups)))
        budgets_with.setdefault(differences, []).append(budget)
    sentences = []
    for differences, budgets in budgets_with.items():
        opening = "Against"
        if len(budgets) > 1:
            opening = "Both budgets, against"
        elif budgets[0] is not None:
            opening = f"{BUDGET_TITLES[budgets[0]]}, against"
        baseline = method_title(numbers.baseline)
        sentences.append(f"{opening} {baseline} on the same questions: {differences}.")
    return tuple(sentences)


def _compare_with_baseline(judged: Sequence[GroupNumbers], tasks: int) -> str:
    """Say which methods differ from the baseline in ECE and in accuracy. tasks: Number of tasks in the report."""
    in_ece = _compare_metric(judged, tasks, metric="ece", title="ECE", better="lower", worse="higher")
    in_accuracy = _compare_metric(judged, tasks, metric="accuracy", title="accuracy", better="higher", worse="lower")
    return f"{in_ece}; {in_accuracy}"


def _compare_metric(
    judged: Sequence[GroupNumbers], tasks: int, *, metric: str, title: str, better: str, worse: str
) -> str:
    """Say which methods are significantly better or worse in a metric.

    Args:
        judged: The groups that are compared.
        tasks: Number of tasks in the report.
        metric: Name of the metric.
        title: How the sentence names the metric.
        better: "higher" or "lower", whichever is better for this metric.
        worse: The other one.
    """
    parts = []
    for word, mark in ((better, "*"), (worse, "†")):
        marked = [group for group in judged if group.versus[metric].mark(metric) == mark]
        if marked:
            names = _name_methods(marked, tasks)
            parts.append(f"{word} for {_join_names(names, max_names=len(names))}")
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


def _join_names(names: Sequence[str], max_names: int = 3) -> str:
    """Join names as `a, b and c`; more than `max_names` names become the first one and how many others there are."""
    if len(names) > max_names:
        return f"{names[0]} and {len(names) - 1} others"
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
