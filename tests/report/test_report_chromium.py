"""The page in a real browser: no complaint, no request, fluid with ten thousand predictions, hostile text as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Page, chromium
from report_world import HOSTILE, TINY, World, built, measured

from catto.report.page import render_page
from catto.report.tables import build_tables
from needs import needs

pytestmark = needs("browser")

LARGE = World(rows=835, seeds=(0, 1), methods=("sft", "dpo"), out_of=None, k=0, resamples=10)
# Milliseconds of the processor from the change of a filter to the repainted list.
FLUID = 200
# The search waits so many milliseconds for the next key before it starts; nothing else waits.
NEXT_KEY = 120


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = measured(LARGE)
    path = tmp_path_factory.mktemp("large") / "report.html"
    text = render_page(world.results, world.numbers, build_tables(world.numbers, world.results), [], world.browser)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def page(tab: Page, large: Path) -> Page:
    tab.requests.clear()
    tab.complaints.clear()
    tab.resize(1280, 900)
    tab.open(large)
    return tab


# Changes a filter, awaits the repainted list, and returns every delay that the page asked for meanwhile.
FILTER = """(async () => {{
  const form = document.getElementById("browser-filters"), field = form.elements[{name}];
  const before = document.querySelector("#runway .row"), later = window.setTimeout, delays = [];
  window.setTimeout = (call, delay, ...rest) => {{ delays.push(delay || 0); return later(call, delay, ...rest); }};
  field.value = {value};
  const start = performance.now();
  field.dispatchEvent(new Event("input", {{ bubbles: true }}));
  while (document.querySelector("#runway .row") === before && performance.now() - start < 60000)
    await new Promise(done => later(done, 0));
  await new Promise(requestAnimationFrame);
  window.setTimeout = later;
  return delays;
}})()"""


def filtered(page: Page, name: str, value: str) -> list[float]:
    return [float(delay) for delay in page.run(FILTER.format(name=repr(name), value=repr(value)))]


def shown(page: Page) -> int:
    return int(page.run("document.getElementById('count').textContent.split(' ')[0].replaceAll(',', '')"))


def test_nothing_is_complained_about_and_nothing_leaves_the_page(page: Page, large: Path) -> None:
    page.run("new Promise(done => setTimeout(done, 300))")
    assert page.complaints == []
    assert [one for one in page.requests if not one.startswith("data:")] == [large.resolve().as_uri()]


def test_ten_thousand_predictions_stay_fluid(page: Page) -> None:
    assert shown(page) == 12 * 835 == 10_020
    assert page.run("document.querySelectorAll('#runway .row').length") < 40
    for name, value in (("verdict", "wrong"), ("method", "dpo"), ("low", "80"), ("order", "low"), ("text", "river")):
        before, start = shown(page), page.milliseconds()
        delays = filtered(page, name, value)
        assert page.milliseconds() - start < FLUID, name
        assert max(delays) == (NEXT_KEY if name == "text" else 0), name
        if name != "order":
            assert 0 < shown(page) < before, name


def test_scrolling_through_ten_thousand_rows_keeps_up(page: Page) -> None:
    frames = "new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))"
    for step in range(60):
        start = page.milliseconds()
        page.run(f"document.getElementById('list').scrollTop = {step * 10000}, {frames}")
        assert page.milliseconds() - start < FLUID, step
    page.run("void (list.scrollTop = 1e9)")
    page.wait("Math.max(...[...document.querySelectorAll('#runway .row')].map(row => +row.dataset.place)) === 10019")


def test_the_first_rows_are_wrong_and_ever_less_confident(page: Page) -> None:
    rows = page.run("[...document.querySelectorAll('#runway .row b')].map(one => [one.className, +one.textContent])")
    assert {kind for kind, _ in rows} == {"wrong"}
    assert [value for _, value in rows] == sorted((value for _, value in rows), reverse=True)
    filtered(page, "order", "right")
    assert page.run("document.querySelector('#runway .row b').className") == "right"


def test_a_filter_counts_what_the_numbers_say(page: Page) -> None:
    numbers = measured(LARGE).numbers
    wanted = sum(round(cell.n * (1 - cell.metrics["accuracy"].value)) for cell in numbers.cells if cell.seed == 1)
    filtered(page, "seed", "1")
    filtered(page, "verdict", "wrong")
    assert shown(page) == wanted
    filtered(page, "verdict", "fallback")
    assert shown(page) == round(sum(cell.n * cell.others["fallback_rate"] for cell in numbers.cells if cell.seed == 1))


def test_script_tags_in_questions_and_responses_show_as_text(page: Page) -> None:
    page.run("window.alert = () => { document.title = 'broken out'; }")
    filtered(page, "text", "alert(1)")
    assert shown(page) > 0
    detail = page.run("document.getElementById('detail').textContent")
    assert HOSTILE in detail
    assert page.run("document.querySelectorAll('#detail script, #detail b b, #list script').length") == 0
    assert page.run("document.scripts.length") == 2
    assert page.run("document.title") != "broken out"


def test_the_list_is_walked_with_the_keyboard(page: Page) -> None:
    page.run("document.getElementById('list').focus()")
    first = page.run("document.getElementById('detail').textContent")
    page.press("ArrowDown")
    assert page.run("document.getElementById('list').getAttribute('aria-activedescendant')") == "row-1"
    assert page.run("document.getElementById('detail').textContent") != first
    page.press("End")
    assert page.run("document.getElementById('list').getAttribute('aria-activedescendant')") == "row-10019"
    assert page.run("document.getElementById('row-10019') !== null")
    page.press("Home")
    assert page.run("document.getElementById('detail').textContent") == first
    page.press("Enter")
    assert page.run("document.activeElement.id") == "detail"


def test_filters_hide_methods_tasks_and_budgets(page: Page) -> None:
    visible = "[...document.querySelectorAll('{}')].filter(one => one.checkVisibility()).length"
    click = "document.querySelector('.filters input[value=\"{}\"]').click()"
    rows = visible.format("#in tr[data-method=sft]")
    assert page.run(rows) == 2
    page.run(click.format("sft"))
    assert page.run(rows) == 0
    assert page.run(visible.format("#in tr[data-method=dpo]")) == 2
    page.run(click.format("matched"))
    assert page.run(visible.format("#in .block")) == 1
    page.run(click.format("snli"))
    assert page.run(visible.format("#in [data-task=snli]")) == 0
    assert page.run(visible.format("#in td[data-task=witnesses]")) == 4  # accuracy, ECE, Brier score, AUROC
    page.run("document.getElementById('all').click()")
    assert page.run(rows) == 2


def test_a_filter_of_one_value_is_hidden(tab: Page, page: Page, tmp_path: Path) -> None:
    seen = "[...document.querySelectorAll('#browser-filters label')].filter(one => one.checkVisibility())"
    labels = f"{seen}.map(one => one.firstChild.data)"
    always = ["Answer", "Order", "Confidence from", "to", "Search"]
    assert page.run(labels) == ["Task", "Method", "Budget", "Seed", *always]
    assert page.run("document.querySelector('.filters').checkVisibility()") is True
    world = measured(replace(TINY, methods=("sft",)))
    path = tmp_path / "report.html"
    text = render_page(world.results, world.numbers, build_tables(world.numbers, world.results), [], world.browser)
    path.write_text(text, encoding="utf-8")
    tab.open(path)
    assert tab.complaints == []
    assert tab.run(labels) == always
    assert tab.run("document.querySelector('.filters').checkVisibility()") is False


# The widest option of a menu beside the room that the menu has for it, without its padding and its arrow.
MENU = """(menu => {
  const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(menu);
  pen.font = style.font;
  const widest = Math.max(...[...menu.options].map(one => pen.measureText(one.text).width));
  return [widest, menu.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16];
})(document.querySelector('#browser-filters [name=order]'))"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_menus_of_the_predictions_are_as_wide_as_their_options(page: Page, width: int) -> None:
    page.resize(width, 900, mobile=width < 500)
    widest, room = page.run(MENU)
    assert widest <= room
    tops = "['low', 'high'].map(name => document.querySelector(`[name=${name}]`).getBoundingClientRect().top)"
    low, high = page.run(tops)
    assert low == high


def test_a_printed_page_keeps_its_colours_and_its_figures_whole(tab: Page) -> None:
    tab.resize(1280, 900)
    tab.open(built(TINY) / "out" / "report.html")
    style = "[...new Set([...document.querySelectorAll('{}')].map(one => getComputedStyle(one).{}))]"
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert tab.run(style.format("main .dot, main .key", "printColorAdjust")) == ["exact"]
        assert tab.run(style.format("main figure", "breakInside")) == ["avoid"]
        assert tab.run(style.format("h2, h3, h2 + p, summary", "breakAfter")) == ["avoid"]
        tops = "[...document.querySelectorAll('#in .figures figure')].map(one => one.offsetLeft)"
        assert len(set(tab.run(tops))) == 1
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


def test_a_figure_of_a_name_with_blanks_follows_its_filter(page: Page) -> None:
    page.run("""(() => {
      const figure = document.createElement("figure"), box = document.createElement("input");
      Object.assign(figure.dataset, { budget: "", tasks: '["two words"]', methods: "[]" });
      Object.assign(box, { type: "checkbox", checked: true, value: "two words" });
      figure.id = "blanks";
      document.querySelector("main").append(figure);
      document.querySelector(".filters [data-kind=task]").append(box);
    })()""")
    hidden = "document.getElementById('blanks').hidden"
    page.run("document.querySelector('.filters input[value=\"snli\"]').click()")
    assert page.run(hidden) is False
    page.run("document.querySelector('.filters input[value=\"two words\"]').click()")
    assert page.run(hidden) is True


def test_the_policy_stops_scripts_and_requests_that_are_not_the_pages_own(page: Page) -> None:
    stopped = page.run("""new Promise(done => {
      const stopped = [];
      document.addEventListener("securitypolicyviolation", event => {
        stopped.push(event.effectiveDirective);
        if (stopped.length === 2) done(stopped.sort().join(" "));
      });
      setTimeout(() => done("nothing was stopped"), 5000);
      const script = document.createElement("script"), image = document.createElement("img");
      script.textContent = "window.injected = true";
      image.src = "http://localhost:9/x.png";
      document.body.append(script, image);
    })""")
    assert stopped == "img-src script-src-elem"
    assert page.run("window.injected === undefined") is True


def test_the_button_of_the_card_closes_it(page: Page) -> None:
    page.run("document.querySelector('#in button.num').click()")
    assert page.run("document.getElementById('card').open") is True
    page.run("document.querySelector('#card .close').click()")
    assert page.run("document.getElementById('card').open") is False


def test_every_number_opens_its_definition_and_escape_closes_it(page: Page) -> None:
    page.run("document.querySelector('#in button.num[data-metric=ece]').click()")
    text = page.run("document.getElementById('card').textContent")
    assert page.run("document.getElementById('card').open")
    assert "Mean distance between accuracy and confidence" in text
    assert "Null band" in text
    page.press("Escape")
    page.wait("!document.getElementById('card').open")


def test_the_card_of_every_number_shows_that_number(tab: Page) -> None:
    tab.complaints.clear()
    tab.open(built(TINY) / "out" / "report.html")
    wrong = tab.run("""[...document.querySelectorAll("button.num")].filter(button => {
      button.click();
      const card = document.getElementById("card"), shown = card.querySelector(".big").textContent;
      const named = card.querySelector("h3").textContent;
      card.close();
      return shown !== button.textContent || named.includes("undefined");
    }).map(button => button.dataset.metric)""")
    assert wrong == []
    assert tab.run("document.querySelectorAll('button.num').length") > 50
    assert tab.complaints == []


def test_dark_and_light_follow_the_system_and_the_button(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    light = page.run(ground)
    page.prefer("dark")
    dark = page.run(ground)
    assert light != dark
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == light
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == dark
    page.run("localStorage.clear()")


def test_a_phone_scrolls_down_only(page: Page) -> None:
    page.resize(375, 800, mobile=True)
    page.run("new Promise(requestAnimationFrame)")
    assert page.run("document.documentElement.scrollWidth") == 375


def test_a_page_with_figures_is_as_quiet(tab: Page) -> None:
    path = built(TINY) / "out" / "report.html"
    tab.requests.clear()
    tab.complaints.clear()
    tab.resize(1280, 900)
    tab.open(path)
    assert tab.complaints == []
    assert [one for one in tab.requests if not one.startswith("data:")] == [path.resolve().as_uri()]
    assert tab.run("document.querySelectorAll('figure svg').length") > 10
    widths = tab.run("[...document.querySelectorAll('main > section > figure svg')].map(one => one.clientWidth)")
    assert min(widths) > 100


def test_the_first_screen_holds_answer_table_and_picture(tab: Page) -> None:
    tab.resize(1280, 900)
    tab.open(built(TINY) / "out" / "report.html")
    bottom = (
        "Math.max(...[...document.querySelectorAll('h1, .first .scroll, .first > figure')]"
        ".map(one => one.getBoundingClientRect().bottom))"
    )
    assert tab.run("document.querySelectorAll('.findings > .scroll, .first > figure').length") == 2
    assert tab.run(bottom) < 900
    tab.resize(390, 844, mobile=True)
    tab.run("new Promise(requestAnimationFrame)")
    assert tab.run("document.querySelector('.summary').getBoundingClientRect().bottom") < 844
    assert tab.run("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.first .scroll'))")


# The lowest contrast of any visible text with the ground behind it (WCAG 2: 4.5 for text of this size).
CONTRAST = """(() => {
  const rgba = colour => {  // rgb(246 247 248), or color(srgb 0.96 0.97 0.97 / 0.88) of a mix
    const [r, g, b, a = 1] = (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const unit = colour.startsWith("color") ? 255 : 1;
    return [r * unit, g * unit, b * unit, a];
  };
  const over = (top, under) => top.slice(0, 3).map((part, i) => part * top[3] + under[i] * (1 - top[3]));
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = colour => colour.reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = one => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const worded = one => [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const seen = [...document.querySelectorAll("body *:not(script):not(option)")]
    .filter(one => one.checkVisibility() && worded(one));
  return seen.map(one => {
    const style = getComputedStyle(one), back = ground(one);
    const ink = rgba(one instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(over(ink, back)), light(back)].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), one.textContent.trim().slice(0, 40)];
  }).sort((x, y) => x[0] - y[0])[0];
})()"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read_in_both_themes(tab: Page, theme: str) -> None:
    tab.resize(1280, 900)
    tab.prefer(theme)
    tab.open(built(TINY) / "out" / "report.html")
    tab.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    ratio, text = tab.run(CONTRAST)
    assert ratio >= 4.5, text


def test_the_keyboard_reaches_the_results_and_shows_where_it_is(page: Page) -> None:
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left") >= 0
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.run("document.activeElement.click()")
    page.press("Tab")
    assert page.run("document.activeElement.closest('main') !== null")
