"""The stages that make data: questions, responses of the teacher or of a trained model, and rows.

Here is also the engine that stages generate and score with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from catto.engines import Context, Engine, Generation, Key, Request, Scores, open_engine
from catto.io.record_files import library_versions, read_manifest, read_records, write_records
from catto.pipeline.stage import QuestionSettings, ResponseSettings, RowSettings, Work, write
from catto.recipe.settings import EvaluationSettings, TaskSettings
from catto.records import Manifest, Question, Refusal
from catto.tasks import TASKS, Task, load_questions
from catto.tasks.own_file import own_task
from catto.tasks.splits import digest
from catto.tasks.witnesses import generate_questions
from catto.teacher import ask, write_rows
from catto.teacher.responses import GENERATIONS

# ---- the engine -----------------------------------------------------------------------------------------------------

_last: tuple[tuple[str, str, int], Engine] | None = None


def engine_of(work: Work, evaluation: EvaluationSettings) -> Engine:
    """Return the engine on the model that a stage needs. The last one is kept: the next stage often needs it too."""
    global _last
    key = evaluation.engine, str(work.model().resolve()), evaluation.batch_size
    if _last is None or _last[0] != key:
        release()
        _last = key, open_engine(evaluation.engine, key[1], batch_size=evaluation.batch_size)
    engine = _last[1]
    engine.model = work.stage.needs["model"].name  # predictions name the model, not its folder
    return engine


class StoredEngine(Engine):
    """The engine that wrote a stage's generations, for reading them: its model is loaded where scores are missing."""

    def __init__(self, work: Work, evaluation: EvaluationSettings, generations: Path) -> None:
        self.work, self.evaluation, notes = work, evaluation, read_manifest(generations).notes
        self.name, self.model, self.batch_size = notes["engine"], notes["model"], evaluation.batch_size
        # Generations that were stored without scores need the model anyway.
        self.positions = notes["positions"] if "positions" in notes else engine_of(work, evaluation).positions

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer beside the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.work.model())

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Generate with the model itself."""
        return engine_of(self.work, self.evaluation).generate(requests, done)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score what was not scored when it was generated."""
        return engine_of(self.work, self.evaluation).score(contexts)


def release() -> None:
    """Drop the last engine, for a stage that needs the memory."""
    global _last
    _last = None


# ---- questions ------------------------------------------------------------------------------------------------------


def task_of(name: str, block: TaskSettings, seeds: Sequence[int] = ()) -> Task:
    """Return the task of a block of the recipe: one of TASKS, or the user's own file, which holds out by the seeds.

    >>> task_of("snli", TaskSettings()) is TASKS["snli"]
    True
    """
    if block.own:
        return own_task(name, block, seeds)
    if name not in TASKS:
        raise ValueError(f"tasks.{name}: neither one of {', '.join(TASKS)} nor given a path")
    return TASKS[name]


def questions_of(settings: QuestionSettings) -> tuple[list[Question], dict[str, Any]]:
    """Return the questions of one split, and what was counted when they were loaded."""
    block, split, seed = settings.block, settings.split, settings.seed
    limit: int | None = getattr(block, split)
    if settings.task == "witnesses" and not block.own:
        return list(generate_questions(split, limit, seed=seed, **block.world_options())), {}
    task = task_of(settings.task, block, settings.seeds or ())
    loaded = load_questions(task, split, seed=seed, data_dir=block.data_dir, files=block.files, limit=limit)
    questions = list(loaded)
    return questions, {"read": loaded.report.read, "kept": loaded.report.kept, "gold": dict(loaded.report.gold)}


def run_questions(work: Work[QuestionSettings]) -> None:
    """Write the questions of one split, with their manifest."""
    questions, notes = questions_of(work.settings)
    if not questions:
        raise ValueError(f"no question for {work.settings.split}")
    counts, seed = {"questions": len(questions)}, work.settings.seed
    manifest = Manifest(kind="questions", counts=counts, seed=seed, notes=notes, versions=library_versions())
    write_records(work.out / f"{work.settings.split}.jsonl", questions, manifest)


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the questions of a file, at most `limit`."""
    return list(read_records(path, Question))[:limit]


# ---- responses and rows ---------------------------------------------------------------------------------------------


def run_responses(work: Work[ResponseSettings]) -> None:
    """Ask the teacher, or sample from a trained model; the responses are stored unread."""
    settings = work.settings
    source = None if settings.generating is None else engine_of(work, settings.generating.evaluation)
    unit = "responses" if source is None else "samples"
    ask(
        _asked(work, settings),
        source,
        settings.teacher,
        work.out,
        lambda n, total: work.progress(n, total, unit),
        # A file of responses to the training questions alone has no held-out pairs, which is no error.
        may_be_empty=settings.split == "validation",
    )


def run_rows(work: Work[RowSettings]) -> None:
    """Read responses and write their rows."""
    asked, kinds = work.settings.asked, work.settings.kinds
    summary = write_rows(_asked(work, asked), asked.teacher, work.input("responses") / GENERATIONS, work.out, kinds)
    if "preferences" in kinds:  # the teacher's, which `catto teach` prints
        write(work.out / "yield.json", summary.model_dump(mode="json"))


def _asked(work: Work[Any], settings: ResponseSettings) -> list[Question]:
    """Return the questions that are asked; `teacher` asks those of the train split, so all are given as such."""
    limit = None if settings.outcome is None else settings.outcome.questions
    questions = read_questions(work.input("questions") / f"{settings.split}.jsonl")
    if settings.outcome is not None and settings.outcome.held_out:
        seen = {question.id for question in read_questions(work.input("trained_on") / f"{settings.split}.jsonl")}
        questions = [question for question in questions if question.id not in seen]
        if len(questions) < (limit or 0):
            left = f"{len(questions)} questions are left beyond the {len(seen)} of train"
            raise ValueError(f"outcome.held_out: {left}, expected {limit}")
    if limit is not None and all(question.posterior is None for question in questions):
        # A file may be sorted, generated questions are not. The order is that in which `load` draws with a limit.
        order = "train", work.stage.needs["questions"].settings.seed
        questions = sorted(questions, key=lambda question: digest(question.task, *order, question.id))
    return [question.model_copy(update={"split": "train"}) for question in questions[:limit]]
