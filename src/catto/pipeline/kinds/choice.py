"""The stage that chooses a learning rate by the validation ECE of its models."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from catto.pipeline.kinds.reading import read_stage_predictions
from catto.pipeline.stage import StageSettings, Work, write_json


@dataclass(frozen=True)
class ChoiceSettings(StageSettings):
    """The choice of a learning rate by validation ECE: for `seed`, on average over `seeds`."""

    title: str  # the method, with its budget where the two budgets give different models
    task: str
    seed: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """What the names of its stages end with."""
        return f"{self.title} {self.task} seed {self.seed}"


def run_choice(work: Work[ChoiceSettings]) -> None:
    """Take the learning rate of the lowest validation ECE (20 bins); a single one, or none, is not measured."""
    rates = work.settings.rates
    errors = _measure_rates(work) if len(rates) > 1 else []
    best = errors.index(min(errors)) if errors else 0
    role = f"{best} seed {work.settings.seed}"
    choice = {
        "learning_rate": rates[best] if rates else None,  # the base model has none
        "model": f"model {role}",
        "validation": f"validation {role}" if errors else None,
        "validation_ece": {f"{rate:g}": error for rate, error in zip(rates, errors, strict=False)},
    }
    write_json(work.out / "choice.json", choice)


def _measure_rates(work: Work[ChoiceSettings]) -> list[float]:
    """Return the validation ECE of each learning rate, on average over the seeds."""
    from catto.metrics.errors import ece

    means = []
    for number in range(len(work.settings.rates)):
        errors = []
        for seed in work.settings.seeds:
            rows = read_stage_predictions(work.input(f"validation {number} seed {seed}"))
            errors.append(ece([row.confidence for row in rows], [row.is_correct for row in rows]))
        means.append(fmean(errors))
    return means
