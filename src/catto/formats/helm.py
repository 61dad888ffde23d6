"""Logs of HELM: entries of `per_instance_stats.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catto.formats.columns import ColumnNames, Fields


def is_helm(record: Fields) -> bool:
    """Whether HELM wrote the record."""
    return {"instance_id", "stats"} <= record.keys()


def read_helm(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """An entry of `per_instance_stats.json`: every statistic by its name; `max_prob` and `exact_match` by default."""
    answer = {stat["name"]["name"]: stat.get("mean") for stat in record["stats"]}
    answer |= {"question": str(record["instance_id"]), "correct": answer.get("exact_match")}
    answer["perturbation"] = (record.get("perturbation") or {}).get("name", "none")
    if names.confidence == "confidence":
        answer["confidence"] = answer["max_prob"]
    return answer
