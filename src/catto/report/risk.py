"""The risk-coverage figure: how often answers are wrong when only the most confident are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from catto.evaluation.risk import RiskCoverage, Threshold
from catto.report.reliability import BLUE, GREY, INK, RED, STYLE

# Solid, dashed, dotted and dash-dotted lines tell curves apart in grey print.
LINES: tuple[tuple[str, Any], ...] = ((BLUE, "-"), (RED, "--"), (INK, ":"), (GREY, "-."))


def draw_risk_coverage(curves: Mapping[str, RiskCoverage], threshold: Threshold | None = None) -> Figure:
    """Draw one curve a name, and where given the threshold's place and the risk that it keeps."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, curve) in enumerate(curves.items()):
            colour, line = LINES[place % len(LINES)]
            axes.step(curve.coverage, curve.risk, where="pre", color=colour, linestyle=line, label=name)
        if threshold is not None:
            _mark(axes, threshold)
        _label(axes)
    return figure


def _mark(axes: Axes, found: Threshold) -> None:
    axes.axhline(found.risk, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), label=f"risk {100 * found.risk:g} %")
    if found.threshold is not None:
        label = f"confidence >= {found.threshold:.4g}"
        axes.plot(found.coverage, found.errors / found.answered, "o", color=INK, markersize=5, label=label)


def _label(axes: Axes) -> None:
    axes.set_xlabel("Coverage (share answered)")
    axes.set_ylabel("Risk (share of those wrong)")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(fontsize=8.0, edgecolor=GREY)
