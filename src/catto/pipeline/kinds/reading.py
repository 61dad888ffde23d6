"""The stage of predictions: the labels of generated responses, and how probable those are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catto.engines import ScoredGeneration
from catto.io.record_files import manifest_path, read_records
from catto.io.text_files import read_json
from catto.pipeline.kinds.generating import StoredEngine, open_model_engine
from catto.pipeline.kinds.generation import TEMPERATURES, TextSettings, sampling_options
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work
from catto.records import Prediction, Question
from catto.teacher.responses import GENERATIONS

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class PredictionSettings(StageSettings):
    """What generated responses answer."""

    text: TextSettings
    parser: int
    grading: int | None = None  # the version of the grading; None where answers are labels


def run_reading(work: Work[PredictionSettings]) -> None:
    """Read generated responses: their labels and how probable those are, by the scores stored with the text."""
    from catto import predict

    def report(n: int, total: int, right: int) -> None:
        work.progress(n, total, f"{100 * right / n:.1f} % right" if n else "")

    text = work.settings.text
    questions = read_questions(work.input("held_out") / f"{text.split}.jsonl", text.limit)
    if not questions[0].has_labels:
        _read_short_answers(work, questions)
        return
    generations = work.input("generated") / GENERATIONS
    temperatures = read_json(work.input("generated") / TEMPERATURES)
    predict.read(
        StoredEngine(work, text.generating.evaluation, generations),
        questions,
        read_records(generations, ScoredGeneration),
        **sampling_options(text, temperatures),
        out=work.out / PREDICTIONS,
        progress=report,
    )


def _read_short_answers(work: Work[PredictionSettings], questions: Sequence[Question]) -> None:
    """Read and grade the answers of generated responses, and ask the model for P(True) of each."""
    from catto import elicit

    text = work.settings.text
    generations = work.input("generated") / GENERATIONS
    temperatures = read_json(work.input("generated") / TEMPERATURES)
    out = work.out / PREDICTIONS
    own_copy = elicit.sibling_path(out, "generations")
    shutil.copyfile(manifest_path(generations), manifest_path(own_copy))
    shutil.copyfile(generations, own_copy)
    elicit.evaluate_kinds(
        open_model_engine(work, text.generating.evaluation),
        questions,
        ["ptrue"],
        **sampling_options(text, temperatures),
        out=out,
        progress=lambda n, total, _: work.progress(n, total, "judged"),
    )


def read_stage_predictions(folder: Path) -> list[Prediction]:
    """Read the predictions of a stage's folder."""
    return list(read_records(folder / PREDICTIONS, Prediction))
