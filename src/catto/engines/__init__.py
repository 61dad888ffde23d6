"""Inference engines: Transformers or vLLM in this process, or an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any, Literal

from catto.engines.base import (
    TAU_GRID,
    Context,
    Engine,
    Generation,
    LabelScores,
    Request,
    ScoredGeneration,
    Scores,
    find_stop_end,
)
from catto.engines.locations import check_hub, check_model, is_hub_id, model_name, server_address
from catto.records import Key

__all__ = [
    "TAU_GRID",
    "Context",
    "Engine",
    "Generation",
    "Key",
    "LabelScores",
    "Request",
    "ScoredGeneration",
    "Scores",
    "check_hub",
    "check_model",
    "find_stop_end",
    "is_hub_id",
    "model_name",
    "open_engine",
    "server_address",
]


def open_engine(name: Literal["transformers", "vllm"], model: str, **options: Any) -> Engine:
    """Load a model in this process.

    Args:
        name: The library that runs the model.
        model: A folder or a hub id.
        options: Keyword arguments of `VLLMEngine` or `TransformersEngine.load`.

    Returns:
        The engine, ready to generate and score.
    """
    if name == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(model, **options)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(model, **options)
