"""The engine that stages generate and score with. The last one is kept: most stages ask the model of the one before.

The stages that make data: questions, held-out questions, the teacher's responses, a model's own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from catto.experiment.stages import Stage, Work
from catto.files import library_versions, read_records, write_records
from catto.recipe import TeacherSettings
from catto.records import Manifest, Question, Split
from catto.tasks import TASKS, Task, from_file, load
from catto.tasks.witnesses import generate as witness_questions
from catto.teacher import ask, write_rows
from catto.teacher.responses import GENERATIONS

# ---- engine


_last: tuple[tuple[str, str, int], Any] | None = None


def engine_of(work: Work, role: str = "model") -> Any:
    """The engine of a stage on the model that it needs; another model than the last one's is loaded in its place."""
    global _last
    key = work.settings["engine"], str(work.model(role).resolve()), work.settings["batch_size"]
    if _last is None or _last[0] != key:
        release()
        _last = key, _loaded(*key)
    engine = _last[1]
    engine.model = work.stage.needs[role].name  # predictions name the model, not the folder it happens to be in
    return engine


def _loaded(engine: str, path: str, batch_size: int) -> Any:
    if engine == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(path, batch_size=batch_size)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(path, batch_size=batch_size)


def release() -> None:
    """Let go of the last engine, for a stage that needs the memory."""
    global _last
    _last = None


# ---- data


WITNESS_SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}


def questions_of(settings: Mapping[str, Any], split: Split, seed: int) -> tuple[list[Question], dict[str, Any]]:
    """The questions of one split as a recipe's task block says, and what loading counted."""
    name, limit = settings["task"], settings.get(split)
    knobs = {key: settings[key] for key in ("options", "witnesses", "reliabilities") if settings.get(key) is not None}
    if name == "witnesses":
        return list(witness_questions(split, limit or WITNESS_SIZES[split], seed=seed, **knobs)), {}
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


def run_responses(work: Work) -> None:
    """Ask the teacher; what it answers is kept unread."""
    ask(_asked(work, work.stage), None, _settings(work, work.stage), work.out, _counting(work, "responses"))


def run_sampled(work: Work) -> None:
    """Sample one response of a model to every question; it is kept unread."""

    settings = _settings(work, work.stage)
    ask(_asked(work, work.stage), engine_of(work), settings, work.out, _counting(work, "samples"))


def run_rows(work: Work) -> None:
    """Read responses and write the rows made of them."""
    responses = work.stage.needs["responses"]
    file, kinds = work.input("responses") / GENERATIONS, work.settings["rows"]
    summary = write_rows(_asked(work, responses), _settings(work, responses), file, work.out, kinds)
    if "preferences" in kinds:  # the teacher's, which `catto teach` prints
        work.write("yield.json", summary.model_dump(mode="json"))


def _asked(work: Work, responses: Stage) -> list[Question]:
    """The questions that a stage of responses puts; their rows need the same file."""
    if "questions" in responses.needs:
        return read_questions(work.input("questions") / "train.jsonl", responses.settings.get("limit"))
    found = read_questions(work.input("held_out") / "validation.jsonl")
    return [question.model_copy(update={"split": "train"}) for question in found]  # the split that is asked


def _settings(work: Work, responses: Stage) -> TeacherSettings:
    """How a stage of responses asks: the recipe's teacher, or a trained model as one."""
    of = responses.settings
    if responses.kind == "responses":
        return work.recipe.teacher.model_copy(update={"n": of["n"]})
    return TeacherSettings(
        n=1,
        temperature=(of["temperature"], of["temperature"]),
        max_tokens=of["max_tokens"],
        reasoning=of["reasoning"],
        seed=of["seed"],
        concurrency=of["batch_size"],
    )


def _counting(work: Work, what: str) -> Callable[[int, int], None]:
    return lambda n, total: work.progress(n, total, what)
