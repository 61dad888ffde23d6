"""The engine that stages generate and score with, and the settings that determine its output."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from catto.engines import Context, Engine, Generation, Key, Request, Scores, open_engine
from catto.io.record_files import read_manifest
from catto.pipeline.stage import StageSettings, Work
from catto.recipe.settings import EvaluationSettings
from catto.records import Refusal

# The engine of the last stage that needed one, with what it was opened with: the engine's name, the model's path, the
# batch size and the type of the weights.
_last: tuple[tuple[str, str, int, str | None], Engine] | None = None


@dataclass(frozen=True)
class Generating(StageSettings):
    """What determines generated text and its scores, apart from the model."""

    evaluation: EvaluationSettings
    reasoning: bool
    prompts: str  # fingerprint of the wording of the prompts

    excluded: ClassVar = {
        "evaluation": frozenset({"bins", "resamples", "unparsed", "decode", "k", "sampling", "preference_pairs"})
    }


def open_model_engine(work: Work, evaluation: EvaluationSettings) -> Engine:
    """Return the engine for the model that a stage needs. It is kept open, since the next stage often needs it too."""
    global _last
    path = str(work.model().resolve())
    key = (evaluation.engine, path, evaluation.batch_size, evaluation.dtype)
    if _last is None or _last[0] != key:
        release_engine()
        options: dict[str, Any] = {"batch_size": evaluation.batch_size}
        if evaluation.dtype is not None:
            options["dtype"] = evaluation.dtype
        _last = (key, open_engine(evaluation.engine, path, **options))
    engine = _last[1]
    engine.model = work.stage.needs["model"].name  # predictions name the model, not its folder
    return engine


class StoredEngine(Engine):
    """Stands in for the engine that wrote a stage's generations, and loads the model only if scores are missing."""

    def __init__(self, work: Work, evaluation: EvaluationSettings, generations: Path) -> None:
        """Read the properties of the engine from the manifest of its generations.

        Args:
            work: The stage that reads the generations.
            evaluation: The settings with which to open the real engine if it is needed.
            generations: The file of generations, next to its manifest.
        """
        notes = read_manifest(generations).notes
        self.work = work
        self.evaluation = evaluation
        self.name = notes["engine"]
        self.model = notes["model"]
        self.batch_size = evaluation.batch_size
        if "positions" in notes:
            self.positions = notes["positions"]
        else:  # the generations were stored without scores, so the model is needed anyway
            self.positions = open_model_engine(work, evaluation).positions

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.work.model())

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Open the real engine and generate."""
        return open_model_engine(self.work, self.evaluation).generate(requests, done)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Open the real engine and score the contexts that were not scored when the text was generated."""
        return open_model_engine(self.work, self.evaluation).score(contexts)


def release_engine() -> None:
    """Drop the engine that is kept open, to free its memory."""
    global _last
    _last = None
