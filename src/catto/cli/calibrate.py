"""`catto calibrate fit`, `apply` and `threshold`: repair confidences after the fact, and find when to answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from catto.cli import console, measure
from catto.cli.console import Real, SeedOption, number, say, span, warn, writable_file
from catto.cli.display import progress
from catto.formats.columns import ColumnNames
from catto.io.record_files import read_manifest

if TYPE_CHECKING:
    from catto.measure import GradedAnswers
    from catto.metrics.binning import Floats

On = Literal["confidence", "labels"]
Kind = Literal["temperature", "platt", "isotonic", "histogram", "vector"]
SHOWN = ("ece", "nll", "brier")

app = typer.Typer(no_args_is_help=True, help="Fit a calibrator on one file, apply it to another, and find a threshold.")


@app.command()
def fit(
    file: Annotated[Path, Argument(help="Answers to fit on, as `catto measure` reads them.")],
    out: Annotated[Path, Option(help="Where the calibrator goes: a .json file.")],
    method: Annotated[Kind, Option(help="Kind of calibrator.")] = "temperature",
    on: Annotated[
        On | None,
        Option(
            help="What it reads: the confidence, or label_logprobs (temperature and vector).",
            show_default="confidence; vector: labels",
        ),
    ] = None,
    unparsed: measure.UnparsedOption = "fallback",
    log_format: measure.FormatOption = "auto",
    confidence: measure.ConfidenceColumn = "confidence",
    correct: measure.CorrectColumn = "correct",
    prediction: measure.PredictionColumn = None,
    gold: measure.GoldColumn = None,
    question: measure.QuestionColumn = None,
    length_normalised: measure.LengthOption = False,
    seed: SeedOption = 0,
) -> None:
    """Fit a calibrator on validation answers and write it as JSON.

    Examples:
    catto calibrate fit validation.jsonl --method temperature --out tau.json
    catto calibrate fit validation.jsonl --method vector --out vector.json
    """
    from catto.calibrate import fit_file
    from catto.metrics.calibrators import TAU_RANGE, Temperature, VectorScaling

    if on is None:
        on = "labels" if method == "vector" else "confidence"
    if on == "labels" and method not in ("temperature", "vector"):
        console.refuse(f"--on labels: works with --method temperature or vector, not {method}")
    if on == "confidence" and method == "vector":
        console.refuse("--on confidence: vector scaling reads label log-probabilities")
    writable_file("--out", out, ".json", source=file)
    names = ColumnNames(confidence, correct, None, prediction, gold, None, log_format, length_normalised, question)
    fitted, answers = fit_file(file, method, on, names, unparsed, out)
    console.warn_few(len(answers), file, "a calibrator follows single answers")
    tau = fitted.calibrator.tau if isinstance(fitted.calibrator, Temperature) else None
    if tau in TAU_RANGE:
        warn(f"{file}: tau {tau:g} is the end of its range, so these answers do not determine it")
    _show(answers, fitted.confidences(answers, names), seed)
    if tau is not None:
        say(f"tau = {tau:.4g}, which moves confidences {'towards' if tau > 1 else 'away from'} one half.")
    if isinstance(fitted.calibrator, VectorScaling):
        vector = fitted.calibrator
        for label, weight, bias in zip(vector.labels, vector.weights, vector.biases, strict=True):
            say(f"{label}: weight {weight:.4g}, bias {bias:+.4g}")
    say(f"Wrote {out}. These are the rows it was fitted on, so measure it on others.")
    say(f"Next: catto calibrate apply {quote(str(out))} test.jsonl --out calibrated.jsonl")


@app.command()
def apply(
    calibrator: Annotated[Path, Argument(help="What `catto calibrate fit` wrote.")],
    file: Annotated[Path, Argument(help="Answers to calibrate; they need not be labelled.")],
    out: Annotated[Path, Option(help="Where the rows go: a .jsonl file.")],
    on: Annotated[On | None, Option(help="What the calibrator reads, if its manifest is missing.")] = None,
    unparsed: measure.UnparsedOption = "fallback",
    log_format: measure.FormatOption = "auto",
    confidence: measure.ConfidenceColumn = "confidence",
    correct: measure.CorrectColumn = "correct",
    prediction: measure.PredictionColumn = None,
    gold: measure.GoldColumn = None,
    question: measure.QuestionColumn = None,
    length_normalised: measure.LengthOption = False,
    seed: SeedOption = 0,
) -> None:
    """Write the answers with calibrated confidence; the stated one is kept as `confidence_raw`.

    Examples:
    catto calibrate apply tau.json test.jsonl --out calibrated.jsonl
    """
    from catto.calibrate import apply_file, open_fitted
    from catto.measure import GradedAnswers

    writable_file("--out", out, ".jsonl", source=file)
    fitted = open_fitted(calibrator, on)
    names = ColumnNames(confidence, correct, None, prediction, gold, None, log_format, length_normalised, question)
    answers, calibrated = apply_file(fitted, file, names, out)
    if shared := fitted.count_fit_questions(answers.question or ()):
        warn(f"{shared} of the questions the calibrator was fitted on are in {file}: these numbers are optimistic")
    if isinstance(answers, GradedAnswers):
        _show(answers.count_unparsed_as_wrong() if unparsed == "wrong" else answers, calibrated, seed)
    say(f"Wrote {out}.")
    if (confidence, correct, prediction, gold) == ("confidence", "correct", None, None):
        say(f"Next: catto measure {quote(str(out))}")


@app.command()
def threshold(
    file: Annotated[Path, Argument(help="Final answers, as `catto select --rule ... --out` writes them.")],
    target_risk: Annotated[float, Real(min=0.0001, max=0.9999, help="Largest share of wrong answers.")],
    out: Annotated[Path, Option(help="Where the threshold goes: a .json file.")],
    confidence_level: measure.RiskLevelOption = 0.95,
) -> None:
    """Find the lowest confidence above which at most this share of the answers is wrong, for `catto serve`.

    The answers must be to questions that fitted neither the model nor the calibrator, and did not choose the stop. How
    they were made (rule, k, temperature, fallback, calibrator) is stored: the promise is for answers made so.

    Examples:
    catto calibrate threshold final.jsonl --target-risk 0.05 --out threshold.json
    """
    from catto.calibrate import fit_threshold

    writable_file("--out", out, ".json", source=file)
    limit = fit_threshold(file, target_risk, round(1.0 - confidence_level, 9), out)
    if limit.calibrator is not None and read_manifest(file).notes.get("fitted_on") is None:
        warn(f"{file}: which questions its calibrator was fitted on is not known; the promise needs others")
    say(measure.told_threshold(limit, limit.rows))
    protocol = limit.protocol
    say(f"For the {protocol.rule} of {protocol.k} at temperature {protocol.temperature:g}. Wrote {out}.")


def _show(answers: GradedAnswers, calibrated: Floats, seed: int) -> None:
    """Print ECE, NLL and Brier score before and after."""
    from catto.measure import MeasureSettings, explain_missing_interval, summarise
    from catto.metrics.catalogue import METRICS

    settings = MeasureSettings(metrics=SHOWN, seed=seed)
    with progress("measuring", 2 * settings.steps(len(answers))) as tick:
        both = [summarise(part, settings, tick) for part in (answers, replace(answers, confidence=calibrated))]
    if both[0].warning is not None:
        say(both[0].warning)
    rows = []
    for name in SHOWN:
        metric, intervals = METRICS[name], [summary.metrics[name].interval for summary in both]
        before, after = ([number(ends.value, metric.percent), span(ends, metric.percent)] for ends in intervals)
        rows.append([metric.title, *before, *after])
    console.show_table(str(answers.source), ("metric", "before", "95 % interval", "after", "95 % interval"), rows)
    say(f"N = {len(answers):,} answers, {settings.bins} bins.")
    for when, summary in zip(("Before", "After"), both, strict=True):
        for sentence in explain_missing_interval(summary):
            say(f"{when}: {sentence}")
