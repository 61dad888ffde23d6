"""Libraries that report their use to their makers: off in every command, unless the user switches it on."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Environment variable -> the value that switches the reports of one library off: Hugging Face's, vLLM's.
OFF = {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"}
RAY_VARIABLE = "RAY_USAGE_STATS_ENABLED"


def switch_off_telemetry() -> None:
    """Switch off what Hugging Face's libraries, vLLM and Ray report of their use, in this process and its children.

    A variable that the user has set keeps its value, and so does Ray's `ray enable-usage-stats`. The libraries read
    the variables when they are imported or started, so this is called before.

    >>> switch_off_telemetry()
    >>> os.environ["HF_HUB_DISABLE_TELEMETRY"]
    '1'
    """
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
    if not _is_ray_set_by_user():
        os.environ.setdefault(RAY_VARIABLE, "0")


def _is_ray_set_by_user() -> bool:
    """Whether `ray enable-usage-stats` or `ray disable-usage-stats` has stored a choice, which Ray reads by itself."""
    place = os.environ.get("RAY_USAGE_STATS_CONFIG_PATH") or Path.home() / ".ray" / "config.json"
    try:
        settings = json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and isinstance(settings.get("usage_stats"), bool)
