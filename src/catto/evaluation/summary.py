"""The numbers of one file of answers as data: each metric with its interval and null band, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from math import isfinite
from typing import Any

import numpy as np

from catto.evaluation.cells import did_you_mean
from catto.evaluation.metrics import METRICS, confidence_gap, debiased_ece
from catto.evaluation.resampling import MetricFunction
from catto.evaluation.sources import Sources
from catto.evaluation.statistics import (
    Answers,
    Comparison,
    Interval,
    Method,
    NullBand,
    bootstrap_table,
    compare,
    holm,
    mark,
    null_band,
)
from catto.evaluation.tables import Table
from catto.problems import DataError

__all__ = [
    "HEADLINE",
    "Judged",
    "Measured",
    "Settings",
    "Summary",
    "check_paired",
    "chosen",
    "compared",
    "jsonable",
    "judged",
    "steps",
    "summarise",
    "unheld",
    "verdict",
]

HEADLINE = (
    "accuracy",
    "mean_confidence",
    "ece",
    "debiased_ece",
    "smooth_ece",
    "brier",
    "nll",
    "auroc",
    "aurc",
)
RESAMPLES = 1000
# The gap's place among the resampled metrics; it has a row of its own whatever was chosen.
GAP = "gap"
# A resample of a million rows takes 0.2 s for the headline metrics; 200 of them still place the 2.5 % quantile.
MANY_ROWS, FEW_RESAMPLES = 200_000, 200

Tick = Callable[[], None]


@dataclass(frozen=True)
class Settings:
    """What is measured and how. resamples None: 1000, or 200 above 200,000 rows."""

    metrics: tuple[str, ...] = HEADLINE
    bins: int = 20
    resamples: int | None = None
    level: float = 0.95
    method: Method = "percentile"
    seed: int = 0

    def draws(self, rows: int) -> int:
        """The number of resamples for a file of so many rows."""
        return self.resamples or (RESAMPLES if rows <= MANY_ROWS else FEW_RESAMPLES)


@dataclass(frozen=True)
class Measured:
    """One metric: its value and interval, and for calibration metrics the null band."""

    interval: Interval
    null: NullBand | None


@dataclass(frozen=True)
class Summary:
    """All numbers of one table; shares lie in [0, 1]. sources, fallback_rate, accuracy_unparsed_wrong: None if unknown.

    gap: mean confidence less accuracy, whose interval is nominal where that of an ECE is not.
    """

    rows: int
    questions: int | None
    accuracy: float
    mean_confidence: float
    gap: Interval
    debiased_ece: float
    sources: Sources | None
    fallback_rate: float | None
    accuracy_unparsed_wrong: float | None
    settings: Settings
    metrics: dict[str, Measured]

    @property
    def warning(self) -> str | None:
        """What has to be said before any number: too many answers were forced."""
        return None if self.sources is None else self.sources.warning


def chosen(names: str | None) -> tuple[str, ...]:
    """Return the metrics of a comma-separated list; None means the headline ones, `all` all of them."""
    if names is None:
        return HEADLINE
    if names.strip() == "all":
        return tuple(METRICS)
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in METRICS:
            raise ValueError(f"unknown metric {did_you_mean(name, METRICS)}")
    if not found:
        raise ValueError(f"no metric named (there is {', '.join(METRICS)})")
    return tuple(dict.fromkeys(found))


def steps(settings: Settings, rows: int) -> int:
    """How often `summarise` ticks: the resamples, and as many simulations for each null band."""
    return settings.draws(rows) * (1 + sum(METRICS[name].calibration for name in settings.metrics))


def summarise(table: Table, settings: Settings | None = None, tick: Tick | None = None) -> Summary:
    """Measure a table. `tick` is called once a resample and once a simulation of a null band."""
    settings = settings or Settings()
    settings = replace(settings, resamples=settings.draws(len(table)))
    fallback = table.fallback
    metrics, gap = _measured(table, settings, tick)
    return Summary(
        rows=len(table),
        questions=None if table.question is None else len(set(table.question)),
        accuracy=float(table.correct.mean()),
        mean_confidence=float(table.confidence.mean()),
        gap=gap,
        debiased_ece=debiased_ece(table.confidence, table.correct, bins=settings.bins),
        sources=table.sources,
        fallback_rate=None if fallback is None else float(fallback.mean()),
        accuracy_unparsed_wrong=None if fallback is None else float((table.correct & ~fallback).mean()),
        settings=settings,
        metrics=metrics,
    )


def _measured(table: Table, settings: Settings, tick: Tick | None) -> tuple[dict[str, Measured], Interval]:
    """The chosen metrics, and the gap on the same resamples."""
    functions = _functions(settings, tick)
    intervals = bootstrap_table(
        {**functions, GAP: confidence_gap},
        table.confidence,
        table.correct,
        questions=_repeated(table),
        resamples=settings.draws(len(table)),
        level=settings.level,
        method=settings.method,
        seed=settings.seed,
    )
    gap = intervals.pop(GAP)
    return {name: Measured(intervals[name].held(), _null(name, settings, table, tick)) for name in functions}, gap


def _functions(settings: Settings, tick: Tick | None) -> dict[str, MetricFunction]:
    """The metrics with the bins filled in; the first one ticks, since all are called on every resample."""
    found = {name: _binned(name, settings.bins) for name in settings.metrics}
    first = settings.metrics[0]
    return found if tick is None else {**found, first: _ticking(found[first], tick)}


def _binned(name: str, bins: int) -> MetricFunction:
    function: Callable[..., float] = METRICS[name].function
    return partial(function, bins=bins) if "bins" in signature(function).parameters else function


def _ticking(function: MetricFunction, tick: Tick) -> MetricFunction:
    def ticking(confidence: Any, correct: Any) -> float:
        tick()
        return function(confidence, correct)

    return ticking


def _repeated(table: Table) -> list[str] | None:
    """The question ids where some repeat; where none does, rows are questions and drawing rows is faster."""
    if table.question is None or len(set(table.question)) == len(table):
        return None
    return table.question


def _null(name: str, settings: Settings, table: Table, tick: Tick | None) -> NullBand | None:
    if not METRICS[name].calibration:
        return None
    function = _binned(name, settings.bins)
    simulations = settings.draws(len(table))
    return null_band(
        function if tick is None else _ticking(function, tick),
        table.confidence,
        simulations=simulations,
        level=settings.level,
        seed=settings.seed,
    )


def verdict(summary: Summary) -> str | None:
    """Say in one sentence what the ECE means; None where it was not measured, or too many answers were forced."""
    ece = summary.metrics.get("ece")
    if ece is None or ece.null is None or summary.warning is not None:
        return None
    value, low, high = (100 * number for number in (ece.interval.value, ece.null.low, ece.null.high))
    chance = f"what a perfectly calibrated model would score by chance ({low:.1f} to {high:.1f})"
    if value > high:
        return f"ECE {value:.1f} lies above {chance}: {_direction(summary, ece.interval.value)}."
    if value < low:
        return f"ECE {value:.1f} lies below {chance}, as after fitting a calibrator to these very rows."
    return f"ECE {value:.1f} lies within {chance}: no miscalibration shows in {summary.rows:,} answers."


def _direction(summary: Summary, ece: float) -> str:
    """|mean confidence - accuracy| <= ECE; where it is less than half, bins of both signs cancel."""
    gap = summary.mean_confidence - summary.accuracy
    if abs(gap) < ece / 2:
        return f"too sure in some bins and not sure enough in others, {100 * gap:+.1f} points on average"
    return f"{'over' if gap > 0 else 'under'}-confident by {100 * abs(gap):.1f} points on average"


def unheld(summary: Summary) -> list[str]:
    """For each calibration metric whose interval is withheld: what to read in its place, in one sentence."""
    gap = summary.gap
    instead = (
        f"debiased ECE {100 * summary.debiased_ece:.1f}, mean confidence less accuracy {100 * gap.value:+.1f} "
        f"({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    )
    return [
        f"{METRICS[name].title} has no interval: resampling adds to it, and its percentiles do not hold its value. "
        f"In its place: by chance {100 * found.null.low:.1f} to {100 * found.null.high:.1f}, {instead}."
        for name, found in summary.metrics.items()
        if found.interval.reason is not None and found.null is not None
    ]


@dataclass(frozen=True)
class Judged:
    """A comparison with its p-value corrected for the number of metrics compared, and the mark that it earns."""

    comparison: Comparison
    p_corrected: float
    mark: str


def judged(comparison: Mapping[str, Comparison], judge: bool = True) -> dict[str, Judged]:
    """Correct the p-values by Holm over the metrics that have a better side; the others are not compared to win.

    `judge` False, for files of mostly forced answers, gives no marks.
    """
    family = [name for name in comparison if METRICS[name].better is not None]
    corrected = dict(zip(family, holm([comparison[name].p_value for name in family]), strict=True))
    return {
        name: Judged(one, p := corrected.get(name, float("nan")), _mark(name, one, p) if judge else "")
        for name, one in comparison.items()
    }


def _mark(name: str, found: Comparison, corrected: float) -> str:
    metric = METRICS[name]
    return mark(found.difference, (found.low, found.high), corrected, metric.better, metric.least)


def compared(a: Table, b: Table, settings: Settings | None = None, tick: Tick | None = None) -> dict[str, Comparison]:
    """Compare two tables of one answer a question, paired by question id, metric by metric."""
    settings = settings or Settings()
    answers = check_paired(a, b)
    return {
        name: compare(
            function if tick is None else _ticking(function, tick),
            *answers,
            resamples=settings.draws(len(a)),
            level=settings.level,
            seed=settings.seed,
        ).held()
        for name, function in _functions(settings, None).items()
    }


def check_paired(a: Table, b: Table) -> tuple[Answers, Answers]:
    """Return both as answers by question, or raise a DataError where they do not answer the same questions once."""
    answers = _answers(a), _answers(b)
    _same_questions(a, b)
    _same_questions(b, a)
    return answers


def _answers(table: Table) -> Answers:
    if table.question is None:
        raise DataError(table.source, None, "no column 'question' or 'id' to pair the answers by")
    seen: set[str] = set()
    for question in table.question:
        if question in seen:
            raise DataError(table.source, None, f"question {question!r} stands in several rows; pairing needs one")
        seen.add(question)
    return Answers(table.question, table.confidence, table.correct)


def _same_questions(here: Table, there: Table) -> None:
    known = set(there.question or ())
    missing = [question for question in here.question or () if question not in known]
    if missing:
        raise DataError(
            there.source, None, f"{len(missing)} questions of {here.source} are missing, first {missing[0]!r}"
        )


def jsonable(value: Any) -> Any:
    """Return dataclasses and arrays as JSON values; a number that is not finite becomes null."""
    if hasattr(value, "__dataclass_fields__"):
        return jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else None
    return value
