"""The table of the kinds of stages: kind -> the function that runs a stage of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from catto.pipeline.stage import Work

StageRunner = Callable[[Work[Any]], None]


def find_runner(kind: str) -> StageRunner:
    """Return the function that runs a stage of this kind.

    The modules are imported here and not at the top: the command line must answer before NumPy is loaded.
    """
    from catto.pipeline import results
    from catto.pipeline.kinds import preference, steps

    kinds: dict[str, StageRunner] = {
        "questions": steps.run_questions,
        "held_out": steps.run_questions,
        "responses": steps.run_responses,
        "sampled": steps.run_responses,
        "rows": steps.run_rows,
        "base": _run_base,
        "train": _run_train,
        "chosen": results.run_chosen,
        "generated": results.run_generated,
        "predicted": results.run_predicted,
        "tau": results.run_tau,
        "sampling": results.run_sampling,
        "scaled": results.run_scaled,
        "pair_logprobs": preference.run_pair_logprobs,
        "preference_accuracy": preference.run_preference_accuracy,
        "report": results.run_report,
    }
    return kinds[kind]


# Importing torch takes seconds, so only stages that train do it.


def _run_base(work: Work[Any]) -> None:
    from catto.pipeline.kinds.train import run_base

    run_base(work)


def _run_train(work: Work[Any]) -> None:
    from catto.pipeline.kinds.train import run_train

    run_train(work)
