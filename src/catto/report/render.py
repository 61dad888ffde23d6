"""A table (columns, lines, entries) and its forms: Markdown, LaTeX (booktabs), CSV, and for the terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from catto.methods import Budget
from catto.metrics.catalogue import Versus
from catto.problems import shortened
from catto.report.numbers import GroupNumbers

TEMPLATES = Path(__file__).parent / "templates"
LATEX_SPECIAL = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "†": r"$^{\dagger}$", "±": r"$\pm$"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)
MARKDOWN_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|~"})
# For names that a server or a file chose. As entities, signs open no tag and make no link, whatever renders the page.
MARKDOWN_FOREIGN = MARKDOWN_SPECIAL | str.maketrans(
    {sign: f"\\{sign}" for sign in "()!#$"} | {sign: f"&#{ord(sign)};" for sign in "&<>:@"}
)
CSV_HEAD = (
    *("table", "budget", "block", "method", "task", "column", "metric", "value", "std", "low", "high"),
    *("null_low", "null_high", "difference_to_dpo", "difference_low", "difference_high", "p_value", "p_corrected"),
    *("mark", "paper", "forced", "notes"),
)


@dataclass
class Entry:
    """One number as it is printed, in the unit of its column (per cent, minutes, ...); without a value: none.

    group: where the number is from. scale: factor from the group's unit to the column's. notes: further lines below
    the value. forced: a warning above the value, where the number describes the fallback and not the model.
    """

    value: float | None = None
    text: str = "-"
    std: float | None = None
    interval: tuple[float, float] | None = None
    null: tuple[float, float] | None = None
    versus: Versus | None = None
    mark: str = ""
    paper: str = ""
    best: bool = False
    group: GroupNumbers | None = None
    scale: float = 100.0
    notes: tuple[str, ...] = ()
    forced: str = ""

    def details(self) -> list[str]:
        """Return the lines below the value: interval or deviation, null band, notes, difference to DPO, the paper's."""
        decimals = len(self.text.partition(".")[2])
        lines = []
        if self.interval is not None:
            lines.append(f"[{', '.join(f'{end:.{decimals}f}' for end in self.interval)}]")
        elif self.std is not None:
            lines.append(f"± {self.std:.{decimals}f}")
        if self.null is not None and self.value is not None:
            lines.append(f"null {' to '.join(f'{end:.{decimals}f}' for end in self.null)}")
        lines += self.notes
        if (versus := self.versus) is not None:
            p = versus.p_corrected
            judged = "" if isnan(p) else ", p < 0.001" if p < 0.001 else f", p = {p:.2g}"
            lines.append(f"to DPO {self.scale * versus.difference:+z.{decimals}f}{judged}")
            if not isnan(versus.low):
                ends = (self.scale * versus.low, self.scale * versus.high)
                lines.append(f"[{', '.join(f'{end:+z.{decimals}f}' for end in ends)}]")
        return [*lines, f"paper: {self.paper}"] if self.paper else lines


@dataclass(frozen=True)
class Column:
    """A column: its heading, the number it shows, and the heading `top` that it shares with its neighbours.

    in_paper: whether the paper's table has this column too. The number is the group's one named `metric`, in its unit
    times `scale`; or the accuracy of a rule that picks one of k samples. note: its sentence in the caption of the first
    table. optional: the column is left out where no group has the number.
    """

    name: str
    metric: str
    in_paper: bool = True
    scale: float = 100.0
    decimals: int = 2
    rule: str = ""
    k: int = 0
    top: str = ""
    task: str = ""
    note: str = ""
    optional: bool = False

    @property
    def heading(self) -> str:
        """Both headings."""
        return f"{self.top} {self.name}".strip()

    def fill(self, k: int = 0, seed: int = 0, **changes: Any) -> Column:
        """Return the column with k or the seed put into its texts, and with other changes."""
        changed = replace(self, k=k, **changes)
        texts = {key: getattr(changed, key).format(k=k, seed=seed) for key in ("name", "metric", "top")}
        return replace(changed, **texts)


@dataclass(frozen=True)
class Line:
    """A row: its method, its heading, the block that it belongs to, and one entry for each column."""

    method: str
    title: str
    block: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """A table. name: the stem of its files; kind: the part of the page that shows it."""

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    budget: Budget | None = None
    kind: str = ""

    def in_papers_shape(self) -> Table:
        """Return the table with the paper's columns only, for a page as narrow as the paper's."""
        kept = [place for place, column in enumerate(self.columns) if column.in_paper]
        lines = (replace(line, entries=tuple(line.entries[place] for place in kept)) for line in self.lines)
        return replace(self, columns=tuple(self.columns[place] for place in kept), lines=tuple(lines))

    def blocks(self) -> list[tuple[str, list[Line]]]:
        """Return the lines by block, in order."""
        blocks: dict[str, list[Line]] = {}
        for line in self.lines:
            blocks.setdefault(line.block, []).append(line)
        return list(blocks.items())

    def tops(self) -> list[tuple[str, int]]:
        """Return the shared headings and the number of columns that each of them spans."""
        return [(top, len(list(columns))) for top, columns in groupby(self.columns, key=lambda column: column.top)]


# The templates of Markdown and LaTeX. Their signs are << >> and <% %>: LaTeX has braces of its own.
FORMS = Environment(
    *("<%", "%>", "<<", ">>", "<#", "#>"),
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
for name, special in (("md", MARKDOWN_SPECIAL), ("tex", LATEX_SPECIAL)):
    FORMS.filters[name] = lambda text, special=special: " ".join(text.translate(special).split())


def markdown(table: Table) -> str:
    """Render for a page of Markdown: title, table, caption; the lines of an entry are separated by <br>."""
    return FORMS.get_template("table.md.j2").render(table=table)


def escape_markdown(text: str) -> str:
    """Return a text of unknown origin as one line of Markdown that shows it as it is: no tag, no link, no mention.

    >>> escape_markdown("<b>[x](javascript:y)")
    '&#60;b&#62;\\\\[x\\\\]\\\\(javascript&#58;y\\\\)'
    """
    return shortened(text).translate(MARKDOWN_FOREIGN).replace("www.", "www&#46;")


def latex(table: Table) -> str:
    """Render a booktabs table; it needs no other package."""
    return FORMS.get_template("table.tex.j2").render(table=table)


def csv_text(table: Table) -> str:
    """Render one row for each number, with everything that is known of it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for line in table.lines:
        for column, entry in zip(table.columns, line.entries, strict=True):
            numbers = [entry.value, entry.std, *(entry.interval or (None, None)), *(entry.null or (None, None))]
            if (versus := entry.versus) is None:
                numbers += [None] * 5
            else:
                numbers += [entry.scale * end for end in (versus.difference, versus.low, versus.high)]
                numbers += [versus.p_value, versus.p_corrected]
            texts = [table.name, table.budget or "", line.block, line.method, column.task, column.heading]
            texts += [column.metric, entry.mark, entry.paper, entry.forced, "; ".join(entry.notes)]
            # One line: the writer quotes no carriage return, and some readers end a row there. A quote before what a
            # spreadsheet would read as a formula.
            texts = [" ".join(text.split()) for text in texts]
            texts = [f"'{text}" if text.startswith(("=", "+", "-", "@")) else text for text in texts]
            printed = ["" if number is None or isnan(number) else f"{number:.6g}" for number in numbers]
            writer.writerow([*texts[:7], *printed, *texts[7:]])
    return out.getvalue()


def terminal(table: Table) -> RichTable:
    """Render for the terminal; the lines below a value are dimmed."""
    shown = RichTable(
        title=Text(table.title), caption=Text(table.caption), title_justify="left", caption_justify="left",
        title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    shown.add_column("Method", overflow="fold")
    for column in table.columns:  # as narrow as their numbers: method names are what is broken into lines
        shown.add_column(Text(column.heading.rstrip(" ↑↓").replace(" ", "\n")), justify="right", no_wrap=True)
    for _, lines in table.blocks():
        for line in lines:
            cells = []
            for entry in line.entries:
                text = Text(f"{entry.forced}\n" if entry.forced else "")
                text.append(entry.text + entry.mark, style="bold" if entry.best else "")
                text.append("".join(f"\n{detail}" for detail in entry.details()), style="dim")
                cells.append(text)
            shown.add_row(Text(line.title), *cells)
        shown.add_section()
    return shown
