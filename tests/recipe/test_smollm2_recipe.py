"""The laptop's recipe on the real data, as far as it goes without a model: its teacher draws labels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from catto.pipeline.plan import Graph
from catto.pipeline.stage import list_needed
from catto.recipe.load import load_recipe
from needs import DATA, needs

TASKS = ("snli", "commonsense_qa")


@needs("data")
def test_the_recipes_teacher_gives_it_enough_rows_and_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATTO_DATA", str(DATA))
    subprocess.run([sys.executable, "-m", "catto", "teach", "smollm2"], cwd=tmp_path, check=True, capture_output=True)
    recipe = load_recipe("smollm2")
    for task in TASKS:
        (folder,) = (tmp_path / "runs" / "smollm2" / "stages").glob(f"teacher-{task.replace('_', '-')}-*")
        counts = {
            name: json.loads((folder / f"{name}.manifest.json").read_text())["counts"]
            for name in ("sft", "preferences")
        }
        assert counts["sft"]["rows"] >= (recipe.sft.rows or 0)
        assert counts["preferences"]["rows"] >= recipe.small_pairs


def test_a_row_of_temperature_scaling_costs_no_training() -> None:
    recipe = load_recipe("smollm2")
    trained = {stage.method for stage in list_needed([Graph(recipe).plan_report()]) if stage.kind == "train"}
    assert trained == {"sft", "dpo", "dpo+catto", "dpo+outcome", "dpo+replay"}
    assert len(recipe.methods) == 3 * len(trained)
