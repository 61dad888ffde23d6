"""The stage that trains a model."""

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
    """Settings of one training run.

    Attributes:
        name: The method's name.
        method: The method.
        block: The recipe's block for the method's trainer. Its epochs, batch size and learning rates are not used: they
            are combined with the method's into the fields below.
        seed: The seed.
        learning_rate: The learning rate.
        batch_size: Number of rows or pairs per batch.
        epochs: Number of epochs.
        pairs: Maximum number of pairs; None is no limit.
        model: The recipe's `model` block.
        contents: Hash of the base model's files, if training starts from it.
        context: Maximum length of a row in tokens.
        keep: Which checkpoint is kept.
        prefix_sharing: Whether the responses of a pair share their prompt's computation; None if there are no pairs.
        outcome: Settings of the outcome term, for the methods that have it.
        answering: For RCFT, how the model generates answers during training.
        parser: For RCFT, the version of the answer parser.
        others: Top-level settings of the recipe that are in no field above.
        launch: How many processes share the training; not in the key, since the result is the same.
    """

    name: str
    method: Method
    block: TrainerSettings
    seed: int
    learning_rate: float
    batch_size: int
    epochs: int
    pairs: int | None
    model: ModelSettings
    contents: str | None
    context: int
    keep: str
    prefix_sharing: bool | None
    outcome: OutcomeSettings | None
    answering: Generating | None
    parser: int | None
    others: Mapping[str, Any]
    launch: LaunchSettings = field(compare=False)

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
    """What each process of a training run needs to know.

    Attributes:
        settings: The settings of the training.
        inputs: The folders that it reads, by their role. `start` is the folder of the start model itself.
        out: The folder that it writes to.
    """

    settings: TrainSettings
    inputs: dict[str, Path]
    out: Path


def run_train(work: Work[TrainSettings]) -> None:
    """Train one method, resuming from its newest complete checkpoint; then delete the checkpoints."""
    # training.json is written last. If it exists, the stage was killed after the training, while deleting checkpoints.
    if not (work.out / "training.json").exists():
        from catto.pipeline.training_job import start_training  # it imports torch, which takes seconds

        with _tensorboard_folder(work):
            start_training(make_job(work), work.progress)
    shutil.rmtree(work.out / "checkpoints", ignore_errors=True)  # they are several times as large as the model


@contextmanager
def _tensorboard_folder(work: Work[TrainSettings]) -> Iterator[None]:
    """Make TensorBoard write next to the stages: in the checkpoint folder, its files would be deleted."""
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
    """Return the job of a training stage."""
    inputs = {role: work.model("start") if role == "start" else work.input(role) for role in work.stage.needs}
    return TrainingJob(work.settings, inputs, work.out)
