"""Rows of records -> token ids, with the label's place found once. Rows that do not fit the context are dropped.

Prompts are rendered as the engines render them and completions follow as they are: at test time the model continues
the very text that it was trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from catto.engines.transformers import prompt_ids
from catto.labels import label_place, locate
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

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.row.prompt) + len(self.row.completion)

    def before_label(self) -> Row:
        """The row up to the label: its last position predicts the label, and nothing after it is computed."""
        return Row(self.row.prompt, self.row.completion[: self.label.at])


def examples(tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None) -> list[Example]:
    """Tokenise completions, right or wrong; an open one (label None) counts as if it went on with a label."""
    made = [_example(tokenizer, row) for row in rows]
    return fitting(made, max_length, lambda example: example.tokens)


def _example(tokenizer: Any, row: SftRow) -> Example:
    text = row.completion[-1].content
    if row.label is None:
        text += row.labels[0] + rendered(None, row.labels[0]).partition(row.labels[0])[2]
    ids = row_ids(tokenizer, row.prompt, text)
    return Example(row.question, ids, _label(tokenizer, row, ids.completion), row.correctness_rate)


def _label(tokenizer: Any, row: SftRow | PreferenceRow, completion: Sequence[int]) -> Label:
    """Find the label in the completion's last tokens: canonical endings are few, so most are known already."""
    for length in (8, 16, 32):
        found = _in_tail(tokenizer, tuple(completion[-length:]), row.labels)
        if found is not None:
            index, candidates = found
            return Label(max(len(completion) - length, 0) + index, list(candidates), row.labels.index(row.gold))
    try:
        index, candidates = label_place(tokenizer, completion, row.labels)
    except ValueError as error:
        raise ValueError(f"question {row.question}: {error}") from None
    return Label(index, list(candidates), row.labels.index(row.gold))


@lru_cache(maxsize=4096)
def _in_tail(tokenizer: Any, tail: tuple[int, ...], labels: tuple[str, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Where the label stands in the last tokens; None where they do not hold the whole answer."""
    place = locate(tokenizer, tail, labels)
    # Without its `<answer>` the tail of an answer may read as one that was written without tags.
    if place is None or place.source != "free" or place.rest or any(label not in place.candidates for label in labels):
        return None
    return place.index, tuple(place.candidates[label] for label in labels)


def row_ids(tokenizer: Any, prompt: Sequence[Message], completion: str) -> Row:
    """Token ids of a prompt and its completion, which ends with the end-of-sequence token."""
    text, head = _prompt(tokenizer, tuple(prompt))
    joint = tokenizer(text + completion, add_special_tokens=False)["input_ids"]
    # Where the boundary's characters merge into one token, the response is encoded alone, as generation would see it.
    whole = joint[: len(head)] == head
    tail = joint[len(head) :] if whole else tokenizer(completion, add_special_tokens=False)["input_ids"]
    return Row(head, [*tail, tokenizer.eos_token_id])


@lru_cache(maxsize=1024)
def _prompt(tokenizer: Any, prompt: tuple[Message, ...]) -> tuple[str, list[int]]:
    """Render and encode a prompt once for its responses, which follow each other in the rows."""
    return prompt_text(prompt, tokenizer), list(prompt_ids(tokenizer, prompt))


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


def pair_tokens(columns: dict[str, Any]) -> int:
    """Tokens of the longer of a pair's two sequences."""
    return len(columns["prompt_ids"]) + max(len(columns["chosen_ids"]), len(columns["rejected_ids"]))


def fitting(
    rows: list[Any],
    max_length: int | None,
    length: Callable[[Any], int],
    name: Callable[[Any], str] = lambda row: str(row.question),
) -> list[Any]:
    """Keep what fits in the context; what does not is counted and named, never cut: cutting loses the label."""
    if max_length is None:
        return rows
    long = [row for row in rows if length(row) > max_length]
    if long:
        names = ", ".join(map(name, long[:5])) + (", ..." if len(long) > 5 else "")
        logger.warning("dropped %d of %d rows longer than %d tokens: %s", len(long), len(rows), max_length, names)
    if rows and len(long) == len(rows):
        raise ValueError(f"all {len(rows)} rows are longer than max_length {max_length}")
    return [row for row in rows if length(row) <= max_length]
