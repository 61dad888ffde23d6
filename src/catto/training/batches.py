"""Rows of token ids -> one batch for one forward: padded side by side, packed, or with each prompt computed once.

With sharing, the responses to one prompt follow it in a single sequence, [prompt | y1 | y2 | ...]: every response sees
the prompt and itself, and its positions continue from the prompt's end. The last prompt position then predicts the
first token of several responses, so targets are not aligned with positions: each names the position that predicts it.
Packed, the sequences follow each other in one line and see nothing of each other, so no token is padding. Shared and
packed, the line opens with what all prompts begin with, most often the system message: it is computed once too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from catto.objectives.tiles import round_up
from catto.token_ids import count_shared_beginning
from catto.training.trl_compat import DataCollatorForPreference

Tokens = Sequence[int] | NDArray[np.int64]


class Row(NamedTuple):
    """A prompt and one response to it, as token ids."""

    prompt: Tokens
    completion: Tokens


class Query(NamedTuple):
    """Ask for the probabilities of the candidate tokens where completion token `token` of row `row` is predicted."""

    row: int
    token: int
    candidates: Sequence[int]
    gold: int = 0  # which candidate is right


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward, and where its outputs belong: N scored tokens, M queries, G lines of S tokens."""

    rows: Sequence[Row]  # what was laid out; stays on the host
    tokens: Sequence[NDArray[np.int64]]  # scored tokens of each scored row; stays on the host
    shared: bool
    packed: bool
    lengths: list[int]  # scored tokens of each scored row
    input_ids: Tensor  # (G, S)
    segments: Tensor  # (G, S): 0 the prompt, k > 0 its k-th response, -1 padding
    sequences: Tensor  # (G, S): 0 the beginning that all prompts share, k > 0 the k-th sequence, -1 padding
    position_ids: Tensor  # (G, S)
    counts: Tensor  # (G, S): in how many of the balanced rows each token is
    source: Tensor  # (N, 2): (line, column) that predicts each scored token
    place: Tensor  # (N, 2): (row, index of the token in prompt + completion, minus one): TRL's shifted layout
    targets: Tensor  # (N,)
    query_source: Tensor  # (M, 2)
    query_labels: Tensor  # (M, K), padded with -100
    query_gold: Tensor  # (M,)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Move every tensor."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Pin every tensor, which lets the data loader copy it to a device without waiting."""
        return self.map(Tensor.pin_memory)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def without_queries(self) -> Batch:
        """Return the same batch, with no label probabilities to compute."""
        return replace(
            self,
            query_source=self.query_source[:0],
            query_labels=self.query_labels[:0],
            query_gold=self.query_gold[:0],
        )

    @property
    def attention_mask(self) -> Tensor:
        """1 on tokens, 0 on padding: (G, S)."""
        return (self.segments >= 0).long()


def lay_out_rows(
    rows: Sequence[Row],
    queries: Sequence[Query],
    scored: int,
    pad: int,
    *,
    shared: bool,
    packed: bool = False,
    balanced: int | None = None,
    tokens: Sequence[NDArray[np.int64]] = (),
) -> Batch:
    """Lay out rows in one batch.

    If rows are both shared and packed, the beginning that all prompts share is computed once too. Each prompt keeps at
    least one token of its own, which predicts its responses.

    Args:
        rows: The rows.
        queries: Positions whose label probabilities are wanted.
        scored: The tokens of this many first rows are scored; the other rows only answer queries.
        pad: Token id of padding.
        shared: Whether to compute each prompt once.
        packed: Whether all sequences are in one line, without padding.
        balanced: How many of the first rows count in the load balancing of a mixture of experts; None counts all
            scored rows.
        tokens: For each of the first rows, which tokens to score, as indices in its completion; -1 is the prompt's
            last token. Rows beyond them are scored at their whole completion.

    Returns:
        The batch.
    """
    if balanced is None:
        balanced = scored
    lines = _LineBuilder(rows, shared=shared, packed=packed, balanced=balanced)
    input_ids, segments, sequences, position_ids, counts = lines.make_grid(pad)

    scored_tokens = []
    tables = [np.zeros((5, 0), np.int64)]  # of each scored token: its source (2), its place (2) and its id
    for number, row in enumerate(rows[:scored]):
        prompt_length = len(row.prompt)
        token_indices = np.arange(len(row.completion))
        if number < len(tokens):
            token_indices = np.asarray(tokens[number], np.int64)
        token_indices = token_indices[token_indices > -prompt_length]  # nothing predicts the first token of a row
        scored_tokens.append(token_indices)
        line, column = lines.find_source(number, token_indices)
        shifted_index = prompt_length + token_indices - 1
        row_ids = np.concatenate([row.prompt, row.completion]).astype(np.int64)
        targets = row_ids[prompt_length + token_indices]
        table_rows = np.broadcast_arrays(line, column, number, shifted_index, targets)
        tables.append(np.stack(table_rows))
    all_scored = np.concatenate(tables, axis=1)

    query_sources = [lines.find_source(query.row, query.token) for query in queries]
    return Batch(
        rows=rows,
        tokens=scored_tokens,
        shared=shared,
        packed=packed,
        lengths=[len(token_indices) for token_indices in scored_tokens],
        input_ids=torch.from_numpy(input_ids),
        segments=torch.from_numpy(segments),
        sequences=torch.from_numpy(sequences),
        position_ids=torch.from_numpy(position_ids),
        counts=torch.from_numpy(counts),
        source=torch.tensor(all_scored[:2].T),
        place=torch.tensor(all_scored[2:4].T),
        targets=torch.tensor(all_scored[4]),
        query_source=torch.from_numpy(np.array(query_sources, np.int64)).view(-1, 2),
        query_labels=pad_ids([query.candidates for query in queries]),
        query_gold=torch.tensor([query.gold for query in queries], dtype=torch.long),
    )


class _LineBuilder:
    """Puts rows into sequences and sequences into lines, and knows where each token of a row is.

    A table (5, T) holds what `Batch` has of each of T tokens: input id, segment, sequence, position and count. The
    count says in how many of the first `balanced` rows the token is.
    """

    def __init__(self, rows: Sequence[Row], *, shared: bool, packed: bool, balanced: int) -> None:
        prompts = [np.asarray(row.prompt, np.int64) for row in rows]
        common_length = 0
        if shared and packed:  # only then are all prompts in one line
            common_length = count_shared_beginning(prompt.tolist() for prompt in prompts)
        self.common = prompts[0][:common_length]
        self.own_prompts = [prompt[common_length:] for prompt in prompts]
        self.row_starts: list[tuple[int, int]] = []  # of each row: its sequence and where its completion begins there
        sequences = self._make_sequences(rows, shared=shared, balanced=balanced)
        # Of each sequence: its line and where it begins there.
        self.sequence_starts = [(number, 0) for number in range(len(sequences))]
        self.lines = sequences
        if packed:
            count = min(balanced, len(rows))
            beginning = _make_table(self.common, segment=0, sequence=0, position=0, count=count)
            parts = [beginning, *sequences]
            ends = np.cumsum([part.shape[1] for part in parts]).tolist()
            self.sequence_starts = [(0, end) for end in ends]
            self.lines = [np.concatenate(parts, axis=1)]

    def _make_sequences(self, rows: Sequence[Row], *, shared: bool, balanced: int) -> list[NDArray[np.int64]]:
        """Return the table of each sequence: its prompt and then its responses, several if prompts are shared.

        Fills `row_starts`.
        """
        sequence_by_key: dict[Any, int] = {}
        sequences: list[list[NDArray[np.int64]]] = []  # the tables of each: its prompt, then its responses
        position = len(self.common)
        for number, row in enumerate(rows):
            prompt = self.own_prompts[number]
            completion = np.asarray(row.completion, np.int64)
            key: Any = number
            if shared:  # rows with the same prompt are one sequence
                key = prompt.tobytes()
            sequence = sequence_by_key.setdefault(key, len(sequences))
            is_new = sequence == len(sequences)
            if is_new:
                sequences.append([_make_table(prompt, segment=0, sequence=sequence + 1, position=position, count=0)])
            tables = sequences[sequence]
            count = int(number < balanced)
            prompt_counts = tables[0][4]
            prompt_counts += count  # in place, once for each response
            self.row_starts.append((sequence, sum(table.shape[1] for table in tables)))
            response = _make_table(
                completion,
                segment=len(tables),
                sequence=sequence + 1,
                position=position + len(prompt),
                count=count,
            )
            tables.append(response)
        return [np.concatenate(tables, axis=1) for tables in sequences]

    def make_grid(self, pad: int) -> NDArray[np.int64]:
        """Return the lines, padded to the same length: (5, G, S)."""
        longest = max(line.shape[1] for line in self.lines)
        grid = np.empty((5, len(self.lines), longest), np.int64)
        padding = [pad, -1, -1, 0, 0]  # its input id, segment, sequence, position and count
        grid[:] = np.reshape(padding, (5, 1, 1))
        for number, line in enumerate(self.lines):
            grid[:, number, : line.shape[1]] = line
        return grid

    def find_source(self, row: int, token: Any) -> tuple[int, Any]:
        """Return the line and the column that predict a token, given by its index in the completion.

        The prompt's end predicts the first token. A token of the prompt has a negative index; one of the common
        beginning is predicted there, at the line's start.

        token: An index, or an array of them, which gives an array of columns.
        """
        sequence, response_start = self.row_starts[row]
        line, sequence_start = self.sequence_starts[sequence]
        prompt_length = len(self.own_prompts[row])
        in_response = sequence_start + response_start + token - 1
        in_prompt = sequence_start + prompt_length + token - 1
        in_common = len(self.common) + prompt_length + token - 1
        before_response = np.where(prompt_length + token > 0, in_prompt, in_common)
        return line, np.where(token > 0, in_response, before_response)


def _make_table(ids: NDArray[np.int64], *, segment: int, sequence: int, position: int, count: int) -> NDArray[np.int64]:
    positions = position + np.arange(len(ids))
    return np.stack(np.broadcast_arrays(ids, segment, sequence, positions, count))


def pad_ids(rows: Sequence[Sequence[int]], multiple: int = 1) -> Tensor:
    """Pad lists of ids with -100 on the right: (len(rows), width), the width a multiple of `multiple`."""
    longest = max((len(row) for row in rows), default=1)
    width = round_up(longest, multiple)
    table = []
    for row in rows:
        padding = [-100] * (width - len(row))
        table.append([*row, *padding])
    return torch.tensor(table, dtype=torch.long).view(-1, width)


# ---- the attention mask of shared and packed sequences ---------------------------------------------------------------


def make_visibility(batch: Batch) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a function that says whether a token may look at another.

    Its arguments are the line, the head, the column of the token and the column of the other, tensors or numbers. A
    token sees what comes before it in the common beginning, in its sequence's prompt and in its own response. Padding
    sees itself, else its row of the softmax has nothing to sum.
    """
    segments = batch.segments
    sequences = batch.sequences

    def is_visible(line: Any, head: Any, query: Any, key: Any) -> Any:
        key_segment = segments[line, key]
        key_sequence = sequences[line, key]
        in_prompt_or_response = (key_segment == 0) | (key_segment == segments[line, query])
        in_same_sequence = (key_sequence == sequences[line, query]) & (key_sequence > 0)
        in_sequence_or_common = (key_sequence == 0) | in_same_sequence
        is_before = query >= key
        return (is_before & in_prompt_or_response & in_sequence_or_common) | (query == key)

    return is_visible


def dense_mask(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return the additive mask (G, 1, S, S), 0 where a token may look.

    It is never boolean: eager attention adds the mask, and a boolean one would be silently wrong there.
    """
    device = batch.segments.device
    lines = torch.arange(batch.segments.shape[0], device=device)
    columns = torch.arange(batch.segments.shape[1], device=device)
    is_visible = make_visibility(batch)
    seen = is_visible(lines[:, None, None], None, columns[:, None], columns)
    mask = torch.zeros_like(seen, dtype=dtype)
    mask.masked_fill_(~seen, torch.finfo(dtype).min)
    return mask.unsqueeze(1)


def block_mask(batch: Batch) -> Any:
    """Return the same mask for FlexAttention, which skips the blocks in which no token may look at another."""
    from torch.nn.attention.flex_attention import create_block_mask

    lines, size = batch.segments.shape
    device = batch.segments.device
    make_mask: Any = create_block_mask
    if device.type == "cuda":
        # Compiled, it never holds the mask of every pair of tokens; lengths that change compile it twice, no more.
        make_mask = torch.compile(create_block_mask)
    return make_mask(make_visibility(batch), lines, None, size, size, device=device)


# ---- pairs -----------------------------------------------------------------------------------------------------------

KEY = "catto"  # our entry in a batch; TRL would pass unknown entries to the model, so it is taken out before
# Columns beyond TRL's that reach the collator, where a dataset has them.
LABEL_COLUMNS = ("chosen_label_at", "rejected_label_at", "chosen_candidates", "rejected_candidates", "gold_index")
REASONING_COLUMNS = ("chosen_reasoning", "rejected_reasoning")  # how many tokens precede the label
COLUMNS = ("row", *LABEL_COLUMNS, "rate", *REASONING_COLUMNS)


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator, which also puts our tensors and the layout of the batch under `KEY`.

    Attributes:
        layout: Whether prompts are shared and rows packed. None leaves the layout to the training step: if Accelerate
            concatenates, broadcasts and slices batches along dimension 0, a batch may hold only tensors of 2 B rows.
        reads_reasoning: Whether the preference loss reads only the tokens before the label.
    """

    layout: Mapping[str, bool] | None = None
    reads_reasoning: bool = False

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows, [chosen; rejected], and as many rows of ours."""
        output: dict[str, Any] = super().torch_call(examples)
        our_tensors: dict[str, Any] = {
            "row": torch.tensor([example.get("row", -1) for example in examples] * 2),
            "start": completion_starts(output),
        }
        # All of them: a user may have a column of one of these names.
        has_labels = examples[0].keys() >= {*LABEL_COLUMNS, "rate"}
        if has_labels:
            our_tensors["label_at"] = torch.tensor(_join_sides(examples, "label_at"))
            # Padded to a multiple of 8, so that batches of different labels can be concatenated.
            our_tensors["candidates"] = pad_ids(_join_sides(examples, "candidates"), multiple=8)
            our_tensors["gold_index"] = torch.tensor([example["gold_index"] for example in examples] * 2)
            our_tensors["correctness_rate"] = torch.tensor([example["rate"] for example in examples] * 2)
        if self.reads_reasoning:
            our_tensors["reasoning"] = torch.tensor(_join_sides(examples, "reasoning"))
        if self.layout is not None:
            our_tensors["layout"] = lay_out_pairs(output, our_tensors, self.pad_token_id, **self.layout)
        output[KEY] = our_tensors
        return output


def _join_sides(examples: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    """Return the values of the chosen responses, then those of the rejected ones."""
    chosen = [example[f"chosen_{column}"] for example in examples]
    rejected = [example[f"rejected_{column}"] for example in examples]
    return chosen + rejected


def completion_starts(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the index of each row's first completion token; the row's length if it has none. (2 B,)"""
    mask = inputs["completion_mask"]
    lengths = inputs["attention_mask"].sum(-1)
    has_completion = mask.any(-1)
    first_index = mask.ne(0).int().argmax(-1)
    return torch.where(has_completion, first_index, lengths)


def lay_out_pairs(inputs: Mapping[str, Tensor], our_tensors: Mapping[str, Tensor], pad: int, **layout: bool) -> Batch:
    """Lay out the 2 B rows of TRL's tensors, which its collator may have truncated.

    The tokens that `completion_mask` selects are scored. Labels, if `our_tensors` has them, become queries.

    Args:
        inputs: TRL's tensors: `input_ids`, `attention_mask` and `completion_mask`, (2 B, S).
        our_tensors: What `PairCollator` adds for the same rows.
        pad: Token id of padding.
        **layout: `shared` and `packed` of `lay_out_rows`.

    Returns:
        The batch.

    Raises:
        ValueError: A row was truncated before its label.
    """
    ids = inputs["input_ids"].cpu().numpy().copy()  # a worker moves the tensor to shared memory and frees the old one
    masks = (inputs["completion_mask"] * inputs["attention_mask"]).cpu().numpy()
    lengths = inputs["attention_mask"].sum(-1).tolist()
    starts = our_tensors.get("start")
    if starts is None:
        starts = completion_starts(inputs)
    rows = []
    tokens = []
    for row_ids, mask, length, start in zip(ids, masks, lengths, starts.tolist(), strict=True):
        rows.append(Row(row_ids[:start], row_ids[start:length]))
        tokens.append(np.flatnonzero(mask) - start)
    queries = []
    if "label_at" in our_tensors:
        queries = _make_label_queries(rows, our_tensors)
    return lay_out_rows(rows, queries, len(rows), pad, tokens=tokens, **layout)


def _make_label_queries(rows: Sequence[Row], our_tensors: Mapping[str, Tensor]) -> list[Query]:
    """Ask for the label probabilities of every row; ValueError if a row was truncated before its label."""
    queries = []
    for number, label_at in enumerate(our_tensors["label_at"].tolist()):
        is_cut_off = label_at >= len(rows[number].completion)
        if is_cut_off:
            row = int(our_tensors["row"][number])
            raise ValueError(f"row {row}: the data collator's max_length cuts the label off, which this term reads")
        candidates = [token for token in our_tensors["candidates"][number].tolist() if token >= 0]  # without padding
        gold = int(our_tensors["gold_index"][number])
        queries.append(Query(row=number, token=label_at, candidates=candidates, gold=gold))
    return queries
