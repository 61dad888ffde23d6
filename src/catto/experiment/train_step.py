"""The training stage: start model, rows, METHODS -> a trained model in `model/`, its story in training.json."""

from __future__ import annotations

import json
import logging
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, TrainingArguments

from catto.experiment.stages import Work
from catto.experiment.steps import read_questions
from catto.files import building, read_records, replacing
from catto.labels import check_labels
from catto.methods import METHODS, Method, acting
from catto.metrics.temperature import confidence_at
from catto.predict.predictor import evaluate_model, is_correct
from catto.prompts import completion
from catto.recipe import ModelSettings
from catto.records import Message, Prediction, PreferenceRow, SftRow
from catto.training.config import CATTOConfig
from catto.training.models import scratch_model, word_tokenizer
from catto.training.monitor import LAST, keeping, newest_complete
from catto.training.preference import CATTOTrainer
from catto.training.supervised import RcftBins, SupervisedTrainer
from catto.training.tokenize import Example, examples, fitting, pair_tokens, preference_columns

logger = logging.getLogger(__name__)


def run_train(work: Work) -> None:
    """Train one method, going on from its newest whole checkpoint."""
    if (work.out / "training.json").exists():  # killed while it cleared up: what is left of the checkpoints is no start
        return _clear(work)
    of = METHODS[work.settings["method"]]
    model, tokenizer = start(work)
    trainer, data = (_preference if of.stage == "preference" else _supervised)(work, of, model, tokenizer)
    clock = _Clock(work)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    checkpoint = newest_complete(_checkpoints(work))
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    _save(trainer.model, tokenizer, work.out / "model")
    work.write("training.json", _story(work, trainer, data, clock.seconds()))
    return _clear(work)


class _Data(NamedTuple):
    """What a model is trained on: rows or pairs, their tokens an epoch, and how many were too long, by kind."""

    rows: int
    tokens: int
    dropped: dict[str, int]


def _story(work: Work, trainer: Any, data: _Data, seconds: float) -> dict[str, Any]:
    """What training.json holds; the fields are those of `report.results.Training`."""
    state, kept = trainer.state, trainer.kept_step
    epochs = round(state.epoch, 4)
    return {
        "learning_rate": work.settings["learning_rate"],
        "seconds": round(seconds, 1),
        "tokens": round(data.tokens * epochs),
        "rows": data.rows,
        "dropped": data.dropped,
        "epochs": epochs,
        "steps": state.global_step,
        "kept_step": kept,
        "kept_epochs": round(epochs * kept / state.global_step, 4),
        "reward_accuracy": reward_accuracy(state.log_history),
        "history": history(state.log_history),
    }


def _clear(work: Work) -> None:
    """Drop the checkpoints, which are several times the model."""
    shutil.rmtree(_checkpoints(work), ignore_errors=True)


def _checkpoints(work: Work) -> Path:
    return work.out / "checkpoints"


def start(work: Work) -> tuple[Any, Any]:
    """The model that this training starts from, and its tokenizer."""
    settings = ModelSettings.model_validate(work.settings["model"])
    if "start" not in work.stage.needs and settings.scratch is not None:
        tokenizer = word_tokenizer(_texts(work.input("teacher") / "outcome.jsonl"))
        return scratch_model(tokenizer, settings.scratch, work.settings["seed"]), tokenizer
    path = str(work.model("start")) if "start" in work.stage.needs else settings.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=_dtype(settings), attn_implementation=settings.attention)
    return model, tokenizer


def _dtype(settings: ModelSettings) -> torch.dtype:
    if settings.dtype is None:
        return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


def _texts(path: Path) -> list[str]:
    """Every text of the teacher's rows: what a tokenizer of words has to know."""
    rows = read_records(path, SftRow)
    return [message.content for row in rows for message in (*row.prompt, *row.completion)]


def _common(work: Work, *, watched: bool = True) -> dict[str, Any]:
    """Training arguments that every method shares; the recipe's `trl` block wins over them.

    watched: whether there are held-out examples to choose the checkpoint by; else the last one is kept.
    """
    of = work.settings
    accelerated = torch.accelerator.is_available()
    if not watched and of["keep"] != LAST:
        logger.warning("keep is %s, but nothing is held out to measure it on: the last step is kept", of["keep"])
    if owned := [name for name in ("calibration", "max_length") if name in of["trl"]]:
        instead = {"calibration": "the method", "max_length": "context"}[owned[0]]
        raise ValueError(f"trl: {owned[0]} is not set here: {instead} gives it")
    return {
        "output_dir": str(_checkpoints(work)),
        "seed": of["seed"],
        "data_seed": of["seed"],
        "learning_rate": of["learning_rate"],
        "num_train_epochs": of["epochs"],
        "per_device_train_batch_size": of["batch_size"],
        "lr_scheduler_type": "linear",
        "bf16": accelerated and of["model"]["dtype"] != "float32",
        "gradient_checkpointing": accelerated,
        "dataloader_pin_memory": accelerated,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": min(10, of["checkpoint_steps"]),  # a training of few steps is logged too
        **keeping(of["keep"], of["checkpoint_steps"], measured=watched),
        # The knobs of the calibration term are for the methods that have that term.
        **acting(METHODS[of["method"]].calibration, of["trl"]),
    }


def _supervised(work: Work, of: Method, model: Any, tokenizer: Any) -> tuple[Any, _Data]:
    rows = list(read_records(work.input("teacher") / "sft.jsonl", SftRow))
    fit = _examples(work, tokenizer, rows)
    found = chosen_rows(fit, work.settings["rows"], work.settings["seed"])
    watched = "traces" if of.stage == "sft" else "reasoning"
    validation: list[Example] = []
    if watched in work.stage.needs:
        validation = _examples(work, tokenizer, read_records(work.input(watched) / "outcome.jsonl", SftRow))
    trainer = SupervisedTrainer(
        _adapted(model, work),
        TrainingArguments(**_common(work, watched=bool(validation))),
        found,
        tokenizer,
        validation=validation,
        epsilon=of.label_smoothing,
        bins=_bins(work, tokenizer) if of.rcft_weight else None,
        rcft_weight=of.rcft_weight,
    )
    return trainer, _Data(len(found), _tokens(found), {"rows": len(rows) - len(fit)})


def _bins(work: Work, tokenizer: Any) -> RcftBins:
    """RCFT's E-step on the model's own greedy answers to the validation questions."""
    of = work.settings["evaluation"]
    questions = read_questions(work.input("held_out") / "validation.jsonl")

    def answers(model: Any) -> tuple[list[float | None], list[bool]]:
        found = evaluate_model(
            model,
            tokenizer,
            questions,
            batch_size=of["batch_size"],
            max_tokens=of["max_tokens"],
            reasoning=of["reasoning"],
        )
        return [label_share(one) for one in found], [is_correct(one) for one in found]

    return RcftBins(answers)


def label_share(prediction: Prediction) -> float | None:
    """The answer's probability among the labels; None where the form it was written in does not tell of every label."""
    if prediction.label is None or prediction.label_logprobs is None:
        return None
    return confidence_at(prediction, kind="normalized")


def _preference(work: Work, of: Method, model: Any, tokenizer: Any) -> tuple[Any, _Data]:
    rows = list(read_records(work.input("teacher") / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("the teacher gave no pair: no question has enough right and wrong answers")
    for labels in dict.fromkeys(row.labels for row in rows):
        check_labels(tokenizer, labels)
    # Long pairs go before the draw, so that 500 pairs are 500 that are trained on, the same for every method.
    context = work.settings["context"]
    tokenised = [preference_columns(tokenizer, row) for row in rows]
    fit = fitting(tokenised, context, pair_tokens, lambda columns: str(columns["question"]))
    limits = [n for n in (work.settings["pairs"], work.settings["rows"]) if n is not None]
    columns = chosen_rows(fit, min(limits, default=None), work.settings["seed"])
    dropped = {"pairs": len(rows) - len(fit)}
    stream: Sequence[Example] = ()
    if of.stream != "none":
        sampled = list(read_records(work.input("stream") / "outcome.jsonl", SftRow))
        found = sampled if of.stream == "sampled" else right_responses(work, sampled)
        stream = _examples(work, tokenizer, found)
        dropped["stream"] = len(sampled) - len(stream)
    config = CATTOConfig(
        **{
            "max_length": work.settings["context"],
            "precompute_ref_log_probs": True,
            "calibration": of.calibration,
            "prefix_sharing": work.settings["prefix_sharing"],
            **_outcome_knobs(work, of),
            **({} if of.preference_loss else {"loss_weights": [0.0]}),
            **_common(work),
        }
    )
    trainer = CATTOTrainer(
        _adapted(model, work),
        None,
        config,
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
        validation=_examples(work, tokenizer, read_records(work.input("reasoning") / "outcome.jsonl", SftRow)),
        outcome_examples=stream,
    )
    tokens = sum(2 * len(c["prompt_ids"]) + len(c["chosen_ids"]) + len(c["rejected_ids"]) for c in columns)
    if stream:  # so many rows of the stream beside every pair, up to the label where nothing behind it is computed
        each = [one.tokens if of.stream == "right" else len(one.row.prompt) + one.label.at for one in stream]
        tokens += round(config.outcome_rows_per_pair * len(columns) * sum(each) / len(each))
    return trainer, _Data(len(columns), tokens, dropped)


def _outcome_knobs(work: Work, of: Method) -> dict[str, Any]:
    """The recipe's `outcome` block as the trainer's knobs, as far as this method reads it."""
    if "outcome" not in work.settings:
        return {}
    outcome = work.settings["outcome"]
    knobs = acting(of.calibration, {"outcome_score": outcome["score"]})
    return knobs | ({"outcome_rows_per_pair": outcome["rows_per_pair"]} if of.stream != "none" else {})


def right_responses(work: Work, sampled: Sequence[SftRow]) -> list[SftRow]:
    """A right response to each question of the stream: a correct trace of the teacher or, answer first, the gold label.

    Questions that reason and that the teacher never got right have none.
    """
    traces: dict[str, SftRow] = {}
    for row in read_records(work.input("teacher") / "sft.jsonl", SftRow):
        traces.setdefault(row.question, row)
    found = []
    for row in sampled:
        if row.completion[-1].content == completion(None, row.label):
            answer = Message(role="assistant", content=completion(None, row.gold))
            found.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in traces:
            found.append(traces[row.question])
    return found


def _tokens(found: Sequence[Example]) -> int:
    return sum(one.tokens for one in found)


def _examples(work: Work, tokenizer: Any, rows: Any) -> list[Example]:
    return examples(tokenizer, rows, work.settings["context"])


def chosen_rows(rows: Any, limit: int | None, seed: int) -> list[Any]:
    """At most `limit` rows, drawn by seed and left in their order."""
    found = list(rows)
    if limit is None or limit >= len(found):
        return found
    return [found[n] for n in sorted(random.Random(seed).sample(range(len(found)), limit))]


def _adapted(model: Any, work: Work) -> Any:
    peft = work.settings["model"]["peft"]
    if peft is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **peft))


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save an ordinary checkpoint. An adapter is merged in fp32: in bf16 a small update would be rounded away."""
    if hasattr(model, "merge_and_unload"):
        model = model.float().merge_and_unload()
    with building(folder) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)


def history(logs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """What was measured at every checkpoint."""
    found = [entry for entry in logs if "eval_val_ece" in entry]
    return [
        {"step": entry["step"], **{name[5:]: value for name, value in entry.items() if name.startswith("eval_val_")}}
        for entry in found
    ]


def reward_accuracy(logs: Sequence[dict[str, Any]]) -> float | None:
    """Share of pairs in which the chosen response gained more than the rejected one, over the last quarter."""
    found = [entry["rewards/accuracies"] for entry in logs if "rewards/accuracies" in entry]
    last = found[-max(len(found) // 4, 1) :]
    return sum(last) / len(last) if last else None


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the seconds of training over all runs of a stage, tells progress and writes the stage's log."""

    def __init__(self, work: Work) -> None:
        self.work, self.began, self.file = work, time.monotonic(), work.out / "seconds.json"
        self.before = float(json.loads(self.file.read_text())) if self.file.exists() else 0.0
        self.note = ""

    def seconds(self) -> float:
        """Seconds so far."""
        return self.before + time.monotonic() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the display."""
        self.work.progress(state.global_step, state.max_steps, self.note)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write down what the trainer logs; keep the newest loss and validation numbers for the display."""
        logs = logs or {}
        logger.info("step %d of %d: %s", state.global_step, state.max_steps, json.dumps(logs, default=str))
        if "loss" in logs:
            self.note = f"loss {logs['loss']:.3f}"
        if "eval_val_ece" in logs:
            self.note = f"val acc {100 * logs['eval_val_accuracy']:.1f} ECE {100 * logs['eval_val_ece']:.1f}"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the seconds down, so that a kill loses only those since the checkpoint."""
        with replacing(self.file) as file:
            json.dump(self.seconds(), file)
