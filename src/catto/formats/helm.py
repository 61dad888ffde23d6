"""Logs of HELM: entries of `per_instance_stats.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catto.formats.columns import ColumnNames, Fields


def is_helm(record: Fields) -> bool:
    """Whether HELM wrote the record."""
    return {"instance_id", "stats"} <= record.keys()


def read_helm(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """Read an entry of `per_instance_stats.json`.

    Args:
        record: The entry.
        names: The columns the user named.

    Returns:
        Every statistic by its name, and `question`, `correct`, `perturbation` and `confidence`. `exact_match` is the
        default grade, `max_prob` the default confidence.

    Raises:
        KeyError: A field is missing, or `max_prob` if the user named no confidence.
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
