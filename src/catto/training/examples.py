"""Turn records into token ids and locate their labels. Rows that are too long for the context are dropped.

Prompts are rendered as the inference engines render them, and completions are appended unchanged. At test time the
model therefore continues exactly the text that it was trained on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from datasets import Dataset

from catto.answer.tokens import find_label_token, locate_label
from catto.prompts import prompt_ids, prompt_text, render_completion
from catto.records import Message, PreferenceRow, SftRow
from catto.training.batches import Query, Row

logger = logging.getLogger(__name__)
MAX_NAMED_ROWS = 20  # dropped rows that a warning names


class Label(NamedTuple):
    """The label of a completion.

    Attributes:
        at: Index of the label's token in the completion.
        candidates: The token that each of the K labels would have at that index.
        gold: Index of the right label among the K labels.
        target: Distribution over the K labels, such as the share of samples that give each label. The outcome loss
            reads it if `outcome_target` is votes or mix. None if there is no such distribution.
    """

    at: int
    candidates: list[int]
    gold: int
    target: tuple[float, ...] | None = None


@dataclass(frozen=True)
class TokenizedRow:
    """One response ready for training: the id of its question and its tokens."""

    question: str
    row: Row

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.row.prompt) + len(self.row.completion)


@dataclass(frozen=True)
class Example(TokenizedRow):
    """One response whose label has been located, as required by losses on the label token."""

    label: Label

    def before_label(self) -> Row:
        """Return the row up to the label. Its last position predicts the label."""
        return Row(self.row.prompt, self.row.completion[: self.label.at])


def make_examples(tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None) -> list[Example]:
    """Tokenize rows and find the label in each completion. The completions may be right or wrong.

    Args:
        tokenizer: The tokenizer of the model.
        rows: The rows. If a row's `label` is None, its completion must end where the label would follow.
        max_length: Maximum number of tokens of prompt and completion; longer rows are dropped. None keeps all.

    Returns:
        One example per row that fits, in the order of the rows.

    Raises:
        ValueError: All rows are too long, or no label can be read from a completion.
    """
    tokenized_rows = tokenize_responses(tokenizer, rows, max_length)
    return locate_labels(tokenizer, tokenized_rows)


def tokenize_responses(
    tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None
) -> list[tuple[SftRow, Row]]:
    """Tokenize rows and drop those that are too long.

    Args:
        tokenizer: The tokenizer of the model.
        rows: The rows. If a row's `label` is None, its completion must end where the label would follow.
        max_length: Maximum number of tokens of prompt and completion; None keeps all rows.

    Returns:
        Each row that fits with its token ids, in the order of the rows.

    Raises:
        ValueError: All rows are too long.
    """
    responses = []
    for row in rows:
        text = row.completion[-1].content
        if row.label is None:
            # `locate_labels` needs a label there. Any will do, since the outcome loss reads the row only up to it.
            text += _close_answer(row.labels[0])
        responses.append((row, row_ids(tokenizer, row.prompt, text)))

    def count_tokens(response: tuple[SftRow, Row]) -> int:
        _, ids = response
        return len(ids.prompt) + len(ids.completion)

    def name_row(response: tuple[SftRow, Row]) -> str:
        row, _ = response
        return row.question

    return drop_too_long(responses, max_length, length_of=count_tokens, name_of=name_row)


def _close_answer(label: str) -> str:
    """Return the text that completes an opened answer: the label and the closing tag."""
    opened = render_completion(None, None)
    return render_completion(None, label).removeprefix(opened)


def locate_labels(tokenizer: Any, rows: Iterable[tuple[SftRow, Row]]) -> list[Example]:
    """Find the label in the completion of each tokenized row.

    Args:
        tokenizer: The tokenizer of the model.
        rows: The rows with their token ids. If a row has votes, they become the target of its label.

    Returns:
        One example per row, in the order of the rows.

    Raises:
        ValueError: A completion gives no label, or a single token does not distinguish the labels.
    """
    examples = []
    for row, ids in rows:
        at, candidates = find_label(tokenizer, ids.completion, row.labels, f"question {row.question}")
        target = None
        if row.votes is not None:
            target = tuple(row.votes.get(label, 0.0) for label in row.labels)
        gold = row.labels.index(row.gold)
        examples.append(Example(row.question, ids, Label(at, candidates, gold, target)))
    return examples


def label_queries(examples: Sequence[Example], first_row: int = 0) -> list[Query]:
    """Return a query for the label of each example. In the batch, the examples are the rows from `first_row` on."""
    queries = []
    for row, example in enumerate(examples, first_row):
        label = example.label
        queries.append(Query(row, label.at, label.candidates, label.gold))
    return queries


def with_targets(examples: Sequence[Example], outcome_target: str) -> list[Example]:
    """Return the examples with the target distribution (`Label.target`) that the outcome loss reads.

    Args:
        examples: The examples.
        outcome_target: `gold` sets an example's target to None, `votes` keeps it, and `mix` replaces it by its mean
            with the one-hot gold label.

    Returns:
        New examples in the same order.

    Raises:
        ValueError: With `votes` or `mix`, an example has no target, or its target is not a distribution.
    """
    new_examples = []
    for example in examples:
        label = example.label
        target: tuple[float, ...] | None = None
        if outcome_target != "gold":
            target = _require_target(example, outcome_target)
            if outcome_target == "mix":
                target = _mix_with_gold(target, label.gold)
        new_examples.append(replace(example, label=label._replace(target=target)))
    return new_examples


def _mix_with_gold(shares: Sequence[float], gold: int) -> tuple[float, ...]:
    """Return the mean of a distribution and the one-hot gold label."""
    mixed = []
    for index, share in enumerate(shares):
        gold_share = 1 if index == gold else 0
        mixed.append((share + gold_share) / 2)
    return tuple(mixed)


def _require_target(example: Example, outcome_target: str) -> tuple[float, ...]:
    """Return an example's `label.target`; raise ValueError if it is None or not a distribution over its labels."""
    target = example.label.target
    where = f"question {example.question}"
    if target is None:
        raise ValueError(f"{where}: outcome_target is {outcome_target!r} but the example has no votes (label.target)")
    number_of_labels = len(example.label.candidates)
    is_distribution = len(target) == number_of_labels and min(target) >= 0 and abs(sum(target) - 1) < 1e-6
    if not is_distribution:
        raise ValueError(f"{where}: label.target is {target}, expected {number_of_labels} shares that sum to 1")
    return target


def target_table(examples: Sequence[Example], width: int) -> list[list[float]]:
    """Return the target distributions of N examples, padded with 0 to (N, width). A target of None gives zeros."""
    table = []
    for example in examples:
        shares = list(example.label.target or ())
        table.append(shares + [0.0] * (width - len(shares)))
    return table


def find_label(tokenizer: Any, completion: Any, labels: Sequence[str], where: str) -> tuple[int, list[int]]:
    """Find the token of a completion that decides its label.

    Args:
        tokenizer: The tokenizer of the model.
        completion: Token ids of the completion.
        labels: The question's K labels.
        where: Name of the row, which is prepended to the error message.

    Returns:
        The index of that token in the completion, and the K tokens that the labels would have there, in the order of
        `labels`.

    Raises:
        ValueError: The completion gives no label, or a single token does not distinguish the labels.
    """
    try:
        index, candidates = find_label_token(tokenizer, completion, labels)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return index, list(candidates)


def row_ids(tokenizer: Any, prompt: Sequence[Message], completion: str) -> Row:
    """Encode a prompt and its completion, and append the end-of-sequence token to the completion."""
    text, prompt_tokens = _encode_prompt(tokenizer, tuple(prompt))
    joint_tokens = tokenizer(text + completion, add_special_tokens=False)["input_ids"]
    prompt_length = len(prompt_tokens)
    if joint_tokens[:prompt_length] == prompt_tokens:
        completion_tokens = joint_tokens[prompt_length:]
    else:
        # A token would span the boundary, so the completion is encoded on its own, as if it had been generated.
        completion_tokens = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return Row(prompt_tokens, [*completion_tokens, tokenizer.eos_token_id])


@lru_cache(maxsize=1024)
def _encode_prompt(tokenizer: Any, prompt: tuple[Message, ...]) -> tuple[str, list[int]]:
    """Render and encode a prompt. Cached, since consecutive rows are often responses to the same prompt."""
    return prompt_text(prompt, tokenizer), list(prompt_ids(tokenizer, prompt))


def drop_too_long(
    rows: list[Any], max_length: int | None, *, length_of: Callable[[Any], int], name_of: Callable[[Any], str]
) -> list[Any]:
    """Drop rows that are too long for the context, and log their names.

    Rows are never truncated, since that would remove the label.

    Args:
        rows: The rows, of any type.
        max_length: Maximum number of tokens; None keeps all rows.
        length_of: Returns the number of tokens of a row.
        name_of: Returns the name of a row for the log.

    Returns:
        The rows that fit, in their order.

    Raises:
        ValueError: There are rows, and all of them are too long.
    """
    if max_length is None:
        return rows
    fitting = []
    dropped = []
    for row in rows:
        if length_of(row) <= max_length:
            fitting.append(row)
        else:
            dropped.append(row)
    if dropped and not fitting:
        raise ValueError(f"every row is longer than max_length {max_length} tokens")
    if dropped:
        names = [name_of(row) for row in dropped]
        _log_dropped(names, total=len(rows), description=f"rows longer than {max_length} tokens")
    return fitting


def _log_dropped(names: Sequence[str], *, total: int, description: str) -> None:
    """Log how many of `total` rows were dropped, and the names of the first ones.

    `description` says which rows were dropped, such as "rows longer than 100 tokens".
    """
    shown_names = list(names[:MAX_NAMED_ROWS])
    if len(names) > MAX_NAMED_ROWS:
        shown_names.append("...")
    logger.warning("dropped %d of %d %s: %s", len(names), total, description, ", ".join(shown_names))


# ---- preference pairs ------------------------------------------------------------------------------------------------


def preference_columns(tokenizer: Any, row: PreferenceRow) -> dict[str, Any]:
    """Turn a preference row into the columns that `CATTOTrainer` trains on: token ids instead of texts."""
    chosen = row_ids(tokenizer, row.prompt, row.chosen[-1].content)
    rejected = row_ids(tokenizer, row.prompt, row.rejected[-1].content)
    return {
        "question": row.question,
        "labels": list(row.labels),
        "gold": row.gold,
        "correctness_rate": row.correctness_rate,
        "prompt_ids": chosen.prompt,  # the rejected response has the same prompt
        "chosen_ids": chosen.completion,
        "rejected_ids": rejected.completion,
    }


def count_pair_tokens(columns: dict[str, Any]) -> int:
    """Count the tokens of the longer of a pair's two sequences."""
    longer_response = max(len(columns["chosen_ids"]), len(columns["rejected_ids"]))
    return len(columns["prompt_ids"]) + longer_response


def number_row(example: dict[str, Any], row: int, *, reference_settings: list[Any]) -> dict[str, Any]:
    """Return the number of a row as the new column `row`, for `Dataset.map`.

    `reference_settings` are the settings on which the reference log-probabilities depend. They are not used here, but
    `Dataset.map` includes all arguments in the new fingerprint of the dataset, by which TRL caches the reference
    log-probabilities. With other settings, TRL thus computes them again.
    """
    return {"row": row}


# The columns that an objective may read in addition to TRL's, with example values for error messages.
EXAMPLE_COLUMNS: dict[str, Any] = {"labels": ["A", "B", "C", "D"], "gold": "B", "correctness_rate": 0.6}


def require_columns(dataset: Any, needed: Sequence[str], dataset_name: str, option: str) -> None:
    """Check that a dataset has the required columns.

    Args:
        dataset: A dataset, streamed or not.
        needed: Names of the required columns, from `EXAMPLE_COLUMNS`.
        dataset_name: Name of the dataset, for the error.
        option: The option that needs the columns, for the error.

    Raises:
        ValueError: Columns are missing. The error lists them and shows an example row.
    """
    columns = dataset.column_names
    if not columns:  # a streamed dataset may not know its columns, so its first row is read; an empty one has none
        columns = list(next(iter(dataset), {}))
    missing = [column for column in needed if column not in columns]
    if not missing:
        return
    missing_names = ", ".join(map(repr, missing))
    example_row = {"prompt": "...", "chosen": "... <answer>B</answer>", "rejected": "... <answer>A</answer>"}
    for column in needed:
        example_row[column] = EXAMPLE_COLUMNS[column]
    row = json.dumps(example_row)
    problem = f"the {dataset_name} dataset lacks columns that {option} needs: {missing_names}"
    raise ValueError(f"{problem}. A row looks like {row}")


def label_columns(example: dict[str, Any], tokenizer: Any, name: str, reads_rate: bool) -> dict[str, Any]:
    """Find the labels of a pair in its token ids.

    Args:
        example: A tokenized row of the dataset.
        tokenizer: The tokenizer of the model.
        name: Name of the dataset, for errors.
        reads_rate: Whether the objective reads the row's `correctness_rate`.

    Returns:
        New columns: `gold_index`, the index of the gold label in `labels`; `rate`, the correctness rate, or 0 if the
        objective does not read it, since the collator expects the column in any case; `chosen_label_at` and
        `rejected_label_at`, the index of the label's token in each response; `chosen_candidates` and
        `rejected_candidates`, the tokens that all labels would have at that index.

    Raises:
        ValueError: The rate is not a number from 0 to 1, the labels are not a list, the gold label is not one of them,
            or no label can be read from a response. The error names the row.
    """
    where = f"{name} dataset row {example['row']}"
    labels = example["labels"]
    gold = example["gold"]
    correctness_rate = 0.0
    if reads_rate:
        correctness_rate = _read_correctness_rate(example, where)
    _check_label_list(example, where)
    if gold not in labels:
        raise ValueError(f"{where}: gold {gold!r} is not one of {', '.join(labels)}")
    columns: dict[str, Any] = {"gold_index": labels.index(gold), "rate": correctness_rate}
    for side in ("chosen", "rejected"):
        label_at, candidates = find_label(tokenizer, example[f"{side}_ids"], labels, f"{where}, {side}")
        columns[f"{side}_label_at"] = label_at
        columns[f"{side}_candidates"] = candidates
    return columns


def _read_correctness_rate(example: dict[str, Any], where: str) -> float:
    rate = example.get("correctness_rate")
    if not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ValueError(f"{where}: correctness_rate is {rate!r}, expected a number from 0 to 1")
    return float(rate)


def reasoning_columns(example: dict[str, Any], tokenizer: Any, name: str) -> dict[str, Any]:
    """Count the reasoning tokens of each response of a pair: those before its label.

    Args:
        example: A tokenized row of the dataset.
        tokenizer: The tokenizer of the model.
        name: Name of the dataset, for errors.

    Returns:
        New columns `chosen_reasoning` and `rejected_reasoning`, the number of reasoning tokens of each response. All
        tokens of a response count as reasoning if it gives no answer.

    Raises:
        ValueError: The labels are not a list. Or the tokens of the label that a response gives also begin a different
            label: no token then distinguishes the two, so it is not defined where the label begins.
    """
    where = f"{name} dataset row {example['row']}"
    _check_label_list(example, where)
    columns = {}
    for side in ("chosen", "rejected"):
        response_ids = example[f"{side}_ids"]
        try:
            label_position = locate_label(tokenizer, response_ids, example["labels"])
        except ValueError as error:
            raise ValueError(f"{where}, {side}: {error}") from None
        if label_position is None:  # the response gives no answer
            reasoning_ids = response_ids
        else:
            reasoning_ids = label_position.ids_before
        columns[f"{side}_reasoning"] = len(reasoning_ids)
    return columns


STREAM_SAMPLE = 64  # number of rows of a streamed dataset that `check_reasoning` reads


class ReasoningCounts(NamedTuple):
    """Counts of the pairs that `check_reasoning` has read.

    Attributes:
        total: Number of pairs.
        nothing_to_prefer: Number of pairs whose responses are identical up to their labels.
        without_answer: Number of pairs in which at least one response gives no answer.
    """

    total: int
    nothing_to_prefer: int
    without_answer: int


def check_reasoning(dataset: Any, name: str) -> None:
    """Refuse a dataset in which most pairs give a preference loss on the reasoning nothing to prefer.

    A pair has nothing to prefer if its responses are identical up to their labels, for example if they consist of the
    answer alone. Its loss is constant, so it trains nothing. A warning counts such pairs if they are not the majority,
    and also pairs with a response that gives no answer.

    Args:
        dataset: The tokenized pairs, with the columns that `reasoning_columns` adds. Of a streamed dataset, only the
            first `STREAM_SAMPLE` rows are checked.
        name: Name of the dataset, for the log and errors.

    Raises:
        ValueError: More than half of the checked pairs have nothing to prefer.
    """
    rows = dataset.select_columns(["chosen_ids", "rejected_ids", "chosen_reasoning", "rejected_reasoning"])
    if not isinstance(rows, Dataset):
        rows = rows.take(STREAM_SAMPLE)
    counts = _count_reasoning(rows)
    if counts.nothing_to_prefer > counts.total / 2:
        raise ValueError(
            f"preference_tokens is 'reasoning', but {counts.nothing_to_prefer} of {counts.total} pairs of the {name} "
            f"dataset have nothing to prefer: their responses are identical up to the label, like answers without "
            f"reasoning"
        )
    if counts.nothing_to_prefer:
        note = "%d of %d %s pairs have nothing to prefer: their responses are identical up to the label"
        logger.warning(note, counts.nothing_to_prefer, counts.total, name)
    if counts.without_answer:
        note = "%d of %d %s pairs have a response without an answer: the preference loss reads all of its tokens"
        logger.warning(note, counts.without_answer, counts.total, name)


def _count_reasoning(rows: Iterable[dict[str, Any]]) -> ReasoningCounts:
    """Count the pairs with nothing to prefer and those without an answer, see `ReasoningCounts`."""
    total = 0
    nothing_to_prefer = 0
    without_answer = 0
    for row in rows:
        total += 1
        chosen_reasoning = row["chosen_ids"][: row["chosen_reasoning"]]
        rejected_reasoning = row["rejected_ids"][: row["rejected_reasoning"]]
        if chosen_reasoning == rejected_reasoning:
            nothing_to_prefer += 1
        # `reasoning_columns` counts all tokens of a response only if it gives no answer.
        chosen_has_no_answer = len(chosen_reasoning) == len(row["chosen_ids"])
        rejected_has_no_answer = len(rejected_reasoning) == len(row["rejected_ids"])
        if chosen_has_no_answer or rejected_has_no_answer:
            without_answer += 1
    return ReasoningCounts(total=total, nothing_to_prefer=nothing_to_prefer, without_answer=without_answer)


def _check_label_list(example: dict[str, Any], where: str) -> None:
    """Raise ValueError if the labels of a row are not a list: the text "ABCD" would be read as four labels."""
    if not isinstance(example["labels"], list | tuple):
        raise ValueError(f"{where}: labels are {example['labels']!r}, expected a list")


@dataclass
class LengthFilter:
    """Drops pairs that are too long to train on.

    For a streamed dataset, the number of dropped pairs is logged whenever it is a power of two.

    Attributes:
        limit: Maximum number of tokens.
        must_fit_untruncated: True drops every pair that would be truncated, since truncation may remove the label.
            False drops a pair only if its prompt leaves no room for a response, as in TRL.
        name: Name of the dataset, for the log and errors.
        dropped: Number of pairs of a streamed dataset that have been dropped so far.
    """

    limit: int
    must_fit_untruncated: bool
    name: str
    dropped: int = 0

    @property
    def reason(self) -> str:
        """Description of the dropped rows, for the log."""
        if self.must_fit_untruncated:
            return f"longer than {self.limit} tokens"
        return f"whose prompt alone fills {self.limit} tokens"

    def fits(self, example: dict[str, Any]) -> bool:
        """Return whether a pair is kept."""
        if self.must_fit_untruncated:
            return count_pair_tokens(example) <= self.limit
        return len(example["prompt_ids"]) < self.limit

    def __call__(self, example: dict[str, Any]) -> bool:
        """Return whether a pair of a streamed dataset is kept. If not, count it, and log the count now and then."""
        if self.fits(example):
            return True
        self.dropped += 1
        is_power_of_two = self.dropped.bit_count() == 1
        if is_power_of_two:
            logger.warning("dropped %d %s rows so far, %s", self.dropped, self.name, self.reason)
        return False

    def select_fitting(self, dataset: Any) -> Any:
        """Return the dataset without the pairs that are too long; raise ValueError if all are.

        A streamed dataset is filtered while it is read later.
        """
        if isinstance(dataset, Dataset):
            return self._select_rows(dataset)
        any_fits = any(map(self.fits, dataset))  # reads the stream only up to the first pair that fits
        if not any_fits:
            raise self._nothing_fits()
        return dataset.filter(self)

    def _select_rows(self, dataset: Dataset) -> Dataset:
        """Return a dataset that is not streamed without the pairs that are too long, and log which were dropped."""
        fitting = []
        dropped = []
        for number, example in enumerate(dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])):
            if self.fits(example):
                fitting.append(number)
            else:
                dropped.append(number)
        if not dropped:
            return dataset
        if not fitting:
            raise self._nothing_fits()
        names = [f"row {number}" for number in dropped]
        _log_dropped(names, total=len(dataset), description=f"{self.name} rows {self.reason}")
        return dataset.select(fitting)

    def _nothing_fits(self) -> ValueError:
        return ValueError(f"every row of the {self.name} dataset is longer than max_length {self.limit} tokens")
