"""What all figures share: colours, style, and their files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from catto.files import replacing_bytes

__all__ = ["percent", "render_figure", "write_figure"]

# Blue and vermilion stay apart under every common colour blindness, and by lightness and hatching in grey print.
BLUE, RED, PALE, INK, GREY = "#5B9BD5", "#C8321E", "#F7D6CF", "#1F2933", "#9AA5B1"
STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
UNDATED: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}, ".png": {}}


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
