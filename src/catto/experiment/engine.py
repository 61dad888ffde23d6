"""The engine that stages generate and score with. The last one is kept: most stages ask the model of the one before."""

from __future__ import annotations

from typing import Any

from catto.experiment.stages import Work

_last: tuple[tuple[str, str, int], Any] | None = None


def engine_of(work: Work, role: str = "model") -> Any:
    """The engine of a stage on the model that it needs; another model than the last one's is loaded in its place."""
    global _last
    key = work.settings["engine"], str(work.model(role).resolve()), work.settings["batch_size"]
    if _last is None or _last[0] != key:
        release()
        _last = key, _loaded(*key)
    engine = _last[1]
    engine.model = work.stage.needs[role].name  # predictions name the model, not the folder it happens to be in
    return engine


def _loaded(engine: str, path: str, batch_size: int) -> Any:
    if engine == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(path, batch_size=batch_size)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(path, batch_size=batch_size)


def release() -> None:
    """Let go of the last engine, for a stage that needs the memory."""
    global _last
    _last = None
