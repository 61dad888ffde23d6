"""Rows of records -> token ids, with the label's place found once. Rows that do not fit the context are dropped.

Prompts are rendered as the engines render them and completions follow as they are: at test time the model continues
the very text that it was trained on.

Pairs on their way into a batch: labels found, rows without room for them dropped, TRL's tensors with ours beside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.dpo_trainer import DataCollatorForPreference

from catto.engines.transformers import prompt_ids
from catto.labels import label_place, locate
from catto.prompts import completion as rendered
from catto.prompts import prompt_text
from catto.records import Message, PreferenceRow, SftRow
from catto.training.batches import Row, padded

# ---- rows


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


# ---- pairs

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
