"""Render the report as one self-contained HTML file, with its style, script, figures and data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from catto.metrics.catalogue import METRICS
from catto.report import tables as titles
from catto.report.browser import Browser
from catto.report.drawing import BLUE, GREY, INK, PALE, RED
from catto.report.figures import Picture, choose_looks
from catto.report.headline import write_headline
from catto.report.measuring import COMPARED, PREFERENCE
from catto.report.numbers import CellNumbers, GroupNumbers, Numbers, Results
from catto.report.render import TEMPLATES, Table
from catto.report.tables import method_order, method_title, task_order, task_title

# Figures narrower than this shrink to fit a phone. Wider ones have several panels, would be unreadable, and scroll.
ONE_PANEL_PIXELS = 600
# Colour in the figure files -> CSS variable on the page, which follows the reader's light or dark theme.
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
# The template begins the list of a table's files with this.
FILES_NOTE = '<span class="files">Files: '

DrawnPicture = tuple[Picture, str]  # a picture and its SVG text


def render_page(
    results: Results, numbers: Numbers, tables: Sequence[Table], drawn: Sequence[DrawnPicture], browser: Browser
) -> str:
    """Render the page.

    Args:
        results: the experiment.
        numbers: the numbers measured on it.
        tables: all tables, in order.
        drawn: all figures, each with its SVG text, in order.
        browser: the predictions that the page lists.

    Returns:
        The text of the HTML file.
    """
    script = _read_template("report.js") + _read_template("browser.js")
    methods = sorted({cell.method for cell in numbers.cells}, key=method_order)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `Markup` is not escaped: the style and the script are our own files, and `script_json` escapes the data itself.
    return environment.get_template("report.html.j2").render(
        policy=_write_policy(script),
        style=Markup(_read_template("report.css")),
        script=Markup(script),
        data=Markup(script_json(_collect_data(numbers, browser))),
        results=results,
        numbers=numbers,
        headline=write_headline(numbers),
        first_pictures=_choose_first_pictures(numbers, drawn),
        all_tables=tables,
        drawn=drawn,
        tasks=titles.list_report_tasks(numbers.groups),
        sources=sorted({cell.trained_on for cell in numbers.cells}, key=task_order),
        methods=methods,
        seeds=sorted({cell.seed for cell in numbers.cells}),
        metrics=METRICS,
        browser=browser,
        names=titles,  # functions and constants that give tasks, methods, settings and budgets their titles
        baseline=_title_baseline(numbers),
        inline_svg=inline_svg,
        # The script finds the details of a number by the index of its group in the data.
        group_index={group.input: index for index, group in enumerate(numbers.groups)},
        colours=_choose_colours(methods),
    )


def relocate_page(text: str, folder: str) -> str:
    """Rewrite the paths of the table files that a page lists, for a copy of the page in a different folder.

    Args:
        text: the page.
        folder: the folder of the report, relative to the folder of the copy.

    >>> relocate_page('<span class="files">Files: tables/main.md', "stages/report-1")
    '<span class="files">Files: stages/report-1/tables/main.md'
    """
    return text.replace(f"{FILES_NOTE}tables/", f"{FILES_NOTE}{folder}/tables/")


def _read_template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _write_policy(script: str) -> str:
    """Return a content security policy: the page may run its own script, identified by its hash, and load nothing.

    Inline styles are allowed, because figures and coloured dots have style attributes, which a hash does not cover.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def _choose_colours(methods: Sequence[str]) -> dict[str, str]:
    """Return method -> the colour of its dot; a CSS variable of the theme if the colour has one."""
    colours = {}
    for method, look in choose_looks(methods).items():
        colours[method] = THEMED.get(look.colour, look.colour)
    return colours


def _choose_first_pictures(numbers: Numbers, drawn: Sequence[DrawnPicture]) -> list[DrawnPicture]:
    """Return the reliability diagrams of the first screen: the baseline and the best other method, on the first task.

    Without a verdict, the first other method in the tables takes the place of the best one. Without a baseline, the
    first two methods are shown.
    """
    groups = numbers.first_screen
    group_of_first_task = min(groups, key=lambda group: task_order(group.task))
    if numbers.verdict is None:
        ranked = list(dict.fromkeys(group.method for group in groups))
    else:
        ranked = list(numbers.verdict.losses)
    ranked.sort(key=lambda method: method != numbers.baseline)  # False sorts first; other methods keep their order
    chosen = []
    for method in ranked[:2]:
        tag = f"{group_of_first_task.stem}-{method}"
        for picture, svg in drawn:
            shows_method_alone = picture.section == "one" and picture.tag == tag
            if shows_method_alone and picture.budget in (None, group_of_first_task.budget):
                chosen.append((picture, svg))
    return chosen


# ---- data for the script


def script_json(value: object) -> str:
    """Write JSON that can be put into a script element: it cannot close the element or open a new one.

    >>> script_json({"text": "</script>"})
    '{"text":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _collect_data(numbers: Numbers, browser: Browser) -> dict[str, Any]:
    """Return the data that the page's script reads."""
    tasks = {group.task for group in numbers.groups}
    tasks |= {cell.trained_on for cell in numbers.cells}
    methods = {cell.method for cell in numbers.cells}
    return {
        "groups": [_make_card(group, numbers.cells) for group in numbers.groups],
        "methods": {method: method_title(method) for method in sorted(methods, key=method_order)},
        "tasks": {task: task_title(task) for task in sorted(tasks, key=task_order)},
        "baseline": _title_baseline(numbers),
        "budgets": {str(budget): titles.BUDGET_TITLES[budget] for budget in numbers.budgets if budget},
        "browser": browser.data(),
    }


def _title_baseline(numbers: Numbers) -> str:
    """Return the title of the method that the others are compared with; `the baseline` if nothing is compared."""
    if numbers.baseline is None:
        return "the baseline"
    return method_title(numbers.baseline)


def _make_card(group: GroupNumbers, cells: Sequence[CellNumbers]) -> dict[str, Any]:
    """Return what the card of a number shows about its group."""
    card = group.model_dump(mode="json", exclude={"input", "sources", "papers_budget"})
    card["forced"] = None
    if group.sources.has_too_many_forced:
        card["forced"] = f"{group.sources.summary}: these numbers describe the fallback, not the model."
    card["by_seed"] = [_describe_seed(cell) for cell in cells if group.holds(cell)]
    return _round_floats(card)


def _describe_seed(cell: CellNumbers) -> dict[str, float]:
    """Return the seed and those of its metrics that are defined."""
    described: dict[str, float] = {"seed": cell.seed}
    for name in (*COMPARED, *PREFERENCE):
        if name in cell.metrics and isfinite(cell.metrics[name].value):
            described[name] = cell.metrics[name].value
    return described


def _round_floats(card: dict[str, Any]) -> dict[str, Any]:
    """Round every number to seven decimals, at any depth."""
    text = json.dumps(card)
    return dict(json.loads(text, parse_float=lambda digits: round(float(digits), 7)))


# ---- figures inside the page


def inline_svg(text: str, name: str) -> Markup:
    """Return an SVG for use inside the page, with the colours of the page's theme and with ids that no other SVG has.

    Args:
        text: the content of an SVG file that matplotlib wrote. Its text is safe, because matplotlib escapes it.
        name: name of the figure, from which the prefix of its ids is made; unique on the page.

    Returns:
        The SVG element, without the XML header of the file.

    Raises:
        ValueError: The text is not an SVG that matplotlib wrote.
    """
    opening_tag = re.search(r'<svg[^>]* width="(?P<points>[\d.]+)pt"[^>]* (?P<view_box>viewBox="[^"]+")[^>]*>', text)
    if opening_tag is None:
        raise ValueError(f"not an SVG that matplotlib wrote: {text[:80]}")
    body = _shorten_svg(text[opening_tag.end() :])
    for colour, css_variable in THEMED.items():
        body = re.sub(colour, css_variable, body, flags=re.IGNORECASE)
    body = _prefix_ids(body, prefix=re.sub(r"[^A-Za-z0-9]", "-", name))
    width_in_points = float(opening_tag["points"])
    width_in_pixels = 1.25 * width_in_points  # nine-point text is then as large as the page's small print
    css_class = ""
    if width_in_pixels >= ONE_PANEL_PIXELS:
        css_class = ' class="many"'  # scrolls on a phone and does not shrink
    # The opening tag is replaced. Its `xlink` namespace is kept, because matplotlib refers to shapes by `xlink:href`.
    # Screen readers skip the SVG: the page describes every figure in words.
    xlink = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    style = f'style="width:{width_in_pixels:.0f}px"'
    return Markup(f'<svg{css_class} {xlink} {opening_tag["view_box"]} {style} aria-hidden="true">{body}')


def _shorten_svg(body: str) -> str:
    """Drop metadata, styles and superfluous white space, and round coordinates to a tenth of a point."""
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r' (d|x|y|transform|points)="[^"]*"', _round_coordinates, body)
    body = re.sub(r"\s+", " ", body)
    return re.sub(r">\s+<", "><", body)


def _round_coordinates(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d+", _round_to_tenth, attribute[0])


def _round_to_tenth(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _prefix_ids(body: str, prefix: str) -> str:
    """Add the prefix to every id that something refers to, and drop the other ids."""
    reference = r'(url\(#|xlink:href="#)'
    referenced_ids = {target for _, target in re.findall(reference + r'([^")]+)', body)}

    def rename_id(attribute: re.Match[str]) -> str:
        element_id = attribute[1]
        if element_id in referenced_ids:
            return f' id="{prefix}-{element_id}"'
        return ""

    body = re.sub(r' id="([^"]+)"', rename_id, body)
    return re.sub(reference, rf"\1{prefix}-", body)
