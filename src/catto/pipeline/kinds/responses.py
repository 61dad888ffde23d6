"""The stages of responses that become rows: the teacher's, or samples of a trained model; stored unread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from catto.pipeline.kinds.generating import Generating, open_model_engine
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import OutcomeSettings
from catto.records import Question, Split
from catto.tasks.splits import digest
from catto.teacher import ask
from catto.teacher.sampling import AskSettings


@dataclass(frozen=True)
class ResponseSettings(StageSettings):
    """Responses that become rows: the teacher's or, with `generating`, samples of a trained model."""

    sampling: AskSettings
    split: Split
    prompts: str  # fingerprint of their wording
    contents: str | None  # hash of the local files that are read
    parser: int | None  # its version, where stored responses have labels, which are compared with what is read
    generating: Generating | None
    outcome: OutcomeSettings | None  # of the stream that `outcome` learns from

    # Which questions are held out is known from the stage that gives them.
    # How many responses votes are counted of is n of `sampling`.
    excluded: ClassVar = {
        "outcome": frozenset({"score", "rows_per_pair", "held_out", "target", "samples", "source"}),
    }

    def key_fields(self) -> dict[str, Any]:
        """Leave out how the teacher is reached and which rows are picked.

        `sampling` is hashed as `teacher`, its name when the first keys were made.
        """
        values = super().key_fields()
        del values["sampling"]
        values["teacher"] = self.sampling.response_settings()
        return values


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
        settings.sampling,
        work.out,
        lambda n, total: work.progress(n, total, unit),
        # A file of stored responses may answer the training questions alone: then there are no held-out pairs.
        may_be_empty=settings.split == "validation",
    )


def select_questions(work: Work[Any], settings: ResponseSettings) -> list[Question]:
    """Return the questions that are asked: those of the split or, for the outcome stream, a sample of them.

    Args:
        work: The stage of the responses, or that of their rows: both need the same questions.
        settings: Settings of the responses.
    """
    questions = read_questions(work.input("questions") / f"{settings.split}.jsonl")
    limit = None
    if settings.outcome is not None:
        limit = settings.outcome.questions
        if settings.outcome.held_out:
            trained_on = read_questions(work.input("trained_on") / f"{settings.split}.jsonl")
            questions = _leave_out(questions, trained_on, at_least=limit or 0)
    are_drawn_in_order = any(question.posterior is not None for question in questions)  # of a built-in world
    if limit is not None and not are_drawn_in_order:
        questions = _shuffle_questions(questions, seed=work.stage.needs["questions"].settings.seed)
    return questions[:limit]


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
