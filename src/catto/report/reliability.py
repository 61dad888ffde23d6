"""Reliability diagrams in the paper's form: accuracy by confidence with the gap marked, over a confidence histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from catto.files import replacing_bytes
from catto.measure import Sources
from catto.metrics.binning import Reliability
from catto.metrics.statistics import NullBand

__all__ = ["Panel", "figure", "save"]

# Blue and vermilion stay apart under every common colour blindness, and by lightness and hatching in grey print.
BLUE, RED, PALE, INK, GREY = "#5B9BD5", "#C8321E", "#F7D6CF", "#1F2933", "#9AA5B1"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    # Text stays text, dollars too, and a fixed salt makes equal figures equal files.
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "catto",
    "pdf.fonttype": 42,
}
BOX: dict[str, Any] = {
    "fontsize": 8.0,
    "frameon": True,
    "framealpha": 0.9,
    "edgecolor": GREY,
    "handlelength": 1.5,
    "borderaxespad": 0.4,
    "alignment": "left",
}
UNDATED: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}


@dataclass(frozen=True)
class Panel:
    """One diagram: its title, its bins, the ECE of a perfectly calibrated model by chance, how answers were read."""

    title: str
    bins: Reliability
    null: NullBand | None = None
    sources: Sources | None = None

    @property
    def ece(self) -> float:
        """`sum_m (n_m / N) |acc_m - conf_m|`."""
        return float(self.bins.weight @ np.abs(self.bins.gap))

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.bins.correct_sum.sum()) / self.bins.rows

    @property
    def confidence(self) -> float:
        """Mean confidence."""
        return float(self.bins.confidence_sum.sum()) / self.bins.rows

    def note(self) -> str:
        """What the box says: ECE, its null band, N and the number of bins; first that too many answers were forced."""
        forced = self.sources is not None and self.sources.forced
        lines = [f"{100 * self.sources.share('fallback'):.0f} % forced"] if self.sources and forced else []
        lines.append(f"ECE {100 * self.ece:.1f}")
        if self.null is not None:
            lines.append(f"by chance {100 * self.null.low:.1f} to {100 * self.null.high:.1f}")
        return "\n".join([*lines, f"N = {self.bins.rows:,}, {len(self.bins.count)} bins"])


def figure(panels: Sequence[Panel]) -> Figure:
    """Draw the panels side by side, each over its histogram, all on the same axes."""
    if not panels:
        raise ValueError("panels is empty")
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(0.5 + 3.1 * len(panels), 4.8), layout="constrained")
        axes = drawn.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=(2.5, 1.0))
        for panel, upper, lower in zip(panels, axes[0], axes[1], strict=True):
            _draw_gap(upper, panel)
            _draw_histogram(lower, panel)
        axes[0, 0].set_ylabel("Accuracy")
        axes[1, 0].set_ylabel("Share of answers")
        # Room above the tallest bar for the legend of the two lines.
        axes[1, 0].set_ylim(0.0, 1.7 * max(float(panel.bins.weight.max()) for panel in panels))
        axes[1, 0].yaxis.set_major_locator(MaxNLocator(3))
        axes[1, 0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    return drawn


def _draw_gap(axes: Axes, panel: Panel) -> None:
    """Draw accuracy bars; red fills what lies between a bin's accuracy and its mean confidence."""
    bins = panel.bins
    full = bins.count > 0
    left, width = bins.edges[:-1][full], np.diff(bins.edges)[full]
    accuracy, confidence = bins.accuracy[full], bins.confidence[full]
    low, gap = np.minimum(accuracy, confidence), np.abs(accuracy - confidence)
    axes.bar(left, accuracy, width, align="edge", color=BLUE, edgecolor=INK, linewidth=0.6, label="Accuracy")
    axes.bar(
        left, gap, width, low, align="edge", facecolor=PALE, edgecolor=RED, linewidth=0.8, hatch="////", label="Gap"
    )
    axes.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=INK, linewidth=1.0)
    axes.set(xlim=(0, 1), ylim=(0, 1.005), title=panel.title)
    box = axes.legend(loc="upper left", title=panel.note(), title_fontsize=8, **BOX)
    box.get_title().set_multialignment("left")
    _tidy(axes)


def _draw_histogram(axes: Axes, panel: Panel) -> None:
    bins = panel.bins
    axes.bar(bins.edges[:-1], bins.weight, np.diff(bins.edges), align="edge", color=BLUE, edgecolor=INK, linewidth=0.6)
    lines = (("Confidence", panel.confidence, RED, "-"), ("Accuracy", panel.accuracy, INK, (0, (3, 2))))
    for name, value, colour, style in lines:
        axes.axvline(value, color=colour, linewidth=1.6, linestyle=style, label=f"{name} {100 * value:.1f} %")
    axes.set(xlim=(0, 1), xlabel="Confidence")
    axes.legend(loc="upper left", **BOX)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(np.linspace(0, 1, 6))


def save(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels into an .svg, .png or .pdf file; the same numbers give the same file, byte for byte."""
    undated = UNDATED.get(path.suffix.lower())
    if undated is None:
        raise ValueError(f"figure {path} must end in {', '.join(UNDATED)}")
    drawn = figure(panels)
    with replacing_bytes(path) as file, matplotlib.rc_context(STYLE):
        drawn.savefig(file, format=path.suffix[1:].lower(), dpi=200, metadata=undated)
