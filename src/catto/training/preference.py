"""The third stream beside the pairs: which unfiltered responses go with which step.

The choice follows from (seed, step, place in the step) alone, so a run that was killed goes on with the same rows and
the order of accumulation or the number of processes changes nothing.

From statistics to the calibration term of a batch of pairs, and what it logs.

What stands in the model's place in TRL's loss: one call through our head, with TRL's fields on the way out.

`CATTOTrainer`: TRL's DPOTrainer with a calibration term, one policy forward a step.

With calibration none or weight 0 and no prefix sharing, everything is TRL's own code and the loss is TRL's to the
last bit. Otherwise `_compute_loss` of TRL receives, in the model's place, a callable that runs our head once and hands
TRL the fields it wants; the term is added to what TRL returns. What we lean on in TRL is listed in
tests/test_trl_contract.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from catto.files import replacing
from catto.objectives import TokenStats, bce_loss, brier_loss, catto_loss, l1_loss, outcome_loss
from catto.training import model_forward as head
from catto.training.batches import Batch, Query, Row, build
from catto.training.card import calibration_section, method_title, paper, tags
from catto.training.config import CATTOConfig
from catto.training.monitor import EvaluateAtEnd, Monitored, evaluating_without_dataset
from catto.training.tokenize import (
    COLUMNS,
    KEY,
    Example,
    Fits,
    Pairs,
    check_columns,
    check_not_empty,
    fitting,
    fitting_pairs,
    label_columns,
    numbered,
    paired,
    take_pairs,
)

# ---- stream


class OutcomeStream:
    """Endless passes over the examples, each in an order of its own."""

    def __init__(self, examples: Sequence[Example], config: CATTOConfig) -> None:
        self.examples = examples
        self.per_pair = config.outcome_rows_per_pair
        self.seed = config.seed if config.data_seed is None else config.data_seed
        self._step, self._micro = -1, 0
        self._turn, self._order = -1, np.arange(0)

    def next(self, trainer: Any, pairs: int) -> list[Example]:
        """The examples of this process's next micro-batch of `pairs` pairs."""
        step = trainer.state.global_step
        self._micro = self._micro + 1 if step == self._step else 0
        self._step = step
        args = trainer.args
        size = args.per_device_train_batch_size * self.per_pair
        micro = step * args.gradient_accumulation_steps + self._micro
        start = (micro * args.world_size + args.process_index) * size
        return [self.at(start + n) for n in range(pairs * self.per_pair)]

    def at(self, position: int) -> Example:
        """Example number `position` of the endless stream."""
        turn, place = divmod(position, len(self.examples))
        if turn != self._turn:
            self._turn, self._order = turn, np.random.default_rng((self.seed, turn)).permutation(len(self.examples))
        return self.examples[int(self._order[place])]


# ---- terms


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


# ---- policy


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


# ---- preference


logger = logging.getLogger(__name__)


class CATTOTrainer(Monitored, DPOTrainer):  # type: ignore[misc]
    """Train on preferences and keep confidence honest. Takes what `DPOTrainer` takes.

    validation: examples on which `evaluate` measures label confidence (see `Monitored`).
    outcome_examples: with `calibration="outcome"`, the unfiltered responses (`catto.training.tokenize.examples`) that
    form a third stream; without them the term reads the pairs' own labels, y+ weighted by the question's
    correctness rate and y- by one minus it. With `calibration="replay"`, the responses whose cross-entropy is added.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        *more: Any,
        outcome_examples: Sequence[Example] = (),
        validation: Sequence[Example] = (),
        **kwargs: Any,
    ) -> None:
        args = CATTOConfig(output_dir="catto") if args is None else CATTOConfig.of(args)
        self._share: bool | None = None  # decided at the first batch: precomputation runs inside TRL's constructor
        self._step_pairs: float | None = None  # counted by Transformers' loop, which takes a step's batches at once
        self._stream = _stream(outcome_examples, args)
        self._given_collator = kwargs.get("data_collator", more[0] if more else None)
        self.validation = validation
        self._name, self._paper, self._tag_names = method_title(args), paper(args), tags(args)
        check_not_empty((*more, *kwargs.values()))  # TRL looks at the first row before it prepares the data
        with evaluating_without_dataset(args, () if kwargs.get("eval_dataset") is not None else validation):
            super().__init__(model, ref_model, args, *more, **kwargs)
        if validation:
            self.add_callback(EvaluateAtEnd())
        head.install(self.model)  # before accelerate wraps the forward, so that autocast covers our head too

    @property
    def data_collator(self) -> Any:
        """TRL's collator, brought to hand on the rows that our batch is laid out from."""
        return self._collator

    @data_collator.setter
    def data_collator(self, collator: Any) -> None:
        self._collator = paired(collator)

    @property
    def _own_head(self) -> bool:
        return bool(self.args.weight) or self.args.prefix_sharing

    # ---- data -------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Tokenise as TRL does (or take token ids that are there), find labels, drop rows that TRL drops.

        Where the term reads the label of a pair, rows that would have to be cut are dropped too.
        """
        check_not_empty([dataset])
        if "prompt_ids" not in (dataset.column_names or ()):
            check_columns(dataset, name)
            whole = copy.copy(args)
            whole.max_length = None  # TRL drops long prompts without a word; the same rows are dropped below
            dataset = super()._prepare_dataset(dataset, processing_class, whole, name)
        reads_labels = bool(args.weight) and (
            args.calibrate_tokens == "label" or (args.calibration == "outcome" and not self._stream)
        )
        cut = getattr(self._given_collator, "max_length", None)
        determining = {"cut": [args.max_length, args.truncation_mode, repr(self._given_collator)]}
        dataset = dataset.map(numbered, with_indices=True, fn_kwargs=determining)
        if reads_labels:
            known = {"tokenizer": processing_class, "name": name, "rated": args.calibration == "outcome"}
            dataset = dataset.map(label_columns, fn_kwargs=known)
        limits = [limit for limit in (args.max_length, cut if reads_labels else None) if limit is not None]
        if not limits or not (reads_labels or args.truncation_mode == "keep_start"):
            return dataset
        return fitting_pairs(dataset, Fits(min(limits), reads_labels, name))

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: list[str] = vars(self)["_signature_columns"]
        self._signature_columns = [*known, *(column for column in COLUMNS if column not in known)]

    # ---- the loss -----------------------------------------------------------------------------------------------

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """TRL's, whose cache knows a reference by data and weights: what our head computes differently is added."""
        theirs = vars(self)["_precompute_model_hash"]
        if self._own_head:
            ours = (theirs, "catto", self.accelerator.mixed_precision, self.sharing())
            self._precompute_model_hash: Any = ours
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            self._precompute_model_hash = theirs

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Reference log-probabilities, through the head that the policy's go through.

        TRL's head rounds its logits to bf16 in autocast and ours does not: from one through each, the log-ratio of
        equal models would be noise instead of 0.
        """
        inputs, pairs = take_pairs(inputs)
        if pairs is not None and self._own_head:
            model = Policy(self, model, pairs, reference=True)
        return super().compute_ref_log_probs(model, inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        inputs, pairs = take_pairs(inputs)
        if not self._own_head:
            return self._checked(super()._compute_loss(model, inputs, return_outputs), pairs)
        if pairs is None:
            raise ValueError(
                "calibration and prefix sharing need TRL's own preference collator: leave data_collator out"
            )
        examples = self._stream.next(self, pairs.size) if self._stream and self.model.training else []
        policy = Policy(self, model, pairs, examples)
        result = self._trl_loss(policy, inputs, return_outputs)
        loss, outputs = result if return_outputs else (result, None)
        if self.args.weight and (examples or not self._stream):  # the stream is for training: evaluation has none
            total = loss + self.calibration_weight * self._step_share(pairs) * self._term(policy, inputs).loss
            loss = total if self.model.training else self._reported(loss, total, pairs)
        return self._checked((loss, outputs) if return_outputs else loss, pairs)

    def _reported(self, loss: Any, total: Any, pairs: Pairs) -> Any:
        """`eval_loss` is TRL's; the total goes beside it, weighted over batches as Transformers weights that."""
        self._checked(total, pairs)
        values = self.accelerator.gather_for_metrics(total.detach().repeat(self.args.eval_batch_size))
        self._metrics["eval"]["total_loss"].extend(values.tolist())
        return loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take the micro-batches of a step and, where a term reads it, count their pairs over all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self.args.weight:
            return batches, items
        pairs = torch.tensor([sum(len(batch["input_ids"]) for batch in batches) / 2], device=device)
        self._step_pairs = self.accelerator.gather(pairs).mean().item()
        return batches, items

    def _step_share(self, pairs: Pairs) -> float:
        """What brings a micro-batch's mean to its share of the mean over the step's pairs; 1 unless it is ragged."""
        if not self.model.training or not self._step_pairs:
            return 1.0
        return float(pairs.size * self.current_gradient_accumulation_steps / self._step_pairs)

    @property
    def calibration_weight(self) -> float:
        """Lambda, as it multiplies the term."""
        return float(self.args.weight)

    def _trl_loss(self, policy: Policy, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """TRL's loss with our callable as the policy; an online reference goes through our head too."""
        if self.precompute_ref_logps:
            return super()._compute_loss(policy, inputs, return_outputs)
        reference = self.ref_model if self.ref_model is not None else self.model
        chosen, rejected = self.compute_ref_log_probs(reference, {**inputs, KEY: policy.pairs})
        self.precompute_ref_logps: bool = True
        try:
            given = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
            return super()._compute_loss(policy, given, return_outputs)
        finally:
            self.precompute_ref_logps = False

    def _term(self, policy: Policy, inputs: dict[str, Any]) -> Term:
        mask = inputs["completion_mask"][..., 1:].bool()
        if self.args.calibration == "replay":
            term = replay_on_stream(policy.stream)
        elif self.args.calibration == "outcome" and policy.examples:
            term = outcome_on_stream(policy.labels, policy.examples, self.args)
        elif self.args.calibration == "outcome":
            term = outcome_on_pairs(policy.labels, policy.pairs, self.args)
        else:
            if self.args.calibrate_tokens == "label":
                mask = mask & policy.label_mask(mask)
            term = surrogate_term(policy.stats, mask, self.args)
        mode = "train" if self.model.training else "eval"
        for name, value in term.logs.items():
            self._metrics[mode][name].append(self.accelerator.gather(value.detach().reshape(1)).mean().item())
        return term

    def _checked(self, result: Any, pairs: Pairs | None) -> Any:
        """Stop at a loss that is not a number, before it reaches the weights."""
        loss = result[0] if isinstance(result, tuple) else result
        if not torch.isfinite(loss):
            rows = ", ".join(self._names(pairs)) if pairs else "unknown"
            raise FloatingPointError(
                f"loss is {loss.item()} at step {self.state.global_step} on rows {rows}; "
                f"the checkpoints in {self.args.output_dir} are from before"
            )
        return result

    def _names(self, pairs: Pairs) -> list[str]:
        """What an error calls each pair: its question's id where the dataset has it, else its number."""
        numbers = [fact["row"] for fact in pairs.facts]
        rows = self.train_dataset if self.model.training else self.eval_dataset
        if not isinstance(rows, Dataset) or not {"row", "question"} <= set(rows.column_names):
            return [f"row {number}" for number in numbers]
        names = dict(zip(rows["row"], rows["question"], strict=True))
        return [str(names.get(number, f"row {number}")) for number in numbers]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card and, where calibration was measured while training, its last numbers."""
        super().create_model_card(*args, **kwargs)
        logged = [entry for entry in self.state.log_history if "eval_val_ece" in entry]
        measured = [entry for entry in logged if entry.get("step") == self.kept_step] or logged
        if measured and self.is_world_process_zero():
            path = Path(self.args.output_dir) / "README.md"
            text = path.read_text(encoding="utf-8") + calibration_section(measured[-1], len(self.validation))
            with replacing(path) as card:
                card.write(text)

    def sharing(self) -> bool:
        """Whether prompts are shared: as asked, unless the policy or its reference cannot, which is said once."""
        if self._share is None:
            models = [model for model in (self.model, self.ref_model) if model is not None and self.args.prefix_sharing]
            obstacles = [head.sharing_obstacle(self.accelerator.unwrap_model(model)) for model in models]
            obstacle = next(filter(None, obstacles), None)
            if obstacle:
                logger.warning("prefix_sharing is off: %s", obstacle)
            self._share = self.args.prefix_sharing and obstacle is None
        return self._share


def _stream(examples: Sequence[Example], args: CATTOConfig) -> OutcomeStream | None:
    """The third stream, of the examples that fit; refused where nothing would read it."""
    if examples and args.calibration not in ("outcome", "replay"):
        raise ValueError(f"outcome_examples are given but calibration is {args.calibration!r}: it must be 'outcome'")
    if args.calibration == "replay" and not examples:
        raise ValueError("calibration is 'replay' but outcome_examples, the responses to replay, are not given")
    if not examples and args.outcome_rows_per_pair != CATTOConfig.outcome_rows_per_pair:
        raise ValueError(f"outcome_rows_per_pair is {args.outcome_rows_per_pair} but outcome_examples are not given")
    if not examples or not args.weight:
        return None
    return OutcomeStream(fitting(list(examples), args.max_length, lambda example: example.tokens), args)
