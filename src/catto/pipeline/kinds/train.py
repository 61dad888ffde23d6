"""The training stage: start model and rows -> a trained model in `model/`, and how it went in training.json."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from pydantic import TypeAdapter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from catto.answer.tokens import check_labels
from catto.engines import check_hub
from catto.errors import DataError
from catto.io.atomic import build_folder, write_text
from catto.io.record_files import read_records, write_records
from catto.methods import Method, options_read_by
from catto.metrics.temperature import confidence_at
from catto.pipeline import launch
from catto.pipeline.kinds.steps import read_questions
from catto.pipeline.run import logging_to
from catto.pipeline.stage import LOG, BaseSettings, Stage, TrainSettings, Work, place, write
from catto.predict import evaluate_model
from catto.prompts import JUDGEMENT_LABELS, render_completion
from catto.recipe.settings import LaunchSettings, ModelSettings, ScratchModel
from catto.records import Message, Prediction, PreferenceRow, SftRow
from catto.training.checkpoints import LAST, checkpoint_arguments, newest_complete
from catto.training.config import CATTOConfig
from catto.training.examples import (
    Example,
    TokenizedRow,
    count_pair_tokens,
    drop_too_long,
    locate_labels,
    make_examples,
    preference_columns,
    tokenize_responses,
)
from catto.training.models import scratch_model, word_tokenizer
from catto.training.supervised import RcftBins, SupervisedConfig, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What determines a training for each of its processes: settings, the folders that it reads, where it writes."""

    settings: TrainSettings
    inputs: dict[str, Path]  # by role; `start` is the model's own folder
    out: Path


# A trainer, the rows or pairs that it trains on, their tokens an epoch, and how many were too long, by kind.
Prepared: TypeAlias = tuple[Any, int, int, dict[str, int]]


def run_train(work: Work[TrainSettings]) -> None:
    """Train one method, resuming from its newest complete checkpoint; with `launch`, in as many processes."""
    job = job_of(work)
    # training.json is written last: where it exists, a run was killed while it deleted the checkpoints.
    if not (job.out / "training.json").exists():
        with _tensorboard_folder(work):
            _train_or_launch(job, work.progress)
    shutil.rmtree(job.out / "checkpoints", ignore_errors=True)  # they are several times the model


def _train_or_launch(job: Job, progress: Callable[[int, int, str], None]) -> None:
    """Train in this process, or in as many as `launch` says."""
    if job.settings.launch.processes == 1:
        train(job, progress)
        return
    torch.cuda.empty_cache()  # what an engine of this process has left
    file = job.out / "job.json"
    file.write_bytes(TypeAdapter(Job).dump_json(job))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    launch.start(launch.command(job.settings.launch, file, devices), progress)


@contextmanager
def _tensorboard_folder(work: Work[TrainSettings]) -> Iterator[None]:
    """Have TensorBoard's files written next to the stages: those in a checkpoint folder are deleted with it."""
    variable = "TENSORBOARD_LOGGING_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(work.root / "tensorboard" / place(work.root, work.stage).name)
    try:
        yield
    finally:
        del os.environ[variable]


def run_base(work: Work[BaseSettings]) -> None:
    """Store the given model as the trainings would load it, where the other models are stored too."""
    model, tokenizer = load_model(work.settings.model.path or "", work.settings.model)
    _save(model, tokenizer, work.out / "model")


def job_of(work: Work[TrainSettings]) -> Job:
    """Return what a training stage does."""
    inputs = {role: work.model("start") if role == "start" else work.input(role) for role in work.stage.needs}
    return Job(work.settings, inputs, work.out)


def train(job: Job, progress: Callable[[int, int, str], None]) -> None:
    """Train, alone or as one of the processes that share a training; rank 0 writes the model and training.json.

    The fields of training.json are those of `report.numbers.Training`.
    """
    on_pairs = job.settings.method.stage == "preference"
    model, tokenizer = _start(job, adapted=not on_pairs)
    trainer, rows, tokens, dropped = (_preference if on_pairs else _supervised)(job, model, tokenizer)
    processes = job.settings.launch.processes
    if processes > 1 and (filled := -rows % (trainer.args.per_device_train_batch_size * processes)):
        logger.warning("%d rows are no multiple of the batch: each epoch ends with %d rows again", rows, filled)
    embedding, head = trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()
    if hasattr(embedding, "base_layer") and embedding.base_layer.weight is head.weight:
        raise ValueError("model.peft: an adapter of the input embedding would, once merged, move the head tied to it")
    clock = _Clock(job, progress)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    if trainer.args.report_to and trainer.validation:
        from catto.integrations.trainer_callback import ValidationReliability

        trainer.add_callback(ValidationReliability(trainer))
    checkpoint = newest_complete(job.out / "checkpoints")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    weights = gathered(trainer)
    if not trainer.is_world_process_zero():
        return
    model = trainer.model
    if weights is not None:
        model, _ = _start(job)
        load_trained(model, weights)
    _save(model, tokenizer, job.out / "model")
    state, logs = trainer.state, trainer.state.log_history
    epochs = round(state.epoch, 4)
    # The share of pairs in which the chosen response gained more than the rejected one, over the last quarter.
    rewards = [entry["rewards/accuracies"] for entry in logs if "rewards/accuracies" in entry]
    rewards = rewards[-max(len(rewards) // 4, 1) :]
    training = {
        "learning_rate": trainer.args.learning_rate,
        "seconds": round(clock.seconds(), 1),
        "tokens": round(tokens * epochs),
        "rows": rows,
        "dropped": dropped,
        "epochs": epochs,
        "steps": state.global_step,
        "kept_step": trainer.kept_step,
        "kept_epochs": round(epochs * trainer.kept_step / state.global_step, 4),
        "reward_accuracy": sum(rewards) / len(rewards) if rewards else None,
        "history": _history(logs),
    }
    write(job.out / "training.json", training)


def _history(logs: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Return what was measured on validation, step by step, with the reward margin that was logged last before it."""
    history, margin = list[dict[str, float]](), dict[str, float]()
    for entry in logs:
        if "rewards/margins" in entry:
            margin = {"reward_margin": entry["rewards/margins"]}
        if "eval_val_ece" in entry:
            measured = {name.removeprefix("eval_"): value for name, value in entry.items() if "eval_val_" in name}
            history.append({"step": entry["step"], **measured, **margin})
    return history


def gathered(trainer: Any) -> dict[str, torch.Tensor] | None:
    """Return the trained weights, on rank 0, of a model that the processes hold in pieces; None of a whole one."""
    if trainer.is_deepspeed_enabled:
        from deepspeed.utils import safe_get_full_fp32_param

        # The optimizer's: those of a model in bf16 are rounded.
        weights: dict[str, torch.Tensor] = {}
        for name, weight in trainer.model.named_parameters():
            if weight.requires_grad:
                whole = safe_get_full_fp32_param(weight)  # with the pieces of all ranks
                weights |= {name: whole.cpu()} if trainer.is_world_process_zero() else {}
        return weights
    if trainer.is_fsdp_enabled:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(trainer.model, options=options)  # type: ignore[return-value]
    return None


def load_trained(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Put the trained weights into the model that the training started from; the others are as they started."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if strange := sorted({*unexpected} | trained & {*missing}):
        raise RuntimeError(f"the gathered weights are not those of the model: {len(strange)} differ, as {strange[0]}")


def _start(job: Job, *, adapted: bool = True) -> tuple[Any, Any]:
    """Return the model that this training starts from, `adapted` by what `model.peft` says, and its tokenizer."""
    settings, started = job.settings.model, "start" in job.inputs
    if settings.scratch is not None and not started:
        # The first file has every word of tasks with labels. Rows that judge an answer lack the words of its reasoning.
        rows = list(read_records(job.inputs["teacher"] / "outcome.jsonl", SftRow))
        if rows and rows[0].labels == JUDGEMENT_LABELS:
            rows += read_records(job.inputs["teacher"] / "sft.jsonl", SftRow)
        texts = [message.content for row in rows for message in (*row.prompt, *row.completion)]
        answers = {f" {label}" for row in rows for label in row.labels}  # `<answer> A`: words that no row may have
        tokenizer = word_tokenizer([*texts, *answers])
        model: Any = scratch_model(tokenizer, settings.scratch, job.settings.seed)
    else:
        path = str(job.inputs["start"]) if started else settings.path
        model, tokenizer = load_model(path or "", settings)
    if adapted and settings.peft is not None:
        torch.manual_seed(job.settings.seed)  # the trainer's comes too late for the adapter's random weights
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings.peft))
    return model, tokenizer


def load_model(path: str, settings: ModelSettings) -> tuple[Any, Any]:
    """Load a model in the recipe's precision, and its tokenizer with a token for padding."""
    check_hub(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=settings.attention)
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save an ordinary checkpoint. An adapter is merged in fp32: in bf16 a small update would be rounded away."""
    if hasattr(model, "merge_and_unload"):
        model = model.float().merge_and_unload()
    with build_folder(folder) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)


def _arguments(job: Job, *, monitored: bool = True) -> dict[str, Any]:
    """Return the training arguments that every method shares; the recipe's `trl` block overrides them.

    monitored: whether there are held-out examples to choose the checkpoint by; otherwise the last one is kept.
    """
    settings, accelerated = job.settings, torch.accelerator.is_available()
    block = settings.block
    if not monitored and settings.keep != LAST:
        logger.warning("keep is %s, but nothing is held out to measure it on: the last step is kept", settings.keep)
    arguments = {
        "output_dir": str(job.out / "checkpoints"),
        "seed": settings.seed,
        "data_seed": settings.seed,
        "learning_rate": settings.learning_rate,
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "lr_scheduler_type": "linear",
        "use_cpu": not accelerated,
        # bf16: what is computed; the weights have the recipe's dtype
        **dict.fromkeys(("bf16", "gradient_checkpointing", "dataloader_pin_memory"), accelerated),
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": min(10, block.checkpoint_steps),  # a training of few steps is logged too
        **checkpoint_arguments(settings.keep, block.checkpoint_steps, measured=monitored),
        **block.trl,
    }
    return {**arguments, **launch.shared(arguments, settings.launch.processes)}


# ---- before anything runs -------------------------------------------------------------------------------------------

# Keywords that name parts or tokens of the real model, say how processes share it, or compile it.
_NOT_FOR_A_TOY = {
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "modules_to_save",
    "trainable_token_indices",
}
_NOT_FOR_A_TOY |= {
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "rank_pattern",
    "alpha_pattern",
    "pad_token",
}
_NOT_FOR_A_TOY |= {"router_aux_loss_coef", "fsdp", "fsdp_config", "deepspeed", "torch_compile", "torch_compile_backend"}
_ONE_STEP = {"max_steps": 1, "report_to": "none", "disable_tqdm": True, "dataloader_drop_last": False}
_ONE_STEP |= {"padding_free": False, "optim_target_modules": "all-linear"}


def rehearse(source: str, stages: Iterable[Stage[TrainSettings]]) -> None:
    """Train each method for a step on a toy model; DataError, in a library's words, for a block that it refuses.

    Otherwise that would be known after the teacher was paid and the models to start from were trained.
    """
    # With reasoning that differs: some losses read nothing else.
    right, wrong = ((Message(role="assistant", content=render_completion(label, label)),) for label in "AB")
    row: dict[str, Any] = {"prompt": (Message(role="user", content="A\nB"),), "question": "q", "task": "t"}
    row |= {"labels": ("A", "B"), "gold": "A", "correctness_rate": 0.5}
    pair = PreferenceRow(**row, chosen=right, rejected=wrong, chosen_label="A", rejected_label="B")
    trace = SftRow(**row, completion=right, label="A")
    toy = ScratchModel(layers=1, width=8, heads=1, intermediate=8, positions=64)
    # One process and the plain layout of a batch: neither is a library's keyword.
    plain: dict[str, Any] = {"context": toy.positions, "prefix_sharing": False, "launch": LaunchSettings()}
    with tempfile.TemporaryDirectory() as name, logging_to(Path(name) / LOG):
        voted = trace.model_copy(update={"votes": {"A": 0.5, "B": 0.5}})
        for file, one in (("preferences", pair), ("sft", trace), ("outcome", trace), ("stream", voted)):
            write_records(Path(name, f"{file}.jsonl"), [one] * 4)
        for stage in {stage.settings.name: stage for stage in stages}.values():
            settings, block, peft = stage.settings, stage.settings.block, stage.settings.model.peft
            trl, adapter = (
                {key: given[key] for key in given.keys() - _NOT_FOR_A_TOY} for given in (block.trl, peft or {})
            )
            plain["block"] = block.model_copy(update={"checkpoint_steps": 1, "trl": {**trl, **_ONE_STEP}})
            plain["model"] = ModelSettings(scratch=toy, peft=adapter if peft else None)
            plain["method"] = replace(settings.method, rcft_weight=0.0)  # RCFT would generate
            inputs = {role: Path(name) for role in stage.needs if role != "start"}
            try:
                for tracker in get_reporting_integration_callbacks(trl.get("report_to")):
                    tracker()  # says if its library is missing
                train(Job(replace(settings, **plain), inputs, Path(name, settings.name)), lambda *_: None)
            except Exception as error:
                kind = f"{settings.method.stage} ({settings.name}): {type(error).__name__}"
                raise DataError(source, None, f"{kind}: {error}") from error


# ---- supervised -----------------------------------------------------------------------------------------------------


def _supervised(job: Job, model: Any, tokenizer: Any) -> Prepared:
    settings, method = job.settings, job.settings.method
    rows = list(read_records(job.inputs["teacher"] / "sft.jsonl", SftRow))
    fit = tokenize_responses(tokenizer, rows, settings.context)
    drawn = _drawn(fit, settings.block.rows, settings.seed)
    examples: Sequence[TokenizedRow]
    if method.rcft_weight:
        examples = locate_labels(tokenizer, drawn)
    else:
        examples = [TokenizedRow(row.question, ids) for row, ids in drawn]
    watched = "traces" if method.stage == "sft" else "reasoning"
    validation = _validation(job, watched, tokenizer) if watched in job.inputs else []
    config = SupervisedConfig(**_arguments(job, monitored=bool(validation)))
    terms: dict[str, Any] = {"epsilon": method.label_smoothing, "rcft_weight": method.rcft_weight}
    terms |= {"bins": _bins(job, tokenizer)} if method.rcft_weight else {}
    trainer = SupervisedTrainer(model, config, examples, tokenizer, validation=validation, **terms)
    tokens = sum(example.tokens for example in examples)
    return trainer, len(examples), tokens, {"rows": len(rows) - len(fit)}


def _validation(job: Job, role: str, tokenizer: Any) -> list[Example]:
    return make_examples(tokenizer, read_records(job.inputs[role] / "outcome.jsonl", SftRow), job.settings.context)


def _drawn(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Return at most `limit` rows, drawn by seed and left in their order."""
    if limit is not None and limit < len(rows):
        return [rows[number] for number in sorted(random.Random(seed).sample(range(len(rows)), limit))]
    return list(rows)


def _bins(job: Job, tokenizer: Any) -> RcftBins:
    """Return RCFT's E-step on the model's own greedy answers to the validation questions."""
    questions = read_questions(job.inputs["held_out"] / "validation.jsonl")
    answering = job.settings.answering
    assert answering is not None  # the graph gives it to RCFT
    evaluation = answering.evaluation

    def answers(model: Any) -> tuple[list[float | None], list[bool]]:
        options = {"batch_size": evaluation.batch_size, "max_tokens": evaluation.max_tokens}
        predictions = evaluate_model(model, tokenizer, questions, **options, reasoning=answering.reasoning)
        return list(map(label_share, predictions)), [prediction.is_correct for prediction in predictions]

    return RcftBins(answers)


def label_share(prediction: Prediction) -> float | None:
    """Return the answer's probability among the labels; None where not every label has one in the form it took."""
    if prediction.label is None or prediction.label_logprobs is None:
        return None
    return confidence_at(prediction, kind="normalized")


# ---- preferences ----------------------------------------------------------------------------------------------------


def _preference(job: Job, model: Any, tokenizer: Any) -> Prepared:
    settings, method = job.settings, job.settings.method
    rows = list(read_records(job.inputs["teacher"] / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("the teacher gave no pair: no question has enough right and wrong answers")
    for labels in dict.fromkeys(row.labels for row in rows):
        if labels:
            check_labels(tokenizer, labels)
    # Long pairs are dropped before the draw, so that all 500 drawn pairs are trained on, the same for every method.
    pairs = [preference_columns(tokenizer, row) for row in rows]
    fit = drop_too_long(
        pairs, settings.context, length_of=count_pair_tokens, name_of=lambda pair: str(pair["question"])
    )
    limits = [limit for limit in (settings.pairs, settings.block.rows) if limit is not None]
    columns = _drawn(fit, min(limits, default=None), settings.seed)
    dropped = {"pairs": len(rows) - len(fit)}
    stream: list[Example] = []
    if method.stream != "none":
        sampled = _read_stream(job)
        responses = sampled if method.stream == "sampled" else right_responses(job, sampled)
        stream = make_examples(tokenizer, responses, settings.context)
        dropped["stream"] = len(sampled) - len(stream)
    options: dict[str, Any] = {"calibration": method.calibration, "prefix_sharing": settings.prefix_sharing}
    options |= {"max_length": settings.context, "precompute_ref_log_probs": True}
    if settings.outcome is not None:
        options |= options_read_by(method.calibration, {"outcome_score": settings.outcome.score})
        if settings.outcome.target != "gold":
            options["outcome_target"] = settings.outcome.target
        if method.stream != "none":
            options["outcome_rows_per_pair"] = settings.outcome.rows_per_pair
    config = CATTOConfig(**(options | _arguments(job) | _own_loss(method)))
    # On disk, where all processes find the reference log-probabilities that rank 0 stores beside them.
    rows_on_disk = Dataset.from_generator(lambda: iter(columns), cache_dir=str(job.out / "checkpoints"))
    more: dict[str, Any] = {"validation": _validation(job, "reasoning", tokenizer), "outcome_examples": stream}
    if (peft := settings.model.peft) is not None:
        if (kind := peft.get("init_lora_weights", True)) not in (True, "gaussian", "eva", "mica"):
            told = "expected true or gaussian: the reference is the model without its adapter, which must be the start"
            raise ValueError(f"model.peft.init_lora_weights is {kind!r}, {told}")
        # Of an adapted model TRL would train against a second, frozen adapter, which checkpoints would hold too.
        more["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **peft)
    trainer = CATTOTrainer(model, None, config, train_dataset=rows_on_disk, processing_class=tokenizer, **more)
    tokens = sum(2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in columns)
    if stream:  # so many rows of the stream beside every pair, up to the label where the loss reads nothing after it
        each = [row.tokens if method.stream == "right" else len(row.row.prompt) + row.label.at for row in stream]
        tokens += round(config.outcome_rows_per_pair * len(columns) * sum(each) / len(each))
    return trainer, len(columns), tokens, dropped


def _read_stream(job: Job) -> list[SftRow]:
    """Read the rows of the stream; where votes are the target, those that have them."""
    with_votes = job.inputs["stream"] / "stream.jsonl"  # one row per question; otherwise the rows have no votes
    path = with_votes if with_votes.exists() else job.inputs["stream"] / "outcome.jsonl"
    rows = list(read_records(path, SftRow))
    if job.settings.outcome is None or job.settings.outcome.target == "gold":
        return rows
    voted = [row for row in rows if row.votes is not None]
    if not voted:
        raise ValueError("no response of the stream can be read, so no question has votes")
    left_out = len(rows) - len(voted)
    if left_out:
        logger.warning("left out %d of %d questions: none of their responses can be read", left_out, len(rows))
    return voted


def _own_loss(method: Method) -> dict[str, Any]:
    """Return the options of the preference loss that belong to the method, whatever the recipe's `trl` says."""
    if not method.preference_loss:
        return {"loss_type": ["sigmoid"], "loss_weights": [0.0]}
    options: dict[str, Any] = {}
    if method.loss_type:
        options["loss_type"] = list(method.loss_type)
        options["label_smoothing"] = method.label_smoothing
    if method.preference_tokens != "all":
        options["preference_tokens"] = method.preference_tokens
    return options


def right_responses(job: Job, sampled: Iterable[SftRow]) -> list[SftRow]:
    """Return a right response to each question of the stream: a correct trace, or the gold label if answers come first.

    A question with reasoning that the teacher never got right has none.
    """
    # of several traces the first
    traces = {row.question: row for row in [*read_records(job.inputs["teacher"] / "sft.jsonl", SftRow)][::-1]}
    responses = []
    for row in sampled:
        if row.completion[-1].content == render_completion(None, row.label):
            answer = Message(role="assistant", content=render_completion(None, row.gold))
            responses.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in traces:
            responses.append(traces[row.question])
    return responses


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Counts the seconds of training over all runs of a stage, reports progress and writes the stage's log."""

    def __init__(self, job: Job, progress: Callable[[int, int, str], None]) -> None:
        self.progress, self.began, self.file = progress, time.monotonic(), job.out / "seconds.json"
        self.before = float(json.loads(self.file.read_text())) if self.file.exists() else 0.0
        self.note = ""

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.before + time.monotonic() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress."""
        self.progress(state.global_step, state.max_steps, self.note)

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
        if state.is_world_process_zero:
            write_text(self.file, json.dumps(self.seconds()))
