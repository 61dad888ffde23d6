"""What a finished experiment hands to its report: where every cell's predictions are, and how its model was trained."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from catto.methods import Budget
from catto.records import Record, checked_name

# Raised when a number changes its meaning or the page its make: a report of another version is made again.
VERSION = 4


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
