"""The report's stage: every cell's files, and tables, figures and the page of them."""

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

# Settings at the top of the recipe that the stages before the report hold, that decide which of these there are, or
# that no result depends on.
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
    """Which cell of the tables it is, as `report.numbers.Cell` names it."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int


@dataclass(frozen=True)
class CellPlan:
    """One cell of the tables and the stages that give its numbers."""

    place: CellPlace
    predictions: Stage
    candidates: Stage | None
    chosen: Stage
    questions: Stage
    validation: tuple[Stage, ...]  # greedy predictions of the model, or of those among which it was chosen
    preference: Stage | None = None  # held-out pairs that the model orders as preferred


@dataclass(frozen=True)
class ReportSettings(StageSettings):
    """The report. Of the recipe, the needs hold all but its name and how results are measured."""

    version: int
    recipe: Recipe
    cells: tuple[CellPlan, ...]

    excluded: ClassVar = {"recipe": IN_STAGES}

    def key_fields(self) -> dict[str, Any]:
        """Count which cells there are, in their order; their stages are among the needs."""
        return {**super().key_fields(), "cells": [cell.place for cell in self.cells]}


def run_report(work: Work[ReportSettings]) -> None:
    """Collect every cell's files and how its model was trained; build tables, figures and the page of them."""
    from catto.report.build import build_report
    from catto.report.numbers import Results

    settings = work.settings
    recipe = settings.recipe.model_dump(mode="json", exclude={"launch", "resources"})
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
    """Return the files of each task's test questions, one per seed."""
    files: dict[str, dict[int, str]] = {}
    for cell in cells:
        by_seed = files.setdefault(cell.place.task, {})
        by_seed[cell.place.seed] = _relative_path(root, cell.questions, "test.jsonl")
    return {task: tuple(by_seed.values()) for task, by_seed in files.items()}


def _describe_cell(root: Path, plan: CellPlan) -> Cell:
    """Return the files of a cell, and how its model was trained and rescaled."""
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
    """Return how the cell's predictions or its candidates were rescaled, and how the candidates were sampled."""
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
    from catto.report.numbers import Training

    model = resolve_choice(root, plan.chosen)
    if model.kind != "train":
        return None
    return Training.model_validate(read_json(stage_dir(root, model) / "training.json"))


def _find_validation(root: Path, plan: CellPlan) -> str | None:
    """Return the file of the greedy validation predictions of the cell's model; None where there are none."""
    if not plan.validation:
        return None
    stage = plan.validation[0]
    if len(plan.validation) > 1:
        stage = resolve_choice(root, plan.chosen, "validation")
    return _relative_path(root, stage, PREDICTIONS)


def _find_margins(root: Path, stage: Stage | None) -> str | None:
    """Return the file of the margins of held-out pairs; None where there are none, as with few stored responses."""
    if stage is None or read_json(stage_dir(root, stage) / ACCURACY)["n"] == 0:
        return None
    return _relative_path(root, stage, MARGINS)


def _relative_path(root: Path, stage: Stage, file: str) -> str:
    """Return a stage's file as seen from the experiment's root: such a path may be stored."""
    return (stage_dir(root, stage) / file).relative_to(root).as_posix()


def find_commit() -> str | None:
    """Return the commit of the code that runs, where it runs from a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
