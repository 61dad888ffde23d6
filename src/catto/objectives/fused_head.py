"""The fused LM head: per-token statistics of `softmax(hidden @ weight.T)` without ever storing all logits.

The vocabulary is processed in tiles. The forward pass adds each tile to running sums. The backward pass recomputes the
tile and turns it, in place, into the gradient of the logits. With a tile as large as the vocabulary, the same code is
the dense computation.

Let z be the logits, t the target and r the rival (the most probable other token). Every statistic follows from z_t, z_r
and sums over all remaining tokens, so a probability near 1 loses no digits to cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from catto.objectives.tiles import (
    LogitSpec,
    Precision,
    Tile,
    compute_tiles,
    locate_tokens,
    multiply,
    product_dtype,
    statistics_dtype,
    tile_shape,
)

IGNORE = -100
EXTRAS = ("log_doubt", "mean_logit", "entropy", "log_sum_sq")


@dataclass(frozen=True)
class TokenStats:
    """Statistics of the next-token distribution at every position.

    Each statistic has the shape of the targets and is 0 at masked positions. Extras that were not requested are None.

    Attributes:
        target: log p_t, the log-probability of the response's token.
        rival: log p_r, the log-probability of the most probable other token.
        logsumexp: Log-sum-exp of the logits.
        log_doubt: log(1 - c), an extra; c is the largest probability of any token.
        mean_logit: Mean logit over the vocabulary, an extra.
        entropy: Entropy in nats, an extra.
        log_sum_sq: log sum_j p_j^2, an extra that has no gradient.
    """

    target: Tensor
    rival: Tensor
    logsumexp: Tensor
    log_doubt: Tensor | None = None
    mean_logit: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """Z: whether the argmax is the response's token, p_t > p_r."""
        return self.target > self.rival

    @property
    def log_confidence(self) -> Tensor:
        """log c = max(log p_t, log p_r)."""
        return torch.where(self.right, self.target, self.rival)

    @property
    def confidence(self) -> Tensor:
        """c, the largest probability of any token, in (0, 1]."""
        return self.log_confidence.exp()

    @property
    def margin(self) -> Tensor:
        """p_t - p_r, in [-1, 1]."""
        return self.target.exp() - self.rival.exp()

    @property
    def surrogate(self) -> Tensor:
        """z~ = sigmoid(p_t - p_r) (paper Eq. 5), in [0.269, 0.731]."""
        return self.margin.sigmoid()

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenStats:
        """Apply a function to every statistic that was computed."""
        values: dict[str, Any] = {}
        for name, statistic in vars(self).items():
            values[name] = None if statistic is None else function(statistic)
        return TokenStats(**values)

    def __getitem__(self, index: Any) -> TokenStats:
        """Apply an index to every statistic, e.g. `stats[:n]` for the first n responses of a batch."""
        return self.map(lambda value: value[index])


def token_stats(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    tile: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    extras: Collection[str] = EXTRAS,
    masked: bool = True,
    precision: Precision = "auto",
) -> TokenStats:
    """Compute the statistics of every token, differentiable in hidden, weight and bias.

    Logits are z = softcap tanh(scale y / softcap) / temperature with y = hidden @ weight.T + bias. Statistics and
    gradients accumulate in fp32, or in float64 if the inputs are float64.

    Args:
        hidden: Last hidden states (..., H); with `weight=None`, logits y (..., V).
        weight: Weight of the LM head (V, H); None if `hidden` contains logits.
        targets: Token ids (...). Positions with -100 are masked and skipped.
        bias: Bias of the LM head (V,), or None.
        tile: Number of vocabulary entries whose logits are computed at a time; None chooses it by device and shape.
        softcap: Soft cap of the logits, above 0, as in Gemma 2; None means no soft cap.
        scale: Number by which y is multiplied.
        temperature: Number by which the logits are divided, above 0.
        extras: Which of the optional statistics `log_doubt`, `mean_logit`, `entropy` and `log_sum_sq` to compute. Each
            costs an additional pass over every tile.
        masked: Whether targets may be -100. Pass False if none is: looking for them makes the host wait for the device.
        precision: With `auto`, a CUDA GPU multiplies 16-bit inputs if the weight is 16-bit or autocast is on, and adds
            the products in fp32. With `fp32`, and on other devices, the inputs are first converted to fp32.

    Returns:
        Statistics with the shape of the targets, 0 at masked positions.

    Raises:
        ValueError: The shapes do not match, or an option is out of its range.

    >>> stats = token_stats(torch.tensor([[0.5, 0.3, 0.2]]).log(), None, torch.tensor([0]))
    >>> round(stats.confidence.item(), 4), round(stats.margin.item(), 4), stats.right.item()
    (0.5, 0.2, True)
    """
    with gather_zero3_parameters(weight, bias):
        spec = _make_logit_spec(
            hidden,
            targets,
            weight,
            bias,
            softcap=softcap,
            scale=scale,
            temperature=temperature,
            tile=tile,
            extras=extras,
            precision=precision,
        )
        is_scored = targets != IGNORE
        all_scored = not masked or bool(is_scored.all())
        if all_scored:
            rows = hidden.reshape(-1, hidden.shape[-1])
            ids = targets.reshape(-1)
        else:
            rows = hidden[is_scored]
            ids = targets[is_scored]
        no_labels = ids.new_zeros(len(ids), 0)  # (N, 0): scoring label tokens is only needed in `label_logprobs`
        output = HeadOutput(*_TiledHead.apply(rows, weight, bias, ids, no_labels, spec))  # type: ignore[no-untyped-call]
    stats = output.without_labels()
    if not all_scored:
        return stats.map(lambda value: value.new_zeros(is_scored.shape).masked_scatter(is_scored, value))
    if targets.dim() == 1:
        return stats  # already in this shape; FSDP2 warns if a forward pass returns views
    return stats.map(lambda value: value.view_as(targets))


def label_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    positions: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tile: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    precision: Precision = "auto",
) -> Tensor:
    """Compute the log-probabilities of K labels at one position of each sequence.

    Args:
        hidden: Last hidden states (B, T, H); with `weight=None`, logits (B, T, V).
        weight: Weight of the LM head (V, H); None if `hidden` contains logits.
        positions: One position in each sequence (B,).
        labels: Token ids (B, K), padded with -100 if a sequence has fewer labels.
        bias: Bias of the LM head (V,), or None.
        tile: Number of vocabulary entries whose logits are computed at a time; None chooses it by device and shape.
        softcap: Soft cap of the logits, above 0, as in Gemma 2; None means no soft cap.
        scale: Number by which the logits are multiplied before the soft cap.
        temperature: Number by which the logits are divided after the soft cap, above 0.
        precision: With `auto`, a CUDA GPU multiplies 16-bit inputs if the weight is 16-bit or autocast is on, and adds
            the products in fp32. With `fp32`, and on other devices, the inputs are first converted to fp32.

    Returns:
        Log-probabilities (B, K); -inf where a label is -100.

    Raises:
        ValueError: The shapes do not match, or an option is out of its range.

    >>> logits = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    >>> label_logprobs(logits, None, torch.tensor([0]), torch.tensor([[2, 0, -100]])).exp().round(decimals=4)
    tensor([[0.2000, 0.5000, 0.0000]])
    """
    with gather_zero3_parameters(weight, bias):
        sequences = torch.arange(hidden.shape[0], device=hidden.device)
        rows = hidden[sequences, positions]
        ids = labels.clamp(min=0)  # a valid id in place of -100; its log-probability becomes -inf below
        first_label = ids[:, 0]  # the head requires a target, but its statistics are not used here
        spec = _make_logit_spec(
            rows,
            first_label,
            weight,
            bias,
            softcap=softcap,
            scale=scale,
            temperature=temperature,
            tile=tile,
            extras=(),
            precision=precision,
        )
        output = HeadOutput(*_TiledHead.apply(rows, weight, bias, first_label, ids, spec))  # type: ignore[no-untyped-call]
    return output.labels.masked_fill(labels == IGNORE, -torch.inf)


def _make_logit_spec(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    softcap: float | None,
    scale: float,
    temperature: float,
    tile: int | None,
    extras: Collection[str],
    precision: Precision,
) -> LogitSpec:
    """Return how to compute the logits; raise ValueError if shapes do not match or an option is out of range."""
    vocabulary = hidden.shape[-1] if weight is None else weight.shape[0]
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not match")
    if weight is not None and weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not match")
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({vocabulary},)")
    has_rival = vocabulary >= 2  # the rival is the most probable token other than the target
    is_tile_valid = tile is None or tile >= 1
    is_softcap_valid = softcap is None or softcap > 0
    if not has_rival or not is_tile_valid or temperature <= 0 or not is_softcap_valid:
        raise ValueError("expected a vocabulary of at least 2, tile >= 1, temperature > 0, softcap > 0 or None")
    unknown = set(extras) - set(EXTRAS)
    if unknown:
        raise ValueError(f"extras {sorted(unknown)} are not among {', '.join(EXTRAS)}")
    tokens = hidden.shape[:-1].numel()
    rows_per_tile, columns_per_tile = tile_shape(tokens, vocabulary, hidden.device, tile)
    return LogitSpec(
        softcap=softcap,
        scale=scale,
        temperature=temperature,
        vocabulary=vocabulary,
        rows_per_tile=rows_per_tile,
        columns_per_tile=columns_per_tile,
        extras=frozenset(extras),
        product_dtype=product_dtype(hidden, weight, precision),
    )


def gather_zero3_parameters(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """Gather parameters that DeepSpeed ZeRO-3 has partitioned across processes, for the duration of the context.

    Without ZeRO-3 this does nothing.
    """
    # ZeRO-3 adds `ds_status` to the parameters that it partitions.
    partitioned = [p for p in parameters if p is not None and hasattr(p, "ds_status")]
    if not partitioned:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    # A tied head may already be gathered by the embedding's module. Gathering it here too would release it too early.
    missing = [p for p in partitioned if p.ds_status != ZeroParamStatus.AVAILABLE]
    if not missing:
        return nullcontext()
    gathering: AbstractContextManager[Any] = GatheredParameters(missing)
    return gathering


# ---- forward ---------------------------------------------------------------------------------------------------------


class RunningSums(NamedTuple):
    """Running sums over the tiles that have been processed, for N tokens, (N,) each and labels (N, K).

    t is the target, and r is the rival: the most probable other token so far. In the sums named `rest`, j runs over all
    tokens except these two. Their exponentials are divided by exp(z_r), so that they cannot overflow. After the last
    tile, exp(z_j - z_r) = p_j / p_r.
    """

    target: Tensor  # z_t
    rival: Tensor  # z_r
    rival_id: Tensor
    rest: Tensor  # sum_j exp(z_j - z_r)
    rest_z: Tensor  # sum_j exp(z_j - z_r) z_j
    rest_sq: Tensor  # sum_j exp(2 (z_j - z_r))
    total: Tensor  # sum of all logits, including z_t and z_r
    labels: Tensor  # z of the K label tokens


class HeadOutput(NamedTuple):
    """What the head computes for N tokens: the fields of `TokenStats`, (N,) each, and label log-probabilities."""

    target: Tensor
    rival: Tensor
    logsumexp: Tensor
    log_doubt: Tensor | None
    mean_logit: Tensor | None
    entropy: Tensor | None
    log_sum_sq: Tensor | None
    labels: Tensor  # (N, K)

    def without_labels(self) -> TokenStats:
        """Return the statistics without the label log-probabilities."""
        return TokenStats(*self[:-1])


def empty_sums(targets: Tensor, labels: Tensor, dtype: torch.dtype) -> RunningSums:
    """Return the sums before the first tile. targets: (N,), labels: (N, K)."""
    zero = torch.zeros_like(targets, dtype=dtype)
    return RunningSums(
        target=zero,
        rival=zero - torch.inf,
        rival_id=targets,  # any valid ids; the first rival replaces them
        rest=zero,
        rest_z=zero,
        rest_sq=zero,
        total=zero,
        labels=torch.zeros_like(labels, dtype=dtype),
    )


def add_tile(sums: RunningSums, tile: Tile, targets: Tensor, labels: Tensor, extras: frozenset[str]) -> RunningSums:
    """Add a tile to the sums of its rows and return the new sums. The tile's logits are overwritten.

    This is a log-sum-exp over the vocabulary, tile by tile, in which two tokens stay apart: the target t and its rival
    r, the most probable other token so far. So log p_t, log p_r and log(1 - p_t) can be computed without cancellation.
    The sums over all remaining tokens j are:

    - rest = sum exp(z_j - z_r)
    - rest_z = sum exp(z_j - z_r) z_j
    - rest_sq = sum exp(2 (z_j - z_r))

    Args:
        sums: The sums over the tiles before this one.
        tile: The tile. In-place operations save memory, so its logits are not available afterwards.
        targets: Token ids of the targets (N,).
        labels: Token ids of the labels (N, K).
        extras: Names of the optional statistics, which need the sums other than `rest`.
    """
    z = tile.logits
    label_logits = _read_label_logits(tile, labels, sums.labels)
    total = sums.total
    if "mean_logit" in extras:
        total = total + z.sum(-1)

    # A finite substitute for -inf: its exponential is 0, and in the entropy's sum 0 * lowest is 0 instead of nan. It is
    # divided by 8, so that differences between it and other logits stay finite.
    lowest = torch.finfo(z.dtype).min / 8
    target_logit = _remove_target(tile, targets, sums.target, lowest)
    best, best_column = z.max(-1)
    z.scatter_(-1, best_column.unsqueeze(-1), lowest)

    # What is left in the tile belongs to the rest: exp_z = exp(z_j - best). If the tile contained only the target,
    # `best` is `lowest`, and the clamp makes exp(lowest - peak) 0 instead of 1.
    peak = best.clamp(min=lowest / 2).unsqueeze(-1)
    if "entropy" in extras:
        exp_z = (z - peak).exp_()  # not in place: z itself is needed below
    else:
        exp_z = z.sub_(peak).exp_()

    # The greater of the old rival and the tile's best token is the new rival, and the lesser one joins the rest. All
    # exponentials must be divided by that of the new rival.
    greater = torch.maximum(sums.rival, best)
    lesser = torch.minimum(sums.rival, best)
    rescale_old = (sums.rival - greater).exp()
    rescale_tile = (best - greater).exp()
    exp_lesser = (lesser - greater).exp()
    rest = sums.rest * rescale_old + exp_z.sum(-1) * rescale_tile + exp_lesser
    rest_sq = sums.rest_sq
    if "log_sum_sq" in extras:
        rest_sq = rest_sq * rescale_old**2 + (exp_z * exp_z).sum(-1) * rescale_tile**2 + exp_lesser**2
    rest_z = sums.rest_z
    if "entropy" in extras:
        lesser_z = lesser.clamp(min=lowest)  # -inf before the first rival, and 0 * -inf would be nan
        rest_z = rest_z * rescale_old + z.mul_(exp_z).sum(-1) * rescale_tile + exp_lesser * lesser_z

    best_id = best_column + tile.columns.start
    return RunningSums(
        target=target_logit,
        rival=greater,
        rival_id=torch.where(best > sums.rival, best_id, sums.rival_id),
        rest=rest,
        rest_z=rest_z,
        rest_sq=rest_sq,
        total=total,
        labels=label_logits,
    )


def _read_label_logits(tile: Tile, labels: Tensor, logits_so_far: Tensor) -> Tensor:
    """Return the logits of the labels (N, K), with those that are in this tile filled in."""
    if labels.shape[1] == 0:
        return logits_so_far
    is_inside, column = locate_tokens(labels, tile.columns)
    return torch.where(is_inside, tile.logits.gather(-1, column), logits_so_far)


def _remove_target(tile: Tile, targets: Tensor, logit_so_far: Tensor, lowest: float) -> Tensor:
    """Replace each target's logit in the tile by `lowest`, and return the logits of the targets found so far (N,)."""
    is_inside, column = locate_tokens(targets, tile.columns)
    column = column.unsqueeze(-1)
    logit = tile.logits.gather(-1, column)
    # If the target is in a different tile, the logit at this arbitrary column is written back unchanged.
    tile.logits.scatter_(-1, column, torch.where(is_inside.unsqueeze(-1), lowest, logit))
    return torch.where(is_inside, logit.squeeze(-1), logit_so_far)


def finish_sums(sums: RunningSums, spec: LogitSpec) -> HeadOutput:
    """Turn the sums over the whole vocabulary into log-probabilities and the requested statistics.

    In the comments, t is the target, r is the rival (the most probable other token), and j runs over the rest: all
    tokens except these two. The sums over the rest contain exp(z_j - z_r) = p_j / p_r. They are 0 if the vocabulary has
    only two tokens or if all other exponentials underflow; the formulas hold then too.
    """
    log_others = sums.rest.log1p()  # log((1 - p_t) / p_r) = log(1 + sum_j exp(z_j - z_r))
    logsumexp = torch.logaddexp(sums.target, sums.rival + log_others)
    logprobs = _compute_logprobs(sums, log_others)

    log_doubt = None
    if "log_doubt" in spec.extras:  # log(1 - c), where c is the larger of p_t and p_r
        # log(1 - p_r) is a difference of two log-sum-exps, with rounding errors of less than 1e-5. They are harmless
        # where c is close to 1, because log(1 - c) is then far from 0, unlike log p_t.
        logsumexp_without_rival = torch.logaddexp(sums.target, sums.rival + sums.rest.log())  # log(0) = -inf is right
        log_not_rival = logsumexp_without_rival - logsumexp
        log_doubt = torch.where(sums.target > sums.rival, logprobs.not_target, log_not_rival)
    mean_logit = None
    if "mean_logit" in spec.extras:
        mean_logit = sums.total / spec.vocabulary
    entropy = None
    if "entropy" in spec.extras:
        # logsumexp - p_t z_t - p_r z_r - sum_j p_j z_j, where p_j = p_r exp(z_j - z_r). Rounding errors of about 1e-5
        # nats are accepted here.
        target_term = logprobs.target.exp() * sums.target
        other_terms = logprobs.rival.exp() * (sums.rival + sums.rest_z)
        entropy = logsumexp - target_term - other_terms
    log_sum_sq = None
    if "log_sum_sq" in spec.extras:
        # log(p_t^2 + p_r^2 + sum_j p_j^2) = log(p_t^2 + p_r^2 (1 + sum_j exp(2 (z_j - z_r))))
        log_sum_sq = torch.logaddexp(2 * logprobs.target, 2 * logprobs.rival + sums.rest_sq.log1p())
    return HeadOutput(
        target=logprobs.target,
        rival=logprobs.rival,
        logsumexp=logsumexp,
        log_doubt=log_doubt,
        mean_logit=mean_logit,
        entropy=entropy,
        log_sum_sq=log_sum_sq,
        labels=logprobs.labels,
    )


class _LogProbs(NamedTuple):
    """Log-probabilities of N tokens, (N,) each and labels (N, K)."""

    target: Tensor  # log p_t
    not_target: Tensor  # log(1 - p_t)
    rival: Tensor  # log p_r
    labels: Tensor


def _compute_logprobs(sums: RunningSums, log_others: Tensor) -> _LogProbs:
    """Compute log-probabilities from differences of logits.

    Subtracting the log-sum-exp from a logit would lose digits: in fp32, a log-sum-exp of 40 has only six digits after
    the point, and log p_t may be as close to 0 as -1e-8.

    log_others: log((1 - p_t) / p_r), (N,).
    """
    gap = sums.target - sums.rival  # z_t - z_r = log p_t - log p_r
    target_if_top = logsigmoid(gap - log_others)  # log p_t, since p_t / (1 - p_t) = exp(gap - log_others)
    log_not_target = logsigmoid(log_others - gap)  # log(1 - p_t)
    rival_if_top = log_not_target - log_others  # log p_r, by the definition of log_others
    # The greater of log p_t and log p_r is computed first, and the lesser is that plus or minus the gap. So their order
    # is always that of the logits.
    is_target_top = gap > 0
    target = torch.where(is_target_top, target_if_top, rival_if_top + gap)
    rival = torch.where(is_target_top, target_if_top - gap, rival_if_top)
    # log p_l = z_l - z_top + log p_top for every label l, where `top` is the most probable of all tokens.
    top_logit = torch.maximum(sums.target, sums.rival)
    log_top = torch.maximum(target, rival)
    labels = sums.labels - top_logit.unsqueeze(-1) + log_top.unsqueeze(-1)
    return _LogProbs(target, log_not_target, rival, labels)


# ---- backward --------------------------------------------------------------------------------------------------------


class HeadGradients(NamedTuple):
    """Incoming gradients of N tokens, (N,) each and labels (N, K); None if the loss does not depend on a statistic."""

    probability_factor: Tensor  # the factor of p_j in the gradient of z_j, see `sum_probability_factors`
    target: Tensor | None
    rival: Tensor | None
    log_doubt: Tensor | None
    mean_logit: Tensor | None
    entropy: Tensor | None
    labels: Tensor | None

    def at_rows(self, rows: slice) -> HeadGradients:
        """Return the gradients of some of the tokens."""
        return HeadGradients(*_slice_rows(self, rows))


class SavedTokens(NamedTuple):
    """What the backward pass needs to know about N tokens."""

    targets: Tensor
    labels: Tensor
    rival_id: Tensor
    right: Tensor  # whether the target is the argmax
    logsumexp: Tensor
    log_doubt: Tensor | None
    entropy: Tensor | None

    def at_rows(self, rows: slice) -> SavedTokens:
        """Return what was saved for some of the tokens."""
        return SavedTokens(*_slice_rows(self, rows))


def _slice_rows(tensors: Iterable[Tensor | None], rows: slice) -> list[Any]:
    sliced = []
    for tensor in tensors:
        sliced.append(None if tensor is None else tensor[rows])
    return sliced


def sum_probability_factors(gradients: HeadOutput, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the factor of p_j in the gradient of the logits, (N,).

    d log p_i / dz_j = 1[j = i] - p_j, and d logsumexp / dz_j = p_j. So the incoming gradient of every log-probability
    (target, rival, labels, doubt) is subtracted from the factor of p_j, and that of the log-sum-exp is added to it. All
    other terms are added in `tile_gradient`.

    gradients: The incoming gradients of the head's outputs.
    """
    factor = torch.zeros(tokens, dtype=dtype, device=device)
    label_sum = None
    if gradients.labels is not None:
        label_sum = gradients.labels.sum(-1)
    for gradient in (gradients.target, gradients.rival, gradients.log_doubt, label_sum):
        if gradient is not None:
            factor = factor - gradient
    if gradients.logsumexp is not None:
        factor = factor + gradients.logsumexp
    return factor


def tile_gradient(tile: Tile, spec: LogitSpec, saved: SavedTokens, gradients: HeadGradients) -> Tensor:
    """Return the gradient of the loss with respect to the products y, (rows, columns). It overwrites the tile's logits.

    The gradient with respect to the logits z has a term for every token, `probability_factor` * p_j, and further terms
    for single tokens (the target, the rival and the labels) and for the extras. The chain rule then leads from z to y:
    dz/dy = scale / temperature, times 1 - tanh(scale y / softcap)^2 with a soft cap.
    """
    z = tile.logits
    # Terms that read the logits are computed first, before the logits are overwritten.
    softcap_slope = None
    if spec.softcap is not None:
        tanh = z * (spec.temperature / spec.softcap)
        softcap_slope = 1 - tanh**2
    extra_terms = []
    # A statistic that has a gradient was computed and saved; the second check is for the type checker.
    if gradients.log_doubt is not None and saved.log_doubt is not None:
        extra_terms.append(_doubt_gradient(tile, saved, gradients.log_doubt, saved.log_doubt))
    if gradients.entropy is not None and saved.entropy is not None:
        extra_terms.append(_entropy_gradient(tile, saved, gradients.entropy, saved.entropy))

    p = z.sub_(saved.logsumexp.unsqueeze(-1)).exp_()
    total = p.mul_(gradients.probability_factor.unsqueeze(-1))
    _add_at_tokens(total, tile, saved.targets, gradients.target)
    _add_at_tokens(total, tile, saved.rival_id, gradients.rival)
    if gradients.labels is not None:
        for ids, gradient in zip(saved.labels.unbind(-1), gradients.labels.unbind(-1), strict=True):
            _add_at_tokens(total, tile, ids, gradient)
    if gradients.mean_logit is not None:
        total.add_(gradients.mean_logit.unsqueeze(-1) / spec.vocabulary)
    for term in extra_terms:
        total.add_(term)
    if softcap_slope is not None:
        total.mul_(softcap_slope)
    factor = spec.scale / spec.temperature
    if factor != 1.0:
        total.mul_(factor)
    return total


def _add_at_tokens(total: Tensor, tile: Tile, ids: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient (N,) at one token of each row, if the token is in the tile; None adds nothing."""
    if gradient is None:
        return
    is_inside, column = locate_tokens(ids, tile.columns)
    addend = torch.where(is_inside, gradient, 0).to(total.dtype)
    total.scatter_add_(-1, column.unsqueeze(-1), addend.unsqueeze(-1))


def _doubt_gradient(tile: Tile, saved: SavedTokens, gradient: Tensor, log_doubt: Tensor) -> Tensor:
    """Return g exp(z_j - L') and 0 at the top token, where L' is the log-sum-exp without the top token.

    This is the gradient of L' in log_doubt = log(1 - c) = L' - logsumexp. That of the log-sum-exp, -g p_j, is part of
    `probability_factor`.
    """
    logsumexp_without_top = saved.logsumexp + log_doubt
    term = (tile.logits - logsumexp_without_top.unsqueeze(-1)).exp_()
    top_id = torch.where(saved.right, saved.targets, saved.rival_id)
    is_inside, column = locate_tokens(top_id.unsqueeze(-1), tile.columns)
    # If the top token is in a different tile, the value at this arbitrary column is written back unchanged.
    value_without_top = torch.where(is_inside, 0, term.gather(-1, column))
    term.scatter_(-1, column, value_without_top)
    return term.mul_(gradient.unsqueeze(-1))


def _entropy_gradient(tile: Tile, saved: SavedTokens, gradient: Tensor, entropy: Tensor) -> Tensor:
    """Return -g p_j (log p_j + entropy)."""
    log_p = tile.logits - saved.logsumexp.unsqueeze(-1)
    p = log_p.exp()
    log_p_plus_entropy = log_p.add_(entropy.unsqueeze(-1))
    return p.mul_(log_p_plus_entropy).mul_(-gradient.unsqueeze(-1))


class WeightGradient:
    """Accumulates the gradient of the LM head's weight, one range of columns after the other.

    Tiles must come in the order of `compute_tiles`: all rows of a range of columns, then the next range. A sum of
    several products is accumulated in `dtype`, whatever the weight's dtype. The first product of a sum overwrites
    instead of adding, since zeroing a large gradient beforehand costs 4 % of the pass.

    Args:
        weight: The weight (V, H).
        tokens: Number of tokens N.
        dtype: Dtype of the sums: fp32, or float64 if the hidden states are float64.
        spec: How the logits are computed.
    """

    def __init__(self, weight: Tensor, tokens: int, dtype: torch.dtype, spec: LogitSpec) -> None:
        self.gradient = torch.empty_like(weight)
        self.tokens = tokens
        self.dtype = dtype
        self.product_dtype = spec.product_dtype
        self._sum = self.gradient  # the sum for the current columns; set at their first tile

    def add(self, tile: Tile, logit_gradient: Tensor, hidden: Tensor) -> None:
        """Add the contribution of a tile. logit_gradient: (rows, columns), hidden: (rows, H)."""
        is_first_product = tile.rows.start == 0
        is_last_product = tile.rows.stop == self.tokens
        if is_first_product:
            column_gradient = self.gradient[tile.columns]
            # A single product may be rounded to the weight's dtype directly.
            is_rounded_once = is_last_product and column_gradient.dtype == self.product_dtype
            if column_gradient.dtype == self.dtype or is_rounded_once:
                self._sum = column_gradient
            else:
                self._sum = torch.empty_like(column_gradient, dtype=self.dtype)
        multiply(self._sum, logit_gradient.T, hidden, add=not is_first_product)
        if is_last_product and self._sum.dtype != self.gradient.dtype:
            self.gradient[tile.columns] = self._sum


def _collect_gradients(incoming: HeadOutput, hidden: Tensor) -> HeadGradients:
    return HeadGradients(
        probability_factor=sum_probability_factors(incoming, len(hidden), statistics_dtype(hidden), hidden.device),
        target=incoming.target,
        rival=incoming.rival,
        log_doubt=incoming.log_doubt,
        mean_logit=incoming.mean_logit,
        entropy=incoming.entropy,
        labels=incoming.labels,
    )


def _add_hidden_gradient(total: Tensor, tile: Tile, logit_gradient: Tensor, rounded_gradient: Tensor) -> None:
    """Add the contribution of a tile to the gradient of the hidden states, or of the logits if they were passed in."""
    if tile.weight is None:
        total[tile.rows, tile.columns] = logit_gradient
        return
    is_first_product = tile.columns.start == 0  # it overwrites the uninitialised memory of `total`
    multiply(total[tile.rows], rounded_gradient, tile.weight, add=not is_first_product)


def _add_bias_gradient(total: Tensor, tile: Tile, logit_gradient: Tensor) -> None:
    """Add the contribution of a tile to the gradient of the bias."""
    tile_sum = logit_gradient.sum(0)
    is_first_sum = tile.rows.start == 0  # it overwrites the uninitialised memory of `total`
    if not is_first_sum:
        tile_sum = total[tile.columns] + tile_sum
    total[tile.columns] = tile_sum


class _TiledHead(torch.autograd.Function):
    """Map hidden (N, H), weight (V, H), bias (V,), targets (N,) and labels (N, K) to the fields of `HeadOutput`.

    Autocast is disabled inside: it would run fp32 products in bf16 and so round the statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        labels: Tensor,
        spec: LogitSpec,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # statistics that the loss does not read get None instead of zeros
        ctx.spec = spec
        with torch.autocast(hidden.device.type, enabled=False):
            sums_by_row: dict[int, RunningSums] = {}  # keyed by the first row of a tile
            for tile in compute_tiles(hidden, weight, bias, spec):
                rows = tile.rows
                if rows.start not in sums_by_row:
                    sums_by_row[rows.start] = empty_sums(targets[rows], labels[rows], statistics_dtype(hidden))
                sums_so_far = sums_by_row[rows.start]
                sums_by_row[rows.start] = add_tile(sums_so_far, tile, targets[rows], labels[rows], spec.extras)
            # Join the sums of all rows, field by field.
            joined_fields = [torch.cat(field_by_row) for field_by_row in zip(*sums_by_row.values(), strict=True)]
            sums = RunningSums(*joined_fields)
            output = finish_sums(sums, spec)
        right = sums.target > sums.rival
        saved = SavedTokens(targets, labels, sums.rival_id, right, output.logsumexp, output.log_doubt, output.entropy)
        ctx.save_for_backward(hidden, weight, bias, *saved)
        if output.log_sum_sq is not None:
            ctx.mark_non_differentiable(output.log_sum_sq)
        return tuple(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved_tensors = ctx.saved_tensors
        spec = ctx.spec
        saved = SavedTokens(*saved_tensors)
        dtype = statistics_dtype(hidden)
        gradients = _collect_gradients(HeadOutput(*incoming), hidden)  # type: ignore[arg-type]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # ZeRO-3 may have partitioned the parameters again since the forward pass.
        with gather_zero3_parameters(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            # Both factors of a product must have the same dtype. Without a weight, there are no products.
            rounded_hidden = hidden if weight is None else hidden.to(spec.product_dtype)
            # None for an input that needs no gradient. The first tile overwrites the uninitialised memory.
            hidden_gradient = torch.empty_like(hidden, dtype=dtype) if needs_hidden else None
            bias_gradient = torch.empty_like(bias, dtype=dtype) if bias is not None and needs_bias else None
            weight_gradient = None
            if weight is not None and needs_weight:
                weight_gradient = WeightGradient(weight, len(hidden), dtype, spec)
            # Keyed by the first row of a tile: tiles with the same rows share these slices.
            slices_by_row: dict[int, tuple[SavedTokens, HeadGradients]] = {}
            for tile in compute_tiles(rounded_hidden, weight, bias, spec):
                rows = tile.rows
                if rows.start not in slices_by_row:
                    slices_by_row[rows.start] = saved.at_rows(rows), gradients.at_rows(rows)
                saved_at_rows, gradients_at_rows = slices_by_row[rows.start]
                logit_gradient = tile_gradient(tile, spec, saved_at_rows, gradients_at_rows)
                rounded_gradient = logit_gradient.to(spec.product_dtype)
                if hidden_gradient is not None:
                    _add_hidden_gradient(hidden_gradient, tile, logit_gradient, rounded_gradient)
                if weight_gradient is not None:
                    weight_gradient.add(tile, rounded_gradient, rounded_hidden[rows])
                if bias_gradient is not None:
                    _add_bias_gradient(bias_gradient, tile, logit_gradient)
        return (
            None if hidden_gradient is None else hidden_gradient.to(hidden.dtype),
            None if weight_gradient is None else weight_gradient.gradient,
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,  # targets
            None,  # labels
            None,  # spec
        )
