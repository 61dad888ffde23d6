"""The page and its files: escaped, self-contained, the same byte for byte, cut to the most telling rows."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_world import HOSTILE, SMALL, TINY, built, measured, write_world

from catto.answer_columns import ParseCounts
from catto.io.record_files import read_records
from catto.methods import METHODS, SCALINGS
from catto.metrics.statistics import SeedSummary
from catto.records import Prediction
from catto.report.browser import CUT, FALLBACK, MAX_RESPONSE_CHARACTERS, PLAIN, RIGHT, Browser
from catto.report.build import build_report
from catto.report.drawing import render_figure
from catto.report.figures import KINDS, HistogramContent, Picture, choose_looks, split_by_task
from catto.report.numbers import Cell
from catto.report.page import inline_svg, render_page, script_json
from catto.report.render import TEMPLATES
from catto.report.tables import build_tables

pytestmark = pytest.mark.slow


class Reader(HTMLParser):
    """Reads a page as a browser would: scripts end at the first `</script`."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.inside = tag
        if tag == "script":
            self.scripts.append("")
        if "id" in found:
            self.ids.append(found["id"])
        self.addresses += [found[name] for name in ("href", "src", "xlink:href", "action") if found.get(name)]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


@pytest.fixture(name="built")
def built_once() -> Path:
    return built(TINY)


@pytest.fixture(scope="module")
def plain() -> str:
    world = measured(SMALL)
    tables = build_tables(world.numbers, world.results)
    return render_page(world.results, world.numbers, tables, [], world.browser)


def test_build_writes_page_tables_figures_and_numbers(built: Path) -> None:
    out = built / "out"
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"report.html", "numbers.json", "tables/in-distribution-paper.md"} <= names
    assert {"tables/in-distribution-matched.tex", "tables/training.csv"} <= names
    assert {"figures/reliability-snli-paper.svg", "figures/reliability-snli-dpo-matched.svg"} <= names
    assert {
        "figures/risk-snli-paper.svg",
        "figures/history-snli-paper.svg",
        "figures/histogram-snli-paper.svg",
    } <= names
    assert {"figures/scatter-in-distribution-paper.svg", "figures/confidence-at-k-snli-paper.svg"} <= names
    assert not [name for name in names if name.endswith(".part")]


def test_seeds_are_compared_where_there_are_several(built: Path, plain: str) -> None:
    assert 'id="seeds"' in plain
    assert "#seeds" not in (built / "out" / "report.html").read_text()


def test_a_fold_with_nothing_in_it_is_left_out(plain: str) -> None:
    world = measured(replace(TINY, methods=("sft",)))
    alone = render_page(world.results, world.numbers, build_tables(world.numbers, world.results), [], world.browser)
    assert "Learning rates" in plain
    assert "Learning rates" not in alone
    assert "All metrics as tables" in alone


def test_a_page_of_one_method_says_nothing_of_others(plain: str) -> None:
    world = measured(replace(TINY, methods=("sft",), tasks=("witnesses",)))
    results = world.results.model_copy(update={"recipe_hash": ""})
    text = render_page(results, world.numbers, build_tables(world.numbers, results), [], world.browser)
    (answer,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert text.count(answer) == 1
    bodies = (one.partition("<body>")[2].partition('<section id="definitions">')[0] for one in (text, plain))
    read, others = ("".join(Reader(body).text) for body in bodies)
    for words in ("DPO", "budget", "paper"):
        assert words not in read, words
        assert words in others, words
    assert "<ul" not in text.partition("<script")[0]
    assert re.search(r"it would score \d+(\.\d)? on average", text)
    assert re.search(r"the 30 questions of these runs, it would score \d+(\.\d)? to \d+", plain)
    assert re.search(r'<aside class="filters"[^>]* hidden>', text)
    assert not re.search(r'<aside class="filters"[^>]* hidden>', plain)
    assert re.findall(r"<dt>Recipe</dt><dd>(.*?)</dd>", text) == ["synthetic"]
    assert re.findall(r"<dt>Recipe</dt><dd>(.*?)</dd>", plain) == ["synthetic (0123456789abcdef)"]
    assert "<p>synthetic. This file" in text


def test_figures_hold_plain_words_and_no_date(built: Path) -> None:
    for path in (built / "out" / "figures").glob("*.svg"):
        text = path.read_text()
        assert "$" not in text, path.name
        assert "dc:date" not in text, path.name


def test_the_same_results_give_the_same_files_byte_for_byte(built: Path, tmp_path: Path) -> None:
    results = write_world(tmp_path, TINY)
    build_report(results, tmp_path, tmp_path / "out")
    for path in sorted((built / "out").rglob("*")):
        if path.is_file():
            other = tmp_path / "out" / path.relative_to(built / "out")
            assert path.read_bytes() == other.read_bytes(), path.name


def test_a_second_build_draws_nothing_again_and_gives_the_same_page(built: Path) -> None:
    results = write_world(built, TINY)
    svg = built / "out" / "figures" / "risk-snli-paper.svg"
    before, page_before = svg.stat().st_mtime_ns, (built / "out" / "report.html").read_bytes()
    build_report(results, built, built / "out")
    assert svg.stat().st_mtime_ns == before
    assert (built / "out" / "report.html").read_bytes() == page_before


def test_the_first_screen_is_an_answer_a_table_and_a_picture_and_what_was_run_is_at_the_foot(built: Path) -> None:
    text = (built / "out" / "report.html").read_text()
    marks = (
        "<h1>",
        "<caption>SNLI, N = 20, matched budget</caption>",
        'id="first-reliability-snli-dpo-matched',
        "<h2>",
    )
    places = [text.index(mark) for mark in (*marks, 'id="definitions"', "52296b8c0ffee", "catto 0.1.0", "<footer>")]
    assert places == sorted(places)
    assert text.count("52296b8c0ffee") == text.count("synthetic/model</dd>") == 1


def test_headings_step_down_by_one_and_every_table_has_a_caption_and_scopes(plain: str) -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)[ >]", plain.partition("<script")[0])]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tables = re.findall(r"<table.*?</table>", plain.partition("<script")[0], re.DOTALL)
    assert len(tables) > 10
    for table in tables:
        assert re.search(r"<caption[^>]*>[^<]+</caption>", table)
        assert set(re.findall(r"<th\b( scope=)?", table)) == {" scope="}


def test_ids_are_unique_and_every_reference_is_inside_the_page(built: Path) -> None:
    found = Reader((built / "out" / "report.html").read_text())
    assert len(found.ids) == len(set(found.ids))
    assert {address for address in found.addresses if not address.startswith("#")} == {"data:,"}
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= set(found.ids)
    text = (built / "out" / "report.html").read_text()
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(found.ids)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/1999/xlink"}


def test_hostile_text_is_data_and_never_markup(plain: str) -> None:
    found = Reader(plain)
    assert len(found.scripts) == 2
    assert "<script>alert(1)" not in plain
    data = json.loads(found.scripts[0])
    premises = [part[1] for question in data["browser"]["questions"] for part in question["parts"]]
    assert HOSTILE in premises
    assert any(HOSTILE in response for response in data["browser"]["columns"][5])


def test_the_page_may_run_its_own_script_and_load_nothing(plain: str) -> None:
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', plain)
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    script = plain.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert plain.index("Content-Security-Policy") < plain.index("<style>")


def test_every_kind_of_figure_has_a_title_and_a_caption() -> None:
    texts = (TEMPLATES / "report.html.j2").read_text(encoding="utf-8").partition("{% set definitions")[0]
    assert set(re.findall(r"^  '([\w-]+)': \(", texts, re.MULTILINE)) == {*KINDS, "reliability"}


def test_every_method_has_its_own_look() -> None:
    names = [*METHODS, *(name + suffix for name in METHODS for suffix in SCALINGS)]
    names += [f"mine-{number}" for number in range(30)]
    assert len({colour for colour, _ in choose_looks(names).values()}) == len(names)  # dots in tables have no marker


def test_methods_of_your_own_differ_by_marker_as_well() -> None:
    assert len({marker for _, marker in choose_looks([f"mine-{number}" for number in range(10)]).values()}) == 10


def test_forced_answers_are_named_and_set_no_axes() -> None:
    group = measured(TINY).numbers.groups[0]
    metrics = group.metrics | {"ece": SeedSummary(0.97, None, 1), "accuracy": SeedSummary(0.01, None, 1)}
    wild = {"sources": ParseCounts(fallback=20), "others": group.others | {"fallback_rate": SeedSummary(1.0, None, 1)}}
    forced = group.model_copy(update=wild | {"metrics": metrics})
    for kind in ("ece", "scatter"):
        limits = []
        for other in (group, forced):
            rows = {"sft": [group], "mine": [other]}
            (axes,) = Picture(kind, "", "tag", "Subject", [("A", rows)]).draw(choose_looks(["sft", "mine"])).axes
            limits.append((axes.get_xlim(), axes.get_ylim()))
        assert limits[0] == limits[1], kind
        assert [text.get_text() for text in axes.texts] == (["100 % forced"] if kind == "ece" else [])


def test_a_long_legend_leaves_the_panels_their_height() -> None:
    group, heights = measured(TINY).numbers.groups[0], []
    for count in (3, 30):
        names = [f"mine-{number}" for number in range(count)]
        rows = {name: [group] for name in names}
        figure = Picture("scatter", "", "tag", "Subject", [("A", rows)]).draw(choose_looks(names))
        figure.set_layout_engine("constrained")
        figure.draw_without_rendering()
        heights.append(figure.axes[0].get_position().height * figure.get_figheight())
    assert heights[1] > 0.8 * heights[0]


def test_panels_share_one_legend_and_axes_in_per_cent_end_at_100() -> None:
    group = next(group for group in measured(SMALL).numbers.groups if group.selection)
    right = {k: {rule: SeedSummary(1.0, None, 2) for rule in rules} for k, rules in group.selection.items()}
    sure = group.model_copy(update={"selection": right})
    figure = Picture("confidence-at-k", "", "tag", "Subject", [("A", group), ("B", sure)]).draw({})
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) == len(next(iter(right.values()))) + 1
    assert {axes.get_ylim()[1] for axes in figure.axes} == {100.0}


def test_a_histogram_ends_at_100_per_cent() -> None:
    answers = replace(measured(TINY).cells[0], confidence=np.full(20, 0.97), correct=np.full(20, True))
    (axes,) = Picture("histogram", "", "tag", "Subject", [("A", HistogramContent(answers, 20))]).draw({}).axes
    assert (*axes.get_xlim(), *axes.get_ylim()) == (0, 1, 0, 1)


def test_two_tasks_with_one_title_have_a_panel_each() -> None:
    group = measured(TINY).numbers.groups[0]
    lower, upper = (group.model_copy(update={"method": "dpo", "task": task}) for task in ("snli", "SNLI"))
    first, second = split_by_task([lower, upper])
    assert [first.title, second.title] == ["SNLI", "SNLI"]
    assert (first.content, second.content) == ({"dpo": [lower]}, {"dpo": [upper]})


def test_figures_list_their_tasks_and_methods_whatever_signs_are_in_them() -> None:
    world = measured(SMALL)
    names = ("two words", HOSTILE, "a'b\"c")
    picture = Picture("risk", "", "tag", "Subject", [("", {})], None, names, names)
    svg = render_figure(partial(picture.draw, {}), ".svg").decode()
    text = render_page(world.results, world.numbers, [], [(picture, svg)], world.browser)
    (tag,) = re.findall(r"<figure [^>]*>", text)
    listed = [json.loads(html.unescape(value)) for value in re.findall(r"data-(?:tasks|methods)='([^']*)'", tag)]
    assert listed == [list(names)] * 2
    assert "<script>alert(1)" not in text


@pytest.mark.parametrize("field", ["task", "trained_on", "method"])
@pytest.mark.parametrize("name", ["x/../../escaped", "..", "", "a\\b", "a b", "x" * 65, "=cmd", "a\n"])
def test_a_name_that_would_leave_the_folder_is_refused(field: str, name: str) -> None:
    cell = {"task": "t", "trained_on": "t", "method": "m+n", "budget": None, "seed": 0, "predictions": "p"}
    Cell.model_validate(cell)
    with pytest.raises(ValueError, match=f"{field} name .*expected letters, digits and"):
        Cell.model_validate(cell | {field: name})


def test_hostile_names_in_the_results_are_escaped() -> None:
    world = measured(SMALL)
    results = world.results.model_copy(
        update={
            "name": HOSTILE,
            "commit": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "recipe": {"model": {"path": HOSTILE}},
        }
    )
    text = render_page(results, world.numbers, [], [], world.browser)
    assert "<script>alert" not in text
    found = Reader(text)
    assert len(found.scripts) == 2
    assert HOSTILE in "".join(found.text)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_survives_the_script_element(text: str) -> None:
    written = script_json({"t": text, "u": "</script><!--<script>" + text})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written)["t"] == text


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError):
        script_json([float("nan")])


def test_every_table_entry_of_the_page_points_at_its_group(plain: str) -> None:
    groups = json.loads(Reader(plain).scripts[0])["groups"]
    section = plain[plain.index('<section id="in">') : plain.index('<section id="world">')]
    buttons = re.findall(r'data-group="(\d+)" data-metric="(\w+)">([\d.]+)<', section)
    assert len(buttons) == 5 * 4 * 2 * 3  # methods, metrics, budgets, task and training set
    for place, metric, text in buttons:
        scale = 1 if metric == "brier" else 100
        assert scale * groups[int(place)]["metrics"][metric]["mean"] == pytest.approx(float(text), abs=0.00501)


def test_forced_answers_are_named_above_all_numbers_and_above_their_own() -> None:
    world = measured(SMALL)
    forced, share = {"sources": ParseCounts(free=9, fallback=51)}, {"fallback_rate": SeedSummary(0.85, 0.0, 2)}
    groups = [
        g.model_copy(update=forced | {"others": g.others | share}) if g.method == "rcft" else g
        for g in world.numbers.groups
    ]
    numbers = world.numbers.model_copy(update={"groups": tuple(groups)})
    text = render_page(world.results, numbers, build_tables(numbers, world.results), [], world.browser)
    warning = "RCFT on SNLI, paper&#39;s budget: 51 of 60 answers had to be forced: its numbers describe the fallback"
    assert text.index("<h1>") < text.index(warning) < text.index("<table")
    assert '<tr data-method="rcft" class="unread">' in text[: text.index('<section id="in">')]
    row = text[text.index('<tr data-method="rcft">') :]
    assert row.index("85 % forced") < row.index('class="num"')
    cards = json.loads(Reader(text).scripts[0])["groups"]
    assert {bool(card["forced"]) for card in cards if card["method"] == "rcft"} == {True}
    assert {bool(card["forced"]) for card in cards if card["method"] != "rcft"} == {False}


def browser_rows(quota: int) -> tuple[Browser, list[Prediction]]:
    world = measured(SMALL)
    cell = world.results.cells[0]
    predictions = list(read_records(world.folder / cell.predictions, Prediction))
    browser = Browser(world.browser.questions, quota)
    browser.add(cell, predictions)
    return browser, predictions


def test_too_many_rows_are_cut_to_those_furthest_from_what_happened() -> None:
    browser, predictions = browser_rows(7)
    surprise = sorted((abs(one.confidence - (one.label == one.gold)) for one in predictions), reverse=True)
    kept = [abs(row.confidence - bool(row.flags & RIGHT)) for row in browser.rows]
    assert kept == pytest.approx(surprise[:7], abs=1e-5)
    assert browser.total == len(predictions) == 30


def test_forced_answers_are_shown_as_they_count() -> None:
    world = measured(SMALL)
    cell = world.results.cells[0]
    row = next(read_records(world.folder / cell.predictions, Prediction))
    forced = row.model_copy(update={"label": row.gold, "source": "fallback"})
    for unparsed, right in (("fallback", RIGHT), ("wrong", 0)):
        browser = Browser(world.browser.questions, unparsed=unparsed)  # type: ignore[arg-type]
        browser.add(cell, [forced])
        assert browser.rows[0].flags & (RIGHT | FALLBACK) == right | FALLBACK


def test_cells_share_the_rows_of_the_page_once_there_are_too_many() -> None:
    """30 rows a cell, at most 70 in all: two cells are whole; with the third and fourth each keeps 70 // 4 = 17."""
    world = measured(SMALL)
    cell, browser = world.results.cells[0], Browser(world.browser.questions, 70, expected_cells=4)
    predictions = list(read_records(world.folder / cell.predictions, Prediction))
    kept = []
    for number in range(4):
        browser.add(world.results.cells[number], predictions)
        kept.append(Counter(row.cell for row in browser.rows))
    assert kept == [{0: 30}, {0: 30, 1: 30}, dict.fromkeys(range(3), 17), dict.fromkeys(range(4), 17)]
    assert browser.total == 120
    data = browser.data()
    assert len(data["questions"]) == len(set(data["columns"][1])) == 17


def test_the_page_says_that_it_holds_a_part_only() -> None:
    browser, _ = browser_rows(7)
    world = measured(SMALL)
    text = " ".join(render_page(world.results, world.numbers, [], [], browser).split())
    assert "The page has 7 of 30 predictions" in text


def test_flags_tell_right_fallback_and_cut() -> None:
    world = measured(SMALL)
    cell = world.results.cells[0]
    one = next(iter(read_records(world.folder / cell.predictions, Prediction)))
    long = one.model_copy(update={"label": one.gold, "source": "fallback", "text": "x" * (MAX_RESPONSE_CHARACTERS + 1)})
    browser = Browser({}, 5)
    browser.add(cell, [long])
    browser.add(cell, [one.model_copy(update={"label": one.gold, "source": "plain"})])
    assert browser.rows[1].flags == RIGHT | PLAIN
    row = browser.rows[0]
    assert row.flags == RIGHT | FALLBACK | CUT
    assert row.response == "x" * MAX_RESPONSE_CHARACTERS
    assert browser.data()["questions"] == [{"id": one.question, "gold": one.gold}]


def test_an_inlined_figure_follows_the_theme_and_keeps_its_references() -> None:
    drawn = (
        '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="72pt" viewBox="0 0 72 36">\n<defs>'
        '<style type="text/css">*{x: y}</style><clipPath id="c1"><path id="free" d="M 0.123456 9.96"/></clipPath>'
        '</defs>\n<g clip-path="url(#c1)" style="fill: #1f2933; opacity: 0.35"/></svg>'
    )
    found = inline_svg(drawn, "a/b")
    assert 'id="a-b-c1"' in found
    assert "url(#a-b-c1)" in found
    assert "free" not in found
    assert 'd="M 0.1 10"' in found
    assert "fill: var(--fg); opacity: 0.35" in found
    assert "<style" not in found
    assert found.count("<svg") == 1
