"""`catto measure`: print the accuracy and calibration of a file of confidences, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import format_interval, format_number, refuse, say
from catto.cli.display import show_progress
from catto.cli.options import (
    ADVANCED,
    INPUT,
    OUTPUT,
    ColumnOptions,
    JsonOption,
    Real,
    RiskLevelOption,
    SeedOption,
    TargetRiskOption,
    expand_options,
    failure_probability,
)
from catto.recipe.settings import MAX_BINS, MAX_RESAMPLES

if TYPE_CHECKING:
    from catto.answer_columns import GradedAnswers
    from catto.calibrate import RiskThreshold
    from catto.measure import MeasureSettings, Summary
    from catto.metrics.catalogue import Versus
    from catto.metrics.errors import BrierSplit
    from catto.metrics.risk import Threshold

# More diagrams side by side are too small to read on a page.
MAX_PANELS = 6


@expand_options
def measure(
    file: Annotated[
        Path, Argument(help="JSON lines, JSON, CSV or Parquet (also .gz), or the log of another evaluation tool.")
    ],
    columns: ColumnOptions,
    positive: Annotated[
        str | None,
        Option(
            metavar="LABEL",
            help="With two labels: the one whose probability is in the confidence column.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            metavar="COLUMN",
            help="Also measure the rows of each value of this column separately.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        Option(help="Second file to compare with. Answers are paired by question id.", rich_help_panel=INPUT),
    ] = None,
    metrics: Annotated[
        str | None,
        Option(help="Comma-separated metrics, or `all`.", show_default="headline metrics", rich_help_panel=OUTPUT),
    ] = None,
    figure: Annotated[
        Path | None,
        Option(help="Write a reliability diagram: .svg, .png or .pdf.", rich_help_panel=OUTPUT),
    ] = None,
    target_risk: Annotated[
        float | None,
        TargetRiskOption(
            help="Print the lowest confidence threshold above which at most this share of the answers is wrong.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    brier_split: Annotated[
        bool,
        Option("--brier-split", help="Split the Brier score into reliability and resolution.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: JsonOption = False,
    bins: Annotated[
        int,
        Option(min=1, max=MAX_BINS, help="Number of equal-width confidence bins.", rich_help_panel=ADVANCED),
    ] = 20,
    resamples: Annotated[
        int | None,
        Option(
            min=1,
            max=MAX_RESAMPLES,
            help="Number of bootstrap resamples.",
            show_default="1000; 200 above 200,000 rows",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    level: Annotated[
        float,
        Real(
            min=0.01,
            max=0.9999,
            help="Confidence level of the intervals and of the ranges by chance.",
            rich_help_panel=ADVANCED,
        ),
    ] = 0.95,
    method: Annotated[
        Literal["percentile", "bca"],
        Option(help="Type of bootstrap interval.", rich_help_panel=ADVANCED),
    ] = "percentile",
    confidence_level: RiskLevelOption = 0.95,
    seed: SeedOption = 0,
) -> None:
    """Measure the accuracy, calibration and ranking of the answers in a file.

    Each row needs a confidence, and whether the answer is correct: `confidence` and `correct`; or `confidence`,
    `label` and `gold`; or `label_logprobs` (label -> log-probability) and `gold`. Use the options below if the columns
    have other names.

    With a question id (`question`, `id` or --question), the bootstrap resamples whole questions. Logs of
    lm-evaluation-harness, inspect_ai, HELM, uqlm and chat completions with `logprobs` are recognised.

    Examples:
    catto measure predictions.jsonl --figure reliability.svg
    catto measure answers.csv --confidence p --prediction answer --gold truth --json
    catto measure dpo_catto.jsonl --compare dpo.jsonl --metrics accuracy,ece,nll
    catto measure predictions.jsonl --by task --unparsed wrong
    catto measure validation.jsonl --target-risk 0.05 --brier-split
    """
    from catto.answer_columns import read_graded
    from catto.measure import MeasureSettings
    from catto.metrics import catalogue, errors, risk

    if figure is not None:
        console.require_writable_file("--figure", figure, ".svg", ".png", ".pdf")
    with console.refuse_errors(place="--metrics: "):
        chosen_metrics = catalogue.parse_metrics(metrics)
    settings = MeasureSettings(chosen_metrics, bins=bins, resamples=resamples, level=level, method=method, seed=seed)
    names = columns.column_names(by=by, positive=positive)
    answers = read_graded(file, names, columns.unparsed)
    if target_risk is not None:
        _refuse_repeated_questions(file, answers)  # the guarantee needs independent answers
    other_answers = None
    if compare is not None:  # a bad file is refused before the long computation
        names_without_slices = replace(names, by=None)  # only whole files are compared
        other_answers = read_graded(compare, names_without_slices, columns.unparsed)

    # `document` is printed with --json, and `sentences` below the tables without it.
    measured = measure_slices(file, answers, settings, by)
    document = _make_document(measured, columns.unparsed)
    sentences = _describe_whole(measured.whole.summary)
    comparison = None
    if other_answers is not None:
        comparison = FileComparison(other_answers.source, _compare_answers(answers, other_answers, settings))
        document["compare"] = _comparison_document(comparison)
    if brier_split:
        score_terms = errors.brier_split(answers.confidence, answers.correct, bins=bins)
        document["brier_split"] = {**_to_json(score_terms), "total": score_terms.total}
        sentences.append(_describe_brier_split(score_terms))
    if target_risk is not None:
        delta = failure_probability(confidence_level)
        threshold = risk.threshold_for_risk(answers.confidence, answers.correct, target_risk, delta)
        document["target_risk"] = _to_json(threshold)
        sentences.append(describe_threshold(threshold, rows=len(answers)))
    if figure is not None:
        _draw_reliability(figure, measured)
        sentences.append(f"Wrote {figure}.")
    _warn_of_few_questions(measured)
    if as_json:
        console.print_json(document)
        return
    _print_measured(measured, sentences)
    if comparison is not None:
        _print_comparison(measured, comparison)
    _suggest_next_step(measured.whole.summary, has_figure=figure is not None)


def _refuse_repeated_questions(file: Path, answers: GradedAnswers) -> None:
    """Refuse --target-risk for a file with several answers to one question.

    Answers without question ids count as independent.
    """
    has_repeated_questions = answers.questions is not None and answers.questions < len(answers)
    if has_repeated_questions:
        refuse(f"--target-risk: {file} has several answers to one question, but the bound needs independent answers")


def measure_and_print(file: Path) -> None:
    """Measure a file of predictions with default settings and print the result, as `catto measure FILE` does."""
    from catto.answer_columns import read_graded
    from catto.measure import MeasureSettings

    measured = measure_slices(file, read_graded(file), MeasureSettings())
    _warn_of_few_questions(measured)
    _print_measured(measured, _describe_whole(measured.whole.summary))
    _suggest_next_step(measured.whole.summary, has_figure=False)


# ---- measuring


@dataclass(frozen=True)
class MeasuredSlice:
    """A slice of a file, or the whole file.

    Attributes:
        title: Value of the column `by` in this slice; for the whole file, its name.
        answers: The answers.
        summary: What was measured on them.
    """

    title: str
    answers: GradedAnswers
    summary: Summary


@dataclass(frozen=True)
class MeasuredFile:
    """The results of a file.

    Attributes:
        file: The file.
        whole: The result of all its answers.
        by: Name of the column that divides the file into slices; None if there are no slices.
        slices: The result for each value of that column; empty if there are no slices.
    """

    file: Path
    whole: MeasuredSlice
    by: str | None
    slices: Sequence[MeasuredSlice]


@dataclass(frozen=True)
class FileComparison:
    """The second file, and for each metric the paired comparison with it."""

    file: Path
    metrics: Mapping[str, Versus]


def measure_slices(
    file: Path, answers: GradedAnswers, settings: MeasureSettings, by: str | None = None
) -> MeasuredFile:
    """Measure a file and each of its slices, with a progress bar.

    Args:
        file: Where the answers come from.
        answers: The answers, read with the column `by`.
        settings: What to measure.
        by: Name of the column that divides the file into slices; None if there are no slices.

    Returns:
        The results of the file and of its slices.
    """
    from catto.measure import summarise_answers

    slices = answers.slices()
    steps = settings.steps(len(answers))
    for slice_answers in slices.values():
        steps += settings.steps(len(slice_answers))
    measured_slices = []
    with show_progress("measuring", steps) as tick:
        whole = MeasuredSlice(file.name, answers, summarise_answers(answers, settings, tick))
        for title, slice_answers in slices.items():
            summary = summarise_answers(slice_answers, settings, tick)
            measured_slices.append(MeasuredSlice(title, slice_answers, summary))
    return MeasuredFile(file, whole, by, measured_slices)


def _compare_answers(answers: GradedAnswers, other: GradedAnswers, settings: MeasureSettings) -> dict[str, Versus]:
    """Compare two files question by question. If either has too many forced answers, no difference is marked."""
    from catto.measure import compare_runs
    from catto.metrics.catalogue import correct_p_values

    steps = 2 * settings.draws(len(answers))  # resamples for the intervals, and swaps for the p-values
    with show_progress("comparing", steps) as tick:
        compared = compare_runs([answers.by_question], [other.by_question], settings, tick=tick)
    has_many_forced = False
    for file_answers in (answers, other):
        if file_answers.sources is not None and file_answers.sources.has_too_many_forced:
            has_many_forced = True
    return correct_p_values(compared, judge=not has_many_forced)


def _warn_of_few_questions(measured: MeasuredFile) -> None:
    """Warn if the file or its smallest slice has too few questions."""
    smallest = measured.whole
    source = str(measured.file)
    for measured_slice in measured.slices:
        if _count_questions(measured_slice.answers) < _count_questions(smallest.answers):
            smallest = measured_slice
            source = f"{measured.file} {measured_slice.title}"
    console.warn_few(_count_questions(smallest.answers), source, "intervals are too narrow", "question")


def _count_questions(answers: GradedAnswers) -> int:
    """Return the number of questions; without question ids, every answer counts as a question."""
    return answers.questions or len(answers)


def _draw_reliability(figure: Path, measured: MeasuredFile) -> None:
    """Draw one diagram per slice, or one of the whole file if there are no slices or too many."""
    from catto.metrics.binning import reliability
    from catto.report.drawing import Panel, reliability_figure, write_figure

    drawn: Sequence[MeasuredSlice] = [measured.whole]
    if 0 < len(measured.slices) <= MAX_PANELS:
        drawn = measured.slices
    panels = []
    for measured_slice in drawn:
        answers = measured_slice.answers
        summary = measured_slice.summary
        bins = reliability(answers.confidence, answers.correct, summary.settings.bins)
        ece = summary.metrics.get("ece")  # None if --metrics leaves it out
        null_band = None if ece is None else ece.null
        panels.append(Panel(measured_slice.title, bins, null_band, summary.sources))
    write_figure(partial(reliability_figure, panels), figure)


# ---- JSON


def _to_json(value: Any) -> Any:
    from catto.measure import jsonable

    return jsonable(value)


def _make_document(measured: MeasuredFile, unparsed: str) -> dict[str, Any]:
    from catto.measure import describe_verdict

    whole = measured.whole.summary
    document = {"warning": whole.warning, "file": str(measured.file), "unparsed": unparsed, **_to_json(whole)}
    document["verdict"] = describe_verdict(whole)
    if measured.by is not None:
        values = {}
        for measured_slice in measured.slices:
            summary = measured_slice.summary
            values[measured_slice.title] = {"warning": summary.warning, **_to_json(summary)}
        document["slices"] = {"by": measured.by, "values": values}
    return document


def _comparison_document(comparison: FileComparison) -> dict[str, Any]:
    metrics = {}
    for name, versus in comparison.metrics.items():
        metrics[name] = _to_json({**asdict(versus), "mark": versus.mark(name)})
    return {"file": str(comparison.file), "metrics": metrics}


# ---- sentences


def _describe_whole(whole: Summary) -> list[str]:
    from catto.measure import describe_verdict, explain_missing_interval

    sentences = explain_missing_interval(whole)
    judgement = describe_verdict(whole)
    if judgement is None:
        return sentences
    return [judgement, *sentences]


def _describe_brier_split(terms: BrierSplit) -> str:
    """Write the Brier score as the sum of its terms, with the two terms within the bins added together."""
    within = terms.within_bin_variance - 2.0 * terms.within_bin_covariance
    sign = "-" if within < 0 else "+"
    return (
        f"Brier score {terms.total:.4f} = reliability {terms.reliability:.4f} - resolution {terms.resolution:.4f} "
        f"+ uncertainty {terms.uncertainty:.4f} {sign} {abs(within):.4f} within the bins."
    )


def describe_threshold(fitted: Threshold | RiskThreshold, rows: int) -> str:
    """Describe what a threshold guarantees, or that none was found.

    Args:
        fitted: The threshold with its guarantee.
        rows: Number of answers it was fitted on.
    """
    promise = f"an error rate of at most {100 * fitted.risk:g} % with {100 * (1.0 - fitted.delta):g} % confidence"
    if fitted.threshold is None:
        return f"No threshold can promise {promise} from these {rows:,} answers."
    return (
        f"Answering at confidence >= {float(fitted.threshold)!r} has {promise}: "
        f"coverage {100 * fitted.coverage:.1f} %, "
        f"{fitted.errors:,} of {fitted.answered:,} wrong, error rate at most {100 * fitted.bound:.1f} %. "
        "This holds for new answers like these, unless the confidence was fitted on them."
    )


def _describe_counts(whole: Summary) -> str:
    """Describe the numbers of answers, questions, bins and resamples, and how the answers were parsed."""
    questions = ""
    if whole.questions is None:
        questions = " taken as independent (--question names their questions)"
    elif whole.questions < whole.rows:
        noun = "question" if whole.questions == 1 else "questions"
        questions = f" to {whole.questions:,} {noun}"
    counts = [
        f"N = {whole.rows:,} answers{questions}",
        f"{whole.settings.bins} bins",
        f"{whole.settings.draws(whole.rows)} resamples",
    ]
    if whole.sources is not None and whole.accuracy_unparsed_wrong is not None:
        note = f"accuracy {100 * whole.accuracy_unparsed_wrong:.1f} with those counted wrong"
        counts.append(whole.sources.describe(note))
    return f"{', '.join(counts)}."


def format_p_value(p: float) -> str:
    """Format a p-value.

    >>> format_p_value(0.0004), format_p_value(0.0314)
    ('< 0.001', '0.031')
    """
    if isnan(p):
        return "-"
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}"


# ---- tables


def _print_measured(measured: MeasuredFile, sentences: Sequence[str]) -> None:
    """Print warnings, one table for the file and one per slice, the counts, and the sentences below them."""
    whole = measured.whole.summary
    if whole.warning is not None:  # covers the slices too
        say(whole.warning)
    else:
        for measured_slice in measured.slices:
            if measured_slice.summary.warning is not None:
                say(f"{measured.by} {measured_slice.title}: {measured_slice.summary.warning}")
    _print_metrics(str(measured.file), whole)
    for measured_slice in measured.slices:
        summary = measured_slice.summary
        _print_metrics(f"{measured.by} {measured_slice.title} (N = {summary.rows:,})", summary)
    say(_describe_counts(whole))
    for sentence in sentences:
        say(sentence)


def _print_metrics(title: str, summary: Summary) -> None:
    """Print a table with each metric, its interval and, for calibration metrics, its null band."""
    from catto.metrics.catalogue import METRICS

    rows = []
    for name, result in summary.metrics.items():
        percent = METRICS[name].percent
        null_band = ""
        if result.null is not None:
            null_band = f"{format_number(result.null.mean, percent)} ({format_interval(result.null, percent)})"
        value = format_number(result.interval.value, percent)
        rows.append([METRICS[name].title, value, format_interval(result.interval, percent), null_band])
    gap = summary.gap
    gap_value = format_number(gap.value, percent=True, signed=True)
    rows.append(["Confidence - accuracy", gap_value, format_interval(gap, percent=True, signed=True), ""])
    columns = ("metric", "value", _interval_title(summary.settings), "by chance,\nif calibrated")
    console.show_table(title, columns, rows)


def _interval_title(settings: MeasureSettings) -> str:
    return f"{100 * settings.level:g} % interval"


def _print_comparison(measured: MeasuredFile, comparison: FileComparison) -> None:
    """Print the table of differences between two files, and what its marks mean."""
    from catto.metrics.catalogue import METRICS

    rows = []
    for name, versus in comparison.metrics.items():
        percent = METRICS[name].percent
        difference = f"{versus.mark(name)} {format_number(versus.difference, percent, signed=True)}"
        interval = format_interval(versus, percent, signed=True)
        cells = [
            METRICS[name].title,
            format_number(versus.a, percent),
            format_number(versus.b, percent),
            f"{difference}\n{interval}",
            f"{format_p_value(versus.p_value)}\n{format_p_value(versus.p_corrected)}",
        ]
        rows.append(cells)
    whole = measured.whole.summary
    columns = ("metric", "this", "other", f"difference\n{_interval_title(whole.settings)}", "p\ncorrected")
    console.show_table(f"{measured.file} (this) against {comparison.file} (other), same questions", columns, rows)
    _explain_marks(list(comparison.metrics), whole.settings.draws(whole.rows))


def _explain_marks(metrics: Sequence[str], draws: int) -> None:
    """Print when a difference is marked as better or worse, and whether the resamples are too few for any mark.

    Args:
        metrics: Names of the compared metrics. One for which neither direction is better is never marked, and does not
            count as a comparison.
        draws: Number of resamples.
    """
    from catto.metrics.catalogue import METRICS
    from catto.metrics.comparisons import ALPHA

    comparisons = sum(METRICS[name].better is not None for name in metrics)
    say(
        f"* better, † worse than the other. A mark needs p < {ALPHA:g} after Holm's correction for {comparisons} "
        "comparisons, an interval on the difference's side of 0, "
        "and a difference of at least 0.5 points (0.005; NLL 0.01)."
    )
    # Each p-value is at least 1 / (1 + draws), and Holm's correction multiplies the smallest one by `comparisons`.
    smallest_p = min(1.0, comparisons / (1 + draws))
    if smallest_p >= ALPHA:
        say(f"{draws} resamples are too few for any mark: the smallest possible corrected p is {smallest_p:.2g}.")


def _suggest_next_step(whole: Summary, *, has_figure: bool) -> None:
    """Suggest to fit a calibrator if the ECE is above its null band, otherwise to draw a figure if there is none."""
    ece = whole.metrics.get("ece")
    is_miscalibrated = ece is not None and ece.null is not None and ece.interval.value > ece.null.high
    can_be_fitted = 0 < whole.accuracy < 1  # a calibrator needs both right and wrong answers
    if is_miscalibrated and can_be_fitted:
        say("Next: catto calibrate fit VALIDATION_FILE --out tau.json, with different answers from these.")
    elif not has_figure:
        say("Next: add --figure reliability.svg to plot accuracy against confidence.")
