"""What `catto measure` prints: the table, the sentence, or one JSON document."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catto.cli.console import number, print_table, say, span, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from catto.evaluation.statistics import Comparison
    from catto.evaluation.summary import Measured, Summary


@dataclass(frozen=True)
class Result:
    """What was measured: the whole file, its slices by value of the column `by`, and against another file."""

    file: Path
    unparsed: str
    whole: Summary
    by: str | None
    slices: dict[str, Summary]
    compare: Path | None
    comparison: dict[str, Comparison] | None


def document(result: Result) -> dict[str, Any]:
    """Return the result as one JSON object; shares stay in 0 to 1."""
    from catto.evaluation.summary import jsonable, verdict

    whole = result.whole
    found = {"file": str(result.file), "unparsed": result.unparsed, **jsonable(whole), "verdict": verdict(whole)}
    if result.by is not None:
        found["slices"] = {"by": result.by, "values": jsonable(result.slices)}
    if result.comparison is not None:
        found["compare"] = {"file": str(result.compare), "metrics": jsonable(result.comparison)}
    return found


def show(result: Result) -> None:
    """Print the result for people."""
    from catto.evaluation.summary import verdict

    print_table(_sliced_table(result) if result.by is not None else _metric_table(result))
    say(_counts(result.whole))
    sentence = verdict(result.whole)
    if sentence is not None:
        say(sentence)
    if result.comparison is not None:
        print_table(_comparison_table(result, result.comparison))


def _headings(summary: Summary) -> tuple[str, ...]:
    return "metric", "value", f"{100 * summary.settings.level:g} % interval", "by chance, if calibrated"


def _metric_table(result: Result) -> Table:
    made = table(str(result.file), *_headings(result.whole))
    for cells in _rows(result.whole):
        made.add_row(*cells)
    return made


def _sliced_table(result: Result) -> Table:
    made = table(str(result.file), str(result.by), *_headings(result.whole))
    for value, summary in [("all", result.whole), *result.slices.items()]:
        for place, cells in enumerate(_rows(summary)):
            made.add_row(("", f"{value} (N = {summary.rows:,})")[place == 0], *cells)
        made.add_section()
    return made


def _rows(summary: Summary) -> Iterator[tuple[str, str, str, str]]:
    from catto.evaluation.metrics import METRICS

    for name, found in summary.metrics.items():
        metric = METRICS[name]
        yield (metric.title, *_numbers(found, metric.percent))


def _numbers(found: Measured, percent: bool) -> tuple[str, str, str]:
    interval, null = found.interval, found.null
    band = "" if null is None else f"{number(null.mean, percent)} ({span(null.low, null.high, percent)})"
    return number(interval.value, percent), span(interval.low, interval.high, percent), band


def _counts(summary: Summary) -> str:
    settings = summary.settings
    questions = f" to {summary.questions:,} questions" if summary.questions not in (None, summary.rows) else ""
    parts = [f"N = {summary.rows:,} answers{questions}", f"{settings.bins} bins", f"{settings.resamples} resamples"]
    if summary.fallback_rate is not None and summary.accuracy_unparsed_wrong is not None:
        wrong = f"accuracy {100 * summary.accuracy_unparsed_wrong:.1f} with those counted wrong"
        parts.append(f"fallback {100 * summary.fallback_rate:.1f} % ({wrong})")
    return ", ".join(parts) + "."


def _comparison_table(result: Result, comparison: dict[str, Comparison]) -> Table:
    from catto.evaluation.metrics import METRICS

    interval = f"{100 * result.whole.settings.level:g} % interval"
    title = f"{result.file} (this) against {result.compare} (other), same questions"
    made = table(title, "metric", "this", "other", "difference", interval, "p-value")
    for name, found in comparison.items():
        percent = METRICS[name].percent
        values = (number(found.a, percent), number(found.b, percent), number(found.difference, percent, signed=True))
        p_value = "-" if isnan(found.p_value) else f"{found.p_value:.3g}"
        made.add_row(METRICS[name].title, *values, span(found.low, found.high, percent, signed=True), p_value)
    return made
