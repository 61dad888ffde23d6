"""What a finished experiment hands to its report: where every cell's predictions are, and how its model was trained.

The report's numbers as records: what `numbers.json` holds, for every cell and for every group of seeds.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from catto.files import first_problem, replacing
from catto.measure import Sources
from catto.methods import Budget, known, method
from catto.metrics.catalogue import METRICS
from catto.metrics.statistics import Comparison, Interval, NullBand, mark
from catto.problems import DataError
from catto.records import Record, checked_name
from catto.report import VERSION

# ---- results


class Training(Record):
    """How the model of a cell came to be. Seconds and tokens are those of its own stage, not of its start's."""

    learning_rate: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    rows: int | None = None  # SFT rows or pairs that it was trained on
    dropped: dict[str, int] = Field(default_factory=dict)  # rows, pairs, stream: too long for the context
    epochs: float | None = None
    steps: int | None = None
    kept_step: int | None = None  # the step whose weights were kept, and the epochs up to it
    kept_epochs: float | None = None
    reward_accuracy: float | None = None  # share of pairs ordered as preferred, over the last quarter of the steps
    history: tuple[dict[str, float], ...] = ()  # step, val_accuracy, val_ece, val_nll, ... at every checkpoint


class Cell(Record):
    """One method on one task at one seed. Paths are relative to the experiment's folder."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None  # None: the method is the same in both
    seed: int
    predictions: str  # one line a test question
    candidates: str | None = None  # k sampled lines a test question
    tau: float | None = None  # the temperature of scaling, or at which the candidates' confidences are compared
    sampling_temperature: float | None = None  # at which the candidates were drawn
    candidates_fallback_rate: float | None = None  # share of the candidates whose answer had to be forced
    training: Training | None = None

    @field_validator("task", "trained_on", "method")
    @classmethod
    def _named(cls, value: str, info: Any) -> str:
        """Tables and figures are files named for these."""
        return checked_name(value, info.field_name, plus=info.field_name == "method")


class Results(Record):
    """The whole experiment."""

    name: str
    recipe: dict[str, Any]
    recipe_hash: str
    versions: dict[str, str]
    commit: str | None = None
    cells: tuple[Cell, ...]
    questions: dict[str, tuple[str, ...]]  # task -> files of its test questions, one a seed


# ---- numbers


def finite(value: float) -> float | None:
    """Return the value, or None where it is undefined."""
    return float(value) if isfinite(value) else None


class Number(Record):
    """A value and its bootstrap interval; None where undefined, not computed, or withheld for the `reason`."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    @classmethod
    def of(cls, interval: Interval) -> Number:
        """Keep what a report shows of an interval: no ends that do not hold the value."""
        found = interval.held()
        return cls(value=finite(found.value), low=finite(found.low), high=finite(found.high), reason=found.reason)


class Band(Record):
    """What a perfectly calibrated model with the same confidences scores by chance."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, band: NullBand) -> Band:
        """Keep what a report shows of a null band."""
        return cls(mean=band.mean, low=band.low, high=band.high)


class Versus(Record):
    """A metric less DPO's on the same questions, its interval and the p-value of the swap test.

    low, high: None where they do not hold the difference. p_corrected: by Holm over the comparisons of one table; None
    where there is none, or where too many answers of either side were forced for a verdict.
    """

    difference: float
    low: float | None
    high: float | None
    p_value: float
    p_corrected: float | None = None

    @classmethod
    def of(cls, comparison: Comparison) -> Versus:
        """Keep what a report shows of a comparison."""
        found = comparison.held()
        return cls(difference=found.difference, low=finite(found.low), high=finite(found.high), p_value=found.p_value)

    def mark(self, metric: str) -> str:
        """`*` where better than DPO, a dagger where worse, nothing where neither is shown; see `statistics.mark`."""
        if self.low is None or self.high is None or self.p_corrected is None:
            return ""
        of = METRICS[metric]
        return mark(self.difference, (self.low, self.high), self.p_corrected, of.better, of.least)


class World(Record):
    """What only a known posterior tells. All in [0, 1].

    true_error: mean |confidence - posterior(answer)|. bayes_accuracy: share of questions whose most probable label is
    the gold one. regret: mean of the largest posterior probability less that of the answer given.
    """

    true_error: float
    bayes_accuracy: float
    regret: float


class Spread(Record):
    """Mean and standard deviation over seeds; no deviation of a single one."""

    mean: float
    std: float | None


class CellNumbers(Record):
    """One method on one task at one seed. `selection`: k -> rule -> accuracy; `sampled`: what is known of the samples.

    gap: mean confidence less accuracy. sources: how the answers were read.
    """

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int
    input: str
    n: int
    model: str
    metrics: dict[str, Number]
    gap: Number
    null: Band
    sources: Sources
    fallback_rate: float
    plain_rate: float
    accuracy_unparsed_wrong: float
    world: World | None
    selection: dict[int, dict[str, Number]]
    sampled: dict[str, float]


class GroupNumbers(Record):
    """One method on one task in one budget, over its seeds. `versus_seed`: seed -> metric -> difference to DPO."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seeds: tuple[int, ...]
    input: str
    n: int
    metrics: dict[str, Spread]
    intervals: dict[str, Number]
    gap: Number
    null: Band
    sources: Sources
    fallback_rate: Spread
    plain_rate: Spread
    accuracy_unparsed_wrong: Spread
    papers_budget: bool  # whether the paper's numbers may stand beside these
    versus: dict[str, Versus]
    versus_seed: dict[int, dict[str, Versus]]
    world: dict[str, Spread]
    selection: dict[int, dict[str, Spread]]
    sampled: dict[str, Spread]

    def named(self, name: str) -> Spread | None:
        """Look a number up by its name; None where the group does not have it."""
        unparsed = {
            "fallback_rate": self.fallback_rate,
            "plain_rate": self.plain_rate,
            "accuracy_unparsed_wrong": self.accuracy_unparsed_wrong,
        }
        return {**self.metrics, **self.world, **self.sampled, **unparsed}.get(name)

    @property
    def within_null(self) -> bool:
        """Whether the ECE lies at or below the upper end of the null band."""
        return self.metrics["ece"].mean <= self.null.high

    @property
    def title(self) -> str:
        """The method as tables print it."""
        return method(self.method).title if known(self.method) else self.method


class Numbers(Record):
    """Everything that the report prints."""

    version: int = VERSION
    level: float
    bins: int
    resamples: int
    cells: tuple[CellNumbers, ...]
    groups: tuple[GroupNumbers, ...]

    @property
    def budgets(self) -> tuple[Budget | None, ...]:
        """The budgets for which there are blocks, in the order of the groups."""
        return tuple(dict.fromkeys(group.budget for group in self.groups))


def write(numbers: Numbers, path: Path) -> None:
    """Write the numbers, whole or not at all."""
    with replacing(path) as file:
        file.write(numbers.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Numbers | None:
    """Read numbers written earlier; None where there are none, or of another version."""
    if not path.exists():
        return None
    try:
        text = path.read_bytes()
        if f'"version": {VERSION},'.encode() not in text[:200]:
            return None
        return Numbers.model_validate_json(text)
    except ValidationError as error:
        raise DataError(path, None, f"{first_problem(error)}; delete it to measure afresh") from None
