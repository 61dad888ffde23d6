"""The training stage: start model and rows -> a trained model in `model/`, and how it went in training.json."""

from __future__ import annotations

import json
import logging
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, TrainingArguments

from catto.experiment.stages import TrainSettings, Work
from catto.experiment.steps import read_questions
from catto.files import building, read_records, replacing
from catto.labels import check_labels
from catto.methods import acting
from catto.metrics.temperature import confidence_at
from catto.predict.predictor import evaluate_model, is_correct
from catto.prompts import completion
from catto.records import Message, Prediction, PreferenceRow, SftRow
from catto.training.config import CATTOConfig
from catto.training.models import scratch_model, word_tokenizer
from catto.training.monitor import LAST, keeping, newest_complete
from catto.training.preference import CATTOTrainer
from catto.training.supervised import RcftBins, SupervisedTrainer
from catto.training.tokenize import Example, examples, fitting, labelled, pair_tokens, preference_columns, tokenised

logger = logging.getLogger(__name__)
T = TypeVar("T")
TrainWork = Work[TrainSettings]


class _Data(NamedTuple):
    """What a model is trained on: rows or pairs, their tokens an epoch, and how many were too long, by kind."""

    rows: int
    tokens: int
    dropped: dict[str, int]


def run_train(work: TrainWork) -> None:
    """Train one method, resuming from its newest complete checkpoint."""
    checkpoints = work.out / "checkpoints"
    # training.json is written last: where it exists, a run was killed while it deleted the checkpoints.
    if not (work.out / "training.json").exists():
        model, tokenizer = _start(work)
        prepare = _preference if work.settings.method.stage == "preference" else _supervised
        trainer, data = prepare(work, model, tokenizer)
        clock = _Clock(work)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        checkpoint = newest_complete(checkpoints)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        _save(trainer.model, tokenizer, work.out / "model")
        work.write("training.json", _account(work.settings.learning_rate, trainer, data, clock.seconds()))
    shutil.rmtree(checkpoints, ignore_errors=True)  # they are several times the model


def _account(learning_rate: float, trainer: Any, data: _Data, seconds: float) -> dict[str, Any]:
    """Return what training.json holds; the fields are those of `report.numbers.Training`."""
    state, logs = trainer.state, trainer.state.log_history
    epochs = round(state.epoch, 4)
    measured = [entry for entry in logs if "eval_val_ece" in entry]
    # The share of pairs in which the chosen response gained more than the rejected one, over the last quarter.
    rewards = [entry["rewards/accuracies"] for entry in logs if "rewards/accuracies" in entry]
    rewards = rewards[-max(len(rewards) // 4, 1) :]
    return {
        "learning_rate": learning_rate,
        "seconds": round(seconds, 1),
        "tokens": round(data.tokens * epochs),
        "rows": data.rows,
        "dropped": data.dropped,
        "epochs": epochs,
        "steps": state.global_step,
        "kept_step": trainer.kept_step,
        "kept_epochs": round(epochs * trainer.kept_step / state.global_step, 4),
        "reward_accuracy": sum(rewards) / len(rewards) if rewards else None,
        "history": [
            {"step": entry["step"]}
            | {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_val_")}
            for entry in measured
        ],
    }


def _start(work: TrainWork) -> tuple[Any, Any]:
    """Return the model that this training starts from, with new adapters if there are to be, and its tokenizer."""
    settings, started = work.settings.model, "start" in work.stage.needs
    if settings.scratch is not None and not started:
        rows = read_records(work.input("teacher") / "outcome.jsonl", SftRow)
        tokenizer = word_tokenizer([text.content for row in rows for text in (*row.prompt, *row.completion)])
        model: Any = scratch_model(tokenizer, settings.scratch, work.settings.seed)
    else:
        path = str(work.model("start")) if started else settings.path
        tokenizer = AutoTokenizer.from_pretrained(path)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=settings.attention)
    if settings.peft is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings.peft))
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save an ordinary checkpoint. An adapter is merged in fp32: in bf16 a small update would be rounded away."""
    if hasattr(model, "merge_and_unload"):
        model = model.float().merge_and_unload()
    with building(folder) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)


def _arguments(work: TrainWork, *, monitored: bool = True) -> dict[str, Any]:
    """Return the training arguments that every method shares; the recipe's `trl` block overrides them.

    monitored: whether there are held-out examples to choose the checkpoint by; otherwise the last one is kept.
    """
    settings, accelerated = work.settings, torch.accelerator.is_available()
    block = settings.block
    if not monitored and settings.keep != LAST:
        logger.warning("keep is %s, but nothing is held out to measure it on: the last step is kept", settings.keep)
    for name, instead in {"calibration": "the method", "max_length": "context"}.items():
        if name in block.trl:
            raise ValueError(f"trl: {name} is not set here: {instead} gives it")
    return {
        "output_dir": str(work.out / "checkpoints"),
        "seed": settings.seed,
        "data_seed": settings.seed,
        "learning_rate": settings.learning_rate,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "lr_scheduler_type": "linear",
        "bf16": accelerated,  # what is computed; the weights have the recipe's dtype
        "gradient_checkpointing": accelerated,
        "dataloader_pin_memory": accelerated,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": min(10, block.checkpoint_steps),  # a training of few steps is logged too
        **keeping(settings.keep, block.checkpoint_steps, measured=monitored),
        # Options of the calibration term are for the methods that have that term.
        **acting(settings.method.calibration, block.trl),
    }


# ---- supervised -----------------------------------------------------------------------------------------------------


def _supervised(work: TrainWork, model: Any, tokenizer: Any) -> tuple[Any, _Data]:
    settings, method = work.settings, work.settings.method
    rows = list(read_records(work.input("teacher") / "sft.jsonl", SftRow))
    fit = tokenised(tokenizer, rows, settings.context)
    drawn = labelled(tokenizer, _drawn(fit, settings.block.rows, settings.seed))
    watched = "traces" if method.stage == "sft" else "reasoning"
    validation = _validation(work, watched, tokenizer) if watched in work.stage.needs else []
    trainer = SupervisedTrainer(
        model,
        TrainingArguments(**_arguments(work, monitored=bool(validation))),
        drawn,
        tokenizer,
        validation=validation,
        epsilon=method.label_smoothing,
        bins=_bins(work, tokenizer) if method.rcft_weight else None,
        rcft_weight=method.rcft_weight,
    )
    return trainer, _Data(len(drawn), sum(example.tokens for example in drawn), {"rows": len(rows) - len(fit)})


def _validation(work: TrainWork, role: str, tokenizer: Any) -> list[Example]:
    return examples(tokenizer, read_records(work.input(role) / "outcome.jsonl", SftRow), work.settings.context)


def _drawn(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Return at most `limit` rows, drawn by seed and left in their order."""
    numbers = range(len(rows))
    if limit is not None and limit < len(rows):
        return [rows[number] for number in sorted(random.Random(seed).sample(numbers, limit))]
    return list(rows)


def _bins(work: TrainWork, tokenizer: Any) -> RcftBins:
    """Return RCFT's E-step on the model's own greedy answers to the validation questions."""
    questions = read_questions(work.input("held_out") / "validation.jsonl")
    answering = work.settings.answering
    assert answering is not None  # the graph gives it to RCFT
    evaluation = answering.evaluation

    def answers(model: Any) -> tuple[list[float | None], list[bool]]:
        options = {"batch_size": evaluation.batch_size, "max_tokens": evaluation.max_tokens}
        predictions = evaluate_model(model, tokenizer, questions, **options, reasoning=answering.reasoning)
        return [label_share(prediction) for prediction in predictions], [
            is_correct(prediction) for prediction in predictions
        ]

    return RcftBins(answers)


def label_share(prediction: Prediction) -> float | None:
    """Return the answer's probability among the labels; None where not every label has one in the form it took."""
    if prediction.label is None or prediction.label_logprobs is None:
        return None
    return confidence_at(prediction, kind="normalized")


# ---- preferences ----------------------------------------------------------------------------------------------------


def _preference(work: TrainWork, model: Any, tokenizer: Any) -> tuple[Any, _Data]:
    settings, method = work.settings, work.settings.method
    rows = list(read_records(work.input("teacher") / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("the teacher gave no pair: no question has enough right and wrong answers")
    for labels in dict.fromkeys(row.labels for row in rows):
        check_labels(tokenizer, labels)
    # Long pairs are dropped before the draw, so that all 500 drawn pairs are trained on, the same for every method.
    pairs = [preference_columns(tokenizer, row) for row in rows]
    fit = fitting(pairs, settings.context, pair_tokens, lambda pair: str(pair["question"]))
    limits = [limit for limit in (settings.pairs, settings.block.rows) if limit is not None]
    columns = _drawn(fit, min(limits, default=None), settings.seed)
    dropped = {"pairs": len(rows) - len(fit)}
    stream: list[Example] = []
    if method.stream != "none":
        sampled = list(read_records(work.input("stream") / "outcome.jsonl", SftRow))
        responses = sampled if method.stream == "sampled" else right_responses(work, sampled)
        stream = examples(tokenizer, responses, settings.context)
        dropped["stream"] = len(sampled) - len(stream)
    options: dict[str, Any] = {
        "max_length": settings.context,
        "precompute_ref_log_probs": True,
        "calibration": method.calibration,
        "prefix_sharing": settings.prefix_sharing,
    }
    if settings.outcome is not None:
        options |= acting(method.calibration, {"outcome_score": settings.outcome.score})
        if method.stream != "none":
            options["outcome_rows_per_pair"] = settings.outcome.rows_per_pair
    if not method.preference_loss:
        options["loss_weights"] = [0.0]
    config = CATTOConfig(**(options | _arguments(work)))
    trainer = CATTOTrainer(
        model,
        None,
        config,
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
        validation=_validation(work, "reasoning", tokenizer),
        outcome_examples=stream,
    )
    tokens = sum(2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in columns)
    if stream:  # so many rows of the stream beside every pair, up to the label where the loss reads nothing after it
        each = [row.tokens if method.stream == "right" else len(row.row.prompt) + row.label.at for row in stream]
        tokens += round(config.outcome_rows_per_pair * len(columns) * sum(each) / len(each))
    return trainer, _Data(len(columns), tokens, dropped)


def right_responses(work: TrainWork, sampled: Iterable[SftRow]) -> list[SftRow]:
    """Return a right response to each question of the stream: a correct trace, or the gold label if answers come first.

    A question with reasoning that the teacher never got right has none.
    """
    traces: dict[str, SftRow] = {}
    for row in read_records(work.input("teacher") / "sft.jsonl", SftRow):
        traces.setdefault(row.question, row)
    responses = []
    for row in sampled:
        if row.completion[-1].content == completion(None, row.label):
            answer = Message(role="assistant", content=completion(None, row.gold))
            responses.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in traces:
            responses.append(traces[row.question])
    return responses


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the seconds of training over all runs of a stage, reports progress and writes the stage's log."""

    def __init__(self, work: TrainWork) -> None:
        self.work, self.began, self.file = work, time.monotonic(), work.out / "seconds.json"
        self.before = float(json.loads(self.file.read_text())) if self.file.exists() else 0.0
        self.note = ""

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.before + time.monotonic() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress."""
        self.work.progress(state.global_step, state.max_steps, self.note)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Log what the trainer logs; keep the newest loss and validation numbers for the display."""
        logs = logs or {}
        logger.info("step %d of %d: %s", state.global_step, state.max_steps, json.dumps(logs, default=str))
        if "loss" in logs:
            self.note = f"loss {logs['loss']:.3f}"
        if "eval_val_ece" in logs:
            self.note = f"val acc {100 * logs['eval_val_accuracy']:.1f} ECE {100 * logs['eval_val_ece']:.1f}"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the seconds, so that a kill loses only those since the checkpoint."""
        with replacing(self.file) as file:
            json.dump(self.seconds(), file)
