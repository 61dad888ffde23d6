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
# Values of PEFT's `init_lora_weights` with which a new adapter does not change the output of the model.
NEUTRAL_INITIALISATIONS = (True, "gaussian", "eva", "mica")


class PreparedTraining(NamedTuple):
    """A trainer that is ready to train.

    Attributes:
        trainer: A `CATTOTrainer` or a `SupervisedTrainer`.
        rows: Number of rows or pairs that it trains on.
        tokens: Number of tokens per epoch.
        dropped: Number of rows left out. `rows` (for supervised training) or `pairs` counts those that are too long;
            `stream`, if there is one, also counts questions without a right response if right responses are replayed.
    """

    trainer: Any
    rows: int
    tokens: int
    dropped: dict[str, int]


def make_arguments(job: TrainingJob, *, monitored: bool = True) -> dict[str, Any]:
    """Return the training arguments that all methods share, overridden by the recipe's `trl` block.

    Args:
        job: The training.
        monitored: Whether there are held-out examples to choose the checkpoint by; otherwise the last one is kept.

    Returns:
        Keyword arguments of `TrainingArguments`. The batch size is that of one process.

    Raises:
        ValueError: The processes cannot share a batch equally. `check_launch` finds this before anything runs.
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
        "disable_tqdm": True,  # a callback reports the progress
        "logging_steps": min(10, trainer_settings.checkpoint_steps),  # so that a short training is logged too
        **checkpoint_arguments(settings.keep, trainer_settings.checkpoint_steps, has_validation=monitored),
        **trainer_settings.trl,
    }
    batch_of_one_process = launch.split_batch(arguments, settings.launch.processes)
    return {**arguments, **batch_of_one_process}


# ---- supervised -----------------------------------------------------------------------------------------------------


def prepare_supervised(job: TrainingJob, model: Any, tokenizer: Any) -> PreparedTraining:
    """Prepare SFT, with or without smoothed labels, CFT or RCFT.

    Args:
        job: The training.
        model: The model to train, with its adapter if it has one.
        tokenizer: The tokenizer of the model.

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
    # CFT and RCFT are monitored on responses of the start model to the validation questions. Before SFT, no model
    # answers in the expected form, so SFT is monitored on the teacher's responses instead. These are missing if the
    # teacher is a file of responses, which may answer only the training questions.
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
    """Return the examples on which the training is monitored: the rows in the input folder with this role."""
    rows = read_records(job.inputs[role] / "outcome.jsonl", SftRow)
    return make_examples(tokenizer, rows, job.settings.context)


def _draw_rows(rows: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Return at most `limit` rows, drawn at random and kept in their order; None is no limit."""
    if limit is None or limit >= len(rows):
        return list(rows)
    numbers = random.Random(seed).sample(range(len(rows)), limit)
    return [rows[number] for number in sorted(numbers)]


def _make_rcft_bins(job: TrainingJob, tokenizer: Any) -> RcftBins:
    """Return RCFT's confidence bins, whose accuracy is estimated on the model's answers to the validation questions."""
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

    Args:
        job: The training.
        model: The model to train, without an adapter: the trainer adds it.
        tokenizer: The tokenizer of the model.

    Raises:
        ValueError: There is no pair, all pairs or all responses of the stream are longer than the context, no question
            of the stream has the votes that the term needs, or the tokenizer does not distinguish the labels of a
            question.
    """
    settings = job.settings
    method = settings.method
    pairs, dropped_pairs = _read_pairs(job, tokenizer)
    dropped = {"pairs": dropped_pairs}
    stream: list[Example] = []
    if method.stream != "none":
        stream, dropped["stream"] = _read_stream_examples(job, tokenizer)
    # If an option occurs twice, the last one counts: the recipe's `trl` block, which is in the arguments, overrides the
    # options of the term, and the method's loss overrides the recipe's.
    config = CATTOConfig(**(_list_term_options(settings) | make_arguments(job) | _list_loss_options(method)))
    adapter_options: dict[str, Any] = {}
    if settings.model.peft is not None:
        # TRL adds the adapter. Given a model that already has one, it would add a second, frozen adapter as reference,
        # which would also be in the checkpoints.
        adapter_options["peft_config"] = _make_adapter(settings.model.peft)
    trainer = CATTOTrainer(
        model,
        args=config,
        # On disk, so that all processes find the reference log-probabilities that rank 0 stores next to the pairs.
        train_dataset=Dataset.from_generator(lambda: iter(pairs), cache_dir=str(job.out / "checkpoints")),
        processing_class=tokenizer,
        validation=_read_validation(job, "reasoning", tokenizer),
        outcome_examples=stream,
        **adapter_options,
    )
    tokens_per_epoch = sum(_count_forward_tokens(pair) for pair in pairs)
    if stream:
        # Each pair is trained on together with a fixed number of the stream's rows, however long the stream is.
        stream_rows_per_epoch = config.outcome_rows_per_pair * len(pairs)
        tokens_per_stream_row = _count_stream_tokens(stream, method) / len(stream)
        tokens_per_epoch += round(stream_rows_per_epoch * tokens_per_stream_row)
    return PreparedTraining(trainer, rows=len(pairs), tokens=tokens_per_epoch, dropped=dropped)


def _read_pairs(job: TrainingJob, tokenizer: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the tokenized pairs to train on, and the number of pairs that were too long.

    The number of pairs is limited by the method's budget (`settings.pairs`) and by the recipe (`rows` in its block for
    the trainer). The smaller limit counts. If there are more pairs, some are drawn at random with the seed, so methods
    with the same limit train on the same pairs.

    Raises:
        ValueError: There is no pair, all pairs are too long, or tokens do not distinguish the labels of a question.
    """
    settings = job.settings
    rows = list(read_records(job.inputs["teacher"] / "preferences.jsonl", PreferenceRow))
    if not rows:
        raise ValueError("there are no pairs to train on: no question has enough right and wrong answers")
    distinct_labels = dict.fromkeys(row.labels for row in rows)
    for labels in distinct_labels:
        if labels:  # short answers have none
            check_labels(tokenizer, labels)  # raises ValueError if tokens do not distinguish them
    # Long pairs are dropped before the draw, so that as many pairs are used as the limit allows.
    short_enough = drop_too_long(
        [preference_columns(tokenizer, row) for row in rows],
        settings.context,
        length_of=count_pair_tokens,
        name_of=lambda pair: str(pair["question"]),
    )
    budget_limit = settings.pairs
    recipe_limit = settings.block.rows
    limits = [limit for limit in (budget_limit, recipe_limit) if limit is not None]
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
    """Return the options of `CATTOConfig` that the recipe sets outside its `trl` block.

    These are the options of any training on pairs and those of the method's calibration term. Options that the term
    does not read are left out, since `CATTOConfig` refuses them.
    """
    method = settings.method
    options: dict[str, Any] = {
        "calibration": method.calibration,
        "prefix_sharing": settings.prefix_sharing,
        "max_length": settings.context,
        "precompute_ref_log_probs": True,  # once before training, so that no step has to run the reference
    }
    outcome = settings.outcome
    if outcome is not None:
        options |= options_read_by(method.calibration, {"outcome_score": outcome.score})
        if outcome.target != "gold":  # `gold` is the default
            options["outcome_target"] = outcome.target
        if method.stream != "none":  # without a stream, the trainer refuses the option
            options["outcome_rows_per_pair"] = outcome.rows_per_pair
    return options


def _make_adapter(peft: dict[str, Any]) -> LoraConfig:
    """Return the configuration of the adapter. Raise ValueError if its initialisation changes the model's output."""
    initialisation = peft.get("init_lora_weights", True)
    if initialisation not in NEUTRAL_INITIALISATIONS:
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
    """Return the rows of the stream.

    If the target of the calibration term is votes or their mean with the gold label, rows without votes are left out.

    Raises:
        ValueError: The target needs votes, but no row has them.
    """
    path = job.inputs["stream"] / "stream.jsonl"  # one row per question, with votes
    if not path.exists():
        path = job.inputs["stream"] / "outcome.jsonl"  # rows without votes
    rows = list(read_records(path, SftRow))
    needs_votes = job.settings.outcome is not None and job.settings.outcome.target != "gold"
    if not needs_votes:
        return rows
    rows_with_votes = [row for row in rows if row.votes is not None]
    if not rows_with_votes:
        raise ValueError("no response of the stream has a readable answer, so no question has votes")
    left_out = len(rows) - len(rows_with_votes)
    if left_out:
        logger.warning("left out %d of %d questions: no response has a readable answer", left_out, len(rows))
    return rows_with_votes


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
    """Return a right response to each question of the stream, with reasoning if the sampled response has reasoning.

    Args:
        job: The training.
        sampled: The rows of the stream, right or wrong.

    Returns:
        In place of each row without reasoning, the row with the gold label. In place of each other row, the first of
        the teacher's correct responses to the question, or nothing if there is none.
    """
    teacher_rows: dict[str, SftRow] = {}
    for row in read_records(job.inputs["teacher"] / "sft.jsonl", SftRow):
        teacher_rows.setdefault(row.question, row)  # keeps the first of several
    responses = []
    for row in sampled:
        has_reasoning = row.completion[-1].content != render_completion(None, row.label)
        if not has_reasoning:
            answer = Message(role="assistant", content=render_completion(None, row.gold))
            responses.append(row.model_copy(update={"completion": (answer,), "label": row.gold}))
        elif row.question in teacher_rows:
            responses.append(teacher_rows[row.question])
    return responses
