"""`catto calibrate fit`, `apply` and `threshold`: recalibrate confidences, and find a threshold for abstaining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from catto.cli import console
from catto.cli.console import format_interval, format_number, refuse, require_writable_file, say, warn
from catto.cli.display import show_progress
from catto.cli.measure import describe_threshold
from catto.cli.options import (
    ADVANCED,
    OUTPUT,
    ColumnOptions,
    RiskLevelOption,
    SeedOption,
    TargetRiskOption,
    expand_options,
    failure_probability,
)
from catto.io.record_files import read_manifest

if TYPE_CHECKING:
    from catto.answer_columns import Confidences, GradedAnswers
    from catto.calibrate import Fitted
    from catto.measure import MeasureSettings, Summary
    from catto.metrics.binning import Floats
    from catto.metrics.calibrators import Calibrator
    from catto.model_calibration import ModelFit

CalibratorInput = Literal["confidence", "labels"]
CalibratorName = Literal["temperature", "platt", "isotonic", "histogram", "vector"]
METRICS_SHOWN = ("ece", "nll", "brier")
# The warning about too few answers ends with this consequence.
OVERFITTING = "a calibrator overfits individual answers"

app = typer.Typer(no_args_is_help=True, help="Fit a calibrator, apply it, and find a threshold for abstaining.")


@app.command()
@expand_options
def fit(
    file: Annotated[Path, Argument(help="Validation answers, in any format that `catto measure` reads.")],
    columns: ColumnOptions,
    out: Annotated[Path | None, Option(help="File to write the calibrator to (.json).", rich_help_panel=OUTPUT)] = None,
    model: Annotated[
        Path | None,
        Option(
            help="Folder of a model. The calibrator is stored next to its weights, where other commands find it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    target_risk: Annotated[
        float | None,
        TargetRiskOption(show_default="no threshold", rich_help_panel=OUTPUT),
    ] = None,
    confidence_level: RiskLevelOption = 0.95,
    method: Annotated[CalibratorName, Option(help="Type of calibrator.")] = "temperature",
    on: Annotated[
        CalibratorInput | None,
        Option(
            help="What to calibrate: the confidence, or label_logprobs (temperature and vector only).",
            show_default="confidence; vector: labels",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Fit a calibrator on validation answers.

    With --target-risk, half of the questions are used to fit the calibrator, and the other half to find a confidence
    threshold above which at most this share of the answers is wrong. The file must then contain predictions of `catto
    eval`, final answers of `catto select`, or a log of `catto serve`. From a log, only the answers since the last alarm
    are used.

    Examples:
    catto calibrate fit validation.jsonl --method temperature --out tau.json
    catto calibrate fit validation.jsonl --method vector --out vector.json
    catto calibrate fit validation.jsonl --model my-model --target-risk 0.05
    """
    reads = _choose_input(method, on)
    options = FitOptions(file=file, columns=columns, method=method, reads=reads, seed=seed)
    if model is not None:
        if out is not None:
            refuse("--out and --model: give only one of the two")
        if not model.is_dir():
            refuse(f"--model: {model} is not a folder")
        _fit_to_model(options, model, target_risk, failure_probability(confidence_level))
        return
    if out is None:
        refuse("--out or --model: give one of the two, to say where to write the calibrator")
    if target_risk is not None:
        refuse("--target-risk: needs --model; with --out, use catto calibrate threshold")
    require_writable_file("--out", out, ".json", source=file)
    _fit_to_file(options, out)


@dataclass(frozen=True)
class FitOptions:
    """Which calibrator is fitted to which answers.

    Attributes:
        file: The answers.
        columns: How the file is read.
        method: Type of the calibrator.
        reads: Whether the calibrator reads the confidence or the label log-probabilities.
        seed: Random seed of the bootstrap, for the numbers that are printed.
    """

    file: Path
    columns: ColumnOptions
    method: CalibratorName
    reads: CalibratorInput
    seed: int


def _fit_to_model(options: FitOptions, model: Path, target_risk: float | None, delta: float) -> None:
    """Fit a calibrator and store it in the folder of a model, together with a threshold if a target risk is given.

    Args:
        options: Which calibrator is fitted to which answers.
        model: The folder of the model.
        target_risk: Highest acceptable error rate above the threshold; None finds no threshold.
        delta: Probability with which the error rate may exceed the target risk.
    """
    from catto.model_calibration import RiskTarget, fit_model, store_calibration

    target = None
    if target_risk is not None:
        target = RiskTarget(target_risk, delta)
    model_fit = fit_model(
        options.file,
        kind=options.method,
        on=options.reads,
        names=options.columns.column_names(),
        unparsed=options.columns.unparsed,
        target=target,
    )
    _show_model_fit(model_fit, options.file, options.seed)
    written = store_calibration(model, model_fit.calibration, fitted_on=options.file.name)
    say(f"Wrote {', '.join(written)} to {model}.")


def _fit_to_file(options: FitOptions, out: Path) -> None:
    """Fit a calibrator and write it to a file."""
    from catto.calibrate import fit_file

    names = options.columns.column_names()
    fitted, answers = fit_file(options.file, options.method, options.reads, names, options.columns.unparsed, out)
    console.warn_few(len(answers), options.file, OVERFITTING)
    _warn_of_range_end(options.file, fitted.calibrator)
    _print_before_and_after(answers, fitted.calibrate_answers(answers, names), options.seed)
    _print_parameters(fitted.calibrator)
    say(f"Wrote {out}. It was fitted on these answers, so measure it on different ones.")
    say(f"Next: catto calibrate apply {quote(str(out))} test.jsonl --out calibrated.jsonl")


@app.command()
@expand_options
def apply(
    calibrator: Annotated[Path, Argument(help="Calibrator written by `catto calibrate fit`.")],
    file: Annotated[Path, Argument(help="Answers to calibrate. Gold labels are optional.")],
    columns: ColumnOptions,
    out: Annotated[Path, Option(help="File to write the calibrated answers to (.jsonl).", rich_help_panel=OUTPUT)],
    on: Annotated[
        CalibratorInput | None,
        Option(help="What the calibrator was fitted on, if its manifest is missing.", rich_help_panel=ADVANCED),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Replace the confidence of every answer with its calibrated value.

    The original confidence is kept as `confidence_raw`.

    Examples:
    catto calibrate apply tau.json test.jsonl --out calibrated.jsonl
    """
    from catto.answer_columns import GradedAnswers
    from catto.calibrate import apply_file, open_fitted

    require_writable_file("--out", out, ".jsonl", source=file)
    fitted = open_fitted(calibrator, on)
    answers, calibrated = apply_file(fitted, file, columns.column_names(), out)
    warn_of_fit_questions(fitted, answers, file)
    if isinstance(answers, GradedAnswers):  # without gold labels, there is nothing to measure
        if columns.unparsed == "wrong":
            answers = answers.count_unparsed_as_wrong()
        _print_before_and_after(answers, calibrated, seed)
    say(f"Wrote {out}.")
    if columns.has_default_columns:  # otherwise the proposed command would need the same options as this one
        say(f"Next: catto measure {quote(str(out))}")


@app.command()
def threshold(
    file: Annotated[Path, Argument(help="Final answers written by `catto select --rule ... --out`.")],
    target_risk: Annotated[float, TargetRiskOption()],
    out: Annotated[Path, Option(help="File to write the threshold to (.json).", rich_help_panel=OUTPUT)],
    confidence_level: RiskLevelOption = 0.95,
) -> None:
    """Find the lowest confidence threshold that keeps the error rate below a target.

    Use questions that were not used to train the model, to fit the calibrator or to choose --stop. The guarantee holds
    only for answers produced in the same way, so the rule, k, temperature, fallback and calibrator are stored with the
    threshold.

    Examples:
    catto calibrate threshold final.jsonl --target-risk 0.05 --out threshold.json
    """
    from catto.calibrate import fit_threshold

    require_writable_file("--out", out, ".json", source=file)
    risk_threshold = fit_threshold(file, target_risk, failure_probability(confidence_level), out)
    is_calibrated = risk_threshold.calibrator is not None
    # The note is the number of these questions that the calibrator was fitted on too; it is None if that is not known.
    # `fit_threshold` has refused any number above 0, so a warning is needed only for None.
    is_overlap_known = read_manifest(file).notes.get("fitted_on") is not None
    if is_calibrated and not is_overlap_known:
        warn(
            f"{file}: the questions that its calibrator was fitted on are unknown; "
            "the guarantee holds only if none of them is in this file"
        )
    say(describe_threshold(risk_threshold, rows=risk_threshold.rows))
    protocol = risk_threshold.protocol
    say(f"It applies to the {protocol.rule} of {protocol.k} at temperature {protocol.temperature:g}. Wrote {out}.")


def warn_of_fit_questions(fitted: Fitted, answers: Confidences, file: Path) -> None:
    """Warn if the calibrator was fitted on some of the questions that it is measured on.

    Args:
        fitted: The calibrator.
        answers: The answers it is measured on.
        file: Where the answers come from.
    """
    shared = fitted.count_fit_questions(answers.question or ())
    if shared:  # None if the fit questions are not known
        warn(f"{file} contains {shared} of the questions the calibrator was fitted on: these numbers are optimistic")


def _show_model_fit(model_fit: ModelFit, file: Path, seed: int) -> None:
    """Print warnings, metrics, parameters and the threshold of the calibration that will be stored with a model."""
    fitted = model_fit.calibration.fitted
    threshold = model_fit.calibration.threshold
    console.warn_few(fitted.rows or 0, file, OVERFITTING)
    _warn_of_range_end(file, fitted.calibrator)
    _print_before_and_after(model_fit.answers, model_fit.calibrated, seed)
    _print_parameters(fitted.calibrator)
    if threshold is None:
        say("It was fitted on these answers, so measure it on different ones.")
    else:
        say(f"These answers determine the threshold; the calibrator was fitted on {fitted.rows:,} different ones.")
        say(describe_threshold(threshold, rows=threshold.rows))


def _choose_input(method: CalibratorName, on: CalibratorInput | None) -> CalibratorInput:
    """Return whether a calibrator reads confidences or label log-probabilities; refuse what its type cannot read.

    Vector scaling reads only label log-probabilities, temperature scaling reads either, and all others read only
    confidences.
    """
    if on is None:
        return "labels" if method == "vector" else "confidence"
    if on == "labels" and method not in ("temperature", "vector"):
        refuse(f"--on labels: works with --method temperature or vector, not {method}")
    if on == "confidence" and method == "vector":
        refuse("--on confidence: vector scaling reads label log-probabilities")
    return on


def _warn_of_range_end(file: Path, calibrator: Calibrator) -> None:
    """Warn about a temperature at an end of its range: the best one lies outside."""
    from catto.metrics.calibrators import TAU_RANGE, Temperature

    if isinstance(calibrator, Temperature) and calibrator.tau in TAU_RANGE:
        warn(f"{file}: tau {calibrator.tau:g} is at the end of its range, so these answers do not determine it")


def _print_parameters(calibrator: Calibrator) -> None:
    """Print the parameters of temperature scaling or vector scaling, and nothing for other calibrators."""
    from catto.metrics.calibrators import Temperature, VectorScaling

    if isinstance(calibrator, Temperature):
        direction = "towards" if calibrator.tau > 1 else "away from"
        say(f"tau = {calibrator.tau:.4g}, which moves confidences {direction} one half.")
    if isinstance(calibrator, VectorScaling):
        for label, weight, bias in zip(calibrator.labels, calibrator.weights, calibrator.biases, strict=True):
            say(f"{label}: weight {weight:.4g}, bias {bias:+.4g}")


def _print_before_and_after(answers: GradedAnswers, calibrated: Floats, seed: int) -> None:
    """Print ECE, NLL and Brier score before and after calibration.

    Args:
        answers: N answers with their original confidences.
        calibrated: (N,) calibrated confidences.
        seed: Random seed of the bootstrap.
    """
    from catto.measure import MeasureSettings, explain_missing_interval, summarise_answers

    settings = MeasureSettings(metrics=METRICS_SHOWN, seed=seed)
    steps = 2 * settings.steps(len(answers))  # before and after
    with show_progress("measuring", steps) as tick:
        before = summarise_answers(answers, settings, tick)
        after = summarise_answers(replace(answers, confidence=calibrated), settings, tick)
    if before.warning is not None:  # about unparsed answers, so it is the same before and after
        say(before.warning)
    _print_summaries(str(answers.source), [before, after], settings)
    say(f"N = {len(answers):,} answers, {settings.bins} bins.")
    for sentence in explain_missing_interval(before):
        say(f"Before: {sentence}")
    for sentence in explain_missing_interval(after):
        say(f"After: {sentence}")


def _print_summaries(title: str, summaries: Sequence[Summary], settings: MeasureSettings) -> None:
    from catto.metrics.catalogue import METRICS

    rows = []
    for name in settings.metrics:
        metric = METRICS[name]
        cells = [metric.title]
        for summary in summaries:
            interval = summary.metrics[name].interval
            cells.append(format_number(interval.value, metric.percent))
            cells.append(format_interval(interval, metric.percent))
        rows.append(cells)
    console.show_table(title, ("metric", "before", "95 % interval", "after", "95 % interval"), rows)
