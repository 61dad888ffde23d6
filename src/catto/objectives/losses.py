"""The loss functions. They use the paper's names and symbols.

Likelihood: cross-entropy with label smoothing. DPO's own loss comes from TRL.

Calibration terms return one number per response. Each compares the confidence c of a token with a target s: the
surrogate z~ on a preferred response and 1 - z~ on a dispreferred one. Values are first reduced over the tokens of a
response; the mean over responses is taken later. There is no token mean over the batch, so gradient accumulation over
1 x 8 and 8 x 1 rows gives the same update.

Losses at the label: there the right answer is known, so the confidence can be scored with a proper scoring rule.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from catto.objectives.fused_head import TokenStats

Reduce = Literal["mean", "sum"]
Score = Literal["brier", "log"]
# Log-probabilities are clamped at -100, as in torch's binary cross-entropy. Below it they have no gradient.
LOG_FLOOR = -100.0


def smoothed_nll(stats: TokenStats, epsilon: float = 0.0) -> Tensor:
    """Compute the cross-entropy of each token with the target (1 - epsilon) onehot + epsilon / V.

    It equals -(1 - epsilon) log p_t - epsilon m, where m = mean logit - logsumexp is the mean of log p_j over the
    vocabulary. So the token statistics suffice to compute it.

    Args:
        stats: Token statistics (B, T), with the extra `mean_logit` if epsilon is above 0.
        epsilon: Label smoothing, in [0, 1].

    Returns:
        Losses (B, T); 0 at masked positions.

    Raises:
        ValueError: epsilon is above 0 and the statistics lack `mean_logit`.
    """
    if epsilon == 0.0:
        return -stats.target
    if stats.mean_logit is None:
        raise ValueError("smoothed_nll needs the mean logit: call token_stats with 'mean_logit' among its extras")
    mean_logprob = stats.mean_logit - stats.logsumexp
    return -(1 - epsilon) * stats.target - epsilon * mean_logprob


# ---- calibration terms -----------------------------------------------------------------------------------------------


def surrogate_target(stats: TokenStats, *, preferred: bool, detach_surrogate: bool = False) -> Tensor:
    """Return the target s of every token: z~ (paper Eq. 5) or, on a dispreferred response, 1 - z~.

    Args:
        stats: Token statistics (B, T).
        preferred: Whether the responses are the preferred ones of their pairs; False if they are dispreferred.
        detach_surrogate: Whether to stop the gradient through the surrogate.

    Returns:
        Targets (B, T), in [0.269, 0.731] = [sigmoid(-1), sigmoid(1)].
    """
    surrogate = stats.surrogate
    if detach_surrogate:
        surrogate = surrogate.detach()
    if preferred:
        return surrogate
    return 1 - surrogate


def catto_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Compute the paper's calibration loss (Eq. 6): the mean of s (1 - c) + (1 - s) c over each response.

    c is the confidence of a token. Its target s is the surrogate z~ = sigmoid(p_t - p_r), or 1 - z~ on a dispreferred
    response. p_t is the probability of the token, and p_r that of the most probable other token.

    Args:
        stats: Token statistics (B, T).
        mask: 1 or True at the tokens of the responses, 0 or False at all others (B, T).
        preferred: Whether the responses are the preferred ones of their pairs; False if they are dispreferred.
        detach_surrogate: Whether to stop the gradient through the surrogate.

    Returns:
        Losses (B,), in [0, 1]; 0 for a response without tokens.

    >>> from catto import token_stats
    >>> stats = token_stats(torch.tensor([[[0.6, 0.3, 0.1]]]).log(), None, torch.tensor([[0]]))
    >>> catto_loss(stats, torch.ones(1, 1)), catto_loss(stats, torch.ones(1, 1), preferred=False)
    (tensor([0.4851]), tensor([0.5149]))
    """
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    c = stats.confidence
    losses = s * (1 - c) + (1 - s) * c
    return reduce_tokens(losses, mask)


def bce_loss(
    stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False, reduce: Reduce = "sum"
) -> Tensor:
    """Compute the binary cross-entropy -s log c - (1 - s) log(1 - c) of each response.

    c is the confidence of a token. Its target s is the surrogate z~ = sigmoid(p_t - p_r), or 1 - z~ on a dispreferred
    response. p_t is the probability of the token, and p_r that of the most probable other token. The paper sums over
    tokens, so long responses weigh more.

    Args:
        stats: Token statistics (B, T), with the extra `log_doubt`.
        mask: 1 or True at the tokens of the responses, 0 or False at all others (B, T).
        preferred: Whether the responses are the preferred ones of their pairs; False if they are dispreferred.
        detach_surrogate: Whether to stop the gradient through the surrogate.
        reduce: `sum` over the tokens of a response, as in the paper, or `mean`.

    Returns:
        Losses (B,), at least 0; 0 for a response without tokens.

    Raises:
        ValueError: The statistics lack `log_doubt`.

    >>> from catto import token_stats
    >>> logits = torch.tensor([[[0.6, 0.3, 0.1]]]).log()
    >>> bce_loss(token_stats(logits, None, torch.tensor([[0]]), extras=("log_doubt",)), torch.ones(1, 1))
    tensor([0.6834])
    """
    if stats.log_doubt is None:
        raise ValueError("bce_loss needs log(1 - c): call token_stats with 'log_doubt' among its extras")
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    log_c = stats.log_confidence.clamp(min=LOG_FLOOR)
    log_doubt = stats.log_doubt.clamp(min=LOG_FLOOR)
    losses = -s * log_c - (1 - s) * log_doubt
    return reduce_tokens(losses, mask, reduce)


def l1_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Compute the mean |c - s| of each response.

    It is smallest at c = s, unlike the paper's term `catto_loss`, which is smallest at c = 0 or c = 1.

    c is the confidence of a token. Its target s is the surrogate z~ = sigmoid(p_t - p_r), or 1 - z~ on a dispreferred
    response. p_t is the probability of the token, and p_r that of the most probable other token.

    Args:
        stats: Token statistics (B, T).
        mask: 1 or True at the tokens of the responses, 0 or False at all others (B, T).
        preferred: Whether the responses are the preferred ones of their pairs; False if they are dispreferred.
        detach_surrogate: Whether to stop the gradient through the surrogate.

    Returns:
        Losses (B,), in [0, 1]; 0 for a response without tokens.

    >>> from catto import token_stats
    >>> stats = token_stats(torch.tensor([[[0.6, 0.3, 0.1]]]).log(), None, torch.tensor([[0]]))
    >>> l1_loss(stats, torch.ones(1, 1))
    tensor([0.0256])
    """
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    losses = (stats.confidence - s).abs()
    return reduce_tokens(losses, mask)


def brier_loss(stats: TokenStats, mask: Tensor, *, preferred: bool = True, detach_surrogate: bool = False) -> Tensor:
    """Compute the mean (c - s)^2 of each response.

    c is the confidence of a token. Its target s is the surrogate z~ = sigmoid(p_t - p_r), or 1 - z~ on a dispreferred
    response. p_t is the probability of the token, and p_r that of the most probable other token.

    Args:
        stats: Token statistics (B, T).
        mask: 1 or True at the tokens of the responses, 0 or False at all others (B, T).
        preferred: Whether the responses are the preferred ones of their pairs; False if they are dispreferred.
        detach_surrogate: Whether to stop the gradient through the surrogate.

    Returns:
        Losses (B,), in [0, 1]; 0 for a response without tokens.

    >>> from catto import token_stats
    >>> stats = token_stats(torch.tensor([[[0.6, 0.3, 0.1]]]).log(), None, torch.tensor([[0]]))
    >>> brier_loss(stats, torch.ones(1, 1))
    tensor([0.0007])
    """
    s = surrogate_target(stats, preferred=preferred, detach_surrogate=detach_surrogate)
    losses = (stats.confidence - s) ** 2
    return reduce_tokens(losses, mask)


def reduce_tokens(values: Tensor, mask: Tensor, reduce: Reduce = "mean") -> Tensor:
    """Reduce values over the tokens of each response.

    Args:
        values: One number per token (B, T).
        mask: 1 or True at the tokens of the responses, 0 or False at all others (B, T).
        reduce: `mean` or `sum`.

    Returns:
        One number per response (B,); 0 for a response without tokens.

    >>> reduce_tokens(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    tensor([2.])
    """
    total = values.masked_fill(~mask.bool(), 0.0).sum(-1)  # a product with the mask would keep nan and inf
    if reduce == "sum":
        return total
    tokens = mask.sum(-1).clamp(min=1)  # no division by 0 for a response without tokens
    return total / tokens


# ---- losses at the label ---------------------------------------------------------------------------------------------


def outcome_loss(
    label_logprobs: Tensor, gold: Tensor, *, score: Score = "log", weights: Tensor | None = None
) -> Tensor:
    """Compute a proper score of each response's label probabilities after sampled reasoning.

    The expectation of either score is smallest if the probabilities equal the expected target. Preference training
    can make a wrong answer nearly certain. The gradient of `brier` then vanishes, and that of `log` does not.

    Args:
        label_logprobs: Log-probabilities log P of the labels in the full vocabulary (B, K); -inf where a row has fewer
            labels.
        gold: Index of the right label (B,), or a distribution t over the labels (B, K), which is 0 at missing labels.
        score: `log` is -sum_k t_k log P_k, or -log P_gold for an index. `brier` is sum_k (P_k - t_k)^2, in [0, 2],
            where t is 1 at the right label and 0 elsewhere for an index.
        weights: Weight by which the score of each response is multiplied (B,); None means 1.

    Returns:
        Scores (B,).

    >>> outcome_loss(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]), score="brier")
    tensor([0.0800])
    >>> outcome_loss(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]), score="brier")
    tensor([0.1800])
    """
    is_distribution = gold.dim() == 2
    if score == "log" and is_distribution:
        # A label with weight 0 adds nothing; 0 * -inf would be nan.
        counted_logprobs = label_logprobs.masked_fill(gold == 0, 0.0)
        loss = -(gold * counted_logprobs).sum(-1)
    elif score == "log":
        loss = -label_logprobs.gather(-1, gold.unsqueeze(-1)).squeeze(-1)
    else:  # brier
        target = gold
        if not is_distribution:
            target = torch.nn.functional.one_hot(gold, label_logprobs.shape[-1])
        difference = label_logprobs.exp() - target
        loss = (difference**2).sum(-1)
    if weights is None:
        return loss
    return weights * loss


def rcft_loss(label_logprobs: Tensor, accuracy: Tensor) -> Tensor:
    """Compute RCFT's ECE term, which pulls the probability of the top label towards the accuracy of its bin.

    Let q be the softmax over the labels, c its largest value and a the accuracy of c's bin. The loss is
    (c - a)^2 + sum_j (q_j - t_j)^2, where j runs over the other labels. Their targets t_j share the remaining mass
    1 - a, see `spread_targets`.

    Args:
        label_logprobs: Log-probabilities of the labels (B, K); -inf where a row has fewer labels.
        accuracy: Accuracy of held-out answers, by the probability of their top label, in each of M equal-width bins
            (M,); nan for a bin without such answers.

    Returns:
        Losses (B,); 0 for a sample whose bin has no accuracy.

    >>> rcft_loss(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([0.5, 0.6]))
    tensor([0.1800])
    """
    q = torch.log_softmax(label_logprobs, dim=-1).exp()
    c, top_index = q.max(-1)
    bin_of_sample = confidence_bin(c.detach(), accuracy.shape[0])
    a = accuracy.to(q)[bin_of_sample]
    accuracy_is_missing = a.isnan()
    a = a.masked_fill(accuracy_is_missing, 0.0)  # nan would reach the gradient, even though the loss is masked below
    has_label = torch.isfinite(label_logprobs)
    is_other = has_label.scatter(-1, top_index.unsqueeze(-1), False)
    targets = spread_targets(q.detach(), is_other, a)  # constants: no gradient flows through the targets
    distance_of_top = (c - a) ** 2
    squares = (q - targets) ** 2
    distance_of_others = squares.masked_fill(~is_other, 0.0).sum(-1)
    distance = distance_of_top + distance_of_others
    return distance.masked_fill(accuracy_is_missing, 0.0)


def confidence_bin(confidence: Tensor, bins: int) -> Tensor:
    """Return the index of each confidence's equal-width bin ((m - 1) / M, m / M], with 0 in the first bin.

    Args:
        confidence: Probabilities (...).
        bins: Number of bins M.

    Returns:
        Indices (...), from 0 to M - 1.

    >>> confidence_bin(torch.tensor([0.0, 0.5, 0.51, 1.0]), 2)
    tensor([0, 0, 1, 1])
    """
    edges = torch.arange(1, bins, device=confidence.device, dtype=torch.float64) / bins
    return torch.bucketize(confidence.double(), edges)


def spread_targets(q: Tensor, is_other: Tensor, accuracy: Tensor) -> Tensor:
    """Distribute the mass 1 - a over the labels other than the top one; likelier labels get more.

    t_j = (1 - a) (1 + tanh(g q_j)) / ((K - 1) + sum_i tanh(g q_i)), where i and j run over these K - 1 labels. The gain
    is g = ln(K - 1) / (q_max (1 - a)), where q_max is the largest of the q_i. If a = 1, all targets are 0. If
    q_max = 0, all targets are equal. If K = 2, the only other label gets 1 - a.

    Args:
        q: Probabilities of the labels (B, K).
        is_other: Which labels exist and are not the top one (B, K).
        accuracy: The accuracy a of each row's bin (B,).

    Returns:
        Targets (B, K); 0 at the top label.
    """
    mass = 1 - accuracy
    count = is_other.sum(-1)  # K - 1
    largest = q.masked_fill(~is_other, 0.0).amax(-1)
    divisor = (largest * mass).clamp(min=torch.finfo(q.dtype).tiny)  # not 0, so that the gain is finite
    gain = torch.log(count.to(q.dtype)) / divisor
    tanh_term = torch.tanh(gain.unsqueeze(-1) * q).masked_fill(~is_other, 0.0)
    total = count + tanh_term.sum(-1)
    share = (1 + tanh_term) / total.unsqueeze(-1)
    targets = mass.unsqueeze(-1) * share
    return targets.masked_fill(~is_other, 0.0)
