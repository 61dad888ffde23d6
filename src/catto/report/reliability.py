"""Reliability diagrams in the paper's form."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from catto.measure import Sources
from catto.metrics.binning import Reliability
from catto.metrics.statistics import NullBand
from catto.report.drawing import BLUE, INK, PALE, RED, percent
from catto.report.numbers import supported_decimals

__all__ = ["Panel", "reliability_figure"]

FEW = 10  # a bin with fewer answers is drawn pale: a single answer moves its accuracy by more than 10 points
# Characters of a panel's title before it is broken.
TITLE_WIDTH = 30


@dataclass(frozen=True)
class Panel:
    """One diagram: its title, its bins, the ECE of a perfectly calibrated model by chance, how answers were read."""

    title: str
    bins: Reliability
    null: NullBand | None = None
    sources: Sources | None = None

    def note(self) -> str:
        """The lines under the title: the share of forced answers if too high, ECE, its null band, N and the bins."""
        digits, ece = supported_decimals(self.bins.rows), float(self.bins.weight @ np.abs(self.bins.gap))
        lines = [f"ECE {100 * ece:.{digits}f}"]
        if self.sources is not None and self.sources.forced:
            lines.insert(0, f"{100 * self.sources.share('fallback'):.0f} % forced")
        if self.null is not None:
            lines.append(f"by chance {100 * self.null.low:.{digits}f} to {100 * self.null.high:.{digits}f}")
        return "\n".join([*lines, f"N = {self.bins.rows:,}, {len(self.bins.count)} bins"])


def reliability_figure(panels: Sequence[Panel]) -> Figure:
    """Draw the panels side by side, each over its histogram, all on the same axes.

    >>> from catto.metrics.binning import reliability
    >>> drawn = reliability_figure([Panel("DPO", reliability([0.9, 0.6, 0.8], [True, False, True]))])
    >>> [axes.get_ylabel() for axes in drawn.axes]
    ['Accuracy', 'Share of answers']
    """
    drawn = Figure(figsize=(0.5 + 3.1 * len(panels), 5.2))
    axes = drawn.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=(2.5, 1.0))
    for panel, upper, lower in zip(panels, *axes, strict=True):
        draw_gap(upper, panel)
        draw_shares(lower, panel)
    axes[0, 0].set(xlim=(0, 1), xticks=np.linspace(0, 1, 6), ylim=(0, 1), ylabel="Accuracy")
    axes[1, 0].set(ylim=(0, max(panel.bins.weight.max() for panel in panels)), ylabel="Share of answers")
    axes[1, 0].yaxis.set_major_locator(MaxNLocator(3))
    for axis in (axes[0, 0].xaxis, axes[0, 0].yaxis, axes[1, 0].yaxis):
        axis.set_major_formatter(percent)
    return drawn


def draw_gap(axes: Axes, panel: Panel) -> None:
    """Draw accuracy bars; red fills what lies between a bin's accuracy and its mean confidence."""
    bins, full = panel.bins, panel.bins.count > 0
    left, width = bins.edges[:-1][full], np.diff(bins.edges)[full]
    accuracy, confidence = bins.accuracy[full], bins.confidence[full]
    low, gap = np.minimum(accuracy, confidence), np.abs(accuracy - confidence)
    bar: dict[str, Any] = {"width": width, "align": "edge"}
    axes.bar(left, accuracy, **bar, color=BLUE, edgecolor=INK, linewidth=0.6, label="Accuracy")
    axes.bar(left, gap, bottom=low, **bar, facecolor=PALE, edgecolor=RED, linewidth=0.8, hatch="////", label="Gap")
    axes.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1.0)
    few = bins.count[full] < FEW
    pale = f"pale: under {FEW} answers" if few.any() else None
    # The title is above the note on the left and the legend on the right, and no wider than the panel.
    lines = max(len(panel.note().splitlines()), 3 if pale is None else 4)
    axes.set_title(textwrap.fill(panel.title, TITLE_WIDTH), pad=6 + 10 * lines)
    axes.text(0.0, 1.02, panel.note(), transform=axes.transAxes, fontsize=8.0, va="bottom")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), title=pale, title_fontsize=7)
    for patch, faded in zip(axes.patches, np.tile(few, 2), strict=True):
        patch.set_alpha(0.4 if faded else None)


def draw_shares(axes: Axes, panel: Panel) -> None:
    """Draw how often each confidence occurs, with lines at mean confidence and accuracy."""
    bins, digits = panel.bins, supported_decimals(panel.bins.rows)
    axes.bar(bins.edges[:-1], bins.weight, np.diff(bins.edges), align="edge", color=BLUE, edgecolor=INK, linewidth=0.6)
    lines = (("Confidence", bins.confidence_sum, RED, "-"), ("Accuracy", bins.correct_sum, INK, (0, (3, 2))))
    for name, sums, colour, style in lines:
        value = float(sums.sum()) / bins.rows
        axes.axvline(value, color=colour, linewidth=1.6, linestyle=style, label=f"{name} {100 * value:.{digits}f} %")
    axes.set_xlabel("Confidence")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
