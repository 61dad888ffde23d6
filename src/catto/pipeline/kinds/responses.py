"""The stages that collect responses, from the teacher or sampled from a trained model, and store them unparsed."""

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
    """Settings for the responses that become training rows.

    Attributes:
        sampling: How responses are sampled.
        split: The split of the questions.
        prompts: Fingerprint of the wording of the prompts.
        contents: Hash of the local files that are read.
        parser: For stored responses, the version of the answer parser: their labels are compared with what it reads.
        generating: For samples of a trained model, how they are generated; None for the teacher's responses.
        outcome: For the outcome stream, its settings.
    """

    sampling: AskSettings
    split: Split
    prompts: str
    contents: str | None
    parser: int | None
    generating: Generating | None
    outcome: OutcomeSettings | None

    # `held_out` and `samples` are excluded because they are in the key already: by the stage of the questions, and as n
    # of `sampling`.
    excluded: ClassVar = {
        "outcome": frozenset({"score", "rows_per_pair", "held_out", "target", "samples", "source"}),
    }

    def key_fields(self) -> dict[str, Any]:
        """Return the fields of the key, without the teacher's address and the choice of rows.

        `sampling` is hashed under its former name, `teacher`, so that existing keys stay valid.
        """
        values = super().key_fields()
        del values["sampling"]
        values["teacher"] = self.sampling.response_settings()
        return values


def run_responses(work: Work[ResponseSettings]) -> None:
    """Ask the teacher, or sample from a trained model, and store the responses unparsed."""
    settings = work.settings
    model_engine = None  # then `ask` opens the teacher that the settings name
    unit = "responses"
    if settings.generating is not None:
        model_engine = open_model_engine(work, settings.generating.evaluation)
        unit = "samples"
    ask(
        select_questions(work, settings),
        model_engine,
        settings.sampling,
        work.out,
        lambda n, total: work.progress(n, total, unit),
        # A teacher that is a file of responses may answer only training questions: then there are no held-out pairs.
        may_be_empty=settings.split == "validation",
    )


def select_questions(work: Work[Any], settings: ResponseSettings) -> list[Question]:
    """Return the questions to ask.

    These are all questions of the split, unless the responses become the outcome stream, from which a calibration term
    learns. For the stream, the recipe may limit their number and exclude the questions that are trained on.

    Args:
        work: The stage of the responses, or that of their rows: both need the same questions.
        settings: Settings of the responses.

    Returns:
        The questions, the same at every call. A limited number of questions from a file is a random sample.

    Raises:
        ValueError: The stream needs more held-out questions than there are.
    """
    questions = read_questions(work.input("questions") / f"{settings.split}.jsonl")
    if settings.outcome is None:
        return questions
    max_questions = settings.outcome.questions
    if settings.outcome.held_out:
        trained_on = read_questions(work.input("trained_on") / f"{settings.split}.jsonl")
        questions = _leave_out(questions, trained_on, at_least=max_questions or 0)
    # The questions of a file may be sorted, for example by topic. Generated questions, which have a posterior, need no
    # shuffling: they are independent draws in random order.
    are_generated = any(question.posterior is not None for question in questions)
    if max_questions is not None and not are_generated:
        questions = _shuffle_questions(questions, seed=work.stage.needs["questions"].settings.seed)
    return questions[:max_questions]


def _leave_out(questions: list[Question], trained_on: list[Question], *, at_least: int) -> list[Question]:
    """Return the questions that are not in `trained_on`. Raise ValueError if there are fewer than `at_least`."""
    trained_ids = {question.id for question in trained_on}
    others = [question for question in questions if question.id not in trained_ids]
    if len(others) < at_least:
        left = f"{len(others)} questions are left after the {len(trained_ids)} of train"
        raise ValueError(f"outcome.held_out: {left}, expected at least {at_least}")
    return others


def _shuffle_questions(questions: list[Question], *, seed: int) -> list[Question]:
    """Return the questions in the random order in which `load_questions` draws a limited number of them."""
    return sorted(questions, key=lambda question: digest(question.task, "train", seed, question.id))
