"""Runs of training, to be called in processes that are killed, or in two that share the work."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsdp_run
import pairs
import torch
from accelerate.state import AcceleratorState
from steps import made
from tiny import tiny_tokenizer
from transformers import TrainerCallback

from catto.training.checkpoints import newest_complete
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.trainer import CATTOTrainer


class _Pace(TrainerCallback):
    """Says each step and takes its time over it, so that a kill can land between and inside checkpoints.

    A run with a pause does not take its last step: however late the kill comes, the run is there to be killed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"step {state.global_step}", flush=True)
        time.sleep(600 if self.seconds and state.global_step == state.max_steps - 1 else self.seconds)


def run(folder: str, stream: bool = False, pause: float = 0.0, **options: Any) -> Any:
    """Train, going on from the newest complete checkpoint, and leave the final weights in folder/final.pt."""
    torch.set_num_threads(1)
    outcome = {"calibration": "outcome", "outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())}
    more = {**(outcome if stream else {}), **options}
    trainer = made(CATTOTrainer, CATTOConfig, folder=Path(folder), callbacks=[_Pace(pause)], **more)
    checkpoint = newest_complete(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), Path(folder) / "final.pt")
    return trainer


def share(rank: int, folder: Path, runs: list[dict[str, Any]]) -> None:
    """Be one of two processes that train together and then compare FSDP's layouts into folder/fsdp.json."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that this one was forked from
    # A file instead of a port, which another process could take in between.
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for options in runs:
        run(**options)
    fsdp_run.run(str(folder / "fsdp.json"))
    torch.distributed.destroy_process_group()
