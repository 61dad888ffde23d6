"""Pure mathematics on tensors: the fused head's token statistics and the losses that read them. No trainer in sight."""

from catto.objectives.calibration import bce_loss, brier_loss, catto_loss, l1_loss, surrogate_target
from catto.objectives.head import TokenStats, label_logprobs, token_stats
from catto.objectives.likelihood import dpo_loss, smoothed_nll
from catto.objectives.outcome import outcome_loss, rcft_loss

__all__ = [
    "TokenStats",
    "bce_loss",
    "brier_loss",
    "catto_loss",
    "dpo_loss",
    "l1_loss",
    "label_logprobs",
    "outcome_loss",
    "rcft_loss",
    "smoothed_nll",
    "surrogate_target",
    "token_stats",
]
