"""`catto measure`: how honest the confidences of a file are, as a table with one sentence, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import JsonOption, Real, SeedOption, number, refuse, say, span
from catto.cli.display import progress
from catto.formats.columns import ColumnNames, Format
from catto.recipe.settings import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.measure import GradedAnswers, Summary
    from catto.metrics.catalogue import Versus

# More panels than this side by side cannot be read on a page.
MOST_PANELS = 6

FormatOption = Annotated[Format, Option("--format", help="The tool that wrote the file; auto looks at its first row.")]
Resamples, Column = partial(Option, min=1, max=MOST_RESAMPLES), partial(Option, metavar="COL")
ConfidenceColumn = Annotated[str, Column(help="Column of the confidence, in 0 to 1; a.b is b in a.")]
CorrectColumn = Annotated[str, Column(help="Column that tells whether the answer is right.")]
PredictionColumn = Annotated[str | None, Column(help="Column of the answer, to compare with --gold.")]
GoldColumn = Annotated[str | None, Column(help="Column of the right answer.")]
QuestionColumn = Annotated[str | None, Column(help="Column that names the question, if not `question` or `id`.")]
LengthOption = Annotated[bool, Option("--length-normalised", help="lm-eval: likelihoods per character, as acc_norm.")]
UnparsedOption = Annotated[Literal["fallback", "wrong"], Option(help="Forced answers: keep them, or count as wrong.")]
RiskLevelOption = Annotated[float, Real(min=0.5, max=0.9999, help="Confidence level of the bound of --target-risk.")]


def measure(
    file: Annotated[Path, Argument(help="JSON lines, JSON, CSV or Parquet (.gz too), or another tool's log.")],
    bins: Annotated[int, Option(min=1, max=MOST_BINS, help="Confidence bins of equal width.")] = 20,
    metrics: Annotated[str | None, Option(help="Comma-separated names, or `all`.")] = None,
    resamples: Annotated[int | None, Resamples(help="Bootstrap resamples: 1000; 200 above 200,000 rows.")] = None,
    level: Annotated[float, Real(min=0.01, max=0.9999, help="Level of the intervals and bands.")] = 0.95,
    method: Annotated[Literal["percentile", "bca"], Option(help="Kind of bootstrap interval.")] = "percentile",
    seed: SeedOption = 0,
    by: Annotated[str | None, Option(help="Column: measure each of its values separately.")] = None,
    compare: Annotated[Path | None, Option(help="Another file, paired with this one by question id.")] = None,
    target_risk: Annotated[float | None, Real(min=0.0001, max=0.9999, help="Largest share of wrong answers.")] = None,
    confidence_level: RiskLevelOption = 0.95,
    brier_split: Annotated[bool, Option("--brier-split", help="Split the Brier score into its parts.")] = False,
    unparsed: UnparsedOption = "fallback",
    log_format: FormatOption = "auto",
    confidence: ConfidenceColumn = "confidence",
    correct: CorrectColumn = "correct",
    prediction: PredictionColumn = None,
    gold: GoldColumn = None,
    question: QuestionColumn = None,
    positive: Annotated[str | None, Option(help="The confidence is the probability of this label, of two.")] = None,
    length_normalised: LengthOption = False,
    figure: Annotated[Path | None, Option(help="Draw the reliability diagram: .svg, .png or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how honest confidences are: accuracy, calibration, ranking, each with its interval.

    A row needs `confidence` and `correct`; or `confidence`, `label` and `gold`, as catto's own predictions have them;
    or `label_logprobs` (label -> log-probability) and `gold`; columns of other names are named by options. With a
    column that names the question (`question`, `id` or --question), whole questions are resampled. Logs of
    lm-evaluation-harness, inspect_ai, HELM, uqlm and chat completions with `logprobs` are recognised.

    Examples:
    catto measure predictions.jsonl --figure reliability.svg
    catto measure answers.csv --confidence p --prediction answer --gold truth --json
    catto measure dpo_catto.jsonl --compare dpo.jsonl --metrics accuracy,ece,nll
    catto measure predictions.jsonl --by task --unparsed wrong
    catto measure validation.jsonl --target-risk 0.05 --brier-split
    """
    from catto.measure import (
        MeasureSettings,
        compare_runs,
        explain_missing_interval,
        jsonable,
        read_graded,
        summarise,
        verdict,
    )
    from catto.metrics import catalogue, errors, ranking

    if figure is not None:
        console.writable_file("--figure", figure, ".svg", ".png", ".pdf")
    with console.refusing(place="--metrics: "):
        settings = MeasureSettings(catalogue.parse_metrics(metrics), bins, resamples, level, method, seed)
    names = ColumnNames(confidence, correct, by, prediction, gold, positive, log_format, length_normalised, question)
    answers = read_graded(file, names, unparsed)
    if target_risk is not None and answers.run.question is not None:
        refuse(f"--target-risk: {file} has several answers to one question, and the bound needs independent answers")
    other = None if compare is None else read_graded(compare, replace(names, by=None), unparsed)
    comparison: dict[str, Versus] = {}
    parts = [answers, *(slices := answers.slices()).values()]
    with progress("measuring", sum(settings.steps(len(part)) for part in parts)) as tick:
        whole, *summaries = [summarise(part, settings, tick) for part in parts]
    document: dict[str, Any] = {"warning": whole.warning, "file": str(file), "unparsed": unparsed, **jsonable(whole)}
    document["verdict"] = verdict(whole)
    sentences = explain_missing_interval(whole)
    if document["verdict"] is not None:
        sentences.insert(0, document["verdict"])
    if by is not None:
        values = [{"warning": summary.warning, **jsonable(summary)} for summary in summaries]
        document["slices"] = {"by": by, "values": dict(zip(slices, values, strict=True))}
    if other is not None:
        with progress("comparing", 2 * settings.draws(len(answers))) as tick:
            compared = compare_runs([answers.by_question], [other.by_question], settings, tick=tick)
        forced = any(part.sources is not None and part.sources.forced for part in (answers, other))
        comparison = catalogue.correct_p_values(compared, judge=not forced)
        versus = {name: jsonable({**asdict(two), "mark": two.mark(name)}) for name, two in comparison.items()}
        document["compare"] = {"file": str(compare), "metrics": versus}
    if brier_split:
        split = errors.brier_split(answers.confidence, answers.correct, bins=bins)
        document["brier_split"] = {**jsonable(split), "total": split.total}
        within = split.within_bin_variance - 2.0 * split.within_bin_covariance
        sentences.append(
            f"Brier score {split.total:.4f} = reliability {split.reliability:.4f} - resolution {split.resolution:.4f} "
            f"+ uncertainty {split.uncertainty:.4f} {'-' if within < 0 else '+'} {abs(within):.4f} within the bins."
        )
    if target_risk is not None:
        risks = target_risk, round(1.0 - confidence_level, 9)
        limit = ranking.threshold_for_risk(answers.confidence, answers.correct, *risks)
        document["target_risk"] = jsonable(limit)
        sentences.append(told_threshold(limit, whole.rows))
    if figure is not None:
        sentences.append(_draw(figure, [file.name, *slices], parts, [whole, *summaries]))
    few, *_ = sorted((part.questions or len(part), title) for title, part in zip(["", *slices], parts, strict=True))
    console.warn_few(few[0], f"{file} {few[1]}".rstrip(), "intervals are too narrow", "question")
    if as_json:
        console.print_json(document)
        return
    by_value = {f"{by} {value}": part for value, part in zip(slices, summaries, strict=True)}
    _show(file, whole, by_value, sentences, compare, comparison, drawn=figure is not None)


def _draw(figure: Path, titles: Sequence[str], parts: Sequence[GradedAnswers], summaries: Sequence[Summary]) -> str:
    """Draw one panel per slice, or the whole file, which comes first, where there are none or too many."""
    from catto.metrics.binning import reliability
    from catto.report.drawing import Panel, reliability_figure, write_figure

    panels = []
    for title, part, summary in zip(titles, parts, summaries, strict=True):
        ece = summary.metrics.get("ece")
        bins = reliability(part.confidence, part.correct, summary.settings.bins)
        panels.append(Panel(title, bins, None if ece is None else ece.null, summary.sources))
    several = 1 < len(panels) <= 1 + MOST_PANELS
    write_figure(partial(reliability_figure, panels[1:] if several else panels[:1]), figure)
    return f"Wrote {figure}."


def _show(
    file: Path,
    whole: Summary,
    slices: dict[str, Summary],
    sentences: Sequence[str],
    compare: Path | None,
    comparison: dict[str, Versus],
    drawn: bool,
) -> None:
    """Print the tables, what they mean, and what to do next."""
    from catto.metrics.catalogue import METRICS
    from catto.metrics.statistics import ALPHA

    settings = whole.settings
    level, draws = f"{100 * settings.level:g} % interval", settings.resamples or 1
    warnings = [f"{value}: {part.warning}" for value, part in slices.items() if part.warning]
    for warning in [whole.warning] if whole.warning is not None else warnings:
        say(warning)
    parts = {f"{value} (N = {part.rows:,})": part for value, part in slices.items()}
    for title, summary in {str(file): whole, **parts}.items():
        rows = []
        for name, measured in summary.metrics.items():
            interval, null, percent = measured.interval, measured.null, METRICS[name].percent
            band = "" if null is None else f"{number(null.mean, percent)} ({span(null, percent)})"
            rows.append([METRICS[name].title, number(interval.value, percent), span(interval, percent), band])
        gap = summary.gap
        rows.append(["Confidence - accuracy", number(gap.value, True, signed=True), span(gap, True, signed=True)])
        console.show_table(title, ("metric", "value", level, "by chance,\nif calibrated"), rows)
    grouped = ""
    if whole.questions is None:
        grouped = " taken as independent (--question names their questions)"
    elif whole.questions < whole.rows:
        grouped = f" to {whole.questions:,} question{'s' * (whole.questions > 1)}"
    counts = [f"N = {whole.rows:,} answers{grouped}", f"{settings.bins} bins", f"{draws} resamples"]
    if whole.sources is not None and whole.accuracy_unparsed_wrong is not None:
        note = f"accuracy {100 * whole.accuracy_unparsed_wrong:.1f} with those counted wrong"
        counts.append(whole.sources.describe(note))
    for sentence in (", ".join(counts) + ".", *sentences):
        say(sentence)
    if compare is not None:
        rows = []
        for name, versus in comparison.items():
            percent = METRICS[name].percent
            difference = f"{versus.mark(name)} {number(versus.difference, percent, signed=True)}"
            ends = span(versus, percent, signed=True)
            p_values = f"{p_value(versus.p_value)}\n{p_value(versus.p_corrected)}"
            values = number(versus.a, percent), number(versus.b, percent)
            rows.append([METRICS[name].title, *values, f"{difference}\n{ends}", p_values])
        columns = "metric", "this", "other", f"difference\n{level}", "p\ncorrected"
        console.show_table(f"{file} (this) against {compare} (other), same questions", columns, rows)
        count = sum(METRICS[name].better is not None for name in comparison)
        say(
            f"* better, † worse than the other: p < {ALPHA:g} after Holm's correction for {count} comparisons, the "
            "interval on the difference's side of 0, and a difference of at least 0.5 points (0.005; NLL 0.01)."
        )
        if count >= ALPHA * (1 + draws):
            least = min(1.0, count / (1 + draws))
            say(f"{draws} resamples are too few for any mark: the least corrected p is {least:.2g}.")
    ece = whole.metrics.get("ece")
    if ece is not None and ece.null is not None and ece.interval.value > ece.null.high and 0 < whole.accuracy < 1:
        say("Next: catto calibrate fit VALIDATION_ROWS --out tau.json; fit on different rows from these.")
    elif not drawn:
        say("Next: --figure reliability.svg draws confidence against accuracy.")


def told_threshold(limit: Any, rows: int) -> str:
    """Say what a threshold promises. limit: a Threshold or a RiskThreshold, fitted on so many rows."""
    promise = f"an error rate of at most {100 * limit.risk:g} % with {100 * (1.0 - limit.delta):g} % confidence"
    if limit.threshold is None:
        return f"No threshold can promise {promise} from these {rows:,} answers."
    return (
        f"Answering at confidence >= {float(limit.threshold)!r} has {promise}: coverage {100 * limit.coverage:.1f} %, "
        f"{limit.errors:,} of {limit.answered:,} wrong, error rate at most {100 * limit.bound:.1f} %. "
        "This holds for new answers like these, unless the confidence was fitted on them."
    )


def p_value(p: float) -> str:
    """Format a p-value.

    >>> p_value(0.0004), p_value(0.0314)
    ('< 0.001', '0.031')
    """
    return "-" if isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
