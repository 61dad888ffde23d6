"""Individual predictions for the page: the most telling ones where there are too many, as compact columns.

The report in a few sentences, computed from its numbers: who is within chance, and who differs from DPO.

Everything -> one HTML file that needs nothing else: style, script, figures and data are inside it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from catto.methods import Budget, known, method
from catto.metrics.catalogue import METRICS
from catto.prompts import parse
from catto.records import Prediction, Question
from catto.report.measuring import COMPARED
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results
from catto.report.plotting import Picture, inlined, themed
from catto.report.render import Table
from catto.report.tables import (
    BUDGET_TITLES,
    LEGEND,
    MARKS,
    Setting,
    budget_note,
    budget_title,
    method_group,
    method_order,
    method_title,
    of_setting,
    task_order,
    task_title,
)
from catto.report.tables import setting_title as setting
from catto.report.tables import setting_title as setting_title

# ---- browser


MOST_ROWS = 20_000
# A response of more characters is cut on the page; the file has all of it.
LONGEST = 4_000
RIGHT, FALLBACK, CUT, PLAIN = 1, 2, 4, 8


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


@dataclass
class Browser:
    """Collects the rows cell by cell. `quota`: most rows of one cell."""

    questions: Mapping[str, Mapping[str, Question]]
    quota: int
    total: int = 0
    cells: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    _places: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, cell: Cell, predictions: Sequence[Prediction]) -> None:
        """Keep the cell's most telling predictions: those furthest from what happened."""
        self.total += len(predictions)
        telling = sorted(predictions, key=lambda one: (-abs(one.confidence - (one.label == one.gold)), one.question))
        place = len(self.cells)
        self.cells.append(cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}))
        self.rows += [self._row(place, one) for one in telling[: self.quota]]

    def _row(self, cell: int, one: Prediction) -> list[Any]:
        question = self.questions.get(one.task, {}).get(one.question)
        labels = question.labels if question is not None else tuple(filter(None, (one.label, one.gold)))
        said = parse(one.text, labels).reasoning or one.text
        flags = RIGHT * (one.label == one.gold) + FALLBACK * (one.source == "fallback") + CUT * (len(said) > LONGEST)
        flags += PLAIN * (one.source == "plain")
        return [cell, self._place(one, question), one.label, round(one.confidence, 5), flags, said[:LONGEST]]

    def _place(self, one: Prediction, question: Question | None) -> int:
        key = (one.task, one.question)
        if key not in self._places:
            self._places[key] = len(self.asked)
            self.asked.append(_asked(one, question))
        return self._places[key]

    def data(self) -> dict[str, Any]:
        """Columns: cell, question, answer, confidence, flags, response; with what they refer to."""
        columns = [list(column) for column in zip(*self.rows, strict=True)] or [[] for _ in range(6)]
        return {"cells": self.cells, "questions": self.asked, "columns": columns, "total": self.total}


def _asked(one: Prediction, question: Question | None) -> dict[str, Any]:
    found: dict[str, Any] = {"id": one.question, "gold": one.gold}
    if question is not None:
        found["parts"] = [[name, text] for name, text in question.fields.items()]
        found["options"] = [[option.label, option.text] for option in question.options]
        if question.posterior is not None:
            found["posterior"] = {label: round(value, 4) for label, value in question.posterior.items()}
    return found


# ---- headline


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


# ---- page


# What is known of the samples and is no share.
RAW = ("sampling_temperature", "tau", "questions_with_both")
TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("report.js", "browser.js")  # as they follow each other in the page's one script element
DEFINITIONS: dict[str, tuple[str, str]] = {
    **{name: (metric.title, metric.definition) for name, metric in METRICS.items()},
    "null": (
        "Null band",
        "The range of ECE, 95 % of the time, of a model that is perfectly calibrated and states exactly these "
        "confidences on this many questions.",
    ),
    "interval": (
        "Interval [a, b]",
        "Percentile bootstrap over questions, 95 %. It is an interval of the estimator: chance only ever adds to ECE, "
        "so for a nearly calibrated model it lies above the true value. Read it beside the null band. Where it does "
        "not even hold the value, it is left out.",
    ),
    "gap": (
        "Confidence - accuracy",
        "Mean confidence less accuracy: above 0 is over-confidence. A mean over questions, so its interval holds also "
        "for a calibrated model.",
    ),
    "versus": (
        "Difference to DPO",
        "Paired on the same questions of the same seeds and budget. The p-value is from a swap test: how often a "
        "difference this large arises if each question's two answers change places at random; corrected is its value "
        f"after Holm's correction for all comparisons of the table. A mark asks for {MARKS}.",
    ),
    "fallback_rate": ("Fallback rate", "Share of responses in which no answer could be read."),
    "plain_rate": ("Plain answers", "Share of responses without answer tags whose last line gave the answer."),
    "accuracy_unparsed_wrong": ("Accuracy, unreadable = wrong", "Accuracy if those responses count as wrong."),
    "true_error": ("True error", "Mean distance of the confidence and the exact posterior probability of the answer."),
    "bayes_accuracy": ("Bayes accuracy", "Share of questions whose most probable answer is the right one."),
    "most confident": ("Confidence@k", "Accuracy of the most confident of k sampled answers."),
    "majority vote": ("Majority vote", "Accuracy of the answer that most of the k samples give."),
    "confidence-weighted vote": ("Weighted vote", "The same with every vote weighted by its confidence."),
    "mean log-probability": ("Mean log-probability", "Accuracy of the sample whose tokens were likeliest on average."),
    "auroc_within": (
        "AUROC within questions",
        "Chance that, of a right and a wrong sample of the same question, the right one is more confident; ties count "
        "half, all such pairs count the same. At 50 confidence cannot tell which sample to pick.",
    ),
    "questions_with_both": ("Questions with both", "Questions that have a right and a wrong sample."),
    "sample_fallback_rate": ("Fallback of samples", "Share of the k samples in which no answer could be read."),
    "sampling_temperature": ("Sampling temperature", "Temperature at which the k answers were sampled."),
    "tau": ("tau", "Temperature at which the confidences of the k answers are compared."),
    "one random sample": ("Random", "Accuracy of one sample picked at random."),
    "oracle": ("Oracle", "Share of questions with a right answer among the k samples: a bound for every rule."),
    "std": ("Standard deviation", "Over seeds, with n - 1 in the denominator."),
    "regret": ("Regret", "Mean posterior probability of the best answer less that of the answer given."),
}


@dataclass(frozen=True)
class Drawn:
    """A picture and its SVG text."""

    picture: Picture
    svg: str

    def inline(self) -> Markup:
        """The SVG as a part of the page. Every text in it went through matplotlib's XML escaping."""
        return Markup(inlined(self.svg, self.picture.name))


def page(results: Results, numbers: Numbers, tables: Sequence[Table], drawn: Sequence[Drawn], browser: Browser) -> str:
    """Render the page."""
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            results=results,
            numbers=numbers,
            headline=headline(numbers),
            facts=_facts(results, numbers),
            tables=_by_kind(tables),
            pictures=_pictures_by_kind(drawn),
            filters=_filters(numbers),
            legend=LEGEND,
            budgets=BUDGET_TITLES,
            budget_notes={budget: budget_note(results, budget) for budget in numbers.budgets},
            definitions=DEFINITIONS,
            browser=browser,
            limits=_limits(numbers),
            several_seeds=len({cell.seed for cell in numbers.cells}) > 1,
            data=Markup(script_json(_data(numbers, browser))),
        )
    )


def _environment() -> Environment:
    """Templates with every value escaped and an unknown name an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "asset": _asset,
        "budget_title": budget_title,
        "method_group": method_group,
        "method_title": method_title,
        "policy": _policy,
        "setting": setting,
        "task_title": task_title,
        "themed": themed,
    }
    return environment


def _policy() -> str:
    """What the page may do: run its own script, which is known by its hash, and load nothing.

    Styles stay open: figures and dots carry theirs as attributes, which no hash covers.
    """
    script = "".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _by_kind(tables: Sequence[Table]) -> dict[str, list[Table]]:
    found: dict[str, list[Table]] = {}
    for table in tables:
        found.setdefault(table.kind, []).append(table)
    return found


def _pictures_by_kind(drawn: Sequence[Drawn]) -> dict[str, list[Drawn]]:
    found: dict[str, list[Drawn]] = {}
    for one in drawn:
        found.setdefault(one.picture.kind, []).append(one)
    return found


def _filters(numbers: Numbers) -> dict[str, list[Any]]:
    return {
        "budgets": list(numbers.budgets) if len(numbers.budgets) > 1 else [],
        "tasks": sorted({group.task for group in numbers.groups}, key=task_order),
        "methods": sorted({group.method for group in numbers.groups}, key=method_order),
    }


def _facts(results: Results, numbers: Numbers) -> list[tuple[str, str]]:
    """What was run, as pairs of name and text; what is not known is left out."""
    tasks = sorted({group.task for group in numbers.groups}, key=task_order)
    sizes = {task: max(cell.n for cell in numbers.cells if cell.task == task) for task in tasks}
    sources = sorted({cell.trained_on for cell in numbers.cells}, key=task_order)
    seeds, runs = sorted({cell.seed for cell in numbers.cells}), len(numbers.cells)
    found = [
        ("Model", _model(results, numbers)),
        ("Tasks", ", ".join(f"{task_title(task)} (N = {sizes[task]:,})" for task in tasks)),
        ("Trained on", ", ".join(map(task_title, sources))),
        ("Methods", str(len({cell.method for cell in numbers.cells}))),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Predictions", f"{sum(cell.n for cell in numbers.cells):,} in {runs} {'run' if runs == 1 else 'runs'}"),
        ("ECE", f"{numbers.bins} bins of equal width, {numbers.resamples:,} resamples"),
        ("Commit", results.commit or ""),
        ("Recipe", f"{results.name} ({results.recipe_hash})"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
    ]
    return [(name, text) for name, text in found if text]


def _model(results: Results, numbers: Numbers) -> str:
    block = results.recipe.get("model")
    if isinstance(block, dict) and block.get("path"):
        return str(block["path"])
    if isinstance(block, dict) and isinstance(block.get("scratch"), dict):
        scratch = block["scratch"]
        return f"from scratch, {scratch.get('layers', 3)} layers, width {scratch.get('width', 96)}"
    return ", ".join(sorted({cell.model for cell in numbers.cells})[:3])


def _limits(numbers: Numbers) -> dict[str, Any]:
    """The numbers that the section on limits quotes."""
    comparisons = sum(len(group.versus) for group in numbers.groups)
    highest = max(numbers.groups, key=lambda group: group.fallback_rate.mean)
    return {
        "null_low": min(group.null.mean for group in numbers.groups),
        "null_high": max(group.null.mean for group in numbers.groups),
        "n_low": min(cell.n for cell in numbers.cells),
        "n_high": max(cell.n for cell in numbers.cells),
        "comparisons": comparisons,
        "fallback": highest,
        "budgets": [budget for budget in numbers.budgets if budget is not None],
    }


def _data(numbers: Numbers, browser: Browser) -> dict[str, Any]:
    """What the script reads: the groups for the cards of numbers, and the predictions."""
    methods = {cell.method for cell in numbers.cells}
    tasks = {name for cell in numbers.cells for name in (cell.task, cell.trained_on)}
    titles: dict[Budget | None, str] = BUDGET_TITLES
    return {
        "groups": [_card(group, numbers) for group in numbers.groups],
        "definitions": {name: list(text) for name, text in DEFINITIONS.items()},
        "raw": [*(name for name, metric in METRICS.items() if not metric.percent), *RAW],
        "methods": {name: method_title(name) for name in sorted(methods, key=method_order)},
        "tasks": {name: task_title(name) for name in sorted(tasks, key=task_order)},
        "budgets": {str(budget): title for budget, title in titles.items()},
        "shared": [name for name in methods if known(name) and not method(name).budgeted],
        "browser": browser.data(),
    }


def _card(group: GroupNumbers, numbers: Numbers) -> dict[str, Any]:
    """One group as its card shows it."""
    fields = {"task", "trained_on", "method", "budget", "seeds", "n", "metrics", "intervals", "null", "versus", "world"}
    fields |= {"fallback_rate", "plain_rate", "accuracy_unparsed_wrong", "versus_seed", "selection", "sampled", "gap"}
    card = group.model_dump(mode="json", include=fields)
    card["forced"] = f"{group.sources.counted}: these numbers describe the fallback, not the model."
    card["forced"] = card["forced"] if group.sources.forced else None
    card["by_seed"] = [
        {name: value for name in COMPARED if (value := cell.metrics[name].value) is not None} | {"seed": cell.seed}
        for cell in numbers.cells
        if (cell.task, cell.trained_on, cell.method) == (group.task, group.trained_on, group.method)
        and cell.budget in (None, group.budget)
    ]
    return _rounded(card)  # type: ignore[no-any-return]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 7)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
