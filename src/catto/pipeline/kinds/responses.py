"""The stages of responses that become rows: the teacher's, or samples of a trained model; stored unread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from catto.pipeline.kinds.generating import Generating, open_model_engine
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import OutcomeSettings, TeacherSettings
from catto.records import Question, Split
from catto.tasks.splits import digest
from catto.teacher import ask


@dataclass(frozen=True)
class ResponseSettings(StageSettings):
    """Responses that become rows: the teacher's or, with `generating`, samples of a trained model."""

    teacher: TeacherSettings
    split: Split
    prompts: str
    contents: str | None  # hash of the local files that are read
    parser: int | None  # where responses are stored with labels, which are compared with what is read
    generating: Generating | None
    outcome: OutcomeSettings | None  # of the stream that `outcome` learns from

    # Which questions are held out is known from the stage that gives them.
    # How many responses votes are counted of is the teacher's n.
    excluded: ClassVar = {
        "outcome": frozenset({"score", "rows_per_pair", "held_out", "target", "samples", "source"}),
    }

    def key_fields(self) -> dict[str, Any]:
        """Leave out how the teacher is reached and which rows are picked."""
        return {**super().key_fields(), "teacher": self.teacher.response_settings()}


def run_responses(work: Work[ResponseSettings]) -> None:
    """Ask the teacher, or sample from a trained model; the responses are stored unread."""
    settings = work.settings
    source = None
    unit = "responses"
    if settings.generating is not None:
        source = open_model_engine(work, settings.generating.evaluation)
        unit = "samples"
    ask(
        select_questions(work, settings),
        source,
        settings.teacher,
        work.out,
        lambda n, total: work.progress(n, total, unit),
        # A file of responses to the training questions alone has no held-out pairs, which is no error.
        may_be_empty=settings.split == "validation",
    )


def select_questions(work: Work[Any], settings: ResponseSettings) -> list[Question]:
    """Return the questions that are asked; `teacher` asks those of the train split, so all are given as such."""
    questions = read_questions(work.input("questions") / f"{settings.split}.jsonl")
    limit = None
    if settings.outcome is not None:
        limit = settings.outcome.questions
        if settings.outcome.held_out:
            trained_on = read_questions(work.input("trained_on") / f"{settings.split}.jsonl")
            questions = _leave_out(questions, trained_on, at_least=limit or 0)
    are_generated = any(question.posterior is not None for question in questions)
    if limit is not None and not are_generated:
        questions = _shuffle_questions(questions, seed=work.stage.needs["questions"].settings.seed)
    return [question.model_copy(update={"split": "train"}) for question in questions[:limit]]


def _leave_out(questions: list[Question], trained_on: list[Question], *, at_least: int) -> list[Question]:
    """Return the questions that are not trained on; ValueError for too few."""
    trained_ids = {question.id for question in trained_on}
    others = [question for question in questions if question.id not in trained_ids]
    if len(others) < at_least:
        left = f"{len(others)} questions are left beyond the {len(trained_ids)} of train"
        raise ValueError(f"outcome.held_out: {left}, expected {at_least}")
    return others


def _shuffle_questions(questions: list[Question], *, seed: int) -> list[Question]:
    """Return the questions of a file, which may be sorted, in the order in which `load` draws with a limit."""
    return sorted(questions, key=lambda question: digest(question.task, "train", seed, question.id))
