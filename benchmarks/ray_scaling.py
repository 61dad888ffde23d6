"""Eight independent cells on a Ray cluster of two workers against one, one thread each, and Ray's overhead a stage.

python benchmarks/ray_scaling.py [EPOCHS]

A cell is a training of EPOCHS (8) and its test predictions; the stages that all cells share are done before. Each time
is that of a whole run on a cluster that is up: connecting, starting workers, importing torch in each. The overhead is
what a light stage takes longer than in the local runner, without what a run of one stage takes. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before torch is imported, here and in the workers.
os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false"
)
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from ray.cluster_utils import Cluster

from catto.pipeline import ray as ray_runner
from catto.pipeline import run as runner
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, list_needed
from catto.recipe.settings import Recipe

CELLS, LIGHT = 8, 40
WORLD = {"witnesses": {"train": 200, "validation": 20, "test": 40}}


class Silent:
    """A display that shows nothing."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show nothing."""

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show nothing."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Show nothing."""


def recipe_of(seeds: int, epochs: int) -> Recipe:
    settings: dict[str, Any] = {
        "name": "scaling",
        "tasks": WORLD,
        "model": {"scratch": {}},
        "methods": ["sft"],
        "seeds": list(range(seeds)),
        "keep": "last",
        "context": 256,
        "teacher": {"source": "witnesses"},
        "sft": {"learning_rates": [1e-3], "epochs": epochs, "batch_size": 16, "rows": 320, "checkpoint_steps": 1000},
        "evaluation": {"max_tokens": 32, "k": []},
    }
    return Recipe.model_validate(settings)


def seconds_on(workers: int, recipe: Recipe, goals: Sequence[Stage], root: Path) -> float:
    """Run the goals on a new cluster; the time without that of the cluster's start."""
    node = {"num_cpus": workers, "object_store_memory": ray_runner.OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        began = time.perf_counter()
        outcome = ray_runner.run_on_ray(root, recipe, goals, Silent(), cluster.address)
        took = time.perf_counter() - began
    finally:
        cluster.shutdown()
    assert not outcome.failed, outcome.failed
    return took


def scaling(folder: Path, epochs: int) -> dict[str, float]:
    recipe = recipe_of(CELLS, epochs)
    goals = [cell.predictions for cell in Graph(recipe).list_cells()]
    heavy = {"train", "chosen", "generated", "predicted"}
    times = {}
    for workers in (1, 2):
        root = folder / str(workers)
        shared = [stage for stage in list_needed(goals) if stage.kind not in heavy]
        assert not runner.run_goals(root, shared, Silent()).failed
        times[workers] = seconds_on(workers, recipe, goals, root)
        print(f"{CELLS} cells on {workers} worker{'s' * (workers > 1)}: {times[workers]:.1f} s", flush=True)
    return {"one_seconds": times[1], "two_seconds": times[2], "two_vs_one": times[2] / times[1]}


def overhead(folder: Path) -> float:
    """Seconds that a light stage takes longer on Ray."""
    recipe = recipe_of(LIGHT, 1)
    goals = [Graph(recipe).plan_questions("witnesses", "test", seed) for seed in recipe.seeds]
    began = time.perf_counter()
    assert not runner.run_goals(folder / "here", goals, Silent()).failed
    here = (time.perf_counter() - began) / LIGHT
    one, all_of_them = (seconds_on(1, recipe, some, folder / str(len(some))) for some in (goals[:1], goals))
    return (all_of_them - one) / (LIGHT - 1) - here


def main() -> None:
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        numbers = scaling(Path(folder), epochs)
        numbers["overhead_seconds"] = overhead(Path(folder))
    print(json.dumps({name: round(value, 3) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
