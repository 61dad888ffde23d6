"""A training stage on hand-made inputs, of which some rows are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pairs
from experiment_world import RECIPE
from tiny import tiny_model, tiny_tokenizer

from catto.io.record_files import write_records
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Work, stage_dir
from catto.recipe.settings import Recipe

LIMIT = 60
LONG = (1, 4, 5, 9)  # of twelve
METHODS = ["sft", "dpo", "rcft", "cft", "dpo+bce", "dpo+catto", "dpo+outcome", "dpo+replay", "sft+outcome"]
METHODS += ["dpo+outcome-pairs", "dpo+decoupled", "dpo+decoupled+sft", "dpo+reasoning", "ipo", "dpo+robust", "dpo+sft"]


def _lengthened(message: Any) -> Any:
    return message.model_copy(update={"content": "because " * LIMIT + message.content})


def pair_rows() -> list[Any]:
    rows = pairs.preference_rows(12)
    for number in LONG:  # one side or the other
        side = "chosen" if number % 2 else "rejected"
        rows[number] = rows[number].model_copy(update={side: (_lengthened(getattr(rows[number], side)[0]),)})
    return rows


def sft_rows(n: int = 12, long: tuple[int, ...] = LONG, seed: int = 1) -> list[Any]:
    rows = pairs.sft_rows(n, seed=seed)
    for number in long:
        rows[number] = rows[number].model_copy(update={"completion": (_lengthened(rows[number].completion[0]),)})
    return rows


def voted_rows() -> list[Any]:
    """The rows of the stream with votes: one label in three of four samples. The last question has none."""
    rows = []
    for row in sft_rows(long=(2,), seed=3):
        votes = dict.fromkeys(row.labels, 0.0) | {row.labels[0]: 0.75, row.labels[1]: 0.25}
        rows.append(row.model_copy(update={"votes": votes}))
    rows[-1] = rows[-1].model_copy(update={"votes": None})
    return rows


def made_work(root: Path, method: str, **blocks: Any) -> Work:
    """A training stage whose needs stand in their folders."""
    own = {"methods": METHODS, "small_pairs": 6, "context": LIMIT, "keep": "val_nll", "model": {"path": "unused"}}
    blocks = {"rcft": {"rows": 6, "epochs": 1, "checkpoint_steps": 2, "batch_size": 2}, **blocks}
    recipe = Recipe.model_validate({**RECIPE, **own, **blocks})
    stage = Graph(recipe).plan_training("witnesses", 0, method, "matched", 1e-3)
    work = Work(stage, root, root / "out", lambda *_: None)
    work.out.mkdir(parents=True)
    files = {
        "teacher": {"preferences.jsonl": pair_rows(), "sft.jsonl": sft_rows()},
        "stream": {"outcome.jsonl": sft_rows(long=(2,), seed=3)},
        "votes": {"stream.jsonl": voted_rows()},
        "reasoning": {"outcome.jsonl": pairs.sft_rows(4, seed=5)},
        "traces": {"outcome.jsonl": pairs.sft_rows(4, seed=5)},
    }
    for role, need in stage.needs.items():
        folder = stage_dir(root, need)
        folder.mkdir(parents=True, exist_ok=True)
        held = "votes" if role == "stream" and "stream" in need.settings.kinds else role
        for name, rows in files.get(held, {}).items():
            write_records(folder / name, rows)
    if "start" in stage.needs:
        start = stage.needs["start"].needs["model 0 seed 0"]
        tiny_model().save_pretrained(stage_dir(root, start) / "model")
        tiny_tokenizer().save_pretrained(stage_dir(root, start) / "model")
        (work.input("start") / "choice.json").write_text(json.dumps({"model": "model 0 seed 0"}))
    return work
