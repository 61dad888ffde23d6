"""Rehearse a run before it costs anything: train each method for one step on a toy model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.integrations import get_reporting_integration_callbacks

from catto.errors import DataError
from catto.io.record_files import write_records
from catto.pipeline.kinds.train import TrainingJob, TrainSettings
from catto.pipeline.run import logging_to
from catto.pipeline.stage import LOG, Stage
from catto.pipeline.training_job import train_method
from catto.prompts import render_completion
from catto.recipe.settings import LaunchSettings, ModelSettings, ScratchModel
from catto.records import Message, PreferenceRow, SftRow

TOY = ScratchModel(layers=1, width=8, heads=1, intermediate=8, positions=64)
ROWS = 4
# Keywords that refer to parts or tokens of the real model, distribute it over processes, or compile it.
NOT_FOR_A_TOY = frozenset(
    {
        "target_modules",
        "exclude_modules",
        "target_parameters",
        "modules_to_save",
        "trainable_token_indices",
        "layers_to_transform",
        "layers_pattern",
        "layer_replication",
        "rank_pattern",
        "alpha_pattern",
        "pad_token",
        "router_aux_loss_coef",
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "torch_compile",
        "torch_compile_backend",
    }
)
ONE_STEP = {
    "max_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_drop_last": False,
    "padding_free": False,
    "optim_target_modules": "all-linear",
}


def rehearse_trainings(source: str, stages: Iterable[Stage[TrainSettings]]) -> None:
    """Train each method for one step on a toy model, to find settings that a library refuses.

    Without it, such settings would fail only after the teacher was paid and the start models were trained.

    Args:
        source: The name or file of the recipe, for errors.
        stages: The training stages; of several with the same method, one is rehearsed.

    Raises:
        DataError: A rehearsal failed; the message is the library's.
    """
    stage_of_method = {stage.settings.name: stage for stage in stages}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with logging_to(folder / LOG):
            _write_toy_rows(folder)
            for method, stage in stage_of_method.items():
                try:
                    _rehearse_stage(stage, folder)
                except Exception as error:
                    block = stage.settings.method.stage  # the recipe's block with the settings, such as preference
                    problem = f"{block} ({method}): {type(error).__name__}: {error}"
                    raise DataError(source, None, problem) from error


def _rehearse_stage(stage: Stage[TrainSettings], folder: Path) -> None:
    """Train for one step on the toy rows in a folder."""
    trl = stage.settings.block.trl
    for start_tracker in get_reporting_integration_callbacks(trl.get("report_to")):
        start_tracker()  # raises an error if the tracker's library is not installed
    inputs = {role: folder for role in stage.needs if role != "start"}
    job = TrainingJob(make_toy_settings(stage.settings), inputs, folder / stage.settings.name)
    train_method(job, lambda *_: None)


def make_toy_settings(settings: TrainSettings) -> TrainSettings:
    """Return the same settings, changed to train a toy model for one step."""
    trl = {**_drop_keywords(settings.block.trl), **ONE_STEP}
    peft = settings.model.peft
    return replace(
        settings,
        model=ModelSettings(scratch=TOY, peft=_drop_keywords(peft) if peft else None),
        method=replace(settings.method, rcft_weight=0.0),  # with its term, RCFT would generate answers
        block=settings.block.model_copy(update={"checkpoint_steps": 1, "trl": trl}),
        context=TOY.positions,
        # These two are catto's own settings, which need no rehearsal.
        prefix_sharing=False,
        launch=LaunchSettings(),
    )


def _drop_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without those that do not fit a toy model."""
    return {name: value for name, value in keywords.items() if name not in NOT_FOR_A_TOY}


def _write_toy_rows(folder: Path) -> None:
    """Write every file that a training stage may read, with a few rows each.

    The folder is used in place of the folders of all stages that a training stage needs.
    """
    responses = {}
    for label in "AB":
        # The label is also the text of the reasoning: some losses read only the reasoning, which must differ in a pair.
        responses[label] = (Message(role="assistant", content=render_completion(reasoning=label, label=label)),)
    shared: dict[str, Any] = {
        "prompt": (Message(role="user", content="A\nB"),),
        "question": "q",
        "task": "t",
        "labels": ("A", "B"),
        "gold": "A",
        "correctness_rate": 0.5,
    }
    trace = SftRow(**shared, completion=responses["A"], label="A")
    with_votes = trace.model_copy(update={"votes": {"A": 0.5, "B": 0.5}})
    pair = PreferenceRow(
        **shared,
        chosen=responses["A"],
        rejected=responses["B"],
        chosen_label="A",
        rejected_label="B",
    )
    write_records(folder / "preferences.jsonl", [pair] * ROWS)
    write_records(folder / "sft.jsonl", [trace] * ROWS)
    write_records(folder / "outcome.jsonl", [trace] * ROWS)
    write_records(folder / "stream.jsonl", [with_votes] * ROWS)
