"""The stages that load the questions of one split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catto.io.record_files import library_versions, read_records, write_records
from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import TaskSettings
from catto.records import Manifest, Question, Split
from catto.tasks import TASKS, Task, load_questions
from catto.tasks.own_file import own_task
from catto.tasks.witnesses import generate_questions


@dataclass(frozen=True)
class QuestionSettings(StageSettings):
    """The questions of one split."""

    task: str
    split: Split
    seed: int
    block: TaskSettings  # without the sizes of the other splits
    contents: str | None  # hash of the local files that are read
    # For a user's file that is cut into splits: the questions that any of these seeds holds out are not trained on.
    seeds: tuple[int, ...] | None = None

    def key_fields(self) -> dict[str, Any]:
        """Return the fields of the key. A benchmark has the key that it had before `answer` and `answers` existed."""
        values = super().key_fields()
        # "label" was the default when keys were first stored. The list distinguishes a `label` that the recipe sets.
        values["block"]["answer"] = "label" if self.block.answer is None else [self.block.answer]
        if self.block.answers is None:
            del values["block"]["answers"]
        return values


def run_questions(work: Work[QuestionSettings]) -> None:
    """Write the questions of one split and their manifest."""
    settings = work.settings
    questions, notes = load_split(settings)
    if not questions:
        raise ValueError(f"no question for {settings.split}")
    manifest = Manifest(
        kind="questions",
        counts={"questions": len(questions)},
        seed=settings.seed,
        notes=notes,
        versions=library_versions(),
    )
    write_records(work.out / f"{settings.split}.jsonl", questions, manifest)


def load_split(settings: QuestionSettings) -> tuple[list[Question], dict[str, Any]]:
    """Return the questions of one split, and the counts of the loader for the manifest."""
    block = settings.block
    split = settings.split
    seed = settings.seed
    limit: int | None = getattr(block, split)
    if settings.task == "witnesses" and not block.own:
        return list(generate_questions(split, limit, seed=seed, **block.world_options())), {}
    task = find_task(settings.task, block, settings.seeds or ())
    loaded = load_questions(task, split, seed=seed, data_dir=block.data_dir, files=block.files, limit=limit)
    questions = list(loaded)
    report = loaded.report
    return questions, {"read": report.read, "kept": report.kept, "gold": dict(report.gold)}


def find_task(name: str, block: TaskSettings, seeds: Sequence[int] = ()) -> Task:
    """Return the task that a block of the recipe configures: one of TASKS, or a task from the user's own file.

    Args:
        name: The name of the task.
        block: Its block in the recipe.
        seeds: For a user's file, the seeds whose held-out questions are not trained on; empty means only the seed
            that is loaded.

    Raises:
        ValueError: The name is unknown and the block has no file, or its settings contradict each other.

    >>> find_task("snli", TaskSettings()) is TASKS["snli"]
    True
    """
    if block.own:
        return own_task(name, block, seeds)
    if name not in TASKS:
        raise ValueError(f"tasks.{name}: neither one of {', '.join(TASKS)} nor given a path")
    return TASKS[name]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the first `limit` questions of a file; None reads all."""
    return list(read_records(path, Question))[:limit]
