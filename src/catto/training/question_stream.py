"""Sample the responses that the `outcome` term trains on: the start model's own, to questions with known answers.

For each question, one response is trained on, up to its label. With `outcome_target` votes or mix, further responses
are sampled, which show how often the start model gives each label. If the questions have no options, each answer is
graded, and the model's judgement of its answer, P(True), is trained on. Everything is sampled once, before training,
and stored. A later run with the same model, questions and settings reads the stored file.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from catto.answer.confidence import close_token_ids
from catto.answer.tokens import LabelPosition, UnreadableLabelError, locate_label
from catto.engines import ScoredGeneration
from catto.engines.transformers import TransformersEngine
from catto.io.record_files import read_records
from catto.io.text_files import parse_object, read_lines
from catto.predict import generate, read
from catto.prompts import prompt_ids, render_messages
from catto.records import SPLITS, Prediction, Question, SftRow, content_hash
from catto.tasks import from_file, load_questions
from catto.tasks.own_file import propose, task_name
from catto.teacher import ask, write_rows
from catto.teacher.responses import GENERATIONS
from catto.teacher.sampling import ModelSampling
from catto.training.batches import Row
from catto.training.config import CATTOConfig
from catto.training.examples import Example, Label, make_examples

logger = logging.getLogger(__name__)
FOLDER = "calibration_responses"  # in the output folder of a training run
MAX_TOKENS = 512  # the default of `catto.evaluate`


class SamplingSettings(TypedDict):
    """How the questions are asked: the options of `catto.evaluate`, where `k` is the number of responses to each."""

    k: int
    temperature: float
    seed: int
    max_tokens: int
    reasoning: bool


def load_calibration_questions(source: Sequence[Question] | str) -> list[Question]:
    """Return the questions of a file or a sequence.

    Args:
        source: Questions, or the path of a file with questions: `catto.records.Question` records, or a table of
            multiple-choice questions whose fields have common names, such as `question`, `choices` and `answer`.

    Returns:
        The questions in their order, at least one.

    Raises:
        DataError: The file is missing or damaged, or the meaning of its fields is unclear.
        ValueError: There are no questions.
    """
    if not isinstance(source, str):
        questions = list(source)
    elif is_question_file(Path(source)):
        questions = list(read_records(Path(source), Question))
    else:
        questions = read_own_questions(source)
    if not questions:
        raise ValueError(f"calibration_questions: there is no question in {source!r}")
    return questions


def is_question_file(path: Path) -> bool:
    """Return whether the first line of a file is a `Question` record."""
    if path.suffix != ".jsonl":
        return False
    first = next(read_lines(path), None)
    if first is None:
        return False
    row, line = first
    fields = parse_object(path, row, line)
    return {"id", "task", "fields", "options", "gold"} <= fields.keys()


def read_own_questions(file: str) -> list[Question]:
    """Return all questions of a user's own file. Its fields are recognized by their names and values."""
    fields = propose({"train": file})
    logger.info("calibration_questions: %s is read with the fields %s", file, fields)
    task = from_file(file, fields=fields, name=task_name(file))
    questions: list[Question] = []
    for split in SPLITS:
        questions.extend(load_questions(task, split))
    return questions


def sampling_settings(config: CATTOConfig) -> SamplingSettings:
    """Return how to ask the start model: several times per question if its samples vote, otherwise once."""
    max_tokens = MAX_TOKENS
    if config.max_length is not None:
        max_tokens = min(MAX_TOKENS, config.max_length)
    responses_per_question = 1
    if config.outcome_target != "gold":
        responses_per_question = config.outcome_samples
    return {
        "k": responses_per_question,
        "temperature": 1.0,
        "seed": config.seed,
        "max_tokens": max_tokens,
        "reasoning": True,
    }


def cache_key(questions: Sequence[Question], tokenizer: Any, settings: SamplingSettings, model_hash: str) -> str:
    """Return a name for the responses: a hash of everything that they depend on."""
    question_values = [question.model_dump(mode="json") for question in questions]
    tokenizer_hash = content_hash([tokenizer.chat_template, tokenizer.get_vocab()])
    return content_hash([question_values, tokenizer_hash, dict(settings), model_hash])


def sample_stream(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    settings: SamplingSettings,
    folder: Path,
    max_length: int | None = None,
    batch_size: int = 16,
) -> list[Example]:
    """Sample responses to the questions and prepare them for training.

    If the questions have options, the first response to each is trained on. If k is above 1, all k responses vote. If
    the questions have no options, `sample_judgements` prepares judgements of their answers instead.

    Args:
        model: The start model, loaded.
        tokenizer: Its tokenizer, with a chat template.
        questions: Questions, all with options or all without.
        settings: How the questions are asked.
        folder: Where the responses are stored. Responses that are already stored there are reused.
        max_length: Maximum number of tokens of prompt and response; longer reasoning is truncated. None is no limit.
        batch_size: Number of responses that are generated at once.

    Returns:
        One example per question, in the order of the questions. Its target is the share of votes for each label; None
        without votes. Questions whose prompt leaves no room for an answer are left out, and their number is logged.

    Raises:
        ValueError: Only some of the questions have options.
    """
    engine = TransformersEngine(model, tokenizer, batch_size=batch_size)
    with_options = [question for question in questions if question.has_labels]
    if not with_options:
        return sample_judgements(engine, questions, settings=settings, folder=folder, max_length=max_length)
    if len(with_options) < len(questions):
        raise ValueError(f"calibration_questions: {len(with_options)} of {len(questions)} have options, expected all")
    generations = generate(engine, questions, out=folder / "generations.jsonl", **settings)
    votes: dict[str, Counter[str]] = {}
    if settings["k"] > 1:
        predictions = read(engine, questions, generations, **settings)
        votes = count_votes(predictions)
    first_generations = {generation.question: generation for generation in generations if generation.sample == 0}
    examples = []
    for question in questions:
        generation = first_generations[question.id]
        example = make_example(engine, question, generation, votes.get(question.id), max_length)
        if example is not None:
            examples.append(example)
    if len(examples) < len(questions):
        left_out = len(questions) - len(examples)
        logger.warning("left out %d of %d calibration questions: no room for an answer", left_out, len(questions))
    return examples


def count_votes(predictions: Iterable[Prediction]) -> dict[str, Counter[str]]:
    """Return question -> label -> number of samples that give it. Samples without a label do not vote."""
    votes: dict[str, Counter[str]] = {}
    for prediction in predictions:
        if prediction.label is not None:
            question_votes = votes.setdefault(prediction.question, Counter())
            question_votes[prediction.label] += 1
    return votes


def sample_judgements(
    engine: TransformersEngine,
    questions: Sequence[Question],
    *,
    settings: SamplingSettings,
    folder: Path,
    max_length: int | None = None,
) -> list[Example]:
    """Sample an answer to each question without options, grade it, and ask whether it is right.

    Args:
        engine: The engine with the start model.
        questions: Questions with accepted answers.
        settings: How the questions are asked.
        folder: Where the responses are stored. Responses that are already stored there are reused.
        max_length: Maximum number of tokens of a judgement, with the question and the answer; longer ones are dropped.
            None keeps all.

    Returns:
        One example per question whose response contains an answer. It asks whether the answer is right: its labels are
        True and False, and its gold label is the grade of the answer.

    Raises:
        ValueError: k is above 1, or no response contains an answer, or all judgements are too long.
    """
    if settings["k"] > 1:
        raise ValueError("outcome_target: votes need labels, and the calibration questions have no options")
    temperature = settings["temperature"]
    sampling = ModelSampling(
        n=1,
        temperature=(temperature, temperature),
        max_tokens=settings["max_tokens"],
        reasoning=settings["reasoning"],
        seed=settings["seed"],
    )
    ask(questions, engine, sampling, folder)
    # This grades the answers. For each of them, it writes a row with its judgement to outcome.jsonl.
    write_rows(questions, sampling, folder / GENERATIONS, folder, ["outcome"])
    rows = list(read_records(folder / "outcome.jsonl", SftRow))
    if not rows:
        raise ValueError("calibration_questions: no response of the start model gives an answer")
    if len(rows) < len(questions):
        logger.warning("left out %d of %d calibration questions: no answer", len(questions) - len(rows), len(questions))
    return make_examples(engine.tokenizer, rows, max_length)


def make_example(
    engine: TransformersEngine,
    question: Question,
    generation: ScoredGeneration,
    votes: Counter[str] | None,
    max_length: int | None,
) -> Example | None:
    """Make an example from a response, up to its label.

    Args:
        engine: The engine that sampled the response.
        question: The question.
        generation: The response. If it gives no answer, an answer tag is appended.
        votes: Number of samples that gave each label; None gives an example without a target.
        max_length: Maximum number of tokens of prompt and response; None is no limit but the model's context.

    Returns:
        The example; None if there is no room for an answer.
    """
    prompt = list(prompt_ids(engine.tokenizer, render_messages(question, reasoning=True)))
    limits = [limit for limit in (engine.positions, max_length) if limit is not None]
    room = min(limits, default=math.inf) - len(prompt) - 1  # one token is reserved for the label
    position = find_label_position(engine, question, generation, room)
    if position is None:
        return None
    candidates = [position.paths[label][0] for label in question.labels]  # each path is the single token of its label
    gold = question.labels.index(question.gold)
    target = None
    if votes is not None:
        total = sum(votes.values())
        target = tuple(votes[label] / total for label in question.labels)
    label = Label(at=len(position.ids_before), candidates=candidates, gold=gold, target=target)
    # The row ends with a label. Any label would do, since the outcome term reads the row only up to it.
    completion = [*position.ids_before, candidates[gold]]
    return Example(question.id, Row(prompt, completion), label)


def find_label_position(
    engine: TransformersEngine, question: Question, generation: ScoredGeneration, room: float
) -> LabelPosition | None:
    """Find a position at which a single token distinguishes each label from the others, as training requires.

    Usually it is the position of the label that the response gives. If the response gives no label, or one that does
    not fit in `room` or shares its token with a different label, the response is closed: an opening answer tag is
    appended, and the position is the end. If necessary, the end of the reasoning is dropped first.

    Args:
        engine: The engine that sampled the response.
        question: The question.
        generation: The response.
        room: Maximum number of tokens of the response up to its label; infinite if there is no limit.

    Returns:
        The position; None if there is no room for an answer.

    Raises:
        ValueError: Labels begin with the same token even if the response is closed.
    """
    ids = generation.token_ids or ()
    labels = question.labels
    texts = [option.text for option in question.options]  # a response may answer with the text of an option
    reached_token_limit = generation.finish_reason == "length"  # its last line may be incomplete
    with suppress(UnreadableLabelError):  # labels may share tokens as the response writes them, such as in capitals
        position = locate_label(engine.tokenizer, ids, labels, texts, cut=reached_token_limit)
        if position is not None and position.needed_length <= room and has_single_tokens(position, labels):
            return position
    closed = close_token_ids(engine.tokenizer, ids, labels, room)
    if closed is not None and not has_single_tokens(closed, labels):
        raise ValueError(f"question {question.id}: labels {', '.join(labels)} begin with the same token")
    return closed


def has_single_tokens(position: LabelPosition, labels: Sequence[str]) -> bool:
    """Return whether a single token distinguishes each label from the others at this position."""
    return all(label in position.paths and len(position.paths[label]) == 1 for label in labels)
