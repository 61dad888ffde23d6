"""What `catto measure` prints: the table, the sentence, or one JSON document.

`catto measure`: how honest are the confidences in a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catto.cli.console import number, print_table, say, span, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table as RichTable

    from catto.measure import Judged, Measured, Summary
    from catto.metrics.statistics import Interval
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from catto.cli.console import MOST_SEED, finite, print_json, refuse, warn_few, writable_file
from catto.recipe import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.measure import GradedAnswers, Judged, MeasureSettings, Summary
    from catto.report.reliability import Panel


# ---- measured


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
    from catto.measure import jsonable, verdict

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
    from catto.measure import unheld, verdict

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


def _metric_table(result: Result) -> RichTable:
    made = table(str(result.file), *_headings(result.whole))
    for cells in _rows(result.whole):
        made.add_row(*cells)
    return made


def _sliced_table(result: Result) -> RichTable:
    made = table(str(result.file), str(result.by), *_headings(result.whole))
    for value, summary in [("all", result.whole), *result.slices.items()]:
        for place, cells in enumerate(_rows(summary)):
            made.add_row(("", f"{value} (N = {summary.rows:,})")[place == 0], *cells)
        made.add_section()
    return made


def _rows(summary: Summary) -> Iterator[tuple[str, str, str, str]]:
    from catto.metrics.catalogue import METRICS

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


def _comparison_table(result: Result, comparison: dict[str, Judged]) -> RichTable:
    from catto.metrics.catalogue import METRICS

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
    from catto.metrics.catalogue import METRICS
    from catto.metrics.statistics import ALPHA

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


# ---- measure


EXAMPLES = """
[bold]Examples[/bold]

  catto measure predictions.jsonl --figure reliability.svg

  catto measure answers.csv --confidence-column p --correct-column right --json

  catto measure dpo_catto.jsonl --compare dpo.jsonl --metrics accuracy,ece,nll

  catto measure predictions.jsonl --by task --unparsed wrong
"""

FIGURES = (".svg", ".png", ".pdf")
# More panels than this side by side cannot be read on a page.
MOST_PANELS = 6

ConfidenceColumn = Annotated[str, typer.Option(help="Column that holds the confidence, in 0 to 1.")]
CorrectColumn = Annotated[str, typer.Option(help="Column that tells whether the answer was right.")]
UnparsedOption = Annotated[
    Literal["fallback", "wrong"],
    typer.Option(help="Answers that came from the fallback: keep them, or count as wrong."),
]


def measure(
    file: Annotated[Path, typer.Argument(help="JSON lines, JSON or CSV (.gz too), of any model of anybody.")],
    bins: Annotated[int, typer.Option(min=1, max=MOST_BINS, help="Confidence bins of equal width.")] = 20,
    metrics: Annotated[str | None, typer.Option(help="Comma-separated names, or `all`.")] = None,
    resamples: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RESAMPLES, help="Bootstrap resamples.", show_default="1000; 200 above 200,000 rows"
        ),
    ] = None,
    level: Annotated[
        float, typer.Option(min=0.01, max=0.9999, callback=finite, help="Level of the intervals and bands.")
    ] = 0.95,
    method: Annotated[Literal["percentile", "bca"], typer.Option(help="Kind of bootstrap interval.")] = "percentile",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the resamples.")] = 0,
    by: Annotated[str | None, typer.Option(help="Column: measure each of its values apart.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another file, paired with this one by question id.")] = None,
    unparsed: UnparsedOption = "fallback",
    confidence_column: ConfidenceColumn = "confidence",
    correct_column: CorrectColumn = "correct",
    figure: Annotated[Path | None, typer.Option(help="Draw the reliability diagram: .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; shares in 0 to 1.")] = False,
) -> None:
    """Measure how honest confidences are: accuracy, calibration, ranking, each with its interval.

    A row needs `confidence` and `correct`; or `confidence`, `label` and `gold`, as catto's own predictions have them;
    or `label_logprobs` (label -> log-probability) and `gold`. With a column `question` (or `id`), whole questions are
    resampled.
    """
    from catto.measure import ColumnNames, MeasureSettings, chosen, paired, read_graded

    _check_figure(figure)
    try:
        settings = MeasureSettings(chosen(metrics), bins, resamples, level, method, seed)
    except ValueError as error:
        refuse(f"--metrics: {error}")
    names = ColumnNames(confidence_column, correct_column, by)
    answers = read_graded(file, names, unparsed)
    other = None if compare is None else read_graded(compare, replace(names, by=None), unparsed)
    if other is not None:
        paired(answers, other)
    slices = answers.slices() if by is not None else {}
    whole, *parts = _summaries([answers, *slices.values()], settings)
    comparison = None if other is None else _compared(answers, other, settings)
    result = Result(file, unparsed, whole, by, dict(zip(slices, parts, strict=True)), compare, comparison)
    if figure is not None:
        _draw(figure, answers, slices, result)
    warn_few(len(answers), file, "intervals are too narrow")
    if as_json:
        print_json(document(result))
    else:
        show(result)


def _check_figure(figure: Path | None) -> None:
    if figure is not None and figure.suffix.lower() not in FIGURES:
        refuse(f"--figure: {figure} ends in {figure.suffix or 'nothing'!r}, expected {', '.join(FIGURES)}")
    if figure is not None:
        writable_file("--figure", figure)


def _summaries(tables: list[GradedAnswers], settings: MeasureSettings) -> list[Summary]:
    from catto.cli.display import progress
    from catto.measure import summarise

    with progress("measuring", sum(settings.steps(len(part)) for part in tables)) as tick:
        return [summarise(part, settings, tick) for part in tables]


def _compared(answers: GradedAnswers, other: GradedAnswers, settings: MeasureSettings) -> dict[str, Judged]:
    from catto.cli.display import progress
    from catto.measure import compared, judged, paired

    first, second = paired(answers, other)
    with progress("comparing", 2 * settings.draws(len(answers))) as tick:
        found = compared([first], [second], settings, tick=tick)
    forced = any(part.sources is not None and part.sources.forced for part in (answers, other))
    return judged(found, judge=not forced)


def _draw(figure: Path, answers: GradedAnswers, slices: dict[str, GradedAnswers], result: Result) -> None:
    """Draw a panel a slice, or the whole file where there are none or too many."""
    from catto.report.reliability import save

    if 0 < len(slices) <= MOST_PANELS:
        panels = [_panel(value, part, result.slices[value]) for value, part in slices.items()]
    else:
        panels = [_panel(answers.source.name, answers, result.whole)]
    save(panels, figure)


def _panel(title: str, answers: GradedAnswers, summary: Summary) -> Panel:
    from catto.metrics.binning import reliability
    from catto.report.reliability import Panel

    ece = summary.metrics.get("ece")
    bins = reliability(answers.confidence, answers.correct, summary.settings.bins)
    return Panel(title, bins, None if ece is None else ece.null, summary.sources)
