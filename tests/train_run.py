"""Runs of training as a process of their own, to be killed or spread: `python train_run.py '[{"folder": ...}]'`.

A second argument names the file for what `fsdp_run` finds in the same processes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import fsdp_run
import pairs
from catto.training.config import CATTOConfig
from catto.training.monitor import newest_complete
from catto.training.preference import CATTOTrainer
from catto.training.tokenize import examples
from steps import made
from tiny import tiny_tokenizer


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
    outcome = {"calibration": "outcome", "outcome_examples": examples(tiny_tokenizer(), pairs.sft_rows())}
    more = {**(outcome if stream else {}), **options}
    trainer = made(CATTOTrainer, CATTOConfig, folder=Path(folder), callbacks=[_Pace(pause)], **more)
    checkpoint = newest_complete(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), Path(folder) / "final.pt")
    return trainer


if __name__ == "__main__":
    for options in json.loads(sys.argv[1]):
        run(**options)
    if len(sys.argv) > 2:
        fsdp_run.run(sys.argv[2])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
