"""Pairs on their way into a batch: labels found, long rows dropped, TRL's tensors with the rows beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from trl.trainer.dpo_trainer import DataCollatorForPreference

from catto.labels import label_place
from catto.training.batches import Row

logger = logging.getLogger(__name__)
KEY = "catto"  # our entry in a batch; TRL would hand unknown entries to the model, so it is taken out before
# Columns beyond TRL's that reach the collator, where a dataset has them.
COLUMNS = (
    "question",
    "row",
    "label_candidates",
    "gold_index",
    "chosen_label_at",
    "rejected_label_at",
    "correctness_rate",
)


@dataclass(frozen=True)
class Pairs:
    """B pairs of a batch: rows [chosen; rejected] as TRL orders them, and what is known of each pair."""

    rows: list[Row]
    names: list[str]  # what an error calls each pair
    facts: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """The number of pairs."""
        return len(self.facts)


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator; its tensors are unchanged."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows and one `Pairs`."""
        output: dict[str, Any] = super().torch_call(examples)
        sides = (("chosen_ids", example) for example in examples), (("rejected_ids", example) for example in examples)
        rows = [Row(list(example["prompt_ids"]), list(example[side])) for part in sides for side, example in part]
        names = [str(example.get("question", f"row {example.get('row', '?')}")) for example in examples]
        facts = [{name: example[name] for name in COLUMNS if name in example} for example in examples]
        output[KEY] = Pairs(rows, names, facts)
        return output


def paired(collator: Any) -> Any:
    """Turn TRL's collator into ours; a user's own is left as it is."""
    return PairCollator(**vars(collator)) if type(collator) is DataCollatorForPreference else collator


def take_pairs(inputs: dict[str, Any]) -> tuple[dict[str, Any], Pairs | None]:
    """Take our entry out of a batch."""
    return {name: value for name, value in inputs.items() if name != KEY}, inputs.get(KEY)


def check_not_empty(arguments: Iterable[Any]) -> None:
    """Refuse a dataset without rows among a trainer's arguments."""
    if any(isinstance(argument, Dataset) and len(argument) == 0 for argument in arguments):
        raise ValueError("the dataset is empty")


def check_columns(dataset: Any, name: str) -> None:
    """Say which of the columns that a preference dataset needs is missing."""
    columns = dataset.column_names or ()
    missing = [column for column in ("chosen", "rejected") if columns and column not in columns]
    if missing:
        raise ValueError(f"the {name} dataset has no column {missing[0]!r}; it has {', '.join(columns)}")


def label_columns(example: dict[str, Any], tokenizer: Any, name: str, rated: bool) -> dict[str, Any]:
    """Find the labels of a pair in its token ids, once."""
    needed = ("labels", "gold", "correctness_rate") if rated else ("labels", "gold")
    missing = [column for column in needed if column not in example]
    if missing:
        raise ValueError(f"the {name} dataset has no column {missing[0]!r}: this objective reads the label's token")
    found: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        try:
            at, candidates = label_place(tokenizer, example[f"{side}_ids"], example["labels"])
        except ValueError as error:
            raise ValueError(f"{name} dataset row {example['row']}, {side}: {error}") from None
        found |= {f"{side}_label_at": at, "label_candidates": list(candidates)}
    return {**found, "gold_index": example["labels"].index(example["gold"])}


def without_long(dataset: Any, max_length: int | None, name: str) -> Any:
    """Drop, count and list pairs of which a side does not fit: cutting would lose the label."""
    if max_length is None:
        return dataset
    if not isinstance(dataset, Dataset):  # a stream cannot be counted beforehand
        return dataset.filter(lambda example: _length(example) <= max_length)
    lengths = [_length(example) for example in dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])]
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if len(kept) == len(lengths):
        return dataset
    if not kept:
        raise ValueError(f"every row of the {name} dataset is longer than max_length {max_length} tokens")
    long = [row for row, length in enumerate(lengths) if length > max_length]
    logger.warning(
        "dropped %d of %d %s rows longer than %d tokens: rows %s",
        len(long),
        len(lengths),
        name,
        max_length,
        ", ".join(map(str, long[:20])) + (", ..." if len(long) > 20 else ""),
    )
    return dataset.select(kept)


def _length(example: dict[str, Any]) -> int:
    """Tokens of the longer of the two sequences."""
    return len(example["prompt_ids"]) + max(len(example["chosen_ids"]), len(example["rejected_ids"]))
