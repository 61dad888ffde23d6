"""The fused LM head: per-token statistics of `softmax(hidden @ weight.T)` without ever holding the logits.

The vocabulary is walked in tiles (`tiles.py`): forward folds each tile into running statistics, backward computes the
tile again and turns it, in place, into the gradient of the logits. With a tile as large as the vocabulary the same
code is the dense computation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from catto.objectives.tiles import (
    TILE,
    TOKENS,
    Grads,
    Head,
    Saved,
    Sums,
    finish,
    fold,
    slices,
    statistics_dtype,
    unfold,
)

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
