"""`catto plan`: what the missing stages need, and scripts of other schedulers that run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from command import run
from experiment_world import ENVIRONMENT, catto, write_recipe
from tiny import tiny_model

from catto.errors import DataError
from catto.pipeline.estimate import PlanEstimate, read_network, stage_seconds
from catto.pipeline.plan import Graph, find_stage, open_recipe, recipe_file, store_recipe
from catto.pipeline.stage import Stage, list_needed, make_done, stage_dir, write_json
from catto.recipe.load import load_recipe
from catto.recipe.settings import ModelSettings

Capture = pytest.CaptureFixture[str]
SMALLEST: dict[str, Any] = {
    "tasks": {"witnesses": {"train": 30, "validation": 4, "test": 6}},
    "methods": ["sft", "dpo+catto"],
    "evaluation": {"max_tokens": 12, "batch_size": 4, "k": [], "resamples": 20},
}


def test_the_shape_of_a_model_is_read_from_its_folder(tmp_path: Path) -> None:
    """Parameters by the formula are those of the model; a Qwen3 also has norms of queries and keys."""
    for arch, norms in (("llama", 0), ("mistral", 0), ("qwen3", 2 * 2 * 8)):
        for tied in (True, False):
            folder = tmp_path / f"{arch}-{tied}"
            model = tiny_model(arch=arch, tie_word_embeddings=tied)
            model.save_pretrained(folder)
            shape = read_network(ModelSettings(path=str(folder)))
            assert shape is not None
            assert shape.parameters == model.num_parameters() - norms
    (folder / "config.json").write_text(json.dumps({"n_embd": 8, "n_layer": 2}))
    assert read_network(ModelSettings(path=str(folder))) is None
    tiny_model(arch="qwen3_moe").config.save_pretrained(folder)
    assert read_network(ModelSettings(path=str(folder))) is None


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("sft.trl.num_train_epochs=30", {"sft": 10}),
        ("preference.trl.num_train_epochs=30", {"dpo+catto": 15}),
        ("preference.rows=20", {"dpo+catto": 20 / 400}),
    ],
)
def test_tokens_follow_what_overrides_the_recipe(setting: str, changed: dict[str, float]) -> None:
    """Of the quickstart: SFT has 3 epochs, the small budget 2 epochs of 400 pairs."""

    def tokens(*overrides: str) -> dict[str, int]:
        recipe = open_recipe("quickstart", ["budgets=[matched]", "methods=[sft, dpo, dpo+catto]", *overrides])
        trained = [stage for stage in list_needed([Graph(recipe).plan_report()]) if stage.kind == "train"]
        return {stage.settings.name: PlanEstimate(recipe).count_training_tokens(stage) for stage in trained}

    before, after = tokens("sft.epochs=3", "small_pairs=400"), tokens("sft.epochs=3", "small_pairs=400", setting)
    for method, factor in changed.items():
        assert after[method] == before[method] * factor
    assert after["sft"] == before["sft"] * changed.get("sft", 1)


def test_the_stream_asks_as_many_questions_as_the_recipe_says() -> None:
    for more in ([], ["outcome.held_out=true"]):
        recipe = open_recipe("quickstart", ["outcome.questions=10", "methods=[sft, dpo+outcome]", *more])
        estimate, every = PlanEstimate(recipe), list_needed([Graph(recipe).plan_report()])
        asked = {stage.name: estimate.count_requests(stage) for stage in every if stage.kind == "sampled"}
        assert [count for name, count in asked.items() if "stream" in name] == [10]


def test_a_training_that_was_resumed_took_all_of_its_runs(tmp_path: Path) -> None:
    recipe = load_recipe("paper", ["tasks={snli: {train: 100, validation: 50}}", "seeds=[0]"])
    stages = {stage.name: stage for stage in list_needed([Graph(recipe).plan_report()])}
    training = stages["sft snli seed 0 lr 5e-05"]
    assert stage_seconds(tmp_path, training) is None
    folder = stage_dir(tmp_path, training)
    folder.mkdir(parents=True)
    for measured, seconds in ((500.0, 500.0), (70.0, 90.0)):
        write_json(folder / "training.json", {"seconds": measured})
        write_json(folder / "done.json", make_done(training, folder, "", {"seconds": 90.0}))
        assert stage_seconds(tmp_path, training) == seconds


# ---- other schedulers ------------------------------------------------------------------------------------------------

NAME = "it's $HOME #1 `x`"  # of a folder: whatever a shell or make could take for its own
RECORD = """
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.getcwd(), *sys.argv[1:]]) + "\\n")
"""


def recording(folder: Path) -> dict[str, str]:
    """An environment in which the command only writes down how it was called."""
    (folder / "record.py").write_text(RECORD)
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(folder / 'record.py'))}"
    return {**os.environ, "CATTO": command, "RECORD": str(folder / "calls.jsonl")}


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def exported(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> tuple[Path, dict[str, Stage]]:
    """Export the stages that are missing once the questions are there; the run's folder and these stages."""
    recipe = write_recipe(folder, **SMALLEST)
    root, plan = folder / NAME / "out", list_needed([Graph(load_recipe(str(recipe))).plan_report()])
    (folder / NAME).mkdir()
    monkeypatch.chdir(folder / NAME)
    assert run(capsys, "plan", recipe, "--out", root, "--export", kind).code == 0
    assert run(capsys, "stage", root, plan[0].key).code == 0
    told = run(capsys, "plan", recipe, "--out", root, "--export", kind).out
    assert told.startswith(f"Wrote scripts for {len(plan) - 1} stages. Run: ")
    assert Path(shlex.split(told)[-1]).is_file()
    missing = {stage.key: stage for stage in plan[1:]}
    for key, stage in list(missing.items())[::7]:
        assert {find_stage(root, name).key for name in (key, key[:10], stage.folder)} == {stage.key}
    with pytest.raises(DataError, match=f"{len(plan)} keys begin with '', among them"):
        find_stage(root, "")
    return root, missing


def test_a_stage_exported_from_one_of_several_recipes_is_that_recipes(tmp_path: Path, capsys: Capture) -> None:
    """Recipes that differ in how stages are run share the keys; the one that was used last counts if none is named."""
    one, two = (load_recipe("quickstart", [f"launch.processes={count}"]) for count in (1, 2))
    key = next(stage.key for stage in list_needed([Graph(one).plan_report()]) if stage.kind == "train")
    for past, recipe in ((300, one), (200, two)):
        os.utime(store_recipe(tmp_path, recipe), (time.time() - past,) * 2)
    store_recipe(tmp_path, one)
    assert find_stage(tmp_path, key).settings.launch.processes == 1
    assert find_stage(tmp_path, key, recipe_file(tmp_path, two).stem).settings.launch.processes == 2
    told = run(capsys, "stage", tmp_path, key, "--recipe", "0" * 16)
    assert (told.code, told.err.count(f"no recipe {'0' * 16} is stored here")) == (2, 1)
    recipe_file(tmp_path, one).write_text('{"name": "old", "no_longer": 1}')
    told = run(capsys, "stage", tmp_path, key, "--recipe", recipe_file(tmp_path, one).stem)
    assert (told.code, told.err.count(".json: damaged")) == (2, 1)


def test_make_calls_every_missing_stage_after_its_needs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, missing = exported(tmp_path, capsys, monkeypatch, "make")
    done = subprocess.run(
        ["make", "-j2", "-f", root / "Makefile"], cwd="/", env=recording(tmp_path), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    keys = [call[3] for call in calls(tmp_path)]
    assert all(call[:3] == [str(tmp_path / NAME), "stage", str(root)] for call in calls(tmp_path))
    (recipe,) = (root / "recipes").iterdir()
    assert all(call[4:] == ["--recipe", recipe.stem] for call in calls(tmp_path))
    assert sorted(keys) == sorted(missing)
    for at, key in enumerate(keys):
        assert all(need.key in keys[:at] for need in missing[key].needs.values() if need.key in missing)


def test_make_cannot_name_a_folder_with_a_line_break(tmp_path: Path, capsys: Capture) -> None:
    told = run(capsys, "plan", "quickstart", "--out", tmp_path / "a\nb", "--export", "make")
    assert (told.code, told.out) == (2, "")
    assert "--export: a Makefile cannot name a folder with a line break" in told.err
    assert not (tmp_path / "a\nb").exists()


SBATCH = """#!/usr/bin/env bash
# Slurm without a cluster: gives a number, and writes down what was asked for.
printf '%s\\n' "$*" >> "$SUBMITTED"
wc -l < "$SUBMITTED"
"""


def test_slurm_arrays_wait_for_what_they_need(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dependencies are interpreted here; there is no Slurm."""
    root, missing = exported(tmp_path, capsys, monkeypatch, "slurm")
    scripts = sorted((root / "slurm").glob("*.sh"))
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    environment = recording(tmp_path) | {"SUBMITTED": str(tmp_path / "jobs.txt")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(["bash", root / "slurm" / "submit.sh"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    finished: dict[int, set[str]] = {}  # job -> what is done once it has ended
    ran: list[str] = []
    for number, line in enumerate((tmp_path / "jobs.txt").read_text().splitlines(), start=1):
        *options, name = line.split()
        before = [
            option.partition(":")[2].split(":") for option in options if option.startswith("--dependency=afterany:")
        ]
        known = {key for job in before[0] for key in finished[int(job)]} if before else set()
        text = (root / "slurm" / name).read_text()
        last = int(text.partition("#SBATCH --array=0-")[2].partition("\n")[0])
        for task in range(last + 1):
            alone = environment | {"SLURM_ARRAY_TASK_ID": str(task)}
            assert subprocess.run(["bash", root / "slurm" / name], env=alone, check=False).returncode == 0
        new = [call[3] for call in calls(tmp_path)[len(ran) :]]
        for key in new:
            assert all(need.key in known for need in missing[key].needs.values() if need.key in missing)
        ran += new
        finished[number] = known | set(new)
    assert sorted(ran) == sorted(missing)
    assert all(call[:3] == [str(tmp_path / NAME), "stage", str(root)] for call in calls(tmp_path))
    (recipe,) = (root / "recipes").iterdir()
    assert all(call[4:] == ["--recipe", recipe.stem] for call in calls(tmp_path))
    named = {script.stem.partition("-")[2] for script in scripts if script.name != "submit.sh"}
    assert named == {stage.kind for stage in missing.values()}


def test_resources_of_the_recipe_reach_slurm(tmp_path: Path, capsys: Capture) -> None:
    blocks = {
        "train": {"gpus": 2, "cpus": 4, "memory": "40GB"},
        "predict": {"gpus": 0.5},
        "report": {"cpus": 2, "memory": "500KB"},
    }
    recipe = write_recipe(tmp_path, **SMALLEST, resources=blocks)
    assert run(capsys, "plan", recipe, "--out", tmp_path / "out", "--export", "slurm").code == 0
    asked = {}
    for script in (tmp_path / "out" / "slurm").glob("[0-9]*.sh"):
        options = re.findall(r"#SBATCH --(cpus-per-task|gres|mem)=(.*)", script.read_text())
        asked[script.stem.partition("-")[2]] = " ".join(value for _, value in options)
    assert asked["train"] == "4 gpu:2 38147M"  # 40e9 bytes in units of 2^20
    assert asked["generated"] == asked["sampled"] == "1 gpu:1"
    assert asked["questions"] == asked["report"] == "2 1M"  # 0 would be all of a node's


def test_a_large_array_is_cut_and_arrays_hold_one_kind(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catto.pipeline.export.MAX_ARRAY_SIZE", 40)
    assert run(capsys, "plan", "paper", "--out", tmp_path, "--export", "slurm").code == 0
    kinds, total = defaultdict(set), 0
    names = {stage.key: stage.kind for stage in list_needed([Graph(load_recipe("paper")).plan_report()])}
    for script in (tmp_path / "slurm").glob("[0-9]*.sh"):
        keys = [line.split()[0] for line in script.read_text().splitlines() if line.startswith("  ")]
        kinds[script.name].update(names[key] for key in keys)
        total += len(keys)
        assert len(keys) <= 40
    assert total == 4641
    assert all(len(kind) == 1 for kind in kinds.values())


def test_make_gives_the_numbers_of_the_local_runner(tmp_path: Path) -> None:
    """Two stages at a time, each in a process of its own: predictions and tables are the same bytes."""
    recipe = write_recipe(tmp_path, **SMALLEST | {"methods": ["sft"]})
    assert catto("run", recipe, "--out", "here", cwd=tmp_path).returncode == 0
    assert catto("plan", recipe, "--out", "made", "--export", "make", cwd=tmp_path).returncode == 0
    command = ["make", "-j2", "-f", "made/Makefile", f"CATTO={shlex.quote(sys.executable)} -m catto"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    here = tmp_path / "here" / "stages"
    tables = [path for path in here.glob("report-*/tables/*") if path.stem != "training"]  # which has seconds
    files = [*here.glob("*/predictions.jsonl"), *here.glob("report-*/numbers.json"), *tables]
    assert len(tables) > 2
    assert len(files) > len(tables) + 1
    for path in files:
        one, other = path.read_bytes(), (tmp_path / "made" / "stages" / path.relative_to(here)).read_bytes()
        assert re.sub(rb'"seconds": [^,}]+', b"", one) == re.sub(rb'"seconds": [^,}]+', b"", other), path.name
