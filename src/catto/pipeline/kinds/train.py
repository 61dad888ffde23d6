"""The stage of a training: start model and rows -> a trained model, and how the training went."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from catto.methods import Method
from catto.pipeline.kinds.generating import Generating
from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import LaunchSettings, ModelSettings, OutcomeSettings, TrainerSettings


@dataclass(frozen=True)
class TrainSettings(StageSettings):
    """One training. What method and block say of epochs and the like is resolved into fields of its own."""

    name: str
    method: Method
    block: TrainerSettings
    seed: int
    learning_rate: float
    batch_size: int
    epochs: int
    pairs: int | None
    model: ModelSettings
    contents: str | None  # hash of the base model's files, where training starts from it
    context: int
    keep: str
    prefix_sharing: bool | None  # None: nothing is trained on pairs
    outcome: OutcomeSettings | None
    answering: Generating | None  # how RCFT asks the model that it trains
    parser: int | None
    others: Mapping[str, Any]  # settings at the top of the recipe that no field above holds
    launch: LaunchSettings = field(compare=False)  # how many processes share it: it is the same training

    excluded: ClassVar = {
        "method": frozenset({"title", "start", "effort", "learning_rates", "batch_size", "only_from"}),
        "block": frozenset({"epochs", "learning_rates", "batch_size"}),
        "outcome": frozenset({"questions", "temperature", "held_out", "samples", "source"}),
    }
    optional: ClassVar = {
        "method": frozenset({"loss_type", "preference_tokens"}),
        "outcome": frozenset({"target"}),
    }


@dataclass(frozen=True)
class TrainingJob:
    """What determines a training for each of its processes: settings, the folders that it reads, where it writes."""

    settings: TrainSettings
    inputs: dict[str, Path]  # by role; `start` is the model's own folder
    out: Path


def run_train(work: Work[TrainSettings]) -> None:
    """Train one method, resuming from its newest complete checkpoint; with `launch`, in as many processes."""
    # training.json is written last: where it exists, a run was killed while it deleted the checkpoints.
    if not (work.out / "training.json").exists():
        from catto.pipeline.training_job import start_training  # it imports torch, which takes seconds

        with _tensorboard_folder(work):
            start_training(make_job(work), work.progress)
    shutil.rmtree(work.out / "checkpoints", ignore_errors=True)  # they are several times the model


@contextmanager
def _tensorboard_folder(work: Work[TrainSettings]) -> Iterator[None]:
    """Have TensorBoard's files written next to the stages: those in a checkpoint folder are deleted with it."""
    variable = "TENSORBOARD_LOGGING_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(work.root / "tensorboard" / work.stage.folder)
    try:
        yield
    finally:
        del os.environ[variable]


def make_job(work: Work[TrainSettings]) -> TrainingJob:
    """Return what a training stage does."""
    inputs = {role: work.model("start") if role == "start" else work.input(role) for role in work.stage.needs}
    return TrainingJob(work.settings, inputs, work.out)
