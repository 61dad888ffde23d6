"""`CATTOTrainer`: TRL's DPOTrainer with a calibration term, one policy forward per step.

With calibration none or weight 0, and neither prefix sharing nor packing, everything is TRL's own code and the loss is
TRL's to the last bit. Otherwise TRL's `_compute_loss` receives a `Policy` in the model's place, which runs our head
once and returns the fields that TRL reads; the term is added to what TRL returns. The private parts of TRL and
Transformers that this depends on are listed in tests/test_trl_contract.py.
"""

from __future__ import annotations

import copy
import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import FusedCausalLMOutput, get_config_model_id, hash_module

from catto.io.atomic import write_text
from catto.objectives import TokenStats, bce_loss, brier_loss, catto_loss, l1_loss, outcome_loss
from catto.objectives.tiles import Precision
from catto.training import forward
from catto.training.batches import COLUMNS, KEY, Batch, PairCollator, build, pair_batch
from catto.training.config import CATTOConfig
from catto.training.examples import (
    Example,
    LengthFilter,
    check_reasoning,
    drop_too_long,
    label_columns,
    label_queries,
    numbered,
    reasoning_columns,
    require_columns,
    target_table,
    with_targets,
)
from catto.training.monitor import EvaluateAtEnd, Monitored, evaluating_without_dataset
from catto.training.question_stream import (
    FOLDER,
    cache_key,
    load_calibration_questions,
    sample_stream,
    sampling_settings,
)

logger = logging.getLogger(__name__)
TRL_EXTRAS = ("entropy", "mean_logit")  # what TRL logs of every step


class OutcomeStream:
    """The third stream beside the pairs: endless passes over the examples, each in an order of its own.

    The choice follows from (seed, step, place in the step) alone, so a killed run resumes with the same rows, and
    neither the order of accumulation nor the number of processes changes anything.
    """

    def __init__(self, examples: Sequence[Example], config: CATTOConfig) -> None:
        self.examples = examples
        self.per_pair = config.outcome_rows_per_pair
        self.seed = config.seed if config.data_seed is None else config.data_seed
        self._step, self._micro = -1, 0
        self._turn, self._order = -1, np.arange(0)

    def next(self, trainer: Any, pairs: int) -> list[Example]:
        """The examples of this process's next micro-batch of `pairs` pairs."""
        step, args = trainer.state.global_step, trainer.args
        self._micro = self._micro + 1 if step == self._step else 0
        self._step = step
        micro = step * args.gradient_accumulation_steps + self._micro
        size = args.per_device_train_batch_size * self.per_pair
        start = (micro * args.world_size + args.process_index) * size
        return [self.at(start + n) for n in range(pairs * self.per_pair)]

    def at(self, position: int) -> Example:
        """Example number `position` of the endless stream."""
        turn, place = divmod(position, len(self.examples))
        if turn != self._turn:
            self._turn, self._order = turn, np.random.default_rng((self.seed, turn)).permutation(len(self.examples))
        return self.examples[int(self._order[place])]


# ---- the term --------------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """The calibration term, a scalar, and scalars to log."""

    loss: Tensor
    logs: dict[str, Tensor]


def surrogate_term(stats: TokenStats, mask: Tensor, config: CATTOConfig) -> Term:
    """Mean over pairs of the term on y+ plus the term on y- (paper Eq. 7). stats, mask: (2 B, T), chosen first."""
    half = mask.shape[0] // 2
    chosen = per_response(stats[:half], mask[:half], config, preferred=True)
    rejected = per_response(stats[half:], mask[half:], config, preferred=False)
    logs = {"calibration/chosen": chosen.mean(), "calibration/rejected": rejected.mean()}
    with torch.no_grad():
        means = {"confidence": stats.confidence, "surrogate": stats.surrogate, "right": stats.right.float()}
        for name, values in means.items():
            logs[f"calibration/{name}"] = values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)
    return Term((chosen + rejected).mean(), logs)


def per_response(stats: TokenStats, mask: Tensor, config: CATTOConfig, *, preferred: bool) -> Tensor:
    """The configured surrogate loss of each response. stats, mask: (B, T) -> (B,)."""
    options: dict[str, Any] = {"preferred": preferred, "detach_surrogate": config.detach_surrogate}
    if config.calibration == "bce":
        return bce_loss(stats, mask, reduce="mean" if config.reduce == "mean" else "sum", **options)
    loss = {"catto": catto_loss, "l1": l1_loss, "brier": brier_loss}[config.calibration](stats, mask, **options)
    return loss * mask.sum(-1) if config.reduce == "sum" else loss


def sft_loss(logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens of the chosen responses, as TRL's `sft`.

    logprobs: (2 B, L - 1), completion_mask: (2 B, L). Both have the chosen responses first.
    """
    chosen, _ = logprobs.chunk(2)
    mask, _ = completion_mask[:, 1:].bool().chunk(2)
    return -chosen[mask].mean()


def outcome_term(
    labels: Tensor, gold: Tensor, rate: Tensor | None, config: CATTOConfig, target: Tensor | None = None
) -> Term:
    """Mean proper score of the label probabilities after sampled reasoning. labels: (M, K), gold: (M,).

    With the correctness rates (B,) of the questions, the M = 2 B labels are those of the pairs: y+ is weighted by the
    rate, y- by one minus it, and the mean is over pairs. target: (M, K), distributions to aim at in place of gold.
    """
    weights = None if rate is None else torch.cat([rate, 1 - rate]).to(labels.dtype)
    aim = gold if target is None else target.to(labels)
    losses = outcome_loss(labels, aim, score=config.outcome_score, weights=weights)  # type: ignore[arg-type]
    loss = losses.mean() if rate is None else losses.sum() / len(rate)
    with torch.no_grad():
        top, answer = labels.max(-1)
        logs = {"confidence": top.exp().mean(), "right": (answer == gold).to(labels.dtype).mean(), "outcome": loss}
    return Term(loss, {f"calibration/{name}": value for name, value in logs.items()})


# ---- the trainer -----------------------------------------------------------------------------------------------------


class Policy:
    """Takes the model's place in TRL's loss: calls it once through our head and keeps the statistics."""

    stats: TokenStats  # of the pairs, (2 B, L - 1) each: TRL's shifted layout
    label_logprobs: Any = None  # (M, K) where the batch has queries
    replayed: Sequence[Tensor] = ()  # log p_t of each replayed response, (T_i,)

    def __init__(self, model: Any, batch: Batch, precision: Precision, extras: tuple[str, ...] = ()) -> None:
        self.model, self.batch, self.precision, self.extras = model, batch, precision, extras

    def __call__(self, *, labels: Tensor | None = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the batch through our head once. labels: (2 B, L), -100 off the tokens that TRL's loss reads."""
        if labels is None:  # TRL's second, deprecated call for full logits
            return self.model(**kwargs)
        self.batch = batch = self.batch.to(labels.device, non_blocking=True)
        mask = labels[:, 1:] != -100
        router = {name: value for name, value in kwargs.items() if name == "output_router_logits"}
        stats, self.label_logprobs, aux_loss = forward.call(self.model, batch, self.extras, self.precision, **router)
        tokens = sum(batch.lengths[: len(labels)])  # those of the pairs come first
        self.replayed = torch.split(stats.target[tokens:], batch.lengths[len(labels) :])
        zeros, place = stats.target.new_zeros(mask.shape), batch.place[:tokens].unbind(-1)
        self.stats = stats[:tokens].map(lambda values: zeros.index_put(place, values))
        return FusedCausalLMOutput(
            log_probs=self.stats.target.masked_fill(~mask, 0.0),  # TRL sums them without looking at its mask
            # What TRL only logs carries no gradient.
            entropy=None if self.stats.entropy is None else self.stats.entropy.detach(),
            mean_logits=None if self.stats.mean_logit is None else self.stats.mean_logit.detach(),
            is_top1=self.stats.right & mask,
            log_sum_sq_probs=self.stats.log_sum_sq,
            label_mask=mask,
            aux_loss=aux_loss,
        )


class CATTOTrainer(Monitored, DPOTrainer):  # type: ignore[misc]
    """Train on preferences and keep confidence honest. Takes what `DPOTrainer` takes.

    validation: examples on which `evaluate` measures label confidence (see `Monitored`).
    outcome_examples: with `calibration="outcome"`, the unfiltered responses (`catto.training.examples.examples`) that
    form a third stream; without them the term reads the pairs' own labels, y+ weighted by the question's
    correctness rate and y- by one minus it. `CATTOConfig.calibration_questions` has the trainer sample them. With
    `calibration="replay"`, the responses whose cross-entropy is added.
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
        if args is None:  # a folder as TRL names it
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = CATTOConfig(output_dir=f"{name.split('/')[-1]}-CATTO")
        args = CATTOConfig.of(args)
        # decided at the first batch: precomputation runs inside TRL's constructor
        self._arrangement: dict[str, bool] | None = None
        self._padding_free = args.padding_free
        self._step_pairs: float | Tensor | None = None  # a process's mean share of the step's pairs
        self._collated_mask: tuple[Tensor, int] | None = None  # and its version, which counts changes in place
        if outcome_examples and args.calibration_questions is not None:
            raise ValueError("outcome_examples and calibration_questions are both given: expected one of them")
        self._stream = _stream(outcome_examples, args) if args.calibration_questions is None else None
        self._given_collator = kwargs.get("data_collator", more[0] if more else None)
        self.validation = validation
        self._name, self._paper, self._tag_names = _card(args)
        for argument in (*more, *kwargs.values()):  # TRL looks at the first row before it prepares the data
            _refuse_empty(argument)
        args.padding_free = None  # TRL does not implement its option and says so: it sees it unset
        try:
            with evaluating_without_dataset(args, () if kwargs.get("eval_dataset") is not None else validation):
                super().__init__(model, ref_model, args, *more, **kwargs)
        finally:
            args.padding_free = self._padding_free
        if validation:
            self.add_callback(EvaluateAtEnd())
        if args.calibration_questions is not None and args.weight:
            self._stream = _stream(self._sampled_examples(), args)
        forward.install(self.model)  # before accelerate wraps the forward, so that autocast covers our head too

    @property
    def calibration_weight(self) -> float:
        """Lambda, as it multiplies the term."""
        return float(self.args.weight)

    @property
    def _own_head(self) -> bool:
        return bool(self.args.weight or self.args.prefix_sharing or self._padding_free or self._reads_reasoning)

    @property
    def _reads_reasoning(self) -> bool:
        """Whether the preference loss reads the tokens before the label alone."""
        return bool(self.args.preference_tokens == "reasoning")

    def arrangement(self) -> dict[str, bool]:
        """Whether prompts are shared and rows packed: as configured, unless the policy or its reference cannot."""
        if self._arrangement is None:
            models = [self.accelerator.unwrap_model(m) for m in (self.model, self.ref_model) if m is not None]
            obstacle = next(filter(None, (forward.sharing_obstacle(model, self.args) for model in models)), None)
            for name, wanted in (("prefix_sharing", self.args.prefix_sharing), ("padding_free", self._padding_free)):
                if wanted and obstacle:
                    logger.warning("%s is off: %s", name, obstacle)
            sparse = all(forward.skips_blocks(model, self.args.device) for model in models)
            packed = sparse if self._padding_free is None else self._padding_free
            chosen = {"shared": self.args.prefix_sharing, "packed": packed}
            self._arrangement = {name: value and obstacle is None for name, value in chosen.items()}
        return self._arrangement

    # ---- data

    def _sampled_examples(self) -> list[Example]:
        """The start model's responses to `calibration_questions`. Rank 0 samples them; the others read its file."""
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "calibration_questions cannot be sampled with ZeRO-3, which splits the weights: "
                "sample before and give outcome_examples"
            )
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)  # of a processor
        questions = load_calibration_questions(self.args.calibration_questions)
        settings = sampling_settings(self.args)
        # Other ranks may have no weights yet, so rank 0 names the file.
        names = [""]
        if self.accelerator.is_main_process:
            names = [cache_key(questions, tokenizer, settings, hash_module(self.model))]
        broadcast_object_list(names, from_process=0)
        folder = Path(self.args.output_dir) / FOLDER / names[0]
        with self.accelerator.main_process_first():
            return sample_stream(
                self.model,
                tokenizer,
                questions,
                settings=settings,
                folder=folder,
                max_length=self.args.max_length,
            )

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self._set_collator(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _set_collator(self, dataset: Any) -> None:
        """Extend TRL's collator by the layout of our batch, unless Accelerate joins and slices batches by rows.

        A user's own collator is left as it is, but for which tokens the preference loss reads.
        """
        if isinstance(self.data_collator, PairCollator):
            self.data_collator.reads_reasoning = self._reads_reasoning
        if type(self.data_collator) in (DataCollatorForPreference, PairCollator):
            dispatched = self.accelerator.dispatch_batches or not isinstance(dataset, Dataset)
            layout = self.arrangement() if self._own_head and not dispatched else None
            ours = {"layout": layout, "reads_reasoning": self._reads_reasoning}
            self.data_collator: Any = PairCollator(**{**vars(self.data_collator), **ours})

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Tokenise as TRL does (or take the token ids that are there), find labels, drop rows that TRL drops.

        Where the term reads the label of a pair, rows that would have to be cut are dropped too.
        """
        _refuse_empty(dataset)
        columns = dataset.column_names or ()
        if "prompt_ids" not in columns:
            if missing := [column for column in ("chosen", "rejected") if columns and column not in columns]:
                raise ValueError(f"the {name} dataset has no column {missing[0]!r}; it has {', '.join(columns)}")
            whole = copy.copy(args)
            whole.max_length = None  # TRL drops long prompts silently; the same rows are dropped below
            dataset = super()._prepare_dataset(dataset, processing_class, whole, name)
        determining = {"cut": [args.max_length, args.truncation_mode, args.ld_alpha, repr(self._given_collator)]}
        dataset = dataset.map(numbered, with_indices=True, fn_kwargs=determining)
        on_pairs = args.calibration == "outcome" and not self._stream and args.calibration_questions is None
        reads_labels = bool(args.weight) and (args.calibrate_tokens == "label" or on_pairs)
        reads_reasoning = args.preference_tokens == "reasoning"
        if reads_reasoning:
            require_columns(dataset, ("labels",), name, "preference_tokens 'reasoning'")
            dataset = dataset.map(reasoning_columns, fn_kwargs={"tokenizer": processing_class, "name": name})
            check_reasoning(dataset, name)
        limits = [args.max_length]
        if reads_labels:
            rated = args.calibration == "outcome"
            needed = ("labels", "gold", "correctness_rate") if rated else ("labels", "gold")
            reader = "calibration 'outcome' on pairs" if rated else "calibrate_tokens 'label'"
            require_columns(dataset, needed, name, reader)
            known = {"tokenizer": processing_class, "name": name, "rated": rated}
            dataset = dataset.map(label_columns, fn_kwargs=known)
        if reads_labels or reads_reasoning:
            limits.append(getattr(self._given_collator, "max_length", None))
        limit = min((limit for limit in limits if limit is not None), default=None)
        finds_labels = reads_labels or reads_reasoning
        if limit is None or not (finds_labels or args.truncation_mode == "keep_start"):
            return dataset
        return LengthFilter(limit, finds_labels, name).select(dataset)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        known: list[str] = vars(self)["_signature_columns"]
        self._signature_columns = [*known, *(column for column in COLUMNS if column not in known)]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take the micro-batches of a step and, where there is a term, count their pairs over all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.weight:
            self._step_pairs = self.mean_over_processes(sum(len(batch["input_ids"]) for batch in batches) / 2, device)
        return batches, items

    # ---- the reference

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Transformers', which loads only the reference where the checkpoint of an adapted model has one beside it."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        beside = (Path(resume_from_checkpoint) / "ref").is_dir() and "ref" in getattr(self.model, "peft_config", {})
        if beside and not self.is_fsdp_enabled:
            self.model.load_adapter(resume_from_checkpoint, self.model.active_adapters[0], is_trainable=True)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """TRL's, whose cache knows a reference by data and weights: what our head computes differently is added."""
        self._set_collator(dataset)
        theirs = vars(self)["_precompute_model_hash"]
        if self._own_head:
            arrangement = self.arrangement().values()
            ours = (theirs, "catto", self.accelerator.mixed_precision, self.args.head_precision, *arrangement)
            if self._reads_reasoning:
                ours = (*ours, "reasoning")
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
        if KEY in inputs and self._own_head:
            forward.install(self.accelerator.unwrap_model(model))
            model = Policy(model, self._layout(inputs).without_queries(), self.args.head_precision)
        return super().compute_ref_log_probs(model, self._trl_inputs(inputs))

    # ---- the loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Transformers'. The mask is remembered, to see without waiting for the device whether it is changed later."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        self._collated_mask = None
        if type(self.data_collator) is PairCollator and not prepared["completion_mask"].is_inference():
            mask = prepared["completion_mask"]
            self._collated_mask = mask, mask._version
        return prepared

    def _is_laid_out(self, layout: Batch, mask: Tensor) -> bool:
        """Whether a layout scores the tokens that `completion_mask` (2 B, L) selects.

        A subclass may have changed the mask after the collator laid the batch out.
        """
        if self._collated_mask is not None:
            collated, version = self._collated_mask
            if mask is collated and mask._version == version:
                return True
        wanted = mask[:, 1:].bool()
        row, column = layout.place.to(mask.device).unbind(-1)
        scored = torch.zeros_like(wanted)
        scored[row, column] = True
        return torch.equal(scored, wanted)

    def _trl_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What TRL reads of a batch: without our entry, and with the mask of the tokens that its loss reads."""
        theirs = {name: value for name, value in inputs.items() if name != KEY}
        if self._reads_reasoning:
            if KEY not in inputs:
                raise ValueError("preference_tokens 'reasoning' needs TRL's own collator: leave data_collator out")
            known = inputs[KEY]
            mask = theirs["completion_mask"]
            columns = torch.arange(mask.shape[-1], device=mask.device)
            end_of_reasoning = known["start"] + known["reasoning"]
            theirs["completion_mask"] = mask * (columns < end_of_reasoning.unsqueeze(-1))
        return theirs

    def _layout(self, inputs: dict[str, Any]) -> Batch:
        """The pairs' batch as the collator has laid it out, or laid out here where it could not."""
        layout: Batch | None = inputs[KEY].get("layout")
        if layout is None or not self._is_laid_out(layout, inputs["completion_mask"]):
            layout = pair_batch(inputs, inputs[KEY], self.data_collator.pad_token_id, **self.arrangement())
        return layout

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        rows = partial(self._rows, inputs.get(KEY, {}).get("row"), self.model.training)
        if not self._own_head:
            result = super()._compute_loss(model, self._trl_inputs(inputs), return_outputs)
            self.check_nan_later(result[0] if return_outputs else result, rows)
            return result
        if KEY not in inputs:
            raise ValueError("calibration and prefix sharing need TRL's own collator of texts: leave data_collator out")
        layout, training = self._layout(inputs), self.model.training
        size = len(inputs["input_ids"]) // 2
        streamed = self._stream.next(self, size) if self._stream and training else []
        policy = self._policy(model, layout, streamed)
        given = self._trl_inputs(inputs)
        if not self.precompute_ref_logps:
            # The reference goes through our head too, before TRL's loss, which then reads its log-probabilities.
            reference = self.ref_model if self.ref_model is not None else self.model
            laid_out = {**inputs, KEY: {**inputs[KEY], "layout": layout}}
            chosen, rejected = self.compute_ref_log_probs(reference, laid_out)
            given |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        with self._reading_given_references(), self._without_sft() as sft_weight:
            result = super()._compute_loss(policy, given, return_outputs)
        loss, outputs = result if return_outputs else (result, None)
        if sft_weight:
            loss = loss + sft_weight * sft_loss(policy.stats.target, inputs["completion_mask"])
        if self.args.weight and (streamed or not self._stream):  # the stream is for training: evaluation has none
            # A micro-batch's mean counts as its share of the mean over the step's pairs; 1 unless it is ragged.
            pairs = self._step_pairs if training else None
            share = 1.0 if pairs is None else size * self.current_gradient_accumulation_steps / pairs
            total = loss + self.calibration_weight * share * self._term(policy, inputs, streamed)
            if training:
                loss = total
            else:  # `eval_loss` is TRL's; the total goes beside it
                self.check_nan_later(total, rows)
                self._log_evaluation("total_loss", total)
        self.check_nan_later(loss, rows)
        return (loss, outputs) if return_outputs else loss

    @contextmanager
    def _reading_given_references(self) -> Iterator[None]:
        """Let TRL's loss read the reference's log-probabilities from the batch, as if they were precomputed."""
        precomputed: bool = self.precompute_ref_logps
        self.precompute_ref_logps: bool = True
        try:
            yield
        finally:
            self.precompute_ref_logps = precomputed

    @contextmanager
    def _without_sft(self) -> Iterator[float]:
        """Take `sft` out of TRL's losses where they read the reasoning alone, and return its weight.

        It holds the form of whole responses, the answer included, so it is computed on whole responses.
        """
        kinds, weights = self.loss_types, self.loss_weights
        named = list(zip(kinds, weights, strict=True))
        moved = [weight for kind, weight in named if kind == "sft" and self._reads_reasoning]
        if not moved:
            yield 0.0
            return
        rest = [(kind, weight) for kind, weight in named if kind != "sft"]
        self.loss_types: Any = [kind for kind, _ in rest]
        self.loss_weights: Any = [weight for _, weight in rest]
        try:
            yield sum(moved)
        finally:
            self.loss_types = kinds
            self.loss_weights = weights

    def _policy(self, model: Any, layout: Batch, streamed: Sequence[Example]) -> Policy:
        """The policy of this micro-batch: the pairs and, behind them, the stream's responses."""
        args, pairs = self.args, len(layout.rows)
        extras = (*TRL_EXTRAS, *(["log_doubt"] if args.weight and args.calibration == "bce" else []))
        extras = (*extras, *(["log_sum_sq"] if self.use_weighting else []))
        options = {"pad": self.data_collator.pad_token_id, "balanced": pairs, "tokens": layout.tokens}
        options |= self.arrangement()
        if streamed and args.calibration == "replay":
            rows = [*layout.rows, *(example.row for example in streamed)]
            layout = build(rows, [], len(rows), **options)
        elif streamed:
            rows = [*layout.rows, *(example.before_label() for example in streamed)]
            layout = build(rows, label_queries(streamed, pairs), pairs, **options)
        elif args.calibration != "outcome":
            layout = layout.without_queries()
        forward.install(self.accelerator.unwrap_model(model))
        return Policy(model, layout, args.head_precision, extras)

    def _term(self, policy: Policy, inputs: dict[str, Any], streamed: Sequence[Example]) -> Tensor:
        """The calibration term; its parts are logged."""
        known, args = inputs[KEY], self.args
        if args.calibration == "replay":  # mean over responses of their cross-entropy, a mean over tokens
            loss = -torch.stack([logprobs.mean() for logprobs in policy.replayed]).mean()
            term = Term(loss, {"calibration/replay": loss})
        elif args.calibration == "outcome":
            rates = None if streamed else known["correctness_rate"][: len(known["row"]) // 2]
            target = None
            if args.outcome_target != "gold":
                target = torch.tensor(target_table(streamed, policy.label_logprobs.shape[-1]))
            term = outcome_term(policy.label_logprobs, policy.batch.query_gold, rates, args, target)
        else:
            mask = inputs["completion_mask"].bool()
            if args.calibrate_tokens == "label":
                columns = torch.arange(mask.shape[-1], device=mask.device)
                label = known["start"] + known["label_at"]
                mask = mask & (columns == label.unsqueeze(-1))
            term = surrogate_term(policy.stats, mask[:, 1:], args)
        if not self.model.training:
            for name, value in term.logs.items():
                self._log_evaluation(name, value)
            return term.loss
        logged = self.accelerator.gather(torch.stack([value.detach().float() for value in term.logs.values()])[None])
        for name, value in zip(term.logs, logged.mean(0).unbind(), strict=True):
            self._metrics["train"][name].append(value)  # on the device until it is logged
        return term.loss

    def _log_evaluation(self, name: str, value: Tensor) -> None:
        """Log a batch's mean once for every pair of the batch, as Transformers weights `eval_loss` over batches."""
        per_pair = value.detach().repeat(self.args.eval_batch_size)
        self._metrics["eval"][name].extend(self.accelerator.gather_for_metrics(per_pair).tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, which averages numbers of the host."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in metrics.items():
            if values and isinstance(values[0], Tensor):
                metrics[name] = torch.stack(values).tolist()
        super().log(logs, start_time)

    def _rows(self, row: Tensor | None, training: bool) -> str:
        """What an error calls the pairs: their questions' ids where the dataset has them, else their numbers."""
        if row is None:
            return "rows unknown"
        numbers = row.tolist()
        names = {number: f"row {number}" for number in numbers[: len(numbers) // 2]}
        rows = self.train_dataset if training else self.eval_dataset
        if isinstance(rows, Dataset) and {"row", "question"} <= set(rows.column_names):
            questions = zip(rows["row"], rows["question"], strict=True)
            names |= {number: str(question) for number, question in questions if number in names}
        return f"rows {', '.join(names.values())}"

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card and, where calibration was measured while training, its last numbers."""
        super().create_model_card(*args, **kwargs)
        logged = [entry for entry in self.state.log_history if "eval_val_ece" in entry]
        measured = [entry for entry in logged if entry.get("step") == self.kept_step] or logged
        if not measured or not self.is_world_process_zero():
            return
        entry, path = measured[-1], Path(self.args.output_dir) / "README.md"
        rows = [f"| {title} | {entry[name]:.4f} |\n" for name, title in MEASURED.items() if name in entry]
        sentence = f"On {len(self.validation)} held-out questions, at step {int(entry.get('step', 0))}."
        table = f"\n## Calibration\n\n{sentence}\n\n| Metric | Value |\n|---|---|\n{''.join(rows)}"
        write_text(path, path.read_text(encoding="utf-8") + table)


def _refuse_empty(argument: Any) -> None:
    if isinstance(argument, Dataset) and len(argument) == 0:
        raise ValueError("the dataset is empty")


def _stream(examples: Sequence[Example], args: CATTOConfig) -> OutcomeStream | None:
    """The third stream, of the examples that fit; refused where nothing would read it."""
    if examples and args.calibration not in ("outcome", "replay"):
        raise ValueError(f"outcome_examples are given but calibration is {args.calibration!r}: it must be 'outcome'")
    if args.calibration == "replay" and not examples:
        raise ValueError("calibration is 'replay' but outcome_examples, the responses to replay, are not given")
    if not examples and args.outcome_rows_per_pair != CATTOConfig.outcome_rows_per_pair:
        raise ValueError(f"outcome_rows_per_pair is {args.outcome_rows_per_pair} but outcome_examples are not given")
    if not examples and args.outcome_target != "gold":
        raise ValueError(
            f"outcome_target is {args.outcome_target!r} but outcome_examples, which hold votes, are not given"
        )
    if not examples or not args.weight:
        return None
    if args.calibration == "outcome":
        examples = with_targets(examples, args.outcome_target)
    fits = drop_too_long(
        list(examples), args.max_length, lambda example: example.tokens, lambda example: example.question
    )
    return OutcomeStream(fits, args)


# ---- the model card --------------------------------------------------------------------------------------------------

MEASURED = {
    "eval_val_accuracy": "Accuracy",
    "eval_val_ece": "ECE (20 bins)",
    "eval_val_brier": "Brier score",
    "eval_val_nll": "NLL of the gold label",
}
CITATION = textwrap.dedent("""\
    @article{parikh2026catto,
        title  = {{CATTO: Balancing Preferences and Confidence in Language Models}},
        author = {Nisarg Parikh and Ananya Sai and Pannaga Shivaswamy and Kunjal Panchal and Andrew Lan},
        year   = 2026
    }""")


def _card(config: CATTOConfig) -> tuple[str, dict[str, str], list[str]]:
    """Title, citations and tags of the objective: TRL's own without a term.

    CATTO's paper is cited where the term is its own or reads its surrogate of correctness.
    """
    title, paper, tags = str(DPOTrainer._name), dict(DPOTrainer._paper), list(DPOTrainer._tag_names)
    if not config.weight:
        return title, paper, tags
    score = f", {config.outcome_score} score" if config.calibration == "outcome" else ""
    title = f"{title} and the `{config.calibration}` calibration term (weight {config.weight:g}{score})"
    if config.calibration in ("outcome", "replay"):
        return title, {"citation": paper["citation"].strip()}, [*tags, "calibration"]
    # No paper id: the card would link one paper only.
    return title, {"citation": f"{paper['citation'].strip()}\n\n{CITATION}"}, [*tags, "catto", "calibration"]
