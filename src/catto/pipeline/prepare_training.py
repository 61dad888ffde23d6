"""What a training trains: the trainer of a method, with its rows, its validation and its arguments."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from datasets import Dataset
from peft import LoraConfig

from catto.answer.tokens import check_labels
from catto.io.record_files import read_records
from catto.methods import Method, options_read_by
from catto.metrics.temperature import confidence_at
from catto.pipeline import launch
from catto.pipeline.kinds.questions import read_questions
from catto.pipeline.kinds.train import TrainingJob, TrainSettings
from catto.predict import evaluate_model
from catto.prompts import render_completion
from catto.records import Message, Prediction, PreferenceRow, SftRow
from catto.training.checkpoints import LAST, checkpoint_arguments
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
from catto.training.supervised import RcftBins, SupervisedConfig, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Whether the processes run on a GPU or the like: the arguments that are true there and false on a CPU. bf16 is what is
# computed; the weights have the recipe's dtype.
ON_ACCELERATORS = ("bf16", "gradient_checkpointing", "dataloader_pin_memory")
# PEFT's initialisations of an adapter that leave the model as it was.
NEUTRAL_STARTS = (True, "gaussian", "eva", "mica")


class PreparedTraining(NamedTuple):
    """A trainer that is ready to train.

    Attributes:
        trainer: A `CATTOTrainer` or a `SupervisedTrainer`.
        rows: Number of rows or pairs that it trains on.
        tokens: Tokens of an epoch.
        dropped: Number of rows left out, by their kind: those too long and, of a stream of right responses, the
            questions without one.
    """

    trainer: Any
    rows: int
    tokens: int
    dropped: dict[str, int]


def make_arguments(job: TrainingJob, *, monitored: bool = True) -> dict[str, Any]:
    """Return the training arguments that every method shares; the recipe's `trl` block overrides them.

    The batch size is that of one process. `check_launch` has refused a batch that the processes cannot share equally.

    monitored: whether there are held-out examples to choose the checkpoint by; otherwise the last one is kept.
    """
    settings = job.settings
    trainer_settings = settings.block
    is_accelerated = torch.accelerator.is_available()
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
        "use_cpu": not is_accelerated,
        **dict.fromkeys(ON_ACCELERATORS, is_accelerated),
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": min(10, trainer_settings.checkpoint_steps),  # a training of few steps is logged too
        **checkpoint_arguments(settings.keep, trainer_settings.checkpoint_steps, measured=monitored),
        **trainer_settings.trl,
    }
    per_process = launch.split_batch(arguments, settings.launch.processes)
    return {**arguments, **per_process}


# ---- supervised -----------------------------------------------------------------------------------------------------


def prepare_supervised(job: TrainingJob, model: Any, tokenizer: Any) -> PreparedTraining:
    """Prepare SFT, with or without smoothed labels, CFT or RCFT.

    Raises:
        ValueError: Every row is longer than the context, or there is none.
    """
    settings = job.settings
    method = settings.method
    has_rcft_term = method.rcft_weight > 0
    rows = list(read_records(job.inputs["teacher"] / "sft.jsonl", SftRow))
    short_enough = tokenize_responses(tokenizer, rows, settings.context)
    drawn = _draw_rows(short_enough, settings.block.rows, settings.seed)
    examples: Sequence[TokenizedRow]
    if has_rcft_term:  # it reads the label of every response
        examples = locate_labels(tokenizer, drawn)
    else:
        examples = [TokenizedRow(row.question, ids) for row, ids in drawn]
    # Before SFT no model has been trained to sample reasoning from: it is monitored on the teacher's traces. Stored
    # responses of a teacher have none for validation questions.
    validation_role = "traces" if method.stage == "sft" else "reasoning"
    validation: list[Example] = []
    if validation_role in job.inputs:
        validation = _read_validation(job, validation_role, tokenizer)
    loss_options: dict[str, Any] = {"epsilon": method.label_smoothing, "rcft_weight": method.rcft_weight}
    if has_rcft_term:
        loss_options["bins"] = _make_rcft_bins(job, tokenizer)
    config = SupervisedConfig(**make_arguments(job, monitored=bool(validation)))
    trainer = SupervisedTrainer(model, config, examples, tokenizer, validation=validation, **loss_options)
    return PreparedTraining(
        trainer,
        rows=len(examples),
        tokens=sum(example.tokens for example in examples),
        dropped={"rows": len(rows) - len(short_enough)},
    )


def _read_validation(job: TrainingJob, role: str, tokenizer: Any) -> list[Example]:
    rows = read_records(job.inputs[role] / "outcome.jsonl", SftRow)
    return make_examples(tokenizer, rows, job.settings.context)


def _draw_rows(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Return at most `limit` rows, drawn by seed and left in their order; None returns all."""
    if limit is None or limit >= len(rows):
        return list(rows)
    numbers = random.Random(seed).sample(range(len(rows)), limit)
    return [rows[number] for number in sorted(numbers)]


def _make_rcft_bins(job: TrainingJob, tokenizer: Any) -> RcftBins:
    """Return RCFT's confidence bins, estimated on the model's own greedy answers to the validation questions."""
    questions = read_questions(job.inputs["held_out"] / "validation.jsonl")
    answering = job.settings.answering
    assert answering is not None  # `Graph.plan_training` sets it for CFT and RCFT

    def answer_questions(model: Any) -> tuple[list[float | None], list[bool]]:
        """Return the confidence of each answer and whether it is right; None as in `compute_label_share`."""
        predictions = evaluate_model(
            model,
            tokenizer,
            questions,
            batch_size=answering.evaluation.batch_size,
            max_tokens=answering.evaluation.max_tokens,
            reasoning=answering.reasoning,
        )
        shares = [compute_label_share(prediction) for prediction in predictions]
        return shares, [prediction.is_correct for prediction in predictions]

    return RcftBins(answer_questions)


def compute_label_share(prediction: Prediction) -> float | None:
    """Return the answer's probability among the labels, at temperature 1.

    None if the response gives no label, or if not every label has a probability in the form in which it was written.
    """
    if prediction.label is None or prediction.label_logprobs is None:
        return None
    return confidence_at(prediction, kind="normalized")


# ---- preferences ----------------------------------------------------------------------------------------------------


def prepare_preference(job: TrainingJob, model: Any, tokenizer: Any) -> PreparedTraining:
    """Prepare a training on pairs, with its calibration term and the stream that the term reads.

    Raises:
        ValueError: There is no pair, every pair is longer than the context, or so is every response of the stream.
            Also if tokens do not tell the labels of a question apart.
    """
    settings = job.settings
    method = settings.method
    pairs, dropped_pairs = _read_pairs(job, tokenizer)
    dropped = {"pairs": dropped_pairs}
    stream: list[Example] = []
    if method.stream != "none":
        stream, dropped["stream"] = _read_stream_examples(job, tokenizer)
    # The later options win: the recipe's `trl` over those of the term, and the method's loss over the recipe.
    config = CATTOConfig(**(_list_term_options(settings) | make_arguments(job) | _list_loss_options(method)))
    adapter: dict[str, Any] = {}
    if settings.model.peft is not None:
        # Of an adapted model TRL would train against a second, frozen adapter, which checkpoints would hold too.
        adapter["peft_config"] = _make_adapter(settings.model.peft)
    trainer = CATTOTrainer(
        model,
        args=config,
        # On disk, where all processes find the reference log-probabilities that rank 0 stores beside them.
        train_dataset=Dataset.from_generator(lambda: iter(pairs), cache_dir=str(job.out / "checkpoints")),
        processing_class=tokenizer,
        validation=_read_validation(job, "reasoning", tokenizer),
        outcome_examples=stream,
        **adapter,
    )
    tokens = sum(_count_forward_tokens(pair) for pair in pairs)
    if stream:
        stream_rows_per_epoch = config.outcome_rows_per_pair * len(pairs)
        stream_tokens = _count_stream_tokens(stream, method)
        tokens += round(stream_rows_per_epoch * stream_tokens / len(stream))
    return PreparedTraining(trainer, rows=len(pairs), tokens=tokens, dropped=dropped)


def _read_pairs(job: TrainingJob, tokenizer: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the tokenized pairs to train on, and how many pairs were too long. Raises as `prepare_preference`."""
    settings = job.settings
    rows = list(read_records(job.inputs["teacher"] / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("the teacher gave no pair: no question has enough right and wrong answers")
    for labels in dict.fromkeys(row.labels for row in rows):
        if labels:
            check_labels(tokenizer, labels)
    # Long pairs are dropped before the draw, so that every drawn pair is trained on, the same ones by every method.
    short_enough = drop_too_long(
        [preference_columns(tokenizer, row) for row in rows],
        settings.context,
        length_of=count_pair_tokens,
        name_of=lambda pair: str(pair["question"]),
    )
    method_limit = settings.pairs
    recipe_limit = settings.block.rows
    limits = [limit for limit in (method_limit, recipe_limit) if limit is not None]
    pairs = _draw_rows(short_enough, min(limits, default=None), settings.seed)
    return pairs, len(rows) - len(short_enough)


def _read_stream_examples(job: TrainingJob, tokenizer: Any) -> tuple[list[Example], int]:
    """Return the examples of the stream, and how many of its rows gave none.

    A row gives none if its response is too long. Where right responses are replayed, its question may also have none.
    """
    rows = _read_stream(job)
    responses = rows
    if job.settings.method.stream == "right":
        responses = find_right_responses(job, rows)
    examples = make_examples(tokenizer, responses, job.settings.context)
    return examples, len(rows) - len(examples)


def _list_term_options(settings: TrainSettings) -> dict[str, Any]:
    """Return the options of the calibration term, and those that every training on pairs has.

    Options that the term does not read are left out: `CATTOConfig` would refuse them.
    """
    method = settings.method
    options: dict[str, Any] = {
        "calibration": method.calibration,
        "prefix_sharing": settings.prefix_sharing,
        "max_length": settings.context,
        "precompute_ref_log_probs": True,
    }
    outcome = settings.outcome
    if outcome is not None:
        options |= options_read_by(method.calibration, {"outcome_score": outcome.score})
        if outcome.target != "gold":
            options["outcome_target"] = outcome.target
        if method.stream != "none":
            options["outcome_rows_per_pair"] = outcome.rows_per_pair
    return options


def _make_adapter(peft: dict[str, Any]) -> LoraConfig:
    """Return the adapter; ValueError if its initialisation changes the model."""
    initialisation = peft.get("init_lora_weights", True)
    if initialisation not in NEUTRAL_STARTS:
        reason = "the reference is the model without its adapter, which must be the start"
        raise ValueError(f"model.peft.init_lora_weights is {initialisation!r}, expected true or gaussian: {reason}")
    return LoraConfig(task_type="CAUSAL_LM", **peft)


def _count_forward_tokens(pair: Mapping[str, Any]) -> int:
    """Count the tokens of both sequences of a pair: each response with the prompt before it."""
    return 2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"])


def _count_stream_tokens(stream: Iterable[Example], method: Method) -> int:
    """Count the tokens of the stream: of whole responses where they are replayed, else up to the label."""
    if method.stream == "right":
        return sum(example.tokens for example in stream)
    return sum(len(example.row.prompt) + example.label.at for example in stream)


def _read_stream(job: TrainingJob) -> list[SftRow]:
    """Read the rows of the stream; where votes are the target, only those that have votes.

    Raises:
        ValueError: Votes are the target and no row has them.
    """
    path = job.inputs["stream"] / "stream.jsonl"  # one row per question, with votes
    if not path.exists():
        path = job.inputs["stream"] / "outcome.jsonl"  # rows without votes
    rows = list(read_records(path, SftRow))
    needs_votes = job.settings.outcome is not None and job.settings.outcome.target != "gold"
    if not needs_votes:
        return rows
    voted = [row for row in rows if row.votes is not None]
    if not voted:
        raise ValueError("no response of the stream can be read, so no question has votes")
    left_out = len(rows) - len(voted)
    if left_out:
        logger.warning("left out %d of %d questions: none of their responses can be read", left_out, len(rows))
    return voted


def _list_loss_options(method: Method) -> dict[str, Any]:
    """Return the options of the preference loss that belong to the method, whatever the recipe's `trl` says."""
    if not method.preference_loss:  # TRL has no empty sum of losses: its loss counts 0 times
        return {"loss_type": ["sigmoid"], "loss_weights": [0.0]}
    options: dict[str, Any] = {}
    if method.loss_type:
        options["loss_type"] = list(method.loss_type)
        options["label_smoothing"] = method.label_smoothing
    if method.preference_tokens != "all":
        options["preference_tokens"] = method.preference_tokens
    return options


def find_right_responses(job: TrainingJob, sampled: Iterable[SftRow]) -> list[SftRow]:
    """Return a right response to each question of the stream, in the form of the sampled one.

    A response that is only an answer becomes the gold label. One with reasoning becomes the teacher's first correct
    trace; a question to which the teacher has none is left out.
    """
    traces: dict[str, SftRow] = {}
    for row in read_records(job.inputs["teacher"] / "sft.jsonl", SftRow):
        traces.setdefault(row.question, row)  # of several traces the first
    responses = []
    for row in sampled:
        is_only_answer = row.completion[-1].content == render_completion(None, row.label)
        if is_only_answer:
            answer = Message(role="assistant", content=render_completion(None, row.gold))
            responses.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in traces:
            responses.append(traces[row.question])
    return responses
