"""The table of all kinds of stages: the function that runs each kind, and the resources that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from catto.pipeline.kinds.base import run_base
from catto.pipeline.kinds.choice import run_choice
from catto.pipeline.kinds.generation import run_generation
from catto.pipeline.kinds.preference import run_pair_logprobs, run_preference_accuracy
from catto.pipeline.kinds.questions import run_questions
from catto.pipeline.kinds.reading import run_reading
from catto.pipeline.kinds.report import run_report
from catto.pipeline.kinds.responses import run_responses
from catto.pipeline.kinds.rows import run_rows
from catto.pipeline.kinds.sampling import run_sampling_choice
from catto.pipeline.kinds.scaling import run_fit, run_rescaling
from catto.pipeline.kinds.train import run_train
from catto.pipeline.stage import Work

ResourceBlock = Literal["train", "predict", "report"]


class StageKind(NamedTuple):
    """A kind of stage.

    Attributes:
        run: The function that runs a stage of this kind.
        resources: The block of the recipe's `resources` that applies to it; `report` applies to light stages.
        loads_model: Whether it loads a model by itself. The engine that is kept open is released before.
    """

    run: Callable[[Work[Any]], None]
    resources: ResourceBlock = "report"
    loads_model: bool = False


STAGE_KINDS: dict[str, StageKind] = {
    "questions": StageKind(run_questions),
    "held_out": StageKind(run_questions),
    "responses": StageKind(run_responses, loads_model=True),
    "sampled": StageKind(run_responses, "predict"),
    "rows": StageKind(run_rows),
    "base": StageKind(run_base, loads_model=True),
    "train": StageKind(run_train, "train", loads_model=True),
    "chosen": StageKind(run_choice),
    "generated": StageKind(run_generation, "predict"),
    "predicted": StageKind(run_reading, "predict"),
    "tau": StageKind(run_fit),
    "sampling": StageKind(run_sampling_choice),
    "scaled": StageKind(run_rescaling),
    "pair_logprobs": StageKind(run_pair_logprobs, "predict", loads_model=True),
    "preference_accuracy": StageKind(run_preference_accuracy),
    "report": StageKind(run_report),
}
