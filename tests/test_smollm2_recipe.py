"""The laptop's recipe on the real data, as far as it goes without a model: its own lines make the teacher's labels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from catto.recipe_file import shipped
from needs import folder

TASKS = ("snli", "commonsense_qa")


def commented_python() -> str:
    lines = [line for line in shipped()["smollm2"].read_text().splitlines() if line.startswith("#     ")]
    return "\n".join(line.removeprefix("#     ") for line in lines)


def test_the_recipes_own_lines_give_it_enough_rows_and_pairs(tmp_path: Path) -> None:
    folders = {task: folder(task) for task in TASKS}
    (tmp_path / "data").mkdir()
    for task in TASKS:
        (tmp_path / "data" / task).symlink_to(folders[task])
    subprocess.run([sys.executable, "-c", commented_python()], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "catto", "teach", "smollm2"], cwd=tmp_path, check=True, capture_output=True)
    for task in TASKS:
        (made,) = (tmp_path / "runs" / "smollm2" / "stages").glob(f"teacher-{task.replace('_', '-')}-*")
        counts = {
            name: json.loads((made / f"{name}.manifest.json").read_text())["counts"] for name in ("sft", "preferences")
        }
        assert counts["sft"]["rows"] >= 1600
        assert counts["preferences"]["rows"] >= 60
