"""The stages that make data: questions, held-out questions, the teacher's responses, a model's own samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from catto.experiment.stages import Work
from catto.recipe import TeacherSettings
from catto.records import Manifest, Question, Split, library_versions, read_records, write_records
from catto.tasks import TASKS, Task, from_file, load
from catto.tasks.witnesses import generate
from catto.teacher import teach

WITNESS_SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}


def questions_of(settings: Mapping[str, Any], split: Split, seed: int) -> tuple[list[Question], dict[str, Any]]:
    """The questions of one split as a recipe's task block says, and what loading counted."""
    name, limit = settings["task"], settings.get(split)
    knobs = {key: settings[key] for key in ("options", "witnesses", "reliabilities") if settings.get(key) is not None}
    if name == "witnesses":
        return list(generate(split, limit or WITNESS_SIZES[split], seed=seed, **knobs)), {}
    task = task_of(name, settings)
    loaded = load(task, split, seed=seed, data_dir=settings.get("data_dir"), files=settings.get("files"), limit=limit)
    found = list(loaded)
    return found, {"read": loaded.report.read, "kept": loaded.report.kept, "gold": dict(loaded.report.gold)}


def task_of(name: str, settings: Mapping[str, Any]) -> Task:
    """The task of a recipe's block: one of the table's, or the user's own file."""
    if settings.get("path") is None:
        if name not in TASKS:
            raise ValueError(f"tasks.{name}: neither one of {', '.join(TASKS)} nor given a path")
        return TASKS[name]
    named = {key: settings[key] for key in ("answer", "labels") if settings.get(key) is not None}
    return from_file(settings["path"], fields=settings["fields"] or {}, name=name, **named)


def save(path: Path, questions: list[Question], notes: dict[str, Any], seed: int) -> None:
    """Write questions with their manifest."""
    if not questions:
        raise ValueError(f"no question for {path.stem}")
    counts = {"questions": len(questions)}
    write_records(
        path, questions, Manifest(kind="questions", counts=counts, seed=seed, notes=notes, versions=library_versions())
    )


def run_questions(work: Work) -> None:
    """Training questions. Seed 0: a sample of them is the same for every seed."""
    save(work.out / "train.jsonl", *questions_of(work.settings, "train", 0), seed=0)


def run_held_out(work: Work) -> None:
    """Validation or test questions of one seed."""
    seed, split = work.settings["seed"], work.settings["split"]
    save(work.out / f"{split}.jsonl", *questions_of(work.settings, split, seed), seed=seed)


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a file, at most `limit`."""
    return list(read_records(path, Question))[:limit]


def run_teacher(work: Work) -> None:
    """The teacher's responses to the training questions, and the rows."""
    found = read_questions(work.input("questions") / "train.jsonl")
    summary = teach(found, None, work.recipe.teacher, work.out, lambda n, total: work.progress(n, total, "responses"))
    work.write("yield.json", summary.model_dump(mode="json"))


def run_traces(work: Work) -> None:
    """One response of the teacher to every validation question."""
    settings = work.recipe.teacher.model_copy(update={"n": 1})
    found = as_training(read_questions(work.input("held_out") / "validation.jsonl"))
    teach(found, None, settings, work.out, lambda n, total: work.progress(n, total, "responses"))


def run_sampled(work: Work) -> None:
    """One sampled response of a model to every question, right or wrong; the rows are `outcome.jsonl`."""
    from catto.experiment.measure import engine_of

    of = work.settings
    file = (
        work.input("held_out") / "validation.jsonl"
        if of["split"] == "validation"
        else work.input("questions") / "train.jsonl"
    )
    settings = TeacherSettings(
        n=1,
        temperature=(of["temperature"], of["temperature"]),
        max_tokens=of["max_tokens"],
        reasoning=of["reasoning"],
        seed=of["seed"],
        concurrency=of["batch_size"],
    )
    found = as_training(read_questions(file, of.get("limit")))
    teach(found, engine_of(work), settings, work.out, lambda n, total: work.progress(n, total, "samples"))


def as_training(questions: Iterable[Question]) -> list[Question]:
    """The same questions under the split that a teacher answers."""
    return [question.model_copy(update={"split": "train"}) for question in questions]
