"""Confidence@k of a cell: the accuracy of each way to pick one of k candidates."""

from __future__ import annotations

from pathlib import Path

from catto.evaluation.selection import candidates, select
from catto.records import DataError, Prediction, read_records
from catto.report.numbers import Number, finite
from catto.report.results import Cell

__all__ = ["CONFIDENCE", "RULE_TITLES", "selection_of"]

CONFIDENCE = "most confident"
# Rule -> how a column is headed.
RULE_TITLES = {
    CONFIDENCE: "Confidence",
    "majority vote": "Majority",
    "confidence-weighted vote": "Weighted vote",
    "mean log-probability": "Mean log-prob.",
    "one random sample": "Random",
    "oracle": "Oracle",
}


def selection_of(cell: Cell, folder: Path) -> dict[int, dict[str, Number]]:
    """Measure every rule at k = 1, 2, 4, ... up to the number of candidates; k -> rule -> accuracy."""
    if cell.candidates is None:
        return {}
    path = folder / cell.candidates
    try:
        given = candidates(list(read_records(path, Prediction)))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
    samples = given.label.shape[1]
    sizes = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return {k: {one.rule: _number(one.accuracy, one.low, one.high) for one in select(given, k)} for k in sizes}


def _number(value: float, low: float, high: float) -> Number:
    return Number(value=value, low=finite(low), high=finite(high))
