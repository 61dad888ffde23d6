"""Checkpoints: which one to keep, which one to resume from, and how to copy them to another folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from catto.io.atomic import link_or_copy, write_text

# Validation metrics by which the best checkpoint can be kept -> whether larger is better.
GREATER_IS_BETTER = {"val_accuracy": True, "val_ece": False, "val_nll": False}
LAST = "last"  # the rule that keeps the last step
# Names of the files or folders with the weights. A complete checkpoint contains at least one of them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model_fsdp_0")


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the newest checkpoint that was written completely; None if there is none or the folder does not exist.

    Transformers writes the files of a checkpoint directly into its folder, trainer_state.json last. If training is
    killed meanwhile, this file is missing or truncated.
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
        has_weights = any((path / name).exists() for name in _WEIGHTS)
        if isinstance(state, dict) and has_weights:
            return path
    return None


def copy_newest(checkpoints: Path, target: Path, final: Path) -> None:
    """Copy the newest complete checkpoint and the best one. Without a complete checkpoint, do nothing.

    Files are hard-linked, since training never writes to a complete checkpoint again. Only trainer_state.json of the
    newest checkpoint is written anew, since it contains the path of the best checkpoint.

    Args:
        checkpoints: The folder with the checkpoints of a training run, which may still be running.
        target: The folder to copy them into.
        final: The folder to which the caller renames `target` afterwards.

    Raises:
        OSError: The training run deleted or added a checkpoint in the meantime.
    """
    newest = newest_complete(checkpoints)
    if newest is None:
        return
    state = json.loads((newest / "trainer_state.json").read_text())
    names = {newest.name}
    best = state["best_model_checkpoint"]  # None if training keeps the last step
    if best is not None:
        names.add(Path(best).name)

    def copy_file(source: str, destination: str) -> None:
        link_or_copy(Path(source), Path(destination))

    for name in names:
        shutil.copytree(checkpoints / name, target / name, copy_function=copy_file)
    # When training writes a new checkpoint, it deletes older ones, so some of their files may not have been linked.
    if newest_complete(checkpoints) != newest:
        raise FileNotFoundError(newest)
    if best is not None:
        moved_state = {**state, "best_model_checkpoint": str(final / Path(best).name)}
        # This replaces the link, so the original file is unchanged.
        write_text(target / newest.name / "trainer_state.json", json.dumps(moved_state))


def checkpoint_arguments(rule: str, steps: int, *, has_validation: bool = True) -> dict[str, Any]:
    """Return training arguments that save every `steps` steps and keep a checkpoint by `rule`.

    Args:
        rule: `last` keeps the last step. A metric of `GREATER_IS_BETTER` keeps the best step by that metric.
        steps: Number of steps between two checkpoints, and between two evaluations.
        has_validation: Whether there are held-out examples to evaluate. Without them, the last step is kept.

    Returns:
        Keyword arguments of `TrainingArguments`.

    Raises:
        ValueError: The rule is unknown.

    >>> checkpoint_arguments("val_ece", 50)["metric_for_best_model"]
    'val_ece'
    >>> checkpoint_arguments("last", 50)["save_total_limit"]
    1
    """
    rules = (LAST, *GREATER_IS_BETTER)
    if rule not in rules:
        raise ValueError(f"keep is {rule!r}, expected one of {', '.join(rules)}")
    save = {"save_strategy": "steps", "save_steps": steps, "save_total_limit": 1}
    if not has_validation:
        return {"eval_strategy": "no", **save}
    evaluate = {"eval_strategy": "steps", "eval_steps": steps, **save}
    if rule == LAST:
        return evaluate
    keep_best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": rule,
        "greater_is_better": GREATER_IS_BETTER[rule],
        "save_total_limit": 2,  # the best checkpoint, and the newest to resume from
    }
    return {**evaluate, **keep_best}
