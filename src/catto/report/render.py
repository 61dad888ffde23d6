"""Tables (columns, lines, entries), and how to render them as Markdown, LaTeX (booktabs), CSV and terminal output."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from catto.errors import shorten_text
from catto.methods import Budget
from catto.metrics.catalogue import Versus
from catto.report.numbers import GroupNumbers

TEMPLATES = Path(__file__).parent / "templates"


def _escape_by_backslash(characters: str) -> dict[str, str]:
    return {character: f"\\{character}" for character in characters}


def _escape_by_entity(characters: str) -> dict[str, str]:
    return {character: f"&#{ord(character)};" for character in characters}


LATEX_COMMANDS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "†": r"$^{\dagger}$",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}
LATEX_SPECIAL = str.maketrans(_escape_by_backslash("&%$#_{}") | LATEX_COMMANDS)
MARKDOWN_SPECIAL = str.maketrans(_escape_by_backslash("\\`*_[]<>|~"))
# For names that come from a server or a file. Characters written as entities cannot open a tag or form a link,
# regardless of the Markdown renderer.
MARKDOWN_FOREIGN = MARKDOWN_SPECIAL | str.maketrans(_escape_by_backslash("()!#$") | _escape_by_entity("&<>:@"))
# The columns that `csv_text` writes. Each is also the key under which it looks up the value.
CSV_COLUMNS = (
    "table",
    "budget",
    "block",
    "method",
    "task",
    "column",
    "metric",
    "value",
    "std",
    "low",
    "high",
    "null_low",
    "null_high",
    "difference_to_dpo",
    "difference_low",
    "difference_high",
    "p_value",
    "p_corrected",
    "mark",
    "paper",
    "forced",
    "notes",
)


@dataclass
class Entry:
    """One number as it is printed, in the unit of its column (per cent, minutes, ...).

    Attributes:
        value: The number; None if the entry has none, or only a text.
        text: The number as text; for an entry without a number, what is printed in its place.
        std: Standard deviation over seeds; None if it is not shown.
        interval: Lower and upper end of the interval; None if it is not shown.
        null: Lower and upper end of the null band; None if it is not shown.
        versus: Difference to the baseline, in the group's unit; None if it is not shown.
        baseline: Title of the method that is the baseline.
        mark: `*` if it is significantly better than the baseline, a dagger if it is significantly worse, else empty.
        paper: The number that the paper prints; empty if it has no comparable one.
        best: Whether it is printed in bold.
        group: The group that the number comes from; None if it comes from several groups or from training.
        scale: Factor that converts the group's unit to the column's.
        notes: Additional lines below the value.
        forced: Warning above the value if the number describes the fallback instead of the model; else empty.
    """

    value: float | None = None
    text: str = "-"
    std: float | None = None
    interval: tuple[float, float] | None = None
    null: tuple[float, float] | None = None
    versus: Versus | None = None
    baseline: str = ""
    mark: str = ""
    paper: str = ""
    best: bool = False
    group: GroupNumbers | None = None
    scale: float = 100.0
    notes: tuple[str, ...] = ()
    forced: str = ""

    def details(self) -> list[str]:
        """Return the lines below the value; each is left out if the entry does not have what it shows.

        They are the interval (or else the deviation), the null band, the notes, the difference to the baseline, and the
        paper's number.
        """
        lines = []
        if self.interval is not None:
            lines.append(f"[{self._format_ends(self.interval, separator=', ')}]")
        elif self.std is not None:
            lines.append(f"± {self.std:.{self._decimals}f}")
        # An entry without a value may show the null band as its text.
        if self.null is not None and self.value is not None:
            lines.append(f"null {self._format_ends(self.null, separator=' to ')}")
        lines += self.notes
        if self.versus is not None:
            lines += self._describe_difference(self.versus)
        if self.paper:
            lines.append(f"paper: {self.paper}")
        return lines

    @property
    def _decimals(self) -> int:
        """Number of decimals in `text`; all other numbers of the entry are printed with as many."""
        _, _, decimals = self.text.partition(".")
        return len(decimals)

    def _format_ends(self, ends: tuple[float, float], *, separator: str) -> str:
        low, high = ends
        return f"{low:.{self._decimals}f}{separator}{high:.{self._decimals}f}"

    def _describe_difference(self, versus: Versus) -> list[str]:
        """Return a line with the difference to the baseline and its p-value, and one with its interval, if any."""
        difference = self._format_signed(versus.difference)
        lines = [f"to {self.baseline} {difference}{_format_p_value(versus.p_corrected)}"]
        if not isnan(versus.low):
            lines.append(f"[{self._format_signed(versus.low)}, {self._format_signed(versus.high)}]")
        return lines

    def _format_signed(self, number: float) -> str:
        return f"{self.scale * number:+z.{self._decimals}f}"


def _format_p_value(p: float) -> str:
    if isnan(p):
        return ""
    if p < 0.001:
        return ", p < 0.001"
    return f", p = {p:.2g}"


@dataclass(frozen=True)
class Column:
    """A column of a table. It shows a number of the group, or the accuracy of a rule that chooses among k samples.

    Attributes:
        name: Heading.
        metric: Name of the group's number.
        in_paper: Whether the paper's table also has this column.
        scale: Factor that converts the group's unit to the column's.
        decimals: Number of decimals.
        rule: The rule that chooses among samples; empty for a number of the group.
        k: The number of samples to choose from.
        top: Second heading above `name`, shared with neighbouring columns.
        task: The task, if the columns of the table differ by task.
        note: Sentence that the caption includes if the table has this column.
        optional: Whether the column is omitted if no group has the number.
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
        """Both headings, `top` first."""
        return f"{self.top} {self.name}".strip()

    def fill(self, k: int = 0, seed: int = 0, **changes: Any) -> Column:
        """Return the column with new values of some fields, and with {k} and {seed} in its texts filled in.

        Args:
            k: The number of samples to choose from; 0 for a column that does not depend on it.
            seed: The seed; ignored unless a text has {seed}.
            changes: Field -> new value. Texts among them are filled in, too.
        """
        changed = replace(self, k=k, **changes)
        return replace(
            changed,
            name=changed.name.format(k=k, seed=seed),
            metric=changed.metric.format(k=k, seed=seed),
            top=changed.top.format(k=k, seed=seed),
        )


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        method: Name of the method.
        title: Heading of the row.
        block: The block that the row belongs to.
        entries: One entry per column.
    """

    method: str
    title: str
    block: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Name of its files, without the suffix.
        title: Title.
        caption: Caption.
        columns: The columns.
        lines: The rows, those of one block next to each other.
        budget: The budget of its numbers.
        kind: The part of the page that shows it.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    budget: Budget | None = None
    kind: str = ""

    def in_papers_shape(self) -> Table:
        """Return the table with only the paper's columns, for a page as narrow as the paper's."""
        kept = [index for index, column in enumerate(self.columns) if column.in_paper]
        columns = tuple(self.columns[index] for index in kept)
        lines = []
        for line in self.lines:
            entries = tuple(line.entries[index] for index in kept)
            lines.append(replace(line, entries=entries))
        return replace(self, columns=columns, lines=tuple(lines))

    def blocks(self) -> list[tuple[str, list[Line]]]:
        """Return the lines by block, in order."""
        blocks: dict[str, list[Line]] = {}
        for line in self.lines:
            blocks.setdefault(line.block, []).append(line)
        return list(blocks.items())

    def tops(self) -> list[tuple[str, int]]:
        """Return each heading of the upper row, with the number of neighbouring columns that share it."""
        headings = []
        for top, columns in groupby(self.columns, key=lambda column: column.top):
            headings.append((top, len(list(columns))))
        return headings


def _escape_line(text: str, special: Mapping[int, str]) -> str:
    """Escape the special characters of a text and put it on one line."""
    return " ".join(text.translate(special).split())


# The Markdown and LaTeX templates. Their delimiters are << >> and <% %> because LaTeX uses braces.
TABLE_TEMPLATES = Environment(
    block_start_string="<%",
    block_end_string="%>",
    variable_start_string="<<",
    variable_end_string=">>",
    comment_start_string="<#",
    comment_end_string="#>",
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TABLE_TEMPLATES.filters["md"] = partial(_escape_line, special=MARKDOWN_SPECIAL)
TABLE_TEMPLATES.filters["tex"] = partial(_escape_line, special=LATEX_SPECIAL)


def render_markdown(table: Table) -> str:
    """Render as Markdown: title, table, caption; the lines of an entry are separated by <br>."""
    return TABLE_TEMPLATES.get_template("table.md.j2").render(table=table)


def escape_markdown(text: str) -> str:
    """Escape untrusted text: return one line of Markdown that shows it verbatim, without tags, links or mentions.

    >>> escape_markdown("<b>[x](javascript:y)")
    '&#60;b&#62;\\\\[x\\\\]\\\\(javascript&#58;y\\\\)'
    """
    return shorten_text(text).translate(MARKDOWN_FOREIGN).replace("www.", "www&#46;")


def render_latex(table: Table) -> str:
    """Render as a LaTeX table, which needs no package except booktabs."""
    return TABLE_TEMPLATES.get_template("table.tex.j2").render(table=table)


def csv_text(table: Table) -> str:
    """Render as CSV: a header, then one row for each entry, with everything that is known about it.

    Numbers have six significant digits. A cell is empty if the entry does not have its number, or if it is undefined.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for line in table.lines:
        for column, entry in zip(table.columns, line.entries, strict=True):
            cells = _csv_cells(table, line, column, entry)
            writer.writerow([cells.get(name, "") for name in CSV_COLUMNS])
    return out.getvalue()


def _csv_cells(table: Table, line: Line, column: Column, entry: Entry) -> dict[str, str]:
    """Return column of CSV_COLUMNS -> text of its cell, for one entry of the table."""
    texts = {
        "table": table.name,
        "budget": table.budget or "",
        "block": line.block,
        "method": line.method,
        "task": column.task,
        "column": column.heading,
        "metric": column.metric,
        "mark": entry.mark,
        "paper": entry.paper,
        "forced": entry.forced,
        "notes": "; ".join(entry.notes),
    }
    cells = {name: _csv_cell(text) for name, text in texts.items()}
    for name, number in _csv_numbers(entry).items():
        cells[name] = "" if isnan(number) else f"{number:.6g}"
    return cells


def _csv_cell(text: str) -> str:
    """Put a text on one line, and a quote before anything that a spreadsheet would evaluate as a formula."""
    # The writer does not quote carriage returns, and some readers end a row at one.
    line = " ".join(text.split())
    if line.startswith(("=", "+", "-", "@")):
        return f"'{line}"
    return line


def _csv_numbers(entry: Entry) -> dict[str, float]:
    """Return column of CSV_COLUMNS -> number in the unit of the table's column, for the numbers that the entry has."""
    numbers = {}
    if entry.value is not None:
        numbers["value"] = entry.value
    if entry.std is not None:
        numbers["std"] = entry.std
    if entry.interval is not None:
        numbers["low"], numbers["high"] = entry.interval
    if entry.null is not None:
        numbers["null_low"], numbers["null_high"] = entry.null
    versus = entry.versus
    if versus is not None:  # in the unit of the group, which `scale` converts
        numbers["difference_to_dpo"] = entry.scale * versus.difference
        numbers["difference_low"] = entry.scale * versus.low
        numbers["difference_high"] = entry.scale * versus.high
        numbers["p_value"] = versus.p_value
        numbers["p_corrected"] = versus.p_corrected
    return numbers


def render_terminal(table: Table) -> RichTable:
    """Render for the terminal with rich: one row per method, and the details of each entry dimmed below its value."""
    rendered = RichTable(
        title=Text(table.title),
        title_justify="left",
        title_style="bold",
        caption=Text(table.caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    # `Text` shows a string as it is; rich would read `[...]` in a plain string as markup.
    rendered.add_column("Method", overflow="fold")
    for column in table.columns:
        # One word per line keeps the column narrow.
        heading = column.heading.rstrip(" ↑↓").replace(" ", "\n")
        # Numbers never wrap, so that in a narrow terminal only the names of methods do.
        rendered.add_column(Text(heading), justify="right", no_wrap=True)
    for _title, lines in table.blocks():  # a line between the blocks takes the place of their titles
        for line in lines:
            cells = [_terminal_cell(entry) for entry in line.entries]
            rendered.add_row(Text(line.title), *cells)
        rendered.add_section()
    return rendered


def _terminal_cell(entry: Entry) -> Text:
    text = Text()
    if entry.forced:
        text.append(f"{entry.forced}\n")
    text.append(entry.text + entry.mark, style="bold" if entry.best else "")
    for detail in entry.details():
        text.append(f"\n{detail}", style="dim")
    return text
