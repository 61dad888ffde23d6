"""Which checkpoint of a killed run can be gone on from."""

from __future__ import annotations

import json
import re
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")
# One of these holds, or lists the files that hold, the model or the adapter.
_MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model_fsdp_0",
)


def newest_complete(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that was written to its end, None where there is none.

    Transformers writes a checkpoint in place and trainer_state.json last, so a kill leaves one that has the highest
    number and lacks that file, or holds a part of it.
    """
    found = [(int(match[1]), path) for path in Path(output_dir).glob("checkpoint-*") if (match := _number(path))]
    return next((path for _, path in sorted(found, reverse=True) if _complete(path)), None)


def _number(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def _complete(path: Path) -> bool:
    return any((path / name).exists() for name in _MODELS) and _parses(path / "trainer_state.json")


def _parses(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except (OSError, ValueError):
        return False
