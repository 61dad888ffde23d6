"""Everything -> one HTML file that needs nothing else: style, script, figures and data are inside it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from math import isfinite, isnan
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from catto.answer.response import parse_response
from catto.measure import Unparsed
from catto.methods import known, method
from catto.metrics.catalogue import METRICS
from catto.recipe import FEW_QUESTIONS
from catto.records import Prediction, Question
from catto.report import tables as names
from catto.report.drawing import BLUE, GREY, INK, PALE, RED
from catto.report.figures import Picture, looks
from catto.report.measuring import BASELINE, COMPARED, PREFERENCE
from catto.report.numbers import Cell, GroupNumbers, Numbers, Results, Verdict, supported_decimals
from catto.report.render import TEMPLATES, Table
from catto.report.tables import method_order, method_title, setting_title, task_order, task_title

MOST_ROWS = 20_000
LONGEST = 4_000  # characters of a response on the page; the file has all of it
RIGHT, FALLBACK, CUT, PLAIN = 1, 2, 4, 8
# A picture narrower than this (pixels) shrinks to the screen of a phone; several panels would be unreadable and scroll.
ONE_PANEL = 600
# On the page these follow the reader's light or dark theme; in the files they stay as drawn.
THEMED = {
    INK: "var(--fg)",
    GREY: "var(--muted)",
    "#ffffff": "var(--card)",
    PALE: "var(--pale)",
    BLUE: "var(--blue)",
    RED: "var(--red)",
    "#1B6CA8": "var(--deep)",
    "#8A4B94": "var(--plum)",
}
Drawn = Sequence[tuple[Picture, str]]  # each with its SVG text


def page(results: Results, numbers: Numbers, tables: Sequence[Table], drawn: Drawn, browser: Browser) -> str:
    """Render the page."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    style, *scripts = ((TEMPLATES / name).read_text("utf-8") for name in ("report.css", "report.js", "browser.js"))
    script = "".join(scripts)
    # The page may run its own script, which is known by its hash, and load nothing. Styles stay open: figures and dots
    # carry theirs as attributes, which no hash covers.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    tasks = sorted({group.task for group in numbers.groups}, key=task_order)
    sources = sorted({cell.trained_on for cell in numbers.cells}, key=task_order)
    methods = sorted({cell.method for cell in numbers.cells}, key=method_order)
    # The first screen has the reliability diagrams of DPO and of the best of the others, on the first task.
    groups, verdict = numbers.first_screen, numbers.verdict
    place = min(groups, key=lambda group: task_order(group.task))
    ranked = [*(verdict.losses if verdict else dict.fromkeys(group.method for group in groups))]
    tags = [f"{place.stem}-{name}" for name in sorted(ranked, key=lambda name: name != BASELINE)[:2]]
    single = [pair for pair in drawn if pair[0].section == "one" and pair[0].budget in (None, place.budget)]
    data = {
        "groups": [_card(group, numbers) for group in numbers.groups],
        "methods": {name: method_title(name) for name in methods},
        "tasks": {name: task_title(name) for name in sorted({*tasks, *sources}, key=task_order)},
        "budgets": {str(budget): names.BUDGET_TITLES[budget] for budget in numbers.budgets if budget},
        "browser": browser.data(),
    }
    return environment.get_template("report.html.j2").render(
        policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(script_json(data)),
        results=results,
        numbers=numbers,
        headline=headline(numbers),
        first_pictures=[pair for tag in tags for pair in single if pair[0].tag == tag],
        all_tables=tables,
        drawn=drawn,
        tasks=tasks,
        sources=sources,
        methods=methods,
        seeds=sorted({cell.seed for cell in numbers.cells}),
        metrics=METRICS,
        browser=browser,
        names=names,
        inline_svg=inline_svg,
        place_of={group.input: index for index, group in enumerate(numbers.groups)},
        colours={name: THEMED.get(colour, colour) for name, (colour, _) in looks(methods).items()},
    )


FILES_NOTE = '<span class="files">Files: '


def page_seen_from(text: str, folder: str) -> str:
    """Return the page as it is put elsewhere: its notes name the files of tables by their folder as seen from there.

    >>> page_seen_from('<span class="files">Files: tables/main.md', "stages/report-1")
    '<span class="files">Files: stages/report-1/tables/main.md'
    """
    return text.replace(f"{FILES_NOTE}tables/", f"{FILES_NOTE}{folder}/tables/")


def script_json(value: object) -> str:
    """Write JSON that cannot end the script element it is put in, nor open another.

    >>> script_json({"text": "</script>"})
    '{"text":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def _card(group: GroupNumbers, numbers: Numbers) -> dict[str, Any]:
    """What the card of a number shows of its group."""
    card = group.model_dump(mode="json", exclude={"input", "sources", "papers_budget"})
    forced = f"{group.sources.summary}: these numbers describe the fallback, not the model."
    card["forced"] = forced if group.sources.forced else None
    card["by_seed"] = []
    for cell in numbers.cells:
        if group.holds(cell):
            shown = {name: cell.metrics[name].value for name in (*COMPARED, *PREFERENCE) if name in cell.metrics}
            defined = {name: value for name, value in shown.items() if isfinite(value)}
            card["by_seed"].append({"seed": cell.seed, **defined})
    return dict(json.loads(json.dumps(card), parse_float=lambda digits: round(float(digits), 7)))


def inline_svg(text: str, name: str) -> Markup:
    """Make an SVG part of the page: ids of its own, colours of the theme, coordinates to a tenth of a point.

    matplotlib escapes every text in it.
    """
    head = re.search(r'<svg[^>]* width="([\d.]+)pt"[^>]* (viewBox="[^"]+")[^>]*>', text)
    if head is None:
        raise ValueError(f"not an SVG that matplotlib wrote: {text[:80]}")

    def in_tenths(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), attribute[0])

    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[head.end() :], flags=re.DOTALL)
    body = re.sub(r' (d|x|y|transform|points)="[^"]*"', in_tenths, body)
    body = re.sub(r">\s+<", "><", re.sub(r"\s+", " ", body))
    for colour, variable in THEMED.items():
        body = re.sub(colour, variable, body, flags=re.IGNORECASE)
    prefix, reference = re.sub(r"[^A-Za-z0-9]", "-", name), r'(url\(#|xlink:href="#)'
    used = {target for _, target in re.findall(reference + r'([^")]+)', body)}
    body = re.sub(r' id="([^"]+)"', lambda own: f' id="{prefix}-{own[1]}"' if own[1] in used else "", body)
    body = re.sub(reference, rf"\1{prefix}-", body)
    pixels = 1.25 * float(head[1])  # nine-point text is then as large as the page's small print
    kind = "" if pixels < ONE_PANEL else ' class="many"'
    xlink = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    return Markup(f'<svg{kind} {xlink} {head[2]} style="width:{pixels:.0f}px" aria-hidden="true">{body}')


@dataclass
class Browser:
    """The predictions that the page holds, collected cell by cell.

    Up to `most` predictions of all cells are kept; where there are more, each of the `expected` cells keeps its share.
    """

    questions: Mapping[str, Mapping[str, Question]]
    most: int = MOST_ROWS
    expected: int = 1
    unparsed: Unparsed = "fallback"
    total: int = 0
    cells: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, cell: Cell, predictions: Sequence[Prediction]) -> None:
        """Keep the cell's most telling predictions: those whose confidence is furthest from what happened."""
        self.total += len(predictions)
        self.cells.append(cell.model_dump(include={"task", "trained_on", "method", "budget", "seed"}))
        wrong = "fallback" if self.unparsed == "wrong" else None  # the source of answers that count as wrong
        judged = [(row.label == row.gold and row.source != wrong, row) for row in predictions]
        telling = sorted(judged, key=lambda pair: (-abs(pair[1].confidence - pair[0]), pair[1].question))
        share = max(1, self.most // self.expected)
        for right, prediction in telling if self.total <= self.most else telling[:share]:
            task, name, label, gold = prediction.task, prediction.question, prediction.label, prediction.gold
            question = self.questions.get(task, {}).get(name)
            labels = tuple(filter(None, (label, gold))) if question is None else question.labels
            response = parse_response(prediction.text, labels).reasoning or prediction.text
            flags = RIGHT * right + CUT * (len(response) > LONGEST)
            flags += FALLBACK * (prediction.source == "fallback") + PLAIN * (prediction.source == "plain")
            confidence = round(prediction.confidence, 5)
            self.rows.append((len(self.cells) - 1, (task, name, gold), label, confidence, flags, response[:LONGEST]))
        if self.total > self.most:
            self.rows = [row for _, rows in groupby(self.rows, key=lambda row: row[0]) for row in islice(rows, share)]

    def data(self) -> dict[str, Any]:
        """Columns: cell, question, answer, confidence, flags, response; with what they refer to."""
        columns = [list(column) for column in zip(*self.rows, strict=True)] or [[] for _ in range(6)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(columns[1]))}
        columns[1] = [numbers[key] for key in columns[1]]
        asked: list[dict[str, Any]] = []
        for task, name, gold in numbers:
            asked.append({"id": name, "gold": gold})
            if (question := self.questions.get(task, {}).get(name)) is not None:
                options = [(option.label, option.text) for option in question.options]
                asked[-1] |= {"parts": list(question.fields.items()), "options": options}
                if question.posterior is not None:
                    asked[-1]["posterior"] = {option: round(p, 4) for option, p in question.posterior.items()}
        return {"cells": self.cells, "questions": asked, "columns": columns}


class Headline(NamedTuple):
    """The page in words.

    question, answer: one sentence each. warnings: which numbers to mistrust. lead: which methods are miscalibrated.
    points: for each budget, how the methods compare with DPO.
    """

    question: str
    answer: str
    warnings: tuple[str, ...]
    lead: str
    points: tuple[str, ...]


def headline(numbers: Numbers) -> Headline:
    """Sum up the in-distribution numbers, or the out-of-distribution ones where there are no others."""
    warnings: dict[str, None] = {}  # a model that both budgets share is named once
    for group in numbers.groups:
        if group.n < FEW_QUESTIONS:
            only = f"{task_title(group.task)}: only {group.n} {'question' if group.n == 1 else 'questions'}"
            warnings[f"{only}; below {FEW_QUESTIONS} intervals are too narrow and little miscalibration shows."] = None
        if group.sources.forced:
            budgeted = group.budget is not None and known(group.method) and method(group.method).budgeted
            where = f"{method_title(group.method)} on {setting_title(group)}"
            where += f", {names.BUDGET_TITLES[group.budget].lower()}" if budgeted else ""
            warnings[f"{where}: {group.sources.summary}: its numbers describe the fallback, not the model."] = None
    first = numbers.first_screen
    lead = _calibration(first, f" at the {names.BUDGET_TITLES[first[0].budget].lower()}" if numbers.budgets[1:] else "")
    compared = defaultdict(list)  # budgets with the same differences share a sentence
    for budget in numbers.budgets:
        groups = numbers.block(first[0].setting, budget)
        if judged := [one for one in groups if one.versus and not isnan(one.versus["ece"].p_corrected)]:
            title = f"{names.BUDGET_TITLES[budget]}, against" if budget else "Against"
            compared[_against_dpo(judged, len({one.task for one in groups}))].append(title)
    whose = {text: titles[0] if len(titles) == 1 else "Both budgets, against" for text, titles in compared.items()}
    points = (f"{title} DPO on the same questions: {text}." for text, title in whose.items())
    return Headline(*_answer(numbers.verdict, lead), tuple(warnings), lead, tuple(points))


def _answer(verdict: Verdict | None, calibrated: str) -> tuple[str, str]:
    """Return the question of the page and its answer: the methods whose confidence is best, without breaking ties."""
    if verdict is None:
        return "Is the stated confidence honest?", calibrated
    exact, leaders, judged = verdict.metric == "true_error", verdict.leaders, len(verdict.losses)
    scale, digits = (100, supported_decimals(verdict.n)) if exact else (1, 2 + supported_decimals(verdict.n))
    texts = {name: f"{scale * value:.{digits}f}" for name, value in verdict.losses.items()}
    span = " to ".join(dict.fromkeys((texts[leaders[0]], texts[leaders[-1]])))
    loss = f"{span} points from the true probability" if exact else f"Brier score {span}"
    best = "is closest to the truth" if exact else "best predicts correctness"
    question = f"Which method's confidence {best}?"
    if len(leaders) == judged:
        count = "two" if judged == 2 else judged
        return question, f"{verdict.n:,} questions cannot tell the {count} methods apart: {loss}."
    claim = f"The confidence of {_join(map(method_title, leaders))} {best}"
    if len(leaders) > 1:
        claim += f", as far as {verdict.n:,} questions can tell"
    baseline = f"; {method_title(BASELINE)}: {texts[BASELINE]}" if BASELINE in texts and BASELINE not in leaders else ""
    return question, f"{claim}: {loss}{baseline}."


def _calibration(groups: Sequence[GroupNumbers], of_budget: str) -> str:
    """Say of which methods no miscalibration shows, and how far off the others are; forced answers are not judged."""
    forced = {group.method for group in groups if group.sources.forced}
    judged = [group for group in groups if group.method not in forced]
    if not judged:
        return "No verdict on calibration: too many answers had to be forced."
    gaps: dict[str, list[float]] = defaultdict(list)
    for group in sorted(judged, key=lambda group: method_order(group.method)):
        gaps[method_title(group.method)].append(100 * group.shown_gap)
    clear, off = [name for name in gaps if not any(gaps[name])], [name for name in gaps if all(gaps[name])]
    mixed, clauses = [name for name in gaps if name not in (*clear, *off)], []
    sizes, shown = [group.n for group in judged], [gap for name in off for gap in gaps[name]]
    digits = supported_decimals(min(sizes))
    how = "measurably miscalibrated" if judged[1:] else "too sure of some answers and not sure enough of others"
    if {(gap > 0) - (gap < 0) for gap in shown} in ({1}, {-1}):  # nan is neither
        points = names.span(map(abs, shown), digits)
        how = f"{'over' if shown[0] > 0 else 'under'}-confident by {points} point{'s' * (points != '1')}"
    if clear:
        asked = f"{names.span(sizes)} question{'s' * (max(sizes) > 1)}"
        each = " of each task" if len({group.task for group in judged}) > 1 else ""
        clauses = [f"No miscalibration of {_join(clear, len(clear))} shows in {asked}{each}"]
    for found, what in ((mixed, "miscalibrated on some tasks"), (off, how)):
        if found:
            clauses.append(f"{_join(found)} {'is' if len(found) == 1 else 'are'} {what}")
    clauses[0] += of_budget
    if judged[1:]:
        right = {group.metrics["accuracy"].mean for group in judged}
        opening = "All answers are right. " if right == {1.0} else "No answer is right. " if right == {0.0} else ""
        return f"{opening}{'; '.join(clauses)}."
    (one,) = judged
    values = *(one.metrics[name].mean for name in ("mean_confidence", "accuracy", "ece")), one.null.low, one.null.high
    stated, correct, ece, low, high = (f"{100 * value:.{digits}f}" for value in values)
    chance = f"(ECE {ece}; by chance {low} to {high})"
    return f"{clauses[0]}: it states {stated} % and is right {correct} % of the time {chance}."


def _against_dpo(judged: Sequence[GroupNumbers], tasks: int) -> str:
    """Say which methods differ from DPO in ECE and in accuracy; those with forced answers were not compared."""
    clauses = []
    for metric, title, words in (("ece", "ECE", ("lower", "higher")), ("accuracy", "accuracy", ("higher", "lower"))):
        parts = []
        for word, mark in zip(words, ("*", "†"), strict=True):
            counts = Counter(group.method for group in judged if group.versus[metric].mark(metric) == mark)
            shares = {name: "" if count == tasks else f" ({count} of {tasks} tasks)" for name, count in counts.items()}
            titles = [method_title(name) + shares[name] for name in sorted(shares, key=method_order)]
            parts += [f"{word} for {_join(titles, len(titles))}"] if titles else []
        none = f"no significant difference in {title}"
        clauses.append(f"{title} is significantly {' and '.join(parts)}" if parts else none)
    return "; ".join(clauses)


def _join(items: Iterable[str], most: int = 3) -> str:
    """Name the items: `a, b and c`; of more than `most` the first and how many others there are."""
    named = [*items]
    *some, last = named if len(named) <= most else [named[0], f"{len(named) - 1} others"]
    return f"{', '.join(some)} and {last}" if some else last
