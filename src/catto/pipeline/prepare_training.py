"""Prepare a training run: read its rows and validation examples, and build the trainer of its method."""

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

# Arguments that are true on an accelerator, such as a GPU, and false on a CPU. `bf16` is the precision of the
# computation; the weights have the recipe's dtype.
ON_ACCELERATORS = ("bf16", "gradient_checkpointing", "dataloader_pin_memory")
# PEFT's adapter initialisations that do not change the output of the model.
NEUTRAL_STARTS = (True, "gaussian", "eva", "mica")


class PreparedTraining(NamedTuple):
    """A trainer that is ready to train.

    Attributes:
        trainer: A `CATTOTrainer` or a `SupervisedTrainer`.
        rows: Number of rows or pairs that it trains on.
        tokens: Number of tokens per epoch.
        dropped: Number of rows left out, by their kind: rows that are too long and, in a stream of right responses,
            questions without one.
    """

    trainer: Any
    rows: int
    tokens: int
    dropped: dict[str, int]


def make_arguments(job: TrainingJob, *, monitored: bool = True) -> dict[str, Any]:
    """Return the training arguments that all methods share, overridden by the recipe's `trl` block.

    The batch size is that of one process. `check_launch` has already refused a batch that cannot be split equally.

    Args:
        job: The training.
        monitored: Whether there are held-out examples to choose the checkpoint by; otherwise the last one is kept.
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
        "logging_steps": min(10, trainer_settings.checkpoint_steps),  # so that a short training is logged too
        **checkpoint_arguments(settings.keep, trainer_settings.checkpoint_steps, measured=monitored),
        **trainer_settings.trl,
    }
    per_process = launch.split_batch(arguments, settings.launch.processes)
    return {**arguments, **per_process}


# ---- supervised -----------------------------------------------------------------------------------------------------


def prepare_supervised(job: TrainingJob, model: Any, tokenizer: Any) -> PreparedTraining:
    """Prepare SFT, with or without smoothed labels, CFT or RCFT.

    Raises:
        ValueError: There is no row, or all rows are longer than the context.
    """
    settings = job.settings
    method = settings.method
    has_rcft_term = method.rcft_weight > 0
    rows = list(read_records(job.inputs["teacher"] / "sft.jsonl", SftRow))
    short_enough = tokenize_responses(tokenizer, rows, settings.context)
    drawn = _draw_rows(short_enough, settings.block.rows, settings.seed)
    examples: Sequence[TokenizedRow]
    if has_rcft_term:  # the term reads the label of every response
        examples = locate_labels(tokenizer, drawn)
    else:
        examples = [TokenizedRow(row.question, ids) for row, ids in drawn]
    # Training is monitored on reasoning that the start model has sampled for the validation questions. For SFT,
    # no model has been trained yet that could: it is monitored on the teacher's traces. There are none if the teacher's
    # responses are stored ones, which may answer only the training questions.
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
    """Return the examples on which the training is monitored; `role` is that of the folder with their rows."""
    rows = read_records(job.inputs[role] / "outcome.jsonl", SftRow)
    return make_examples(tokenizer, rows, job.settings.context)


def _draw_rows(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Return at most `limit` rows, drawn at random and kept in their order; None is no limit."""
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
        """Return the confidence of each answer (see `compute_label_share`), and whether each is right."""
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

    Return None if the response has no label, or if a label has no probability in the form in which the answer was
    written.
    """
    if prediction.label is None or prediction.label_logprobs is None:
        return None
    return confidence_at(prediction, kind="normalized")


# ---- preferences ----------------------------------------------------------------------------------------------------


def prepare_preference(job: TrainingJob, model: Any, tokenizer: Any) -> PreparedTraining:
    """Prepare training on pairs, with the method's calibration term and the stream of responses that the term reads.

    Raises:
        ValueError: There is no pair, all pairs or all responses of the stream are longer than the context, or the
            tokenizer does not distinguish the labels of a question.
    """
    settings = job.settings
    method = settings.method
    pairs, dropped_pairs = _read_pairs(job, tokenizer)
    dropped = {"pairs": dropped_pairs}
    stream: list[Example] = []
    if method.stream != "none":
        stream, dropped["stream"] = _read_stream_examples(job, tokenizer)
    # Later options win: the recipe's `trl` block over the term's options, and the method's loss over the recipe's.
    config = CATTOConfig(**(_list_term_options(settings) | make_arguments(job) | _list_loss_options(method)))
    adapter: dict[str, Any] = {}
    if settings.model.peft is not None:
        # TRL adds the adapter. Given a model that already has one, it would add a second, frozen adapter as reference,
        # which would also be in the checkpoints.
        adapter["peft_config"] = _make_adapter(settings.model.peft)
    trainer = CATTOTrainer(
        model,
        args=config,
        # On disk, so that all processes find the reference log-probabilities that rank 0 stores next to the pairs.
        train_dataset=Dataset.from_generator(lambda: iter(pairs), cache_dir=str(job.out / "checkpoints")),
        processing_class=tokenizer,
        validation=_read_validation(job, "reasoning", tokenizer),
        outcome_examples=stream,
        **adapter,
    )
    # The tokens of an epoch: those of all pairs, and those of the stream's rows that are read together with them.
    tokens = sum(_count_forward_tokens(pair) for pair in pairs)
    if stream:
        stream_rows_per_epoch = config.outcome_rows_per_pair * len(pairs)
        stream_tokens = _count_stream_tokens(stream, method)
        tokens += round(stream_rows_per_epoch * stream_tokens / len(stream))
    return PreparedTraining(trainer, rows=len(pairs), tokens=tokens, dropped=dropped)


def _read_pairs(job: TrainingJob, tokenizer: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the tokenized pairs to train on, and the number of pairs that were too long.

    Raises:
        ValueError: There is no pair, or all pairs are too long, or the labels of a question cannot be distinguished.
    """
    settings = job.settings
    rows = list(read_records(job.inputs["teacher"] / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("there are no pairs to train on: no question has enough right and wrong answers")
    for labels in dict.fromkeys(row.labels for row in rows):
        if labels:
            check_labels(tokenizer, labels)
    # Long pairs are dropped before the draw, so that every drawn pair is used and all methods train on the same pairs.
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
    """Return the examples of the stream, and the number of its rows that were left out.

    A row is left out if its response is too long or, if right responses are replayed, if its question has none.
    """
    rows = _read_stream(job)
    responses = rows
    if job.settings.method.stream == "right":
        responses = find_right_responses(job, rows)
    examples = make_examples(tokenizer, responses, job.settings.context)
    return examples, len(rows) - len(examples)


def _list_term_options(settings: TrainSettings) -> dict[str, Any]:
    """Return the options of `CATTOConfig` for any training on pairs, and those of the calibration term.

    Options that the term does not read are left out, since `CATTOConfig` refuses them.
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
    """Return the configuration of the adapter. Raise ValueError if its initialisation changes the model's output."""
    initialisation = peft.get("init_lora_weights", True)
    if initialisation not in NEUTRAL_STARTS:
        reason = "the reference is the model without its adapter, which must equal the model at the start"
        raise ValueError(f"model.peft.init_lora_weights is {initialisation!r}, expected true or gaussian: {reason}")
    return LoraConfig(task_type="CAUSAL_LM", **peft)


def _count_forward_tokens(pair: Mapping[str, Any]) -> int:
    """Count the tokens of both sequences of a pair, each a prompt with a response."""
    return 2 * len(pair["prompt_ids"]) + len(pair["chosen_ids"]) + len(pair["rejected_ids"])


def _count_stream_tokens(stream: Iterable[Example], method: Method) -> int:
    """Count the tokens of the stream: whole responses if right ones are replayed, otherwise only up to the label."""
    if method.stream == "right":
        return sum(example.tokens for example in stream)
    return sum(len(example.row.prompt) + example.label.at for example in stream)


def _read_stream(job: TrainingJob) -> list[SftRow]:
    """Return the rows of the stream. If votes are the target, leave out rows without votes.

    Raises:
        ValueError: Votes are the target but no row has them.
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
        raise ValueError("no response of the stream has a readable answer, so no question has votes")
    left_out = len(rows) - len(voted)
    if left_out:
        logger.warning("left out %d of %d questions: no response has a readable answer", left_out, len(rows))
    return voted


def _list_loss_options(method: Method) -> dict[str, Any]:
    """Return the options of the preference loss that the method sets; they override the recipe's `trl` block."""
    if not method.preference_loss:  # TRL needs at least one loss, so it gets one with weight 0
        return {"loss_type": ["sigmoid"], "loss_weights": [0.0]}
    options: dict[str, Any] = {}
    if method.loss_type:
        options["loss_type"] = list(method.loss_type)
        options["label_smoothing"] = method.label_smoothing
    if method.preference_tokens != "all":
        options["preference_tokens"] = method.preference_tokens
    return options


def find_right_responses(job: TrainingJob, sampled: Iterable[SftRow]) -> list[SftRow]:
    """Return a right response to each question of the stream, in the same form as the sampled response.

    If the sampled response has no reasoning, this is the gold label alone. Otherwise it is the teacher's first correct
    trace, and questions without one are left out.
    """
    traces: dict[str, SftRow] = {}
    for row in read_records(job.inputs["teacher"] / "sft.jsonl", SftRow):
        traces.setdefault(row.question, row)  # keeps the first of several traces
    responses = []
    for row in sampled:
        is_only_answer = row.completion[-1].content == render_completion(None, row.label)
        if is_only_answer:
            answer = Message(role="assistant", content=render_completion(None, row.gold))
            responses.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in traces:
            responses.append(traces[row.question])
    return responses
