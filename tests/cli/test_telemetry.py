"""What libraries report of their use is off in every command, and in the programs that call what it calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
from experiment_world import ENVIRONMENT

NAMES = ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "RAY_USAGE_STATS_ENABLED")
# The cheapest command that does not stop while its options are read.
CODE = f"""
import os, catto.cli
try:
    catto.cli.main(["recipe", "list"])
finally:
    from huggingface_hub import constants
    print(constants.HF_HUB_DISABLE_TELEMETRY, *(os.environ[name] for name in {NAMES}))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "True 1 1 0"),
        ({"HF_HUB_DISABLE_TELEMETRY": "0", "VLLM_NO_USAGE_STATS": "0", "RAY_USAGE_STATS_ENABLED": "1"}, "False 0 0 1"),
    ],
)
def test_a_command_reports_nothing_unless_the_user_says_so(given: dict[str, str], found: str) -> None:
    """Hugging Face's own reading of its variable, and the others' variables."""
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in NAMES}
    environment = {**clean, "RAY_USAGE_STATS_CONFIG_PATH": "/nonexistent", **given}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == found, done.stderr
