"""`CATTOTrainer`: TRL's DPOTrainer with a calibration term, one policy forward a step.

With calibration none or weight 0 and no prefix sharing, everything is TRL's own code and the loss is TRL's to the
last bit. Otherwise `_compute_loss` of TRL receives, in the model's place, a callable that runs our head once and hands
TRL the fields it wants; the term is added to what TRL returns. What we lean on in TRL is listed in
tests/test_trl_contract.py.
"""

from __future__ import annotations

import copy
import logging
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer

from catto.training import head
from catto.training.config import CATTOConfig
from catto.training.monitor import EvaluateAtEnd, Monitored, calibration_section, evaluating_without_dataset
from catto.training.pairs import (
    COLUMNS,
    KEY,
    Pairs,
    check_columns,
    check_not_empty,
    label_columns,
    paired,
    take_pairs,
    without_long,
)
from catto.training.policy import Policy
from catto.training.rows import Example
from catto.training.stream import OutcomeStream
from catto.training.terms import Term, outcome_on_pairs, outcome_on_stream, surrogate_term

logger = logging.getLogger(__name__)


class CATTOTrainer(Monitored, DPOTrainer):  # type: ignore[misc]
    """Train on preferences and keep confidence honest. Takes what `DPOTrainer` takes.

    validation: examples on which `evaluate` measures label confidence (see `Monitored`).
    outcome_examples: with `calibration="outcome"`, the unfiltered responses (`catto.training.rows.examples`) that form
    a third stream beside the pairs; without them the term reads the pairs' own labels, y+ weighted by the question's
    correctness rate and y- by one minus it.
    """

    _tag_names = ["trl", "dpo", "catto", "calibration"]  # noqa: RUF012 (TRL's own shape)
    _name = "CATTO"
    _paper = {  # noqa: RUF012
        "title": "CATTO: Balancing Preferences and Confidence in Language Models",
        "citation": textwrap.dedent("""\
            @article{parikh2026catto,
                title  = {{CATTO: Balancing Preferences and Confidence in Language Models}},
                author = {Nisarg Parikh and Ananya Sai and Pannaga Shivaswamy and Kunjal Panchal and Andrew Lan},
                year   = 2026
            }"""),
    }

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
        self._stream = OutcomeStream(outcome_examples, args) if outcome_examples else None
        self.validation = validation
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
        """Tokenise as TRL does (or take token ids that are there), find labels, drop rows that do not fit."""
        check_not_empty([dataset])
        if "prompt_ids" not in (dataset.column_names or ()):
            check_columns(dataset, name)
            whole = copy.copy(args)
            whole.max_length = None  # TRL would drop long prompts without a word
            dataset = super()._prepare_dataset(dataset, processing_class, whole, name)
        dataset = dataset.map(lambda example, row: {"row": row}, with_indices=True)
        if args.weight and (args.calibrate_tokens == "label" or (args.calibration == "outcome" and not self._stream)):
            known = {"tokenizer": processing_class, "name": name, "rated": args.calibration == "outcome"}
            dataset = dataset.map(label_columns, fn_kwargs=known)
        return without_long(dataset, args.max_length, name)

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
            loss = loss + self.calibration_weight * self._term(policy, inputs).loss
        return self._checked((loss, outputs) if return_outputs else loss, pairs)

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
        if self.args.calibration == "outcome" and policy.examples:
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
            rows = ", ".join(pairs.names) if pairs else "unknown"
            raise FloatingPointError(
                f"loss is {loss.item()} at step {self.state.global_step} on rows {rows}; "
                f"the checkpoints in {self.args.output_dir} are from before"
            )
        return result

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's model card and, where calibration was measured while training, its last numbers."""
        super().create_model_card(*args, **kwargs)
        measured = [entry for entry in self.state.log_history if "eval_val_ece" in entry]
        if measured and self.is_world_process_zero():
            with (Path(self.args.output_dir) / "README.md").open("a", encoding="utf-8") as card:
                card.write(calibration_section(measured[-1], len(self.validation)))

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
