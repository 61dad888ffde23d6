"""The stage that chooses a learning rate by validation ECE."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from catto.pipeline.kinds.reading import read_stage_predictions
from catto.pipeline.stage import StageSettings, Work, write_json


@dataclass(frozen=True)
class ChoiceSettings(StageSettings):
    """The choice of a learning rate for the models of one method and task.

    The ECE of each learning rate is averaged over `seeds`. The stage selects the model that was trained with the best
    learning rate and with `seed`.
    """

    title: str  # the method, with its budget if the two budgets give different models
    task: str
    seed: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """The end of the names of the stages that depend on this choice."""
        return f"{self.title} {self.task} seed {self.seed}"


def run_choice(work: Work[ChoiceSettings]) -> None:
    """Choose the learning rate with the lowest validation ECE (20 bins); in a tie, the first of them.

    A single learning rate is chosen without measuring it. The base model, which has no learning rate, has the role of
    the model with the first one.
    """
    rates = work.settings.rates
    errors = _measure_rates(work) if len(rates) > 1 else []
    best = errors.index(min(errors)) if errors else 0
    role_suffix = f"{best} seed {work.settings.seed}"
    choice = {
        "learning_rate": rates[best] if rates else None,
        # The roles of the selected model and of its validation predictions among the needs of this stage.
        "model": f"model {role_suffix}",
        "validation": f"validation {role_suffix}" if errors else None,
        # Empty if the learning rates were not measured.
        "validation_ece": {f"{rate:g}": error for rate, error in zip(rates, errors, strict=False)},
    }
    write_json(work.out / "choice.json", choice)


def _measure_rates(work: Work[ChoiceSettings]) -> list[float]:
    """Return the validation ECE of each learning rate, averaged over the seeds."""
    from catto.metrics.errors import ece

    means = []
    for number in range(len(work.settings.rates)):
        errors = []
        for seed in work.settings.seeds:
            rows = read_stage_predictions(work.input(f"validation {number} seed {seed}"))
            errors.append(ece([row.confidence for row in rows], [row.is_correct for row in rows]))
        means.append(fmean(errors))
    return means
