"""Confidence@k of a cell: the accuracy of each way to pick one of k candidates, and what is known of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catto.evaluation.selection import candidates, select, within_questions
from catto.evaluation.sources import Sources
from catto.problems import DataError
from catto.records import Prediction, read_records
from catto.report.numbers import Number, finite
from catto.report.results import Cell

__all__ = ["CONFIDENCE", "MAJORITY", "RULE_TITLES", "Selection", "selection_of"]

CONFIDENCE, MAJORITY = "most confident", "majority vote"
# Rule -> how a column is headed.
RULE_TITLES = {
    CONFIDENCE: "Confidence",
    MAJORITY: "Majority",
    "confidence-weighted vote": "Weighted vote",
    "mean log-probability": "Mean log-prob.",
    "one random sample": "Random",
    "oracle": "Oracle",
}


@dataclass(frozen=True)
class Selection:
    """rules: k -> rule -> accuracy. sampled: AUROC within questions, how many have pairs, fallback, temperatures."""

    rules: dict[int, dict[str, Number]] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)


def selection_of(cell: Cell, folder: Path) -> Selection:
    """Measure every rule at k = 1, 2, 4, ... up to the number of candidates."""
    if cell.candidates is None:
        return Selection()
    path = folder / cell.candidates
    try:
        predictions = list(read_records(path, Prediction))
        tau = _ranking_tau(cell, predictions)
        given = candidates(predictions, tau)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
    samples = given.label.shape[1]
    sizes = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    rules = {k: {one.rule: _number(one.accuracy, one.low, one.high) for one in select(given, k)} for k in sizes}
    within = within_questions(given)
    drawn = predictions[0].temperature if cell.sampling_temperature is None else cell.sampling_temperature
    sampled = {
        "questions_with_both": float(within.questions),
        "sample_fallback_rate": Sources.of(one.source for one in predictions).share("fallback"),
        "sampling_temperature": drawn,
        "tau": tau,
    }
    return Selection(rules, sampled | ({"auroc_within": within.value} if within.pairs else {}))


def _ranking_tau(cell: Cell, predictions: Sequence[Prediction]) -> float:
    """The temperature at which confidences are compared: the cell's; 1 where the files do not allow another."""
    if not any(one.logsumexp is not None for one in predictions):
        return 1.0
    return predictions[0].temperature or 1.0 if cell.tau is None else cell.tau


def _number(value: float, low: float, high: float) -> Number:
    return Number(value=value, low=finite(low), high=finite(high))
