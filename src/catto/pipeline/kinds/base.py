"""The stage of the given model: stored as the trainings would load it, where the other models are stored too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import ModelSettings


@dataclass(frozen=True)
class BaseSettings(StageSettings):
    """The given model as it is, in the recipe's precision."""

    model: ModelSettings
    contents: str | None  # hash of its files

    excluded: ClassVar = {"model": frozenset({"scratch", "attention", "peft"})}


def run_base(work: Work[BaseSettings]) -> None:
    """Store the given model."""
    from catto.pipeline.training_job import load_model, save_model

    model, tokenizer = load_model(work.settings.model.path or "", work.settings.model)
    save_model(model, tokenizer, work.out / "model")
