"""Align language models on preferences and keep their confidence honest.

Public names load on first use: `import catto` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catto import rewards
    from catto.errors import DataError
    from catto.integrations.trainer_callback import ReliabilityCallback
    from catto.methods import METHODS
    from catto.metrics.catalogue import METRICS
    from catto.metrics.errors import ece
    from catto.model_calibration import load_calibrator
    from catto.objectives import TokenStats, bce_loss, catto_loss, outcome_loss, rcft_loss, token_stats
    from catto.predict import evaluate_model as evaluate
    from catto.tasks import TASKS, load_questions
    from catto.training.config import CATTOConfig
    from catto.training.trainer import CATTOTrainer

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "METRICS",
    "TASKS",
    "CATTOConfig",
    "CATTOTrainer",
    "DataError",
    "ReliabilityCallback",
    "TokenStats",
    "__version__",
    "bce_loss",
    "catto_loss",
    "ece",
    "evaluate",
    "load_calibrator",
    "load_questions",
    "outcome_loss",
    "rcft_loss",
    "rewards",
    "token_stats",
]

# Public names that are modules.
_MODULES = ("rewards",)
# Public name -> its module, and its name in that module.
_HOME = {
    "CATTOConfig": ("training.config", "CATTOConfig"),
    "CATTOTrainer": ("training.trainer", "CATTOTrainer"),
    "DataError": ("errors", "DataError"),
    "METHODS": ("methods", "METHODS"),
    "METRICS": ("metrics.catalogue", "METRICS"),
    "ReliabilityCallback": ("integrations.trainer_callback", "ReliabilityCallback"),
    "TASKS": ("tasks", "TASKS"),
    "TokenStats": ("objectives", "TokenStats"),
    "bce_loss": ("objectives", "bce_loss"),
    "catto_loss": ("objectives", "catto_loss"),
    "ece": ("metrics.errors", "ece"),
    "evaluate": ("predict", "evaluate_model"),
    "load_calibrator": ("model_calibration", "load_calibrator"),
    "load_questions": ("tasks", "load_questions"),
    "outcome_loss": ("objectives", "outcome_loss"),
    "rcft_loss": ("objectives", "rcft_loss"),
    "token_stats": ("objectives", "token_stats"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use, and cache it."""
    if name in _MODULES:
        return import_module(f"catto.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'catto' has no attribute {name!r}")
    module_name, attribute = _HOME[name]
    try:
        value = getattr(import_module(f"catto.{module_name}"), attribute)
    except ImportError as error:
        missing_package = (error.name or "").partition(".")[0]
        if missing_package == "catto":  # a bug of ours, which no extra can fix
            raise
        raise ImportError(f'catto.{name} needs {error.name}: pip install "catto[train]" ({error})') from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names of this module, including public names that are not imported yet."""
    return sorted({*globals(), *__all__})
