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
from catto.recipe.settings import MOST_BINS, MOST_RESAMPLES

if TYPE_CHECKING:
    from catto.answer_columns import GradedAnswers
    from catto.measure import MeasureSettings, Summary
    from catto.metrics.catalogue import Versus
    from catto.metrics.errors import BrierSplit

# More diagrams side by side are too small to read on a page.
MOST_PANELS = 6


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
            help="Print the lowest confidence threshold that keeps the error rate below this.", rich_help_panel=OUTPUT
        ),
    ] = None,
    brier_split: Annotated[
        bool,
        Option("--brier-split", help="Split the Brier score into reliability and resolution.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: JsonOption = False,
    bins: Annotated[
        int,
        Option(min=1, max=MOST_BINS, help="Number of equal-width confidence bins.", rich_help_panel=ADVANCED),
    ] = 20,
    resamples: Annotated[
        int | None,
        Option(
            min=1,
            max=MOST_RESAMPLES,
            help="Number of bootstrap resamples.",
            show_default="1000; 200 above 200,000 rows",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    level: Annotated[
        float,
        Real(min=0.01, max=0.9999, help="Confidence level of intervals and chance bands.", rich_help_panel=ADVANCED),
    ] = 0.95,
    method: Annotated[
        Literal["percentile", "bca"],
        Option(help="Type of bootstrap interval.", rich_help_panel=ADVANCED),
    ] = "percentile",
    confidence_level: RiskLevelOption = 0.95,
    seed: SeedOption = 0,
) -> None:
    """Measure accuracy, calibration and ranking of a file of confidences.

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
        console.writable_file("--figure", figure, ".svg", ".png", ".pdf")
    with console.refuse_errors(place="--metrics: "):
        chosen_metrics = catalogue.parse_metrics(metrics)
    settings = MeasureSettings(chosen_metrics, bins=bins, resamples=resamples, level=level, method=method, seed=seed)
    names = columns.column_names(by=by, positive=positive)
    answers = read_graded(file, names, columns.unparsed)
    if target_risk is not None:
        _refuse_repeated_questions(file, answers)
    other = None
    if compare is not None:
        other = read_graded(compare, replace(names, by=None), columns.unparsed)

    # With --json, `document` is printed; otherwise tables, followed by `sentences`.
    measured = measure_slices(file, answers, settings, by)
    document = _make_document(measured, columns.unparsed)
    sentences = _describe_whole(measured.whole.summary)
    comparison = None
    if compare is not None and other is not None:
        comparison = FileComparison(compare, _compare_answers(answers, other, settings))
        document["compare"] = _comparison_document(comparison)
    if brier_split:
        split = errors.brier_split(answers.confidence, answers.correct, bins=bins)
        document["brier_split"] = {**_to_json(split), "total": split.total}
        sentences.append(_describe_brier_split(split))
    if target_risk is not None:
        delta = failure_probability(confidence_level)
        limit = risk.threshold_for_risk(answers.confidence, answers.correct, target_risk, delta)
        document["target_risk"] = _to_json(limit)
        sentences.append(describe_threshold(limit, len(answers)))
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
    """Answers with their summary. The title is the value of the column, or the name of the file."""

    title: str
    answers: GradedAnswers
    summary: Summary


@dataclass(frozen=True)
class MeasuredFile:
    """The results of a whole file and of its slices, one for each value of the column `by`.

    Without such a column, there are no slices.
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
    """Summarise a file and each of its slices, with a progress bar.

    Args:
        file: Where the answers come from.
        answers: The answers.
        settings: What to measure.
        by: Name of the column that defines the slices, which `answers` was read with.
    """
    from catto.measure import summarise_answers

    steps = settings.steps(len(answers))
    slices = answers.slices()
    for part in slices.values():
        steps += settings.steps(len(part))
    measured_slices = []
    with show_progress("measuring", steps) as tick:
        whole = MeasuredSlice(file.name, answers, summarise_answers(answers, settings, tick))
        for title, part in slices.items():
            measured_slices.append(MeasuredSlice(title, part, summarise_answers(part, settings, tick)))
    return MeasuredFile(file, whole, by, measured_slices)


def _compare_answers(answers: GradedAnswers, other: GradedAnswers, settings: MeasureSettings) -> dict[str, Versus]:
    """Compare two files question by question. If either has too many forced answers, no difference is marked."""
    from catto.measure import compare_runs
    from catto.metrics.catalogue import correct_p_values

    with show_progress("comparing", 2 * settings.draws(len(answers))) as tick:
        compared = compare_runs([answers.by_question], [other.by_question], settings, tick=tick)
    has_forced = False
    for part in (answers, other):
        if part.sources is not None and part.sources.forced:
            has_forced = True
    return correct_p_values(compared, judge=not has_forced)


def _warn_of_few_questions(measured: MeasuredFile) -> None:
    """Warn if the file or its smallest slice has too few questions."""
    smallest = measured.whole
    source = str(measured.file)
    for part in measured.slices:
        if _count_questions(part.answers) < _count_questions(smallest.answers):
            smallest = part
            source = f"{measured.file} {part.title}"
    console.warn_few(_count_questions(smallest.answers), source, "intervals are too narrow", "question")


def _count_questions(answers: GradedAnswers) -> int:
    return answers.questions or len(answers)


def _draw_reliability(figure: Path, measured: MeasuredFile) -> None:
    """Draw one diagram per slice, or one of the whole file if there are no slices or too many."""
    from catto.metrics.binning import reliability
    from catto.report.drawing import Panel, reliability_figure, write_figure

    parts: Sequence[MeasuredSlice] = [measured.whole]
    if 0 < len(measured.slices) <= MOST_PANELS:
        parts = measured.slices
    panels = []
    for part in parts:
        bins = reliability(part.answers.confidence, part.answers.correct, part.summary.settings.bins)
        ece = part.summary.metrics.get("ece")
        null = None if ece is None else ece.null
        panels.append(Panel(part.title, bins, null, part.summary.sources))
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
        for part in measured.slices:
            values[part.title] = {"warning": part.summary.warning, **_to_json(part.summary)}
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


def _describe_brier_split(split: BrierSplit) -> str:
    """Write the Brier score as the sum of its parts, with the two terms within the bins added together."""
    within = split.within_bin_variance - 2.0 * split.within_bin_covariance
    sign = "-" if within < 0 else "+"
    return (
        f"Brier score {split.total:.4f} = reliability {split.reliability:.4f} - resolution {split.resolution:.4f} "
        f"+ uncertainty {split.uncertainty:.4f} {sign} {abs(within):.4f} within the bins."
    )


def describe_threshold(limit: Any, rows: int) -> str:
    """Describe what a threshold guarantees.

    Args:
        limit: A Threshold or a RiskThreshold.
        rows: Number of answers it was fitted on.
    """
    promise = f"an error rate of at most {100 * limit.risk:g} % with {100 * (1.0 - limit.delta):g} % confidence"
    if limit.threshold is None:
        return f"No threshold can promise {promise} from these {rows:,} answers."
    return (
        f"Answering at confidence >= {float(limit.threshold)!r} has {promise}: coverage {100 * limit.coverage:.1f} %, "
        f"{limit.errors:,} of {limit.answered:,} wrong, error rate at most {100 * limit.bound:.1f} %. "
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
    settings = whole.settings
    counts = [
        f"N = {whole.rows:,} answers{questions}",
        f"{settings.bins} bins",
        f"{settings.resamples or 1} resamples",
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
    """Print warnings, one table for the file and one per slice, and the sentences that explain them."""
    whole = measured.whole.summary
    if whole.warning is not None:
        say(whole.warning)
    else:
        for part in measured.slices:
            if part.summary.warning is not None:
                say(f"{measured.by} {part.title}: {part.summary.warning}")
    _print_metrics(str(measured.file), whole)
    for part in measured.slices:
        _print_metrics(f"{measured.by} {part.title} (N = {part.summary.rows:,})", part.summary)
    say(_describe_counts(whole))
    for sentence in sentences:
        say(sentence)


def _print_metrics(title: str, summary: Summary) -> None:
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
    rows.append(["Confidence - accuracy", gap_value, format_interval(gap, percent=True, signed=True)])
    columns = ("metric", "value", _interval_title(summary.settings), "by chance,\nif calibrated")
    console.show_table(title, columns, rows)


def _interval_title(settings: MeasureSettings) -> str:
    return f"{100 * settings.level:g} % interval"


def _print_comparison(measured: MeasuredFile, comparison: FileComparison) -> None:
    """Print the table of differences and what its marks mean."""
    from catto.metrics.catalogue import METRICS
    from catto.metrics.comparisons import ALPHA

    settings = measured.whole.summary.settings
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
    columns = ("metric", "this", "other", f"difference\n{_interval_title(settings)}", "p\ncorrected")
    console.show_table(f"{measured.file} (this) against {comparison.file} (other), same questions", columns, rows)
    judged = sum(METRICS[name].better is not None for name in comparison.metrics)
    say(
        f"* better, † worse than the other. A mark needs p < {ALPHA:g} after Holm's correction for {judged} "
        "comparisons, an interval on the difference's side of 0, "
        "and a difference of at least 0.5 points (0.005; NLL 0.01)."
    )
    draws = settings.resamples or 1
    # A bootstrap p-value is at least 1 / (1 + draws), and Holm's correction multiplies it by the number of comparisons.
    least_p = min(1.0, judged / (1 + draws))
    if judged >= ALPHA * (1 + draws):
        say(f"{draws} resamples are too few for any mark: the smallest possible corrected p is {least_p:.2g}.")


def _suggest_next_step(whole: Summary, *, has_figure: bool) -> None:
    """Suggest to fit a calibrator if the ECE is above its null band, otherwise to draw a figure if there is none."""
    ece = whole.metrics.get("ece")
    is_miscalibrated = ece is not None and ece.null is not None and ece.interval.value > ece.null.high
    can_be_fitted = 0 < whole.accuracy < 1  # a calibrator needs both right and wrong answers
    if is_miscalibrated and can_be_fitted:
        say("Next: catto calibrate fit VALIDATION_FILE --out tau.json, with different answers from these.")
    elif not has_figure:
        say("Next: add --figure reliability.svg to plot accuracy against confidence.")
