"""Tables of uqlm: rows of `results.to_df()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catto.errors import join_names
from catto.formats.columns import ColumnNames, Fields

# The scores of uqlm's scorers and ensembles that lie in 0 to 1.
UQLM_SCORES = (
    *("sequence_probability", "normalized_probability", "min_probability", "probability_margin", "p_true"),
    *("mean_token_negentropy", "min_token_negentropy", "monte_carlo_probability", "consistency_and_confidence"),
    *("semantic_negentropy", "semantic_density", "semantic_sets_confidence", "noncontradiction", "entailment"),
    *("exact_match", "cosine_sim", "bert_score", "bleurt", "ensemble_score", "avg", "median"),
)


def is_uqlm(record: Fields) -> bool:
    """Whether uqlm wrote the record."""
    return "response" in record and not record.keys().isdisjoint(UQLM_SCORES)


def read_uqlm(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """A row of `results.to_df()`, with the column `response_correct` that a grader added."""
    answer = {"question": record.get("prompt"), "correct": record.get("response_correct")}
    answer = {**record, **{name: value for name, value in answer.items() if value is not None}}
    if names.confidence == "confidence":
        scores = [name for name in UQLM_SCORES if name in record]
        if len(scores) != 1:
            raise ValueError(f"name one of the scores {join_names(scores)} with --confidence")
        answer["confidence"] = record[scores[0]]
    return answer
