"""Measure a file of confidences: read it into columns, then compute each metric with its interval and null band.

A row has a confidence and says whether the answer was right. The confidence is the column `confidence`, else the
probability of the answer in `label_logprobs` (label -> log-probability). Whether an answer is right is the column
`correct`, else `label == gold`, else whether the top label of `label_logprobs` is `gold`. The first row decides which
columns are read, and later rows must have the same ones. `ColumnNames` gives the columns other names, and
`catto.formats` converts logs of other tools to this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import numpy as np
from pydantic_core import to_jsonable_python

from catto.answer_columns import GradedAnswers, ParseCounts
from catto.metrics.catalogue import HEADLINE, METRICS
from catto.metrics.comparisons import compare_table
from catto.metrics.errors import confidence_gap, debiased_ece
from catto.metrics.intervals import Comparison, Interval, NullBand, drop_invalid_interval
from catto.metrics.resampling import Answers, BootstrapOptions, MetricFunction, Tick
from catto.metrics.statistics import Method, bootstrap_table, null_table
from catto.recipe.settings import FEW_QUESTIONS

# Converts a result to plain JSON values; nan and infinite numbers become null.
jsonable = partial(to_jsonable_python, inf_nan_mode="null")
# Mean confidence minus accuracy. It has its own row, whichever metrics are chosen.
GAP = "gap"
RESAMPLES = 1000
# Above this many rows there are fewer resamples: 200 are still enough to estimate the 2.5 % quantile.
MANY_ROWS = 200_000
FEW_RESAMPLES = 200


# ---- measuring


@dataclass(frozen=True)
class MeasureSettings:
    """What is measured and how.

    Attributes:
        metrics: Names in METRICS; for `measure_runs` and `compare_runs`, `gap` may be among them.
        bins: Number of bins for binned metrics.
        resamples: Number of bootstrap resamples. None means 1000, or 200 above 200,000 rows.
        level: Confidence level of the intervals.
        method: Kind of bootstrap interval.
        seed: Seed for the resamples.
    """

    metrics: tuple[str, ...] = HEADLINE
    bins: int = 20
    resamples: int | None = None
    level: float = 0.95
    method: Method = "percentile"
    seed: int = 0

    def draws(self, rows: int) -> int:
        """Return the number of resamples for this number of rows."""
        if self.resamples:
            return self.resamples
        return RESAMPLES if rows <= MANY_ROWS else FEW_RESAMPLES

    def options(self, runs: Sequence[Answers], tick: Tick) -> BootstrapOptions:
        """Return the options for resampling these runs; the largest run determines the number of resamples."""
        max_rows = max(np.size(run.confidence) for run in runs)
        return {"resamples": self.draws(max_rows), "level": self.level, "seed": self.seed, "tick": tick}

    def steps(self, rows: int) -> int:
        """Return how often `measure_runs` ticks for a run with this number of rows.

        It ticks once per resample and, if a metric has a null band, once per simulation.
        """
        draws = self.draws(rows)
        has_null_band = any(METRICS[name].calibration for name in self.metrics)
        return 2 * draws if has_null_band else draws

    def functions(self) -> dict[str, MetricFunction]:
        """Return the function of each metric, with the number of bins filled in."""
        functions: dict[str, MetricFunction] = {}
        for name in self.metrics:
            function = _find_function(name)
            if "bins" in signature(function).parameters:
                function = partial(function, bins=self.bins)
            functions[name] = function
        return functions


def _find_function(name: str) -> MetricFunction:
    if name == GAP:
        return confidence_gap
    return METRICS[name].function


@dataclass(frozen=True)
class MetricResult:
    """One metric.

    Attributes:
        interval: Its value, with the bootstrap interval.
        null: What a perfectly calibrated model would score by chance; None unless it is a calibration metric.
    """

    interval: Interval
    null: NullBand | None


def measure_runs(
    runs: Sequence[Answers], settings: MeasureSettings, tick: Tick = lambda: None
) -> dict[str, MetricResult]:
    """Measure the metrics of one run of a model, or their mean over several runs.

    Calibration metrics also get a null band: what a perfectly calibrated model would score by chance. Resampling raises
    some of these metrics, and an interval that does not contain its own value is removed (`drop_invalid_interval`). The
    interval of `gap`, a mean over rows, is always kept.

    Args:
        runs: One or more runs.
        settings: The metrics, which may include `gap`, and how they are resampled.
        tick: Called once per resample, and once per simulation for the null bands.

    Returns:
        Name of a metric -> its value with the interval and the null band.

    >>> run = Answers(None, [0.9, 0.8, 0.3], [True, True, False])
    >>> measure_runs([run], MeasureSettings(("accuracy", "gap"), resamples=100))["accuracy"].interval.value
    0.6666666666666666
    """
    functions = settings.functions()
    options = settings.options(runs, tick)
    intervals = bootstrap_table(functions, runs, method=settings.method, **options)
    functions_with_band = {}
    for name, function in functions.items():
        if name != GAP and METRICS[name].calibration:
            functions_with_band[name] = function
    bands: dict[str, NullBand] = {}
    if functions_with_band:
        bands = null_table(functions_with_band, runs, **options)
    results = {}
    for name, interval in intervals.items():
        if name == GAP:
            results[name] = MetricResult(interval, None)
        else:
            results[name] = MetricResult(drop_invalid_interval(interval), bands.get(name))
    return results


def compare_runs(
    a: Sequence[Answers], b: Sequence[Answers], settings: MeasureSettings, swaps: int = 0, tick: Tick = lambda: None
) -> dict[str, Comparison]:
    """Compare two methods on the same questions, metric by metric, with an interval and a test of each difference.

    The interval is a bootstrap over questions. The test swaps the answers of the two methods to random questions; see
    `compare_table`. Like `measure_runs`, this removes an interval that does not contain its own difference.

    Args:
        a: The runs of the first method, with one answer per question each. Question ids are required.
        b: Equally many runs of the second method. Each answers the same questions as the run of a at the same index.
        settings: The metrics and how they are resampled.
        swaps: Maximum number of swaps in the test, if larger than the number of resamples.
        tick: Called once per resample and once per swap.

    Returns:
        Name of a metric -> its mean over the runs of a and over those of b, and the difference a - b.

    Raises:
        DataError: A run has no question ids, two runs answer different questions, or a run answers a question twice.
    """
    comparisons = compare_table(settings.functions(), a, b, swaps=swaps, **settings.options(a, tick))
    return {name: drop_invalid_interval(comparison) for name, comparison in comparisons.items()}


@dataclass(frozen=True)
class Summary:
    """All numbers of one file. Shares are in [0, 1].

    Attributes:
        rows: Number of answers.
        questions: Number of questions; None if the file does not name them.
        accuracy: Share of right answers.
        mean_confidence: Mean confidence.
        gap: Mean confidence minus accuracy. Its interval has nominal coverage; the interval of an ECE may not.
        debiased_ece: The debiased ECE.
        sources: How many answers were parsed in which way; None if the file does not say.
        fallback_rate: Share of forced answers; None if the file does not say.
        accuracy_unparsed_wrong: Accuracy with forced answers counted as wrong; None if the file does not say.
        settings: How it was measured.
        metrics: Name of a metric -> its result. `gap` has its own field instead.
    """

    rows: int
    questions: int | None
    accuracy: float
    mean_confidence: float
    gap: Interval
    debiased_ece: float
    sources: ParseCounts | None
    fallback_rate: float | None
    accuracy_unparsed_wrong: float | None
    settings: MeasureSettings
    metrics: dict[str, MetricResult]

    @property
    def warning(self) -> str | None:
        """The warning to print before any number if too many answers were forced or are missing; else None."""
        if self.sources is None:
            return None
        return self.sources.warning


def summarise_answers(
    answers: GradedAnswers, settings: MeasureSettings | None = None, tick: Tick = lambda: None
) -> Summary:
    """Measure the answers of a file: the metrics in the settings, and always `gap` and the debiased ECE.

    Args:
        answers: The answers of a file.
        settings: The metrics and how they are resampled; None means the defaults of `MeasureSettings`.
        tick: Called `settings.steps(rows)` times, to move a progress bar.

    Returns:
        The summary. The `resamples` of its `settings` is the number that was drawn, even if it was given as None.
    """
    settings = settings or MeasureSettings()
    settings = replace(settings, resamples=settings.draws(len(answers)))
    settings_with_gap = replace(settings, metrics=(*settings.metrics, GAP))
    metrics = measure_runs([answers.run], settings_with_gap, tick)
    gap = metrics.pop(GAP)  # a field of the summary, not one of its metrics
    sources = answers.sources
    fallback_rate = None
    accuracy_unparsed_wrong = None
    if sources is not None:
        fallback_rate = sources.share("fallback")
        accuracy_unparsed_wrong = float(answers.count_unparsed_as_wrong().correct.mean())
    return Summary(
        rows=len(answers),
        questions=answers.questions,
        accuracy=float(answers.correct.mean()),
        mean_confidence=float(answers.confidence.mean()),
        gap=gap.interval,
        debiased_ece=debiased_ece(answers.confidence, answers.correct, bins=settings.bins),
        sources=sources,
        fallback_rate=fallback_rate,
        accuracy_unparsed_wrong=accuracy_unparsed_wrong,
        settings=settings,
        metrics=metrics,
    )


# ---- what the numbers mean


def shows_gap(gap: Interval, accuracy: float, questions: int) -> bool:
    """Return whether the answers show overconfidence or underconfidence on average: the gap's interval excludes 0.

    The mean over all answers has less noise than the bins of the ECE, so it may show what the ECE does not.

    In two cases the interval is too narrow to be trusted, and the result is False: with few questions, and if all
    answers are right or all are wrong, because resampling then never changes the accuracy.

    Args:
        gap: Mean confidence minus accuracy, with its interval.
        accuracy: Share of right answers.
        questions: Number of questions; fewer than FEW_QUESTIONS are too few.
    """
    enough_questions = questions >= FEW_QUESTIONS
    accuracy_varies = 0 < accuracy < 1
    interval_is_trusted = enough_questions and accuracy_varies
    contains_zero = gap.low <= 0 <= gap.high
    return interval_is_trusted and not contains_zero


def describe_verdict(summary: Summary) -> str | None:
    """Return one sentence that says whether the ECE is below, above or within what a calibrated model scores by chance.

    The result is None if the ECE was not measured, or if too many answers were forced or are missing.

    For example: "ECE 9.1 lies above what a perfectly calibrated model would score by chance (2.0 to 4.5): overconfident
    by 8.7 points on average."
    """
    ece = summary.metrics.get("ece")
    # After the warning that too many answers were forced or are missing, the ECE would not describe the model.
    has_warning = summary.warning is not None
    if ece is None or ece.null is None or has_warning:
        return None
    ece_points = 100 * ece.interval.value
    chance = _describe_chance(ece.null, summary.settings.level)
    measured = f"ECE {ece_points:.1f} lies"
    if ece_points < 100 * ece.null.low:
        return f"{measured} below {chance}, as after fitting a calibrator to these very rows."
    gap = summary.gap
    gap_points = 100 * gap.value
    if ece_points > 100 * ece.null.high:
        # |gap| <= ECE. If it is less than half the ECE, overconfident and underconfident bins largely cancel out.
        signs_cancel = abs(gap_points) < ece_points / 2
        if signs_cancel:
            mixed = f"too sure in some bins and not sure enough in others, {gap_points:+.1f} points on average"
            return f"{measured} above {chance}: {mixed}."
        return f"{measured} above {chance}: {_describe_gap(gap_points)}."
    questions = summary.questions or summary.rows  # without question ids, every row counts as a question
    if shows_gap(gap, summary.accuracy, questions):
        ends = f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
        return f"{measured} within {chance}, but the answers are {_describe_gap(gap_points)} ({ends})."
    return f"{measured} within {chance}: no miscalibration shows in {summary.rows:,} answers."


def _describe_gap(gap_points: float) -> str:
    """Describe mean confidence minus accuracy, in percentage points: above 0 is overconfidence."""
    direction = "over" if gap_points > 0 else "under"
    return f"{direction}confident by {abs(gap_points):.1f} points on average"


def _describe_chance(null: NullBand, level: float) -> str:
    """Describe the null band; a level other than the default is mentioned."""
    cases = ""
    if level != MeasureSettings.level:
        cases = f" in {100 * level:g} % of cases"
    ends = f"{100 * null.low:.1f} to {100 * null.high:.1f}"
    return f"what a perfectly calibrated model would score by chance{cases} ({ends})"


def explain_missing_interval(summary: Summary) -> list[str]:
    """Explain each calibration metric whose interval was removed, because it did not contain the metric's own value.

    Returns:
        One sentence per metric, with the numbers to read instead of the interval.
    """
    gap = summary.gap
    gap_text = f"mean confidence minus accuracy {100 * gap.value:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    sentences = []
    for name, metric in summary.metrics.items():
        was_removed = metric.interval.reason is not None
        if not was_removed or metric.null is None:  # only calibration metrics have a null band
            continue
        instead = [f"by chance {100 * metric.null.low:.1f} to {100 * metric.null.high:.1f}"]
        if name != "debiased_ece":
            instead.append(f"debiased ECE {100 * summary.debiased_ece:.1f}")
        instead.append(gap_text)
        sentences.append(
            f"{METRICS[name].title} has no interval: resampling raises it, so the percentiles exclude its own value. "
            f"Instead: {', '.join(instead)}."
        )
    return sentences
