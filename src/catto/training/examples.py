"""Records -> token ids, with the label located once. Rows that do not fit the context are dropped.

Prompts are rendered as the engines render them and completions follow unchanged: at test time the model continues the
very text that it was trained on.
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
from catto.prompts import completion as rendered
from catto.prompts import prompt_ids, prompt_text
from catto.records import Message, PreferenceRow, SftRow
from catto.training.batches import Query, Row

logger = logging.getLogger(__name__)


class Label(NamedTuple):
    """The index of a completion's label token, the K labels' tokens at that index, and which of them is right.

    target: a distribution over the K labels that `outcome_target` reads in place of the right one, most often the
    shares of labels among samples; None: there is none.
    """

    at: int
    candidates: list[int]
    gold: int
    target: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Example:
    """One response ready to train on: its tokens, its label, the question it answers."""

    question: str
    row: Row
    label: Label

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.row.prompt) + len(self.row.completion)

    def before_label(self) -> Row:
        """The row up to the label: its last position predicts the label, and nothing after it is computed."""
        return Row(self.row.prompt, self.row.completion[: self.label.at])


def make_examples(tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None) -> list[Example]:
    """Tokenise completions, right or wrong, and find their labels; an open one (label None) gets a label first."""
    return locate_labels(tokenizer, tokenize_responses(tokenizer, rows, max_length))


def tokenize_responses(
    tokenizer: Any, rows: Iterable[SftRow], max_length: int | None = None
) -> list[tuple[SftRow, Row]]:
    """The rows that fit, with their tokens: what is drawn from before labels are looked for."""
    made = []
    for row in rows:
        text = row.completion[-1].content
        if row.label is None:
            text += row.labels[0] + rendered(None, row.labels[0]).partition(row.labels[0])[2]
        made.append((row, row_ids(tokenizer, row.prompt, text)))
    return drop_too_long(made, max_length, lambda pair: sum(map(len, pair[1])), lambda pair: pair[0].question)


def locate_labels(tokenizer: Any, rows: Iterable[tuple[SftRow, Row]]) -> list[Example]:
    """Find the labels of tokenised rows."""
    made = []
    for row, ids in rows:
        at, candidates = find_label(tokenizer, ids.completion, row.labels, f"question {row.question}")
        votes = row.votes
        target = None if votes is None else tuple(votes.get(label, 0.0) for label in row.labels)
        made.append(Example(row.question, ids, Label(at, candidates, row.labels.index(row.gold), target)))
    return made


def label_queries(examples: Sequence[Example], first: int = 0) -> list[Query]:
    """Ask for the label probabilities of examples whose rows are numbered from `first`."""
    queries = []
    for row, example in enumerate(examples, first):
        label = example.label
        queries.append(Query(row, label.at, label.candidates, label.gold))
    return queries


def with_targets(examples: Sequence[Example], outcome_target: str) -> list[Example]:
    """Give every example the distribution that its score aims at; `gold` needs none.

    `votes` is the example's own distribution, `mix` the mean of that and one-hot gold.
    """
    made = []
    for example in examples:
        label = example.label
        target: tuple[float, ...] | None = None
        if outcome_target != "gold":
            target = _checked_target(example, outcome_target)
        if outcome_target == "mix":
            votes = target or ()
            target = tuple((share + (place == label.gold)) / 2 for place, share in enumerate(votes))
        made.append(replace(example, label=label._replace(target=target)))
    return made


def _checked_target(example: Example, outcome_target: str) -> tuple[float, ...]:
    """The distribution of an example; a ValueError where it has none, or what it has is no distribution."""
    target = example.label.target
    where = f"question {example.question}"
    if target is None:
        raise ValueError(f"{where}: outcome_target is {outcome_target!r} but the example has no votes (label.target)")
    labels = len(example.label.candidates)
    is_distribution = len(target) == labels and min(target) >= 0 and abs(sum(target) - 1) < 1e-6
    if not is_distribution:
        raise ValueError(f"{where}: label.target is {target}, expected {labels} shares that sum to 1")
    return target


def target_table(examples: Sequence[Example], width: int) -> list[list[float]]:
    """The distributions of examples, padded with 0 to `width` labels each."""
    table = []
    for example in examples:
        shares = list(example.label.target or ())
        table.append(shares + [0.0] * (width - len(shares)))
    return table


def find_label(tokenizer: Any, completion: Any, labels: Sequence[str], where: str) -> tuple[int, list[int]]:
    """The index of the label's token and the labels' tokens at that index; an error names `where`."""
    try:
        index, candidates = find_label_token(tokenizer, completion, labels)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return index, list(candidates)


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


def drop_too_long(
    rows: list[Any], max_length: int | None, length: Callable[[Any], int], name: Callable[[Any], str]
) -> list[Any]:
    """Keep what fits in the context; what does not is counted and named, never cut: cutting loses the label."""
    if max_length is None:
        return rows
    reason = f"rows longer than {max_length} tokens"
    fits = [length(row) <= max_length for row in rows]
    return [rows[number] for number in _kept(fits, "", max_length, reason, lambda number: name(rows[number]))]


def _kept(fits: Sequence[bool], dataset: str, limit: int, what: str, name: Callable[[int], str]) -> list[int]:
    """The numbers of the rows that fit; the others are logged, and where none fits that is an error."""
    dropped = [number for number, fit in enumerate(fits) if not fit]
    if dropped and len(dropped) == len(fits):
        where = f" of the {dataset} dataset" if dataset else ""
        raise ValueError(f"every row{where} is longer than max_length {limit} tokens")
    if dropped:
        names = ", ".join(map(name, dropped[:20])) + (", ..." if len(dropped) > 20 else "")
        logger.warning("dropped %d of %d %s: %s", len(dropped), len(fits), what, names)
    return [number for number, fit in enumerate(fits) if fit]


# ---- preference pairs ------------------------------------------------------------------------------------------------


def preference_columns(tokenizer: Any, row: PreferenceRow) -> dict[str, Any]:
    """A preference row as the columns that `CATTOTrainer` trains on."""
    chosen, rejected = (row_ids(tokenizer, row.prompt, turns[-1].content) for turns in (row.chosen, row.rejected))
    ids = {"prompt_ids": chosen.prompt, "chosen_ids": chosen.completion, "rejected_ids": rejected.completion}
    labels = {"labels": list(row.labels), "gold": row.gold, "correctness_rate": row.correctness_rate}
    return {"question": row.question, **labels, **ids}


def pair_tokens(columns: dict[str, Any]) -> int:
    """Tokens of the longer of a pair's two sequences."""
    return len(columns["prompt_ids"]) + max(len(columns["chosen_ids"]), len(columns["rejected_ids"]))


def number_row(example: dict[str, Any], row: int, **determining: Any) -> dict[str, Any]:
    """Give a row its number. `determining` is what else its reference log-probabilities depend on: it enters the
    dataset's fingerprint, by which TRL caches them."""
    return {"row": row}


# A row with the columns that an objective may read beside TRL's, as an error shows them.
EXAMPLE_COLUMNS = {"labels": ["A", "B", "C", "D"], "gold": "B", "correctness_rate": 0.6}


def require_columns(dataset: Any, needed: Sequence[str], name: str, reader: str) -> None:
    """Raise a ValueError that lists every column of `needed` that the dataset lacks, with a row that has them.

    reader: what reads the columns, for the error.
    """
    columns = dataset.column_names or list(next(iter(dataset)))
    missing = [column for column in needed if column not in columns]
    if not missing:
        return
    listed = ", ".join(map(repr, missing))
    example = {column: EXAMPLE_COLUMNS[column] for column in needed}
    texts = {"prompt": "...", "chosen": "... <answer>B</answer>", "rejected": "... <answer>A</answer>"}
    row = json.dumps(texts | example)
    raise ValueError(f"the {name} dataset has no column {listed}, which {reader} reads. A row looks like {row}")


def label_columns(example: dict[str, Any], tokenizer: Any, name: str, rated: bool) -> dict[str, Any]:
    """Find the labels of a pair in its token ids, once. rated: whether the objective reads the correctness rate."""
    where, rate = f"{name} dataset row {example['row']}", example.get("correctness_rate")
    if rated and not (isinstance(rate, int | float) and 0 <= rate <= 1):
        raise ValueError(f"{where}: correctness_rate is {rate!r}, expected a number from 0 to 1")
    _check_label_list(example, where)
    if example["gold"] not in example["labels"]:
        raise ValueError(f"{where}: gold {example['gold']!r} is not one of {', '.join(example['labels'])}")
    columns: dict[str, Any] = {"gold_index": example["labels"].index(example["gold"])}
    columns["rate"] = float(example["correctness_rate"]) if rated else 0.0
    for side in ("chosen", "rejected"):
        at, candidates = find_label(tokenizer, example[f"{side}_ids"], example["labels"], f"{where}, {side}")
        columns |= {f"{side}_label_at": at, f"{side}_candidates": candidates}
    return columns


def reasoning_columns(example: dict[str, Any], tokenizer: Any, name: str) -> dict[str, Any]:
    """Count the tokens of each response that come before its label; all of them where it gives no answer."""
    where = f"{name} dataset row {example['row']}"
    _check_label_list(example, where)
    columns = {}
    for side in ("chosen", "rejected"):
        ids = example[f"{side}_ids"]
        try:
            place = locate_label(tokenizer, ids, example["labels"])
        except ValueError as error:
            raise ValueError(f"{where}, {side}: {error}") from None
        columns[f"{side}_reasoning"] = len(ids) if place is None else len(place.ids)
    return columns


STREAM_SAMPLE = 64  # rows of a streamed dataset that are looked at before training


def check_reasoning(dataset: Any, name: str) -> None:
    """Refuse a dataset in which most pairs have nothing to prefer before their labels; log how many there are.

    A pair has nothing to prefer if both responses are the same up to their labels: answers that come first are. Its
    loss is constant. Of a streamed dataset the first rows are looked at.
    """
    rows = dataset.select_columns(["chosen_ids", "rejected_ids", "chosen_reasoning", "rejected_reasoning"])
    if not isinstance(rows, Dataset):
        rows = rows.take(STREAM_SAMPLE)
    total = 0
    without_reasoning = 0
    without_answer = 0
    for row in rows:
        total += 1
        chosen = row["chosen_ids"][: row["chosen_reasoning"]]
        rejected = row["rejected_ids"][: row["rejected_reasoning"]]
        without_reasoning += chosen == rejected
        without_answer += len(chosen) == len(row["chosen_ids"]) or len(rejected) == len(row["rejected_ids"])
    if without_reasoning > total / 2:
        raise ValueError(
            f"preference_tokens is 'reasoning', but {without_reasoning} of {total} pairs of the {name} dataset have "
            f"nothing to prefer: their responses are the same up to the label, as answers without reasoning are"
        )
    if without_reasoning:
        note = "%d of %d %s pairs have nothing to prefer: their responses are the same up to the label"
        logger.warning(note, without_reasoning, total, name)
    if without_answer:
        note = "%d of %d %s pairs have a response without an answer, which the preference loss reads whole"
        logger.warning(note, without_answer, total, name)


def _check_label_list(example: dict[str, Any], where: str) -> None:
    if not isinstance(example["labels"], list | tuple):
        raise ValueError(f"{where}: labels are {example['labels']!r}, expected a list")


@dataclass
class LengthFilter:
    """Whether a pair is trained on. In a stream, dropped pairs are counted and logged at 1, 2, 4, 8, ...

    `whole`: both sequences must fit, since cutting would lose the label. Else only a prompt that leaves no room for
    a response is dropped, as TRL does.
    """

    limit: int
    whole: bool
    name: str
    dropped: int = 0

    @property
    def reason(self) -> str:
        """Why a row is dropped."""
        return f"longer than {self.limit} tokens" if self.whole else f"whose prompt alone fills {self.limit} tokens"

    def test(self, example: dict[str, Any]) -> bool:
        """Whether the pair fits."""
        return pair_tokens(example) <= self.limit if self.whole else len(example["prompt_ids"]) < self.limit

    def __call__(self, example: dict[str, Any]) -> bool:
        """Test a row of a stream and log some of those that are dropped."""
        fits = self.test(example)
        if not fits:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                logger.warning("dropped %d %s rows so far, %s", self.dropped, self.name, self.reason)
        return fits

    def select(self, dataset: Any) -> Any:
        """Drop the pairs that do not fit; an error where none does, in a stream too."""
        what = f"{self.name} rows {self.reason}"
        if not isinstance(dataset, Dataset):
            if not any(map(self.test, dataset)):
                _kept([False], self.name, self.limit, what, str)
            return dataset.filter(self)
        fits = list(map(self.test, dataset.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])))
        kept = _kept(fits, self.name, self.limit, what, lambda row: f"row {row}")
        return dataset if all(fits) else dataset.select(kept)
