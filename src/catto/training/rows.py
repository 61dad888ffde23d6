"""Rows of records -> token ids, with the label's place found once. Rows that do not fit the context are dropped.

Prompts are rendered as the engines render them and completions follow as they are: at test time the model continues
the very text that it was trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from catto.engines.transformers import prompt_ids
from catto.labels import label_place
from catto.prompts import completion as rendered
from catto.prompts import prompt_text
from catto.records import Message, PreferenceRow, SftRow
from catto.training.batches import Row

logger = logging.getLogger(__name__)


class Label(NamedTuple):
    """Where a completion's label stands, the K labels' tokens there, and which of them is right."""

    at: int
    candidates: list[int]
    gold: int


@dataclass(frozen=True)
class Example:
    """One response ready to train on: its tokens, its label, the question it answers."""

    question: str
    row: Row
    label: Label
    correctness_rate: float = 1.0

    def before_label(self) -> Row:
        """The row up to the label: its last position predicts the label, and nothing after it is computed."""
        return Row(self.row.prompt, self.row.completion[: self.label.at])


def examples(tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None) -> list[Example]:
    """Tokenise completions, right or wrong; an open one (label None) counts as if it went on with a label."""
    made = [_example(tokenizer, row) for row in rows]
    return fitting(made, max_length, lambda example: len(example.row.prompt) + len(example.row.completion))


def _example(tokenizer: Any, row: SftRow) -> Example:
    text = row.completion[-1].content
    if row.label is None:
        text += row.labels[0] + rendered(None, row.labels[0]).partition(row.labels[0])[2]
    ids = row_ids(tokenizer, row.prompt, text)
    return Example(row.question, ids, _label(tokenizer, row, ids.completion), row.correctness_rate)


def _label(tokenizer: Any, row: SftRow | PreferenceRow, completion: Sequence[int]) -> Label:
    try:
        index, candidates = label_place(tokenizer, completion, row.labels)
    except ValueError as error:
        raise ValueError(f"question {row.question}: {error}") from None
    return Label(index, list(candidates), row.labels.index(row.gold))


def row_ids(tokenizer: Any, prompt: Sequence[Message], completion: str) -> Row:
    """Token ids of a prompt and its completion, which ends with the end-of-sequence token."""
    head = list(prompt_ids(tokenizer, prompt))
    joint = tokenizer(prompt_text(prompt, tokenizer) + completion, add_special_tokens=False)["input_ids"]
    # Where the boundary's characters merge into one token, the response is encoded alone, as generation would see it.
    tail = (
        joint[len(head) :]
        if joint[: len(head)] == head
        else tokenizer(completion, add_special_tokens=False)["input_ids"]
    )
    return Row(head, [*tail, tokenizer.eos_token_id])


def preference_columns(tokenizer: Any, row: PreferenceRow) -> dict[str, Any]:
    """A preference row as the columns that `CATTOTrainer` trains on."""
    chosen = row_ids(tokenizer, row.prompt, row.chosen[-1].content)
    rejected = row_ids(tokenizer, row.prompt, row.rejected[-1].content)
    return {
        "question": row.question,
        "labels": list(row.labels),
        "gold": row.gold,
        "correctness_rate": row.correctness_rate,
        "prompt_ids": chosen.prompt,
        "chosen_ids": chosen.completion,
        "rejected_ids": rejected.completion,
    }


def fitting(rows: list[Any], max_length: int | None, length: Any) -> list[Any]:
    """Keep what fits in the context; what does not is counted and named, never cut: cutting loses the label."""
    if max_length is None:
        return rows
    long = [row for row in rows if length(row) > max_length]
    if long:
        names = ", ".join(row.question for row in long[:5]) + (", ..." if len(long) > 5 else "")
        logger.warning("dropped %d of %d rows longer than %d tokens: %s", len(long), len(rows), max_length, names)
    if len(long) == len(rows):
        raise ValueError(f"all {len(rows)} rows are longer than max_length {max_length}")
    return [row for row in rows if length(row) <= max_length]
