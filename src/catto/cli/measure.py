"""`catto measure`: how honest the confidences of a file are, as a table with one sentence, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import JsonOption, SeedOption, number, real_option, refuse, say, span
from catto.recipe import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.measure import GradedAnswers, MeasureSettings, Summary
    from catto.metrics.catalogue import Versus
    from catto.metrics.errors import BrierSplit
    from catto.metrics.ranking import Threshold

# More panels than this side by side cannot be read on a page.
MOST_PANELS = 6

FormatOption = Annotated[
    Literal["auto", "catto", "lm-eval", "inspect", "helm", "openai", "uqlm"],
    Option("--format", help="The tool that wrote the file; auto looks at its first row."),
]
column = partial(Option, metavar="COL")
ConfidenceColumn = Annotated[str, column(help="Column of the confidence, in 0 to 1; a.b is b in a.")]
CorrectColumn = Annotated[str, column(help="Column that tells whether the answer is right.")]
PredictionColumn = Annotated[str | None, column(help="Column of the answer, to compare with --gold.")]
GoldColumn = Annotated[str | None, column(help="Column of the right answer.")]
LengthOption = Annotated[
    bool, Option("--length-normalised", help="lm-eval: likelihoods per character of the choice, as acc_norm.")
]
UnparsedOption = Annotated[
    Literal["fallback", "wrong"], Option(help="Answers that came from the fallback: keep them, or count as wrong.")
]
RiskLevelOption = Annotated[float, real_option(min=0.5, max=0.9999, help="How surely --target-risk must hold.")]


def measure(
    file: Annotated[Path, Argument(help="JSON lines, JSON, CSV or Parquet (.gz too), or another tool's log.")],
    bins: Annotated[int, Option(min=1, max=MOST_BINS, help="Confidence bins of equal width.")] = 20,
    metrics: Annotated[str | None, Option(help="Comma-separated names, or `all`.")] = None,
    resamples: Annotated[
        int | None,
        Option(min=1, max=MOST_RESAMPLES, help="Bootstrap resamples.", show_default="1000; 200 above 200,000 rows"),
    ] = None,
    level: Annotated[float, real_option(min=0.01, max=0.9999, help="Level of the intervals and bands.")] = 0.95,
    method: Annotated[Literal["percentile", "bca"], Option(help="Kind of bootstrap interval.")] = "percentile",
    seed: SeedOption = 0,
    by: Annotated[str | None, Option(help="Column: measure each of its values apart.")] = None,
    compare: Annotated[Path | None, Option(help="Another file, paired with this one by question id.")] = None,
    target_risk: Annotated[
        float | None, real_option(min=0.0001, max=0.9999, help="Find where at most this share of answers is wrong.")
    ] = None,
    confidence_level: RiskLevelOption = 0.95,
    brier_split: Annotated[bool, Option("--brier-split", help="Split the Brier score into its parts.")] = False,
    unparsed: UnparsedOption = "fallback",
    log_format: FormatOption = "auto",
    confidence: ConfidenceColumn = "confidence",
    correct: CorrectColumn = "correct",
    prediction: PredictionColumn = None,
    gold: GoldColumn = None,
    positive: Annotated[
        str | None, Option(metavar="LABEL", help="The confidence is the probability of this label, of two.")
    ] = None,
    length_normalised: LengthOption = False,
    figure: Annotated[Path | None, Option(help="Draw the reliability diagram: .svg, .png or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how honest confidences are: accuracy, calibration, ranking, each with its interval.

    A row needs `confidence` and `correct`; or `confidence`, `label` and `gold`, as catto's own predictions have them;
    or `label_logprobs` (label -> log-probability) and `gold`; columns of other names are named by options. With a
    column `question` (or `id`), whole questions are resampled. Logs of lm-evaluation-harness, inspect_ai, HELM, uqlm
    and chat completions with `logprobs` are recognised.

    Examples:
    catto measure predictions.jsonl --figure reliability.svg
    catto measure answers.csv --confidence p --prediction answer --gold truth --json
    catto measure dpo_catto.jsonl --compare dpo.jsonl --metrics accuracy,ece,nll
    catto measure predictions.jsonl --by task --unparsed wrong
    catto measure validation.jsonl --target-risk 0.05 --brier-split
    """
    from catto.cli.display import progress
    from catto.logs import ColumnNames
    from catto.measure import MeasureSettings, jsonable, read_graded, summarise, unheld, verdict
    from catto.metrics import errors
    from catto.metrics.catalogue import parse_metrics
    from catto.metrics.ranking import threshold_for_risk

    if figure is not None:
        console.writable_file("--figure", figure, ".svg", ".png", ".pdf")
    with console.refusing(place="--metrics: "):
        settings = MeasureSettings(parse_metrics(metrics), bins, resamples, level, method, seed)
    names = ColumnNames(confidence, correct, by, prediction, gold, positive, log_format, length_normalised)
    answers = read_graded(file, names, unparsed)
    if target_risk is not None and answers.run.question is not None:
        refuse(f"--target-risk: {file} has several answers to one question, and the bound needs independent answers")
    other = None if compare is None else read_graded(compare, replace(names, by=None), unparsed)
    comparison = {} if other is None else _compare(answers, other, settings)
    slices = answers.slices()
    tables = [answers, *slices.values()]
    with progress("measuring", sum(settings.steps(len(part)) for part in tables)) as tick:
        whole, *parts = [summarise(part, settings, tick) for part in tables]
    by_value = dict(zip(slices, parts, strict=True))
    document = {"warning": whole.warning, "file": str(file), "unparsed": unparsed, **jsonable(whole)}
    document["verdict"], sentences = verdict(whole), unheld(whole)
    if by is not None:
        values = {value: {"warning": part.warning, **jsonable(part)} for value, part in by_value.items()}
        document["slices"] = {"by": by, "values": values}
    if other is not None:
        versus = {name: jsonable({**asdict(one), "mark": one.mark(name)}) for name, one in comparison.items()}
        document["compare"] = {"file": str(compare), "metrics": versus}
    if brier_split:
        split = errors.brier_split(answers.confidence, answers.correct, bins=bins)
        document["brier_split"] = {**jsonable(split), "total": split.total}
        sentences.append(_told_brier(split))
    if target_risk is not None:
        found = threshold_for_risk(answers.confidence, answers.correct, target_risk, round(1.0 - confidence_level, 9))
        document["target_risk"] = jsonable(found)
        sentences.append(_told_threshold(found, whole.rows))
    if figure is not None:
        _draw(figure, [(file.name, answers, whole), *((value, slices[value], by_value[value]) for value in slices)])
    console.warn_few(len(answers), file, "intervals are too narrow")
    if as_json:
        console.print_json(document)
    else:
        _show(file, by, whole, by_value, sentences, compare, comparison)


def _compare(answers: GradedAnswers, other: GradedAnswers, settings: MeasureSettings) -> dict[str, Versus]:
    """Compare two files metric by metric; no marks where too many answers of one were forced."""
    from catto.cli.display import progress
    from catto.measure import compare_runs
    from catto.metrics.catalogue import correct_p_values

    with progress("comparing", 2 * settings.draws(len(answers))) as tick:
        compared = compare_runs([answers.by_question], [other.by_question], settings, tick=tick)
    forced = any(part.sources is not None and part.sources.forced for part in (answers, other))
    return correct_p_values(compared, judge=not forced)


def _draw(figure: Path, parts: Sequence[tuple[str, GradedAnswers, Summary]]) -> None:
    """Draw one panel per slice, or the whole file, which comes first, where there are none or too many."""
    from catto.metrics.binning import reliability
    from catto.report.drawing import Panel, reliability_figure, write_figure

    panels = []
    for title, part, summary in parts[1:] if 1 < len(parts) <= 1 + MOST_PANELS else parts[:1]:
        ece = summary.metrics.get("ece")
        bins = reliability(part.confidence, part.correct, summary.settings.bins)
        panels.append(Panel(title, bins, None if ece is None else ece.null, summary.sources))
    write_figure(partial(reliability_figure, panels), figure)


def _show(
    file: Path,
    by: str | None,
    whole: Summary,
    slices: dict[str, Summary],
    sentences: Sequence[str],
    compare: Path | None,
    comparison: dict[str, Versus],
) -> None:
    """Print the tables, what they mean, and what to do next."""
    from catto.measure import verdict
    from catto.metrics.catalogue import METRICS

    settings = whole.settings
    warnings = [f"{by} {value}: {part.warning}" for value, part in slices.items() if part.warning]
    for warning in [whole.warning] if whole.warning is not None else warnings:
        say(warning)
    parts = {f"{by} = {value} (N = {part.rows:,})": part for value, part in slices.items()}
    columns = "metric", "value", f"{100 * settings.level:g} % interval", "by chance,\nif calibrated"
    for title, summary in {str(file): whole, **parts}.items():
        made = console.table(title, *columns)
        for name, measured in summary.metrics.items():
            interval, null, percent = measured.interval, measured.null, METRICS[name].percent
            band = "" if null is None else f"{number(null.mean, percent)} ({span(null, percent)})"
            made.add_row(METRICS[name].title, number(interval.value, percent), span(interval, percent), band)
        gap = summary.gap
        made.add_row("Confidence - accuracy", number(gap.value, True, signed=True), span(gap, True, signed=True))
        console.print_table(made)
    questions = f" to {whole.questions:,} questions" if whole.questions not in (None, whole.rows) else ""
    counts = [f"N = {whole.rows:,} answers{questions}", f"{settings.bins} bins", f"{settings.resamples} resamples"]
    if whole.sources is not None and whole.accuracy_unparsed_wrong is not None:
        counts.append(
            whole.sources.told(f"accuracy {100 * whole.accuracy_unparsed_wrong:.1f} with those counted wrong")
        )
    for sentence in (", ".join(counts) + ".", verdict(whole), *sentences):
        if sentence is not None:
            say(sentence)
    if compare is not None:
        _show_comparison(f"{file} (this) against {compare} (other), same questions", comparison, settings)
    ece = whole.metrics.get("ece")
    if ece is not None and ece.null is not None and ece.interval.value > ece.null.high:
        say("Next: catto calibrate fit validation.jsonl --out tau.json, on other rows than these, repairs confidences.")
    else:
        say(f"Next: catto measure {file} --figure reliability.svg draws confidence against accuracy.")


def p_value(p: float) -> str:
    """Format a p-value.

    >>> p_value(0.0004), p_value(0.0314)
    ('< 0.001', '0.031')
    """
    return "-" if isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _told_brier(split: BrierSplit) -> str:
    within = split.within_bin_variance - 2.0 * split.within_bin_covariance
    return (
        f"Brier score {split.total:.4f} = reliability {split.reliability:.4f} - resolution {split.resolution:.4f} "
        f"+ uncertainty {split.uncertainty:.4f} {'-' if within < 0 else '+'} {abs(within):.4f} within the bins."
    )


def _told_threshold(found: Threshold, rows: int) -> str:
    promise = f"an error rate of at most {100 * found.risk:g} % with {100 * (1.0 - found.delta):g} % confidence"
    if found.threshold is None:
        return f"No threshold can promise {promise} from these {rows:,} answers."
    return (
        f"Answering at confidence >= {found.threshold:.8g} has {promise}: coverage {100 * found.coverage:.1f} %, "
        f"{found.errors:,} of {found.answered:,} wrong, error rate at most {100 * found.bound:.1f} %. "
        "This holds for new answers like these, unless the confidence was fitted on them."
    )


def _show_comparison(title: str, comparison: dict[str, Versus], settings: MeasureSettings) -> None:
    """Print the comparison, and what a mark needs: also whether the number of resamples lets it be reached at all."""
    from catto.metrics.catalogue import METRICS
    from catto.metrics.statistics import ALPHA

    heading = f"difference\n{100 * settings.level:g} % interval"
    made = console.table(title, "metric", "this", "other", heading, "p\ncorrected")
    for name, versus in comparison.items():
        metric, percent = METRICS[name].title, METRICS[name].percent
        difference = f"{versus.mark(name)} {number(versus.difference, percent, signed=True)}"
        ends = span(versus, percent, signed=True)
        p_values = f"{p_value(versus.p_value)}\n{p_value(versus.p_corrected)}"
        made.add_row(metric, number(versus.a, percent), number(versus.b, percent), f"{difference}\n{ends}", p_values)
    console.print_table(made)
    count = sum(METRICS[name].better is not None for name in comparison)
    legend = (
        f"* better, † worse than the other: p < {ALPHA:g} after Holm's correction for {count} comparisons, the "
        "interval on the difference's side of 0, and a difference of at least 0.5 points (0.005; NLL 0.01)."
    )
    draws = settings.resamples or 1
    if count >= ALPHA * (1 + draws):
        least = min(1.0, count / (1 + draws))
        legend += f" {draws} resamples are too few for any mark: the least corrected p is {least:.2g}."
    say(legend)
