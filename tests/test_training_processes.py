"""The same global batch gives the same update, however it is cut: micro-batches, checkpointing, processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_run
import train_run
from catto.training.config import CATTOConfig
from catto.training.preference import CATTOTrainer
from steps import distance, step

# SGD's update is the gradient itself; Adam's first one is its sign, which rounding can flip.
ONE_STEP: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["catto", "outcome with the stream"])


def _weights(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)
    return loaded


def _assert_close(one: Path, other: Path) -> None:
    expected = _weights(one)
    for name, value in _weights(other).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


def _moved(folder: Path) -> float:
    """How far the step went: the equality must not be one of weights that stood still."""
    start = train_run.made(CATTOTrainer, CATTOConfig).model.state_dict()
    return max(float((value - start[name]).abs().max()) for name, value in _weights(folder).items())


@STREAMS
@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
def test_one_batch_of_8_is_8_batches_of_1(tmp_path: Path, stream: bool, sharing: bool) -> None:
    for name, size in (("whole", 8), ("cut", 1)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        train_run.run(str(tmp_path / name), stream=stream, prefix_sharing=sharing, **ONE_STEP, **options)
    _assert_close(tmp_path / "whole", tmp_path / "cut")
    assert _moved(tmp_path / "whole") > 1e-3


@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
def test_gradient_checkpointing_changes_nothing(sharing: bool) -> None:
    plain, kept = (
        step(CATTOTrainer, CATTOConfig, gradient_checkpointing=on, prefix_sharing=sharing) for on in (False, True)
    )
    torch.testing.assert_close(kept.loss, plain.loss, rtol=1e-6, atol=1e-6)
    assert distance(kept.gradients, plain.gradients) < 1e-6


def _launched(script: str, *arguments: str) -> str:
    """Run a script of this folder in two processes; what it printed."""
    # Standalone: the launcher binds a free port itself, so that no other process can take it in between.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes of 4 pairs each: everything in one launch, since importing torch takes longer than all of it."""
    folder = tmp_path_factory.mktemp("two")
    common = {"ddp_backend": "gloo", "per_device_train_batch_size": 4, **ONE_STEP}
    runs = [{"folder": str(folder / str(stream)), "stream": stream, **common} for stream in (False, True)]
    assert _launched("train_run.py", json.dumps(runs), str(folder / "fsdp.json")).count("step 1") == 4
    return folder


@STREAMS
def test_two_processes_are_one(tmp_path: Path, two_processes: Path, stream: bool) -> None:
    train_run.run(str(tmp_path), stream=stream, per_device_train_batch_size=8, **ONE_STEP)
    _assert_close(tmp_path, two_processes / str(stream))
    assert _moved(tmp_path) > 1e-3


@pytest.mark.parametrize("layout", [fsdp_run.name(layout) for layout in fsdp_run.layouts()])
def test_fsdp_gives_the_gradients_of_one_process(two_processes: Path, layout: str) -> None:
    """Wherever FSDP2 puts the head. With all weights rounded to bf16 a gradient is within a few roundings."""
    for rank in json.loads((two_processes / "fsdp.json").read_text()):
        assert "error" not in rank[layout], rank[layout]["error"]
        rounded = "all in bf16" in layout
        assert rank[layout]["gradient"] < (0.05 if rounded else 1e-6)
        assert rank[layout]["loss"] < (0.05 if rounded else 1e-6)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_zero3_gives_the_gradients_of_one_process(tmp_path: Path) -> None:
    """Tied and untied, padded and shared."""
    _launched("zero3_run.py", str(tmp_path / "zero3.json"))
    found = json.loads((tmp_path / "zero3.json").read_text())
    assert len(found) == 4
    assert max(found.values()) < 2e-6
