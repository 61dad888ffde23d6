"""The last stage: what every cell came to, as one `Results`, and the report made of it."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

from catto.experiment.graph import CellPlan, Graph
from catto.experiment.stages import Work, chosen, place, read
from catto.experiment.steps import PREDICTIONS, SCALED, TAU
from catto.files import library_versions
from catto.records import content_hash
from catto.report.numbers import Cell, Results, Training

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "scikit-learn")


def run_report(work: Work) -> None:
    """Collect the cells and build tables, figures and the page."""
    from catto.report.build import build
    from catto.report.measuring import steps

    results = collect(work)
    work.write("results.json", results.model_dump(mode="json"))
    counted, total = itertools.count(1), steps(results)
    build(results, work.root, work.out, lambda: work.progress(next(counted), total, "measuring"))


def collect(work: Work) -> Results:
    """Every cell's files and how its model was trained."""
    plans, recipe = Graph(work.recipe).cells(), work.recipe.model_dump(mode="json")
    return Results(
        name=work.recipe.name,
        recipe=recipe,
        recipe_hash=content_hash(recipe),
        versions=library_versions(*LIBRARIES),
        commit=commit(),
        cells=tuple(_cell(work, plan, number) for number, plan in enumerate(plans)),
        questions={
            task: tuple(work.relative(f"held_out {task} {seed}", "test.jsonl") for seed in work.recipe.seeds)
            for task in dict.fromkeys(plan.task for plan in plans)
        },
    )


def _cell(work: Work, plan: CellPlan, number: int) -> Cell:
    """A cell from the stages that the report needs, which are those that were run, whatever a plan of now would say."""
    training = read(place(work.root, chosen(work.root, work.stage.needs[f"chosen {number}"])) / "training.json")
    scaled, sampled = plan.predictions.kind == "scaled", plan.candidates is not None
    rescaled = f"predictions {number}" if scaled else f"candidates {number}" if sampled else None
    tau = None if rescaled is None else work.read(rescaled, TAU)
    return Cell(
        task=plan.task,
        trained_on=plan.trained_on,
        method=plan.method,
        budget=plan.budget,
        seed=plan.seed,
        predictions=work.relative(f"predictions {number}", SCALED if scaled else PREDICTIONS),
        candidates=work.relative(f"candidates {number}", SCALED) if sampled else None,
        tau=tau and tau["tau"],
        sampling_temperature=tau["temperature"] if tau and sampled else None,
        candidates_fallback_rate=tau["fallback_rate"] if tau and sampled else None,
        training=None if scaled else Training.model_validate(training),
    )


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
