"""Where a model is: a folder of this machine, or an id on the hub. Known before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from catto.records import DataError, read_json

__all__ = ["check_model"]

CONFIGS = ("config.json", "adapter_config.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def check_model(place: str | Path) -> None:
    """Refuse a place that no model can be loaded from. Whether the hub knows an id is not asked."""
    path = Path(place)
    if path.is_dir():
        config = next((path / name for name in CONFIGS if (path / name).exists()), None)
        if config is None:
            raise DataError(path, None, f"not a model: neither {' nor '.join(CONFIGS)} in this folder")
        if not isinstance(read_json(config), dict):
            raise DataError(config, None, "expected a JSON object")
    elif path.exists():
        hint = "; import it first: catto model import-gguf" if path.suffix == ".gguf" else ""
        raise DataError(path, None, f"expected a folder with a model, got a file{hint}")
    elif not _HUB_ID.fullmatch(str(place)):
        raise DataError(place, None, "no such folder, and not a hub id, which is owner/name")
