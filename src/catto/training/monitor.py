"""Measure calibration during training, and stop training if a loss is not finite.

Label confidence is measured on held-out questions, after reasoning that was sampled once. An evaluation is a single
forward pass over them, without generation. ECE is computed over the whole set, never averaged over batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import IntervalStrategy, Trainer, TrainerCallback

from catto.engines.decoding import evaluation_mode
from catto.metrics import errors
from catto.training.batches import lay_out_rows
from catto.training.checkpoints import GREATER_IS_BETTER
from catto.training.examples import Example, label_queries
from catto.training.forward import install_head, run_head

MAX_UNREAD_LOSSES = 100  # when so many losses are waiting, they are read, even if no log is due


def compute_label_logprobs(
    model: Any, examples: Sequence[Example], pad: int, batch_size: int = 16
) -> NDArray[np.float64]:
    """Compute the log-probability of every label at the position that predicts each example's label.

    Args:
        model: A causal language model. `install_head` is called on it.
        examples: N examples, at least one.
        pad: Token id used to pad the rows of a batch.
        batch_size: Number of examples per forward pass.

    Returns:
        Log-probabilities (N, K) in the order of the examples, where K is the largest number of labels. The columns of
        labels that an example does not have are -inf.
    """
    max_labels = max(len(example.label.candidates) for example in examples)
    logprobs = np.full((len(examples), max_labels), -np.inf)

    def count_tokens(index: int) -> int:
        example = examples[index]
        return len(example.row.prompt) + example.label.at

    # Examples of similar length share a batch, to avoid padding.
    indices_by_length = sorted(range(len(examples)), key=count_tokens)
    install_head(model)
    # Leave the inference mode of `evaluation_mode`: FSDP2 keeps the tensors into which it gathers weights, and training
    # cannot use tensors made in inference mode.
    with evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        for start in range(0, len(examples), batch_size):
            indices = indices_by_length[start : start + batch_size]
            batch_examples = [examples[index] for index in indices]
            rows = [example.before_label() for example in batch_examples]
            # No token is scored (`num_scored`): only the probabilities of the labels are needed.
            batch = lay_out_rows(rows, label_queries(batch_examples), num_scored=0, pad=pad, shared=False)
            # Never rounded to 16 bits: checkpoints are compared by these probabilities.
            batch_logprobs = run_head(model, batch.to(model.device), precision="fp32").labels
            assert batch_logprobs is not None  # every example has a query
            logprobs[indices, : batch_logprobs.shape[1]] = batch_logprobs.double().cpu().numpy()
    return logprobs


def label_metrics(logprobs: NDArray[np.float64], gold: Sequence[int]) -> dict[str, float]:
    """Compute the accuracy and the calibration of label probabilities.

    Each example is answered with its most probable label. The confidence is the raw probability of that label.

    Args:
        logprobs: Log-probabilities of the labels (N, K).
        gold: Index of each example's right label.

    Returns:
        `val_accuracy`, `val_ece` and `val_brier` of the answers, their mean confidence `val_confidence`, and `val_nll`,
        the mean negative log-probability of the right label.

    >>> label_metrics(np.log([[0.8, 0.1], [0.6, 0.3]]), [0, 1])["val_accuracy"]
    0.5
    """
    gold_logprob = logprobs[np.arange(len(gold)), np.asarray(gold)]
    confidence, correct = choose_labels(logprobs, gold)
    return {
        "val_accuracy": errors.accuracy(confidence, correct),
        "val_ece": errors.ece(confidence, correct),
        "val_brier": errors.brier(confidence, correct),
        "val_nll": float(-gold_logprob.mean()),
        "val_confidence": float(confidence.mean()),
    }


class LabelAnswers(NamedTuple):
    """The most probable label of each of N examples.

    Attributes:
        confidence: Its raw probability, not normalised over the labels, (N,).
        correct: Whether it is the right label, (N,).
    """

    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]


def choose_labels(logprobs: NDArray[np.float64], gold: Sequence[int]) -> LabelAnswers:
    """Answer each example with its most probable label; of equally probable ones, with the first.

    Args:
        logprobs: Log-probabilities of the labels (N, K).
        gold: Index of each example's right label.

    Returns:
        The probability of each answer, and whether it is right.
    """
    confidence = np.minimum(np.exp(logprobs.max(axis=1)), 1.0)  # rounding may give a probability above 1
    is_right = logprobs.argmax(axis=1) == np.asarray(gold)
    return LabelAnswers(confidence, is_right)


class _UnreadLoss(NamedTuple):
    """A loss that is still on the device, its step, and a function that returns the names of its rows."""

    loss: Tensor
    step: int
    name_rows: Callable[[], str]


class _BestModelLoad(NamedTuple):
    """The step after which the best model was loaded, and the earlier step that its weights are from."""

    after_step: int
    best_step: int


class MonitoredTrainer(Trainer):  # type: ignore[misc]
    """Base class of the trainers. `evaluate` also measures label confidence on the `validation` examples.

    The results of `label_metrics` are logged as `eval_val_accuracy` and so on, and Transformers can choose the best
    checkpoint by them. If several steps are equally good, the latest one is kept.

    Attributes:
        validation: The held-out examples.
        validation_answers: The model's answers to them at the last evaluation; None before the first.
    """

    validation: Sequence[Example] = ()
    validation_answers: LabelAnswers | None = None
    _metrics_to_log: Sequence[tuple[str, float]] = ()  # metrics of the last evaluation, for the next call of `log`
    _best_model_load: _BestModelLoad | None = None  # None if the best model has not been loaded
    _unread_losses: tuple[_UnreadLoss, ...] = ()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the dataset, if there is one, and measure calibration on the `validation` examples.

        Both results are logged together.

        Args:
            eval_dataset: The dataset; None means the trainer's own.
            ignore_keys: Outputs of the model that are not gathered, as in Transformers.
            metric_key_prefix: What the names of the metrics begin with.

        Returns:
            The logged metrics.
        """
        # Transformers calls this method again for each of several datasets. If they are the trainer's own, these calls
        # get their names, and the first call has already measured calibration. If the first call gets a dictionary of
        # datasets, the calls for its datasets measure it.
        is_measured_in_another_call = isinstance(eval_dataset, str | dict)
        if self.validation and not is_measured_in_another_call:
            self._metrics_to_log = self._measure_labels(metric_key_prefix)
        has_dataset = eval_dataset is not None or self.eval_dataset is not None
        if has_dataset or not self.validation:  # with neither, Transformers raises its usual error
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[no-any-return]
        # Transformers cannot evaluate without a dataset, so log the metrics and notify the callbacks as it would.
        results: dict[str, float] = {}
        self.model.eval()  # TRL's `log` reads the mode to distinguish training from evaluation
        self.log(results)  # adds the metrics to `results`
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, results)
        return results

    def _measure_labels(self, prefix: str) -> list[tuple[str, float]]:
        """Return the metrics of the validation examples under their names in the log; set `validation_answers`."""
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)  # it may be a processor
        logprobs = compute_label_logprobs(self.model, self.validation, tokenizer.pad_token_id)
        gold = [example.label.gold for example in self.validation]
        self.validation_answers = choose_labels(logprobs, gold)
        metrics = label_metrics(logprobs, gold)
        return [(f"{prefix}_{name}", value) for name, value in metrics.items()]

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether the last step is the best so far. In a tie of our metrics, it counts as the best.

        Transformers keeps the earliest of equally good steps.
        """
        is_best: bool = super()._determine_best_metric(metrics, trial)
        name = str(self.args.metric_for_best_model).removeprefix("eval_")
        if is_best or name not in GREATER_IS_BETTER:
            return is_best
        is_tie = bool(metrics[f"eval_{name}"] == self.state.best_metric)
        if is_tie:
            self.state.best_global_step = self.state.global_step
        return is_tie

    def _load_best_model(self) -> None:
        """Load the best model as Transformers does, and remember its step for `kept_step`."""
        super()._load_best_model()
        _, _, best_step = str(self.state.best_model_checkpoint).rpartition("-")  # its folder is named checkpoint-STEP
        self._best_model_load = _BestModelLoad(after_step=self.state.global_step, best_step=int(best_step))

    @property
    def kept_step(self) -> int:
        """The training step that produced the current weights of the model."""
        last_step: int = self.state.global_step
        load = self._best_model_load
        if load is None:
            return last_step
        has_trained_since = load.after_step != last_step
        if has_trained_since:
            return last_step
        return load.best_step

    def mean_over_processes(self, number: float, device: Any) -> float | Tensor:
        """Return the mean of a number over all processes.

        A single process gets the number itself. Several processes get a tensor on the device, so that the host need not
        wait for it.
        """
        if self.accelerator.num_processes == 1:
            return number
        local = torch.full((1,), float(number), device=device)
        mean: Tensor = self.accelerator.gather(local).mean()
        return mean

    # ---- losses that are not finite

    def check_nan_later(self, loss: Tensor, name_rows: Callable[[], str]) -> None:
        """Remember a loss, to stop training later if it is not finite.

        To read every loss at once would make the host wait for the device at every step. Instead, all remembered losses
        are read together: at the next log, when Transformers waits anyway, before a checkpoint is written, and when
        there are `MAX_UNREAD_LOSSES`. During evaluation, they are read immediately.

        Args:
            loss: The loss, a scalar.
            name_rows: Returns the names of the rows that it was computed on, for the error.

        Raises:
            FloatingPointError: The losses were read, and one of them is not finite.
        """
        unread = _UnreadLoss(loss.detach(), self.state.global_step, name_rows)
        self._unread_losses = (*self._unread_losses, unread)
        is_evaluation = not self.model.training
        if is_evaluation or len(self._unread_losses) >= MAX_UNREAD_LOSSES:
            self._stop_at_nan()

    def _stop_at_nan(self) -> None:
        """Read and forget the remembered losses. Raise FloatingPointError if one of them is not finite."""
        unread_losses = self._unread_losses
        self._unread_losses = ()
        if not unread_losses:
            return
        values = torch.stack([unread.loss for unread in unread_losses]).tolist()  # a single wait for the device
        for value, unread in zip(values, unread_losses, strict=True):
            if not math.isfinite(value):
                hint = f"the checkpoints in {self.args.output_dir} were written before"
                raise FloatingPointError(f"loss is {value} at step {unread.step} on {unread.name_rows()}; {hint}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, together with the metrics of the last evaluation. Stop if a loss since the last log is not finite."""
        self._stop_at_nan()
        logs.update(self._metrics_to_log)  # in place, as in TRL, since the callbacks get the same object
        self._metrics_to_log = ()
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._stop_at_nan()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # trainer_state.json is written next and marks the checkpoint as complete, so wait for all processes.
        self.accelerator.wait_for_everyone()


@contextmanager
def allow_missing_dataset(args: Any, validation: Sequence[Example]) -> Iterator[None]:
    """Allow a trainer to be constructed without an evaluation dataset if there are `validation` examples.

    If evaluation is turned on in the arguments, the constructor of Transformers requires a dataset. Evaluation is
    therefore turned off until the end of the block.
    """
    strategy = args.eval_strategy
    if validation:
        args.eval_strategy = IntervalStrategy.NO
    try:
        yield
    finally:
        args.eval_strategy = strategy


class EvaluateAtEnd(TrainerCallback):  # type: ignore[misc]
    """Evaluates after the last step, which may be the best one, even if the number of steps makes no evaluation due."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Request an evaluation after the last step."""
        if state.global_step >= state.max_steps and args.eval_strategy == IntervalStrategy.STEPS:
            control.should_evaluate = True
        return control
