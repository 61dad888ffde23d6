"""The losses that calibration is added to: DPO's, and the cross-entropy with label smoothing."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from catto.objectives.head import TokenStats


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta ((log pi - log ref)(y+) - (log pi - log ref)(y-))). Sequence log-probabilities (B,) -> (B,).

    For reference and tests: training takes TRL's own losses.
    """
    return -logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def smoothed_nll(stats: TokenStats, epsilon: float = 0.0) -> Tensor:
    """Cross-entropy with the target (1 - epsilon) onehot + epsilon / V, a number a token. (B, T) -> (B, T).

    -(1 - epsilon) log p_t - epsilon (mean logit - logsumexp): the mean log-probability needs no second pass.
    Masked positions give 0.
    """
    if epsilon == 0.0:
        return -stats.target
    if stats.mean_logit is None:
        raise ValueError("smoothed_nll needs the mean logit: call token_stats with 'mean_logit' among its extras")
    return -(1 - epsilon) * stats.target - epsilon * (stats.mean_logit - stats.logsumexp)
