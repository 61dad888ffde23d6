"""The records of a report: the experiment that it describes (`Results`), and the numbers measured on it (`Numbers`).

Of intervals, null bands and comparisons, `numbers.json` stores only the fields that a report shows. An undefined number
is null in the file and nan in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationError

from catto.answer_columns import ParseCounts
from catto.errors import DataError, describe_first_problem
from catto.measure import shows_gap
from catto.methods import Budget
from catto.metrics.calibrators import VectorScaling
from catto.metrics.catalogue import Versus
from catto.metrics.intervals import Interval, NullBand
from catto.metrics.statistics import SeedSummary
from catto.recipe.settings import EvaluationSettings
from catto.records import Record, checked_name
from catto.report import VERSION

# The method that all other methods of an experiment are compared with.
BASELINE = "dpo"


def supported_decimals(n: int) -> int:
    """Return with how many decimals to print a percentage of n questions.

    A step of the last decimal is at least one question: with 1,000 questions, one question is 0.1 %.

    Args:
        n: Number of questions.

    Returns:
        0 below 1,000 questions, 1 below 10,000, and otherwise 2.

    >>> [supported_decimals(n) for n in (400, 1000, 20_000)]
    [0, 1, 2]
    """
    digits = len(str(n))
    return min(max(digits - 3, 0), 2)


class Training(Record):
    """How the model of a cell was trained.

    Attributes:
        learning_rate: The learning rate.
        seconds: Duration of its own training, without the training of the model that it starts from.
        tokens: Number of tokens in its own training.
        rows: Number of SFT rows or pairs that it was trained on.
        dropped: `rows`, `pairs` or `stream` -> how many were dropped because they were too long for the context.
        epochs: Number of epochs.
        steps: Number of optimizer steps.
        kept_step: The step whose weights were kept.
        kept_epochs: Number of epochs up to that step.
        reward_accuracy: Share of pairs ordered as preferred, over the last quarter of the steps.
        history: One dict per checkpoint, with step, val_accuracy, val_ece, ..., reward_margin.
    """

    learning_rate: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    rows: int | None = None
    dropped: dict[str, int] = Field(default_factory=dict)
    epochs: float | None = None
    steps: int | None = None
    kept_step: int | None = None
    kept_epochs: float | None = None
    reward_accuracy: float | None = None
    history: tuple[dict[str, float], ...] = ()


class CellIdentity(Record):
    """One method on one task.

    Attributes:
        task: The task that the model is tested on.
        trained_on: The task that it was trained on.
        method: Name of the method.
        budget: None if the method is the same in both budgets.
    """

    # Checked because they become parts of file names.
    task: Annotated[str, AfterValidator(partial(checked_name, what="task"))]
    trained_on: Annotated[str, AfterValidator(partial(checked_name, what="trained_on"))]
    method: Annotated[str, AfterValidator(partial(checked_name, what="method", plus=True))]
    budget: Budget | None

    @property
    def setting(self) -> Literal["in", "out"]:
        """`in` (distribution) if the model is tested on the task that it was trained on, otherwise `out`."""
        return "in" if self.task == self.trained_on else "out"

    @property
    def stem(self) -> str:
        """The part of a file name that identifies the task, and the training task if it is a different one."""
        if self.setting == "in":
            return self.task
        return f"{self.task}-from-{self.trained_on}"


class Cell(CellIdentity):
    """One method on one task at one seed. Paths are relative to the experiment's folder.

    Attributes:
        seed: The seed.
        predictions: File with one prediction per test question.
        candidates: File with k sampled predictions per test question.
        validation: File with greedy predictions for the validation questions of the task.
        preference: File with the margins of held-out pairs, if the model was trained from another model.
        tau: The temperature of temperature scaling, or the one at which the confidences of candidates are compared.
        vector: The weights of vector scaling.
        sampling_temperature: Temperature at which the candidates were drawn.
        candidates_fallback_rate: Share of the candidates whose answer had to be forced.
        training: How the model was trained.
    """

    seed: int
    predictions: str
    candidates: str | None = None
    validation: str | None = None
    preference: str | None = None
    tau: float | None = None
    vector: VectorScaling | None = None
    sampling_temperature: float | None = None
    candidates_fallback_rate: float | None = None
    training: Training | None = None


class Results(Record):
    """The whole experiment: what was run, and where its predictions are.

    Attributes:
        name: Title of the report.
        recipe: The recipe.
        recipe_hash: Hash of the recipe; empty if the results come from files of answers instead of a recipe.
        versions: Package -> version.
        commit: The git commit, if known.
        cells: Every method on every task at every seed.
        questions: Task -> files of its test questions, one per seed.
        baseline: The method that the others are compared with; None if nothing is compared.
    """

    name: str
    recipe: dict[str, Any]
    recipe_hash: str
    versions: dict[str, str]
    commit: str | None = None
    cells: tuple[Cell, ...] = Field(min_length=1)
    questions: dict[str, tuple[str, ...]]
    baseline: str | None = BASELINE

    @property
    def evaluation(self) -> EvaluationSettings:
        """The evaluation settings of the recipe, with defaults for those that it does not set."""
        block = self.recipe.get("evaluation") or {}
        return EvaluationSettings.model_validate(block)


# Fields of the statistics that have no default and are not in numbers.json -> what they are set to when it is read.
PLACEHOLDERS = {"level": nan, "a": nan, "b": nan, "n": 0}
# Fields for which null means None, and not nan.
NULLABLE_FIELDS = ("reason", "std")


def _store_fields(statistic: type[Any], *names: str) -> tuple[BeforeValidator, PlainSerializer]:
    """Make pydantic store only some fields of a statistic, with null for numbers that are nan or infinite.

    Args:
        statistic: The dataclass of the statistic, such as `Interval`.
        names: The fields to store.

    Returns:
        Two annotations for a field of that type. The first one restores a statistic from a file: null becomes nan, and
        fields that were not stored are set to their placeholders. The second one chooses what is written.
    """
    placeholders: dict[str, Any] = {}
    for field in fields(statistic):
        if field.name in PLACEHOLDERS:
            placeholders[field.name] = PLACEHOLDERS[field.name]

    def read_fields(value: object) -> object:
        if not isinstance(value, Mapping):
            return value  # already a statistic: the record is made by our code and not read from a file
        restored = dict(placeholders)
        for name, stored_value in value.items():
            is_undefined = stored_value is None and name not in NULLABLE_FIELDS
            restored[name] = nan if is_undefined else stored_value
        return restored

    def write_fields(value: object) -> dict[str, Any]:
        written = {}
        for name in names:
            field_value = getattr(value, name)
            is_undefined = isinstance(field_value, float) and not isfinite(field_value)
            written[name] = None if is_undefined else field_value
        return written

    return BeforeValidator(read_fields), PlainSerializer(write_fields)


StoredInterval = Annotated[Interval, *_store_fields(Interval, "value", "low", "high", "reason")]
StoredNullBand = Annotated[NullBand, *_store_fields(NullBand, "mean", "low", "high")]
StoredSummary = Annotated[SeedSummary, *_store_fields(SeedSummary, "mean", "std")]
StoredVersus = Annotated[Versus, *_store_fields(Versus, "difference", "low", "high", "p_value", "p_corrected")]


class MeasuredPlace(CellIdentity):
    """The fields shared by `CellNumbers` (one seed) and `GroupNumbers` (several seeds).

    Attributes:
        input: Hash of everything that the numbers depend on.
        n: Number of questions; of a group, that of the seed with the most questions.
        gap: Mean confidence minus accuracy.
        null: Null band of the ECE.
        sources: How the answers were parsed.
    """

    input: str
    n: int
    gap: StoredInterval
    null: StoredNullBand
    sources: ParseCounts


class CellNumbers(MeasuredPlace):
    """The numbers of one method on one task at one seed.

    Attributes:
        seed: The seed.
        model: Name of the model.
        metrics: Metric -> value with its interval. If held-out pairs were scored, also preference_accuracy and
            preference_accuracy_reasoning.
        selection: k -> rule -> accuracy of choosing among k samples; empty if none were drawn.
        others: Name -> number without an interval.

            - If the posteriors are known: true_error, bayes_accuracy and regret.
            - About parsing: fallback_rate, plain_rate and accuracy_unparsed_wrong.
            - About samples, if there are any: auroc_within, questions_with_both, sample_fallback_rate,
              sampling_temperature and tau.
            - About a threshold fitted on validation answers, if there are any: risk_promised, risk_coverage,
              risk_threshold, risk_bound and risk_errors.
            - If held-out pairs were scored: preference_pairs, their number.
    """

    seed: int
    model: str
    metrics: dict[str, StoredInterval]
    selection: dict[int, dict[str, StoredInterval]]
    others: dict[str, float]


class GroupNumbers(MeasuredPlace):
    """The numbers of one method on one task in one budget, over its seeds.

    Attributes:
        seeds: The seeds.
        metrics: Metric -> mean and standard deviation over the seeds.
        intervals: Metric -> mean over the seeds, with a bootstrap interval over questions.
        papers_budget: Whether training used the paper's budget; if so, the paper's numbers may be printed too.
        versus: Metric -> difference to the baseline; empty for the baseline itself, and if it lacks one of the seeds.
        versus_seed: Seed -> metric -> difference to the baseline, with uncorrected p-values.
        selection: k -> rule -> accuracy of choosing among k samples.
        others: The same numbers as in `CellNumbers.others`.
    """

    seeds: tuple[int, ...]
    metrics: dict[str, StoredSummary]
    intervals: dict[str, StoredInterval]
    papers_budget: bool
    versus: dict[str, StoredVersus]
    versus_seed: dict[int, dict[str, StoredVersus]]
    selection: dict[int, dict[str, StoredSummary]]
    others: dict[str, StoredSummary]

    def holds(self, cell: CellIdentity) -> bool:
        """Return whether a cell belongs to this group; one without a budget belongs to the groups of both budgets."""
        same_tasks = cell.task == self.task and cell.trained_on == self.trained_on
        same_budget = cell.budget is None or cell.budget == self.budget
        return same_tasks and same_budget and cell.method == self.method

    @property
    def within_null(self) -> bool:
        """Whether the ECE lies at or below the upper end of the null band."""
        return self.metrics["ece"].mean <= self.null.high

    @property
    def shown_gap(self) -> float:
        """Mean confidence minus accuracy if the group is measurably miscalibrated; 0 if it is not.

        It is if its ECE is above the null band or, with an ECE within the null band, if the gap is significant. The
        result is nan if the ECE is above the null band, but overconfident and underconfident bins largely cancel out.
        """
        gap = self.gap.value
        if self.within_null:
            is_significant = shows_gap(self.gap, self.metrics["accuracy"].mean, self.n)
            return gap if is_significant else 0.0
        # |gap| is at most the ECE, and equals it if all bins err in the same direction.
        signs_cancel = abs(gap) < self.metrics["ece"].mean / 2
        return nan if signs_cancel else gap

    def number(self, name: str) -> StoredSummary | None:
        """Look up a number by name in `metrics` and `others`; None if the group does not have it."""
        return self.metrics.get(name) or self.others.get(name)


class Verdict(Record):
    """Which method's confidence is best: by true error if every posterior is known, otherwise by Brier score.

    Attributes:
        input: Hash of the groups that are compared.
        metric: The loss that decides.
        n: Number of questions of the smallest task.
        losses: Method -> mean loss over tasks and seeds, lowest first. Methods that cannot be compared are not in it:
            those with too many forced answers, and those that lack a run that others have.
        behind: Every method of `losses` except the first -> its loss minus that of the first, with p-values corrected
            for all pairs of methods.
    """

    input: str
    metric: Literal["true_error", "brier"]
    n: int
    losses: dict[str, float]
    behind: dict[str, StoredVersus]

    @property
    def leaders(self) -> list[str]:
        """The method with the lowest loss, and those that are not significantly worse."""
        leaders = []
        for name in self.losses:
            is_first = name not in self.behind
            if is_first or not self.behind[name].mark(self.metric):
                leaders.append(name)
        return leaders


class Numbers(Record):
    """Everything that the report prints.

    Attributes:
        version: Version of the report that measured them.
        level: Level of the intervals.
        bins: Number of bins of binned metrics.
        resamples: Number of bootstrap resamples.
        cells: The numbers of each cell.
        groups: The numbers of each group of seeds.
        verdict: The verdict on the groups of the first screen. None if fewer than two methods can be compared. Also
            None if posteriors are unknown and all answers are right, or all wrong: the Brier score would only rank the
            methods by their mean confidence.
        baseline: The method that the others are compared with; None if nothing is compared.
    """

    version: int = VERSION
    level: float
    bins: int
    resamples: int
    cells: tuple[CellNumbers, ...]
    groups: tuple[GroupNumbers, ...]
    verdict: Verdict | None = None
    baseline: str | None = BASELINE

    def find_groups(self, setting: Literal["in", "out", "any"], budget: Budget | None) -> list[GroupNumbers]:
        """Return the groups of one setting and budget, in the order of `groups`; empty if there are none.

        Args:
            setting: "in" for groups tested on the task that they were trained on, "out" for the others, "any" for both.
            budget: The budget; None finds the groups of an experiment without budgets.
        """
        groups = []
        for group in self.groups:
            same_setting = setting in ("any", group.setting)
            if same_setting and group.budget == budget:
                groups.append(group)
        return groups

    @property
    def first_screen(self) -> list[GroupNumbers]:
        """The groups to show first, at least one: those of the last budget that are in distribution.

        If none is in distribution, they are the groups of the last budget that are out of distribution. The last budget
        is the matched one if the experiment has it.
        """
        last_budget = self.budgets[-1]
        return self.find_groups("in", last_budget) or self.find_groups("out", last_budget)

    @property
    def budgets(self) -> tuple[Budget | None, ...]:
        """The distinct budgets of the groups, in order."""
        return tuple(dict.fromkeys(group.budget for group in self.groups))


def read_numbers(path: Path) -> Numbers | None:
    """Read the numbers that an earlier build of the report measured.

    Args:
        path: The file numbers.json.

    Returns:
        The numbers; None if there is no such file, or if a different version of the report wrote it.

    Raises:
        DataError: This version of the report wrote the file, but it is broken.
    """
    if not path.exists():
        return None
    content = path.read_bytes()
    # The fields of other versions may differ, so the version is looked up before the file is parsed. It is the first
    # field in the file.
    version_field = f'"version": {VERSION},'.encode()
    if version_field not in content[:200]:
        return None
    try:
        return Numbers.model_validate_json(content)
    except ValidationError as error:
        raise DataError(path, None, f"{describe_first_problem(error)}; delete it to measure again") from None
