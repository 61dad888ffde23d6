"""Calibration while training: label confidence after reasoning that was sampled once, on held-out questions.

One forward a checkpoint and no generation. ECE is computed over the whole set, never averaged over batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import IntervalStrategy, TrainerCallback

from catto.engines.decoding import evaluating
from catto.evaluation import metrics
from catto.training import head
from catto.training.batches import Query, build
from catto.training.rows import Example

KEEP = {"val_accuracy": True, "val_ece": False, "val_nll": False}  # what a checkpoint is kept by: is more better?


def label_logprobs(model: Any, examples: Sequence[Example], pad: int, batch_size: int = 16) -> NDArray[np.float64]:
    """Log-probability of every label where each example's label is predicted: (N, K), -inf where a row has fewer."""
    width = max(len(example.label.candidates) for example in examples)
    found = np.full((len(examples), width), -np.inf)
    # Like lengths together, so that little of a batch is padding; the result is in the examples' order.
    order = sorted(range(len(examples)), key=lambda n: len(examples[n].row.prompt) + examples[n].label.at)
    head.install(model)
    with evaluating(model):
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            rows = [examples[n].before_label() for n in some]
            asked = [Query(k, examples[n].label.at, examples[n].label.candidates) for k, n in enumerate(some)]
            batch = build(rows, asked, 0, pad, shared=False).to(model.device)
            values = head.call(model, batch, ()).labels
            if values is not None:
                found[some, : values.shape[1]] = values.double().cpu().numpy()
    return found


def measure(logprobs: NDArray[np.float64], gold: Sequence[int]) -> dict[str, float]:
    """Accuracy of the likeliest label, and ECE, Brier and NLL of its raw probability. logprobs: (N, K)."""
    right = np.asarray(gold)
    answer = logprobs.argmax(axis=1)
    confidence, correct = np.minimum(np.exp(logprobs.max(axis=1)), 1.0), answer == right
    return {
        "val_accuracy": metrics.accuracy(confidence, correct),
        "val_ece": metrics.ece(confidence, correct),
        "val_brier": metrics.brier(confidence, correct),
        "val_nll": float(-logprobs[np.arange(len(right)), right].mean()),
        "val_confidence": float(confidence.mean()),
    }


class Monitored:
    """Mixin of trainers: `evaluate` also measures label confidence on `validation` examples.

    Its numbers reach the trackers as `eval_val_accuracy` and so on, and Transformers' own choice of the best
    checkpoint reads them.
    """

    validation: Sequence[Example] = ()

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Evaluate as the trainer does, where it has a dataset for that, and measure calibration."""
        trainer: Any = self
        found: dict[str, float] = {}
        if args or "eval_dataset" in kwargs or trainer.eval_dataset is not None:
            found = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        if self.validation:
            pad = trainer.processing_class.pad_token_id
            values = measure(
                label_logprobs(trainer.model, self.validation, pad), [e.label.gold for e in self.validation]
            )
            ours = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
            trainer.model.eval()  # TRL's log reads the mode to tell training from evaluation
            trainer.log(ours)
            found |= ours
            trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, found)
        return found


@contextmanager
def evaluating_without_dataset(args: Any, validation: Sequence[Example]) -> Iterator[None]:
    """Let a trainer be made that evaluates on `validation` alone: Transformers wants a dataset at construction."""
    strategy = args.eval_strategy
    if validation:
        args.eval_strategy = IntervalStrategy.NO
    try:
        yield
    finally:
        args.eval_strategy = strategy


class EvaluateAtEnd(TrainerCallback):  # type: ignore[misc]
    """The last step is evaluated too, whatever the interval: it may be the best."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for an evaluation at the last step."""
        if state.global_step >= state.max_steps and args.eval_strategy != IntervalStrategy.NO:
            control.should_evaluate = True
        return control


def keeping(metric: str, steps: int) -> dict[str, Any]:
    """Training arguments that evaluate and save every `steps` steps and keep the best checkpoint and the newest."""
    if metric not in KEEP:
        raise ValueError(f"keep is {metric!r}, expected one of {', '.join(KEEP)}")
    return {
        "eval_strategy": "steps",
        "eval_steps": steps,
        "save_strategy": "steps",
        "save_steps": steps,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": metric,
        "greater_is_better": KEEP[metric],
    }


def saving(steps: int) -> dict[str, Any]:
    """Training arguments that save every `steps` steps, to go on from after a kill, and keep the newest."""
    return {"eval_strategy": "no", "save_strategy": "steps", "save_steps": steps, "save_total_limit": 1}


def calibration_section(entry: dict[str, float], questions: int) -> str:
    """A model card's table of what `evaluate` measured last."""
    names = {
        "eval_val_accuracy": "Accuracy",
        "eval_val_ece": "ECE (20 bins)",
        "eval_val_brier": "Brier score",
        "eval_val_nll": "NLL of the gold label",
    }
    rows = "\n".join(f"| {title} | {entry[name]:.4f} |" for name, title in names.items() if name in entry)
    told = f"On {questions} held-out questions, at step {int(entry.get('step', 0))}."
    return f"\n## Calibration\n\n{told}\n\n| Metric | Value |\n|---|---|\n{rows}\n"
