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

from catto.token_ids import count_shared_beginning
from catto.training.trl_compat import DataCollatorForPreference

Tokens = Sequence[int] | NDArray[np.int64]
LAID_OUT = ("input_ids", "segments", "sequences", "position_ids", "counts")  # what `Batch` has of each token


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
    """What one forward takes, and where its numbers belong. N scored tokens, M queries, G lines of S tokens."""

    rows: Sequence[Row]  # what was laid out; stays on the host
    tokens: Sequence[
        NDArray[np.int64]
    ]  # scored tokens of each scored row; stays on the host
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
        """The same batch, with no label probabilities to compute."""
        none = {name: getattr(self, name)[:0] for name in ("query_source", "query_labels", "query_gold")}
        return replace(self, **none)

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
    """Lay out the rows; the tokens of the first `scored` rows are scored, the others only answer queries.

    shared: compute each prompt once. packed: one line for all sequences, without padding. Both: compute the beginning
    that all prompts share once too; each prompt keeps at least one token of its own, which predicts its responses.
    balanced: how many of the first rows count in a mixture of experts' load balancing; None: all that are scored.
    tokens: of each of the first rows, the indices in its completion of the tokens to score, -1 for the prompt's last
    token and so on. A row beyond them is scored at its whole completion.
    """
    balanced = scored if balanced is None else balanced
    arrays = [[np.asarray(part, np.int64) for part in row] for row in rows]
    common = arrays[0][0][: count_shared_beginning(prompt.tolist() for prompt, _ in arrays) if shared and packed else 0]
    arrays = [[prompt[len(common) :], completion] for prompt, completion in arrays]

    def table(ids: NDArray[np.int64], segment: int, sequence: int, position: int, count: int) -> NDArray[np.int64]:
        """What LAID_OUT names, of each token: (5, len(ids))."""
        return np.stack(np.broadcast_arrays(ids, segment, sequence, position + np.arange(len(ids)), count))

    numbers: dict[Any, int] = {}  # of the sequences, by prompt where prompts are shared
    parts: list[list[NDArray[np.int64]]] = []  # of each sequence: its prompt and its responses
    seats = []  # of each row: its sequence and where its completion begins there
    for number, (prompt, completion) in enumerate(arrays):
        sequence = numbers.setdefault(prompt.tobytes() if shared else number, len(parts))
        if sequence == len(parts):
            parts.append([table(prompt, 0, sequence + 1, len(common), 0)])
        own = parts[sequence]
        own[0][4] += number < balanced
        seats.append((sequence, sum(part.shape[1] for part in own)))
        own.append(table(completion, len(own), sequence + 1, len(common) + len(prompt), number < balanced))
    lines = [np.concatenate(own, axis=1) for own in parts]
    starts = [(number, 0) for number in range(len(lines))]  # of each sequence: its line and where it begins there
    if packed:
        lines = [table(common, 0, 0, 0, min(balanced, len(rows))), *lines]
        starts = [(0, end) for end in np.cumsum([line.shape[1] for line in lines]).tolist()]
        lines = [np.concatenate(lines, axis=1)]
    grid = np.empty((5, len(lines), max(line.shape[1] for line in lines)), np.int64)
    grid[:] = np.reshape([pad, -1, -1, 0, 0], (5, 1, 1))
    for number, line in enumerate(lines):
        grid[:, number, : line.shape[1]] = line

    def source(row: int, token: Any) -> tuple[int, Any]:
        """The line and the column that predicts a token, which is given by its index in the completion.

        The prompt's end predicts the first token. A token of the prompt has a negative index; one of the common
        beginning is predicted there, at the line's start.
        """
        sequence, start = seats[row]
        line, origin = starts[sequence]
        own_prompt = len(arrays[row][0])
        in_prompt = origin + own_prompt + token - 1
        in_common = len(common) + own_prompt + token - 1
        before_response = np.where(own_prompt + token > 0, in_prompt, in_common)
        return line, np.where(token > 0, origin + start + token - 1, before_response)

    scored_tokens = []
    scores = [np.zeros((5, 0), np.int64)]  # of each scored token: its source, its place and the token itself
    for number, row in enumerate(rows[:scored]):
        prompt_length = len(row.prompt)
        whole = np.arange(len(row.completion))
        wanted = np.asarray(tokens[number], np.int64) if number < len(tokens) else whole
        wanted = wanted[wanted > -prompt_length]  # nothing predicts the first token of a row
        scored_tokens.append(wanted)
        place = prompt_length + wanted - 1
        targets = np.concatenate([row.prompt, row.completion]).astype(np.int64)[prompt_length + wanted]
        scores.append(np.stack(np.broadcast_arrays(*source(number, wanted), number, place, targets)))
    joined = np.concatenate(scores, axis=1)
    asked = np.array([source(query.row, query.token) for query in queries], np.int64)
    return Batch(
        rows=rows,
        tokens=scored_tokens,
        shared=shared,
        packed=packed,
        lengths=[part.shape[1] for part in scores[1:]],
        **dict(zip(LAID_OUT, map(torch.from_numpy, grid), strict=True)),
        source=torch.tensor(joined[:2].T),
        place=torch.tensor(joined[2:4].T),
        targets=torch.tensor(joined[4]),
        query_source=torch.from_numpy(asked).view(-1, 2),
        query_labels=pad_ids([query.candidates for query in queries]),
        query_gold=torch.tensor([query.gold for query in queries], dtype=torch.long),
    )


def pad_ids(rows: Sequence[Sequence[int]], multiple: int = 1) -> Tensor:
    """Pad lists of ids with -100 on the right, to a multiple of a width: (len(rows), width)."""
    width = -(-max(map(len, rows), default=1) // multiple) * multiple
    table = [[*row, *[-100] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.long).view(-1, width)


# ---- the attention mask of shared and packed sequences ---------------------------------------------------------------


def visible(batch: Batch) -> Callable[[Any, Any, Any, Any], Any]:
    """Whether a token may look at another, by (line, head, its column, the other's column), each a tensor or a number.

    A token sees what comes before it in the common beginning, in its sequence's prompt and in its own response. Padding
    sees itself, else its row of the softmax has nothing to sum.
    """
    segments, sequences = batch.segments, batch.sequences

    def seen(g: Any, h: Any, q: Any, k: Any) -> Any:
        own = (segments[g, k] == 0) | (segments[g, k] == segments[g, q])
        together = (sequences[g, k] == 0) | ((sequences[g, k] == sequences[g, q]) & (sequences[g, k] > 0))
        return ((q >= k) & own & together) | (q == k)

    return seen


def dense_mask(batch: Batch, dtype: torch.dtype) -> Tensor:
    """The additive mask: (G, 1, S, S), 0 where a token may look.

    Never boolean: eager attention adds the mask, and a boolean one would be silently wrong there.
    """
    lines, columns = (torch.arange(size, device=batch.segments.device) for size in batch.segments.shape)
    seen = visible(batch)(lines[:, None, None], None, columns[:, None], columns)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def block_mask(batch: Batch) -> Any:
    """The same mask for FlexAttention, which skips the blocks in which no token may look at another."""
    from torch.nn.attention.flex_attention import create_block_mask

    (lines, size), device = batch.segments.shape, batch.segments.device
    # Compiled, it never holds the mask of every pair of tokens; lengths that change compile it twice, no more.
    make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(visible(batch), lines, None, size, size, device=device)


# ---- pairs -----------------------------------------------------------------------------------------------------------

KEY = "catto"  # our entry in a batch; TRL would pass unknown entries to the model, so it is taken out before
# Columns beyond TRL's that reach the collator, where a dataset has them.
LABEL_COLUMNS = ("chosen_label_at", "rejected_label_at", "chosen_candidates", "rejected_candidates", "gold_index")
REASONING_COLUMNS = ("chosen_reasoning", "rejected_reasoning")  # how many tokens precede the label
COLUMNS = ("row", *LABEL_COLUMNS, "rate", *REASONING_COLUMNS)


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator, its tensors unchanged, with ours under `KEY` and the layout of the batch.

    layout: whether prompts are shared and rows packed. None leaves the layout to the training step: where Accelerate
    concatenates, broadcasts and slices batches along dimension 0, a batch may hold only tensors of 2 B rows.
    """

    layout: Mapping[str, bool] | None = None
    reads_reasoning: bool = False  # whether the preference loss reads the tokens before the label alone

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows, [chosen; rejected], and as many rows of ours."""
        output: dict[str, Any] = super().torch_call(examples)
        both = [(example, side) for side in ("chosen", "rejected") for example in examples]
        known: dict[str, Any] = {"row": torch.tensor([example.get("row", -1) for example, _ in both])}
        known["start"] = completion_starts(output)
        if examples[0].keys() >= {*LABEL_COLUMNS, "rate"}:  # a user may have a column of one of these names
            known["label_at"] = torch.tensor([example[f"{side}_label_at"] for example, side in both])
            # Padded to a multiple of 8, so that batches of different labels can be concatenated.
            known["candidates"] = pad_ids([example[f"{side}_candidates"] for example, side in both], 8)
            known["gold_index"] = torch.tensor([example["gold_index"] for example, _ in both])
            known["correctness_rate"] = torch.tensor([example["rate"] for example, _ in both])
        if self.reads_reasoning:
            known["reasoning"] = torch.tensor([example[f"{side}_reasoning"] for example, side in both])
        if self.layout is not None:
            known["layout"] = lay_out_pairs(output, known, self.pad_token_id, **self.layout)
        output[KEY] = known
        return output


def completion_starts(inputs: Mapping[str, Tensor]) -> Tensor:
    """Index of each row's first token that `completion_mask` selects; the row's length where it selects none. (2 B,)"""
    mask = inputs["completion_mask"]
    lengths = inputs["attention_mask"].sum(-1)
    return torch.where(mask.any(-1), mask.ne(0).int().argmax(-1), lengths)


def lay_out_pairs(inputs: Mapping[str, Tensor], known: Mapping[str, Tensor], pad: int, **layout: bool) -> Batch:
    """Lay out the 2 B rows of TRL's tensors: they are what it trains on, whatever its collator has cut off.

    The tokens that `completion_mask` selects are scored, wherever they are. Labels, where they are known, become
    queries.
    """
    ids = inputs["input_ids"].cpu().numpy().copy()  # a worker moves the tensor to shared memory and frees the old one
    masks = (inputs["completion_mask"] * inputs["attention_mask"]).cpu().numpy()
    lengths = inputs["attention_mask"].sum(-1).tolist()
    starts = known["start"] if "start" in known else completion_starts(inputs)
    rows = []
    tokens = []
    for row, mask, length, start in zip(ids, masks, lengths, starts.tolist(), strict=True):
        rows.append(Row(row[:start], row[start:length]))
        tokens.append(np.flatnonzero(mask) - start)
    queries = []
    if "label_at" in known:
        for number, at in enumerate(known["label_at"].tolist()):
            if at >= len(rows[number].completion):
                row = int(known["row"][number])
                raise ValueError(f"row {row}: the data collator's max_length cuts the label off, which this term reads")
            candidates = [token for token in known["candidates"][number].tolist() if token >= 0]
            queries.append(Query(number, at, candidates, int(known["gold_index"][number])))
    return lay_out_rows(rows, queries, len(rows), pad, tokens=tokens, **layout)
