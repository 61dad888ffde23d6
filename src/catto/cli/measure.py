"""`catto measure`: how honest are the confidences in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from catto.cli.checks import MOST_SEED, finite, warn_few, writable_file
from catto.cli.console import print_json, progress, refuse
from catto.cli.measured import Result, document, show
from catto.recipe import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.evaluation.summary import Judged, Settings, Summary
    from catto.evaluation.tables import Table
    from catto.report.reliability import Panel

__all__ = ["measure"]

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
    from catto.evaluation.summary import Settings, check_paired, chosen
    from catto.evaluation.tables import Names, read_table

    _check_figure(figure)
    try:
        settings = Settings(chosen(metrics), bins, resamples, level, method, seed)
    except ValueError as error:
        refuse(f"--metrics: {error}")
    names = Names(confidence_column, correct_column, by)
    answers = read_table(file, names, unparsed)
    other = None if compare is None else read_table(compare, replace(names, by=None), unparsed)
    if other is not None:
        check_paired(answers, other)
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


def _summaries(tables: list[Table], settings: Settings) -> list[Summary]:
    from catto.evaluation.summary import steps, summarise

    with progress("measuring", sum(steps(settings, len(part)) for part in tables)) as tick:
        return [summarise(part, settings, tick) for part in tables]


def _compared(answers: Table, other: Table, settings: Settings) -> dict[str, Judged]:
    from catto.evaluation.summary import compared, judged

    # Each resample and each swap asks the metric twice.
    with progress("comparing", 4 * len(settings.metrics) * settings.draws(len(answers))) as tick:
        found = compared(answers, other, settings, tick)
    forced = any(part.sources is not None and part.sources.forced for part in (answers, other))
    return judged(found, judge=not forced)


def _draw(figure: Path, answers: Table, slices: dict[str, Table], result: Result) -> None:
    """Draw a panel a slice, or the whole file where there are none or too many."""
    from catto.report.reliability import save

    if 0 < len(slices) <= MOST_PANELS:
        panels = [_panel(value, part, result.slices[value]) for value, part in slices.items()]
    else:
        panels = [_panel(answers.source.name, answers, result.whole)]
    save(panels, figure)


def _panel(title: str, answers: Table, summary: Summary) -> Panel:
    from catto.evaluation.binning import reliability
    from catto.report.reliability import Panel

    ece = summary.metrics.get("ece")
    bins = reliability(answers.confidence, answers.correct, summary.settings.bins)
    return Panel(title, bins, None if ece is None else ece.null, summary.sources)
