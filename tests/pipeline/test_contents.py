"""Files that a recipe names are part of what determines a stage: edited, they are read again; copied, they are not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from catto.pipeline import plan as module
from catto.pipeline.kinds.questions import load_split
from catto.pipeline.plan import Graph, hash_contents
from catto.pipeline.stage import list_needed
from catto.recipe.load import load_recipe

METHODS = ["sft", "dpo", "dpo+catto"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SNLI files, a file of questions of one's own, a model and stored responses: a plan only hashes them."""
    monkeypatch.chdir(tmp_path)
    for folder in ("snli", "model"):
        (tmp_path / folder).mkdir()
    for name in ("snli/train.jsonl", "snli/dev.jsonl", "snli/test.jsonl", "own.jsonl", "labels.jsonl"):
        (tmp_path / name).write_text(json.dumps({"row": name}) + "\n")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "files",
                "tasks": {
                    "snli": {"data_dir": "snli"},
                    "own": {"path": "own.jsonl", "fields": {"question": "q", "options": "o", "answer": "a"}},
                },
                "model": {"path": "model"},
                "methods": METHODS,
                "budgets": ["matched"],
                "seeds": [0],
                "teacher": {"source": "responses", "responses": "labels.jsonl"},
                "evaluation": {"k": []},
            }
        )
    )
    return tmp_path


def folders() -> dict[str, str]:
    """Stage -> its folder, as a run started now would have them."""
    return {stage.name: stage.folder for stage in list_needed([Graph(load_recipe("recipe.yaml")).plan_report()])}


def rerun(before: dict[str, str]) -> set[str]:
    return {name for name, folder in folders().items() if before[name] != folder}


def data(before: dict[str, str]) -> set[str]:
    return {name for name in before if "questions" in name}


def about(task: str, before: dict[str, str]) -> set[str]:
    return {name for name in before if task in name.split()} | {"report"}


@pytest.mark.parametrize(
    ("file", "task"), [("snli/train.jsonl", "snli"), ("snli/test.jsonl", "snli"), ("own.jsonl", "own")]
)
def test_an_edited_data_file_reruns_its_task_and_no_other(world: Path, file: str, task: str) -> None:
    before = folders()
    (world / file).write_text(json.dumps({"row": "else"}) + "\n")
    assert rerun(before) == about(task, before)


def test_edited_responses_rerun_the_teacher_and_what_learns_from_it(world: Path) -> None:
    before = folders()
    (world / "labels.jsonl").write_text("")
    assert rerun(before) == {name for name in before if "questions" not in name}


def test_another_model_in_the_same_folder_is_trained_anew(world: Path) -> None:
    before = folders()
    (world / "model" / "model.safetensors").write_bytes(bytes(999) + b"1")
    of_the_teacher = ("responses", "teacher", "held-out")
    assert rerun(before) == {name for name in before if name.split()[0] not in of_the_teacher} - data(before)


def test_what_no_task_reads_changes_nothing(world: Path) -> None:
    before = folders()
    (world / "snli" / "README.md").write_text("notes")
    (world / "snli" / "runs").mkdir()
    (world / "snli" / "runs" / "train.jsonl").write_text("{}\n")
    assert not rerun(before)


def test_a_copy_and_another_date_have_the_same_key(world: Path) -> None:
    before = folders()
    os.utime(world / "labels.jsonl", (0, 0))
    shutil.move(world / "snli", world / "moved")
    shutil.copytree(world / "moved", world / "snli", copy_function=shutil.copyfile)
    assert not rerun(before)


def test_what_is_not_there_yet_is_no_error_in_a_plan(world: Path) -> None:
    before = folders()
    shutil.rmtree(world / "snli")
    assert rerun(before) == about("snli", before)


def test_a_task_that_nobody_knows_is_told_by_the_stage_that_reads_it(world: Path) -> None:
    recipe = load_recipe("recipe.yaml", ["tasks.snly={}"])
    assert list_needed([Graph(recipe).plan_report()])
    with pytest.raises(ValueError, match=r"tasks\.snly: neither one of .*witnesses.* nor given a path"):
        load_split(Graph(recipe).plan_questions("snly").settings)


def test_large_files_are_sampled_from_the_first_byte_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_BYTES_HASHED_WHOLE", 100), ("PIECE_COUNT", 4), ("PIECE_BYTES", 10)):
        monkeypatch.setattr(module, name, value)
    path = tmp_path / "weights"

    def changed_at(place: int) -> bool:
        path.write_bytes(bytes(1000))
        before = hash_contents(str(path))
        path.write_bytes(bytes(place) + b"1" + bytes(999 - place))
        return hash_contents(str(path)) != before

    # Pieces begin at 0, 330, 660 and 990.
    seen = [place for place in range(0, 1000, 5) if changed_at(place)]
    assert seen == [0, 5, 330, 335, 660, 665, 990, 995]
    assert changed_at(999)


def test_a_name_on_the_hub_has_no_contents_here() -> None:
    assert hash_contents("some/model") is None
    assert hash_contents(None) is None
