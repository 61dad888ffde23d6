"""The same global batch gives the same update, however it is cut: micro-batches, checkpointing, processes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_run
import pairs
import pytest
import torch
import train_run
from forked import Forked
from steps import distance, step
from tiny import tiny_tokenizer

from catto.training.config import CATTOConfig
from catto.training.examples import Example, make_examples
from catto.training.outcome_stream import OutcomeStream
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

# SGD's update is the gradient itself; Adam's first one is its sign, which rounding can flip.
ONE_STEP: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["catto", "outcome with the stream"])


# One process reads the batches of all, concatenates them, and each takes its slice; widths must then be equal.
DISPATCHED: dict[str, dict[str, Any]] = {
    name: {"calibration": name, "accelerator_config": {"dispatch_batches": True}, "pad_to_multiple_of": 64}
    for name in ("none", "catto", "outcome")
}


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


def _one_step(folder: Path, size: int, **options: Any) -> dict[str, Any]:
    """The weights after one step over eight pairs in micro-batches of `size`, of which the last may be ragged."""
    rows = pairs.dataset(pairs.preference_rows(8))
    cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": -(-8 // size), "rows": rows}
    train_run.run(str(folder), **{**ONE_STEP, **cut, **options})
    return _weights(folder)


def _streamed(rows: list[Example], size: int, accumulation: int, processes: int) -> list[str]:
    """The questions of the stream's rows over two steps, micro-batch by micro-batch and process by process."""
    streams = [OutcomeStream(rows, CATTOConfig(calibration="outcome", output_dir="")) for _ in range(processes)]
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "world_size": processes}
    found = []
    for step_number, _, process in itertools.product(range(2), range(accumulation), range(processes)):
        state, args = SimpleNamespace(global_step=step_number), SimpleNamespace(**sizes, process_index=process)
        found += streams[process].take_examples(SimpleNamespace(state=state, args=args), size)
    return [example.question for example in found]


def test_the_stream_is_the_same_however_a_step_is_cut_and_a_pass_has_every_example_once() -> None:
    """Two steps of six pairs, two rows beside each."""
    rows = make_examples(tiny_tokenizer(), pairs.sft_rows(24))
    whole = _streamed(rows, 6, 1, 1)
    assert sorted(whole) == sorted(example.question for example in rows)
    assert _streamed(rows, 2, 3, 1) == _streamed(rows, 3, 1, 2) == _streamed(rows, 1, 3, 2) == whole


@pytest.fixture(scope="module")
def without_term(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """TRL's own part of the step, whole and as 3 + 3 + 2."""
    return {size: _one_step(tmp_path_factory.mktemp("none"), size, calibration="none") for size in (8, 3)}


@STREAMS
def test_the_term_is_the_mean_over_the_pairs_of_the_step(
    tmp_path: Path, without_term: dict[int, dict[str, Any]], stream: bool
) -> None:
    """8 = 3 + 3 + 2 for what the term adds. TRL's own part is a mean of micro-batch means, and stays so."""
    options = {"stream": True} if stream else {"calibration_weight": 1.0}
    added = []
    for size in (8, 3):
        after = _one_step(tmp_path / str(size), size, **options)
        added.append({name: value - without_term[size][name] for name, value in after.items()})
    assert max(float(value.abs().max()) for value in added[0].values()) > 1e-3
    for name, value in added[1].items():
        torch.testing.assert_close(value, added[0][name], rtol=0, atol=1e-6, msg=name)


def test_the_term_is_a_mean_also_where_an_epoch_ends_inside_the_accumulation(
    tmp_path: Path, without_term: dict[int, dict[str, Any]]
) -> None:
    """Eight pairs are three micro-batches: a step that may accumulate five has only these."""
    options = {"calibration_weight": 1.0}
    full = _one_step(tmp_path / "full", 3, **options)
    short = _one_step(tmp_path / "short", 3, **options, gradient_accumulation_steps=5)
    for name, value in short.items():
        torch.testing.assert_close(value, full[name], rtol=0, atol=1e-6, msg=name)
    assert max(float((value - without_term[3][name]).abs().max()) for name, value in full.items()) > 1e-3


@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
def test_gradient_checkpointing_changes_nothing(sharing: bool) -> None:
    plain, kept = (
        step(CATTOTrainer, CATTOConfig, gradient_checkpointing=on, prefix_sharing=sharing) for on in (False, True)
    )
    torch.testing.assert_close(kept.loss, plain.loss, rtol=1e-6, atol=1e-6)
    assert distance(kept.gradients, plain.gradients) < 1e-6


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes of 4 pairs each, which do everything one after the other."""
    folder = tmp_path_factory.mktemp("two")
    common = {"ddp_backend": "gloo", "per_device_train_batch_size": 4, **ONE_STEP}
    runs = [{"folder": str(folder / str(stream)), "stream": stream, **common} for stream in (False, True)]
    runs += [{"folder": str(folder / f"dispatched {name}"), **common, **DISPATCHED[name]} for name in DISPATCHED]
    processes = [Forked(train_run.share, rank, folder, runs) for rank in range(2)]
    for printed, code in [process.finished() for process in processes]:
        assert code == 0, printed
        assert printed.count("step 1") == len(runs)
    return folder


@STREAMS
def test_two_processes_are_one(tmp_path: Path, two_processes: Path, stream: bool) -> None:
    train_run.run(str(tmp_path), stream=stream, per_device_train_batch_size=8, **ONE_STEP)
    _assert_close(tmp_path, two_processes / str(stream))
    assert _moved(tmp_path) > 1e-3


@pytest.mark.parametrize("layout", [fsdp_run.name(layout) for layout in fsdp_run.layouts()])
def test_fsdp_gives_the_gradients_of_one_process(two_processes: Path, layout: str) -> None:
    """Wherever FSDP2 puts the head. With all weights rounded to bf16 a gradient is within a few roundings.

    So is a log-probability, a difference of two logits of up to 16: a rounding of one moves it by up to 2^-5. How many
    there are depends on the processor's instructions.
    """
    for rank in json.loads((two_processes / "fsdp.json").read_text()):
        assert "error" not in rank[layout], rank[layout]["error"]
        rounded = "all in bf16" in layout
        assert rank[layout]["gradient"] < (0.05 if rounded else 1e-6)
        assert rank[layout]["loss"] < (0.05 if rounded else 1e-6)
        assert rank[layout]["validation"] < (4 * 2**-5 if rounded else 1e-6)
        assert rank[layout]["saved"] < (0.01 if rounded else 1e-6)


@pytest.mark.parametrize("name", DISPATCHED)
def test_two_processes_with_dispatched_batches_are_one(tmp_path: Path, two_processes: Path, name: str) -> None:
    train_run.run(str(tmp_path), calibration=name, per_device_train_batch_size=8, **ONE_STEP)
    _assert_close(tmp_path, two_processes / f"dispatched {name}")
    assert _moved(tmp_path) > 1e-3
