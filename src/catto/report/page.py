"""Everything -> one HTML file that needs nothing else: style, script, figures and data are inside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from catto.evaluation.metrics import METRICS
from catto.methods import Budget, known, method
from catto.report.browser import Browser, script_json
from catto.report.headline import headline
from catto.report.measure import COMPARED
from catto.report.names import (
    BUDGET_TITLES,
    budget_title,
    method_group,
    method_order,
    method_title,
    setting,
    task_order,
    task_title,
)
from catto.report.numbers import GroupNumbers, Numbers
from catto.report.plotting import Picture, inlined, themed
from catto.report.results import Results
from catto.report.tables import LEGEND, MARKS, Table
from catto.report.tables_training import budget_note

__all__ = ["DEFINITIONS", "Drawn", "page"]

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
