"""`CATTOTrainer`: TRL's DPOTrainer with a calibration term, one policy forward per step.

With calibration none or weight 0, and neither prefix sharing nor packing, everything is TRL's own code and the loss is
TRL's to the last bit. Otherwise TRL's loss receives a `Policy` in the model's place, which runs our head once and
returns the fields that TRL reads. The term is added to TRL's loss. Private parts of TRL are in `trl_compat`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
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
    """Takes the model's place in TRL's loss: calls it once through our head and keeps the statistics."""

    stats: TokenStats  # of the pairs, (2 B, L - 1) each: TRL's shifted layout
    label_logprobs: Any = None  # (M, K) where the batch has queries
    replayed: Sequence[Tensor] = ()  # log p_t of each replayed response, (T_i,)

    def __init__(self, model: Any, batch: Batch, precision: Precision, extras: tuple[str, ...] = ()) -> None:
        self.model = model
        self.batch = batch
        self.precision = precision
        self.extras = extras

    def __call__(self, *, labels: Tensor | None = None, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Run the batch through our head once. labels: (2 B, L), -100 off the tokens that TRL's loss reads."""
        if labels is None:  # TRL's second, deprecated call for full logits
            return self.model(**kwargs)
        router = {}
        if "output_router_logits" in kwargs:
            router["output_router_logits"] = kwargs["output_router_logits"]
        batch = self.batch.to(labels.device, non_blocking=True)
        output = forward.run_head(self.model, batch, self.extras, self.precision, **router)
        self.batch = batch
        self.label_logprobs = output.labels

        responses = len(labels)
        tokens_of_pairs = sum(batch.lengths[:responses])  # the pairs come first, then the replayed responses
        self.replayed = torch.split(output.stats.target[tokens_of_pairs:], batch.lengths[responses:])

        mask = labels[:, 1:] != -100
        zeros = output.stats.target.new_zeros(mask.shape)
        place = batch.place[:tokens_of_pairs].unbind(-1)
        self.stats = output.stats[:tokens_of_pairs].map(lambda values: zeros.index_put(place, values))
        return make_fused_output(self.stats, mask, output.aux_loss)


class CATTOTrainer(MonitoredTrainer, TRLPairTrainer):
    """Train on preferences and keep confidence honest. Takes everything that `trl.DPOTrainer` takes.

    Args:
        model: The policy: a model, or its name or path.
        ref_model: The reference, as in TRL. None means the start model.
        args: A `CATTOConfig`, or a `DPOConfig`, which gets the defaults of our options.
        *more: Further positional arguments of `DPOTrainer`.
        outcome_examples: Responses from `catto.training.examples.make_examples`, right or wrong. With
            `calibration="outcome"` they form a third stream next to the pairs. Without them the term reads the labels
            of the pairs, or of the responses that `CATTOConfig.calibration_questions` has the trainer sample. With
            `calibration="replay"` their cross-entropy is added.
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
        for argument in (*more, *kwargs.values()):  # TRL looks at the first row before it prepares the data
            _refuse_empty(argument)

        # TRL's constructor prepares the data and may compute references, so everything they need is set before it.
        self._arrangement: dict[str, bool] | None = None  # chosen at the first batch
        self._padding_free = args.padding_free
        self._step_pairs: float | Tensor | None = None  # a process's mean share of the step's pairs
        self._collated_mask: tuple[Tensor, int] | None = None  # with its version, which counts changes in place
        self._stream: OutcomeStream | None = None
        if args.calibration_questions is None:
            self._stream = make_stream(outcome_examples, args)
        self._given_collator = kwargs.get("data_collator")
        if "data_collator" not in kwargs and more:
            self._given_collator = more[0]
        self.validation = validation
        self.set_card(describe_objective(args))
        only_validation = validation
        if kwargs.get("eval_dataset") is not None:
            only_validation = ()
        with hide_padding_free(args), allow_missing_dataset(args, only_validation):
            super().__init__(model, ref_model, args, *more, **kwargs)

        if validation:
            self.add_callback(EvaluateAtEnd())
        if args.calibration_questions is not None and args.weight:
            self._stream = make_stream(self._sample_examples(), args)
        forward.install_head(self.model)  # before accelerate wraps the forward, so that autocast covers our head too

    @property
    def calibration_weight(self) -> float:
        """Lambda, the factor of the calibration term."""
        return float(self.args.weight)

    @property
    def _uses_own_head(self) -> bool:
        args = self.args
        return bool(args.weight or args.prefix_sharing or self._padding_free or self._reads_reasoning)

    @property
    def _reads_reasoning(self) -> bool:
        """Whether the preference loss reads only the tokens before the label."""
        return bool(self.args.preference_tokens == "reasoning")

    def arrangement(self) -> dict[str, bool]:
        """Return whether prompts are shared and rows packed: as configured, if policy and reference support it."""
        if self._arrangement is None:
            self._arrangement = self._choose_arrangement()
        return self._arrangement

    def _choose_arrangement(self) -> dict[str, bool]:
        models = []
        for model in (self.model, self.ref_model):
            if model is not None:
                models.append(self.accelerator.unwrap_model(model))
        shared = self.args.prefix_sharing
        obstacles = [forward.sharing_obstacle(model, self.args) for model in models]
        known_obstacles = [obstacle for obstacle in obstacles if obstacle is not None]
        if known_obstacles:
            if shared:
                logger.warning("prefix_sharing is off: %s", known_obstacles[0])
            if self._padding_free:
                logger.warning("padding_free is off: %s", known_obstacles[0])
        packed = all(forward.try_flex_attention(model, self.args.device) for model in models)
        if self._padding_free is not None:
            packed = self._padding_free
        if known_obstacles:
            shared = False
            packed = False
        return {"shared": shared, "packed": packed}

    # ---- data

    def _sample_examples(self) -> list[Example]:
        """Sample the start model's responses to `calibration_questions`. Rank 0 samples, the others read its file."""
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
            names = [cache_key(questions, tokenizer, settings, hash_weights(self.model))]
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

    def prepare_collator(self, dataset: Any) -> None:
        """Extend TRL's collator by the layout of our batch, unless Accelerate joins and slices batches by rows.

        A user's own collator stays as it is, except for which tokens the preference loss reads.
        """
        if isinstance(self.data_collator, PairCollator):
            self.data_collator.reads_reasoning = self._reads_reasoning
        if type(self.data_collator) not in (DataCollatorForPreference, PairCollator):
            return
        is_dispatched = self.accelerator.dispatch_batches or not isinstance(dataset, Dataset)
        layout = None
        if self._uses_own_head and not is_dispatched:
            layout = self.arrangement()
        options = dict(vars(self.data_collator))
        options["layout"] = layout
        options["reads_reasoning"] = self._reads_reasoning
        self.data_collator: Any = PairCollator(**options)

    def prepare_pairs(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        """Tokenize as TRL does, unless there are token ids; find labels; drop the rows that TRL drops.

        Where the loss or the term needs the label of a pair, rows that would have to be cut are dropped too.
        """
        _refuse_empty(dataset)
        dataset = self._tokenize_pairs(dataset, processing_class, args, name)
        determining = {"cut": [args.max_length, args.truncation_mode, args.ld_alpha, repr(self._given_collator)]}
        dataset = dataset.map(number_row, with_indices=True, fn_kwargs=determining)
        if self._reads_reasoning_with(args):
            require_columns(dataset, ("labels",), name, "preference_tokens 'reasoning'")
            dataset = dataset.map(reasoning_columns, fn_kwargs={"tokenizer": processing_class, "name": name})
            check_reasoning(dataset, name)
        if self._reads_labels_with(args):
            is_rated = args.calibration == "outcome"
            needed: tuple[str, ...] = ("labels", "gold")
            reader = "calibrate_tokens 'label'"
            if is_rated:
                needed = ("labels", "gold", "correctness_rate")
                reader = "calibration 'outcome' on pairs"
            require_columns(dataset, needed, name, reader)
            known = {"tokenizer": processing_class, "name": name, "rated": is_rated}
            dataset = dataset.map(label_columns, fn_kwargs=known)
        return self._drop_long_pairs(dataset, args, name)

    def _tokenize_pairs(self, dataset: Any, processing_class: Any, args: CATTOConfig, name: str) -> Any:
        columns = dataset.column_names or ()
        if "prompt_ids" in columns:
            return dataset
        for column in ("chosen", "rejected"):
            if columns and column not in columns:
                raise ValueError(f"the {name} dataset has no column {column!r}; it has {', '.join(columns)}")
        unlimited = copy.copy(args)
        unlimited.max_length = None  # TRL drops long prompts silently; `_drop_long_pairs` drops the same rows
        return super().prepare_pairs(dataset, processing_class, unlimited, name)

    def _reads_reasoning_with(self, args: CATTOConfig) -> bool:
        return args.preference_tokens == "reasoning"

    def _reads_labels_with(self, args: CATTOConfig) -> bool:
        """Whether the term reads the labels of the pairs. TRL's constructor asks before `self.args` exists."""
        has_stream = bool(self._stream) or args.calibration_questions is not None
        scores_pairs = args.calibration == "outcome" and not has_stream
        return bool(args.weight) and (args.calibrate_tokens == "label" or scores_pairs)

    def _drop_long_pairs(self, dataset: Any, args: CATTOConfig, name: str) -> Any:
        needs_label = self._reads_labels_with(args) or self._reads_reasoning_with(args)
        limits = [args.max_length]
        if needs_label:
            limits.append(getattr(self._given_collator, "max_length", None))
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            return dataset
        if not needs_label and args.truncation_mode != "keep_start":
            return dataset
        return LengthFilter(limit, needs_label, name).select_fitting(dataset)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Take the micro-batches of a step and, where there is a term, count their pairs over all processes."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.weight:
            responses = sum(len(batch["input_ids"]) for batch in batches)
            self._step_pairs = self.mean_over_processes(responses / 2, device)
        return batches, items

    # ---- the reference

    def extend_reference_key(self, model_hash: Any) -> Any:
        """Add to the cache key of the reference what our head computes differently from TRL's."""
        if not self._uses_own_head:
            return model_hash
        precisions = (self.accelerator.mixed_precision, self.args.head_precision)
        key = (model_hash, "catto", *precisions, *self.arrangement().values())
        if self._reads_reasoning:
            key = (*key, "reasoning")
        return key

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Compute the reference's log-probabilities with the head that the policy uses.

        In autocast TRL's head rounds its logits to bf16 and ours does not. With a different head for each, the
        log-ratio of equal models would be noise instead of 0.
        """
        if KEY in inputs and self._uses_own_head:
            forward.install_head(self.accelerator.unwrap_model(model))
            layout = self._find_layout(inputs).without_queries()
            model = Policy(model, layout, self.args.head_precision)
        return super().compute_ref_log_probs(model, self._make_trl_inputs(inputs))

    # ---- the loss

    def notice_inputs(self, inputs: dict[str, Any]) -> None:
        """Remember the mask, to see later, without waiting for the device, whether it has been changed."""
        self._collated_mask = None
        mask = inputs.get("completion_mask")
        if type(self.data_collator) is not PairCollator or mask is None:
            return
        if not mask.is_inference():
            self._collated_mask = (mask, mask._version)

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

    def _make_trl_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return what TRL reads of a batch: without our entry, with the mask of the tokens that its loss reads."""
        trl_inputs = dict(inputs)
        known = trl_inputs.pop(KEY, None)
        if not self._reads_reasoning:
            return trl_inputs
        if known is None:
            raise ValueError("preference_tokens 'reasoning' needs TRL's own collator: leave data_collator out")
        mask = trl_inputs["completion_mask"]
        columns = torch.arange(mask.shape[-1], device=mask.device)
        end_of_reasoning = known["start"] + known["reasoning"]
        trl_inputs["completion_mask"] = mask * (columns < end_of_reasoning.unsqueeze(-1))
        return trl_inputs

    def _find_layout(self, inputs: dict[str, Any]) -> Batch:
        """Return the layout that the collator made, or lay the pairs out here where it could not."""
        layout: Batch | None = inputs[KEY].get("layout")
        if layout is not None and self._is_laid_out(layout, inputs["completion_mask"]):
            return layout
        return lay_out_pairs(inputs, inputs[KEY], self.data_collator.pad_token_id, **self.arrangement())

    def compute_pair_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute TRL's loss plus the calibration term; without our head, TRL's loss alone."""
        row_numbers = inputs.get(KEY, {}).get("row")
        name_rows = partial(self._name_rows, row_numbers, self.model.training)
        if not self._uses_own_head:
            result = self.compute_trl_loss(model, self._make_trl_inputs(inputs), return_outputs)
            loss = result
            if return_outputs:
                loss = result[0]
            self.check_nan_later(loss, name_rows)
            return result
        if KEY not in inputs:
            raise ValueError("calibration and prefix sharing need TRL's own collator of texts: leave data_collator out")
        is_training = self.model.training
        layout = self._find_layout(inputs)
        pairs = len(inputs["input_ids"]) // 2
        streamed: list[Example] = []
        if self._stream and is_training:
            streamed = self._stream.take_examples(self, pairs)
        policy = self._make_policy(model, layout, streamed)
        trl_inputs = self._make_trl_inputs(inputs)
        if not self.precompute_ref_logps:
            trl_inputs |= self._compute_references(inputs, layout)
        with self.read_references_from_batch(), self._take_out_sft() as sft_weight:
            result = self.compute_trl_loss(policy, trl_inputs, return_outputs)
        outputs = None
        loss = result
        if return_outputs:
            loss, outputs = result
        if sft_weight:
            loss = loss + sft_weight * sft_loss(policy.stats.target, inputs["completion_mask"])
        has_term = bool(streamed) or not self._stream  # the stream is for training: evaluation has none
        if self.args.weight and has_term:
            share = self._share_of_step(pairs)
            term = self._compute_term(policy, inputs, streamed)
            total = loss + self.calibration_weight * share * term
            if is_training:
                loss = total
            else:  # `eval_loss` stays TRL's; the total is logged next to it
                self.check_nan_later(total, name_rows)
                self._log_evaluation("total_loss", total)
        self.check_nan_later(loss, name_rows)
        if return_outputs:
            return loss, outputs
        return loss

    def _compute_references(self, inputs: dict[str, Any], layout: Batch) -> dict[str, Tensor]:
        """Run the reference through our head, before TRL's loss, which then reads its log-probabilities."""
        reference = self.ref_model
        if reference is None:
            reference = self.model
        known = {**inputs[KEY], "layout": layout}
        chosen, rejected = self.compute_ref_log_probs(reference, {**inputs, KEY: known})
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _take_out_sft(self) -> AbstractContextManager[float]:
        """Take `sft` out of TRL's losses where they read only the reasoning.

        It keeps the form of whole responses, including the answer, so it is computed on whole responses.
        """
        if self._reads_reasoning:
            return self.take_out_loss("sft")
        return nullcontext(0.0)

    def _share_of_step(self, pairs: int) -> float | Tensor:
        """Return what a micro-batch's mean counts for in the mean over the step's pairs; 1 unless it is ragged."""
        if self._step_pairs is None or not self.model.training:
            return 1.0
        share: float | Tensor = pairs * self.current_gradient_accumulation_steps / self._step_pairs
        return share

    def _make_policy(self, model: Any, layout: Batch, streamed: Sequence[Example]) -> Policy:
        """Return the policy of this micro-batch: the pairs and, after them, the stream's responses."""
        args = self.args
        pair_rows = len(layout.rows)
        extras = list(TRL_EXTRAS)
        if args.weight and args.calibration == "bce":
            extras.append("log_doubt")
        if self.needs_squared_mass:
            extras.append("log_sum_sq")
        options = {"pad": self.data_collator.pad_token_id, "balanced": pair_rows, "tokens": layout.tokens}
        options |= self.arrangement()
        if streamed and args.calibration == "replay":
            rows = [*layout.rows, *(example.row for example in streamed)]
            layout = lay_out_rows(rows, [], len(rows), **options)
        elif streamed:
            rows = [*layout.rows, *(example.before_label() for example in streamed)]
            layout = lay_out_rows(rows, label_queries(streamed, pair_rows), pair_rows, **options)
        elif args.calibration != "outcome":
            layout = layout.without_queries()
        forward.install_head(self.accelerator.unwrap_model(model))
        return Policy(model, layout, args.head_precision, tuple(extras))

    def _compute_term(self, policy: Policy, inputs: dict[str, Any], streamed: Sequence[Example]) -> Tensor:
        """Compute the calibration term and log its parts."""
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

    def _score_outcomes(self, policy: Policy, known: dict[str, Any], streamed: Sequence[Example]) -> CalibrationTerm:
        rates = None
        if not streamed:
            pairs = len(known["row"]) // 2
            rates = known["correctness_rate"][:pairs]
        target = None
        if self.args.outcome_target != "gold":
            labels = policy.label_logprobs.shape[-1]
            target = torch.tensor(target_table(streamed, labels))
        return outcome_term(policy.label_logprobs, policy.batch.query_gold, rates, self.args, target)

    def _select_tokens(self, inputs: dict[str, Any]) -> Tensor:
        """Return the tokens that a surrogate term reads: (2 B, L)."""
        mask: Tensor = inputs["completion_mask"].bool()
        if self.args.calibrate_tokens == "all":
            return mask
        columns = torch.arange(mask.shape[-1], device=mask.device)
        label: Tensor = inputs[KEY]["start"] + inputs[KEY]["label_at"]
        return mask & (columns == label.unsqueeze(-1))

    # ---- logs and the model card

    def _log_training(self, logs: dict[str, Tensor]) -> None:
        """Log the mean over processes. It stays on the device until TRL logs it, so nothing waits for the device."""
        values = torch.stack([value.detach().float() for value in logs.values()])
        means = self.accelerator.gather(values[None]).mean(0)
        for name, value in zip(logs, means.unbind(), strict=True):
            self.append_metrics("train", name, [value])

    def _log_evaluation(self, name: str, value: Tensor) -> None:
        """Log a batch's mean once for every pair of the batch, as Transformers weights `eval_loss` over batches."""
        per_pair = value.detach().repeat(self.args.eval_batch_size)
        self.append_metrics("eval", name, self.accelerator.gather_for_metrics(per_pair).tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, which averages numbers of the host."""
        metrics = self.read_metrics()
        for name, values in metrics.items():
            if values and isinstance(values[0], Tensor):
                metrics[name] = torch.stack(values).tolist()
        super().log(logs, start_time)

    def _name_rows(self, row: Tensor | None, is_training: bool) -> str:
        """Name the pairs for an error: by their questions' ids where the dataset has them, else by their numbers."""
        if row is None:
            return "rows unknown"
        numbers = row.tolist()
        pairs = len(numbers) // 2
        names = {number: f"row {number}" for number in numbers[:pairs]}
        rows = self.eval_dataset
        if is_training:
            rows = self.train_dataset
        if isinstance(rows, Dataset) and {"row", "question"} <= set(rows.column_names):
            for number, question in zip(rows["row"], rows["question"], strict=True):
                if number in names:
                    names[number] = str(question)
        return f"rows {', '.join(names.values())}"

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card and add the last calibration numbers that were measured while training."""
        super().create_model_card(*args, **kwargs)
        measured = [entry for entry in self.state.log_history if "eval_val_ece" in entry]
        if not measured or not self.is_world_process_zero():
            return
        entry = measured[-1]
        for candidate in measured:
            if candidate.get("step") == self.kept_step:
                entry = candidate
        lines = ["", "## Calibration", ""]
        lines.append(f"On {len(self.validation)} held-out questions, at step {int(entry.get('step', 0))}.")
        lines += ["", "| Metric | Value |", "|---|---|"]
        for name, title in MEASURED.items():
            if name in entry:
                lines.append(f"| {title} | {entry[name]:.4f} |")
        path = Path(self.args.output_dir) / "README.md"
        card = path.read_text(encoding="utf-8")
        write_text(path, card + "\n".join(lines) + "\n")


def _refuse_empty(argument: Any) -> None:
    if isinstance(argument, Dataset) and len(argument) == 0:
        raise ValueError("the dataset is empty")
