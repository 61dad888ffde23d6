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
from catto.training.checkpoints import KEEP
from catto.training.examples import Example, label_queries
from catto.training.forward import install_head, run_head

MAX_UNREAD_LOSSES = 100  # if more are waiting, they are read at once, even if no log is due


def compute_label_logprobs(
    model: Any, examples: Sequence[Example], pad: int, batch_size: int = 16
) -> NDArray[np.float64]:
    """Compute the log-probability of every label at the position that predicts each example's label.

    Args:
        model: A causal language model. `install_head` adds keyword arguments to its forward.
        examples: N examples, at least one.
        pad: Token id used to pad the rows of a batch.
        batch_size: Number of examples per forward pass.

    Returns:
        Log-probabilities (N, K) in the order of the examples; -inf if an example has fewer labels.
    """
    max_labels = max(len(example.label.candidates) for example in examples)
    logprobs = np.full((len(examples), max_labels), -np.inf)

    def count_tokens(index: int) -> int:
        example = examples[index]
        return len(example.row.prompt) + example.label.at

    # Examples of similar length share a batch, to avoid padding.
    order = sorted(range(len(examples)), key=count_tokens)
    install_head(model)
    # Leave the inference mode of `evaluation_mode`: FSDP2 keeps the tensors into which it gathers weights, and training
    # cannot use tensors made in inference mode.
    with evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch_examples = [examples[index] for index in indices]
            rows = [example.before_label() for example in batch_examples]
            batch = lay_out_rows(rows, label_queries(batch_examples), scored=0, pad=pad, shared=False)
            labels = run_head(model, batch.to(model.device), precision="fp32").labels
            if labels is not None:  # always true, since every example has a query
                logprobs[indices, : labels.shape[1]] = labels.double().cpu().numpy()
    return logprobs


def label_metrics(logprobs: NDArray[np.float64], gold: Sequence[int]) -> dict[str, float]:
    """Compute the accuracy of the most probable label, ECE and Brier score of its raw probability, and the gold NLL.

    Args:
        logprobs: Log-probabilities of the labels (N, K).
        gold: Index of each example's right label.

    >>> label_metrics(np.log([[0.8, 0.1], [0.6, 0.3]]), [0, 1])["val_accuracy"]
    0.5
    """
    gold_index = np.asarray(gold)
    gold_logprob = logprobs[np.arange(len(gold_index)), gold_index]
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
        confidence: Its raw probability, (N,).
        correct: Whether it is the right label, (N,).
    """

    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]


def choose_labels(logprobs: NDArray[np.float64], gold: Sequence[int]) -> LabelAnswers:
    """Choose the most probable label of each example.

    Args:
        logprobs: Log-probabilities of the labels (N, K).
        gold: Index of each example's right label.
    """
    confidence = np.minimum(np.exp(logprobs.max(axis=1)), 1.0)
    return LabelAnswers(confidence, logprobs.argmax(axis=1) == np.asarray(gold))


class _UnreadLoss(NamedTuple):
    """A loss that is still on the device, its step, and a function that names its rows."""

    loss: Tensor
    step: int
    rows: Callable[[], str]


class MonitoredTrainer(Trainer):  # type: ignore[misc]
    """Base class of the trainers. `evaluate` also measures label confidence on the `validation` examples.

    The metrics are logged as `eval_val_accuracy` and so on, and Transformers can choose the best checkpoint by them. If
    several steps are equally good, the latest one is kept.

    Attributes:
        validation: The held-out examples.
        validation_answers: The model's answers to them at the last evaluation; None before the first.
    """

    validation: Sequence[Example] = ()
    validation_answers: LabelAnswers | None = None
    _metrics_to_log: Sequence[tuple[str, float]] = ()  # metrics of the last evaluation, for the next call of `log`
    _loaded: tuple[int, int] | None = None  # the last step, and the step whose weights were then loaded
    _unread_losses: tuple[_UnreadLoss, ...] = ()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on the dataset, if there is one, and measure calibration; both results are logged together."""
        # Given several datasets, Transformers calls this method again for each of them: with the name of one of its own
        # datasets, or with one of the datasets in a dictionary. Calibration is measured in only one of these calls.
        is_measured_in_another_call = isinstance(eval_dataset, str | dict)
        if self.validation and not is_measured_in_another_call:
            self._metrics_to_log = self._measure_labels(metric_key_prefix)
        has_dataset = eval_dataset is not None or self.eval_dataset is not None
        if has_dataset or not self.validation:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[no-any-return]
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
        if is_best or name not in KEEP:
            return is_best
        is_tie = bool(metrics[f"eval_{name}"] == self.state.best_metric)
        if is_tie:
            self.state.best_global_step = self.state.global_step
        return is_tie

    def _load_best_model(self) -> None:
        """Load the best model as Transformers does, and remember its step for `kept_step`."""
        super()._load_best_model()
        _, _, best_step = str(self.state.best_model_checkpoint).rpartition("-")
        self._loaded = (self.state.global_step, int(best_step))

    @property
    def kept_step(self) -> int:
        """The training step that produced the current weights of the model."""
        last: int = self.state.global_step
        if self._loaded is None:
            return last
        last_when_loaded, loaded_step = self._loaded
        has_trained_further = last_when_loaded != last
        if has_trained_further:
            return last
        return loaded_step

    def mean_over_processes(self, number: float, device: Any) -> float | Tensor:
        """Return the mean of a number over all processes, as a tensor on the device if there are several processes."""
        if self.accelerator.num_processes == 1:
            return number
        local = torch.full((1,), float(number), device=device)
        mean: Tensor = self.accelerator.gather(local).mean()
        return mean

    # ---- losses that are not finite

    def check_nan_later(self, loss: Tensor, rows: Callable[[], str]) -> None:
        """Remember a loss, to stop training later if it is not finite.

        Reading it at every step would make the host wait for the device. Losses are read together at the next log,
        when Transformers reads its own sums, and before a checkpoint is written. During evaluation they are read now.

        Args:
            loss: The loss, a scalar.
            rows: Returns the names of the rows that it was computed on, for the error.

        Raises:
            FloatingPointError: The losses were read, and one of them is not finite.
        """
        unread = _UnreadLoss(loss.detach(), self.state.global_step, rows)
        self._unread_losses = (*self._unread_losses, unread)
        if not self.model.training or len(self._unread_losses) >= MAX_UNREAD_LOSSES:
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
                raise FloatingPointError(f"loss is {value} at step {unread.step} on {unread.rows()}; {hint}")

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
    """Allow a trainer to be built with `validation` as its only evaluation data.

    With evaluation turned on, Transformers requires an evaluation dataset in the constructor.
    """
    strategy = args.eval_strategy
    if validation:
        args.eval_strategy = IntervalStrategy.NO
    try:
        yield
    finally:
        args.eval_strategy = strategy


class EvaluateAtEnd(TrainerCallback):  # type: ignore[misc]
    """Evaluates after the last step too, even if no evaluation is due: it may be the best step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Request an evaluation after the last step."""
        if state.global_step >= state.max_steps and args.eval_strategy == IntervalStrategy.STEPS:
            control.should_evaluate = True
        return control
