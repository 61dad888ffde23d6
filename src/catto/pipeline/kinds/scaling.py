"""The stages that fit a temperature or a vector, and rescale predictions with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean

from catto.io.record_files import write_records
from catto.io.text_files import read_json
from catto.methods import ScalingKind
from catto.pipeline.kinds.generation import TEMPERATURE
from catto.pipeline.kinds.reading import read_stage_predictions
from catto.pipeline.stage import StageSettings, Work, resolve_choice, stage_dir, write_json

SCALED = "scaled.jsonl"
TAU = "tau.json"
VECTOR = "vector.json"


@dataclass(frozen=True)
class ScalingSettings(StageSettings):
    """Which scaling is fitted: a temperature over the whole vocabulary or among the labels, or a vector."""

    kind: ScalingKind = "raw"


def run_fit(work: Work[ScalingSettings]) -> None:
    """Fit a temperature or a vector on the greedy validation predictions of the chosen model."""
    from catto.metrics.temperature import fit_tau
    from catto.metrics.vector import fit_vector

    needs = work.stage.needs
    if "validation" in needs:
        validation = needs["validation"]
    else:  # the stage needs the predictions of all learning rates, and the choice says which one was chosen
        validation = resolve_choice(work.root, needs["model"], "validation")
    predictions = read_stage_predictions(stage_dir(work.root, validation))
    kind = work.settings.kind
    if kind == "vector":
        fit = fit_vector(predictions)
        write_json(work.out / VECTOR, {**vars(fit), "scaling": fit.scaling.model_dump(mode="json")})
    else:
        scaling = fit_tau(predictions, kind)
        write_json(work.out / TEMPERATURE, {"temperature": scaling.tau, **asdict(scaling)})


def run_rescaling(work: Work[ScalingSettings]) -> None:
    """Rescale the confidences of predictions, and store them with the temperature or the vector.

    The predictions are greedy answers, answers sampled at the temperature, or the candidates of Confidence@k.
    """
    from catto.metrics.calibrators import VectorScaling
    from catto.metrics.temperature import rescale_predictions
    from catto.metrics.vector import scale_by_vector

    predictions = read_stage_predictions(work.input("predicted"))
    kind = work.settings.kind
    summary = {
        "temperature": predictions[0].temperature,  # at which the answers were sampled; the same for all
        # Share of the responses without an answer, in whose place the most probable label was taken.
        "fallback_rate": fmean(prediction.is_forced for prediction in predictions),
    }
    if kind == "vector":
        vector = VectorScaling.model_validate(read_json(work.input("tau") / VECTOR)["scaling"])
        write_json(work.out / TAU, {"tau": None, "vector": vector.model_dump(mode="json"), **summary})
        write_records(work.out / SCALED, scale_by_vector(predictions, vector))
    else:
        tau = read_json(work.input("tau") / TEMPERATURE)["temperature"]
        write_json(work.out / TAU, {"tau": tau, **summary})
        write_records(work.out / SCALED, rescale_predictions(predictions, tau, kind))
