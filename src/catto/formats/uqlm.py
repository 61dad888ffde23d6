"""Read the tables of uqlm, which its method `UQResult.to_df()` returns."""

from __future__ import annotations

from typing import Any

from catto.errors import join_names
from catto.formats.columns import ColumnNames, Fields

# Columns with a score, of uqlm's scorers and ensembles. Scores that do not lie in [0, 1] are left out.
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


def read_uqlm(record: Fields, names: ColumnNames) -> dict[str, Any]:
    """Read a row of a table of uqlm.

    uqlm does not grade responses. The user adds the grades as a column `response_correct`.

    Args:
        record: The row.
        names: The columns the user named.

    Returns:
        The columns of the row, and those of `question`, `correct` and `confidence` that are known. The confidence is
        the row's only score; if the user named a confidence column, `confidence` is not set.

    Raises:
        ValueError: The user named no confidence column, and the row has several scores or none.
    """
    answer = dict(record)
    prompt = record.get("prompt")
    if prompt is not None:
        answer["question"] = prompt
    grade = record.get("response_correct")
    if grade is not None:
        answer["correct"] = grade
    if names.has_default_confidence:
        scores = [name for name in UQLM_SCORES if name in record]
        if not scores:
            raise ValueError("found none of uqlm's scores: name the column of the confidence with --confidence")
        if len(scores) > 1:
            raise ValueError(f"name one of the scores {join_names(scores)} with --confidence")
        answer["confidence"] = record[scores[0]]
    return answer
