"""Lay out rows of token ids in one batch for one forward pass: padded, packed, or with shared prompts.

Shared: a prompt is computed once for all its responses, in a single sequence [prompt | y1 | y2 | ...]. Each response
attends to the prompt and to itself, and its position ids continue from the prompt's end. The last position of the
prompt predicts the first token of every response. A target is therefore not always predicted by the position before it,
and the batch stores the predicting position of each target (`source`).

Packed: all sequences are concatenated in one line without padding and do not attend to each other.

Shared and packed: the line starts with the tokens that all prompts begin with, most often the system message. They are
computed only once.
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
    """A request for the probabilities of candidate tokens at the position that predicts one token of a completion."""

    row: int  # index of the row in the batch
    token: int  # index of the token in the row's completion
    candidates: Sequence[int]
    gold: int = 0  # index of the right candidate


@dataclass(frozen=True)
class Batch:
    """The inputs of one forward pass: G lines of S tokens, of which N tokens are scored and M queries are answered.

    To score a token is to compute the statistics of the model's distribution at the position that predicts it.
    """

    rows: Sequence[Row]  # the rows in this batch; stay on the host
    scored_tokens: Sequence[NDArray[np.int64]]  # for each scored row, the completion indices of its scored tokens
    shared: bool
    packed: bool
    lengths: list[int]  # number of scored tokens of each scored row
    input_ids: Tensor  # (G, S)
    segments: Tensor  # (G, S): 0 for the prompt, k > 0 for its k-th response, -1 for padding
    sequences: Tensor  # (G, S): 0 for the common beginning of all prompts, k > 0 for the k-th sequence, -1 for padding
    position_ids: Tensor  # (G, S)
    counts: Tensor  # (G, S): number of rows with each token, as its weight in a mixture of experts' balancing loss
    source: Tensor  # (N, 2): (line, column) of the position that predicts each scored token
    trl_index: Tensor  # (N, 2): (row, column) of each scored token in TRL's shifted tensors, without the first token
    targets: Tensor  # (N,): the scored tokens themselves
    query_source: Tensor  # (M, 2): (line, column) of the position at which each query is answered
    query_labels: Tensor  # (M, K): the candidate tokens of each query, padded with -100
    query_gold: Tensor  # (M,): index of each query's right candidate

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Move every tensor to a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Pin the memory of every tensor, so that the data loader can copy it to a device without waiting."""
        return self.map(Tensor.pin_memory)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def without_queries(self) -> Batch:
        """Return the same batch without queries, so that no label probabilities are computed."""
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
    num_scored: int,
    pad: int,
    *,
    shared: bool,
    packed: bool = False,
    num_balanced: int | None = None,
    scored_tokens: Sequence[NDArray[np.int64]] = (),
) -> Batch:
    """Lay out rows in one batch.

    With `shared`, rows with the same prompt share one copy of it. With both `shared` and `packed`, all prompts also
    share one copy of their common beginning. Each prompt keeps at least one token of its own, which predicts the first
    token of its responses.

    Args:
        rows: The rows.
        queries: Requests for label probabilities.
        num_scored: Number of rows whose tokens are scored: the first ones. The other rows only serve queries.
        pad: Token id used for padding.
        shared: Whether to compute each prompt only once.
        packed: Whether to put all sequences in one line, without padding.
        num_balanced: Number of rows that count in the load-balancing loss of a mixture of experts: the first ones. None
            counts the scored rows.
        scored_tokens: The tokens to score, as one array of indices for each of the first rows. Index 0 is the first
            token of the completion, and -1 is the last token of the prompt. Scored rows without an array are scored on
            their whole completions.

    Returns:
        The batch.
    """
    if num_balanced is None:
        num_balanced = num_scored
    lines = _LineBuilder(rows, shared=shared, packed=packed, num_balanced=num_balanced)
    input_ids, segments, sequences, position_ids, counts = lines.make_grid(pad)

    located = _locate_scored_tokens(lines, rows[:num_scored], scored_tokens)
    query_sources = [lines.find_source(query.row, query.token) for query in queries]
    return Batch(
        rows=rows,
        scored_tokens=located.indices,
        shared=shared,
        packed=packed,
        lengths=[len(indices) for indices in located.indices],
        input_ids=torch.from_numpy(input_ids),
        segments=torch.from_numpy(segments),
        sequences=torch.from_numpy(sequences),
        position_ids=torch.from_numpy(position_ids),
        counts=torch.from_numpy(counts),
        source=torch.from_numpy(located.source),
        trl_index=torch.from_numpy(located.trl_index),
        targets=torch.from_numpy(located.targets),
        query_source=torch.from_numpy(np.array(query_sources, np.int64)).view(-1, 2),  # (0, 2) without queries
        query_labels=pad_ids([query.candidates for query in queries]),
        query_gold=torch.tensor([query.gold for query in queries], dtype=torch.long),
    )


class _ScoredTokens(NamedTuple):
    """The scored tokens of a batch, as arrays.

    Attributes:
        indices: For each scored row, the indices of its scored tokens in the completion; negative in the prompt.
        source: (line, column) of the position that predicts each of the N scored tokens, (N, 2).
        trl_index: (row, column) of each scored token in TRL's shifted tensors, which lack the first token, (N, 2).
        targets: The scored tokens, (N,).
    """

    indices: list[NDArray[np.int64]]
    source: NDArray[np.int64]
    trl_index: NDArray[np.int64]
    targets: NDArray[np.int64]


def _locate_scored_tokens(
    lines: _LineBuilder, rows: Sequence[Row], scored_tokens: Sequence[NDArray[np.int64]]
) -> _ScoredTokens:
    """Return the tokens to score in the given rows, and the positions that predict them.

    Args:
        lines: The lines in which the rows have been laid out.
        rows: The rows to score.
        scored_tokens: The tokens to score, as one array of completion indices for each of the first rows; negative
            indices are in the prompt. Rows without an array are scored on their whole completions.
    """
    indices = []
    # One array per row. The empty first array is there because `np.concatenate` refuses an empty list.
    sources = [np.zeros((0, 2), np.int64)]
    trl_indices = [np.zeros((0, 2), np.int64)]
    targets = [np.zeros(0, np.int64)]
    for number, row in enumerate(rows):
        prompt_length = len(row.prompt)
        if number < len(scored_tokens):
            token_indices = np.asarray(scored_tokens[number], np.int64)
        else:
            token_indices = np.arange(len(row.completion))
        token_indices = token_indices[token_indices > -prompt_length]  # nothing predicts the first token of a row
        indices.append(token_indices)
        index_in_row = prompt_length + token_indices
        row_ids = np.concatenate([row.prompt, row.completion]).astype(np.int64)
        line, column = lines.find_source(number, token_indices)
        sources.append(_pair_with(line, column))
        trl_indices.append(_pair_with(number, index_in_row - 1))  # TRL's shifted tensors lack the first token
        targets.append(row_ids[index_in_row])
    return _ScoredTokens(indices, np.concatenate(sources), np.concatenate(trl_indices), np.concatenate(targets))


def _pair_with(number: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs (number, value) as rows: (len(values), 2)."""
    return np.stack([np.full_like(values, number), values], axis=1)


# The rows of a token table: what `Batch` stores about each token.
TABLE_ROWS = ("input_id", "segment", "sequence", "position", "count")
COUNT_ROW = TABLE_ROWS.index("count")


class _LineBuilder:
    """Joins rows into sequences and sequences into lines, and locates each token of a row in them.

    A sequence is a prompt followed by its response, or by all its responses if prompts are shared. A line is one
    sequence, or all of them if they are packed. Both are token tables of shape (5, T), see `TABLE_ROWS`. The count of a
    token is the number of rows that contain it, among the first `num_balanced` rows.

    Attributes:
        common: Token ids that all prompts begin with; empty unless prompts are shared and packed.
        own_prompts: Rest of each row's prompt.
        row_starts: For each row, the number of its sequence and the column there at which its completion begins.
        sequence_starts: For each sequence, the number of its line and the column there at which it begins.
        lines: Token table of each line.
    """

    def __init__(self, rows: Sequence[Row], *, shared: bool, packed: bool, num_balanced: int) -> None:
        prompts = [np.asarray(row.prompt, np.int64) for row in rows]
        common_length = 0
        if shared and packed:  # prompts in different lines cannot share tokens
            common_length = count_shared_beginning(prompt.tolist() for prompt in prompts)
        self.common = prompts[0][:common_length]
        self.own_prompts = [prompt[common_length:] for prompt in prompts]
        self.row_starts: list[tuple[int, int]] = []
        sequences = self._make_sequences(rows, shared=shared, num_balanced=num_balanced)
        self.sequence_starts = [(number, 0) for number in range(len(sequences))]
        self.lines = sequences
        if packed:
            self._pack(sequences, common_count=min(num_balanced, len(rows)))

    def _pack(self, sequences: Sequence[NDArray[np.int64]], *, common_count: int) -> None:
        """Concatenate the common beginning and all sequences into one line, and set `sequence_starts`.

        `common_count` is the count of each token of the common beginning.
        """
        line_parts = [_make_table(self.common, segment=0, sequence=0, position=0, count=common_count)]
        self.sequence_starts = []
        column = len(self.common)
        for sequence in sequences:
            self.sequence_starts.append((0, column))
            line_parts.append(sequence)
            column += sequence.shape[1]
        self.lines = [np.concatenate(line_parts, axis=1)]

    def _make_sequences(self, rows: Sequence[Row], *, shared: bool, num_balanced: int) -> list[NDArray[np.int64]]:
        """Make the token table of each sequence, and set `row_starts`.

        As in `Batch`, sequences are numbered from 1, since 0 is the common beginning of all prompts. In a sequence,
        segment 0 is the prompt, and segment k is its k-th response.
        """
        sequence_of_prompt: dict[bytes, int] = {}
        sequences: list[list[NDArray[np.int64]]] = []  # for each sequence, the tables of its prompt and its responses
        prompt_position = len(self.common)
        for number, row in enumerate(rows):
            prompt = self.own_prompts[number]
            completion = np.asarray(row.completion, np.int64)
            sequence = len(sequences)
            if shared:  # rows with the same prompt form one sequence
                sequence = sequence_of_prompt.setdefault(prompt.tobytes(), sequence)
            is_new = sequence == len(sequences)
            if is_new:
                table = _make_table(prompt, segment=0, sequence=sequence + 1, position=prompt_position, count=0)
                sequences.append([table])
            tables = sequences[sequence]
            completion_start = sum(table.shape[1] for table in tables)
            self.row_starts.append((sequence, completion_start))
            count = int(number < num_balanced)
            tables[0][COUNT_ROW] += count  # every row of the sequence contains the prompt
            response_table = _make_table(
                completion,
                segment=len(tables),
                sequence=sequence + 1,
                position=prompt_position + len(prompt),
                count=count,
            )
            tables.append(response_table)
        return [np.concatenate(tables, axis=1) for tables in sequences]

    def make_grid(self, pad: int) -> NDArray[np.int64]:
        """Return the tables of the G lines, padded to the length S of the longest: (5, G, S), see `TABLE_ROWS`."""
        longest = max(line.shape[1] for line in self.lines)
        padding = np.array([pad, -1, -1, 0, 0])  # values of a padding token, in the order of TABLE_ROWS
        grid = np.empty((len(TABLE_ROWS), len(self.lines), longest), np.int64)
        grid[:] = padding[:, None, None]
        for number, line in enumerate(self.lines):
            grid[:, number, : line.shape[1]] = line
        return grid

    def find_source(self, row: int, token: Any) -> tuple[int, Any]:
        """Return the line and the column of the token that predicts a given token: the one before it in its row.

        That token is not always in the column before. The first token of each completion is predicted by the last
        token of the prompt, which several completions may share. The common beginning of all prompts is at the start
        of the line.

        Args:
            row: Number of the row.
            token: Index of the token in the completion, negative for a token of the prompt. An array of indices gives
                an array of columns. It must not be the first token of the row, since no token predicts that one.
        """
        sequence, completion_start = self.row_starts[row]
        line, sequence_start = self.sequence_starts[sequence]
        index_in_completion = token - 1
        index_in_own_prompt = len(self.own_prompts[row]) + index_in_completion
        column_in_completion = sequence_start + completion_start + index_in_completion
        column_in_own_prompt = sequence_start + index_in_own_prompt
        column_in_common = len(self.common) + index_in_own_prompt
        column_in_prompt = np.where(index_in_own_prompt >= 0, column_in_own_prompt, column_in_common)
        return line, np.where(index_in_completion >= 0, column_in_completion, column_in_prompt)


def _make_table(ids: NDArray[np.int64], *, segment: int, sequence: int, position: int, count: int) -> NDArray[np.int64]:
    """Return the table of successive tokens, (5, len(ids)). `position` is that of the first token."""
    positions = position + np.arange(len(ids))
    return np.stack(np.broadcast_arrays(ids, segment, sequence, positions, count))


def pad_ids(rows: Sequence[Sequence[int]], multiple: int = 1) -> Tensor:
    """Pad lists of ids on the right with -100, to a width that is a multiple of `multiple`: (len(rows), width)."""
    longest = max((len(row) for row in rows), default=1)  # not 0, for which `view` below could not infer a size
    width = round_up(longest, multiple)
    table = []
    for row in rows:
        padding = [-100] * (width - len(row))
        table.append([*row, *padding])
    return torch.tensor(table, dtype=torch.long).view(-1, width)


# ---- the attention mask of shared and packed sequences ---------------------------------------------------------------


def make_visibility(batch: Batch) -> Callable[[Any, Any, Any, Any], Any]:
    """Return a function that tells whether one token may attend to another, in the form of FlexAttention's `mask_mod`.

    Its arguments are the line, the attention head (unused), the query's column and the key's column, as tensors or
    numbers. A token attends to itself and to earlier tokens of the common beginning, of its sequence's prompt and of
    its own response. Padding attends only to itself, since the softmax needs at least one key.
    """
    segments = batch.segments
    sequences = batch.sequences

    def is_visible(line: Any, head: Any, query: Any, key: Any) -> Any:
        key_segment = segments[line, key]
        key_sequence = sequences[line, key]
        is_in_prompt = key_segment == 0
        is_in_own_response = key_segment == segments[line, query]
        is_in_common = key_sequence == 0
        is_in_own_sequence = (key_sequence == sequences[line, query]) & (key_sequence > 0)  # -1 is padding
        is_earlier = key < query
        is_allowed = (is_in_prompt | is_in_own_response) & (is_in_common | is_in_own_sequence)
        return (is_earlier & is_allowed) | (key == query)

    return is_visible


def dense_mask(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask (G, 1, S, S): 0 where a token may attend to another, the minimum elsewhere.

    Eager attention adds the mask to its scores, so a boolean mask would give wrong results without an error.
    """
    device = batch.segments.device
    lines = torch.arange(batch.segments.shape[0], device=device)
    columns = torch.arange(batch.segments.shape[1], device=device)
    is_visible = make_visibility(batch)
    visible = is_visible(lines[:, None, None], None, columns[:, None], columns)
    mask = torch.zeros_like(visible, dtype=dtype)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return mask.unsqueeze(1)


def block_mask(batch: Batch) -> Any:
    """Return the attention mask as FlexAttention's `BlockMask`, by which it skips blocks without a visible key."""
    from torch.nn.attention.flex_attention import create_block_mask

    lines, size = batch.segments.shape
    device = batch.segments.device
    make_mask: Any = create_block_mask
    if device.type == "cuda":
        # Without compilation, it would store a dense mask of all pairs of tokens first. A change of lengths triggers
        # only one further compilation, since torch then compiles for any length.
        make_mask = torch.compile(create_block_mask)
    return make_mask(make_visibility(batch), lines, None, size, size, device=device)


# ---- pairs -----------------------------------------------------------------------------------------------------------

KEY = "catto"  # our entry in a batch; removed before TRL sees the batch, since TRL passes unknown entries to the model
# The columns that a dataset may have in addition to TRL's. TRL must not remove them before the collator reads them.
LABEL_COLUMNS = ("chosen_label_at", "rejected_label_at", "chosen_candidates", "rejected_candidates", "gold_index")
REASONING_COLUMNS = ("chosen_reasoning", "rejected_reasoning")  # number of tokens before the label
COLUMNS = ("row", *LABEL_COLUMNS, "rate", *REASONING_COLUMNS)


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator, extended to store our tensors and the layout of the batch under `KEY`.

    Attributes:
        layout: Options `shared` and `packed` of `lay_out_rows`. None leaves the layout to the training step. This is
            needed if Accelerate dispatches batches, since it concatenates and slices them along dimension 0: then a
            batch may contain only tensors of 2 B rows.
        reads_reasoning: Whether the preference loss reads only the tokens before the label.
    """

    layout: Mapping[str, bool] | None = None
    reads_reasoning: bool = False

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows, chosen responses first, and add our entries under `KEY`.

        Args:
            examples: B rows of the dataset.

        Returns:
            TRL's batch with a dictionary under `KEY`. Except for `layout`, its entries are tensors of 2 B rows too:

            - `row`: The pair's number in the dataset, -1 if the dataset does not number its pairs.
            - `start`: Index of the first completion token.
            - `label_at`, `candidates`, `gold_index` and `correctness_rate`, if the dataset has the label columns.
            - `reasoning`: Number of completion tokens before the label, if `reads_reasoning`.
            - `layout`: The pairs as a `Batch`, if `self.layout` is not None.
        """
        output: dict[str, Any] = super().torch_call(examples)
        our_tensors: dict[str, Any] = {
            "row": torch.tensor([example.get("row", -1) for example in examples] * 2),
            "start": completion_starts(output),
        }
        # `label_columns` adds all of these columns. A dataset with only some of them uses their names for other data.
        has_labels = examples[0].keys() >= {*LABEL_COLUMNS, "rate"}
        if has_labels:
            our_tensors["label_at"] = torch.tensor(_join_sides(examples, "label_at"))
            # Padded to a multiple of 8, so that batches with different numbers of labels can be concatenated.
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
    """Return the index of each row's first completion token: (2 B,). If there is none, it is the end of the prompt.

    inputs: TRL's tensors `completion_mask` and `attention_mask`, (2 B, S).
    """
    mask = inputs["completion_mask"]
    lengths = inputs["attention_mask"].sum(-1)
    has_completion = mask.any(-1)
    first_index = mask.ne(0).int().argmax(-1)  # of several maxima, argmax returns the first
    return torch.where(has_completion, first_index, lengths)


def lay_out_pairs(inputs: Mapping[str, Tensor], our_tensors: Mapping[str, Tensor], pad: int, **options: bool) -> Batch:
    """Lay out B collated pairs.

    The 2 B rows are read from TRL's tensors, since the collator may have truncated them. The tokens that
    `completion_mask` selects are scored. If `our_tensors` contains labels, they become queries.

    Args:
        inputs: TRL's tensors: `input_ids`, `attention_mask` and `completion_mask`, (2 B, S).
        our_tensors: The tensors that `PairCollator` adds for the same rows. Completions begin at `start`, even if
            `completion_mask` has changed since.
        pad: Token id used for padding.
        **options: Options `shared` and `packed` of `lay_out_rows`.

    Returns:
        The batch.

    Raises:
        ValueError: A row was truncated before its label.
    """
    # The rows of the batch are views of `ids`. It is a copy, because a data loader's worker moves the tensor itself to
    # shared memory and frees the old storage.
    ids = inputs["input_ids"].cpu().numpy().copy()
    # A user's completion mask may select padding, which is in no row.
    masks = (inputs["completion_mask"] * inputs["attention_mask"]).cpu().numpy()
    lengths = inputs["attention_mask"].sum(-1).tolist()
    starts = our_tensors["start"].tolist()
    rows = []
    scored_tokens = []
    for row_ids, mask, length, start in zip(ids, masks, lengths, starts, strict=True):
        rows.append(Row(prompt=row_ids[:start], completion=row_ids[start:length]))
        scored_tokens.append(np.flatnonzero(mask) - start)  # negative if a user's mask selects tokens of the prompt
    queries = []
    if "label_at" in our_tensors:
        queries = _make_label_queries(rows, our_tensors)
    return lay_out_rows(rows, queries, len(rows), pad, scored_tokens=scored_tokens, **options)


def _make_label_queries(rows: Sequence[Row], our_tensors: Mapping[str, Tensor]) -> list[Query]:
    """Return a query for the label of every row; raise ValueError if a row was truncated before its label."""
    queries = []
    for number, label_at in enumerate(our_tensors["label_at"].tolist()):
        is_cut_off = label_at >= len(rows[number].completion)
        if is_cut_off:
            row = int(our_tensors["row"][number])
            raise ValueError(f"row {row}: the data collator's max_length cuts off the label, which this term reads")
        candidates = [token for token in our_tensors["candidates"][number].tolist() if token >= 0]  # without padding
        gold = int(our_tensors["gold_index"][number])
        queries.append(Query(row=number, token=label_at, candidates=candidates, gold=gold))
    return queries
