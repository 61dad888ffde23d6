"""The vocabulary in tiles: fold a tile of logits into running statistics, and turn it into the logits' gradient.

With z the logits, t the target and r the rival (the best other token), everything follows from five sums that leave
the two out: a probability near 1 then loses no digits to cancellation.

The fused LM head: per-token statistics of `softmax(hidden @ weight.T)` without ever holding the logits.

The vocabulary is walked in tiles (`tiles.py`): forward folds each tile into running statistics, backward computes the
tile again and turns it, in place, into the gradient of the logits. With a tile as large as the vocabulary the same
code is the dense computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# ---- tiles


# 4,096 columns x 1,024 tokens of fp32 are 16 MB, small beside a layer's activations and large enough for a GPU.
TILE = 4096
TOKENS = 1024


class Head(NamedTuple):
    """What does not change between tiles. Logits: z = softcap * tanh(scale * y / softcap) / temperature."""

    weight: Tensor | None  # (V, H); None where `hidden` are ready logits y
    bias: Tensor | None  # (V,)
    softcap: float | None
    scale: float
    temperature: float
    vocabulary: int
    tile: int
    extras: frozenset[str]


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


class Grads(NamedTuple):
    """Incoming gradients of N tokens, (N,) each, labels (N, K), or None."""

    target: Tensor | None
    rival: Tensor | None
    logsumexp: Tensor | None
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


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut [0, length) into pieces; an empty range is one empty piece, so that an all-masked batch keeps its graph."""
    return (slice(start, min(start + step, length)) for start in range(0, max(length, 1), step))


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """At least fp32: bf16 statistics move a two-label confidence by up to 1.5 points."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def fold(hidden: Tensor, targets: Tensor, labels: Tensor, head: Head) -> Sums:
    """Walk the vocabulary once. hidden: (N, H) or logits (N, V); targets: (N,); labels: (N, K) -> sums (N,)."""
    zero = hidden.new_zeros(hidden.shape[0], dtype=statistics_dtype(hidden))
    sums = Sums(zero, zero - torch.inf, targets, zero, zero, zero, zero, torch.zeros_like(labels, dtype=zero.dtype))
    for columns, y, _ in _tiles(hidden, head):
        z = _transformed(y, head)
        at_labels = _picked(z, labels - columns.start, sums.labels)
        sums = _fold_tile(z, targets - columns.start, columns, sums, head.extras)._replace(labels=at_labels)
    return sums


def _picked(z: Tensor, local: Tensor, before: Tensor) -> Tensor:
    """The tile's logits at columns `local` (N, K) where they lie in it; what was there `before` elsewhere."""
    inside = (local >= 0) & (local < z.shape[1])
    return torch.where(inside, z.gather(-1, local.clamp(0, z.shape[1] - 1)), before)


def _tiles(hidden: Tensor, head: Head) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield (columns, raw logits y (N, tile), the weight's tile (tile, H))."""
    dtype = statistics_dtype(hidden)
    hidden = hidden.to(dtype)
    # One buffer for all tiles: a fresh one each costs its page faults again, 8 % of the time of a pass on a CPU.
    buffer = hidden.new_empty(hidden.shape[0], min(head.tile, head.vocabulary))
    for columns in slices(head.vocabulary, head.tile):
        part = None if head.weight is None else head.weight[columns].to(dtype)
        y = buffer[:, : columns.stop - columns.start]
        if part is None:
            y.copy_(hidden[:, columns])
        else:
            torch.mm(hidden, part.T, out=y)
        yield columns, y if head.bias is None else y.add_(head.bias[columns].to(dtype)), part


def _transformed(y: Tensor, head: Head) -> Tensor:
    """Raw logits -> z, in place."""
    if head.softcap is not None:
        y.mul_(head.scale / head.softcap).tanh_()
    factor = (head.softcap or head.scale) / head.temperature
    return y if factor == 1.0 else y.mul_(factor)


def _fold_tile(z: Tensor, local: Tensor, columns: slice, sums: Sums, extras: frozenset[str]) -> Sums:
    """Fold one tile z: (N, tile), which is overwritten. local: the target's column in it, if it lies in it."""
    total = sums.total + z.sum(-1) if "mean_logit" in extras else sums.total
    # A finite stand-in for -inf: its exponential is 0 and 0 * nothing stays 0 in the entropy's sum.
    nothing = torch.finfo(z.dtype).min / 8
    inside = (local >= 0) & (local < z.shape[1])
    column = local.clamp(0, z.shape[1] - 1).unsqueeze(-1)
    here = z.gather(-1, column)
    z.scatter_(-1, column, torch.where(inside.unsqueeze(-1), nothing, here))
    best, best_id = z.max(-1)
    z.scatter_(-1, best_id.unsqueeze(-1), nothing)
    rest, rest_z, rest_sq = _rest(z, best.clamp(min=nothing / 2), extras)
    top = torch.maximum(sums.rival, best)
    old, new, lesser = (sums.rival - top).exp(), (best - top).exp(), torch.minimum(sums.rival, best)
    second = (lesser - top).exp()  # the lesser of the two rivals joins the rest
    return Sums(
        torch.where(inside, here.squeeze(-1), sums.target),
        top,
        torch.where(best > sums.rival, best_id + columns.start, sums.rival_id),
        sums.rest * old + rest * new + second,
        sums.rest_z * old + rest_z * new + second * lesser.clamp(min=nothing) if "entropy" in extras else rest_z,
        sums.rest_sq * old**2 + rest_sq * new**2 + second**2 if "log_sum_sq" in extras else rest_sq,
        total,
        sums.labels,
    )


def _rest(z: Tensor, best: Tensor, extras: frozenset[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum exp(z - best), exp(z - best) z and exp(2 (z - best)) over the tile; z is overwritten where it may be."""
    nothing = torch.zeros_like(best)
    if "entropy" not in extras:
        e = z.sub_(best.unsqueeze(-1)).exp_()
        return e.sum(-1), nothing, (e * e).sum(-1) if "log_sum_sq" in extras else nothing
    e = (z - best.unsqueeze(-1)).exp_()
    square = (e * e).sum(-1) if "log_sum_sq" in extras else nothing
    return e.sum(-1), z.mul_(e).sum(-1), square


def finish(sums: Sums, head: Head) -> tuple[Tensor | None, ...]:
    """Sums -> target, rival, logsumexp, log_doubt, mean_logit, entropy, log_sum_sq: (N,) each, None if unasked.

    Last come the log-probabilities of the labels, (N, K).
    """
    logsumexp = torch.logaddexp(sums.target, sums.rival + sums.rest.log1p())
    # Differences of logits, never of log-sum-exps: a logit of 40 has only six digits after the point.
    gap = sums.target - sums.rival
    share = logsigmoid(sums.rest.log1p() - gap)  # log of the mass of all but the target
    # The greater of the two is computed, the lesser follows from the gap: both keep their digits, and which one is
    # greater is what the logits say.
    target = torch.where(gap > 0, logsigmoid(gap - sums.rest.log1p()), share - sums.rest.log1p() + gap)
    rival = torch.where(gap > 0, target - gap, share - sums.rest.log1p())
    top, log_top = torch.maximum(sums.target, sums.rival), torch.maximum(target, rival)
    labels = sums.labels - top.unsqueeze(-1) + log_top.unsqueeze(-1)
    log_doubt = _log_doubt(sums, share, logsumexp) if "log_doubt" in head.extras else None
    mean_logit = sums.total / head.vocabulary if "mean_logit" in head.extras else None
    entropy = log_sum_sq = None
    if "entropy" in head.extras:
        entropy = logsumexp - target.exp() * sums.target - rival.exp() * (sums.rival + sums.rest_z)
    if "log_sum_sq" in head.extras:
        log_sum_sq = torch.logaddexp(2 * target, 2 * rival + sums.rest_sq.log1p())
    return target, rival, logsumexp, log_doubt, mean_logit, entropy, log_sum_sq, labels


def _log_doubt(sums: Sums, share: Tensor, logsumexp: Tensor) -> Tensor:
    """log(1 - c): the log-sum-exp without the top token."""
    without_rival = torch.logaddexp(sums.target, sums.rival + sums.rest.log()) - logsumexp
    return torch.where(sums.target > sums.rival, share, without_rival)


def unfold(
    hidden: Tensor, head: Head, saved: Saved, grads: Grads, into: tuple[Tensor | None, ...], *, first: bool
) -> None:
    """Walk the vocabulary again and add this slice's gradients into (hidden's rows, weight, bias).

    The first slice of tokens writes weight and bias instead: zeroing a large weight's gradient costs 4 % of the pass.
    """
    g_hidden, g_weight, g_bias = into
    keep = 0 if first else 1
    for columns, y, part in _tiles(hidden, head):
        d = _logit_gradient(y, columns, head, saved, grads)
        if g_hidden is not None and part is None:
            g_hidden[:, columns] = d
        elif g_hidden is not None and part is not None:
            g_hidden.addmm_(d, part)
        if g_weight is not None:
            g_weight[columns].addmm_(d.T, hidden.to(d.dtype), beta=keep)
        if g_bias is not None:
            g_bias[columns] = d.sum(0) if first else g_bias[columns] + d.sum(0)


def _logit_gradient(y: Tensor, columns: slice, head: Head, saved: Saved, grads: Grads) -> Tensor:
    """Overwrite a tile of raw logits with the gradient of the loss in them."""
    z = _transformed(y, head)
    slope = None if head.softcap is None else 1 - (z * (head.temperature / head.softcap)) ** 2
    more = [_doubt_gradient(z, columns, saved, grads), _entropy_gradient(z, saved, grads)]
    # d log p_i / dz_j = 1[j = i] - p_j and d logsumexp / dz_j = p_j: one multiple of p serves them all
    d = z.sub_(saved.logsumexp.unsqueeze(-1)).exp_().mul_(_mass(saved, grads).unsqueeze(-1))
    _add_at(d, saved.targets - columns.start, grads.target)
    _add_at(d, saved.rival_id - columns.start, grads.rival)
    if grads.labels is not None:
        for label, grad in zip(saved.labels.unbind(-1), grads.labels.unbind(-1), strict=True):
            _add_at(d, label - columns.start, grad)
    if grads.mean_logit is not None:
        d.add_(grads.mean_logit.unsqueeze(-1) / head.vocabulary)
    for part in more:
        if part is not None:
            d.add_(part)
    factor = head.scale / head.temperature
    d = d if slope is None else d.mul_(slope)
    return d if factor == 1.0 else d.mul_(factor)


def _mass(saved: Saved, grads: Grads) -> Tensor:
    """The multiple of p in the gradient: g_logsumexp - g_target - g_rival - g_log_doubt - sum g_labels, (N,)."""
    mass = torch.zeros_like(saved.logsumexp)
    labels = None if grads.labels is None else grads.labels.sum(-1)
    for grad in (grads.target, grads.rival, grads.log_doubt, labels):
        if grad is not None:
            mass -= grad
    return mass if grads.logsumexp is None else mass + grads.logsumexp


def _add_at(d: Tensor, local: Tensor, grad: Tensor | None) -> None:
    """Add grad (N,) at column `local` of each row of the tile d, where it lies in the tile."""
    if grad is not None:
        inside = (local >= 0) & (local < d.shape[1])
        column = local.clamp(0, d.shape[1] - 1).unsqueeze(-1)
        d.scatter_add_(-1, column, torch.where(inside, grad, 0).to(d.dtype).unsqueeze(-1))


def _doubt_gradient(z: Tensor, columns: slice, saved: Saved, grads: Grads) -> Tensor | None:
    """g exp(z_j - L'), L' the log-sum-exp without the top token, and 0 at the top token; the - g p_j is in the mass."""
    if grads.log_doubt is None or saved.log_doubt is None:
        return None
    e = (z - (saved.logsumexp + saved.log_doubt).unsqueeze(-1)).exp_()
    local = torch.where(saved.right, saved.targets, saved.rival_id) - columns.start
    inside = (local >= 0) & (local < z.shape[1])
    column = local.clamp(0, z.shape[1] - 1).unsqueeze(-1)
    e.scatter_(-1, column, torch.where(inside.unsqueeze(-1), 0, e.gather(-1, column)))
    return e.mul_(grads.log_doubt.unsqueeze(-1))


def _entropy_gradient(z: Tensor, saved: Saved, grads: Grads) -> Tensor | None:
    """-g p_j (log p_j + entropy)."""
    if grads.entropy is None or saved.entropy is None:
        return None
    log_p = z - saved.logsumexp.unsqueeze(-1)
    return log_p.exp().mul_(log_p.add_(saved.entropy.unsqueeze(-1))).mul_(-grads.entropy.unsqueeze(-1))


# ---- head


IGNORE = -100
EXTRAS = ("log_doubt", "mean_logit", "entropy", "log_sum_sq")


@dataclass(frozen=True)
class TokenStats:
    """Statistics of the next-token distribution at every position, each of the targets' shape; 0 where masked.

    target: log p_t, of the token that stands in the response. rival: log p_r, of the best other token.
    logsumexp: of the logits. log_doubt: log(1 - c). mean_logit: over the vocabulary. entropy: in nats.
    log_sum_sq: log sum_j p_j^2 (no gradient). An extra that was not asked for is None.
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

    def __getitem__(self, index: Any) -> TokenStats:
        """Index every statistic alike, e.g. `stats[:batch]` for the chosen half."""
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return TokenStats(*_cut(values, index))  # type: ignore[arg-type]


def token_stats(
    hidden: Tensor,
    weight: Tensor | None,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    tile: int = TILE,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    extras: Collection[str] = EXTRAS,
) -> TokenStats:
    """Compute the statistics of every token, differentiable in hidden, weight and bias.

    hidden: (..., H) and weight: (V, H); or weight None and hidden the ready logits (..., V). targets: (...), a token
    id each; -100 masks a position, which is then not computed. Logits: z = softcap tanh(scale y / softcap) /
    temperature. Statistics and gradients accumulate in fp32, those of float64 inputs in float64. `extras` names the
    optional statistics; the default is all of them, and each costs another pass over every tile.
    """
    with gathered(weight, bias):
        vocabulary = hidden.shape[-1] if weight is None else weight.shape[0]
        head = Head(weight, bias, softcap, scale, temperature, vocabulary, tile, frozenset(extras))
        _check(hidden, targets, head)
        kept = targets != IGNORE
        everything = bool(kept.all())
        rows = hidden.reshape(-1, hidden.shape[-1]) if everything else hidden[kept]
        *values, _ = _tiled(rows, targets[kept], None, head)
    return TokenStats(*(None if value is None else _shaped(value, kept, everything) for value in values))  # type: ignore[arg-type]


def label_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    positions: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tile: int = TILE,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Gather the log-probabilities of K labels at one position of each sequence; -inf where a label is -100.

    hidden: (B, T, H) or, with weight None, logits (B, T, V); positions: (B,); labels: (B, K) token ids -> (B, K).
    """
    with gathered(weight, bias):
        rows = hidden[torch.arange(hidden.shape[0], device=hidden.device), positions]
        ids = labels.clamp(min=0)
        vocabulary = hidden.shape[-1] if weight is None else weight.shape[0]
        head = Head(weight, bias, softcap, scale, temperature, vocabulary, tile, frozenset())
        _check(rows, ids[:, 0], head)
        *_, values = _tiled(rows, ids[:, 0], ids, head)
    assert values is not None
    return values.masked_fill(labels == IGNORE, -torch.inf)


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """Hold parameters whole that DeepSpeed ZeRO-3 keeps in pieces; every other tensor is whole already."""
    pieces = {id(p): p for p in parameters if p is not None and hasattr(p, "ds_status")}
    if not pieces:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    # A tied head is whole while the embedding's module holds it: gathering it here would cut it up under that module.
    missing = [p for p in pieces.values() if p.ds_status != ZeroParamStatus.AVAILABLE]
    return GatheredParameters(missing) if missing else nullcontext()


def _tiled(rows: Tensor, targets: Tensor, labels: Tensor | None, head: Head) -> tuple[Tensor | None, ...]:
    """Apply the function below; tensors reach it as its own arguments only."""
    plain = head._replace(weight=None, bias=None)
    labels = targets.new_zeros(len(targets), 0) if labels is None else labels
    return _Tiled.apply(rows, head.weight, head.bias, targets, labels, plain)  # type: ignore[no-untyped-call,no-any-return]


def _check(hidden: Tensor, targets: Tensor, head: Head) -> None:
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not fit")
    if head.weight is not None and head.weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(head.weight.shape)} do not fit")
    if head.bias is not None and head.bias.shape != (head.vocabulary,):
        raise ValueError(f"bias {tuple(head.bias.shape)} is not ({head.vocabulary},)")
    if (
        head.vocabulary < 2
        or head.tile < 1
        or head.temperature <= 0
        or (head.softcap is not None and head.softcap <= 0)
    ):
        raise ValueError("expected a vocabulary of at least 2, tile >= 1, temperature > 0, softcap > 0 or None")
    if unknown := head.extras - set(EXTRAS):
        raise ValueError(f"extras {sorted(unknown)} are not among {', '.join(EXTRAS)}")


def _shaped(values: Tensor, kept: Tensor, everything: bool) -> Tensor:
    """Put the computed values (N,) back where `kept` (...) is true; 0 elsewhere."""
    if everything:  # never a view without need: FSDP2 warns of a forward that returns one
        return values if values.shape == kept.shape else values.view_as(kept)
    return values.new_zeros(kept.shape).masked_scatter(kept, values)


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
        head = head._replace(weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False):
            parts = [fold(hidden[some], targets[some], labels[some], head) for some in slices(len(hidden), TOKENS)]
            sums = Sums(*(torch.cat(part) for part in zip(*parts, strict=True)))
            values = finish(sums, head)
        _, _, logsumexp, log_doubt, _, entropy, log_sum_sq, _ = values
        right = sums.target > sums.rival
        saved = Saved(targets, labels, sums.rival_id, right, logsumexp, log_doubt, entropy)  # type: ignore[arg-type]
        ctx.save_for_backward(hidden, weight, bias, *saved)
        if log_sum_sq is not None:
            ctx.mark_non_differentiable(log_sum_sq)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        with gathered(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            head, inputs = ctx.head._replace(weight=weight, bias=bias), (hidden, weight, bias)
            into = [_accumulator(x, needed) for x, needed in zip(inputs, ctx.needs_input_grad, strict=False)]
            if into[0] is not None:
                into[0].zero_()
            statistics = (*grads[:6], grads[7])  # the seventh, log_sum_sq, has no gradient
            for some in slices(hidden.shape[0], TOKENS):
                rows = None if into[0] is None else into[0][some]
                of, grad = Saved(*_cut(saved, some)), Grads(*_cut(statistics, some))  # type: ignore[arg-type]
                unfold(hidden[some], head, of, grad, (rows, *into[1:]), first=some.start == 0)
            given = [None if g is None else g.to(x.dtype) for g, x in zip(into, inputs, strict=True)]
        return *given, None, None, None


def _cut(values: Iterable[Tensor | None], some: Any) -> list[Tensor | None]:
    return [None if value is None else value[some] for value in values]


def _accumulator(tensor: Tensor | None, needed: bool) -> Tensor | None:
    return torch.empty_like(tensor, dtype=statistics_dtype(tensor)) if tensor is not None and needed else None
