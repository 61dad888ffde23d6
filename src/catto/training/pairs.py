"""Pairs on their way into a batch: labels found, rows without room for them dropped, TRL's tensors with ours beside."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.dpo_trainer import DataCollatorForPreference

from catto.labels import label_place
from catto.training.batches import Row, padded
from catto.training.rows import pair_tokens

logger = logging.getLogger(__name__)
KEY = "catto"  # our entry in a batch; TRL would hand unknown entries to the model, so it is taken out before
# Columns beyond TRL's that reach the collator, where a dataset has them.
COLUMNS = (
    "row",
    "chosen_label_at",
    "rejected_label_at",
    "chosen_candidates",
    "rejected_candidates",
    "gold_index",
    "correctness_rate",
)
# Candidates are padded to a multiple of this, so that batches of different labels can be concatenated.
CANDIDATES = 8


@dataclass(frozen=True)
class Pairs:
    """B pairs of a batch, read from TRL's tensors of 2 B rows, [chosen; rejected], and ours beside them.

    TRL's tensors are what it trains on, whatever its collator has cut off.
    """

    inputs: Mapping[str, Tensor]
    known: Mapping[str, Tensor]  # (2 B,) each, candidates (2 B, K) padded with -100

    @property
    def size(self) -> int:
        """The number of pairs."""
        return len(self.inputs["input_ids"]) // 2

    @cached_property
    def rows(self) -> list[Row]:
        """The 2 B rows as token ids, without padding."""
        ids = self.inputs["input_ids"].tolist()
        lengths = self.inputs["attention_mask"].sum(-1).tolist()
        completions = self.inputs["completion_mask"].sum(-1).tolist()
        return [
            Row(row[: length - tokens], row[length - tokens : length])
            for row, length, tokens in zip(ids, lengths, completions, strict=True)
        ]

    @cached_property
    def facts(self) -> list[dict[str, Any]]:
        """What is known of each pair, under the names of the dataset's columns."""
        known = {name: value.tolist() for name, value in self.known.items()}
        found = [{"row": known["row"][pair]} for pair in range(self.size)]
        if "label_at" not in known:
            return found
        for pair, fact in enumerate(found):
            for side, row in (("chosen", pair), ("rejected", pair + self.size)):
                self._check_label(row, known["label_at"][row], fact["row"])
                fact[f"{side}_label_at"] = known["label_at"][row]
                fact[f"{side}_candidates"] = [token for token in known["candidates"][row] if token >= 0]
            fact["gold_index"], fact["correctness_rate"] = known["gold_index"][pair], known["correctness_rate"][pair]
        return found

    def _check_label(self, row: int, at: int, number: int) -> None:
        if at >= len(self.rows[row].completion):
            raise ValueError(f"row {number}: the data collator's max_length cuts the label off, which this term reads")


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator; its tensors are unchanged."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows, and tensors of as many rows under `KEY`.

        Accelerate concatenates, broadcasts and slices batches along dimension 0, so ours must have 2 B rows too.
        """
        output: dict[str, Any] = super().torch_call(examples)
        known = {"row": torch.tensor([example.get("row", -1) for example in examples] * 2)}
        if "chosen_label_at" in examples[0]:
            both = [(example, side) for side in ("chosen", "rejected") for example in examples]
            candidates = [list(example[f"{side}_candidates"]) for example, side in both]
            width = -(-max(map(len, candidates)) // CANDIDATES) * CANDIDATES
            known["label_at"] = torch.tensor([example[f"{side}_label_at"] for example, side in both])
            known["candidates"] = padded(candidates, width, -100)
            known["gold_index"] = torch.tensor([example["gold_index"] for example, _ in both])
            rates = [example.get("correctness_rate") or 0.0 for example, _ in both]  # read by `outcome` alone
            known["correctness_rate"] = torch.tensor(rates, dtype=torch.float)
        output[KEY] = known
        return output


def paired(collator: Any) -> Any:
    """Turn TRL's collator into ours; a user's own is left as it is."""
    return PairCollator(**vars(collator)) if type(collator) is DataCollatorForPreference else collator


def take_pairs(inputs: dict[str, Any]) -> tuple[dict[str, Any], Pairs | None]:
    """Take our entry out of a batch."""
    rest = {name: value for name, value in inputs.items() if name != KEY}
    known = inputs.get(KEY)
    return rest, known if known is None or isinstance(known, Pairs) else Pairs(rest, known)


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


def numbered(example: dict[str, Any], row: int, **determining: Any) -> dict[str, Any]:
    """Give a row its number. What else determines its reference log-probabilities enters the dataset's fingerprint,
    by which TRL caches them."""
    return {"row": row}


def label_columns(example: dict[str, Any], tokenizer: Any, name: str, rated: bool) -> dict[str, Any]:
    """Find the labels of a pair in its token ids, once."""
    needed = ("labels", "gold", "correctness_rate") if rated else ("labels", "gold")
    missing = [column for column in needed if column not in example]
    if missing:
        raise ValueError(f"the {name} dataset has no column {missing[0]!r}: this objective reads the label's token")
    where, rate = f"{name} dataset row {example['row']}", example.get("correctness_rate")
    if rated and not (isinstance(rate, int | float) and 0 <= rate <= 1):
        raise ValueError(f"{where}: correctness_rate is {rate!r}, expected a number from 0 to 1")
    if example["gold"] not in example["labels"]:
        raise ValueError(f"{where}: gold {example['gold']!r} is not one of {', '.join(example['labels'])}")
    found: dict[str, Any] = {"gold_index": example["labels"].index(example["gold"])}
    for side in ("chosen", "rejected"):
        try:
            at, candidates = label_place(tokenizer, example[f"{side}_ids"], example["labels"])
        except ValueError as error:
            raise ValueError(f"{where}, {side}: {error}") from None
        found |= {f"{side}_label_at": at, f"{side}_candidates": list(candidates)}
    return found


@dataclass
class Fits:
    """Whether a pair is trained on; each one that is not is counted, and told in a stream at 1, 2, 4, 8, ...

    `whole`: both sequences must fit, since cutting would lose the label. Else only a prompt that leaves no room for
    a response is dropped, as TRL does.
    """

    limit: int
    whole: bool
    name: str
    dropped: int = 0

    def test(self, example: dict[str, Any]) -> bool:
        """Whether the pair fits."""
        return pair_tokens(example) <= self.limit if self.whole else len(example["prompt_ids"]) < self.limit

    def __call__(self, example: dict[str, Any]) -> bool:
        """Test a row of a stream and tell of it where it is dropped."""
        fits = self.test(example)
        if not fits:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                logger.warning("dropped %d %s rows so far, %s", self.dropped, self.name, self.reason)
        return fits

    @property
    def reason(self) -> str:
        """Why a row is dropped."""
        return f"longer than {self.limit} tokens" if self.whole else f"whose prompt alone fills {self.limit} tokens"


def fitting_pairs(dataset: Any, fits: Fits) -> Any:
    """Drop the pairs that do not fit and say how many; an error where none does, in a stream too."""
    if not isinstance(dataset, Dataset):
        if next(filter(fits.test, dataset), None) is None:
            raise ValueError(f"every row of the {fits.name} dataset is longer than max_length {fits.limit} tokens")
        return dataset.filter(fits)
    columns = dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
    kept = [row for row, example in enumerate(columns) if fits.test(example)]
    if not kept:
        raise ValueError(f"every row of the {fits.name} dataset is longer than max_length {fits.limit} tokens")
    if len(kept) == len(dataset):
        return dataset
    long = sorted(set(range(len(dataset))) - set(kept))
    names = ", ".join(map(str, long[:20])) + (", ..." if len(long) > 20 else "")
    logger.warning("dropped %d of %d %s rows %s: rows %s", len(long), len(dataset), fits.name, fits.reason, names)
    return dataset.select(kept)
