"""The stage that builds the report: tables, figures and a page, from the files of every cell."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from catto.io.record_files import library_versions
from catto.io.text_files import read_json
from catto.methods import Budget
from catto.pipeline.kinds.preference import ACCURACY, MARGINS
from catto.pipeline.kinds.reading import PREDICTIONS
from catto.pipeline.kinds.scaling import SCALED, TAU
from catto.pipeline.stage import Stage, StageSettings, Work, resolve_choice, stage_dir, write_json
from catto.recipe.settings import Recipe
from catto.records import content_hash

if TYPE_CHECKING:
    from catto.report.numbers import Cell, Training

# Top-level settings of the recipe that are not hashed into the key of the report, since the keys of the stages that it
# needs depend on them. No result depends on `launch` and `resources`.
IN_STAGES = frozenset(
    {
        "tasks",
        "train_on",
        "model",
        "start",
        "methods",
        "budgets",
        "small_pairs",
        "seeds",
        "lr_choice",
        "keep",
        "context",
        "prefix_sharing",
        "teacher",
        "sft",
        "preference",
        "rcft",
        "outcome",
        "launch",
        "resources",
    }
)
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "scikit-learn")


class CellPlace(NamedTuple):
    """What identifies a cell of the tables; the fields are those of `report.numbers.Cell`."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int


@dataclass(frozen=True)
class CellPlan:
    """One cell of the tables and the stages that its numbers come from.

    Attributes:
        place: Which cell it is.
        predictions: The test predictions.
        candidates: The samples for Confidence@k; None if the recipe asks for none.
        chosen: The model.
        questions: The test questions.
        validation: Greedy validation predictions of the model, or of all the models that it was chosen from.
        preference: The preference accuracy on held-out pairs; None if it is not measured.
    """

    place: CellPlace
    predictions: Stage
    candidates: Stage | None
    chosen: Stage
    questions: Stage
    validation: tuple[Stage, ...]
    preference: Stage | None = None


@dataclass(frozen=True)
class ReportSettings(StageSettings):
    """The settings of the report. Of the recipe, its name and the settings for measuring are hashed."""

    version: int
    recipe: Recipe
    cells: tuple[CellPlan, ...]

    excluded: ClassVar = {"recipe": IN_STAGES}

    def key_fields(self) -> dict[str, Any]:
        """Return the fields of the key, with the place of every cell; the cells' stages are among the needs."""
        return {**super().key_fields(), "cells": [cell.place for cell in self.cells]}


def run_report(work: Work[ReportSettings]) -> None:
    """Describe the files and the training of every cell in results.json, and build the report from it."""
    from catto.report.build import build_report
    from catto.report.numbers import Results

    settings = work.settings
    recipe = settings.recipe.model_dump(mode="json", exclude={"launch", "resources"})  # no result depends on these two
    results = Results(
        name=settings.recipe.name,
        recipe=recipe,
        recipe_hash=content_hash(recipe),
        versions=library_versions(*LIBRARIES),
        commit=find_commit(),
        cells=tuple(_describe_cell(work.root, cell) for cell in settings.cells),
        questions=_list_question_files(work.root, settings.cells),
    )
    write_json(work.out / "results.json", results.model_dump(mode="json"))
    build_report(results, work.root, work.out, lambda done, total: work.progress(done, total, "measuring"))


def _list_question_files(root: Path, cells: Iterable[CellPlan]) -> dict[str, tuple[str, ...]]:
    """Return the files with the test questions of each task, one file per seed."""
    files: dict[str, dict[int, str]] = {}
    for cell in cells:
        by_seed = files.setdefault(cell.place.task, {})
        by_seed[cell.place.seed] = _relative_path(root, cell.questions, "test.jsonl")
    return {task: tuple(by_seed.values()) for task, by_seed in files.items()}


def _describe_cell(root: Path, plan: CellPlan) -> Cell:
    """Return the files of a cell, and how its model was trained or its confidence rescaled."""
    from catto.report.numbers import Cell

    is_scaled = plan.predictions.kind == "scaled"
    file = SCALED if is_scaled else PREDICTIONS
    return Cell(
        **plan.place._asdict(),
        predictions=_relative_path(root, plan.predictions, file),
        validation=_find_validation(root, plan),
        preference=_find_margins(root, plan.preference),
        training=None if is_scaled else _read_training(root, plan),
        **_describe_scaling(root, plan),
    )


def _describe_scaling(root: Path, plan: CellPlan) -> dict[str, Any]:
    """Return the fields of the cell that say how its predictions or candidates were rescaled and sampled."""
    rescaled = plan.predictions if plan.predictions.kind == "scaled" else plan.candidates
    if rescaled is None:
        return {}
    scaling = read_json(stage_dir(root, rescaled) / TAU)
    fields: dict[str, Any] = {"tau": scaling["tau"], "vector": scaling.get("vector")}
    if plan.candidates is not None:
        fields["candidates"] = _relative_path(root, plan.candidates, SCALED)
        fields["sampling_temperature"] = scaling["temperature"]
        fields["candidates_fallback_rate"] = scaling["fallback_rate"]
    return fields


def _read_training(root: Path, plan: CellPlan) -> Training | None:
    """Return how the model of a cell was trained; None for the base model."""
    from catto.report.numbers import Training

    model = resolve_choice(root, plan.chosen)
    if model.kind != "train":
        return None
    return Training.model_validate(read_json(stage_dir(root, model) / "training.json"))


def _find_validation(root: Path, plan: CellPlan) -> str | None:
    """Return the file of the greedy validation predictions of the cell's model; None if there are none."""
    if not plan.validation:
        return None
    stage = plan.validation[0]
    if len(plan.validation) > 1:  # one per learning rate and seed
        stage = resolve_choice(root, plan.chosen, "validation")
    return _relative_path(root, stage, PREDICTIONS)


def _find_margins(root: Path, stage: Stage | None) -> str | None:
    """Return the file of the margins of held-out pairs; None if they were not measured or if there are no pairs."""
    if stage is None or read_json(stage_dir(root, stage) / ACCURACY)["n"] == 0:
        return None
    return _relative_path(root, stage, MARGINS)


def _relative_path(root: Path, stage: Stage, file: str) -> str:
    """Return the path of a stage's file relative to the experiment's folder, which may be moved."""
    return (stage_dir(root, stage) / file).relative_to(root).as_posix()


def find_commit() -> str | None:
    """Return the git commit of the running code; None if it does not run from a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
