"""Figures: the colours, style and files that all of them share, and reliability diagrams in the paper's form."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from catto.files import replacing_bytes
from catto.measure import ParseCounts
from catto.metrics.binning import Reliability
from catto.metrics.statistics import NullBand
from catto.report.numbers import supported_decimals

# Blue and vermilion stay apart under every common colour blindness, and by lightness and hatching in grey print.
BLUE, RED, PALE, INK, GREY = "#5B9BD5", "#C8321E", "#F7D6CF", "#1F2933", "#9AA5B1"
STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
UNDATED: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}, ".png": {}}
FEW = 10  # a bin with fewer answers is drawn pale: a single answer moves its accuracy by more than 10 points
TITLE_WIDTH = 30  # characters of a panel's title before it is broken


def percent(share: float, _: float = 0.0) -> str:
    """A share as the label of a tick.

    >>> percent(0.25)
    '25 %'
    """
    return f"{100 * share:g} %"


def render_figure(draw: Callable[[], Figure], suffix: str) -> bytes:
    """Draw a figure in the common style as a .svg, .png or .pdf file; equal figures give equal bytes."""
    out = io.BytesIO()
    with matplotlib.rc_context({"figure.dpi": 200}, STYLE):
        figure = draw()
        # Once and here: with `layout="constrained"`, savefig draws everything an extra time.
        ConstrainedLayoutEngine(w_pad=0.1).execute(figure)  # keeps the last tick of a panel off the next panel's first
        figure.savefig(out, format=suffix.removeprefix("."), metadata=UNDATED[suffix])
    return out.getvalue()


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure, whole or not at all; the suffix of the path says in which format."""
    suffix = path.suffix.lower()
    if suffix not in UNDATED:
        raise ValueError(f"figure {path} must end in {', '.join(UNDATED)}")
    content = render_figure(draw, suffix)
    with replacing_bytes(path) as file:
        file.write(content)


@dataclass(frozen=True)
class Panel:
    """One diagram: its title, its bins, the ECE of a perfectly calibrated model by chance, how answers were read."""

    title: str
    bins: Reliability
    null: NullBand | None = None
    sources: ParseCounts | None = None

    def note(self) -> str:
        """The lines under the title: the share of forced answers if too high, ECE, its null band, N and the bins."""
        digits, ece = supported_decimals(self.bins.rows), float(self.bins.share @ np.abs(self.bins.gap))
        lines = [f"ECE {100 * ece:.{digits}f}"]
        if self.sources is not None and self.sources.forced:
            lines.insert(0, f"{100 * self.sources.share('fallback'):.0f} % forced")
        if self.null is not None:
            lines.append(f"by chance {100 * self.null.low:.{digits}f} to {100 * self.null.high:.{digits}f}")
        return "\n".join([*lines, f"N = {self.bins.rows:,}, {len(self.bins.count)} bins"])


def reliability_figure(panels: Sequence[Panel]) -> Figure:
    """Draw the panels side by side, each over its histogram, all on the same axes.

    Bars are accuracies; red fills what lies between a bin's accuracy and its mean confidence. Below: how often each
    confidence occurs, with lines at mean confidence and accuracy.

    >>> from catto.metrics.binning import reliability
    >>> drawn = reliability_figure([Panel("DPO", reliability([0.9, 0.6, 0.8], [True, False, True]))])
    >>> [axes.get_ylabel() for axes in drawn.axes]
    ['Accuracy', 'Share of answers']
    """
    drawn = Figure(figsize=(0.5 + 3.1 * len(panels), 5.2))
    axes = drawn.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=(2.5, 1.0))
    for panel, upper, lower in zip(panels, *axes, strict=True):
        bins, full, digits = panel.bins, panel.bins.count > 0, supported_decimals(panel.bins.rows)
        left, width = bins.edges[:-1], np.diff(bins.edges)
        accuracy, confidence, few = bins.accuracy[full], bins.confidence[full], bins.count[full] < FEW
        low, gap = np.minimum(accuracy, confidence), np.abs(accuracy - confidence)
        bar: dict[str, Any] = {"align": "edge", "color": BLUE, "edgecolor": INK, "linewidth": 0.6}
        red: dict[str, Any] = {"align": "edge", "facecolor": PALE, "edgecolor": RED, "linewidth": 0.8, "hatch": "////"}
        upper.bar(left[full], accuracy, width[full], **bar, label="Accuracy")
        upper.bar(left[full], gap, width[full], low, **red, label="Gap")
        upper.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1.0)
        pale = f"pale: under {FEW} answers" if few.any() else None
        # The title is above the note on the left and the legend on the right, and no wider than the panel.
        lines = max(len(panel.note().splitlines()), 3 if pale is None else 4)
        upper.set_title(textwrap.fill(panel.title, TITLE_WIDTH), pad=6 + 10 * lines)
        upper.text(0.0, 1.02, panel.note(), transform=upper.transAxes, fontsize=8.0, va="bottom")
        upper.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), title=pale, title_fontsize=7)
        for patch, faded in zip(upper.patches, np.tile(few, 2), strict=True):  # not those of the legend
            patch.set_alpha(0.4 if faded else None)
        lower.bar(left, bins.share, width, **bar)
        means = (("Confidence", bins.confidence_sum, RED, "-"), ("Accuracy", bins.correct_sum, INK, (0, (3, 2))))
        for name, sums, colour, style in means:
            mean = float(sums.sum()) / bins.rows
            lower.axvline(mean, color=colour, linewidth=1.6, linestyle=style, label=f"{name} {100 * mean:.{digits}f} %")
        lower.set_xlabel("Confidence")
        lower.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    axes[0, 0].set(xlim=(0, 1), xticks=np.linspace(0, 1, 6), ylim=(0, 1), ylabel="Accuracy")
    axes[1, 0].set(ylim=(0, max(panel.bins.share.max() for panel in panels)), ylabel="Share of answers")
    axes[1, 0].yaxis.set_major_locator(MaxNLocator(3))
    for axis in (axes[0, 0].xaxis, axes[0, 0].yaxis, axes[1, 0].yaxis):
        axis.set_major_formatter(percent)
    return drawn
