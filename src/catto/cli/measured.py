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

    from catto.evaluation.statistics import Interval
    from catto.evaluation.summary import Judged, Measured, Summary


@dataclass(frozen=True)
class Result:
    """What was measured: the whole file, its slices by value of the column `by`, and against another file."""

    file: Path
    unparsed: str
    whole: Summary
    by: str | None
    slices: dict[str, Summary]
    compare: Path | None
    comparison: dict[str, Judged] | None


def document(result: Result) -> dict[str, Any]:
    """Return the result as one JSON object; shares stay in 0 to 1.

    `warning` comes first and is null where there is none; where it is not, `verdict` is null.
    """
    from catto.evaluation.summary import jsonable, verdict

    whole = result.whole
    found = {"warning": whole.warning, "file": str(result.file), "unparsed": result.unparsed, **jsonable(whole)}
    found["verdict"] = verdict(whole)
    if result.by is not None:
        slices = {value: {"warning": part.warning, **jsonable(part)} for value, part in result.slices.items()}
        found["slices"] = {"by": result.by, "values": slices}
    if result.comparison is not None:
        metrics = {
            name: {**jsonable(one.comparison), **jsonable({"p_corrected": one.p_corrected}), "mark": one.mark}
            for name, one in result.comparison.items()
        }
        found["compare"] = {"file": str(result.compare), "metrics": metrics}
    return found


def show(result: Result) -> None:
    """Print the result for people."""
    from catto.evaluation.summary import unheld, verdict

    for warning in _warnings(result):
        say(warning)
    print_table(_sliced_table(result) if result.by is not None else _metric_table(result))
    say(_counts(result.whole))
    for sentence in [verdict(result.whole), *unheld(result.whole)]:
        if sentence is not None:
            say(sentence)
    if result.comparison is not None:
        print_table(_comparison_table(result, result.comparison))
        say(_mark_legend(result, result.comparison))


def _warnings(result: Result) -> list[str]:
    """Which parts consist of forced answers; slices only where the whole file does not."""
    if result.whole.warning is not None:
        return [result.whole.warning]
    found = [(value, part.warning) for value, part in result.slices.items()]
    return [f"{result.by} {value}: {warning}" for value, warning in found if warning is not None]


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
    yield ("Confidence - accuracy", *_signed(summary.gap), "")


def _signed(interval: Interval) -> tuple[str, str]:
    return number(interval.value, True, signed=True), span(interval.low, interval.high, True, signed=True)


def _numbers(found: Measured, percent: bool) -> tuple[str, str, str]:
    interval, null = found.interval, found.null
    band = "" if null is None else f"{number(null.mean, percent)} ({span(null.low, null.high, percent)})"
    return number(interval.value, percent), span(interval.low, interval.high, percent), band


def _counts(summary: Summary) -> str:
    settings = summary.settings
    questions = f" to {summary.questions:,} questions" if summary.questions not in (None, summary.rows) else ""
    parts = [f"N = {summary.rows:,} answers{questions}", f"{settings.bins} bins", f"{settings.resamples} resamples"]
    if summary.sources is not None and summary.accuracy_unparsed_wrong is not None:
        wrong = f"accuracy {100 * summary.accuracy_unparsed_wrong:.1f} with those counted wrong"
        parts.append(summary.sources.told(wrong))
    return ", ".join(parts) + "."


def _comparison_table(result: Result, comparison: dict[str, Judged]) -> Table:
    from catto.evaluation.metrics import METRICS

    interval = f"{100 * result.whole.settings.level:g} % interval"
    title = f"{result.file} (this) against {result.compare} (other), same questions"
    made = table(title, "metric", "this", "other", "difference", interval, "p-value", "corrected", "mark")
    for name, one in comparison.items():
        percent, found = METRICS[name].percent, one.comparison
        values = (number(found.a, percent), number(found.b, percent), number(found.difference, percent, signed=True))
        p_values = ("-" if isnan(p) else f"{p:.3g}" for p in (found.p_value, one.p_corrected))
        interval = span(found.low, found.high, percent, signed=True)
        made.add_row(METRICS[name].title, *values, interval, *p_values, one.mark)
    return made


def _mark_legend(result: Result, comparison: dict[str, Judged]) -> str:
    """What a mark asks for, and whether the number of resamples lets it be reached at all."""
    from catto.evaluation.metrics import METRICS
    from catto.evaluation.statistics import ALPHA

    count = sum(METRICS[name].better is not None for name in comparison)
    said = (
        f"* better, † worse than the other: p < {ALPHA:g} after Holm's correction for {count} comparisons, the "
        "interval on the difference's side of 0, and a difference of at least 0.5 points (0.005; NLL 0.01)."
    )
    draws = result.whole.settings.resamples or 1
    if count >= ALPHA * (1 + draws):
        least = min(1.0, count / (1 + draws))
        said += f" {draws} resamples are too few for any mark: the least corrected p is {least:.2g}."
    return said
