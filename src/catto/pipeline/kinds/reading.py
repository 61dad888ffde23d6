"""The stage that reads the answers of generated responses and gives each a confidence."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from catto.engines import ScoredGeneration
from catto.io.record_files import manifest_path, read_records
from catto.io.text_files import read_json
from catto.pipeline.kinds.generating import StoredEngine, open_model_engine
from catto.pipeline.kinds.generation import TEMPERATURES, TextSettings, sampling_options
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work
from catto.records import Prediction, Question
from catto.teacher.responses import GENERATIONS

if TYPE_CHECKING:
    from catto.predict import SamplingOptions

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class PredictionSettings(StageSettings):
    """Settings for reading the answers of generated responses."""

    text: TextSettings
    parser: int  # version of the answer parser
    grading: int | None = None  # version of the grading; None if answers are labels


def run_reading(work: Work[PredictionSettings]) -> None:
    """Turn generated responses into predictions: read the answer of each and determine its confidence.

    If the answers are labels, the confidence comes from the scores that are stored with the responses, so the model is
    loaded only if some are missing. If they are short answers, the model is asked whether each is true.
    """
    text = work.settings.text
    questions = read_questions(work.input("held_out") / f"{text.split}.jsonl", text.limit)
    generations = work.input("generated") / GENERATIONS
    # Responses must be read with the options with which they were sampled, the temperatures included.
    sampling = sampling_options(text, read_json(work.input("generated") / TEMPERATURES))
    if questions[0].has_labels:  # either all questions of a task have labels or none has
        _read_labels(work, questions, generations, sampling)
    else:
        _read_short_answers(work, questions, generations, sampling)


def _read_labels(
    work: Work[PredictionSettings], questions: Sequence[Question], generations: Path, sampling: SamplingOptions
) -> None:
    """Read the labels that the responses answer with, and their confidences.

    Args:
        work: The stage.
        questions: The questions.
        generations: The file of generated responses.
        sampling: The options with which they were sampled.
    """
    from catto import predict

    def report(count: int, total: int, right: int) -> None:
        note = f"{100 * right / count:.1f} % right" if count else ""
        work.progress(count, total, note)

    text = work.settings.text
    # This engine stands in for the one that generated: it loads the model only if scores of labels are missing.
    predict.read(
        StoredEngine(work, text.generating.evaluation, generations),
        questions,
        read_records(generations, ScoredGeneration),
        **sampling,
        out=work.out / PREDICTIONS,
        progress=report,
    )


def _read_short_answers(
    work: Work[PredictionSettings], questions: Sequence[Question], generations: Path, sampling: SamplingOptions
) -> None:
    """Read and grade short answers, and ask the model for P(True): the probability that it calls an answer true.

    Args:
        work: The stage.
        questions: The questions.
        generations: The file of generated responses.
        sampling: The options with which they were sampled.
    """
    from catto import elicit

    out = work.out / PREDICTIONS
    # `evaluate_kinds` finds this copy of the finished generations and does not generate again. The manifest is copied
    # first: after a kill in between, generations without a manifest would be refused.
    own_copy = elicit.sibling_path(out, "generations")
    shutil.copyfile(manifest_path(generations), manifest_path(own_copy))
    shutil.copyfile(generations, own_copy)
    elicit.evaluate_kinds(
        open_model_engine(work, work.settings.text.generating.evaluation),
        questions,
        ["ptrue"],
        **sampling,
        out=out,
        progress=lambda n, total, _: work.progress(n, total, "judged"),
    )


def read_stage_predictions(folder: Path) -> list[Prediction]:
    """Read the predictions of a stage's folder."""
    return list(read_records(folder / PREDICTIONS, Prediction))
