"""Read the tables of uqlm: the rows of `results.to_df()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catto.errors import join_names
from catto.formats.columns import ColumnNames, Fields

# Those scores of uqlm's scorers and ensembles that lie in [0, 1].
UQLM_SCORES = (
    "sequence_probability",
    "normalized_probability",
    "min_probability",
    "probability_margin",
    "p_true",
    "mean_token_negentropy",
    "min_token_negentropy",
    "monte_carlo_probability",
    "consistency_and_confidence",
    "semantic_negentropy",
    "semantic_density",
    "semantic_sets_confidence",
    "noncontradiction",
    "entailment",
    "exact_match",
    "cosine_sim",
    "bert_score",
    "bleurt",
    "ensemble_score",
    "avg",
    "median",
)


def is_uqlm(record: Fields) -> bool:
    """Whether uqlm wrote the record."""
    return "response" in record and not record.keys().isdisjoint(UQLM_SCORES)


def read_uqlm(record: Fields, names: ColumnNames, _labels: Sequence[str]) -> dict[str, Any]:
    """Read a row of `results.to_df()`, with the column `response_correct` that a grader added.

    Args:
        record: The row.
        names: The columns the user named.

    Returns:
        The row and catto's own fields. If the user named no confidence, the row's only score is used.

    Raises:
        ValueError: The user named no confidence, and the row has several scores or none.
    """
    answer = dict(record)
    prompt = record.get("prompt")
    if prompt is not None:
        answer["question"] = prompt
    grade = record.get("response_correct")
    if grade is not None:
        answer["correct"] = grade
    if names.confidence == "confidence":
        scores = [name for name in UQLM_SCORES if name in record]
        if not scores:
            raise ValueError("found none of uqlm's scores: name the column of the confidence with --confidence")
        if len(scores) > 1:
            raise ValueError(f"name one of the scores {join_names(scores)} with --confidence")
        answer["confidence"] = record[scores[0]]
    return answer
