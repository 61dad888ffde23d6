"""The records of a report: what a finished experiment hands to it (`Results`), and what it measures (`Numbers`).

`numbers.json` holds the fields of intervals, null bands and comparisons that a report shows. A number that is undefined
is null there and nan in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError

from catto.measure import Sources, shows_gap
from catto.methods import Budget
from catto.metrics.calibrators import VectorScaling
from catto.metrics.catalogue import Versus
from catto.metrics.statistics import Interval, NullBand, SeedSummary
from catto.problems import DataError, first_problem
from catto.recipe import EvaluationSettings
from catto.records import Record, checked_name
from catto.report import VERSION


def supported_decimals(n: int) -> int:
    """Return how many decimals of a per cent n questions support: the last digit is worth at least one question.

    >>> [supported_decimals(n) for n in (400, 1000, 20_000)]
    [0, 1, 2]
    """
    return min(max(len(str(n)) - 3, 0), 2)


class Training(Record):
    """How the model of a cell was trained. Seconds and tokens are those of its own stage, not of its start's."""

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
    history: tuple[dict[str, float], ...] = ()  # step, val_accuracy, val_ece, ..., reward_margin at every checkpoint


class Place(Record):
    """One method on one task."""

    # Tables and figures are files named for these.
    task: Annotated[str, AfterValidator(partial(checked_name, what="task"))]
    trained_on: Annotated[str, AfterValidator(partial(checked_name, what="trained_on"))]
    method: Annotated[str, AfterValidator(partial(checked_name, what="method", plus=True))]
    budget: Budget | None  # None: the method is the same in both

    @property
    def setting(self) -> Literal["in", "out"]:
        """In distribution: tested on the task that it was trained on."""
        return "in" if self.task == self.trained_on else "out"

    @property
    def stem(self) -> str:
        """The part of a file's name that says what was tested, and what it was trained on where that is another."""
        return self.task if self.setting == "in" else f"{self.task}-from-{self.trained_on}"


class Cell(Place):
    """One method on one task at one seed. Paths are relative to the experiment's folder."""

    seed: int
    predictions: str  # one line for each test question
    candidates: str | None = None  # k sampled lines for each test question
    validation: str | None = None  # greedy predictions on the validation questions of the task
    preference: str | None = None  # margins of held-out pairs, of a model that has a start to compare with
    tau: float | None = None  # the temperature of scaling, or at which the candidates' confidences are compared
    vector: VectorScaling | None = None  # of vector scaling
    sampling_temperature: float | None = None  # at which the candidates were drawn
    candidates_fallback_rate: float | None = None  # share of the candidates whose answer had to be forced
    training: Training | None = None


class Results(Record):
    """The whole experiment."""

    name: str
    recipe: dict[str, Any]
    recipe_hash: str
    versions: dict[str, str]
    commit: str | None = None
    cells: tuple[Cell, ...] = Field(min_length=1)
    questions: dict[str, tuple[str, ...]]  # task -> files of its test questions, one for each seed

    @property
    def evaluation(self) -> EvaluationSettings:
        """The evaluation block of the recipe; what it leaves out is the default."""
        return EvaluationSettings.model_validate(self.recipe.get("evaluation") or {})


# The fields of the statistics that numbers.json does not hold.
NOT_STORED = {"level": nan, "a": nan, "b": nan, "n": 0}


def _stored(kind: type[Any], names: str) -> tuple[BeforeValidator, PlainSerializer]:
    """Read and write the named fields of a statistic; those that are not stored get a value that says nothing."""
    others = {field.name: NOT_STORED[field.name] for field in fields(kind) if field.name in NOT_STORED}

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        nullable = ("reason", "std")
        return others | {key: nan if item is None and key not in nullable else item for key, item in value.items()}

    def written(value: object) -> dict[str, Any]:
        shown = {name: getattr(value, name) for name in names.split()}
        return {name: None if isinstance(item, float) and not isfinite(item) else item for name, item in shown.items()}

    return BeforeValidator(read), PlainSerializer(written)


Number = Annotated[Interval, *_stored(Interval, "value low high reason")]
Band = Annotated[NullBand, *_stored(NullBand, "mean low high")]
Spread = Annotated[SeedSummary, *_stored(SeedSummary, "mean std")]
Difference = Annotated[Versus, *_stored(Versus, "difference low high p_value p_corrected")]


class MeasuredPlace(Place):
    """What one seed and a group of seeds have in common.

    input: hash of everything that was read. gap: mean confidence minus accuracy. sources: how the answers were read.
    """

    input: str
    n: int
    gap: Number
    null: Band
    sources: Sources


class CellNumbers(MeasuredPlace):
    """One method on one task at one seed.

    metrics: also preference_accuracy and preference_accuracy_reasoning, where held-out pairs were scored; their number
    is preference_pairs among the others. selection: k -> rule -> accuracy. others: numbers without an interval, by the
    names that the page defines. Where the posterior is known: true_error, bayes_accuracy, regret; how answers were
    read: fallback_rate, plain_rate, accuracy_unparsed_wrong; of sampled answers: auroc_within, ...; risk_*: the
    threshold that keeps the risk, fitted on validation, and its effect.
    """

    seed: int
    model: str
    metrics: dict[str, Number]
    selection: dict[int, dict[str, Number]]
    others: dict[str, float]


class GroupNumbers(MeasuredPlace):
    """One method on one task in one budget, over its seeds. versus, versus_seed: metric -> difference to DPO."""

    seeds: tuple[int, ...]
    metrics: dict[str, Spread]
    intervals: dict[str, Number]
    papers_budget: bool  # whether the paper's numbers may be printed beside these
    versus: dict[str, Difference]
    versus_seed: dict[int, dict[str, Difference]]
    selection: dict[int, dict[str, Spread]]
    others: dict[str, Spread]

    def holds(self, cell: Place) -> bool:
        """Return whether a cell is one of this group's seeds; a cell without a budget is in the groups of both."""
        mine, its = ((place.task, place.trained_on, place.method) for place in (self, cell))
        return mine == its and cell.budget in (None, self.budget)

    @property
    def within_null(self) -> bool:
        """Whether the ECE lies at or below the upper end of the null band."""
        return self.metrics["ece"].mean <= self.null.high

    @property
    def shown_gap(self) -> float:
        """The gap of a group that is measurably miscalibrated; nan where bins of both signs cancel, 0 of any other.

        An ECE within its null band is outweighed by a gap that shows.
        """
        gap = self.gap
        if self.within_null:
            return gap.value if shows_gap(gap, self.metrics["accuracy"].mean, self.n) else 0.0
        return gap.value if abs(gap.value) >= self.metrics["ece"].mean / 2 else nan

    def number(self, name: str) -> Spread | None:
        """Look a number up by its name; None where the group does not have it."""
        return self.metrics.get(name) or self.others.get(name)


class Verdict(Record):
    """Whose confidence is best, by the strongest evidence: the true error if every posterior is known, or else Brier.

    losses: method -> mean over tasks and seeds, lowest first; methods with forced answers are not judged. behind: how
    far the others are behind the first, with p-values corrected for all pairs of methods. n: questions of a task.
    """

    input: str
    metric: Literal["true_error", "brier"]
    n: int
    losses: dict[str, float]
    behind: dict[str, Difference]

    @property
    def leaders(self) -> list[str]:
        """The first method, and those that cannot be told apart from it."""
        worse = [name for name, difference in self.behind.items() if difference.mark(self.metric)]
        return [name for name in self.losses if name not in worse]


class Numbers(Record):
    """Everything that the report prints.

    verdict: on the groups that the first screen shows; None of fewer than two, and where there is only a Brier score of
    answers that are all right, or all wrong: it is best for whoever is surest, or least sure, whatever the question.
    """

    version: int = VERSION
    level: float
    bins: int
    resamples: int
    cells: tuple[CellNumbers, ...]
    groups: tuple[GroupNumbers, ...]
    verdict: Verdict | None = None

    def block(self, setting: Literal["in", "out", "any"], budget: Budget | None) -> list[GroupNumbers]:
        """Return the groups of one block."""
        return [group for group in self.groups if group.budget == budget and setting in ("any", group.setting)]

    @property
    def first_screen(self) -> list[GroupNumbers]:
        """The groups to show first: in distribution, and trained equally long, where there are."""
        return self.block("in", self.budgets[-1]) or self.block("out", self.budgets[-1])

    @property
    def budgets(self) -> tuple[Budget | None, ...]:
        """The budgets for which there are blocks, in the order of the groups."""
        return tuple(dict.fromkeys(group.budget for group in self.groups))


def read(path: Path) -> Numbers | None:
    """Read numbers written earlier; None where there are none, or of another version."""
    text = path.read_bytes() if path.exists() else b""
    if f'"version": {VERSION},'.encode() not in text[:200]:
        return None
    try:
        return Numbers.model_validate_json(text)
    except ValidationError as error:
        raise DataError(path, None, f"{first_problem(error)}; delete it to measure afresh") from None
