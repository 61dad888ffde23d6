"""The stage that chooses the temperature at which candidates are sampled."""

from __future__ import annotations

from dataclasses import asdict

from catto.io.text_files import read_json
from catto.pipeline.kinds.generation import TEMPERATURE
from catto.pipeline.kinds.reading import read_stage_predictions
from catto.pipeline.stage import Work, write_json


def run_sampling_choice(work: Work) -> None:
    """Choose the sampling temperature with the best accuracy of Confidence@k on validation questions."""
    from catto.metrics.selection import choose_sampling

    tau = read_json(work.input("tau") / TEMPERATURE)["temperature"]
    choice = choose_sampling(read_stage_predictions(work.input("predicted")), tau)
    write_json(work.out / TEMPERATURE, asdict(choice))
