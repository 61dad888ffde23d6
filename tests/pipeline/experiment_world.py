"""A whole experiment in seconds: the embedded world, one layer, a handful of steps."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "tasks": {"witnesses": {"train": 40, "validation": 8, "test": 10}},
    "model": {"scratch": {"layers": 1, "width": 32, "heads": 2, "intermediate": 32}},
    "methods": ["sft", "dpo", "rcft", "dpo+catto", "dpo+outcome"],
    "budgets": ["matched"],
    "seeds": [0],
    "small_pairs": 12,
    "keep": "val_nll",  # accuracy on so few questions would keep the first checkpoint, and later steps show nowhere
    "context": 256,
    "teacher": {"source": "witnesses", "n": 10},
    "sft": {"learning_rates": [1e-3], "epochs": 1, "batch_size": 8, "rows": 48, "checkpoint_steps": 2},
    "preference": {"learning_rates": [1e-4], "checkpoint_steps": 2},
    "rcft": {"learning_rates": [1e-4], "epochs": 2, "rows": 16, "checkpoint_steps": 3},
    "outcome": {"questions": 16},
    "evaluation": {"max_tokens": 12, "batch_size": 4, "k": [2], "resamples": 20},
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def write_recipe(folder: Path, **blocks: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **blocks}))
    return path


def catto(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "catto", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)


class Finished:
    """The experiment after one undisturbed run of the command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recipe, self.root = folder, folder / "tiny.yaml", folder / "runs" / "tiny"
        self.done = subprocess.CompletedProcess[str]((), **json.loads((folder / "done.json").read_text()))

    def stages(self, pattern: str) -> list[Path]:
        return sorted((self.root / "stages").glob(pattern))


def finished(factory: pytest.TempPathFactory) -> Finished:
    """Run the experiment once for all test files and all processes that share the suite. Nobody may change it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "finished-experiment"
    with (base / "finished-experiment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done.json").exists():
            folder.mkdir()
            done = catto("run", write_recipe(folder), cwd=folder)
            kept = {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
            (folder / "done.json").write_text(json.dumps(kept))
    return Finished(folder)
