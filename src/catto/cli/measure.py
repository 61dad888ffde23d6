"""`catto measure`: how honest the confidences of a file are, as a table with one sentence, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from catto.cli import console
from catto.cli.console import examples, number, real_option, refuse, say, span
from catto.recipe import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.measure import GradedAnswers, Summary
    from catto.metrics.catalogue import Versus
    from catto.metrics.errors import BrierSplit
    from catto.metrics.ranking import Threshold

EXAMPLES = examples(
    "catto measure predictions.jsonl --figure reliability.svg",
    "catto measure answers.csv --confidence p --prediction answer --gold truth --json",
    "catto measure samples_mmlu.jsonl --compare samples_mmlu_other.jsonl",
    "catto measure dpo_catto.jsonl --compare dpo.jsonl --metrics accuracy,ece,nll",
    "catto measure predictions.jsonl --by task --unparsed wrong",
    "catto measure validation.jsonl --target-risk 0.05 --brier-split",
)
# More panels than this side by side cannot be read on a page.
MOST_PANELS = 6

FormatOption = Annotated[
    Literal["auto", "catto", "lm-eval", "inspect", "helm", "openai", "uqlm"],
    typer.Option("--format", help="The tool that wrote the file; auto looks at its first row."),
]
ConfidenceColumn = Annotated[
    str,
    typer.Option(
        "--confidence", "--confidence-column", metavar="COL", help="Column of the confidence, in 0 to 1; a.b is b in a."
    ),
]
CorrectColumn = Annotated[
    str,
    typer.Option("--correct", "--correct-column", metavar="COL", help="Column that tells whether the answer is right."),
]
PredictionColumn = Annotated[
    str | None, typer.Option("--prediction", metavar="COL", help="Column of the answer, to compare with --gold.")
]
GoldColumn = Annotated[str | None, typer.Option("--gold", metavar="COL", help="Column of the right answer.")]
LengthOption = Annotated[
    bool, typer.Option("--length-normalised", help="lm-eval: likelihoods per character of the choice, as acc_norm.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=console.MOST_SEED, help="Seed of the resamples.")]
UnparsedOption = Annotated[
    Literal["fallback", "wrong"],
    typer.Option(help="Answers that came from the fallback: keep them, or count as wrong."),
]


@dataclass(frozen=True)
class Result:
    """What was measured: the whole file, its slices by value of the column `by`, and against another file."""

    file: Path
    unparsed: str
    whole: Summary
    by: str | None
    slices: dict[str, Summary]
    compare: Path | None
    comparison: dict[str, Versus]
    brier_split: BrierSplit | None
    threshold: Threshold | None


def measure(
    file: Annotated[
        Path, typer.Argument(help="JSON lines, JSON, CSV or Parquet (.gz too) of any model, or another tool's log.")
    ],
    bins: Annotated[int, typer.Option(min=1, max=MOST_BINS, help="Confidence bins of equal width.")] = 20,
    metrics: Annotated[str | None, typer.Option(help="Comma-separated names, or `all`.")] = None,
    resamples: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RESAMPLES, help="Bootstrap resamples.", show_default="1000; 200 above 200,000 rows"
        ),
    ] = None,
    level: Annotated[float, real_option(min=0.01, max=0.9999, help="Level of the intervals and bands.")] = 0.95,
    method: Annotated[Literal["percentile", "bca"], typer.Option(help="Kind of bootstrap interval.")] = "percentile",
    seed: SeedOption = 0,
    by: Annotated[str | None, typer.Option(help="Column: measure each of its values apart.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another file, paired with this one by question id.")] = None,
    target_risk: Annotated[
        float | None,
        real_option(min=0.0001, max=0.9999, help="Find the confidence above which at most this share is wrong."),
    ] = None,
    confidence_level: Annotated[
        float, real_option(min=0.5, max=0.9999, help="How surely --target-risk must hold.")
    ] = 0.95,
    brier_split: Annotated[
        bool, typer.Option("--brier-split", help="Split the Brier score: reliability, resolution, uncertainty.")
    ] = False,
    unparsed: UnparsedOption = "fallback",
    log_format: FormatOption = "auto",
    confidence: ConfidenceColumn = "confidence",
    correct: CorrectColumn = "correct",
    prediction: PredictionColumn = None,
    gold: GoldColumn = None,
    positive: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The confidence is the probability of this label, of two.")
    ] = None,
    length_normalised: LengthOption = False,
    figure: Annotated[Path | None, typer.Option(help="Draw the reliability diagram: .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; shares in 0 to 1.")] = False,
) -> None:
    """Measure how honest confidences are: accuracy, calibration, ranking, each with its interval.

    A row needs `confidence` and `correct`; or `confidence`, `label` and `gold`, as catto's own predictions have them;
    or `label_logprobs` (label -> log-probability) and `gold`; columns of other names are named by options. With a
    column `question` (or `id`), whole questions are resampled. Logs of lm-evaluation-harness, inspect_ai, HELM, uqlm
    and chat completions with `logprobs` are recognised.
    """
    from catto.cli.display import progress
    from catto.logs import ColumnNames
    from catto.measure import MeasureSettings, compare_runs, read_graded, summarise
    from catto.metrics import errors
    from catto.metrics.catalogue import correct_p_values, parse_metrics
    from catto.metrics.ranking import threshold_for_risk

    if figure is not None:
        console.writable_file("--figure", figure, ".svg", ".png", ".pdf")
    with console.refusing(place="--metrics: "):
        settings = MeasureSettings(parse_metrics(metrics), bins, resamples, level, method, seed)
    names = ColumnNames(confidence, correct, by, prediction, gold, positive, log_format, length_normalised)
    answers = read_graded(file, names, unparsed)
    if target_risk is not None and answers.run.question is not None:
        refuse(f"--target-risk: {file} has several answers to one question, and the bound needs independent answers")
    comparison = {}
    if compare is not None:
        other = read_graded(compare, replace(names, by=None), unparsed)
        with progress("comparing", 2 * settings.draws(len(answers))) as tick:
            compared = compare_runs([answers.by_question], [other.by_question], settings, tick=tick)
        forced = any(part.sources is not None and part.sources.forced for part in (answers, other))
        comparison = correct_p_values(compared, judge=not forced)
    slices = answers.slices()
    tables = [answers, *slices.values()]
    with progress("measuring", sum(settings.steps(len(part)) for part in tables)) as tick:
        whole, *parts = [summarise(part, settings, tick) for part in tables]
    split = threshold = None
    if brier_split:
        split = errors.brier_split(answers.confidence, answers.correct, bins=bins)
    if target_risk is not None:
        threshold = threshold_for_risk(
            answers.confidence, answers.correct, target_risk, round(1.0 - confidence_level, 9)
        )
    by_value = dict(zip(slices, parts, strict=True))
    result = Result(file, unparsed, whole, by, by_value, compare, comparison, split, threshold)
    if figure is not None:
        _draw(figure, answers, slices, result)
    console.warn_few(len(answers), file, "intervals are too narrow")
    if as_json:
        console.print_json(_document(result))
    else:
        _show(result)


def _draw(figure: Path, answers: GradedAnswers, slices: dict[str, GradedAnswers], result: Result) -> None:
    """Draw one panel per slice, or the whole file where there are none or too many."""
    from catto.metrics.binning import reliability
    from catto.report.drawing import write_figure
    from catto.report.reliability import Panel, reliability_figure

    parts = [(value, part, result.slices[value]) for value, part in slices.items()]
    if not 0 < len(parts) <= MOST_PANELS:
        parts = [(answers.source.name, answers, result.whole)]
    panels = []
    for title, part, summary in parts:
        ece = summary.metrics.get("ece")
        bins = reliability(part.confidence, part.correct, summary.settings.bins)
        panels.append(Panel(title, bins, None if ece is None else ece.null, summary.sources))
    write_figure(partial(reliability_figure, panels), figure)


def _document(result: Result) -> dict[str, Any]:
    """Return the result as one JSON object; shares stay in 0 to 1.

    `warning` comes first and is null where there is none; where it is not, `verdict` is null. What was asked for by a
    flag has a key only then: slices, compare, brier_split, target_risk.
    """
    from catto.measure import jsonable, verdict

    whole = result.whole
    document = {"warning": whole.warning, "file": str(result.file), "unparsed": result.unparsed, **jsonable(whole)}
    document["verdict"] = verdict(whole)
    if result.by is not None:
        slices = {value: {"warning": part.warning, **jsonable(part)} for value, part in result.slices.items()}
        document["slices"] = {"by": result.by, "values": slices}
    if result.compare is not None:
        metrics = {name: jsonable({**asdict(one), "mark": one.mark(name)}) for name, one in result.comparison.items()}
        document["compare"] = {"file": str(result.compare), "metrics": metrics}
    if result.brier_split is not None:
        document["brier_split"] = {**jsonable(result.brier_split), "total": result.brier_split.total}
    if result.threshold is not None:
        document["target_risk"] = jsonable(result.threshold)
    return document


def _show(result: Result) -> None:
    """Print the result for people."""
    from catto.measure import unheld, verdict
    from catto.metrics.catalogue import METRICS

    whole, settings = result.whole, result.whole.settings
    warnings = [f"{result.by} {value}: {part.warning}" for value, part in result.slices.items() if part.warning]
    for warning in [whole.warning] if whole.warning is not None else warnings:
        say(warning)
    parts = {str(result.file): whole}
    parts |= {f"{result.by} = {value} (N = {part.rows:,})": part for value, part in result.slices.items()}
    for title, summary in parts.items():
        made = console.table(
            title, "metric", "value", f"{100 * settings.level:g} % interval", "by chance,\nif calibrated"
        )
        for name, measured in summary.metrics.items():
            interval, null, percent = measured.interval, measured.null, METRICS[name].percent
            band = "" if null is None else f"{number(null.mean, percent)} ({span(null.low, null.high, percent)})"
            ends = span(interval.low, interval.high, percent)
            made.add_row(METRICS[name].title, number(interval.value, percent), ends, band)
        gap = summary.gap
        ends = span(gap.low, gap.high, True, signed=True)
        made.add_row("Confidence - accuracy", number(gap.value, True, signed=True), ends)
        console.print_table(made)
    questions = f" to {whole.questions:,} questions" if whole.questions not in (None, whole.rows) else ""
    counts = [f"N = {whole.rows:,} answers{questions}", f"{settings.bins} bins", f"{settings.resamples} resamples"]
    if whole.sources is not None and whole.accuracy_unparsed_wrong is not None:
        wrong = f"accuracy {100 * whole.accuracy_unparsed_wrong:.1f} with those counted wrong"
        counts.append(whole.sources.told(wrong))
    sentences = [", ".join(counts) + ".", verdict(whole), *unheld(whole), *_extra_sentences(result)]
    for sentence in sentences:
        if sentence is not None:
            say(sentence)
    if result.compare is not None:
        _show_comparison(result)
    ece = whole.metrics.get("ece")
    if ece is not None and ece.null is not None and ece.interval.value > ece.null.high:
        say("Next: catto calibrate fit validation.jsonl --out tau.json, on other rows than these, repairs confidences.")
    else:
        say(f"Next: catto measure {result.file} --figure reliability.svg draws confidence against accuracy.")


def p_value(p: float) -> str:
    """Format a p-value.

    >>> p_value(0.0004), p_value(0.0314)
    ('< 0.001', '0.031')
    """
    return "-" if isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _extra_sentences(result: Result) -> Iterator[str]:
    """Describe the parts of the Brier score and the threshold for a target risk, where they were asked for."""
    if (split := result.brier_split) is not None:
        within = split.within_bin_variance - 2.0 * split.within_bin_covariance
        yield (
            f"Brier score {split.total:.4f} = reliability {split.reliability:.4f} - resolution {split.resolution:.4f} "
            f"+ uncertainty {split.uncertainty:.4f} {'-' if within < 0 else '+'} {abs(within):.4f} within the bins."
        )
    if (found := result.threshold) is not None:
        promise = f"an error rate of at most {100 * found.risk:g} % with {100 * (1.0 - found.delta):g} % confidence"
        if found.threshold is None:
            yield f"No threshold can promise {promise} from these {result.whole.rows:,} answers."
        else:
            yield (
                f"Answering at confidence >= {found.threshold:.8g} has {promise}: "
                f"coverage {100 * found.coverage:.1f} %, {found.errors:,} of {found.answered:,} wrong, "
                f"error rate at most {100 * found.bound:.1f} %. "
                "This holds for new answers like these, unless the confidence was fitted on them."
            )


def _show_comparison(result: Result) -> None:
    """Print the comparison, and what a mark needs: also whether the number of resamples lets it be reached at all."""
    from catto.metrics.catalogue import METRICS
    from catto.metrics.statistics import ALPHA

    settings = result.whole.settings
    title = f"{result.file} (this) against {result.compare} (other), same questions"
    heading = f"difference\n{100 * settings.level:g} % interval"
    made = console.table(title, "metric", "this", "other", heading, "p\ncorrected")
    for name, versus in result.comparison.items():
        percent = METRICS[name].percent
        difference = f"{versus.mark(name)} {number(versus.difference, percent, signed=True)}"
        interval = span(versus.low, versus.high, percent, signed=True)
        p_values = "\n".join(map(p_value, (versus.p_value, versus.p_corrected)))
        values = (number(versus.a, percent), number(versus.b, percent))
        made.add_row(METRICS[name].title, *values, f"{difference}\n{interval}", p_values)
    console.print_table(made)
    count = sum(METRICS[name].better is not None for name in result.comparison)
    legend = (
        f"* better, † worse than the other: p < {ALPHA:g} after Holm's correction for {count} comparisons, the "
        "interval on the difference's side of 0, and a difference of at least 0.5 points (0.005; NLL 0.01)."
    )
    draws = settings.resamples or 1
    if count >= ALPHA * (1 + draws):
        least = min(1.0, count / (1 + draws))
        legend += f" {draws} resamples are too few for any mark: the least corrected p is {least:.2g}."
    say(legend)
