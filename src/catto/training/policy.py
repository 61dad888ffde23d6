"""What stands in the model's place in TRL's loss: one call through our head, with TRL's fields on the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from catto.objectives import TokenStats
from catto.training import head
from catto.training.batches import Batch, Query, Row, build
from catto.training.pairs import Pairs
from catto.training.terms import extras_of

TRL_EXTRAS = ("entropy", "mean_logit")  # what TRL logs of every step


class Policy:
    """Stands in the model's place in TRL's loss: calls it once through our head, keeps the statistics."""

    def __init__(self, trainer: Any, model: Any, pairs: Pairs, examples: Any = (), *, reference: bool = False) -> None:
        self.trainer, self.model, self.pairs, self.examples = trainer, model, pairs, examples
        self.reference = reference  # of which TRL reads the log-probabilities alone
        self.stats: TokenStats
        self.labels: Any = None  # (M, K) where queries were asked
        self.stream: tuple[Tensor, ...] = ()  # log p_t of each replayed response, (T_i,)

    def __call__(self, *, labels: Tensor | None = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the batch through our head once. labels: (2 B, L), -100 off the completions."""
        if labels is None:  # TRL's second, deprecated call for full logits
            return self.model(**kwargs)
        head.install(self.trainer.accelerator.unwrap_model(self.model))
        batch = self._batch(labels.device)
        more = {name: kwargs[name] for name in ("output_router_logits",) if name in kwargs}
        output = head.call(self.model, batch, self._extras(), **more)
        stats, lengths = output.stats(), [_scored(row) for row in self._replayed]
        cut = len(batch.targets) - sum(lengths)
        self.stream = torch.split(stats.target[cut:], lengths) if lengths else ()
        self.stats = _spread(stats[:cut], batch.place[:cut], labels[:, 1:])
        self.labels = output.labels
        return _as_trl(self.stats, labels[:, 1:] != -100, output.aux_loss)

    def _extras(self) -> tuple[str, ...]:
        if self.reference:
            return ()
        weighting = ("log_sum_sq",) if self.trainer.use_weighting else ()
        return (*TRL_EXTRAS, *extras_of(self.trainer.args), *weighting)

    def _batch(self, device: torch.device) -> Batch:
        pairs, replayed = len(self.pairs.rows), self._replayed
        rows = [*self.pairs.rows, *(replayed or [example.before_label() for example in self.examples])]
        pad, shared = self.trainer.data_collator.pad_token_id, self.trainer.sharing()
        scored = pairs + len(replayed)
        return build(rows, self._queries(), scored, pad, shared=shared, balanced=pairs).to(device)

    @property
    def _replayed(self) -> list[Row]:
        """The stream's responses where all of their tokens are scored, and not only the label's."""
        return [example.row for example in self.examples] if self.trainer.args.calibration == "replay" else []

    def _queries(self) -> list[Query]:
        first = len(self.pairs.rows)
        if self.reference:
            return []
        if self._replayed:
            return []
        if self.examples:
            return [Query(first + n, e.label.at, e.label.candidates) for n, e in enumerate(self.examples)]
        if self.trainer.args.calibration != "outcome" or "chosen_label_at" not in self.pairs.facts[0]:
            return []
        sides = [f["chosen_label_at"] for f in self.pairs.facts] + [f["rejected_label_at"] for f in self.pairs.facts]
        candidates = [f[f"{side}_candidates"] for side in ("chosen", "rejected") for f in self.pairs.facts]
        return [Query(row, at, ids) for row, (at, ids) in enumerate(zip(sides, candidates, strict=True)) if at >= 0]

    def label_mask(self, like: Tensor) -> Tensor:
        """True at the label's token of every row that has one. (2 B, L - 1)."""
        mask = torch.zeros_like(like)
        facts = self.pairs.facts
        for row, at in enumerate([f["chosen_label_at"] for f in facts] + [f["rejected_label_at"] for f in facts]):
            if at >= 0:
                mask[row, len(self.pairs.rows[row].prompt) + at - 1] = True
        return mask


def _scored(row: Row) -> int:
    """How many tokens of a row have a position that predicts them."""
    return len(row.completion) if row.prompt else max(len(row.completion) - 1, 0)


def _spread(stats: TokenStats, place: Tensor, shifted: Tensor) -> TokenStats:
    """Put the N tokens' statistics where TRL has them, `place` (N, 2): (2 B, L - 1), 0 elsewhere."""
    rows, columns = place.unbind(-1)
    values = (getattr(stats, name) for name in TokenStats.__dataclass_fields__)
    zeros = stats.target.new_zeros(shifted.shape)
    return TokenStats(*(None if v is None else zeros.index_put((rows, columns), v) for v in values))  # type: ignore[arg-type]


def _as_trl(stats: TokenStats, mask: Tensor, aux_loss: Tensor | None) -> Any:
    """Our statistics under TRL's names; what TRL only logs carries no gradient."""
    return FusedCausalLMOutput(
        log_probs=stats.target,
        entropy=None if stats.entropy is None else stats.entropy.detach(),
        mean_logits=None if stats.mean_logit is None else stats.mean_logit.detach(),
        is_top1=stats.right & mask,
        log_sum_sq_probs=stats.log_sum_sq,
        label_mask=mask,
        aux_loss=aux_loss,
    )
