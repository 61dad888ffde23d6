"""Checkpoints: which one to keep, which one to resume from, and how to copy them to another folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from catto.io.atomic import link_or_copy, write_text

KEEP = {"val_accuracy": True, "val_ece": False, "val_nll": False}  # metric -> whether larger is better
LAST = "last"  # the rule that keeps the last step
# A complete checkpoint contains at least one of these files or folders.
_MODELS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model_fsdp_0")


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint that was written completely; None if there is none, or no folder.

    Transformers writes a checkpoint in place, with trainer_state.json last. If training is killed meanwhile, this file
    of the newest checkpoint is missing or truncated.
    """
    path_by_step = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match is not None:
            path_by_step[int(match[1])] = path
    for _, path in sorted(path_by_step.items(), reverse=True):
        try:
            state = json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):  # the file is missing or truncated
            continue
        has_model = any((path / name).exists() for name in _MODELS)
        if isinstance(state, dict) and has_model:
            return path
    return None


def copy_newest(checkpoints: Path, target: Path, final: Path) -> None:
    """Link the newest complete checkpoint and the best one into `target`, which the caller then renames to `final`.

    A complete checkpoint is never written to again, so hard links suffice. Only the newest one's trainer_state.json is
    rewritten in `target`, with the new path of the best checkpoint. Without a complete checkpoint, nothing happens.

    Raises:
        OSError: A training run deleted or added a checkpoint in the meantime.
    """
    newest = newest_complete(checkpoints)
    if newest is None:
        return
    state = json.loads((newest / "trainer_state.json").read_text())
    has_best = state["best_model_checkpoint"] is not None  # otherwise training keeps the last step
    best = newest.name
    if has_best:
        best = Path(state["best_model_checkpoint"]).name

    def copy_file(source: str, destination: str) -> None:
        link_or_copy(Path(source), Path(destination))

    for name in {newest.name, best}:
        shutil.copytree(checkpoints / name, target / name, copy_function=copy_file)
    # If training is still running, it may have deleted files of these checkpoints when it wrote a newer one.
    if newest_complete(checkpoints) != newest:
        raise FileNotFoundError(newest)
    if has_best:
        moved_state = {**state, "best_model_checkpoint": str(final / best)}
        # This replaces the link, so the original file is unchanged.
        write_text(target / newest.name / "trainer_state.json", json.dumps(moved_state))


def checkpoint_arguments(rule: str, steps: int, *, measured: bool = True) -> dict[str, Any]:
    """Return training arguments that save every `steps` steps and keep a checkpoint by `rule`.

    Args:
        rule: `last` keeps the last step. The name of a validation metric keeps the best step by that metric.
        steps: Number of steps between two checkpoints. A killed run resumes from the last checkpoint.
        measured: Whether there are held-out examples to evaluate. Without them, the last step is kept.

    Returns:
        Keyword arguments of `TrainingArguments`.

    Raises:
        ValueError: The rule is unknown.

    >>> checkpoint_arguments("val_ece", 50)["metric_for_best_model"]
    'val_ece'
    >>> checkpoint_arguments("last", 50)["save_total_limit"]
    1
    """
    if rule not in (LAST, *KEEP):
        raise ValueError(f"keep is {rule!r}, expected one of {', '.join((LAST, *KEEP))}")
    save = {"save_strategy": "steps", "save_steps": steps, "save_total_limit": 1}
    if not measured:
        return {"eval_strategy": "no", **save}
    evaluate = {"eval_strategy": "steps", "eval_steps": steps, **save}
    if rule == LAST:
        return evaluate
    keep_best = {"load_best_model_at_end": True, "metric_for_best_model": rule, "greater_is_better": KEEP[rule]}
    return {**evaluate, **keep_best, "save_total_limit": 2}  # the best checkpoint and the newest
