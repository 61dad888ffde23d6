"""Measure a file of confidences: read it into columns, then compute each metric with its interval and null band.

A row holds how confident the answer was and whether it was right. Confidence is the column `confidence`, else the
probability of the answer in `label_logprobs` (label -> log-probability). Right is the column `correct`, else
`label == gold`, else that the top label of `label_logprobs` is `gold`. The first row decides; later rows must follow.
`ColumnNames` names other columns; logs of other tools are brought into this form by `catto.logs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic_core import to_jsonable_python

from catto import plain_table
from catto.logs import ColumnNames, Fields, format_of, read_answers
from catto.metrics import statistics
from catto.metrics.binning import Bools, Floats
from catto.metrics.catalogue import HEADLINE, METRICS
from catto.metrics.errors import confidence_gap, debiased_ece
from catto.metrics.statistics import (
    Answers,
    Comparison,
    Interval,
    MetricFunction,
    NullBand,
    Tick,
    drop_invalid_interval,
)
from catto.plain_table import ANSWER, ANSWER_PROBABILITY, PROBABILITY, SOURCE, TEXT, TRUTH, Reader
from catto.problems import DataError, did_you_mean, listed, locating, nested
from catto.recipe import FEW_QUESTIONS

Unparsed = Literal["fallback", "wrong"]

# What names the question of a row, in this order: `id` may number the rows.
QUESTION_COLUMNS = ("question", "question_id", "qid", "doc_id", "id")
# Each slice is resampled a thousand times; a column of more values is an id, not a kind.
MOST_SLICES = 500
# A probability of one label of two is recognised where so many lie on either side of a half.
FEW_LOW = 5
# With so many answers per label, of which none ever equals a right one, labels are written in two ways.
MANY_ALIKE = 15
# Above this share of forced answers the numbers describe the fallback.
MOST_FORCED = 0.2
# Questions, labels and slices are held whole; a packed file of a few megabytes may hold gigabytes of them.
MAX_TEXT = 2**30
jsonable = partial(to_jsonable_python, inf_nan_mode="null")
# Mean confidence minus accuracy; it has a row of its own, whichever metrics are chosen.
GAP = "gap"
# 200 resamples still place the 2.5 % quantile.
RESAMPLES, FEW_RESAMPLES, MANY_ROWS = 1000, 200, 200_000


@dataclass(frozen=True)
class Sources:
    """How answers were read: free in their tags, plain without tags, fallback forced out of the label set.

    >>> Sources.of(["free"] * 3 + ["fallback"] * 17).warning
    '17 of 20 answers had to be forced: the numbers below describe the fallback, not the model.'
    """

    free: int = 0
    plain: int = 0
    fallback: int = 0

    @classmethod
    def of(cls, values: Iterable[str]) -> Sources:
        """Count the values of `Prediction.source`."""
        counts = Counter(values)
        return cls(counts["free"], counts["plain"], counts["fallback"])

    @classmethod
    def total_of(cls, parts: Iterable[Sources]) -> Sources:
        """Add up several counts."""
        rows = [(part.free, part.plain, part.fallback) for part in parts]
        return cls(*(sum(column) for column in zip(*rows, strict=True)))

    @property
    def total(self) -> int:
        """All answers."""
        return self.free + self.plain + self.fallback

    def share(self, kind: Literal["free", "plain", "fallback"]) -> float:
        """The share of one kind, 0 where there are no answers."""
        return float(getattr(self, kind)) / self.total if self.total else 0.0

    @property
    def forced(self) -> bool:
        """Whether more than a fifth of the answers had to be forced, so that no verdict on the model is given."""
        return self.share("fallback") > MOST_FORCED

    @property
    def counted(self) -> str:
        """`17 of 20 answers had to be forced`."""
        return f"{self.fallback:,} of {self.total:,} answers had to be forced"

    @property
    def warning(self) -> str | None:
        """What is printed before any number where too many answers were forced."""
        return f"{self.counted}: the numbers below describe the fallback, not the model." if self.forced else None

    def told(self, note: str = "") -> str:
        """The shares as text: `fallback 2.0 % (note)`, and `plain 4.0 %` where there are any."""
        plain = f", plain {100 * self.share('plain'):.1f} %" if self.plain else ""
        return f"fallback {100 * self.share('fallback'):.1f} %{f' ({note})' if note else ''}{plain}"


@dataclass(frozen=True)
class Confidences:
    """Answers as columns. confidence: (N,); question, by, read_as: N texts, or None where the file has none.

    read_as: the column `source`, how each answer was read (`free`, `plain` or `fallback`).
    """

    source: Path
    confidence: Floats
    question: list[str] | None
    read_as: list[str] | None
    by: list[str] | None

    @property
    def sources(self) -> Sources | None:
        """How many answers were read in which way."""
        return None if self.read_as is None else Sources.of(self.read_as)

    def __len__(self) -> int:
        return len(self.confidence)


@dataclass(frozen=True)
class GradedAnswers(Confidences):
    """Answers of which it is known whether they were right. correct: (N,)."""

    correct: Bools

    @cached_property
    def questions(self) -> int | None:
        """How many questions there are."""
        return None if self.question is None else len(set(self.question))

    @property
    def by_question(self) -> Answers:
        """The columns to resample, or to compare with another file's."""
        return Answers(self.question, self.confidence, self.correct, self.source)

    @property
    def run(self) -> Answers:
        """The columns to resample. Where no question repeats, rows are questions, and drawing rows is faster."""
        return replace(self.by_question, question=None) if self.questions == len(self) else self.by_question

    def slices(self) -> dict[str, Self]:
        """Return the answers of each value of the `by` column, in their order: numbers as numbers, others as text."""
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(self.by or ()):
            rows.setdefault(value, []).append(row)
        if len(rows) > MOST_SLICES:
            raise DataError(self.source, None, f"--by: {len(rows):,} different values, expected at most {MOST_SLICES}")
        try:
            values = sorted(rows, key=float)
        except ValueError:
            values = sorted(rows)
        texts, slices = {"question": self.question, "read_as": self.read_as, "by": self.by}, {}
        for value in values:
            mine = rows[value]
            picked: Any = {name: column and [column[row] for row in mine] for name, column in texts.items()}
            slices[value] = replace(self, confidence=self.confidence[mine], correct=self.correct[mine], **picked)
        return slices

    def unparsed_wrong(self) -> Self:
        """Count every answer that came from the fallback as wrong."""
        if self.read_as is None:
            missing = "no column 'source' with 'free', 'plain' or 'fallback' to count unparsed rows by"
            raise DataError(self.source, None, missing)
        parsed = np.array([kind != "fallback" for kind in self.read_as], dtype=np.bool_)
        return replace(self, correct=self.correct & parsed)


def read_graded(path: Path, names: ColumnNames | None = None, unparsed: Unparsed = "fallback") -> GradedAnswers:
    """Read answers with their correctness; a bad row is one DataError naming the file, the row and the field."""
    answers = read_confidences(path, names)
    if not isinstance(answers, GradedAnswers):
        wanted = (names or ColumnNames()).correct
        raise DataError(path, None, f"no column '{wanted}', nor 'label' and 'gold', nor 'label_logprobs' and 'gold'")
    return answers.unparsed_wrong() if unparsed == "wrong" else answers


def read_confidences(path: Path, names: ColumnNames | None = None) -> Confidences:
    """Read answers; the result is GradedAnswers where the rows say which were right."""
    names = names or ColumnNames()
    options = {"correct": names.correct != "correct", "positive": names.positive, "prediction": names.prediction}
    if len(given := [f"--{option}" for option, value in options.items() if value]) > 1:
        raise DataError(path, None, f"{' and '.join(given)}: each says which answers are right, give one of them")
    columns = _columns(path, names)
    read_as = columns.get("source")
    if read_as is not None and not set(read_as) <= {"free", "plain", "fallback"}:
        if "fallback" in read_as and {*read_as} <= {"free", "plain", "fallback", "None"}:
            raise DataError(path, None, "source: expected free, plain or fallback in every row")
        read_as = None  # another kind of file that calls something else `source`
    confidence = np.array(columns["confidence"], dtype=np.float64)
    correct = np.array(columns["correct"], dtype=np.bool_) if "correct" in columns else None
    if "gold" in columns:
        with locating(path):
            confidence, correct = _graded(confidence, columns["gold"], columns.get("answer"), names)
    common = (path, confidence, columns.get("question"), read_as, columns.get("by"))
    return Confidences(*common) if correct is None else GradedAnswers(*common, correct)


def _columns(path: Path, names: ColumnNames) -> dict[str, Any]:
    """Read the columns of a plain table at once; else, or where a cell is bad, row by row, which names the row."""
    if (table := plain_table.read_plain(path)) is not None:
        [first] = table.slice(0, 1).to_pylist()
        with suppress(ValueError):
            whole = plain_table.columns_of(table, _readers(first, names))
            if whole is not None and format_of(first, names) == "catto":
                return whole
    columns: dict[str, list[Any]] = {}
    steps: list[tuple[Callable[[Any], None], Callable[[str, Fields], Any], str]] = []
    characters = 0
    for row, fields in read_answers(path, names):
        try:
            if not steps:
                readers = _readers(fields, names)
                columns = {name: [] for name in readers}
                steps = [(columns[name].append, kind.cell, source) for name, (kind, source) in readers.items()]
            for append, read, source in steps:
                value = read(source, fields)
                append(value)
                if isinstance(value, str):
                    characters += len(value)
            if characters > MAX_TEXT:
                raise ValueError(f"the texts of its columns have more than {MAX_TEXT:,} characters")
        except ValueError as error:
            raise DataError(path, row, str(error)) from None
    if not steps:
        raise DataError(path, None, "holds no rows")
    return columns


def _readers(first: Fields, names: ColumnNames) -> dict[str, tuple[Reader, str]]:
    """Decide from the first row how each column is read, and from which field."""

    def there(name: str, hint: str = "") -> str:
        try:
            nested(first, name)
        except ValueError:
            columns = f"{did_you_mean(name, first)} (columns: {', '.join(first)})"
            raise ValueError(f"no column {name!r}{hint}{columns}") from None
        return name

    readers: dict[str, tuple[Reader, str]] = {}
    if names.confidence == "confidence" and "confidence" not in first and "label_logprobs" in first:
        readers["confidence"] = ANSWER_PROBABILITY, names.prediction or "label"
    else:
        readers["confidence"] = PROBABILITY, there(names.confidence)
    prediction, gold = names.prediction or "label", names.gold or "gold"
    named = (names.prediction, names.gold, names.positive) != (None, None, None)
    if names.correct != "correct" or ("correct" in first and not named):
        readers["correct"] = TRUTH, there(names.correct)
    elif named or ("gold" in first and ("label" in first or "label_logprobs" in first)):
        readers["gold"] = TEXT, there(gold)
        if names.positive is None:
            if prediction != "label" or "label_logprobs" not in first:
                there(prediction, f" to compare with {gold!r}: name it with --prediction, or with --positive the label "
                f"whose probability {names.confidence!r} is")  # fmt: skip
            readers["answer"] = ANSWER, prediction
    question = names.question or next((name for name in QUESTION_COLUMNS if name in first), None)
    if question is not None:
        readers["question"] = TEXT, there(question)
    if "source" in first:
        readers["source"] = SOURCE, "source"
    if names.by is not None:
        readers["by"] = TEXT, there(names.by)
    return readers


def _graded(
    confidence: Floats, gold: list[str], answer: list[str | None] | None, names: ColumnNames
) -> tuple[Floats, Bools]:
    """Compare answers with the right ones; return confidence and correctness. (N,), (N,).

    With `positive` the confidence given is that label's probability: the answer is the likelier label. Without it, a
    column that is below a half for one label of two and above for the other is refused: it is such a probability.
    """
    if answer is None:
        labels = sorted(set(gold))
        if len({*labels, names.positive}) > 2:
            expected = f"expected one of two labels in {names.gold or 'gold'!r}, got {listed(labels)}"
            raise ValueError(f"--positive {names.positive}: {expected}")
        said = confidence >= 0.5
        right = np.array([label == names.positive for label in gold], dtype=np.bool_)
        return np.where(said, confidence, 1.0 - confidence), said == right
    given, wanted = {*answer} - {None}, {*gold}
    if len(given) > 1 and 1 < len(wanted) <= len(gold) / MANY_ALIKE and not given & wanted:
        told = ", the right ones are ".join(listed(sorted(map(str, labels)), 4) for labels in (given, wanted))
        raise ValueError(
            f"no answer ever equals a right one, so labels seem to be written in two ways: the answers are {told}"
        )
    low = confidence < 0.5
    sides = [{label for label, is_low in zip(answer, low, strict=True) if is_low == side} for side in (False, True)]
    if [len(side) for side in sides] == [1, 1] and sides[0] != sides[1] and min(low.sum(), (~low).sum()) >= FEW_LOW:
        above, below = (next(iter(side)) for side in sides)
        raise ValueError(
            f"{names.confidence}: below 0.5 exactly where the answer is {below!r}, so it looks like the probability of "
            f"{above!r} and not of the answer; if it is, say --positive {above}"
        )
    return confidence, np.array([label == right for label, right in zip(answer, gold, strict=True)], dtype=np.bool_)


@dataclass(frozen=True)
class MeasureSettings:
    """What is measured and how. resamples None: 1000, or 200 above 200,000 rows."""

    metrics: tuple[str, ...] = HEADLINE
    bins: int = 20
    resamples: int | None = None
    level: float = 0.95
    method: statistics.Method = "percentile"
    seed: int = 0

    def draws(self, rows: int) -> int:
        """The number of resamples for so many rows."""
        return self.resamples or (RESAMPLES if rows <= MANY_ROWS else FEW_RESAMPLES)

    def options(self, runs: Sequence[Answers], tick: Tick) -> statistics.BootstrapOptions:
        """How these runs are resampled."""
        resamples = self.draws(max(np.size(run.confidence) for run in runs))
        return {"resamples": resamples, "level": self.level, "seed": self.seed, "tick": tick}

    def steps(self, rows: int) -> int:
        """How often `measure_runs` ticks for a run of so many rows: the resamples, and as many simulations."""
        return self.draws(rows) * (1 + any(METRICS[name].calibration for name in self.metrics))

    def functions(self) -> dict[str, MetricFunction]:
        """The metrics with the bins filled in."""
        known: dict[str, MetricFunction] = {name: metric.function for name, metric in METRICS.items()}
        known[GAP] = confidence_gap
        binned = {name for name in self.metrics if "bins" in signature(known[name]).parameters}
        return {name: partial(known[name], bins=self.bins) if name in binned else known[name] for name in self.metrics}


@dataclass(frozen=True)
class MetricResult:
    """One metric: its value and interval, and for calibration metrics the null band."""

    interval: Interval
    null: NullBand | None


def measure_runs(
    runs: Sequence[Answers], settings: MeasureSettings, tick: Tick = lambda: None
) -> dict[str, MetricResult]:
    """Measure the metrics of one run of a model, or their mean over several; `gap` may be among their names.

    Intervals that do not hold their value are removed, see `drop_invalid_interval`.

    >>> run = Answers(None, [0.9, 0.8, 0.3], [True, True, False])
    >>> measure_runs([run], MeasureSettings(("accuracy", "gap"), resamples=100))["accuracy"].interval.value
    0.6666666666666666
    """
    functions, options = settings.functions(), settings.options(runs, tick)
    intervals = statistics.bootstrap_table(functions, runs, method=settings.method, **options)
    calibration = {name: function for name, function in functions.items() if name != GAP and METRICS[name].calibration}
    bands = statistics.null_table(calibration, runs, **options) if calibration else {}
    return {
        name: MetricResult(interval if name == GAP else drop_invalid_interval(interval), bands.get(name))
        for name, interval in intervals.items()
    }


def compare_runs(
    a: Sequence[Answers], b: Sequence[Answers], settings: MeasureSettings, swaps: int = 0, tick: Tick = lambda: None
) -> dict[str, Comparison]:
    """Compare two methods run by run on the same questions, metric by metric; see `compare_table`."""
    comparisons = statistics.compare_table(settings.functions(), a, b, swaps=swaps, **settings.options(a, tick))
    return {name: drop_invalid_interval(comparison) for name, comparison in comparisons.items()}


@dataclass(frozen=True)
class Summary:
    """All numbers of one file; shares lie in [0, 1]. sources, fallback_rate, accuracy_unparsed_wrong: None if unknown.

    gap: mean confidence minus accuracy, whose interval is nominal where that of an ECE is not.
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
    settings: MeasureSettings
    metrics: dict[str, MetricResult]

    @property
    def warning(self) -> str | None:
        """What is printed before any number: too many answers were forced."""
        return None if self.sources is None else self.sources.warning


def summarise(answers: GradedAnswers, settings: MeasureSettings | None = None, tick: Tick = lambda: None) -> Summary:
    """Measure a file. `tick` is called `settings.steps(rows)` times."""
    settings = settings or MeasureSettings()
    settings = replace(settings, resamples=settings.draws(len(answers)))
    metrics = measure_runs([answers.run], replace(settings, metrics=(*settings.metrics, GAP)), tick)
    sources = answers.sources
    return Summary(
        rows=len(answers),
        questions=answers.questions,
        accuracy=float(answers.correct.mean()),
        mean_confidence=float(answers.confidence.mean()),
        gap=metrics.pop(GAP).interval,
        debiased_ece=debiased_ece(answers.confidence, answers.correct, bins=settings.bins),
        sources=sources,
        fallback_rate=None if sources is None else sources.share("fallback"),
        accuracy_unparsed_wrong=None if sources is None else float(answers.unparsed_wrong().correct.mean()),
        settings=settings,
        metrics=metrics,
    )


def shows_gap(gap: Interval, accuracy: float, questions: int) -> bool:
    """Whether the mean confidence is measurably off, which one mean may show where the noise of many bins hides it.

    The interval is too narrow of few questions, and of answers that are all right or all wrong: their accuracy does not
    vary between resamples.
    """
    return questions >= FEW_QUESTIONS and 0 < accuracy < 1 and not gap.low <= 0 <= gap.high


def verdict(summary: Summary) -> str | None:
    """Say in one sentence what the ECE means; None where it was not measured, or too many answers were forced."""
    ece = summary.metrics.get("ece")
    if ece is None or ece.null is None or summary.warning is not None:
        return None
    value, low, high = (100 * number for number in (ece.interval.value, ece.null.low, ece.null.high))
    level = (
        "" if summary.settings.level == MeasureSettings.level else f" in {100 * summary.settings.level:g} % of cases"
    )
    chance = f"what a perfectly calibrated model would score by chance{level} ({low:.1f} to {high:.1f})"
    if value < low:
        return f"ECE {value:.1f} lies below {chance}, as after fitting a calibrator to these very rows."
    gap, ends = 100 * summary.gap.value, f"{100 * summary.gap.low:+.1f} to {100 * summary.gap.high:+.1f}"
    confident = f"{'over' if gap > 0 else 'under'}-confident by {abs(gap):.1f} points on average"
    if value > high:  # |mean confidence - accuracy| <= ECE; where it is less than half, bins of both signs cancel
        mixed = f"too sure in some bins and not sure enough in others, {gap:+.1f} points on average"
        return f"ECE {value:.1f} lies above {chance}: {mixed if abs(gap) < value / 2 else confident}."
    if shows_gap(summary.gap, summary.accuracy, summary.questions or summary.rows):
        return f"ECE {value:.1f} lies within {chance}, but the answers are {confident} ({ends})."
    return f"ECE {value:.1f} lies within {chance}: no miscalibration shows in {summary.rows:,} answers."


def unheld(summary: Summary) -> list[str]:
    """For each calibration metric whose interval was removed: what to read in its place, in one sentence."""
    gap = summary.gap
    shift = f"mean confidence minus accuracy {100 * gap.value:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
    debiased = f"debiased ECE {100 * summary.debiased_ece:.1f}, "
    return [
        f"{METRICS[name].title} has no interval: resampling raises it, so the percentiles exclude its own value. "
        f"Instead: by chance {100 * metric.null.low:.1f} to {100 * metric.null.high:.1f}, "
        f"{debiased if name != 'debiased_ece' else ''}{shift}."
        for name, metric in summary.metrics.items()
        if metric.interval.reason is not None and metric.null is not None
    ]
