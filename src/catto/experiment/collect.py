"""The last stage: what every cell came to, as one `Results`, and the report made of it."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

from catto.experiment.graph import CellPlan, Graph
from catto.experiment.measure import PREDICTIONS
from catto.experiment.stages import Stage, Work, place
from catto.records import content_hash, library_versions
from catto.report.results import Cell, Results, Training

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "scikit-learn")


def run_report(work: Work) -> None:
    """Collect the cells and build tables, figures and the page."""
    from catto.report.build import build
    from catto.report.measure import steps

    results = collect(work)
    work.write("results.json", results.model_dump(mode="json"))
    counted, total = itertools.count(1), steps(results)
    build(results, work.root, work.out, lambda: work.progress(next(counted), total, "measuring"))


def collect(work: Work) -> Results:
    """Every cell's files and how its model was trained."""
    graph = Graph(work.recipe)
    recipe = work.recipe.model_dump(mode="json")
    return Results(
        name=work.recipe.name,
        recipe=recipe,
        recipe_hash=content_hash(recipe),
        versions=library_versions(*LIBRARIES),
        commit=commit(),
        cells=tuple(_cell(work.root, plan) for plan in graph.cells()),
        questions={
            plan.task: tuple(
                f"{_at(work.root, graph.held_out(plan.task, seed, 'test'))}/test.jsonl" for seed in work.recipe.seeds
            )
            for plan in graph.cells()
        },
    )


def _cell(root: Path, plan: CellPlan) -> Cell:
    choice = json.loads((place(root, plan.chosen) / "choice.json").read_text(encoding="utf-8"))
    training = json.loads((root / choice["training"]).read_text(encoding="utf-8"))
    scaled = plan.predictions.kind == "scaled"
    rescaled = plan.predictions if scaled else plan.candidates
    return Cell(
        task=plan.task,
        trained_on=plan.trained_on,
        method=plan.method,
        budget=plan.budget,
        seed=plan.seed,
        predictions=f"{_at(root, plan.predictions)}/{'scaled.jsonl' if scaled else PREDICTIONS}",
        candidates=None if plan.candidates is None else f"{_at(root, plan.candidates)}/scaled.jsonl",
        tau=None if rescaled is None else json.loads((place(root, rescaled) / "tau.json").read_text())["tau"],
        training=None if scaled else Training.model_validate(training),
    )


def _at(root: Path, stage: Stage) -> str:
    return place(root, stage).relative_to(root).as_posix()


def commit() -> str | None:
    """The commit of the code that runs, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
