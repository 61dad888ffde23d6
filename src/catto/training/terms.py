"""The calibration terms of a batch: from token statistics or label probabilities to a scalar and numbers to log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from catto.objectives import TokenStats, bce_loss, brier_loss, catto_loss, l1_loss, outcome_loss
from catto.training.config import CATTOConfig


class CalibrationTerm(NamedTuple):
    """The calibration term, a scalar, and scalars to log."""

    loss: Tensor
    logs: dict[str, Tensor]


def surrogate_term(stats: TokenStats, mask: Tensor, config: CATTOConfig) -> CalibrationTerm:
    """Compute the mean over pairs of the term on y+ plus the term on y- (paper Eq. 7).

    Args:
        stats: Statistics of the 2 B responses, (2 B, T) each, chosen first.
        mask: Tokens that the term reads, (2 B, T).
        config: Names the term and its options.
    """
    half = mask.shape[0] // 2
    chosen = loss_per_response(stats[:half], mask[:half], config, preferred=True)
    rejected = loss_per_response(stats[half:], mask[half:], config, preferred=False)
    with torch.no_grad():
        logs = {
            "calibration/chosen": chosen.mean(),
            "calibration/rejected": rejected.mean(),
            "calibration/confidence": _mean_over_tokens(stats.confidence, mask),
            "calibration/surrogate": _mean_over_tokens(stats.surrogate, mask),
            "calibration/right": _mean_over_tokens(stats.right.float(), mask),
        }
    return CalibrationTerm((chosen + rejected).mean(), logs)


def _mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    total = values.masked_fill(~mask, 0).sum()
    return total / mask.sum().clamp(min=1)


def loss_per_response(stats: TokenStats, mask: Tensor, config: CATTOConfig, *, preferred: bool) -> Tensor:
    """Compute the configured surrogate loss of each response. stats, mask: (B, T) -> (B,)."""
    options: dict[str, Any] = {"preferred": preferred, "detach_surrogate": config.detach_surrogate}
    if config.calibration == "bce":
        return bce_loss(stats, mask, reduce=config.reduce or "sum", **options)  # type: ignore[arg-type]
    losses = {"catto": catto_loss, "l1": l1_loss, "brier": brier_loss}
    loss = losses[config.calibration](stats, mask, **options)
    if config.reduce == "sum":
        loss = loss * mask.sum(-1)
    return loss


def sft_loss(logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """Compute the mean cross-entropy over all tokens of the chosen responses, like TRL's `sft`.

    Args:
        logprobs: Log-probabilities (2 B, L - 1), chosen responses first.
        completion_mask: Tokens of the responses (2 B, L), chosen responses first.
    """
    chosen, _ = logprobs.chunk(2)
    mask, _ = completion_mask[:, 1:].bool().chunk(2)
    return -chosen[mask].mean()


def replay_term(logprobs: Sequence[Tensor]) -> CalibrationTerm:
    """Compute the mean over responses of the cross-entropy per token. logprobs: (T_i,) of each response."""
    means = [response.mean() for response in logprobs]
    loss = -torch.stack(means).mean()
    return CalibrationTerm(loss, {"calibration/replay": loss})


def outcome_term(
    labels: Tensor, gold: Tensor, rate: Tensor | None, config: CATTOConfig, target: Tensor | None = None
) -> CalibrationTerm:
    """Compute the mean proper score of the label probabilities after sampled reasoning.

    Args:
        labels: Log-probabilities of the labels, (M, K).
        gold: Index of the right label, (M,).
        rate: Correctness rate of each question, (B,). If given, the M = 2 B labels are those of the pairs: y+ is
            weighted by the rate and y- by one minus the rate, and the mean is over pairs.
        config: Names the score.
        target: Distributions to score against in place of gold, (M, K).
    """
    weights = None
    if rate is not None:
        weights = torch.cat([rate, 1 - rate]).to(labels.dtype)
    aim = gold
    if target is not None:
        aim = target.to(labels)
    losses = outcome_loss(labels, aim, score=config.outcome_score, weights=weights)  # type: ignore[arg-type]
    if rate is None:
        loss = losses.mean()
    else:
        loss = losses.sum() / len(rate)
    with torch.no_grad():
        top, answer = labels.max(-1)
        is_right = answer == gold
        logs = {
            "calibration/confidence": top.exp().mean(),
            "calibration/right": is_right.to(labels.dtype).mean(),
            "calibration/outcome": loss,
        }
    return CalibrationTerm(loss, logs)
