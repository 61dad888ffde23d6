"""Read the logs of HELM: the entries of `per_instance_stats.json`."""

from __future__ import annotations

from typing import Any

from catto.formats.columns import ColumnNames, Fields


def is_helm(record: Fields) -> bool:
    """Whether HELM wrote the record."""
    return {"instance_id", "stats"} <= record.keys()


def read_helm(record: Fields, names: ColumnNames) -> dict[str, Any]:
    """Read an entry of `per_instance_stats.json`, which has the statistics of one answer.

    Args:
        record: The entry.
        names: The columns the user named.

    Returns:
        The mean of every statistic under the statistic's name (of several with the same name, the last one), and:

        - `question`: the id of the instance;
        - `correct`: the statistic `exact_match`; None if there is none;
        - `perturbation`: how HELM changed the question; `none` if it did not;
        - `confidence`: the statistic `max_prob`. It is not set if the user named a confidence column.

    Raises:
        KeyError: A field is missing, or the statistic `max_prob` if it is needed.
    """
    answer: dict[str, Any] = {}
    for statistic in record["stats"]:
        name = statistic["name"]["name"]
        answer[name] = statistic.get("mean")
    answer["question"] = str(record["instance_id"])
    answer["correct"] = answer.get("exact_match")
    perturbation = record.get("perturbation") or {}
    answer["perturbation"] = perturbation.get("name", "none")
    if names.has_default_confidence:
        answer["confidence"] = answer["max_prob"]
    return answer
