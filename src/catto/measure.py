"""Read one cell of anybody's row, or raise ValueError naming the field and what was expected.

How answers were read: inside their tags, in plain words, or forced out of the label set.

Read a file of anybody's confidences into columns.

What a row must tell: how sure the answer was, and whether it was right. Confidence is the column `confidence`, else the
probability of the answer in `label_logprobs` (label -> log-probability). Right is the column `correct`, else
`label == gold`, else that the top label of `label_logprobs` is `gold`. The first row decides; later rows must follow.

The numbers of one file of answers as data: each metric with its interval and null band, and what they say.
"""

from __future__ import annotations

import difflib
import reprlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from math import exp, inf, isfinite
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from catto.files import read_rows
from catto.metrics.binning import Bools, Floats, Ints
from catto.metrics.catalogue import METRICS, confidence_gap, debiased_ece
from catto.metrics.statistics import (
    Answers,
    Comparison,
    Interval,
    Method,
    MetricFunction,
    NullBand,
    bootstrap_table,
    compare,
    holm,
    mark,
    null_band,
)
from catto.problems import DataError

# ---- cells


Fields = Mapping[str, Any]

WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}


def logprobs_cell(fields: Fields) -> dict[str, float]:
    """Return `label_logprobs`: label -> log-probability, finite and at most 0 (float32 rounding of 1e-6 allowed)."""
    found = cell(fields, "label_logprobs")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"label_logprobs: expected an object label -> log-probability, got {reprlib.repr(found)}")
    for label, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and -inf < value <= 1e-6):  # a nan fails both
            raise ValueError(f"label_logprobs.{label}: expected a finite number <= 0, got {reprlib.repr(value)}")
    return found


def cell(fields: Fields, name: str) -> Any:
    """Return the field, which must be there; it may be null."""
    try:
        return fields[name]
    except KeyError:
        raise ValueError(f"{name}: missing") from None


def probability(name: str, value: object) -> float:
    """Return a number in [0, 1], also from its text."""
    number = _number(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}")
    if not 0 <= number <= 1:
        hint = "; divide percentages by 100" if 1 < number <= 100 else ""
        raise ValueError(f"{name}: expected a number in [0, 1], got {reprlib.repr(value)}{hint}")
    return float(number)


def _number(written: str) -> float | None:
    try:
        return float(written)
    except ValueError:
        return None


def truth(name: str, value: object) -> bool:
    """Return a boolean, also from 0, 1 and the words of a CSV file."""
    if isinstance(value, bool):
        return value
    found = WORDS.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if found is None:
        raise ValueError(f"{name}: expected true or false (or 1, 0, yes, no), got {reprlib.repr(value)}")
    return found


def text(fields: Fields, name: str) -> str:
    """Return the field as text; ids and labels may be written as numbers."""
    value = cell(fields, name)
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"{name}: expected a text or a number, got {reprlib.repr(value)}")
    return str(value)


def known_column(name: str, columns: Collection[str]) -> str:
    """Return the name of a column that is there, or raise with a suggestion."""
    if name not in columns:
        raise ValueError(f"no column {did_you_mean(name, columns)}")
    return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say what is unknown, what may have been meant, and what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"{name!r}{f', did you mean {close[0]!r}?' if close else ''} (there is {', '.join(names)})"


# ---- sources


# The values of `Prediction.source`.
KINDS = ("free", "plain", "fallback")
# Above this share of forced answers the numbers describe the fallback.
MOST_FORCED = 0.2


@dataclass(frozen=True)
class Sources:
    """How many answers were read where: free in their tags, plain without tags, fallback forced over the labels.

    >>> counts = Sources.of(["free"] * 3 + ["fallback"] * 17)
    >>> counts.warning
    '17 of 20 answers had to be forced: the numbers below describe the fallback, not the model.'
    """

    free: int = 0
    plain: int = 0
    fallback: int = 0

    @classmethod
    def of(cls, values: Iterable[str]) -> Sources:
        """Count the values of `source`."""
        found = Counter(values)
        return cls(found["free"], found["plain"], found["fallback"])

    @classmethod
    def total_of(cls, parts: Iterable[Sources]) -> Sources:
        """Add several counts up."""
        rows = list(parts)
        return cls(sum(one.free for one in rows), sum(one.plain for one in rows), sum(one.fallback for one in rows))

    @property
    def total(self) -> int:
        """All answers."""
        return self.free + self.plain + self.fallback

    def share(self, kind: str) -> float:
        """The share of one kind, 0 where there are no answers."""
        return float(getattr(self, kind)) / self.total if self.total else 0.0

    @property
    def forced(self) -> bool:
        """Whether more than a fifth of the answers had to be forced, so that no verdict on the model is given."""
        return self.share("fallback") > MOST_FORCED

    @property
    def warning(self) -> str | None:
        """What has to be said before any number where too many answers were forced."""
        return f"{self.counted}: the numbers below describe the fallback, not the model." if self.forced else None

    @property
    def counted(self) -> str:
        """`17 of 20 answers had to be forced`."""
        return f"{self.fallback:,} of {self.total:,} answers had to be forced"

    def told(self, note: str = "") -> str:
        """The shares that need to be known: `fallback 2.0 % (note)`, and `plain 4.0 %` where there are any."""
        plain = f", plain {100 * self.share('plain'):.1f} %" if self.plain else ""
        return f"fallback {100 * self.share('fallback'):.1f} %{f' ({note})' if note else ''}{plain}"


# ---- tables


Unparsed = Literal["fallback", "wrong"]
Read = Callable[[Fields], Any]

QUESTION_COLUMNS = ("question", "id")
# Stands where a row has fewer labels than others: at every temperature that a fit may reach its probability is 0.
NO_LABEL = -1e6
# Each slice is resampled a thousand times; a column of more values is an id, not a kind.
MOST_SLICES = 500


@dataclass(frozen=True)
class Names:
    """What the columns are called in the file; `by` is the column that cuts it into slices."""

    confidence: str = "confidence"
    correct: str = "correct"
    by: str | None = None


@dataclass(frozen=True)
class Confidences:
    """Answers as columns. confidence: (N,); question, by, read_as: N texts. None: the file does not tell.

    read_as: the column `source`, how each answer was read (`free`, `plain` or `fallback`).
    """

    source: Path
    confidence: Floats
    question: list[str] | None
    read_as: list[str] | None
    by: list[str] | None

    @property
    def fallback(self) -> Bools | None:
        """Which answers had to be forced. (N,)."""
        return None if self.read_as is None else np.array([kind == "fallback" for kind in self.read_as], dtype=np.bool_)

    @property
    def sources(self) -> Sources | None:
        """How many answers were read where."""
        return None if self.read_as is None else Sources.of(self.read_as)

    def __len__(self) -> int:
        return len(self.confidence)


@dataclass(frozen=True)
class Table(Confidences):
    """Answers of which it is known whether they were right. correct: (N,)."""

    correct: Bools

    def picked(self, rows: Ints) -> Self:
        """Return the given rows as a table of their own."""
        return replace(
            self,
            confidence=self.confidence[rows],
            correct=self.correct[rows],
            question=None if self.question is None else [self.question[row] for row in rows],
            read_as=None if self.read_as is None else [self.read_as[row] for row in rows],
            by=None if self.by is None else [self.by[row] for row in rows],
        )

    def slices(self) -> dict[str, Self]:
        """Return one table a value of the `by` column, values sorted."""
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(self.by or ()):
            rows.setdefault(value, []).append(row)
        if len(rows) > MOST_SLICES:
            raise DataError(self.source, None, f"--by: {len(rows):,} different values, expected at most {MOST_SLICES}")
        return {value: self.picked(np.array(rows[value], dtype=np.intp)) for value in sorted(rows)}

    def unparsed_wrong(self) -> Self:
        """Count every answer that came from the fallback as wrong."""
        fallback = self.fallback
        if fallback is None:
            raise DataError(
                self.source, None, "no column 'source' with 'free', 'plain' or 'fallback' to count unparsed rows by"
            )
        return replace(self, correct=self.correct & ~fallback)


def read_table(path: Path, names: Names | None = None, unparsed: Unparsed = "fallback") -> Table:
    """Read answers with their correctness; a bad row is one DataError naming the file, the row and the field."""
    table = read_confidences(path, names)
    if not isinstance(table, Table):
        wanted = (names or Names()).correct
        raise DataError(path, None, f"no column '{wanted}', nor 'label' and 'gold', nor 'label_logprobs' and 'gold'")
    return table.unparsed_wrong() if unparsed == "wrong" else table


def read_confidences(path: Path, names: Names | None = None) -> Confidences:
    """Read answers; the result is a Table where the rows tell which were right."""
    readers: dict[str, Read] = {}
    columns: dict[str, Any] = {"confidence": array("d"), "correct": array("b"), "question": [], "source": [], "by": []}
    steps: list[tuple[Callable[[Any], None], Read]] = []
    for row, fields in read_rows(path):
        try:
            if not steps:
                readers = _readers(fields, names or Names())
                steps = [(columns[name].append, read) for name, read in readers.items()]
            for append, read in steps:
                append(read(fields))
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
    if not steps:
        raise DataError(path, None, "holds no rows")
    return _table(path, {name: columns[name] for name in readers})


def _table(path: Path, columns: Mapping[str, Any]) -> Confidences:
    confidence = np.frombuffer(columns["confidence"], dtype=np.float64)
    common = (path, confidence, columns.get("question"), _read_as(columns.get("source")), columns.get("by"))
    if "correct" not in columns:
        return Confidences(*common)
    return Table(*common, np.frombuffer(columns["correct"], dtype=np.bool_))


def _read_as(source: list[str] | None) -> list[str] | None:
    """A foreign file may call something else `source`: the column is ours only if all its values are."""
    return source if source is not None and set(source) <= set(KINDS) else None


def _readers(first: Fields, names: Names) -> dict[str, Read]:
    """Decide from the first row how each column is read."""
    readers = {"confidence": _confidence_reader(first, names.confidence)}
    correct = _correct_reader(first, names.correct)
    if correct is not None:
        readers["correct"] = correct
    question = next((name for name in QUESTION_COLUMNS if name in first), None)
    if question is not None:
        readers["question"] = lambda fields: text(fields, question)
    if "source" in first:
        readers["source"] = lambda fields: str(fields.get("source"))
    if names.by is not None:
        by = known_column(names.by, first)
        readers["by"] = lambda fields: text(fields, by)
    return readers


def _confidence_reader(first: Fields, name: str) -> Read:
    if name == "confidence" and name not in first and "label_logprobs" in first:
        return _answer_probability
    known_column(name, first)
    return lambda fields: probability(name, cell(fields, name))


def _correct_reader(first: Fields, name: str) -> Read | None:
    if name in first:
        return lambda fields: truth(name, cell(fields, name))
    if name != "correct":
        known_column(name, first)
    if "gold" in first and ("label" in first or "label_logprobs" in first):
        return lambda fields: _answer(fields) == text(fields, "gold")
    return None


def _answer(fields: Fields) -> str | None:
    """The answer's label; None where nothing could be parsed, which is never right."""
    if "label" not in fields:
        logprobs = logprobs_cell(fields)
        return max(logprobs, key=logprobs.__getitem__)
    return None if fields["label"] is None else text(fields, "label")


def _answer_probability(fields: Fields) -> float:
    logprobs, answer = logprobs_cell(fields), _answer(fields)
    if answer not in logprobs:
        raise ValueError(f"label_logprobs: the answer {answer!r} is not one of {', '.join(logprobs)}")
    return exp(min(logprobs[answer], 0.0))


@dataclass(frozen=True)
class LabelTable:
    """Label log-probabilities as columns. logprobs: (N, K); answer, gold: (N,) columns of it; gold None: not told.

    Rows with fewer than K labels are filled up with labels of probability 0.
    """

    logprobs: Floats
    answer: Ints
    gold: Ints | None


def read_labels(path: Path) -> LabelTable:
    """Read the label log-probabilities of every row, with the place of the answer and of the gold label."""
    logprobs: list[list[float]] = []
    answer: list[int] = []
    gold: list[int] = []
    for row, fields in read_rows(path):
        try:
            found = logprobs_cell(fields)
            chosen = _answer(fields)
            answer.append(_place(found, max(found, key=found.__getitem__) if chosen is None else chosen, "label"))
            if "gold" in fields:
                gold.append(_place(found, text(fields, "gold"), "gold"))
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
        logprobs.append(list(found.values()))
    if not logprobs:
        raise DataError(path, None, "holds no rows")
    known = len(gold) == len(answer)
    return LabelTable(_filled(logprobs), np.array(answer), np.array(gold) if known else None)


def _place(logprobs: dict[str, float], label: str, field: str) -> int:
    if label not in logprobs:
        raise ValueError(f"{field}: {label!r} is not one of the labels {', '.join(logprobs)}")
    return list(logprobs).index(label)


def _filled(rows: list[list[float]]) -> Floats:
    width = max(len(row) for row in rows)
    return np.array([row + [NO_LABEL] * (width - len(row)) for row in rows], dtype=np.float64)


# ---- summary


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
