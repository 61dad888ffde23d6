"""The mathematics, on tensors and without a trainer: token statistics from the fused head, and losses on them."""

from catto.objectives.fused_head import TokenStats, label_logprobs, token_stats
from catto.objectives.losses import (
    bce_loss,
    brier_loss,
    catto_loss,
    l1_loss,
    outcome_loss,
    rcft_loss,
    smoothed_nll,
    surrogate_target,
)

__all__ = [
    "TokenStats",
    "bce_loss",
    "brier_loss",
    "catto_loss",
    "l1_loss",
    "label_logprobs",
    "outcome_loss",
    "rcft_loss",
    "smoothed_nll",
    "surrogate_target",
    "token_stats",
]
