"""Switch off the usage reports of other libraries in every command, unless the user has switched them on."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Environment variable -> the value that switches off the reports of a library: Hugging Face's libraries and vLLM.
OFF = {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"}
RAY_VARIABLE = "RAY_USAGE_STATS_ENABLED"


def switch_off_telemetry() -> None:
    """Switch off the usage reports of Hugging Face's libraries, vLLM and Ray in this process and its children.

    A variable that the user has set keeps its value, and a choice made with `ray enable-usage-stats` is kept too. The
    libraries read the variables when they are imported or started, so this must be called first.

    >>> switch_off_telemetry()
    >>> os.environ["HF_HUB_DISABLE_TELEMETRY"]
    '1'
    """
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
    if not _is_ray_set_by_user():
        os.environ.setdefault(RAY_VARIABLE, "0")


def _is_ray_set_by_user() -> bool:
    """Whether `ray enable-usage-stats` or `ray disable-usage-stats` has stored a choice, which Ray reads itself."""
    config_path = os.environ.get("RAY_USAGE_STATS_CONFIG_PATH") or Path.home() / ".ray" / "config.json"
    try:
        settings = json.loads(Path(config_path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and isinstance(settings.get("usage_stats"), bool)
