"""The stage that stores the given, untrained model in the same way as trained ones, so that it can be measured too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import ModelSettings


@dataclass(frozen=True)
class BaseSettings(StageSettings):
    """Settings of the stage `base`: the given model in the recipe's precision."""

    model: ModelSettings
    contents: str | None  # hash of its files; None for a model on the Hub

    excluded: ClassVar = {"model": frozenset({"scratch", "attention", "peft"})}


def run_base(work: Work[BaseSettings]) -> None:
    """Load the given model as a training stage would, and save it."""
    from catto.pipeline.training_job import load_model, save_model

    model, tokenizer = load_model(work.settings.model.path or "", work.settings.model)
    save_model(model, tokenizer, work.out / "model")
