"""A table as Markdown, LaTeX (booktabs), CSV and for the terminal."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from catto.report.tables import Entry, Line, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

__all__ = ["csv_text", "latex", "markdown", "terminal"]

LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
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
MARKDOWN_SPECIAL = "\\`*_[]<>|~"


def markdown(table: Table) -> str:
    """Render for a page of Markdown: one table, the blocks told apart by a bold line."""
    heads = [" ".join(part for part in (column.top, column.name) if part) for column in table.columns]
    lines = ["| " + " | ".join(["Method", *map(_markdown_text, heads)]) + " |"]
    lines.append("|" + "|".join([" :--- ", *(" ---: " for _ in table.columns)]) + "|")
    for line in table.lines:
        cells = [_markdown_text(line.title), *map(_markdown_entry, line.entries)]
        lines.append("| " + " | ".join(cells) + " |")
    return f"### {_markdown_text(table.title)}\n\n" + "\n".join(lines) + f"\n\n{_markdown_text(table.caption)}\n"


def _markdown_text(text: str) -> str:
    escaped = "".join("\\" + sign if sign in MARKDOWN_SPECIAL else sign for sign in text)
    return " ".join(escaped.split())


def _markdown_entry(entry: Entry) -> str:
    value = f"**{entry.text}**" if entry.best else entry.text
    lines = [*warned(entry), value + entry.mark.replace("*", "\\*"), *details(entry)]
    return "<br>".join(line.replace("[", "\\[").replace("<", "&lt;") for line in lines)


def warned(entry: Entry) -> list[str]:
    """What stands above a value: that its answers were forced."""
    return [entry.forced] if entry.forced else []


def details(entry: Entry) -> list[str]:
    """What stands under a value, and the paper's number."""
    return [*entry.details(), *([f"paper: {entry.paper}"] if entry.paper else [])]


def latex(table: Table) -> str:
    """Render a booktabs table; it needs no other package."""
    caption = _latex_text(f"{table.title}. {table.caption}")
    head = [r"\begin{table*}[t]", r"\centering", r"\small", rf"\caption{{{caption}}}"]
    head += [rf"\label{{tbl:{table.name}}}", rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    tops = [rf"\multicolumn{{{span}}}{{c}}{{\textbf{{{_latex_text(top)}}}}}" for top, span in table.tops()]
    body = [" & " + " & ".join(tops) + r" \\", _rules(table)] if any(top for top, _ in table.tops()) else []
    body.append(" & ".join([r"\textbf{Methods}", *(_latex_text(column.name) for column in table.columns)]) + r" \\")
    for _, lines in table.blocks():
        body += [r"\midrule", *map(_latex_line, lines)]
    return "\n".join([*head, *body, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])


def _rules(table: Table) -> str:
    found, start = [], 2
    for _, span in table.tops():
        found.append(rf"\cmidrule(lr){{{start}-{start + span - 1}}}")
        start += span
    return "".join(found)


def _latex_line(line: Line) -> str:
    title = _latex_text(line.title)
    # After the `\\` of the row before, a bracket would be its length and a star its variant.
    title = f"{{}}{title}" if title.startswith(("[", "*")) else title
    return " & ".join([title, *map(_latex_entry, line.entries)]) + r" \\"


def _latex_text(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(sign, sign) for sign in " ".join(text.split()))


def _latex_entry(entry: Entry) -> str:
    value = rf"\textbf{{{_latex_text(entry.text)}}}" if entry.best else _latex_text(entry.text)
    mark = {"": "", "*": "$^{*}$"}.get(entry.mark, _latex_text(entry.mark))
    above, below = (
        [rf"{{\scriptsize {_latex_text(note)}}}" for note in notes] for notes in (warned(entry), details(entry))
    )
    stacked = r" \\ ".join([*above, value + mark, *below])
    return rf"\shortstack[r]{{{stacked}}}" if above or below else value + mark


CSV_HEAD = (
    *("table", "budget", "block", "method", "task", "column", "metric", "value", "std", "low", "high"),
    *("null_low", "null_high", "difference_to_dpo", "difference_low", "difference_high", "p_value", "p_corrected"),
    *("mark", "paper", "forced", "notes"),
)


def csv_text(table: Table) -> str:
    """Render one row a number, with everything that is known of it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for line in table.lines:
        for column, entry in zip(table.columns, line.entries, strict=True):
            place = [table.name, table.budget or "", line.block, line.method, column.task]
            head = " ".join(part for part in (column.top, column.name) if part)
            writer.writerow([*map(_csv_cell, [*place, head, column.metric, *_csv_entry(entry)])])
    return out.getvalue()


def _csv_cell(text: str) -> str:
    """Keep a spreadsheet from reading a text as a formula: one line, and a quote before it unless it is a number."""
    text = " ".join(text.split())  # the writer quotes no carriage return, and some readers end a row there
    if not text.startswith(("=", "+", "-", "@")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _csv_entry(entry: Entry) -> list[str]:
    low, high = entry.interval or (None, None)
    null_low, null_high = entry.null or (None, None)
    versus = entry.versus
    ends = (versus.difference, versus.low, versus.high) if versus else (None, None, None)
    difference = (None if end is None else entry.scale * end for end in ends)
    p_values = (versus.p_value, versus.p_corrected) if versus else (None, None)
    numbers = [entry.value, entry.std, low, high, null_low, null_high, *difference, *p_values]
    written = ("" if number is None else f"{number:.6g}" for number in numbers)
    return [*written, entry.mark, entry.paper, entry.forced, "; ".join(entry.notes)]


def terminal(table: Table) -> RichTable:
    """Render for the terminal; a value's details stand under it, dimmed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(
        title=Text(table.title), caption=Text(table.caption), title_justify="left", caption_justify="left",
        title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    made.add_column("Method")
    for column in table.columns:
        made.add_column(Text("\n".join(part for part in (column.top, column.name) if part)), justify="right")
    for _, lines in table.blocks():
        for line in lines:
            made.add_row(Text(line.title), *map(_terminal_entry, line.entries))
        made.add_section()
    return made


def _terminal_entry(entry: Entry) -> RichText:
    from rich.text import Text

    text = Text("".join(f"{line}\n" for line in warned(entry)))
    text.append(entry.text + entry.mark, style="bold" if entry.best else "")
    for note in details(entry):
        text.append(f"\n{note}", style="dim")
    return text
