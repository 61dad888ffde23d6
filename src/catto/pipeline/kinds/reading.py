"""The stage of predictions: the labels of generated responses, and how probable those are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from catto.engines import ScoredGeneration
from catto.io.record_files import read_records
from catto.io.text_files import read_json
from catto.pipeline.kinds.generating import StoredEngine
from catto.pipeline.kinds.generation import TEMPERATURES, TextSettings, sampling_options
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work
from catto.records import Prediction
from catto.teacher.responses import GENERATIONS

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class PredictionSettings(StageSettings):
    """What generated responses answer."""

    text: TextSettings
    parser: int


def run_reading(work: Work[PredictionSettings]) -> None:
    """Read generated responses: their labels and how probable those are, by the scores stored with the text."""
    from catto import predict

    def report(n: int, total: int, right: int) -> None:
        work.progress(n, total, f"{100 * right / n:.1f} % right" if n else "")

    text = work.settings.text
    generations = work.input("generated") / GENERATIONS
    temperatures = read_json(work.input("generated") / TEMPERATURES)
    predict.read(
        StoredEngine(work, text.generating.evaluation, generations),
        read_questions(work.input("held_out") / f"{text.split}.jsonl", text.limit),
        read_records(generations, ScoredGeneration),
        **sampling_options(text, temperatures),
        out=work.out / PREDICTIONS,
        progress=report,
    )


def read_predictions(folder: Path) -> list[Prediction]:
    """Read the predictions of a stage's folder."""
    return list(read_records(folder / PREDICTIONS, Prediction))
