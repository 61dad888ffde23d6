"""Read the logs of HELM: the entries of `per_instance_stats.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catto.formats.columns import ColumnNames, Fields


def is_helm(record: Fields) -> bool:
    """Whether HELM wrote the record."""
    return {"instance_id", "stats"} <= record.keys()


def read_helm(record: Fields, names: ColumnNames, _labels: Sequence[str]) -> dict[str, Any]:
    """Read an entry of `per_instance_stats.json`.

    Args:
        record: The entry.
        names: The columns the user named.

    Returns:
        Every statistic under its own name, and `question`, `correct`, `perturbation` and `confidence`. The default
        grade is `exact_match`; the default confidence is `max_prob`.

    Raises:
        KeyError: A field is missing. `max_prob` is required only if the user named no confidence.
    """
    answer: dict[str, Any] = {}
    for statistic in record["stats"]:
        name = statistic["name"]["name"]
        answer[name] = statistic.get("mean")
    answer["question"] = str(record["instance_id"])
    answer["correct"] = answer.get("exact_match")
    perturbation = record.get("perturbation") or {}
    answer["perturbation"] = perturbation.get("name", "none")
    if names.confidence == "confidence":
        answer["confidence"] = answer["max_prob"]
    return answer
