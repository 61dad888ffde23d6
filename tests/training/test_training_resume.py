"""A run that was killed anywhere goes on and ends with the same weights, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
import train_run
from forked import Forked
from peft import get_peft_model
from steps import lora
from tiny import tiny_model

from catto.pipeline import attempts
from catto.training.checkpoints import copy_newest, newest_complete
from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

STEPS = 14
RUN: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}


def _kill_at(folder: Path, step: int, **options: Any) -> None:
    """Kill -9 right after `step`: the checkpoint that it may be writing is left as it is."""
    process = Forked(train_run.run, str(folder), pause=0.02, **RUN, **options)
    for line in process.lines():
        if line.startswith("step ") and int(line.split()[1]) >= step:
            process.process.kill()
            break
    assert process.wait() == -signal.SIGKILL


def _weights(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return loaded


def _assert_same_bits(ours: Path, theirs: Path) -> None:
    expected = _weights(theirs)
    for name, value in _weights(ours).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("stream", [False, True], ids=["catto", "outcome with the stream"])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path, stream: bool) -> None:
    step = random.Random(int(stream)).randint(4, STEPS - 2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_run.run(str(whole), stream=stream, **RUN)
    _kill_at(killed, step, stream=stream)
    checkpoint = newest_complete(killed)
    assert checkpoint is not None, f"killed at {step}"
    assert not (killed / "final.pt").exists()
    resumed = train_run.run(str(killed), stream=stream, **RUN)
    assert resumed.state.global_step == STEPS
    _assert_same_bits(killed, whole)


def test_an_adapted_model_goes_on_with_its_adapter_not_with_that_of_the_reference(tmp_path: Path) -> None:
    """TRL gives an adapted model a frozen copy of its adapter; the checkpoint then has both."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "peft_config": None}
    adapters = []
    for checkpoint in (None, tmp_path / "checkpoint-2"):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), lora())
        trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, model=model, **options)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        adapters.append({name: w.clone() for name, w in trainer.model.state_dict().items() if ".default." in name})
    assert (tmp_path / "checkpoint-2" / "ref").is_dir()
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_partly_written_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_run.run(str(whole), **RUN)
    shutil.copytree(whole, broken)
    (broken / "final.pt").unlink()
    newest = newest_complete(broken)
    assert newest is not None
    assert newest.name == "checkpoint-14"
    state = newest / "trainer_state.json"
    if damage == "missing":
        state.unlink()
    else:
        state.write_text(state.read_text()[:-40])
    assert newest_complete(broken) == broken / "checkpoint-12"
    train_run.run(str(broken), **RUN)
    _assert_same_bits(broken, whole)


def test_no_complete_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nothing") is None
    for name, files in {
        "checkpoint-9": ["model.safetensors"],
        "checkpoint-7": ["trainer_state.json"],
        "checkpoint-x": ["model.safetensors", "trainer_state.json"],
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
    assert newest_complete(tmp_path) is None


def test_checkpoints_are_compared_by_number(tmp_path: Path) -> None:
    for number in (9, 100, 20):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").touch()
        (folder / "trainer_state.json").write_text("{}")
    assert newest_complete(str(tmp_path)) == tmp_path / "checkpoint-100"


def test_a_copy_of_the_newest_checkpoint_finds_the_best_one_in_its_new_folder(tmp_path: Path) -> None:
    """Of a whole newest checkpoint and the best one; an unfinished one is left out, and the files are not copied."""
    old, half, place = tmp_path / "old", tmp_path / "half", tmp_path / "new"
    for step in (2, 4, 6):
        folder = old / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(step))
        if step < 6:
            state = {"global_step": step, "best_model_checkpoint": str(old / "checkpoint-2")}
            (folder / "trainer_state.json").write_text(json.dumps(state))
    copy_newest(old, half, place)
    half.rename(place)
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    newest = newest_complete(place)
    assert newest == place / "checkpoint-4"
    assert json.loads((newest / "trainer_state.json").read_text())["best_model_checkpoint"] == str(
        place / "checkpoint-2"
    )
    assert (newest / "model.safetensors").samefile(old / "checkpoint-4" / "model.safetensors")
    stored = json.loads((old / "checkpoint-4" / "trainer_state.json").read_text())
    assert stored["best_model_checkpoint"] == str(old / "checkpoint-2")


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_nobodys_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "old" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text("2")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": None}))
    found = iter([checkpoint, tmp_path / "old" / "checkpoint-4"])
    monkeypatch.setattr("catto.training.checkpoints.newest_complete", lambda _: next(found))
    with pytest.raises(FileNotFoundError):
        copy_newest(tmp_path / "old", tmp_path / "half", tmp_path / "new")


def test_checkpoints_count_before_journals_and_a_finished_training_before_both(tmp_path: Path) -> None:
    for name, step in (("a", 900), ("b", 1000), ("c", 0)):
        (tmp_path / name / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
        for file in ("trainer_state.json", "model.safetensors"):
            (tmp_path / name / "checkpoints" / f"checkpoint-{step}" / file).write_text("{}")
    (tmp_path / "a" / "generations.part.jsonl").write_text("much")
    (tmp_path / "c" / "training.json").write_text("{}")
    assert [folder.name for folder in sorted(tmp_path.iterdir(), key=attempts.measure_progress)] == ["a", "b", "c"]
