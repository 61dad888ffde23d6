"""The calibration terms of preference training, one number a response. Names are the paper's.

Every term compares the confidence c of each token with a target s: the surrogate z~ on a preferred response, 1 - z~
on a dispreferred one. The mean over tokens comes first and the mean over responses later, never a token mean over
the batch, so that accumulating 1 x 8 and 8 x 1 gives the same update.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from catto.objectives.head import TokenStats

Reduce = Literal["mean", "sum"]
# As torch's own binary cross-entropy: log-probabilities below this count as this and give no gradient.
LOG_FLOOR = -100.0


def surrogate_target(stats: TokenStats, *, preferred: bool, detach_surrogate: bool = False) -> Tensor:
    """The target s of every token: z~ (paper Eq. 5) or, on a dispreferred response, 1 - z~. (B, T) -> (B, T)."""
    surrogate = stats.surrogate.detach() if detach_surrogate else stats.surrogate
    return surrogate if preferred else 1 - surrogate


def catto_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Mean calibration loss of each response, s (1 - c) + (1 - s) c (paper Eq. 6). stats, mask: (B, T) -> (B,)."""
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    c = stats.confidence
    return reduce_tokens(s * (1 - c) + (1 - s) * c, mask)


def bce_loss(
    stats: TokenStats,
    mask: Tensor,
    *,
    preferred: bool = True,
    detach_surrogate: bool = False,
    reduce: Reduce = "sum",
) -> Tensor:
    """Binary cross-entropy -s log c - (1 - s) log(1 - c) of each response. stats, mask: (B, T) -> (B,).

    The paper sums over the tokens, so a long response weighs more; `reduce="mean"` divides by their number.
    """
    if stats.log_doubt is None:
        raise ValueError("bce_loss needs log(1 - c): call token_stats with 'log_doubt' among its extras")
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    log_c, log_doubt = stats.log_confidence.clamp(min=LOG_FLOOR), stats.log_doubt.clamp(min=LOG_FLOOR)
    return reduce_tokens(-s * log_c - (1 - s) * log_doubt, mask, reduce)


def l1_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Mean |c - s| of each response: unlike the paper's term its minimum is at c = s. stats, mask: (B, T) -> (B,)."""
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    return reduce_tokens((stats.confidence - s).abs(), mask)


def brier_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Mean (c - s)^2 of each response. stats, mask: (B, T) -> (B,)."""
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    return reduce_tokens((stats.confidence - s) ** 2, mask)


def reduce_tokens(values: Tensor, mask: Tensor, reduce: Reduce = "mean") -> Tensor:
    """Reduce over the response's tokens, first of all; 0 for a response without tokens. (B, T) -> (B,)."""
    total = values.masked_fill(~mask.bool(), 0.0).sum(-1)
    return total if reduce == "sum" else total / mask.sum(-1).clamp(min=1)
