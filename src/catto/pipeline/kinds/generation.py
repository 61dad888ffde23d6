"""The stage that generates responses to the questions of a split and scores their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catto.io.text_files import read_json
from catto.pipeline.kinds.generating import Generating, open_model_engine
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.stage import StageSettings, Work, write_json
from catto.records import Split
from catto.teacher.responses import GENERATIONS

if TYPE_CHECKING:
    from catto.predict import SamplingOptions

TEMPERATURE = "temperature.json"
TEMPERATURES = "temperatures.json"


@dataclass(frozen=True)
class TextSettings(StageSettings):
    """Generated responses to the questions of a split."""

    split: Split
    seed: int
    generating: Generating
    # One temperature per sample, or the number of samples that are drawn at the temperature of a different stage.
    temperatures: tuple[float, ...] | int
    limit: int | None  # maximum number of questions


def run_generation(work: Work[TextSettings]) -> None:
    """Generate responses to the questions of a split. Store their text, token ids and the scores at their labels."""
    from catto import predict

    settings = work.settings
    temperatures = _find_temperatures(work)
    write_json(work.out / TEMPERATURES, temperatures)
    predict.generate(
        open_model_engine(work, settings.generating.evaluation),
        read_questions(work.input("held_out") / f"{settings.split}.jsonl", settings.limit),
        **sampling_options(settings, temperatures),
        out=work.out / GENERATIONS,
        progress=lambda n, total, _: work.progress(n, total, ""),
    )


def _find_temperatures(work: Work[TextSettings]) -> tuple[float, ...]:
    """Return the temperature of each sample: from the settings, or as a different stage has found it."""
    temperatures = work.settings.temperatures
    if isinstance(temperatures, int):
        sample_count = temperatures
        found = read_json(work.input("temperature") / TEMPERATURE)["temperature"]
        return (found,) * sample_count
    return temperatures


def sampling_options(text: TextSettings, temperatures: Sequence[float]) -> SamplingOptions:
    """Return the options of `predict.generate` and `predict.read`, which must be the same for both."""
    return {
        "k": len(temperatures),
        "temperature": temperatures,
        "seed": text.seed,
        "max_tokens": text.generating.evaluation.max_tokens,
        "reasoning": text.generating.reasoning,
    }
