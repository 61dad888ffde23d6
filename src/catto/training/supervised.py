"""Supervised training on correct traces: SFT with or without label smoothing, CFT and RCFT.

The loss is the mean over all tokens of a step, independent of gradient accumulation and the number of processes.
Transformers counts the tokens of all micro-batches before each step. RCFT's term is the mean over the step's samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from catto.metrics.binning import reliability
from catto.objectives import rcft_loss, smoothed_nll
from catto.training import forward
from catto.training.batches import Batch, lay_out_rows
from catto.training.config import option, warn_of_slow_bf16
from catto.training.examples import Example, TokenizedRow, label_queries
from catto.training.monitor import EvaluateAtEnd, MonitoredTrainer, allow_missing_dataset

logger = logging.getLogger(__name__)
RCFT_BINS = 10
# Takes the model, and returns the confidence and the correctness of its own greedy answers to held-out questions. The
# confidence is the probability of the answer's label, normalised over the labels; None if it cannot be read.
AnswerFunction = Callable[[Any], tuple[Sequence[float | None], Sequence[bool]]]


def collate_examples(examples: Sequence[TokenizedRow], pad: int, *, reads_labels: bool, packed: bool) -> dict[str, Any]:
    """Make the batch of one forward pass.

    Args:
        examples: The rows to train on.
        pad: Token id used for padding.
        reads_labels: Whether to compute the label probabilities of the rows that are `Example`s.
        packed: Whether to pack rows into one line, in which rows with the same prompt share it.

    Returns:
        `batch`, the `Batch`; `names`, the ids of the questions; and the batch's targets as `labels` and `shift_labels`,
        by which Transformers counts the tokens of a step.
    """
    queries = []
    if reads_labels:
        queries = label_queries([example for example in examples if isinstance(example, Example)])
    rows = [example.row for example in examples]
    batch = lay_out_rows(rows, queries, len(rows), pad, shared=packed, packed=packed)
    names = [example.question for example in examples]
    # Transformers counts tokens only if there are `labels`. It does not count the first of them, so it is also given
    # `shift_labels`, which it then counts instead.
    return {"batch": batch, "labels": batch.targets, "shift_labels": batch.targets, "names": names}


@dataclass
class SupervisedConfig(TrainingArguments):  # type: ignore[misc]
    """Transformers' training arguments and `padding_free`, which has the same name in TRL."""

    padding_free: bool | None = option(
        None,
        "Whether to pack rows into one line instead of padding them. None packs on CUDA if the model can use "
        "FlexAttention.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        warn_of_slow_bf16(self)


class SupervisedTrainer(MonitoredTrainer):
    """Trains with cross-entropy on the completions, optionally with label smoothing and RCFT's term.

    The trainer installs our head in the model, and may switch its attention to FlexAttention. In `args` it sets
    `remove_unused_columns` to False and the number of GPUs to at most one.

    Args:
        model: The model.
        args: The training arguments.
        examples: Rows to train on; with RCFT's term they must be `Example`s.
        processing_class: The tokenizer.
        validation: Examples on which `evaluate` measures label confidence, see `MonitoredTrainer`.
        epsilon: Label smoothing, in [0, 1].
        bins: The estimates of accuracy that RCFT's term compares confidence with; None trains without the term.
        rcft_weight: Weight of RCFT's term.
    """

    # The loss of a micro-batch is already divided by the tokens of the whole step. Transformers must not also divide it
    # by the number of accumulation steps.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Any,
        args: SupervisedConfig,
        examples: Sequence[TokenizedRow],
        processing_class: Any,
        *,
        validation: Sequence[Example] = (),
        epsilon: float = 0.0,
        bins: RcftBins | None = None,
        rcft_weight: float = 0.0,
    ) -> None:
        if not examples:
            raise ValueError("there is no example to train on")
        if rcft_weight > 0 and not all(isinstance(example, Example) for example in examples):
            raise ValueError("RCFT reads the label of every response: expected examples with labels")
        self.validation = validation
        self.epsilon = epsilon
        self.bins = bins
        self.rcft_weight = rcft_weight
        self._step_samples: float | Tensor | None = None  # samples of the current step, averaged over processes
        args.remove_unused_columns = False  # rows are objects, which have no columns
        args._n_gpu = min(args.n_gpu, 1)  # one process uses one GPU: no DataParallel
        forward.install_head(model)
        packed = _choose_packing(model, args)
        callbacks: list[TrainerCallback] = [EvaluateAtEnd()]
        if bins is not None:
            callbacks.append(bins)  # estimates the accuracies anew at the start of every epoch
        options = {"pad": processing_class.pad_token_id, "reads_labels": rcft_weight > 0, "packed": packed}
        with allow_missing_dataset(args, validation):
            super().__init__(
                model=model,
                args=args,
                train_dataset=list(examples),
                data_collator=partial(collate_examples, **options),
                processing_class=processing_class,
                callbacks=callbacks,
            )
        self.model_accepts_loss_kwargs = True  # makes Transformers count the tokens of a step

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute this micro-batch's part of the loss of the step.

        The loss of the step is the mean over its tokens, plus RCFT's term, the weighted mean over its samples.

        Args:
            model: The model, as training has wrapped it.
            inputs: The batch of `collate_examples`.
            return_outputs: Whether to return the output of the head too.
            num_items_in_batch: Number of tokens of the step, counted by Transformers; None outside of training.

        Returns:
            The loss, or the loss and a `ForwardOutput`.
        """
        batch: Batch = inputs["batch"].to(self.args.device)
        extras: tuple[str, ...] = ()
        if self.epsilon:
            extras = ("mean_logit",)
        output = forward.run_head(model, batch, extras)
        loss = smoothed_nll(output.stats, self.epsilon).sum() / self._tokens_per_process(batch, num_items_in_batch)
        if self.bins is not None and output.labels is not None:
            samples_per_process = self._step_samples
            if samples_per_process is None:  # an evaluation before the first training step
                samples_per_process = len(batch.query_source)
            bin_accuracy = self.bins.to_tensor(like=loss)
            rcft_sum = rcft_loss(output.labels, bin_accuracy).sum()
            loss = loss + self.rcft_weight * rcft_sum / samples_per_process
        if output.aux_loss is not None:  # load balancing of a mixture of experts, as in the model's own loss
            weight = self.model.config.get_text_config().router_aux_loss_coef
            # The mean over the micro-batches of the step, which Transformers does not take (`loss_is_scaled_for_ga`).
            loss = loss + weight * output.aux_loss / self.current_gradient_accumulation_steps
        names = inputs["names"]
        self.check_nan_later(loss, lambda: f"questions {', '.join(names)}")
        if return_outputs:
            return loss, output
        return loss

    def _tokens_per_process(self, batch: Batch, num_items_in_batch: Any) -> Any:
        """Return the number of tokens of the step per process; outside of training, of the batch.

        The losses of the processes are divided by this number and not by the tokens of all processes, since gradients
        are averaged over the processes later.
        """
        if num_items_in_batch is None:
            return max(len(batch.targets), 1)
        if self.args.average_tokens_across_devices:  # Transformers has counted the tokens of all processes
            return num_items_in_batch / self.accelerator.num_processes
        return num_items_in_batch

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the micro-batches of a step and the number of their tokens, and count their samples."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = sum(len(batch["names"]) for batch in batches)
        self._step_samples = self.mean_over_processes(samples, device)
        return batches, tokens


def _choose_packing(model: Any, args: SupervisedConfig) -> bool:
    """Return whether to pack rows, and switch the model to FlexAttention if it can use it.

    Rows are packed if `args.padding_free` is True, or if it is None and the model uses FlexAttention. A model that
    cannot keep packed rows apart is left unchanged, and its rows are not packed.
    """
    obstacle = forward.sharing_obstacle(model, args)
    if obstacle is not None:
        if args.padding_free:
            logger.warning("padding_free is off: %s", obstacle)
        return False
    uses_flex_attention = forward.try_flex_attention(model, args.device)
    if args.padding_free is None:
        return uses_flex_attention
    return args.padding_free


class RcftBins(TrainerCallback, ExportableState):  # type: ignore[misc]
    """RCFT's E-step: the accuracy of every confidence bin, estimated at the start of every epoch.

    The estimate uses the model's own greedy answers to held-out questions. After gold reasoning, answers would be right
    in every bin. The estimate is part of the checkpoint, so that a run killed within an epoch resumes with it.

    Args:
        answer_questions: Returns the confidence and the correctness of the model's answers. Answers without a
            confidence are left out of the bins, and their number is logged.
    """

    def __init__(self, answer_questions: AnswerFunction) -> None:
        self.answer_questions = answer_questions
        self.accuracy: list[float | None] | None = None  # one per bin, None in a bin without answers
        self.epoch = -1  # the epoch of the estimate

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the estimate from the checkpoint if training resumes from one."""
        own_state = state.stateful_callbacks.get(type(self).__name__, {})
        stored = own_state.get("attributes", {})
        is_resumed = state.global_step > 0
        if is_resumed and stored.get("accuracy") is not None:
            self.accuracy = stored["accuracy"]
            self.epoch = stored["epoch"]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Estimate the accuracies, unless this epoch's estimate was restored from the checkpoint."""
        epoch = int(state.epoch or 0)  # it is None before the first epoch
        if epoch == self.epoch:
            return
        self.accuracy = self._estimate_accuracy(model)
        self.epoch = epoch
        logger.info("RCFT epoch %d: accuracy of the bins %s", epoch, self.accuracy)

    def _estimate_accuracy(self, model: Any) -> list[float | None]:
        """Return the accuracy of the model's answers in each confidence bin; None for a bin without answers.

        Raises ValueError if no answer has a confidence.
        """
        all_confidences, all_correct = self.answer_questions(model)
        confidence = []
        correct = []
        for answer_confidence, is_correct in zip(all_confidences, all_correct, strict=True):
            if answer_confidence is not None:
                confidence.append(answer_confidence)
                correct.append(is_correct)
        left_out = len(all_confidences) - len(confidence)
        if left_out:
            logger.warning(
                "RCFT: %d of %d answers lack the probability of a label and are left out of the bins",
                left_out,
                len(all_confidences),
            )
        if not confidence:
            raise ValueError("RCFT's bins need the probabilities of all labels, and no held-out answer has them")
        bins = reliability(np.asarray(confidence), np.asarray(correct), RCFT_BINS)
        accuracy: list[float | None] = []
        for bin_accuracy, count in zip(bins.accuracy, bins.count, strict=True):
            accuracy.append(float(bin_accuracy) if count else None)
        return accuracy

    def to_tensor(self, like: Tensor) -> Tensor:
        """Return the accuracies of the M bins (M,), nan for an empty bin, with the dtype and device of `like`."""
        if self.accuracy is None:
            raise ValueError("RCFT's bins have not been estimated")
        values = [math.nan if accuracy is None else accuracy for accuracy in self.accuracy]
        return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)

    def state(self) -> dict[str, Any]:
        """Return the state to store in the checkpoint."""
        return {"args": {}, "attributes": {"accuracy": self.accuracy, "epoch": self.epoch}}
