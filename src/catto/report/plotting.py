"""What all figures share: colours of methods, axes, and SVG that is the same file for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from catto.methods import SCALED, Budget
from catto.report.reliability import BLUE, GREY, INK, PALE, RED, STYLE
from catto.report.tables import method_title

__all__ = [
    "Picture",
    "canvas",
    "colour",
    "inlined",
    "legend",
    "marker",
    "panel_width",
    "styled",
    "svg",
    "themed",
    "tidy",
]

# Told apart by marker too, for grey print and colour blindness.
COLOURS = {
    "sft": ("#6B7C8C", "o"),
    "sft+ts": ("#56A4D8", "v"),
    "sft+ls": ("#1B6CA8", "s"),
    "dpo": (RED, "D"),
    "dpo+ts": ("#E08E0B", "^"),
    "cft": ("#C37FB0", "<"),
    "rcft": ("#8A4B94", ">"),
    "dpo+bce": ("#A8871C", "P"),
    "dpo+catto": ("#0E9F6E", "*"),
    "dpo+outcome": (INK, "X"),
}
WHITE = "#ffffff"
XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
# On a phone a picture narrower than this (pixels) shrinks to the screen; several panels would be unreadable and scroll.
ONE_PANEL = 600
# On the page these follow the reader's light or dark theme; in the files they stay as drawn.
THEMED = {
    INK: "var(--fg)",
    GREY: "var(--muted)",
    WHITE: "var(--card)",
    PALE: "var(--pale)",
    BLUE: "var(--blue)",
    RED: "var(--red)",
    "#1B6CA8": "var(--deep)",
    "#8A4B94": "var(--plum)",
}


@dataclass(frozen=True)
class Picture:
    """A figure to draw. `name` is its file's stem, `inputs` what determines it; the rest says where it belongs."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    inputs: str
    kind: str
    budget: Budget | None = None
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


def _look(method: str) -> tuple[str, str]:
    """Colour and marker. A rescaled method without its own takes its start's colour, paler, and a thin diamond."""
    if method in COLOURS:
        return COLOURS[method]
    start = method.removesuffix(SCALED)
    if start == method or start not in COLOURS:
        return GREY, "o"
    red, green, blue = (int(COLOURS[start][0][place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(0.55 * part + 0.45 * 255):02X}" for part in (red, green, blue)), "d"


def colour(method: str) -> str:
    """The colour of a method in every figure."""
    return _look(method)[0]


def themed(method: str) -> str:
    """The colour of a method on the page, as CSS."""
    return THEMED.get(colour(method), colour(method))


def marker(method: str) -> str:
    """The marker of a method in every figure."""
    return _look(method)[1]


def canvas(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Start a figure of equal panels, `width` x `height` inches each; call inside `styled`."""
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def panel_width(panels: int) -> float:
    """Inches of one of several panels that together are as wide as the page."""
    return max(2.6, min(5.8, 12.4 / panels))


def styled() -> Any:
    """The drawing style as a context."""
    return matplotlib.rc_context(STYLE)


def tidy(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Open the frame, set a light grid behind the marks, and label."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left")


def legend(figure: Figure, methods: Sequence[str]) -> None:
    """Put the methods' names under the figure."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour(name), marker=marker(name), linestyle="-", markersize=6, label=method_title(name))
        for name in methods
    ]
    width = figure.get_size_inches()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, int(width / 2.1)), frameon=False)


def svg(figure: Figure) -> str:
    """The figure as SVG text without a date, ids salted: equal figures are equal texts."""
    out = io.StringIO()
    with styled():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def inlined(text: str, name: str) -> str:
    """Make an SVG part of a page: ids of its own, colours of the theme, width of its place, a tenth of a point."""
    body = text[text.index("<svg") :]
    head, body = body[: body.index(">") + 1], body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r' (d|x|y|transform|points)="[^"]*"', _rounded, body)
    body = re.sub(r">\s+<", "><", re.sub(r"\s+", " ", body))
    for drawn, variable in THEMED.items():
        body = re.sub(re.escape(drawn), variable, body, flags=re.IGNORECASE)
    return _opened(head) + _own_ids(body, re.sub(r"[^A-Za-z0-9]", "-", name))


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute[0])


def _own_ids(body: str, prefix: str) -> str:
    """Put a prefix before every id that something refers to; drop the others."""
    used = set(re.findall(r'(?:url\(#|xlink:href="#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda one: f' id="{prefix}-{one[1]}"' if one[1] in used else "", body)
    return re.sub(r'(url\(#|xlink:href="#)', rf"\1{prefix}-", body)


def _opened(head: str) -> str:
    box, width = re.search(r'viewBox="[^"]+"', head), re.search(r'width="([\d.]+)pt"', head)
    if box is None or width is None:
        raise ValueError(f"not an SVG that matplotlib wrote: {head[:80]}")
    # Nine-point text of a figure is read at the size of the page's small print.
    pixels = 1.25 * float(width[1])
    kind = "" if pixels < ONE_PANEL else ' class="many"'
    return f'<svg{kind} {XLINK} {box[0]} style="width:{pixels:.0f}px" aria-hidden="true">'
