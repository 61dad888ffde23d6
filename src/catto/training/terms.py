"""Compute the calibration term of a batch, and numbers to log, from token statistics or label probabilities."""

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
    """Compute a term that compares confidence with the surrogate: the mean over pairs of y+'s plus y-'s (paper Eq. 7).

    Args:
        stats: Statistics of the 2 B responses, (2 B, T) each, chosen responses first.
        mask: Tokens that the term reads, (2 B, T).
        config: The configuration, which names the term and its options.
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
    """Compute the mean cross-entropy over all tokens of the chosen responses, as TRL's loss type `sft` does.

    Args:
        logprobs: Log-probabilities (2 B, L - 1), chosen responses first.
        completion_mask: Tokens of the responses (2 B, L), chosen responses first.
    """
    chosen, _ = logprobs.chunk(2)
    mask, _ = completion_mask[:, 1:].bool().chunk(2)
    return -chosen[mask].mean()


def replay_term(logprobs: Sequence[Tensor]) -> CalibrationTerm:
    """Compute the mean over responses of the cross-entropy per token. logprobs: (T_i,) for each response."""
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
        rate: Correctness rate of each pair's question, (B,), if the labels are those of the pairs (M = 2 B). Then y+
            is weighted by the rate and y- by one minus the rate, and the mean is taken over pairs.
        config: The configuration, which names the score.
        target: Distributions to score against instead of gold, (M, K).

    Returns:
        The term. Its logs also contain the mean confidence of the most probable label, and how often that label is the
        right one.
    """
    weights = None
    if rate is not None:
        weights = torch.cat([rate, 1 - rate]).to(labels.dtype)
    gold_or_target = gold
    if target is not None:
        gold_or_target = target.to(labels)
    score = config.outcome_score
    losses = outcome_loss(labels, gold_or_target, score=score, weights=weights)  # type: ignore[arg-type]
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
