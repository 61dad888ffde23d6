"""Train a model: load the start model, train it, and save it with a description of the training run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pydantic import TypeAdapter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from catto.engines import check_hub
from catto.io.atomic import build_folder, write_text
from catto.io.record_files import read_records
from catto.pipeline import launch
from catto.pipeline.kinds.train import TrainingJob
from catto.pipeline.prepare_training import PreparedTraining, prepare_preference, prepare_supervised
from catto.pipeline.stage import write_json
from catto.prompts import JUDGEMENT_LABELS
from catto.recipe.settings import ModelSettings
from catto.records import SftRow
from catto.training.checkpoints import newest_complete
from catto.training.models import scratch_model, word_tokenizer

logger = logging.getLogger(__name__)
Progress = Callable[[int, int, str], None]  # called with the finished steps, all steps and a note


def start_training(job: TrainingJob, progress: Progress) -> None:
    """Train in this process or, if the recipe's `launch` block asks for several, in new processes.

    New processes read the job from job.json, which is written to the job's folder.

    Args:
        job: The training.
        progress: Called with the finished steps, all steps and a note.

    Raises:
        RuntimeError: A process failed.
        ValueError: This machine has too few GPUs for the `launch` block.
    """
    if job.settings.launch.processes == 1:
        train_method(job, progress)
        return
    torch.cuda.empty_cache()  # return the GPU memory that an engine of this process has used
    file = job.out / "job.json"
    file.write_bytes(TypeAdapter(TrainingJob).dump_json(job))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    command = launch.build_command(job.settings.launch, file, devices)
    launch.run_processes(command, progress)


def train_method(job: TrainingJob, progress: Progress) -> None:
    """Train in this process, which may be one of several; rank 0 writes the model and training.json.

    If an earlier process was killed during training, this one resumes from the newest complete checkpoint. The fields
    of training.json are those of `report.numbers.Training`.

    Args:
        job: The training.
        progress: Called with the finished steps, all steps and a note.
    """
    trains_on_pairs = job.settings.method.stage == "preference"
    # In training on pairs, the trainer itself adds the adapter that the recipe's `model.peft` describes.
    model, tokenizer = _load_start(job, with_adapter=not trains_on_pairs)
    if trains_on_pairs:
        prepared = prepare_preference(job, model, tokenizer)
    else:
        prepared = prepare_supervised(job, model, tokenizer)
    trainer = prepared.trainer
    _warn_of_repeated_rows(job, prepared)
    _refuse_adapter_on_tied_embedding(trainer.model)
    clock = _Clock(job, progress)
    _set_callbacks(trainer, clock)
    checkpoint = newest_complete(job.out / "checkpoints")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    gathered_weights = gather_weights(trainer)  # all ranks must call it
    if not trainer.is_world_process_zero():
        return
    trained = trainer.model
    if gathered_weights is not None:  # the model is split over the processes
        # Load a whole copy of the start model and fill in the trained weights. They may be those of an adapter, so the
        # copy needs the adapter in training on pairs too.
        trained, _ = _load_start(job, with_adapter=True)
        load_trained(trained, gathered_weights)
    save_model(trained, tokenizer, job.out / "model")
    write_json(job.out / "training.json", _describe_training(prepared, clock.seconds()))


def _set_callbacks(trainer: Any, clock: _Clock) -> None:
    """Let the clock log the training in place of Transformers' printer; send reliability diagrams to a tracker."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    has_tracker = bool(trainer.args.report_to)
    if has_tracker and trainer.validation:
        from catto.integrations.trainer_callback import ValidationReliability

        trainer.add_callback(ValidationReliability(trainer))


def _warn_of_repeated_rows(job: TrainingJob, prepared: PreparedTraining) -> None:
    """Warn if rows are repeated at the end of each epoch, so that all processes have equally many."""
    processes = job.settings.launch.processes
    rows_per_step = prepared.trainer.args.per_device_train_batch_size * processes
    repeated = -prepared.rows % rows_per_step  # number of rows up to the next multiple
    if processes > 1 and repeated:
        message = "%d rows are not a multiple of the batch; rows repeated at the end of each epoch: %d"
        logger.warning(message, prepared.rows, repeated)


def _refuse_adapter_on_tied_embedding(model: Any) -> None:
    """Raise ValueError if the input embedding has an adapter and shares its weights with the head."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    has_adapter = hasattr(embedding, "base_layer")
    if has_adapter and embedding.base_layer.weight is head.weight:
        raise ValueError("model.peft: merging an adapter of the input embedding would also change the head tied to it")


def _describe_training(prepared: PreparedTraining, seconds: float) -> dict[str, Any]:
    """Return the fields of training.json.

    Args:
        prepared: The training, whose trainer has finished.
        seconds: How long it took. If it was resumed, this includes the earlier runs, as the number of tokens does.
    """
    trainer = prepared.trainer
    state = trainer.state
    epochs = round(state.epoch, 4)
    return {
        "learning_rate": trainer.args.learning_rate,
        "seconds": round(seconds, 1),
        "tokens": round(prepared.tokens * epochs),
        "rows": prepared.rows,
        "dropped": prepared.dropped,
        "epochs": epochs,
        "steps": state.global_step,
        "kept_step": trainer.kept_step,  # the step whose weights were kept
        "kept_epochs": round(epochs * trainer.kept_step / state.global_step, 4),
        "reward_accuracy": _average_reward_accuracy(state.log_history),
        "history": _read_history(state.log_history),
    }


def _average_reward_accuracy(logs: Iterable[dict[str, float]]) -> float | None:
    """Return how often the chosen response had the higher reward, averaged over the last quarter of the logged values.

    Return None if no values were logged, as in training without pairs.
    """
    accuracies = [entry["rewards/accuracies"] for entry in logs if "rewards/accuracies" in entry]
    if not accuracies:
        return None
    last_quarter = accuracies[-max(len(accuracies) // 4, 1) :]
    return sum(last_quarter) / len(last_quarter)


def _read_history(logs: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Return the validation metrics of each step at which they were measured, with the last logged reward margin."""
    history: list[dict[str, float]] = []
    last_margin: dict[str, float] = {}  # empty until a margin is logged; stays empty without pairs
    for entry in logs:
        if "rewards/margins" in entry:
            last_margin = {"reward_margin": entry["rewards/margins"]}
        if "eval_val_ece" in entry:
            measured = {name.removeprefix("eval_"): value for name, value in entry.items() if "eval_val_" in name}
            history.append({"step": entry["step"], **measured, **last_margin})
    return history


# ---- the model ------------------------------------------------------------------------------------------------------


def _load_start(job: TrainingJob, *, with_adapter: bool = True) -> tuple[Any, Any]:
    """Return the model that this training starts from, and its tokenizer.

    The model is that of an earlier training, the recipe's own, or a new one with random weights.

    Args:
        job: The training.
        with_adapter: Whether to add the adapter that the recipe's `model.peft` describes, if there is one.
    """
    settings = job.settings.model
    if "start" in job.inputs:
        model, tokenizer = load_model(str(job.inputs["start"]), settings)
    elif settings.scratch is not None:
        tokenizer = _make_tokenizer(job.inputs["teacher"])
        model = scratch_model(tokenizer, settings.scratch, job.settings.seed)
    else:
        model, tokenizer = load_model(settings.path or "", settings)
    if with_adapter and settings.peft is not None:
        torch.manual_seed(job.settings.seed)  # the trainer sets the seed only after the adapter's weights are drawn
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings.peft))
    return model, tokenizer


def _make_tokenizer(folder: Path) -> Any:
    """Make the tokenizer of a model from scratch: one token per word in the teacher's rows."""
    rows = list(read_records(folder / "outcome.jsonl", SftRow))
    are_judgements = bool(rows) and rows[0].labels == JUDGEMENT_LABELS
    if are_judgements:  # they lack the words of the reasoning, unlike the rows of tasks with labels
        rows += read_records(folder / "sft.jsonl", SftRow)
    texts: list[str] = []
    labels_after_space: set[str] = set()  # as in `<answer> A`, which may occur in no row
    for row in rows:
        texts += [message.content for message in (*row.prompt, *row.completion)]
        labels_after_space.update(f" {label}" for label in row.labels)
    return word_tokenizer([*texts, *labels_after_space])


def load_model(path: str, settings: ModelSettings) -> tuple[Any, Any]:
    """Load a model in the recipe's precision, and its tokenizer with a padding token."""
    check_hub(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=settings.attention)
    return model, tokenizer


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model and its tokenizer as an ordinary checkpoint, atomically.

    An adapter is merged into the model in fp32: in bf16 a small update would be rounded away.
    """
    has_adapter = hasattr(model, "merge_and_unload")
    if has_adapter:
        model = model.float().merge_and_unload()
    with build_folder(folder) as unfinished:  # renamed to `folder` on a clean exit
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def gather_weights(trainer: Any) -> dict[str, torch.Tensor] | None:
    """Gather the trained weights of a model that is split over the processes; None if each has the whole model.

    All ranks must call it. Rank 0 gets the weights, the others an empty dictionary.
    """
    if trainer.is_deepspeed_enabled:
        return _gather_from_deepspeed(trainer)
    if trainer.is_fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(trainer.model, options=options)  # type: ignore[return-value]
    return None


def _gather_from_deepspeed(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's fp32 weights: those of a bf16 model are rounded."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights: dict[str, torch.Tensor] = {}
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            full_weight = safe_get_full_fp32_param(weight)  # all ranks must call it
            if trainer.is_world_process_zero():
                weights[name] = full_weight.cpu()
    return weights


def load_trained(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Copy the trained weights into the model that the training started from; frozen weights are not changed.

    Raises:
        RuntimeError: A trainable weight of the model is missing, or the model has no weight of a given name.
    """
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    differing = sorted(set(unexpected) | trainable.intersection(missing))
    if differing:
        raise RuntimeError(f"gathered weights that do not match the model: {len(differing)}, such as {differing[0]}")


# ---- time and progress ----------------------------------------------------------------------------------------------


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the seconds of training over all runs of a stage, reports progress, and logs what the trainer logs."""

    def __init__(self, job: TrainingJob, progress: Progress) -> None:
        self.progress = progress
        self.began = time.monotonic()
        self.file = job.out / "seconds.json"
        self.earlier_seconds = 0.0  # of runs that were killed, up to their last checkpoint
        if self.file.exists():
            self.earlier_seconds = float(json.loads(self.file.read_text()))
        self.note = ""

    def seconds(self) -> float:
        """Return the seconds so far, including those of earlier runs."""
        return self.earlier_seconds + time.monotonic() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress."""
        self.progress(state.global_step, state.max_steps, self.note)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Log what the trainer logs; keep the newest loss or validation numbers for the display."""
        logs = logs or {}
        logger.info("step %d of %d: %s", state.global_step, state.max_steps, json.dumps(logs, default=str))
        if "loss" in logs:
            self.note = f"loss {logs['loss']:.3f}"
        if "eval_val_ece" in logs:
            self.note = f"val acc {100 * logs['eval_val_accuracy']:.1f} ECE {100 * logs['eval_val_ece']:.1f}"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the seconds with the checkpoint: after a kill, the training resumes from both."""
        if state.is_world_process_zero:
            write_text(self.file, json.dumps(self.seconds()))
