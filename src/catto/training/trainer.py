"""`CATTOTrainer`: TRL's DPOTrainer with a calibration term and one forward pass of the policy per step.

With calibration none or weight 0, and without prefix sharing, packing or a preference loss on the reasoning only, TRL's
own code runs and the loss is bit-identical to TRL's. Otherwise TRL's loss receives a `Policy` in place of the model. It
runs the model once with our head and returns the output that TRL reads. The term is then added to TRL's loss. TRL's
private parts are only used in `trl_compat`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import DPOConfig

from catto.io.atomic import write_text
from catto.objectives import TokenStats
from catto.objectives.tiles import Precision
from catto.training import forward
from catto.training.batches import COLUMNS, KEY, Batch, PairCollator, lay_out_pairs, lay_out_rows
from catto.training.config import CATTOConfig
from catto.training.examples import (
    Example,
    LengthFilter,
    check_reasoning,
    label_columns,
    label_queries,
    number_row,
    reasoning_columns,
    require_columns,
    target_table,
)
from catto.training.model_card import MEASURED, describe_objective
from catto.training.monitor import EvaluateAtEnd, MonitoredTrainer, allow_missing_dataset
from catto.training.outcome_stream import OutcomeStream, make_stream
from catto.training.question_stream import (
    FOLDER,
    cache_key,
    load_calibration_questions,
    sample_stream,
    sampling_settings,
)
from catto.training.terms import CalibrationTerm, outcome_term, replay_term, sft_loss, surrogate_term
from catto.training.trl_compat import (
    TRL_EXTRAS,
    DataCollatorForPreference,
    TRLPairTrainer,
    hash_weights,
    hide_padding_free,
    make_fused_output,
    name_model,
)

logger = logging.getLogger(__name__)


class Policy:
    """Replaces the model in TRL's loss: runs the model once with our head, and keeps the statistics for our term.

    Args:
        model: The policy, as training has wrapped it.
        batch: The rows of the B pairs, followed by the responses that the calibration term reads in addition.
        precision: Precision of the head's matrix products.
        extras: Names of the optional statistics of `TokenStats` to compute.

    Attributes:
        stats: Statistics of the pairs' tokens, (2 B, L - 1) each, like TRL's tensors without the first token of a row.
        label_logprobs: Log-probabilities of the labels of the batch's queries, (M, K); None without queries.
        replayed: log p_t of the tokens of each replayed response, (T_i,) each.
    """

    stats: TokenStats
    label_logprobs: Any = None
    replayed: Sequence[Tensor] = ()

    def __init__(self, model: Any, batch: Batch, precision: Precision, extras: tuple[str, ...] = ()) -> None:
        self.model = model
        self.batch = batch
        self.precision = precision
        self.extras = extras

    def __call__(self, *, labels: Tensor | None = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the batch through our head once, keep its statistics, and return the output that TRL's loss reads.

        Args:
            labels: The token ids (2 B, L), -100 at tokens that TRL's loss does not read.
            fused_lm_head: Set by TRL to use its own head; ignored.
            **kwargs: The model's inputs. Only the router's option is used, since the batch contains the others.
        """
        if labels is None:  # TRL's second, deprecated call, which asks for full logits
            return self.model(**kwargs)
        router_options = {}
        if "output_router_logits" in kwargs:
            router_options["output_router_logits"] = kwargs["output_router_logits"]
        batch = self.batch.to(labels.device, non_blocking=True)
        output = forward.run_head(self.model, batch, self.extras, self.precision, **router_options)
        self.batch = batch  # now on the device, where the calibration term reads it
        self.label_logprobs = output.labels

        # The scored tokens of the pairs come first, then those of the replayed responses.
        pair_responses = len(labels)
        pair_tokens = sum(batch.lengths[:pair_responses])
        self.replayed = torch.split(output.stats.target[pair_tokens:], batch.lengths[pair_responses:])

        # Put the values of the pairs' tokens where TRL's tensors have these tokens; all other values are 0.
        mask = labels[:, 1:] != -100
        zeros = output.stats.target.new_zeros(mask.shape)
        row_and_column = batch.trl_index[:pair_tokens].unbind(-1)
        self.stats = output.stats[:pair_tokens].map(lambda values: zeros.index_put(row_and_column, values))
        return make_fused_output(self.stats, mask, output.aux_loss)


class CATTOTrainer(MonitoredTrainer, TRLPairTrainer):
    """Train on preferences and keep the model calibrated. Accepts all arguments of `trl.DPOTrainer`.

    Args:
        model: The policy: a model, or its name or path.
        ref_model: The reference model, as in TRL. None means the start model.
        args: A `CATTOConfig`, or a `DPOConfig`, which gets the defaults of our options.
        *more: Further positional arguments of `DPOTrainer`.
        outcome_examples: Responses from `catto.training.examples.make_examples`, right or wrong. With
            `calibration="outcome"` the term scores their labels, with `calibration="replay"` it is their cross-entropy.
            If they are not given, `outcome` scores the labels of the responses that the trainer samples to
            `CATTOConfig.calibration_questions`, or without such questions, the labels of the pairs.
        validation: Examples on which `evaluate` measures label confidence, see `MonitoredTrainer`.
        **kwargs: Further arguments of `DPOTrainer`, such as `train_dataset` and `processing_class`.

    Example:
        ```python
        from catto import CATTOConfig, CATTOTrainer

        config = CATTOConfig(output_dir="model", calibration="catto")
        trainer = CATTOTrainer(model, args=config, train_dataset=pairs, processing_class=tokenizer)
        trainer.train()
        ```
    """

    extra_columns = COLUMNS

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
        if args is None:
            args = CATTOConfig(output_dir=f"{name_model(model)}-CATTO")
        args = CATTOConfig.of(args)
        if outcome_examples and args.calibration_questions is not None:
            raise ValueError("outcome_examples and calibration_questions are both given: expected one of them")
        # Refuse empty datasets now, since TRL reads a dataset's first row even before it calls `prepare_pairs`.
        for argument in (*more, *kwargs.values()):
            _refuse_empty(argument)

        # TRL's constructor prepares the data and may compute reference log-probabilities. Both need these attributes.
        self._layout_options: dict[str, bool] | None = None  # see `layout_options`; chosen at the first batch
        self._padding_free = args.padding_free  # None in `args` while TRL's constructor runs, which would warn of it
        self._step_pairs: float | Tensor | None = None  # pairs of the current step, averaged over processes
        # The completion mask of the last batch and its version, which torch raises when a tensor is changed in place.
        self._collated_mask: tuple[Tensor, int] | None = None  # see `notice_inputs`
        self._stream: OutcomeStream | None = None
        if args.calibration_questions is None:  # otherwise the model must be loaded first, see below
            self._stream = make_stream(outcome_examples, args)
        self._given_collator = kwargs.get("data_collator")
        if "data_collator" not in kwargs and more:  # the next positional argument of DPOTrainer
            self._given_collator = more[0]
        self.validation = validation
        self.set_card(describe_objective(args))
        # Without an `eval_dataset`, the constructor of Transformers refuses `eval_strategy`, but `validation` needs it.
        has_eval_dataset = kwargs.get("eval_dataset") is not None
        only_evaluation_data = () if has_eval_dataset else validation
        with hide_padding_free(args), allow_missing_dataset(args, only_evaluation_data):
            super().__init__(model, ref_model, args, *more, **kwargs)

        if validation:
            self.add_callback(EvaluateAtEnd())
        # With weight 0 the examples would not be used, so they are not sampled.
        if args.calibration_questions is not None and args.weight:
            self._stream = make_stream(self._sample_examples(), args)
        # Before `train`, in which Accelerate wraps the forward with autocast, so that it applies to our head too.
        forward.install_head(self.model)

    @property
    def calibration_weight(self) -> float:
        """Lambda, the weight of the calibration term."""
        return float(self.args.weight)

    @property
    def _uses_own_head(self) -> bool:
        """Whether TRL's loss receives a `Policy`; otherwise TRL's own code runs."""
        args = self.args
        return bool(args.weight or args.prefix_sharing or self._padding_free or self._reads_reasoning)

    @property
    def _reads_reasoning(self) -> bool:
        """Whether the preference loss reads only the tokens before the label."""
        return bool(self.args.preference_tokens == "reasoning")

    def layout_options(self) -> dict[str, bool]:
        """Return the options `shared` and `packed` of `lay_out_rows` for all batches.

        `shared` is `args.prefix_sharing`. `packed` is `args.padding_free`; if that is None, rows are packed if the
        policy and the reference use FlexAttention. Both are False if one of the models does not support them.
        """
        if self._layout_options is None:
            self._layout_options = self._choose_layout_options()
        return self._layout_options

    def _choose_layout_options(self) -> dict[str, bool]:
        models = []
        for model in (self.model, self.ref_model):
            if model is not None:
                models.append(self.accelerator.unwrap_model(model))
        results = [forward.sharing_obstacle(model, self.args) for model in models]
        obstacles = [obstacle for obstacle in results if obstacle is not None]
        # Even with an obstacle, this may switch models to FlexAttention. Without a block mask they still use SDPA.
        packed = all(forward.try_flex_attention(model, self.args.device) for model in models)
        if self._padding_free is not None:
            packed = self._padding_free
        if not obstacles:
            return {"shared": self.args.prefix_sharing, "packed": packed}
        if self.args.prefix_sharing:
            logger.warning("prefix_sharing is off: %s", obstacles[0])
        if self._padding_free:
            logger.warning("padding_free is off: %s", obstacles[0])
        return {"shared": False, "packed": False}

    # ---- data

    def _sample_examples(self) -> list[Example]:
        """Sample the start model's responses to `calibration_questions`. Rank 0 samples; the other ranks read its file.

        Raises ValueError with DeepSpeed ZeRO-3.
        """
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "responses to calibration_questions cannot be sampled with ZeRO-3, which partitions the weights: "
                "sample them beforehand and pass outcome_examples"
            )
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)  # it may be a processor
        questions = load_calibration_questions(self.args.calibration_questions)
        settings = sampling_settings(self.args)
        # The folder is named by a hash of the weights. Other ranks may not have loaded them, so rank 0 broadcasts it.
        folder_name = [""]
        if self.accelerator.is_main_process:
            folder_name = [cache_key(questions, tokenizer, settings, hash_weights(self.model))]
        broadcast_object_list(folder_name, from_process=0)
        folder = Path(self.args.output_dir) / FOLDER / folder_name[0]
        with self.accelerator.main_process_first():
            return sample_stream(
                self.model,
                tokenizer,
                questions,
                settings=settings,
                folder=folder,
                max_length=self.args.max_length,
            )

    def prepare_collator(self, dataset: Any) -> None:
        """Replace TRL's collator by a `PairCollator`, which also lays out our batch if possible.

        A user's own collator is kept. If it is derived from `PairCollator`, its `reads_reasoning` is set.

        Args:
            dataset: The dataset that the next data loader reads.
        """
        if isinstance(self.data_collator, PairCollator):
            self.data_collator.reads_reasoning = self._reads_reasoning
        is_users_own = type(self.data_collator) not in (DataCollatorForPreference, PairCollator)
        if is_users_own:
            return
        # The batches of a streamed dataset are dispatched: rank 0 collates them, and each rank gets some of their rows.
        # A layout cannot be divided into rows, so the training step makes it.
        is_dispatched = self.accelerator.dispatch_batches or not isinstance(dataset, Dataset)
        layout = None
        if self._uses_own_head and not is_dispatched:
            layout = self.layout_options()
        options = dict(vars(self.data_collator))
        options["layout"] = layout
        options["reads_reasoning"] = self._reads_reasoning
        self.data_collator: Any = PairCollator(**options)

    def prepare_pairs(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Tokenize the pairs, add the columns that the losses read, and drop pairs that are too long.

        As in TRL, pairs are dropped whose prompt leaves no room for a response. If the preference loss or the
        calibration term reads the labels of the pairs, all pairs that would be truncated are dropped.

        Args:
            dataset: The pairs. They are tokenized as in TRL, unless they have a column `prompt_ids`.
            processing_class: The tokenizer.
            args: The configuration. TRL calls this method before `self.args` exists.
            name: TRL's name of the dataset, for errors and the log: `train` or `eval`.

        Returns:
            The prepared dataset.

        Raises:
            ValueError: The dataset is empty, columns are missing, a label cannot be read, all pairs are too long, or
                `check_reasoning` refuses the dataset.
        """
        _refuse_empty(dataset)
        dataset = self._tokenize_pairs(dataset, processing_class, args, name)
        # TRL caches the reference log-probabilities of a row by the dataset's fingerprint. These settings change the
        # log-probabilities, and passing them to `number_row` makes them part of the fingerprint.
        settings = [args.max_length, args.truncation_mode, args.ld_alpha, repr(self._given_collator)]
        dataset = dataset.map(number_row, with_indices=True, fn_kwargs={"reference_settings": settings})
        if args.preference_tokens == "reasoning":
            require_columns(dataset, ("labels",), name, "preference_tokens 'reasoning'")
            dataset = dataset.map(reasoning_columns, fn_kwargs={"tokenizer": processing_class, "name": name})
            check_reasoning(dataset, name)
        if self._term_reads_labels(args):
            dataset = self._add_label_columns(dataset, processing_class, args, name)
        return self._drop_long_pairs(dataset, args, name)

    def _add_label_columns(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Add the columns of `label_columns`; raise ValueError if the dataset lacks the columns that they need."""
        needed: tuple[str, ...] = ("labels", "gold")
        option = "calibrate_tokens 'label'"
        reads_rate = args.calibration == "outcome"
        if reads_rate:
            needed = ("labels", "gold", "correctness_rate")
            option = "calibration 'outcome' on pairs"
        require_columns(dataset, needed, name, option)
        arguments = {"tokenizer": processing_class, "name": name, "reads_rate": reads_rate}
        return dataset.map(label_columns, fn_kwargs=arguments)

    def _tokenize_pairs(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Tokenize the pairs as TRL does, unless they have a column `prompt_ids`; drop no pair."""
        columns = dataset.column_names or ()  # empty if a streamed dataset does not know its columns
        if "prompt_ids" in columns:
            return dataset
        for column in ("chosen", "rejected"):
            if columns and column not in columns:
                raise ValueError(f"the {name} dataset has no column {column!r}; it has {', '.join(columns)}")
        unlimited = copy.copy(args)
        unlimited.max_length = None  # TRL drops long prompts silently; `_drop_long_pairs` drops and logs the same rows
        return super().prepare_pairs(dataset, processing_class, unlimited, name)

    def _term_reads_labels(self, args: CATTOConfig) -> bool:
        """Return whether the calibration term reads the labels of the pairs."""
        has_stream = self._stream is not None or args.calibration_questions is not None
        scores_labels = args.calibration == "outcome" and not has_stream
        calibrates_label_tokens = args.calibrate_tokens == "label"
        return bool(args.weight) and (calibrates_label_tokens or scores_labels)

    def _drop_long_pairs(self, dataset: Any, args: CATTOConfig, name: str) -> Any:
        """Return the dataset without the pairs that are too long, see `prepare_pairs`."""
        needs_label = self._term_reads_labels(args) or args.preference_tokens == "reasoning"
        limits = [args.max_length]
        if needs_label:  # a user's own collator must not truncate the label either
            limits.append(getattr(self._given_collator, "max_length", None))
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            return dataset
        if not needs_label and args.truncation_mode != "keep_start":  # truncation at the start always keeps a response
            return dataset
        return LengthFilter(limit, must_fit_untruncated=needs_label, name=name).select_fitting(dataset)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the micro-batches of a step and the number of their tokens. If there is a term, count their pairs."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.weight:
            responses = sum(len(batch["input_ids"]) for batch in batches)
            pairs = responses / 2
            self._step_pairs = self.mean_over_processes(pairs, device)
        return batches, tokens

    # ---- the reference

    def extend_reference_key(self, model_hash: Any) -> Any:
        """Extend the cache key of the reference's log-probabilities by all options that change them with our head."""
        if not self._uses_own_head:
            return model_hash
        precisions = (self.accelerator.mixed_precision, self.args.head_precision)
        key = (model_hash, "catto", *precisions, *self.layout_options().values())
        if self._reads_reasoning:
            key = (*key, "reasoning")
        return key

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Compute the reference's log-probabilities with the same head as the policy's.

        Under autocast, TRL's head rounds its logits to bf16 and ours does not. With different heads, the log-ratio of
        two equal models would be noise instead of 0.

        Args:
            model: The reference, as training has wrapped it.
            inputs: The batch.

        Returns:
            What TRL returns: the sums of the log-probabilities of the chosen and of the rejected responses, (B,) each.
        """
        if KEY in inputs and self._uses_own_head:
            forward.install_head(self.accelerator.unwrap_model(model))
            layout = self._find_layout(inputs).without_queries()
            model = Policy(model, layout, self.args.head_precision)
        return super().compute_ref_log_probs(model, self._make_trl_inputs(inputs))

    # ---- the loss

    def notice_inputs(self, inputs: dict[str, Any]) -> None:
        """Remember the completion mask and its version, which torch increases at every change in place.

        `_is_laid_out` can then see that the mask is unchanged, without waiting for the device.
        """
        self._collated_mask = None
        mask = inputs.get("completion_mask")
        if type(self.data_collator) is not PairCollator or mask is None:  # a user's collator may have changed the mask
            return
        if not mask.is_inference():  # inference tensors have no version
            self._collated_mask = (mask, mask._version)

    def _is_laid_out(self, layout: Batch, mask: Tensor) -> bool:
        """Return whether a layout scores exactly the tokens that `completion_mask` (2 B, L) selects.

        A subclass may have changed the mask after the collator made the layout.
        """
        if self._collated_mask is not None:
            collated_mask, version = self._collated_mask
            is_unchanged = mask is collated_mask and mask._version == version
            if is_unchanged:
                return True
        selected = mask[:, 1:].bool()
        row, column = layout.trl_index.to(mask.device).unbind(-1)
        scored = torch.zeros_like(selected)
        scored[row, column] = True
        return torch.equal(scored, selected)

    def _make_trl_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the batch for TRL: without our entry, and with a mask of the tokens that the preference loss reads.

        Raises ValueError if a user's collator has not counted the reasoning tokens that the preference loss reads.
        """
        trl_inputs = dict(inputs)
        our_tensors = trl_inputs.pop(KEY, None)
        if not self._reads_reasoning:
            return trl_inputs
        if our_tensors is None:
            raise ValueError("preference_tokens 'reasoning' needs TRL's own collator: leave data_collator out")
        mask = trl_inputs["completion_mask"]
        columns = torch.arange(mask.shape[-1], device=mask.device)
        end_of_reasoning = our_tensors["start"] + our_tensors["reasoning"]
        trl_inputs["completion_mask"] = mask * (columns < end_of_reasoning.unsqueeze(-1))
        return trl_inputs

    def _find_layout(self, inputs: dict[str, Any]) -> Batch:
        """Return the collator's layout; if there is none or `completion_mask` has changed, lay out the pairs now."""
        layout: Batch | None = inputs[KEY].get("layout")
        if layout is not None and self._is_laid_out(layout, inputs["completion_mask"]):
            return layout
        return lay_out_pairs(inputs, inputs[KEY], self.data_collator.pad_token_id, **self.layout_options())

    def compute_pair_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute TRL's loss plus the calibration term. If our head is not needed, this is TRL's own loss.

        Args:
            model: The policy, as training has wrapped it.
            inputs: The batch.
            return_outputs: Whether to return TRL's outputs too.

        Returns:
            The loss, or the loss and TRL's outputs.
        """
        row_numbers = inputs.get(KEY, {}).get("row")
        name_rows = partial(self._name_rows, row_numbers, self.model.training)
        if self._uses_own_head:
            loss, outputs = self._compute_loss_with_head(model, inputs, return_outputs, name_rows)
        else:
            result = self.compute_trl_loss(model, self._make_trl_inputs(inputs), return_outputs)
            loss, outputs = _split_result(result, return_outputs)
        self.check_nan_later(loss, name_rows)
        if return_outputs:
            return loss, outputs
        return loss

    def _compute_loss_with_head(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool, name_rows: Callable[[], str]
    ) -> tuple[Tensor, Any]:
        """Compute TRL's loss plus the calibration term with our head.

        Args:
            model: The policy, as training has wrapped it.
            inputs: The batch.
            return_outputs: Whether to return TRL's outputs too.
            name_rows: Returns the names of the batch's rows, for errors.

        Returns:
            The loss, and TRL's outputs; None without `return_outputs`.
        """
        if KEY not in inputs:  # only `PairCollator` adds it
            raise ValueError("calibration and prefix sharing need TRL's own collator of texts: leave data_collator out")
        layout = self._find_layout(inputs)
        streamed: list[Example] = []
        if self._stream is not None and self.model.training:  # an evaluation takes nothing from the stream
            pairs = len(inputs["input_ids"]) // 2
            streamed = self._stream.take_examples(self, pairs)
        policy = self._make_policy(model, layout, streamed)
        trl_inputs = self._make_trl_inputs(inputs)
        if not self.precompute_ref_logps:  # computed here, since TRL's loss would use its own head
            trl_inputs |= self._compute_references(inputs, layout)
        with self.read_references_from_batch(), self._take_out_sft() as sft_weight:
            result = self.compute_trl_loss(policy, trl_inputs, return_outputs)
        loss, outputs = _split_result(result, return_outputs)
        if sft_weight:  # unlike the other losses, it reads the labels too
            loss = loss + sft_weight * sft_loss(policy.stats.target, inputs["completion_mask"])
        # A term that reads the stream is left out of an evaluation.
        term_reads_pairs = self._stream is None
        if self.args.weight and (term_reads_pairs or streamed):
            loss = self._add_term(loss, policy, inputs, streamed, name_rows)
        return loss, outputs

    def _add_term(
        self,
        loss: Tensor,
        policy: Policy,
        inputs: dict[str, Any],
        streamed: Sequence[Example],
        name_rows: Callable[[], str],
    ) -> Tensor:
        """Return the loss plus the weighted calibration term.

        The term is a mean over the micro-batch. It is weighted by `_share_of_step`, since micro-batches may differ in
        size.

        During evaluation, the loss is returned unchanged, so that `eval_loss` has the same meaning as in TRL. The sum
        is only logged, as `total_loss`.

        Args:
            loss: TRL's loss of the micro-batch.
            policy: The policy, after TRL's loss has called it.
            inputs: The batch.
            streamed: The stream's responses in this micro-batch; empty if the term reads the pairs.
            name_rows: Returns the names of the batch's rows, for errors.
        """
        pairs = len(inputs["input_ids"]) // 2
        share = self._share_of_step(pairs)
        term = self._compute_term(policy, inputs, streamed)
        total = loss + self.calibration_weight * share * term
        if self.model.training:
            return total
        self.check_nan_later(total, name_rows)
        self._log_evaluation("total_loss", total)
        return loss

    def _compute_references(self, inputs: dict[str, Any], layout: Batch) -> dict[str, Tensor]:
        """Compute the reference's log-probabilities with our head, under the names that TRL's loss reads."""
        reference = self.ref_model
        if reference is None:  # the policy has an adapter, without which it is the reference
            reference = self.model
        our_tensors = {**inputs[KEY], "layout": layout}
        chosen, rejected = self.compute_ref_log_probs(reference, {**inputs, KEY: our_tensors})
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _take_out_sft(self) -> AbstractContextManager[float]:
        """Remove the loss type `sft` from TRL's sum if the preference loss reads only the reasoning; yield its weight.

        The purpose of `sft` is to preserve the form of whole responses, so it is computed separately on all tokens. The
        weight is 0 if nothing was removed.
        """
        if self._reads_reasoning:
            return self.take_out_loss("sft")
        return nullcontext(0.0)

    def _share_of_step(self, pairs: int) -> float | Tensor:
        """Return the factor that makes the average over micro-batches a mean over the pairs of the step.

        It is the number of pairs in this micro-batch, divided by the average number over the micro-batches of the step.
        During evaluation it is 1.
        """
        if self._step_pairs is None or not self.model.training:
            return 1.0
        share: float | Tensor = pairs * self.current_gradient_accumulation_steps / self._step_pairs
        return share

    def _make_policy(self, model: Any, layout: Batch, streamed: Sequence[Example]) -> Policy:
        """Return the policy for this micro-batch, which consists of the pairs followed by the stream's responses."""
        args = self.args
        pair_rows = len(layout.rows)  # two per pair
        extras = list(TRL_EXTRAS)
        if args.weight and args.calibration == "bce":
            extras.append("log_doubt")  # log(1 - c), where c is the confidence of a token
        if self.needs_squared_mass:
            extras.append("log_sum_sq")  # log sum_j p_j^2, by which TRL then weights the pairs
        options = {
            "pad": self.data_collator.pad_token_id,
            # The load-balancing loss of a mixture of experts belongs to TRL's loss, which does not read the stream.
            "num_balanced": pair_rows,
            "scored_tokens": layout.scored_tokens,
            **self.layout_options(),
        }
        if streamed and args.calibration == "replay":  # all tokens of the streamed responses are scored
            rows = [*layout.rows, *(example.row for example in streamed)]
            layout = lay_out_rows(rows, [], len(rows), **options)
        elif streamed:  # only the labels of the streamed responses are read
            rows = [*layout.rows, *(example.before_label() for example in streamed)]
            layout = lay_out_rows(rows, label_queries(streamed, pair_rows), pair_rows, **options)
        elif args.calibration != "outcome":  # no other term reads the probabilities of the pairs' labels
            layout = layout.without_queries()
        forward.install_head(self.accelerator.unwrap_model(model))  # no effect on `self.model`, which has the head
        return Policy(model, layout, args.head_precision, tuple(extras))

    def _compute_term(self, policy: Policy, inputs: dict[str, Any], streamed: Sequence[Example]) -> Tensor:
        """Compute the calibration term, before it is weighted, and log its parts."""
        if self.args.calibration == "replay":
            term = replay_term(policy.replayed)
        elif self.args.calibration == "outcome":
            term = self._score_outcomes(policy, inputs[KEY], streamed)
        else:
            mask = self._select_tokens(inputs)
            term = surrogate_term(policy.stats, mask[:, 1:], self.args)
        if self.model.training:
            self._log_training(term.logs)
        else:
            for name, value in term.logs.items():
                self._log_evaluation(name, value)
        return term.loss

    def _score_outcomes(
        self, policy: Policy, our_tensors: dict[str, Any], streamed: Sequence[Example]
    ) -> CalibrationTerm:
        """Compute the outcome term on the labels of the stream's responses; without a stream, on those of the pairs."""
        rates = None
        if not streamed:
            pairs = len(our_tensors["row"]) // 2
            rates = our_tensors["correctness_rate"][:pairs]
        target = None
        if self.args.outcome_target != "gold":
            max_labels = policy.label_logprobs.shape[-1]
            target = torch.tensor(target_table(streamed, max_labels))
        return outcome_term(policy.label_logprobs, policy.batch.query_gold, rates, self.args, target)

    def _select_tokens(self, inputs: dict[str, Any]) -> Tensor:
        """Return the mask of the tokens that a surrogate term reads: (2 B, L)."""
        mask: Tensor = inputs["completion_mask"].bool()
        if self.args.calibrate_tokens == "all":
            return mask
        columns = torch.arange(mask.shape[-1], device=mask.device)
        label_column: Tensor = inputs[KEY]["start"] + inputs[KEY]["label_at"]
        return mask & (columns == label_column.unsqueeze(-1))

    # ---- logs and the model card

    def _log_training(self, logs: dict[str, Tensor]) -> None:
        """Log the means over processes. They stay on the device until the next log, so that the host need not wait."""
        values = torch.stack([value.detach().float() for value in logs.values()])
        means = self.accelerator.gather(values[None]).mean(0)
        for name, value in zip(logs, means.unbind(), strict=True):
            self.append_metrics("train", name, [value])

    def _log_evaluation(self, name: str, value: Tensor) -> None:
        """Log a batch's mean once for every pair of the batch, which is how Transformers weights `eval_loss`."""
        per_pair = value.detach().repeat(self.args.eval_batch_size)
        self.append_metrics("eval", name, self.accelerator.gather_for_metrics(per_pair).tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does. TRL averages Python numbers, so the tensors of `_log_training` are read from the device."""
        metrics = self.read_metrics()
        for name, values in metrics.items():
            if values and isinstance(values[0], Tensor):
                metrics[name] = torch.stack(values).tolist()
        super().log(logs, start_time)

    def _name_rows(self, row_numbers: Tensor | None, is_training: bool) -> str:
        """Name the pairs for an error: by the ids of their questions if the dataset has them, otherwise by number.

        Args:
            row_numbers: Number of each row's pair in the dataset, (2 B,); None if they are not known.
            is_training: Whether the pairs are from the training dataset.
        """
        if row_numbers is None:
            return "rows unknown"
        numbers = row_numbers.tolist()
        pairs = len(numbers) // 2  # the second half repeats the numbers, for the rejected responses
        names = {number: f"row {number}" for number in numbers[:pairs]}
        dataset = self.eval_dataset
        if is_training:
            dataset = self.train_dataset
        if isinstance(dataset, Dataset) and {"row", "question"} <= set(dataset.column_names):
            for number, question in zip(dataset["row"], dataset["question"], strict=True):
                if number in names:
                    names[number] = str(question)
        return f"rows {', '.join(names.values())}"

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, and add the calibration metrics of the kept step.

        If there was no evaluation at that step, the metrics of the last evaluation are added. Without any evaluation,
        nothing is added.
        """
        super().create_model_card(*args, **kwargs)
        evaluations = [entry for entry in self.state.log_history if "eval_val_ece" in entry]
        if not evaluations or not self.is_world_process_zero():
            return
        shown = evaluations[-1]
        for evaluation in evaluations:
            if evaluation.get("step") == self.kept_step:
                shown = evaluation
        lines = ["", "## Calibration", ""]
        lines.append(f"On {len(self.validation)} held-out questions, at step {int(shown.get('step', 0))}.")
        lines += ["", "| Metric | Value |", "|---|---|"]
        for name, title in MEASURED.items():
            if name in shown:
                lines.append(f"| {title} | {shown[name]:.4f} |")
        path = Path(self.args.output_dir) / "README.md"
        card = path.read_text(encoding="utf-8")
        write_text(path, card + "\n".join(lines) + "\n")


def _split_result(result: Any, has_outputs: bool) -> tuple[Tensor, Any]:
    """Split the result of TRL's loss function into the loss and the outputs. If it has no outputs, they are None."""
    if has_outputs:
        loss, outputs = result
        return loss, outputs
    return result, None


def _refuse_empty(argument: Any) -> None:
    """Raise ValueError if the argument is an empty dataset. Arguments of other types are accepted."""
    if isinstance(argument, Dataset) and len(argument) == 0:
        raise ValueError("the dataset is empty")
