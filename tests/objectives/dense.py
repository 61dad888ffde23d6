"""Independent dense references: plain autograd on full logits, float64, no tiles."""

from __future__ import annotations

import torch
from torch import Tensor


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    z = (hidden @ weight.T if bias is None else hidden @ weight.T + bias) * scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def stats(z: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Full logits (..., V) -> every statistic of `TokenStats`, by its definition."""
    log_p = torch.log_softmax(z, -1)
    index = targets.unsqueeze(-1)
    without_top = log_p.scatter(-1, log_p.argmax(-1, keepdim=True), -torch.inf)
    return {
        "target": log_p.gather(-1, index).squeeze(-1),
        "rival": log_p.scatter(-1, index, -torch.inf).amax(-1),
        "logsumexp": torch.logsumexp(z, -1),
        "log_doubt": torch.logsumexp(without_top, -1),
        "mean_logit": z.mean(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq": torch.logsumexp(2 * log_p, -1),
    }
