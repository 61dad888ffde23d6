"""From statistics to the calibration term of a batch of pairs, and what it logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from catto.objectives import TokenStats, bce_loss, brier_loss, catto_loss, l1_loss, outcome_loss
from catto.training.config import CATTOConfig
from catto.training.pairs import Pairs
from catto.training.rows import Example


class Term(NamedTuple):
    """The calibration term, a scalar, and scalars to log."""

    loss: Tensor
    logs: dict[str, Tensor]


def extras_of(config: CATTOConfig) -> tuple[str, ...]:
    """The optional statistics that this objective reads."""
    return ("log_doubt",) if config.weight and config.calibration == "bce" else ()


def surrogate_term(stats: TokenStats, mask: Tensor, config: CATTOConfig) -> Term:
    """Mean over pairs of the term on y+ plus the term on y- (paper Eq. 7). stats, mask: (2 B, T), chosen first."""
    half = mask.shape[0] // 2
    chosen = _per_response(stats[:half], mask[:half], config, preferred=True)
    rejected = _per_response(stats[half:], mask[half:], config, preferred=False)
    logs = {"calibration/chosen": chosen.mean(), "calibration/rejected": rejected.mean()}
    with torch.no_grad():
        for name, values in (
            ("confidence", stats.confidence),
            ("surrogate", stats.surrogate),
            ("right", stats.right.float()),
        ):
            logs[f"calibration/{name}"] = values[mask].mean() if mask.any() else values.new_zeros(())
    return Term((chosen + rejected).mean(), logs)


def _per_response(stats: TokenStats, mask: Tensor, config: CATTOConfig, *, preferred: bool) -> Tensor:
    options: dict[str, Any] = {"preferred": preferred, "detach_surrogate": config.detach_surrogate}
    if config.calibration == "bce":
        return bce_loss(stats, mask, reduce="mean" if config.reduce == "mean" else "sum", **options)
    loss = {"catto": catto_loss, "l1": l1_loss, "brier": brier_loss}[config.calibration](stats, mask, **options)
    return loss * mask.sum(-1) if config.reduce == "sum" else loss


def outcome_on_stream(labels: Tensor, examples: Sequence[Example], config: CATTOConfig) -> Term:
    """Mean proper score of the label probabilities after sampled, unfiltered reasoning. labels: (M, K)."""
    gold = torch.tensor([example.label.gold for example in examples], device=labels.device)
    losses = outcome_loss(labels, gold, score=config.outcome_score)  # type: ignore[arg-type]
    return Term(losses.mean(), _label_logs(labels, gold, losses.mean()))


def outcome_on_pairs(labels: Tensor, pairs: Pairs, config: CATTOConfig) -> Term:
    """The same on the pairs' own labels: y+ weighted by the question's correctness rate, y- by one minus it."""
    gold = torch.tensor([fact["gold_index"] for fact in pairs.facts] * 2, device=labels.device)
    rate = torch.tensor([fact["correctness_rate"] for fact in pairs.facts], device=labels.device)
    weights = torch.cat([rate, 1 - rate]).to(labels.dtype)
    losses = outcome_loss(labels, gold, score=config.outcome_score, weights=weights)  # type: ignore[arg-type]
    total = losses.sum() / pairs.size
    return Term(total, _label_logs(labels, gold, total))


def replay_on_stream(responses: Sequence[Tensor]) -> Term:
    """Mean over the stream's responses of their cross-entropy, a mean over tokens. responses: log p_t, (T_i,) each."""
    loss = -torch.stack([logprobs.mean() for logprobs in responses]).mean()
    return Term(loss, {"calibration/replay": loss})


def _label_logs(labels: Tensor, gold: Tensor, loss: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        top, answer = labels.max(-1)
        right = (answer == gold).to(labels.dtype).mean()
        return {"calibration/outcome": loss, "calibration/confidence": top.exp().mean(), "calibration/right": right}
