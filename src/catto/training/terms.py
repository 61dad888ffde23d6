"""Compute the calibration term of a batch, and numbers to log, from token statistics or label probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from catto.objectives import TokenStats, bce_loss, brier_loss, catto_loss, l1_loss, outcome_loss
from catto.training.config import CATTOConfig


class CalibrationTerm(NamedTuple):
    """The calibration term of a batch, before it is weighted.

    Attributes:
        loss: The term, a scalar.
        logs: Scalars to log, by their names in the log.
    """

    loss: Tensor
    logs: dict[str, Tensor]


def surrogate_term(stats: TokenStats, mask: Tensor, config: CATTOConfig) -> CalibrationTerm:
    """Compute a term that compares the confidence of tokens with the surrogate of their correctness (paper Eq. 7).

    The confidence of a token is c = max(p_t, p_r), and the surrogate is s = sigmoid(p_t - p_r). Here p_t is the
    probability of the token itself, and p_r that of its rival, the most probable other token. The term is the mean over
    pairs of the chosen response's loss plus the rejected response's loss.

    Args:
        stats: Statistics of the 2 B responses, (2 B, T) each, chosen responses first.
        mask: Tokens that the term reads, (2 B, T).
        config: The configuration, which names the term and its options.

    Returns:
        The term. Its logs also contain the mean confidence and surrogate of the tokens, and the share of tokens that
        are the most probable ones.
    """
    pairs = mask.shape[0] // 2
    chosen = loss_per_response(stats[:pairs], mask[:pairs], config, preferred=True)
    rejected = loss_per_response(stats[pairs:], mask[pairs:], config, preferred=False)
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
    """Return the mean over the tokens that the mask selects; 0 if it selects none."""
    total = values.masked_fill(~mask, 0).sum()
    return total / mask.sum().clamp(min=1)


def loss_per_response(stats: TokenStats, mask: Tensor, config: CATTOConfig, *, preferred: bool) -> Tensor:
    """Compute the configured surrogate loss of each response.

    Args:
        stats: Statistics of the tokens, (B, T) each.
        mask: Tokens that the term reads, (B, T).
        config: The configuration, which names the term and its options.
        preferred: Whether these are the chosen responses.

    Returns:
        Losses (B,).
    """
    options: dict[str, Any] = {"preferred": preferred, "detach_surrogate": config.detach_surrogate}
    if config.calibration == "bce":
        return bce_loss(stats, mask, reduce=config.reduce or "sum", **options)  # type: ignore[arg-type]
    loss_functions = {"catto": catto_loss, "l1": l1_loss, "brier": brier_loss}
    loss = loss_functions[config.calibration](stats, mask, **options)  # the mean over the tokens of each response
    if config.reduce == "sum":
        loss = loss * mask.sum(-1)
    return loss


def sft_loss(logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """Compute the mean cross-entropy over all tokens of the chosen responses, as TRL's loss type `sft` does.

    Args:
        logprobs: Log-probabilities of all tokens but the first of each row (2 B, L - 1), chosen responses first.
        completion_mask: Tokens of the responses (2 B, L), chosen responses first.

    Returns:
        The loss, a scalar.
    """
    chosen, _ = logprobs.chunk(2)
    mask, _ = completion_mask[:, 1:].bool().chunk(2)
    return -chosen[mask].mean()


def replay_term(logprobs: Sequence[Tensor]) -> CalibrationTerm:
    """Compute the mean over responses of the cross-entropy per token.

    logprobs: Log-probabilities of the tokens of each response, (T_i,) for the i-th.
    """
    means = [response.mean() for response in logprobs]
    loss = -torch.stack(means).mean()
    return CalibrationTerm(loss, {"calibration/replay": loss})


def outcome_term(
    label_logprobs: Tensor, gold: Tensor, rate: Tensor | None, config: CATTOConfig, target: Tensor | None = None
) -> CalibrationTerm:
    """Compute the mean proper score of the label probabilities after sampled reasoning.

    Args:
        label_logprobs: Log-probabilities of the labels of M responses, (M, K).
        gold: Index of the right label, (M,).
        rate: Correctness rate of each pair's question, (B,), if the responses are those of B pairs (M = 2 B, chosen
            responses first). The score of the chosen response is then weighted by the rate and that of the rejected
            response by one minus the rate, and the mean is taken over pairs. None weights all responses equally.
        config: The configuration, which names the score.
        target: Distributions over the labels to score against, (M, K); None scores against `gold`.

    Returns:
        The term. Its logs also contain the mean confidence of the most probable label, and how often that label is the
        right one.
    """
    weights = None
    if rate is not None:
        weights = torch.cat([rate, 1 - rate]).to(label_logprobs.dtype)
    gold_or_target = gold
    if target is not None:
        gold_or_target = target.to(label_logprobs)
    score = config.outcome_score
    losses = outcome_loss(label_logprobs, gold_or_target, score=score, weights=weights)  # type: ignore[arg-type]
    if rate is None:
        loss = losses.mean()
    else:
        loss = losses.sum() / len(rate)
    with torch.no_grad():
        top_logprob, top_label = label_logprobs.max(-1)
        is_right = top_label == gold
        logs = {
            "calibration/confidence": top_logprob.exp().mean(),
            "calibration/right": is_right.to(label_logprobs.dtype).mean(),
            "calibration/outcome": loss,
        }
    return CalibrationTerm(loss, logs)
