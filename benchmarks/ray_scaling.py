"""Time eight independent cells on Ray clusters of one and two workers with one thread each, and Ray's overhead.

    python benchmarks/ray_scaling.py [EPOCHS]

A cell consists of a training run of EPOCHS epochs (default: 8) and its test predictions; the stages that all cells
share are done before. Each time is that of a whole run on a cluster that is already up: connecting, starting the
workers and importing torch in each. The overhead is the additional time that a light stage takes compared with the
local runner, without the fixed time of a run. The last line is a JSON object.
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

# These must be set before torch is imported, here and in the workers.
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

CELLS = 8
LIGHT_STAGES = 40
# The kinds of stages that each cell runs for itself; the cells share all others.
CELL_KINDS = {"train", "chosen", "generated", "predicted"}
TASKS = {"witnesses": {"train": 200, "validation": 20, "test": 40}}


class SilentDisplay:
    """A display that shows nothing."""

    def started(self, stage: Stage, number: int, total: int) -> None:
        """Show nothing."""

    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
        """Show nothing."""

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        """Show nothing."""


def make_recipe(seeds: int, epochs: int) -> Recipe:
    """Return a recipe with one SFT model per seed."""
    settings: dict[str, Any] = {
        "name": "scaling",
        "tasks": TASKS,
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


def time_on_ray(workers: int, recipe: Recipe, goals: Sequence[Stage], root: Path) -> float:
    """Run the goals on a new cluster, and return the seconds without those for starting the cluster.

    Args:
        workers: Number of workers, each with one CPU.
        recipe: The recipe.
        goals: The stages to run, with everything that they need.
        root: Folder of the run.
    """
    node = {"num_cpus": workers, "object_store_memory": ray_runner.OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        start = time.perf_counter()
        outcome = ray_runner.run_on_ray(root, recipe, goals, SilentDisplay(), cluster.address)
        seconds = time.perf_counter() - start
    finally:
        cluster.shutdown()
    assert not outcome.failed, outcome.failed
    return seconds


def measure_scaling(folder: Path, epochs: int) -> dict[str, float]:
    """Time the same cells on one and on two workers."""
    recipe = make_recipe(CELLS, epochs)
    goals = [cell.predictions for cell in Graph(recipe).list_cells()]
    shared_stages = [stage for stage in list_needed(goals) if stage.kind not in CELL_KINDS]
    seconds = {}
    for workers in (1, 2):
        root = folder / str(workers)
        assert not runner.run_goals(root, shared_stages, SilentDisplay()).failed
        seconds[workers] = time_on_ray(workers, recipe, goals, root)
        unit = "worker" if workers == 1 else "workers"
        print(f"{CELLS} cells on {workers} {unit}: {seconds[workers]:.1f} s", flush=True)
    return {"one_seconds": seconds[1], "two_seconds": seconds[2], "two_vs_one": seconds[2] / seconds[1]}


def measure_overhead(folder: Path) -> float:
    """Return the additional seconds that a light stage takes on Ray."""
    recipe = make_recipe(LIGHT_STAGES, epochs=1)
    goals = [Graph(recipe).plan_questions("witnesses", "test", seed) for seed in recipe.seeds]
    start = time.perf_counter()
    assert not runner.run_goals(folder / "here", goals, SilentDisplay()).failed
    local_stage_seconds = (time.perf_counter() - start) / LIGHT_STAGES
    one_stage_run = time_on_ray(1, recipe, goals[:1], folder / "1")
    full_run = time_on_ray(1, recipe, goals, folder / str(LIGHT_STAGES))
    # The difference of the two runs does not include the fixed time of a run.
    ray_stage_seconds = (full_run - one_stage_run) / (LIGHT_STAGES - 1)
    return ray_stage_seconds - local_stage_seconds


def main() -> None:
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        results = measure_scaling(Path(folder), epochs)
        results["overhead_seconds"] = measure_overhead(Path(folder))
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))


if __name__ == "__main__":
    main()
