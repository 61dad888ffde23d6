"""The report in a few sentences, computed from its numbers: who is within chance, and who differs from DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from catto.methods import known, method
from catto.report.names import budget_title, method_order, method_title
from catto.report.names import setting as setting_title
from catto.report.numbers import GroupNumbers, Numbers
from catto.report.tables import Setting, of_setting

__all__ = ["Headline", "headline"]

CLAUSES: tuple[tuple[str, str, tuple[str, str]], ...] = (
    ("ece", "ECE", ("lower", "higher")),
    ("accuracy", "accuracy", ("higher", "lower")),
)


@dataclass(frozen=True)
class Headline:
    """What has to be said before all else, the first sentence, and for each budget how the methods compare with DPO."""

    warnings: tuple[str, ...]
    lead: str
    points: tuple[str, ...]


def headline(numbers: Numbers) -> Headline:
    """Say what the in-distribution numbers show; out of distribution where there are no others."""
    setting: Setting = "in" if any(group.task == group.trained_on for group in numbers.groups) else "out"
    blocks = {budget: [group for _, group in of_setting(numbers, setting, budget)] for budget in numbers.budgets}
    said: dict[str, list[str]] = {}  # budgets of which the same is to be said share a sentence
    for budget, groups in blocks.items():
        if any(group.versus for group in groups):
            said.setdefault(_against(groups), []).append(budget_title(budget))
    places = {text: titles[0] if len(titles) == 1 else "Both budgets" for text, titles in said.items()}
    points = (f"{place}, against DPO on the same questions: {text}." for text, place in places.items())
    return Headline(_warnings(numbers.groups), _lead(blocks[numbers.budgets[0]], numbers), tuple(points))


def _warnings(groups: Sequence[GroupNumbers]) -> tuple[str, ...]:
    """Name the groups of mostly forced answers; a model that both budgets share is named once."""
    found: dict[str, None] = {}
    for group in groups:
        if group.sources.forced:
            where = f"{group.title} on {setting_title(group.trained_on, group.task)}"
            budget = f", {budget_title(group.budget).lower()}" if _budgeted(group) else ""
            found[f"{where}{budget}: {group.sources.counted}: its numbers describe the fallback, not the model."] = None
    return tuple(found)


def _budgeted(group: GroupNumbers) -> bool:
    return group.budget is not None and known(group.method) and method(group.method).budgeted


def _lead(everything: Sequence[GroupNumbers], numbers: Numbers) -> str:
    """Which methods' ECE cannot be told from that of a perfectly calibrated model; forced answers are not judged."""
    forced = {group.method for group in everything if group.sources.forced}
    groups = [group for group in everything if group.method not in forced]
    if not groups:
        return "No verdict on calibration: too many answers had to be forced."
    methods, tasks = _methods(groups), {group.task for group in groups}
    counts = {name: sum(group.method == name and group.within_null for group in groups) for name in methods}
    always = [name for name in methods if counts[name] == len(tasks)]
    sometimes = sum(0 < count < len(tasks) for count in counts.values())
    budget = f" at the {budget_title(numbers.budgets[0]).lower()}" if len(numbers.budgets) > 1 else ""
    where = {1: "", 2: " on both tasks"}.get(len(tasks), f" on all {len(tasks)} tasks")
    who = _listed([method_title(name) for name in always]) if always else "No method"
    verb = "is" if len(always) <= 1 else "are"
    rest = _rest(counts, always, sometimes)
    return f"{who} {verb} calibrated to within sampling noise{where}{budget}{rest}."


def _rest(counts: Mapping[str, int], always: Sequence[str], sometimes: int) -> str:
    """What is to be said of the other methods."""
    others = len(counts) - len(always)
    if not others:
        return ""
    if not sometimes:
        return (
            f"; {'the other ' if always else 'all '}{others} {'is' if others == 1 else 'are'} measurably miscalibrated"
        )
    return f"; {sometimes} of {others if always else len(counts)} {'others' if always else 'methods'} are so on some"


def _methods(groups: Sequence[GroupNumbers]) -> list[str]:
    return sorted({group.method for group in groups}, key=method_order)


def _share(method: str, found: Sequence[GroupNumbers], tasks: set[str]) -> str:
    """`(2 of 5 tasks)`, where it is not all of them."""
    count = sum(group.method == method for group in found)
    return f" ({count} of {len(tasks)} tasks)" if count < len(tasks) else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _against(groups: Sequence[GroupNumbers]) -> str:
    """How the methods compare with DPO in one budget: ECE first, then accuracy."""
    compared = [group for group in groups if group.versus]
    tasks = {group.task for group in groups}
    parts = []
    for metric, name, words in CLAUSES:
        good = [group for group in compared if group.versus[metric].mark(metric) == "*"]
        bad = [group for group in compared if group.versus[metric].mark(metric) == "†"]
        parts.append(_clause(name, words, good, bad, tasks))
    return "; ".join(parts)


def _clause(
    name: str, words: tuple[str, str], good: Sequence[GroupNumbers], bad: Sequence[GroupNumbers], tasks: set[str]
) -> str:
    said = [
        f"{word} for {_listed([method_title(method) + _share(method, found, tasks) for method in _methods(found)])}"
        for word, found in zip(words, (good, bad), strict=True)
        if found
    ]
    return f"{name} is significantly {' and '.join(said)}" if said else f"no significant difference in {name}"
