"""What all figures share (colours, style, output files), and reliability diagrams in the form of the paper."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from catto.answer_columns import ParseCounts
from catto.io.atomic import replace_binary_file
from catto.metrics.binning import Reliability
from catto.metrics.intervals import NullBand
from catto.report.numbers import supported_decimals

# Blue and vermilion differ under every common colour blindness; in grey print, lightness and hatching differ.
BLUE = "#5B9BD5"
RED = "#C8321E"
PALE = "#F7D6CF"
INK = "#1F2933"
GREY = "#9AA5B1"
STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
# Suffix -> metadata without dates, so that equal figures give identical files.
UNDATED: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}, ".png": {}}
FEW_ANSWERS = 10  # bins with fewer are drawn pale: a single answer changes their accuracy by more than 10 points
TITLE_WIDTH = 30  # maximum number of characters in a line of a panel's title
BAR_STYLE: dict[str, Any] = {"align": "edge", "color": BLUE, "edgecolor": INK, "linewidth": 0.6}
GAP_STYLE: dict[str, Any] = {
    "align": "edge",
    "facecolor": PALE,
    "edgecolor": RED,
    "linewidth": 0.8,
    "hatch": "////",
}


def format_percent(share: float, _: float = 0.0) -> str:
    """Format a share as a tick label. matplotlib also passes the position of the tick, which is ignored.

    >>> format_percent(0.25)
    '25 %'
    """
    return f"{100 * share:g} %"


def render_figure(draw: Callable[[], Figure], suffix: str) -> bytes:
    """Draw a figure in the common style; equal figures give identical bytes.

    Args:
        draw: makes the figure; called while the common style is active.
        suffix: the format, ".svg", ".png" or ".pdf".

    Returns:
        The content of the file.
    """
    out = io.BytesIO()
    with matplotlib.rc_context({"figure.dpi": 200}, STYLE):
        figure = draw()
        # The layout is computed once, here: with `layout="constrained"`, savefig would draw everything an extra time.
        # The padding separates the last tick of a panel from the first tick of the next one.
        ConstrainedLayoutEngine(w_pad=0.1).execute(figure)
        figure.savefig(out, format=suffix.removeprefix("."), metadata=UNDATED[suffix])
    return out.getvalue()


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure to a file atomically.

    Args:
        draw: makes the figure; called while the common style is active.
        path: the file; its suffix (.svg, .png or .pdf) sets the format.

    Raises:
        ValueError: The file has a different suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in UNDATED:
        raise ValueError(f"figure {path} must end in {', '.join(UNDATED)}")
    content = render_figure(draw, suffix)
    with replace_binary_file(path) as file:
        file.write(content)


@dataclass(frozen=True)
class Panel:
    """One reliability diagram.

    Attributes:
        title: printed above the diagram.
        bins: the answers, binned by confidence.
        null: the range of ECE that a perfectly calibrated model has by chance; None if unknown.
        sources: how the answers were parsed; None if unknown.
    """

    title: str
    bins: Reliability
    null: NullBand | None = None
    sources: ParseCounts | None = None

    def note(self) -> str:
        """Return the lines under the title: ECE, null band, N and bins, and the share of forced answers if too high."""
        digits = supported_decimals(self.bins.rows)
        ece = float(self.bins.share @ np.abs(self.bins.gap))
        lines = []
        if self.sources is not None and self.sources.has_too_many_forced:
            lines.append(f"{100 * self.sources.share('fallback'):.0f} % forced")
        lines.append(f"ECE {100 * ece:.{digits}f}")
        if self.null is not None:
            low = 100 * self.null.low
            high = 100 * self.null.high
            lines.append(f"by chance {low:.{digits}f} to {high:.{digits}f}")
        lines.append(f"N = {self.bins.rows:,}, {len(self.bins.count)} bins")
        return "\n".join(lines)


def reliability_figure(panels: Sequence[Panel]) -> Figure:
    """Draw reliability diagrams side by side with shared axes, each above a histogram of its confidences.

    In a diagram, bars show the accuracy of each bin, and red areas the gap between its accuracy and its mean
    confidence. In a histogram, lines mark the mean confidence and the accuracy of all answers.

    Args:
        panels: at least one diagram.

    Returns:
        The figure, with one column for each panel: the diagram, and the histogram below it.

    >>> from catto.metrics.binning import reliability
    >>> drawn = reliability_figure([Panel("DPO", reliability([0.9, 0.6, 0.8], [True, False, True]))])
    >>> [axes.get_ylabel() for axes in drawn.axes]
    ['Accuracy', 'Share of answers']
    """
    width = 0.5 + 3.1 * len(panels)
    figure = Figure(figsize=(width, 5.2))
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=(2.5, 1.0))
    for column, panel in enumerate(panels):
        _draw_diagram(axes[0, column], panel)
        _draw_histogram(axes[1, column], panel.bins)
    # All diagrams share their axes, and so do all histograms: what is set for the first one holds for all.
    first_diagram = axes[0, 0]
    first_histogram = axes[1, 0]
    highest_share = max(panel.bins.share.max() for panel in panels)
    first_diagram.set(xlim=(0, 1), xticks=np.linspace(0, 1, 6), ylim=(0, 1), ylabel="Accuracy")
    first_histogram.set(ylim=(0, highest_share), ylabel="Share of answers")
    first_histogram.yaxis.set_major_locator(MaxNLocator(3))
    first_histogram.yaxis.set_major_formatter(format_percent)
    first_diagram.xaxis.set_major_formatter(format_percent)
    first_diagram.yaxis.set_major_formatter(format_percent)
    return figure


def _draw_diagram(axes: Axes, panel: Panel) -> None:
    """Draw the accuracy of each bin, and its gap to the mean confidence of the bin; empty bins are left out.

    Bins with fewer than FEW_ANSWERS answers are pale.
    """
    bins = panel.bins
    has_answers = bins.count > 0
    left = bins.edges[:-1][has_answers]
    width = np.diff(bins.edges)[has_answers]
    accuracy = bins.accuracy[has_answers]
    confidence = bins.confidence[has_answers]
    has_few_answers = bins.count[has_answers] < FEW_ANSWERS
    gap_height = np.abs(accuracy - confidence)
    gap_bottom = np.minimum(accuracy, confidence)
    accuracy_bars = axes.bar(left, accuracy, width, **BAR_STYLE, label="Accuracy")
    gap_bars = axes.bar(left, gap_height, width, gap_bottom, **GAP_STYLE, label="Gap")
    axes.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1.0)  # perfect calibration
    _write_title_and_legend(axes, panel, has_pale_bars=bool(has_few_answers.any()))
    # The legend copies the look of the bars, so the bars turn pale only after it is made.
    for bars in (accuracy_bars, gap_bars):
        for bar, is_pale in zip(bars, has_few_answers, strict=True):
            if is_pale:
                bar.set_alpha(0.4)


def _write_title_and_legend(axes: Axes, panel: Panel, *, has_pale_bars: bool) -> None:
    """Write the title above a diagram and, between the two, the note on the left and the legend on the right."""
    legend_title = None
    legend_lines = 3  # two entries and the space around them
    if has_pale_bars:
        legend_title = f"pale: under {FEW_ANSWERS} answers"
        legend_lines += 1
    note = panel.note()
    lines_below_title = max(len(note.splitlines()), legend_lines)
    points_per_line = 12
    axes.set_title(textwrap.fill(panel.title, TITLE_WIDTH), pad=6 + points_per_line * lines_below_title)
    axes.text(0.0, 1.02, note, transform=axes.transAxes, fontsize=8.5, va="bottom")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), title=legend_title, title_fontsize=8.5)


def _draw_histogram(axes: Axes, bins: Reliability) -> None:
    """Draw how often each confidence occurs, with lines at mean confidence and accuracy."""
    axes.bar(bins.edges[:-1], bins.share, np.diff(bins.edges), **BAR_STYLE)
    digits = supported_decimals(bins.rows)
    confidence = float(bins.confidence_sum.sum()) / bins.rows
    accuracy = float(bins.correct_sum.sum()) / bins.rows
    confidence_label = f"Confidence {100 * confidence:.{digits}f} %"
    accuracy_label = f"Accuracy {100 * accuracy:.{digits}f} %"
    axes.axvline(confidence, color=RED, linewidth=1.6, linestyle="-", label=confidence_label)
    axes.axvline(accuracy, color=INK, linewidth=1.6, linestyle=(0, (3, 2)), label=accuracy_label)
    axes.set_xlabel("Confidence")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
