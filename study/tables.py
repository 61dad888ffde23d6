"""The Markdown tables of methods: scores with intervals, short tables, scores per seed, selection among samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from catto.methods import AMONG_LABELS, method_sort_key, strip_scaling
from catto.metrics.catalogue import METRICS
from catto.report.measuring import PREFERENCE
from catto.report.numbers import GroupNumbers, Numbers
from catto.report.tables import setting_title, task_order

from .names import (
    TUNED,
    is_scaled,
    list_seeds,
    scale_variant,
    short_title,
    split_variant,
    variant_sort_key,
    variant_title,
)

# Suffixes of the scalings that tables show.
SCALINGS = ("+ts", AMONG_LABELS)
# Smaller numbers of samples are left out of the table of selection rules.
MIN_SELECTION_SAMPLES = 3
# The rows of the first table of docs/results.md.
FIRST_TABLE = ("sft", "dpo", "dpo+catto", "dpo+tl", f"dpo+outcome{TUNED}", f"dpo+outcome+tl{TUNED}")


def make_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line after it.

    >>> make_table(["method", "ECE"], [["DPO", "22.0"]])
    ['| method | ECE |', '| --- | --- |', '| DPO | 22.0 |', '']
    """
    lines = []
    for row in (heads, ["---"] * len(heads), *rows):
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


class Place(NamedTuple):
    """The methods on one task, all trained on the same task, which may be a different one."""

    title: str
    groups: list[GroupNumbers]

    @property
    def by_method(self) -> dict[str, GroupNumbers]:
        """Name of a variant -> its numbers."""
        return {group.method: group for group in self.groups}


def is_ablation(group: GroupNumbers) -> bool:
    """Return whether a method is shown only in the ablation: a variant with options that has one seed."""
    method, options = split_variant(group.method)
    is_main_result = group.method.endswith(TUNED) or strip_scaling(method) == "dpo+outcome-pairs"
    has_options = bool(options)
    return has_options and len(group.seeds) == 1 and not is_main_result


def list_places(numbers: Numbers) -> list[Place]:
    """Group the methods by task and training task; the tasks that models were trained on come first."""
    groups_by_place: dict[tuple[object, ...], list[GroupNumbers]] = {}
    for group in sorted(numbers.groups, key=lambda group: variant_sort_key(group.method)):
        place_sort_key = (group.setting, task_order(group.task), group.trained_on)
        groups_by_place.setdefault(place_sort_key, []).append(group)
    places = []
    for _, groups in sorted(groups_by_place.items(), key=lambda item: item[0]):
        places.append(Place(setting_title(groups[0]), groups))
    return places


def select_places(numbers: Numbers, *, ablation: bool) -> list[Place]:
    """Return the places with only the methods of the ablation, or with only the other methods."""
    selected = []
    for place in list_places(numbers):
        groups = [group for group in place.groups if is_ablation(group) == ablation]
        if groups:
            selected.append(Place(place.title, groups))
    return selected


# ---- scores


class ScoreTexts(NamedTuple):
    """The cells of one table row, formatted.

    Attributes:
        accuracy: Accuracy in percent.
        confidence: Mean confidence in percent.
        ece: ECE in percent.
        chance: Range of the ECE of a perfectly calibrated model with the same confidences.
        debiased_ece: Debiased ECE in percent.
        brier: Brier score.
        auroc: AUROC in percent.
        forced: Share of the answers that had to be forced, in percent.
    """

    accuracy: str
    confidence: str
    ece: str
    chance: str
    debiased_ece: str
    brier: str
    auroc: str
    forced: str


def format_scores(group: GroupNumbers, *, intervals: bool) -> ScoreTexts:
    """Format the scores of a method.

    Args:
        group: The method.
        intervals: Whether to add the confidence intervals.
    """
    return ScoreTexts(
        accuracy=_format_metric(group, "accuracy", intervals=intervals),
        confidence=_percent(group.metrics["mean_confidence"].mean),
        ece=_format_metric(group, "ece", intervals=intervals),
        chance=format_chance(group),
        debiased_ece=_percent(group.metrics["debiased_ece"].mean),
        brier=_format_metric(group, "brier", intervals=intervals),
        auroc=_format_metric(group, "auroc", intervals=intervals),
        forced=f"{100 * group.others['fallback_rate'].mean:.0f}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def format_chance(group: GroupNumbers) -> str:
    """Format the ECE of a perfectly calibrated model with the same confidences."""
    return f"{_percent(group.null.low)} to {_percent(group.null.high)}"


def _format_metric(group: GroupNumbers, name: str, *, intervals: bool) -> str:
    """Format the mean of a metric over seeds, with the mark of the comparison with DPO and, if wanted, the interval."""
    scale = 1
    decimals = 3
    if METRICS[name].percent:
        scale = 100
        decimals = 1
    text = f"{scale * group.metrics[name].mean:.{decimals}f}"
    interval = group.intervals[name]
    if intervals and interval.reason is None:
        text += f" [{scale * interval.low:.{decimals}f}, {scale * interval.high:.{decimals}f}]"
    if name in group.versus:
        text += f" {group.versus[name].mark(name)}"
    return text.rstrip()


def tabulate_scores(places: Sequence[Place]) -> Iterator[str]:
    """Yield a table for each place: means over seeds, intervals over questions, marks for differences from DPO."""
    heads = ["method", "accuracy", "confidence", "ECE", "by chance", "debiased ECE", "Brier", "AUROC", "forced, %"]
    for place in places:
        rows = []
        for group in place.groups:
            scores = format_scores(group, intervals=True)
            rows.append([variant_title(group.method), *scores, *_true_error(group)])
        yield from tabulate_place(place, heads, rows)


def tabulate_briefly(places: Sequence[Place], methods: Collection[str] = ()) -> Iterator[str]:
    """Yield a table for each place with one row per model: ECE and Brier score before and after both scalings.

    Args:
        places: The places.
        methods: The variants to show; empty means all of them.
    """
    heads = ["method", "accuracy", "confidence", "ECE", "by chance", "`+ts`", "`+tl`", "Brier", "`+ts`", "`+tl`"]
    heads += ["AUROC", "forced, %"]
    for place in places:
        groups = []
        for group in place.groups:
            is_wanted = not methods or group.method in methods
            if is_wanted and not is_scaled(group.method):
                groups.append(group)
        groups.sort(key=lambda group: _brief_sort_key(group.method))
        rows = [_brief_row(group, place) for group in groups]
        if groups:
            yield from tabulate_place(Place(place.title, groups), heads, rows)


def _brief_sort_key(name: str) -> tuple[object, ...]:
    method, _ = split_variant(name)
    _, _, shown_options = short_title(name).partition(", ")
    return shown_options, method_sort_key(method)


def _brief_row(group: GroupNumbers, place: Place) -> list[str]:
    texts = format_scores(group, intervals=False)
    scaled_eces = []
    scaled_briers = []
    for suffix in SCALINGS:
        scaled = place.by_method.get(scale_variant(group.method, suffix))
        if scaled is None:
            scaled_eces.append("-")
            scaled_briers.append("-")
        else:
            scaled_texts = format_scores(scaled, intervals=False)
            scaled_eces.append(scaled_texts.ece)
            scaled_briers.append(scaled_texts.brier)
    row = [short_title(group.method), texts.accuracy, texts.confidence, texts.ece, texts.chance, *scaled_eces]
    return [*row, texts.brier, *scaled_briers, texts.auroc, texts.forced, *_true_error(group)]


def _true_error(group: GroupNumbers) -> list[str]:
    """Return the table cell with the true error, or an empty list if the true probabilities are not known."""
    if "true_error" not in group.others:
        return []
    return [_percent(group.others["true_error"].mean)]


def tabulate_place(place: Place, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table under its title, with columns for the true error and the preferences where they were measured.

    Args:
        place: The methods. The title states the seeds of the first one; rows with other seeds state theirs.
        heads: Column titles.
        rows: One row per method, in the order of the place, including the true error if it was measured.
    """
    first = place.groups[0]
    has_preference = any(group.number(name) for group in place.groups for name in PREFERENCE)
    shown_heads = [*heads]
    if "true_error" in first.others:
        shown_heads.append("true error")
    if has_preference:
        shown_heads += ["held-out pairs ordered, %", "by their reasoning, %"]
    shown_rows = []
    for group, (name, *texts) in zip(place.groups, rows, strict=True):
        if group.seeds != first.seeds:
            name += f" ({list_seeds(group.seeds)} alone)"
        if has_preference:
            texts += [format_preference(group, metric) for metric in PREFERENCE]
        shown_rows.append([name, *texts])
    title = f"**{place.title}**, {first.n} test questions, {list_seeds(first.seeds)}:"
    return [title, "", *make_table(shown_heads, shown_rows)]


def format_preference(group: GroupNumbers, metric: str) -> str:
    """Format the share of held-out pairs that a method orders as preferred, with its interval.

    Args:
        group: The method.
        metric: A name in `PREFERENCE`: the whole response or only its reasoning.

    Returns:
        The text, or a dash if no pairs were scored.
    """
    share = group.number(metric)
    if share is None:
        return "-"
    interval = group.intervals[metric]
    return f"{_percent(share.mean)} [{_percent(interval.low)}, {_percent(interval.high)}]"


def tabulate_first(numbers: Numbers) -> list[str]:
    """Return the first table of docs/results.md: a few methods on SNLI, means over seeds."""
    known = {}
    for group in numbers.groups:
        if setting_title(group) == "SNLI":
            known[group.method] = group
    rows = []
    for method in FIRST_TABLE:
        texts = format_scores(known[method], intervals=False)
        rows.append([short_title(method), texts.accuracy, texts.confidence, texts.ece, texts.chance, texts.auroc])
    return make_table(["method", "accuracy", "confidence", "ECE", "by chance", "AUROC"], rows)


def tabulate_seeds(places: Sequence[Place], numbers: Numbers) -> Iterator[str]:
    """Yield a table for each place with the accuracy and ECE of every seed."""
    for place in places:
        seeds = list_place_seeds(place)
        rows = []
        for group in place.groups:
            texts = dict.fromkeys(seeds, "-")
            for cell in numbers.cells:
                if group.holds(cell):
                    accuracy = _percent(cell.metrics["accuracy"].value)
                    ece = _percent(cell.metrics["ece"].value)
                    texts[cell.seed] = f"{accuracy} / {ece}"
            rows.append([variant_title(group.method), *texts.values()])
        heads = [f"seed {seed}" for seed in seeds]
        yield from make_table([f"{place.title}: accuracy / ECE", *heads], rows)


def list_place_seeds(place: Place) -> list[int]:
    """Return the seeds that at least one method of a place has."""
    seeds: set[int] = set()
    for group in place.groups:
        seeds.update(group.seeds)
    return sorted(seeds)


def tabulate_selection(numbers: Numbers) -> list[str]:
    """Return the table with the accuracy of every rule that chooses among samples, for each sampled method."""
    rows = []
    rules: list[str] = []
    for group in numbers.groups:
        for k, accuracies in group.selection.items():
            if k < MIN_SELECTION_SAMPLES:
                continue
            rules = list(accuracies)
            shares = [accuracies[rule].mean for rule in rules]
            shares.append(group.metrics["accuracy"].mean)
            shares.append(group.others["auroc_within"].mean)
            shares.append(group.others["sample_fallback_rate"].mean)
            temperature = f"{group.others['sampling_temperature'].mean:.2g}"
            rows.append([variant_title(group.method), f"{k}", *map(_percent, shares), temperature])
    heads = ["one greedy answer", "AUROC within questions", "forced, % of samples", "sampled at"]
    return make_table(["method", "k", *rules, *heads], rows)
