"""Losses at the label: whether the answer was right is known there, so confidence can be scored properly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Score = Literal["brier", "log"]


def outcome_loss(
    label_logprobs: Tensor, gold: Tensor, *, score: Score = "brier", weights: Tensor | None = None
) -> Tensor:
    """Proper score of the label probabilities after a sampled reasoning, one number a response.

    label_logprobs: (B, K) full-vocabulary log-probabilities, -inf where a row has fewer labels; gold: (B,) index of
    the right label; weights: (B,). brier: sum_k (P_k - 1[k = gold])^2, in [0, 2]; log: -log P_gold. -> (B,).
    """
    if score == "log":
        loss = -label_logprobs.gather(-1, gold.unsqueeze(-1)).squeeze(-1)
    else:
        right = torch.nn.functional.one_hot(gold, label_logprobs.shape[-1])
        loss = ((label_logprobs.exp() - right) ** 2).sum(-1)
    return loss if weights is None else weights * loss


def rcft_loss(label_logprobs: Tensor, accuracy: Tensor) -> Tensor:
    """Squared distance of the label distribution to its bin's accuracy, one number a sample (RCFT's ECE term).

    label_logprobs: (B, K), -inf where a row has fewer labels; accuracy: (M,) of the M equal-width bins of the top
    probability, nan where a bin is empty: such samples give no loss. With q the label-restricted softmax, c its top
    and a the accuracy of c's bin: (c - a)^2 + sum_j (q_j - t_j)^2 over the other labels. -> (B,).
    """
    q = torch.log_softmax(label_logprobs, dim=-1).exp()
    c, top = q.max(-1)
    a = accuracy.to(q)[confidence_bin(c.detach(), accuracy.shape[0])]
    empty = a.isnan()
    a = a.masked_fill(empty, 0.0)
    others = torch.isfinite(label_logprobs).scatter(-1, top.unsqueeze(-1), False)
    targets = spread_targets(q.detach(), others, a)
    distance = (c - a) ** 2 + ((q - targets) ** 2).masked_fill(~others, 0.0).sum(-1)
    return distance.masked_fill(empty, 0.0)


def confidence_bin(confidence: Tensor, bins: int) -> Tensor:
    """Index of the right-closed equal-width bin ((m - 1) / M, m / M]; 0 falls in the first. (...) -> (...)."""
    edges = torch.arange(1, bins, device=confidence.device, dtype=torch.float64) / bins
    return torch.bucketize(confidence.double(), edges)


def spread_targets(q: Tensor, others: Tensor, accuracy: Tensor) -> Tensor:
    """Spread 1 - a over the labels other than the top one, more to the likelier. q, others: (B, K); a: (B,) -> (B, K).

    t_j = (1 - a) (1 + tanh(g q_j)) / ((K - 1) + sum tanh(g q)), g = ln(K - 1) / (q_1 (1 - a)), q_1 their largest.
    a = 1 gives 0 (no mass is left), q_1 = 0 the uniform spread, K = 2 the whole of 1 - a.
    """
    rest, count = 1 - accuracy, others.sum(-1)
    largest = q.masked_fill(~others, 0.0).amax(-1)
    gain = torch.log(count.to(q.dtype)) / (largest * rest).clamp(min=torch.finfo(q.dtype).tiny)
    bend = torch.tanh(gain.unsqueeze(-1) * q).masked_fill(~others, 0.0)
    share = (1 + bend) / (count + bend.sum(-1)).unsqueeze(-1)
    return (rest.unsqueeze(-1) * share).masked_fill(~others, 0.0)
