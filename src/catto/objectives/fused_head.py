"""The fused LM head: per-token statistics of `softmax(hidden @ weight.T)` that never hold the logits.

The vocabulary is processed in tiles. The forward pass folds each tile into running sums; the backward pass computes
the tile again and turns it, in place, into the gradient of the logits. A tile as large as the vocabulary makes the
same code the dense computation. With z the logits, t the target and r the rival (the best other token), every
statistic follows from sums that leave out these two tokens, so a probability near 1 loses no digits to cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from catto.objectives.tiles import Head, Precision, located, product, product_dtype, statistics_dtype, tile_shape, tiles

IGNORE = -100
EXTRAS = ("log_doubt", "mean_logit", "entropy", "log_sum_sq")


@dataclass(frozen=True)
class TokenStats:
    """Statistics of the next-token distribution at every position, each of the targets' shape; 0 where masked.

    target: log p_t, of the response's token. rival: log p_r, of the best other token. logsumexp: of the logits.
    log_doubt: log(1 - c). mean_logit: over the vocabulary. entropy: in nats. log_sum_sq: log sum_j p_j^2 (no
    gradient). An extra that was not requested is None.
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
        """c, the largest probability of all, in (0, 1]."""
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
        values: dict[str, Any] = {name: None if v is None else function(v) for name, v in vars(self).items()}
        return TokenStats(**values)

    def __getitem__(self, index: Any) -> TokenStats:
        """Index every statistic alike, e.g. `stats[:batch]` for the chosen half."""
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

    hidden: (..., H) and weight: (V, H); or weight None and hidden the ready logits (..., V). targets: (...), token
    ids; a position of -100 is masked and not computed. Logits: z = softcap tanh(scale y / softcap) / temperature.
    Statistics and gradients accumulate in fp32, those of float64 inputs in float64; `precision` is that of the
    products' inputs (see `product_dtype`). `extras` names the optional statistics; the default is all of them, and each
    costs another pass over every tile. `masked=False` promises that no target is -100, which saves a synchronisation of
    the host with the device. tile: columns of a tile; None chooses it by device and shape.

    >>> stats = token_stats(torch.tensor([[0.5, 0.3, 0.2]]).log(), None, torch.tensor([0]))
    >>> round(stats.confidence.item(), 4), round(stats.margin.item(), 4), stats.right.item()
    (0.5, 0.2, True)
    """
    with gathered(weight, bias):
        head = _head(hidden, targets, weight, bias, (softcap, scale, temperature), tile, extras, precision)
        kept = targets != IGNORE
        whole = not masked or bool(kept.all())
        rows = hidden.reshape(-1, hidden.shape[-1]) if whole else hidden[kept]
        ids = targets.reshape(-1) if whole else targets[kept]
        *values, _ = _Tiled.apply(rows, weight, bias, ids, ids.new_zeros(len(ids), 0), head)  # type: ignore[no-untyped-call]
    stats = TokenStats(*values)
    if not whole:
        return stats.map(lambda value: value.new_zeros(kept.shape).masked_scatter(kept, value))
    # No view without need: FSDP2 warns about a forward that returns one.
    return stats if targets.dim() == 1 else stats.map(lambda value: value.view_as(targets))


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
    """Gather the log-probabilities of K labels at one position of each sequence; -inf where a label is -100.

    hidden: (B, T, H) or, with weight None, logits (B, T, V); positions: (B,); labels: (B, K) token ids -> (B, K).

    >>> logits = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    >>> label_logprobs(logits, None, torch.tensor([0]), torch.tensor([[2, 0, -100]])).exp().round(decimals=4)
    tensor([[0.2000, 0.5000, 0.0000]])
    """
    with gathered(weight, bias):
        rows = hidden[torch.arange(hidden.shape[0], device=hidden.device), positions]
        ids = labels.clamp(min=0)
        head = _head(rows, ids[:, 0], weight, bias, (softcap, scale, temperature), tile, (), precision)
        values: Tensor = _Tiled.apply(rows, weight, bias, ids[:, 0], ids, head)[-1]  # type: ignore[no-untyped-call]
    return values.masked_fill(labels == IGNORE, -torch.inf)


def _head(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    logits: tuple[float | None, float, float],
    tile: int | None,
    extras: Collection[str],
    precision: Precision,
) -> Head:
    """Return how the logits are computed; ValueError where the tensors do not fit each other, or an option is bad."""
    vocabulary = hidden.shape[-1] if weight is None else weight.shape[0]
    shape = tile_shape(hidden.shape[:-1].numel(), vocabulary, hidden.device, tile)
    head = Head(*logits, vocabulary, *shape, frozenset(extras), product_dtype(hidden, weight, precision))
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not fit")
    if weight is not None and weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit")
    if bias is not None and bias.shape != (head.vocabulary,):
        raise ValueError(f"bias {tuple(bias.shape)} is not ({head.vocabulary},)")
    capped = head.softcap is None or head.softcap > 0
    if head.vocabulary < 2 or head.tile < 1 or head.temperature <= 0 or not capped:
        raise ValueError("expected a vocabulary of at least 2, tile >= 1, temperature > 0, softcap > 0 or None")
    if unknown := head.extras - set(EXTRAS):
        raise ValueError(f"extras {sorted(unknown)} are not among {', '.join(EXTRAS)}")
    return head


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """Gather the parameters that DeepSpeed ZeRO-3 has partitioned; every other tensor is whole already."""
    pieces = {id(p): p for p in parameters if p is not None and hasattr(p, "ds_status")}
    if not pieces:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    # A tied head is whole while the embedding's module holds it: gathering it here would take it from that module.
    missing = [p for p in pieces.values() if p.ds_status != ZeroParamStatus.AVAILABLE]
    return GatheredParameters(missing) if missing else nullcontext()


# ---- forward ---------------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Running statistics of N tokens; `rest` is over all tokens but target and rival, in units of exp(rival)."""

    target: Tensor  # z_t
    rival: Tensor  # z_r
    rival_id: Tensor
    rest: Tensor  # sum exp(z - z_r)
    rest_z: Tensor  # sum exp(z - z_r) z
    rest_sq: Tensor  # sum exp(2 (z - z_r))
    total: Tensor  # sum z, over the whole vocabulary
    labels: Tensor  # z of K further tokens, (N, K)


def first(targets: Tensor, labels: Tensor, dtype: torch.dtype) -> Sums:
    """The sums over no column yet. targets: (N,), labels: (N, K)."""
    zero = torch.zeros_like(targets, dtype=dtype)
    return Sums(zero, zero - torch.inf, targets, zero, zero, zero, zero, torch.zeros_like(labels, dtype=dtype))


def fold(sums: Sums, z: Tensor, columns: slice, targets: Tensor, labels: Tensor, extras: frozenset[str]) -> Sums:
    """Add a tile of logits z (N, columns), which is overwritten, to the sums."""
    # A finite stand-in for -inf: its exponential is 0 and 0 * nothing stays 0 in the entropy's sum.
    nothing = torch.finfo(z.dtype).min / 8
    at_labels, total, rest_z, rest_sq = sums.labels, sums.total, sums.rest_z, sums.rest_sq
    if labels.shape[1]:
        inside, column = located(labels, columns)
        at_labels = torch.where(inside, z.gather(-1, column), at_labels)
    if "mean_logit" in extras:
        total = total + z.sum(-1)
    # Take the target and the tile's rival out of the tile.
    inside, column = located(targets, columns)
    here = z.gather(-1, column.unsqueeze(-1))
    z.scatter_(-1, column.unsqueeze(-1), torch.where(inside.unsqueeze(-1), nothing, here))
    best, best_id = z.max(-1)
    z.scatter_(-1, best_id.unsqueeze(-1), nothing)
    # Sum what is left, in units of exp(best).
    peak = best.clamp(min=nothing / 2).unsqueeze(-1)
    e = (z - peak).exp_() if "entropy" in extras else z.sub_(peak).exp_()
    # Change the units to those of the greater rival; the lesser one joins the rest.
    top, lesser = torch.maximum(sums.rival, best), torch.minimum(sums.rival, best)
    old, new, second = (sums.rival - top).exp(), (best - top).exp(), (lesser - top).exp()
    rest = sums.rest * old + e.sum(-1) * new + second
    if "log_sum_sq" in extras:
        rest_sq = rest_sq * old**2 + (e * e).sum(-1) * new**2 + second**2
    if "entropy" in extras:
        rest_z = rest_z * old + z.mul_(e).sum(-1) * new + second * lesser.clamp(min=nothing)
    target = torch.where(inside, here.squeeze(-1), sums.target)
    rival_id = torch.where(best > sums.rival, best_id + columns.start, sums.rival_id)
    return Sums(target, top, rival_id, rest, rest_z, rest_sq, total, at_labels)


def finish(sums: Sums, head: Head) -> tuple[Tensor | None, ...]:
    """Sums -> the seven statistics of `TokenStats`, (N,) or None, and the labels' log-probabilities, (N, K)."""
    logsumexp = torch.logaddexp(sums.target, sums.rival + sums.rest.log1p())
    # Differences of logits, never of log-sum-exps: a logit of 40 has only six digits after the point.
    gap = sums.target - sums.rival
    share = logsigmoid(sums.rest.log1p() - gap)  # log of the mass of all but the target
    # The greater of the two is computed, the lesser follows from the gap: both keep their digits, and the order of the
    # two is that of the logits.
    target = torch.where(gap > 0, logsigmoid(gap - sums.rest.log1p()), share - sums.rest.log1p() + gap)
    rival = torch.where(gap > 0, target - gap, share - sums.rest.log1p())
    top, log_top = torch.maximum(sums.target, sums.rival), torch.maximum(target, rival)
    labels = sums.labels - top.unsqueeze(-1) + log_top.unsqueeze(-1)
    log_doubt = mean_logit = entropy = log_sum_sq = None
    if "log_doubt" in head.extras:  # log(1 - c): the log-sum-exp without the top token
        without_rival = torch.logaddexp(sums.target, sums.rival + sums.rest.log()) - logsumexp
        log_doubt = torch.where(sums.target > sums.rival, share, without_rival)
    if "mean_logit" in head.extras:
        mean_logit = sums.total / head.vocabulary
    if "entropy" in head.extras:
        entropy = logsumexp - target.exp() * sums.target - rival.exp() * (sums.rival + sums.rest_z)
    if "log_sum_sq" in head.extras:
        log_sum_sq = torch.logaddexp(2 * target, 2 * rival + sums.rest_sq.log1p())
    return target, rival, logsumexp, log_doubt, mean_logit, entropy, log_sum_sq, labels


# ---- backward --------------------------------------------------------------------------------------------------------


class Grads(NamedTuple):
    """Incoming gradients of N tokens, (N,) each, labels (N, K), or None; and the multiple of p_j that they make."""

    mass: Tensor
    target: Tensor | None
    rival: Tensor | None
    log_doubt: Tensor | None
    mean_logit: Tensor | None
    entropy: Tensor | None
    labels: Tensor | None


class Saved(NamedTuple):
    """What the backward pass needs of N tokens."""

    targets: Tensor
    labels: Tensor
    rival_id: Tensor
    right: Tensor  # whether the target is the argmax
    logsumexp: Tensor
    log_doubt: Tensor | None
    entropy: Tensor | None


def to_gradient(z: Tensor, columns: slice, head: Head, saved: Saved, grads: Grads) -> Tensor:
    """Overwrite a tile of logits z with the gradient of the loss in the raw logits y."""
    slope = None if head.softcap is None else 1 - (z * (head.temperature / head.softcap)) ** 2
    further = []
    if grads.log_doubt is not None and saved.log_doubt is not None:
        # g exp(z_j - L'), L' the log-sum-exp without the top token, and 0 at the top token; the - g p_j is in the mass
        e = (z - (saved.logsumexp + saved.log_doubt).unsqueeze(-1)).exp_()
        inside, column = located(torch.where(saved.right, saved.targets, saved.rival_id).unsqueeze(-1), columns)
        e.scatter_(-1, column, torch.where(inside, 0, e.gather(-1, column)))
        further.append(e.mul_(grads.log_doubt.unsqueeze(-1)))
    if grads.entropy is not None and saved.entropy is not None:  # -g p_j (log p_j + entropy)
        log_p = z - saved.logsumexp.unsqueeze(-1)
        p = log_p.exp()
        further.append(p.mul_(log_p.add_(saved.entropy.unsqueeze(-1))).mul_(-grads.entropy.unsqueeze(-1)))
    d = z.sub_(saved.logsumexp.unsqueeze(-1)).exp_().mul_(grads.mass.unsqueeze(-1))
    peaks = [(saved.targets, grads.target), (saved.rival_id, grads.rival)]
    if grads.labels is not None:
        peaks += zip(saved.labels.unbind(-1), grads.labels.unbind(-1), strict=True)
    for tokens, grad in peaks:
        if grad is not None:
            inside, column = located(tokens, columns)
            d.scatter_add_(-1, column.unsqueeze(-1), torch.where(inside, grad, 0).to(d.dtype).unsqueeze(-1))
    if grads.mean_logit is not None:
        d.add_(grads.mean_logit.unsqueeze(-1) / head.vocabulary)
    for part in further:
        d.add_(part)
    factor = head.scale / head.temperature
    d = d if slope is None else d.mul_(slope)
    return d if factor == 1.0 else d.mul_(factor)


class _Tiled(torch.autograd.Function):
    """(N, H), (V, H), (V,), (N,), (N, K) -> the seven statistics of `TokenStats`, (N,), and the labels' (N, K).

    Autocast is off inside: it would run a product of fp32 numbers in bf16, and the statistics with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        targets: Tensor,
        labels: Tensor,
        head: Head,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.head = head
        with torch.autocast(hidden.device.type, enabled=False):
            parts: dict[int, Sums] = {}  # by the first of a tile's rows
            for rows, columns, z, _ in tiles(hidden, weight, bias, head):
                before = parts.get(rows.start) or first(targets[rows], labels[rows], statistics_dtype(hidden))
                parts[rows.start] = fold(before, z, columns, targets[rows], labels[rows], head.extras)
            sums = Sums(*(torch.cat(part) for part in zip(*parts.values(), strict=True)))
            values = finish(sums, head)
        _, _, logsumexp, log_doubt, _, entropy, log_sum_sq, _ = values
        right = sums.target > sums.rival
        saved = targets, labels, sums.rival_id, right, logsumexp, log_doubt, entropy  # in the order of `Saved`
        ctx.save_for_backward(hidden, weight, bias, *saved)
        if log_sum_sq is not None:
            ctx.mark_non_differentiable(log_sum_sq)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        head, dtype = ctx.head, statistics_dtype(hidden)
        target, rival, logsumexp, log_doubt, mean_logit, entropy, _, labels = grads  # log_sum_sq has no gradient
        # d log p_i / dz_j = 1[j = i] - p_j and d logsumexp / dz_j = p_j: one multiple of p, the mass, serves them all
        mass = torch.zeros(len(hidden), dtype=dtype, device=hidden.device)
        for grad in (target, rival, log_doubt, None if labels is None else labels.sum(-1)):
            mass = mass if grad is None else mass - grad
        mass = mass if logsumexp is None else mass + logsumexp
        incoming = (mass, target, rival, log_doubt, mean_logit, entropy, labels)

        def cut(values: Sequence[Tensor | None], rows: slice) -> list[Any]:
            return [None if value is None else value[rows] for value in values]

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            g_hidden = torch.empty_like(hidden, dtype=dtype) if needs_hidden else None
            g_weight = torch.empty_like(weight) if weight is not None and needs_weight else None
            g_bias = torch.empty_like(bias, dtype=dtype) if bias is not None and needs_bias else None
            rounded = hidden if weight is None else hidden.to(head.product)
            tokens: dict[int, tuple[Saved, Grads]] = {}  # by the first of a tile's rows
            total = rounded  # of a part of the weight's gradient
            for rows, columns, z, part in tiles(rounded, weight, bias, head):
                # The first of a sum writes: zeroing a large gradient beforehand costs 4 % of the pass.
                more = rows.start > 0
                if rows.start not in tokens:
                    tokens[rows.start] = Saved(*cut(saved, rows)), Grads(*cut(incoming, rows))
                d = to_gradient(z, columns, head, *tokens[rows.start])
                low = d.to(head.product)
                if g_hidden is not None and part is not None:
                    product(g_hidden[rows], low, part, add=columns.start > 0)
                elif g_hidden is not None:
                    g_hidden[rows, columns] = d
                if g_weight is not None:
                    if not more:  # a sum of several products is fp32, whatever the weight's dtype
                        space, alone = g_weight[columns], rows.stop == len(hidden)
                        exact = space.dtype == dtype or (alone and space.dtype == head.product)
                        total = space if exact else torch.empty_like(space, dtype=dtype)
                    product(total, low.T, rounded[rows], add=more)
                    if rows.stop == len(hidden) and total.dtype != g_weight.dtype:
                        g_weight[columns] = total
                if g_bias is not None:
                    g_bias[columns] = g_bias[columns] + d.sum(0) if more else d.sum(0)
            g_hidden = None if g_hidden is None else g_hidden.to(hidden.dtype)
            g_bias = None if g_bias is None else g_bias.to(bias.dtype)
        return g_hidden, g_weight, g_bias, None, None, None
