"""Where a model is: a folder of this machine, or an id on the hub. Known before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from catto.files import read_json
from catto.problems import DataError

__all__ = ["check_model", "is_hub_id"]

CONFIGS = ("config.json", "adapter_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def is_hub_id(place: str) -> bool:
    """Whether the hub could know this name: `owner/name`, or one of the few that have no owner."""
    return _HUB_ID.fullmatch(place) is not None


def check_model(place: str | Path) -> None:
    """Refuse a place that no model can be loaded from. Whether the hub knows an id is not asked."""
    path = Path(place)
    if not str(place).strip():
        raise DataError("model", None, "expected a folder with a model or a hub id, got an empty name")
    if path.is_dir():
        config = next((path / name for name in CONFIGS if (path / name).exists()), None)
        if config is None:
            raise DataError(path, None, f"not a model: neither {' nor '.join(CONFIGS)} in this folder")
        if not isinstance(read_json(config), dict):
            raise DataError(config, None, "expected a JSON object")
    elif path.exists():
        hint = "; import it first: catto model import-gguf" if path.suffix == ".gguf" else ""
        raise DataError(path, None, f"expected a folder with a model, got a file{hint}")
    elif not is_hub_id(str(place)):
        raise DataError(place, None, "no such folder, and not a hub id, which is owner/name")
