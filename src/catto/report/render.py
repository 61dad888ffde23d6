"""A table (columns, lines, entries) and its forms: Markdown, LaTeX (booktabs), CSV, and for the terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from itertools import groupby
from math import isnan
from typing import TYPE_CHECKING, Literal

from catto.methods import Budget
from catto.report.numbers import Versus

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["EMPTY", "Better", "Column", "Entry", "Line", "Table", "csv_text", "latex", "markdown", "terminal"]

Better = Literal["higher", "lower"] | None

LATEX_SPECIAL = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "†": r"$^{\dagger}$",
        "±": r"$\pm$",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
    }
)
MARKDOWN_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|~"})
CSV_HEAD = (
    *("table", "budget", "block", "method", "task", "column", "metric", "value", "std", "low", "high"),
    *("null_low", "null_high", "difference_to_dpo", "difference_low", "difference_high", "p_value", "p_corrected"),
    *("mark", "paper", "forced", "notes"),
)


@dataclass(frozen=True)
class Entry:
    """One number as it is printed, in the unit of its column (per cent, minutes, ...).

    group: index in `Numbers.groups`. scale: factor from the group's unit to the column's. notes: further lines below
    the value. forced: a warning above the value, where the number describes the fallback and not the model.
    """

    value: float | None
    text: str
    std: float | None = None
    interval: tuple[float, float] | None = None
    null: tuple[float, float] | None = None
    versus: Versus | None = None
    mark: str = ""
    paper: str = ""
    best: bool = False
    group: int | None = None
    scale: float = 100.0
    notes: tuple[str, ...] = ()
    forced: str = ""

    def details(self) -> list[str]:
        """Return the lines below the value: interval or deviation, null band, notes, the difference to DPO."""
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
            lines.append(f"to DPO {self.scale * versus.difference:+.{decimals}f}{judged}")
            if not isnan(versus.low):
                ends = (self.scale * versus.low, self.scale * versus.high)
                lines.append(f"[{', '.join(f'{end:+.{decimals}f}' for end in ends)}]")
        return lines

    def stacked(self) -> tuple[list[str], str, list[str]]:
        """Return the lines above the value, the value, and the lines below it with the paper's number."""
        paper = [f"paper: {self.paper}"] if self.paper else []
        return [self.forced] if self.forced else [], self.text, [*self.details(), *paper]


EMPTY = Entry(None, "-")


@dataclass(frozen=True)
class Column:
    """A column: its heading, the number it shows, and the heading `top` that it shares with its neighbours.

    in_paper: whether the paper's table has this column too. The number is the group's one named `metric`, in its unit
    times `scale`; or the accuracy of a rule that picks one of k samples.
    """

    name: str
    metric: str
    better: Better = None
    in_paper: bool = True
    scale: float = 100.0
    decimals: int = 2
    rule: str = ""
    k: int = 0
    top: str = ""
    task: str = ""

    def heading(self, between: str = " ") -> str:
        """Return both headings."""
        return between.join(part for part in (self.top, self.name) if part)


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


def _escaped(text: str, special: dict[int, str]) -> str:
    return " ".join(text.translate(special).split())


def markdown(table: Table) -> str:
    """Render for a page of Markdown: title, table, caption; the lines of an entry are separated by <br>."""

    def cell(entry: Entry) -> str:
        above, value, below = entry.stacked()
        value = (f"**{value}**" if entry.best else value) + entry.mark.replace("*", "\\*")
        return "<br>".join(part.replace("[", "\\[").replace("<", "&lt;") for part in (*above, value, *below))

    rows = [["Method", *(_escaped(column.heading(), MARKDOWN_SPECIAL) for column in table.columns)]]
    rows += [[_escaped(line.title, MARKDOWN_SPECIAL), *map(cell, line.entries)] for line in table.lines]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| :--- |" + " ---: |" * len(table.columns))
    title, caption = (_escaped(text, MARKDOWN_SPECIAL) for text in (table.title, table.caption))
    return f"### {title}\n\n" + "\n".join(lines) + f"\n\n{caption}\n"


def latex(table: Table) -> str:
    """Render a booktabs table; it needs no other package."""

    def cell(entry: Entry) -> str:
        above, value, below = entry.stacked()
        value = _escaped(value, LATEX_SPECIAL)
        value = rf"\textbf{{{value}}}" if entry.best else value
        value += "$^{*}$" if entry.mark == "*" else _escaped(entry.mark, LATEX_SPECIAL)
        above, below = (
            [rf"{{\scriptsize {_escaped(note, LATEX_SPECIAL)}}}" for note in notes] for notes in (above, below)
        )
        stack = r" \\ ".join([*above, value, *below])
        return rf"\shortstack[r]{{{stack}}}" if above or below else value

    caption, tops = _escaped(f"{table.title}. {table.caption}", LATEX_SPECIAL), table.tops()
    lines = [r"\begin{table*}[t]", r"\centering", r"\small", rf"\caption{{{caption}}}", rf"\label{{tbl:{table.name}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    if any(top for top, _ in tops):
        heads = [rf"\multicolumn{{{span}}}{{c}}{{\textbf{{{_escaped(top, LATEX_SPECIAL)}}}}}" for top, span in tops]
        lines.append(" & " + " & ".join(heads) + r" \\")
        ends = [1 + sum(span for _, span in tops[: place + 1]) for place in range(len(tops))]
        rules = (rf"\cmidrule(lr){{{end - span + 1}-{end}}}" for end, (_, span) in zip(ends, tops, strict=True))
        lines.append("".join(rules))
    heads = [r"\textbf{Methods}", *(_escaped(column.name, LATEX_SPECIAL) for column in table.columns)]
    lines.append(" & ".join(heads) + r" \\")
    for _, block in table.blocks():
        lines.append(r"\midrule")
        for line in block:
            title = _escaped(line.title, LATEX_SPECIAL)
            # After the `\\` of the row before, a bracket would be its length and a star its variant.
            title = f"{{}}{title}" if title.startswith(("[", "*")) else title
            lines.append(" & ".join([title, *map(cell, line.entries)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])


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
            texts = [table.name, table.budget or "", line.block, line.method, column.task, column.heading()]
            texts += [column.metric, *("" if one is None or isnan(one) else f"{one:.6g}" for one in numbers)]
            texts += [entry.mark, entry.paper, entry.forced, "; ".join(entry.notes)]
            writer.writerow(map(_no_formula, texts))
    return out.getvalue()


def _no_formula(text: str) -> str:
    """Keep a spreadsheet from reading a text as a formula: one line, and a quote before it unless it is a number."""
    text = " ".join(text.split())  # the writer quotes no carriage return, and some readers end a row there
    if not text.startswith(("=", "+", "-", "@")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def terminal(table: Table) -> RichTable:
    """Render for the terminal; the lines below a value are dimmed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        title=Text(table.title), caption=Text(table.caption), title_justify="left", caption_justify="left",
        title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    shown.add_column("Method", overflow="fold")
    for column in table.columns:  # as narrow as their numbers: method names are what is broken into lines
        shown.add_column(Text(column.heading().rstrip(" ↑↓").replace(" ", "\n")), justify="right", no_wrap=True)
    for _, lines in table.blocks():
        for line in lines:
            cells = []
            for entry in line.entries:
                above, value, below = entry.stacked()
                text = Text("".join(f"{warning}\n" for warning in above))
                text.append(value + entry.mark, style="bold" if entry.best else "")
                text.append("".join(f"\n{detail}" for detail in below), style="dim")
                cells.append(text)
            shown.add_row(Text(line.title), *cells)
        shown.add_section()
    return shown
