"""Rows of token ids -> one batch for one forward: padded side by side, or with each prompt computed once.

With sharing, the responses to one prompt follow it in a single sequence, [prompt | y1 | y2 | ...]: every response sees
the prompt and itself, and its positions continue from the prompt's end. The last prompt position then predicts the
first token of several responses, so targets are not aligned with positions: each names the position that predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer.dpo_trainer import DataCollatorForPreference

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


@dataclass(frozen=True)
class Batch:
    """What one forward takes, and where its numbers belong. N scored tokens, M queries, G sequences of S tokens."""

    rows: Sequence[Row]  # what was laid out; stays on the host
    shared: bool
    lengths: list[int]  # scored tokens of each scored row
    input_ids: Tensor  # (G, S)
    segments: Tensor  # (G, S): 0 the prompt, k > 0 its k-th response, -1 padding
    position_ids: Tensor  # (G, S)
    counts: Tensor  # (G, S): in how many of the balanced rows each token is
    source: Tensor  # (N, 2): (sequence, position) that predicts each scored token
    place: Tensor  # (N, 2): (row, index of the token in prompt + completion, minus one): TRL's shifted layout
    targets: Tensor  # (N,)
    query_source: Tensor  # (M, 2)
    query_labels: Tensor  # (M, K), padded with -100

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
        return replace(self, query_source=self.query_source[:0], query_labels=self.query_labels[:0])

    @property
    def attention_mask(self) -> Tensor:
        """1 on tokens, 0 on padding: (G, S)."""
        return (self.segments >= 0).long()


def build(
    rows: Sequence[Row], queries: Sequence[Query], scored: int, pad: int, *, shared: bool, balanced: int | None = None
) -> Batch:
    """Lay out the rows; the tokens of the first `scored` rows are scored, the others only answer queries.

    balanced: how many of the first rows count in a mixture of experts' load balancing; None: all that are scored.
    """
    balanced = scored if balanced is None else balanced
    arrays = [[np.asarray(part, np.int64) for part in row] for row in rows]
    sequences: dict[Any, int] = {}  # by prompt where prompts are shared
    sizes: list[int] = []  # tokens of each sequence
    seats = []  # of each row: its sequence and the position of its completion there
    for number, (prompt, completion) in enumerate(arrays):
        key = prompt.tobytes() if shared else number
        sequence = sequences.setdefault(key, len(sizes))
        if sequence == len(sizes):
            sizes.append(len(prompt))
        seats.append((sequence, sizes[sequence]))
        sizes[sequence] += len(completion)
    input_ids, segments, positions, counts = (np.full((len(sizes), max(sizes)), value) for value in (pad, -1, 0, 0))
    responses = [0] * len(sizes)
    tokens = [np.zeros((5, 0), np.int64)]  # of each scored token: its source, its place and the token itself
    for number, ((prompt, completion), (sequence, start)) in enumerate(zip(arrays, seats, strict=True)):
        responses[sequence] += 1
        parts = ((prompt, 0, 0, 0), (completion, start, len(prompt), responses[sequence]))
        for ids, begin, position, segment in parts:
            span = sequence, slice(begin, begin + len(ids))
            input_ids[span], segments[span] = ids, segment
            positions[span] = np.arange(position, position + len(ids))
            counts[span] += number < balanced
        if number < scored:
            source = np.arange(start - 1, start + len(completion) - 1)
            source[:1] = len(prompt) - 1  # the prompt's end predicts the first token
            place = np.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
            table = np.stack(np.broadcast_arrays(sequence, source, number, place, completion))
            tokens.append(table if len(prompt) else table[:, 1:])  # nothing predicts a first token without a prompt
    joined = np.concatenate(tokens, axis=1)
    asked = [(seats[q.row], q.token, len(rows[q.row].prompt)) for q in queries]
    sources = [(sequence, start + at - 1 if at else prompt - 1) for (sequence, start), at, prompt in asked]
    return Batch(
        rows=rows,
        shared=shared,
        lengths=[part.shape[1] for part in tokens[1:]],
        input_ids=torch.from_numpy(input_ids),
        segments=torch.from_numpy(segments),
        position_ids=torch.from_numpy(positions),
        counts=torch.from_numpy(counts),
        source=torch.tensor(joined[:2].T),
        place=torch.tensor(joined[2:4].T),
        targets=torch.tensor(joined[4]),
        query_source=torch.tensor(sources, dtype=torch.long).view(-1, 2),
        query_labels=padded([query.candidates for query in queries]),
    )


def padded(rows: Sequence[Sequence[int]], multiple: int = 1) -> Tensor:
    """Pad lists of ids with -100 on the right, to a multiple of a width: (len(rows), width)."""
    width = -(-max(map(len, rows), default=1) // multiple) * multiple
    table = [[*row, *[-100] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.long).view(-1, width)


# ---- the attention mask of shared sequences --------------------------------------------------------------------------


def block_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask of shared sequences. segments: (G, S) -> (G, 1, S, S), 0 where a token may look.

    A token sees what comes before it in the prompt and in its own response. Additive and never boolean: eager
    attention adds the mask, and a boolean one would be silently wrong there. Padding sees itself, else its row of
    the softmax has nothing to sum.
    """
    length = segments.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    q, k = segments.unsqueeze(-1), segments.unsqueeze(-2)
    seen = before & ((k == 0) | (k == q)) & (k >= 0)
    seen |= torch.eye(length, dtype=torch.bool, device=segments.device)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)


def flex_mask(segments: Tensor) -> Any:
    """The same mask for FlexAttention, which skips the blocks that no token may look at."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        prompt, own = segments[b, k] == 0, segments[b, k] == segments[b, q]
        return ((q >= k) & (prompt | own) & (segments[b, k] >= 0)) | (q == k)

    size = segments.shape[1]
    return create_block_mask(seen, segments.shape[0], None, size, size, device=segments.device)


# ---- pairs -----------------------------------------------------------------------------------------------------------

KEY = "catto"  # our entry in a batch; TRL would pass unknown entries to the model, so it is taken out before
# Columns beyond TRL's that reach the collator, where a dataset has them.
LABEL_COLUMNS = ("chosen_label_at", "rejected_label_at", "chosen_candidates", "rejected_candidates", "gold_index")
COLUMNS = ("row", *LABEL_COLUMNS, "correctness_rate")


@dataclass
class PairCollator(DataCollatorForPreference):  # type: ignore[misc]
    """TRL's collator, its tensors unchanged, with ours under `KEY` and the layout of the batch.

    shared: whether prompts are shared in the layout. None leaves the layout to the training step: where Accelerate
    concatenates, broadcasts and slices batches along dimension 0, a batch may hold only tensors of 2 B rows.
    """

    shared: bool | None = None

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate B pairs into TRL's tensors of 2 B rows, [chosen; rejected], and as many rows of ours."""
        output: dict[str, Any] = super().torch_call(examples)
        both = [(example, side) for side in ("chosen", "rejected") for example in examples]
        known: dict[str, Any] = {"row": torch.tensor([example.get("row", -1) for example, _ in both])}
        if LABEL_COLUMNS[0] in examples[0]:
            known["label_at"] = torch.tensor([example[f"{side}_label_at"] for example, side in both])
            # Padded to a multiple of 8, so that batches of different labels can be concatenated.
            known["candidates"] = padded([example[f"{side}_candidates"] for example, side in both], 8)
            known["gold_index"] = torch.tensor([example["gold_index"] for example, _ in both])
            rates = [float(example.get("correctness_rate") or 0.0) for example, _ in both]  # read by `outcome` alone
            known["correctness_rate"] = torch.tensor(rates)
        if self.shared is not None:
            known["layout"] = pair_batch(output, known, self.pad_token_id, shared=self.shared)
        output[KEY] = known
        return output


def pair_batch(inputs: Mapping[str, Tensor], known: Mapping[str, Tensor], pad: int, *, shared: bool) -> Batch:
    """Lay out the 2 B rows of TRL's tensors: they are what it trains on, whatever its collator has cut off.

    Labels, where they are known, become queries.
    """
    ids = inputs["input_ids"].cpu().numpy()
    lengths, completions = inputs["attention_mask"].sum(-1).tolist(), inputs["completion_mask"].sum(-1).tolist()
    rows = [Row(row[: n - k], row[n - k : n]) for row, n, k in zip(ids, lengths, completions, strict=True)]
    queries = []
    if "label_at" in known:
        for number, at in enumerate(known["label_at"].tolist()):
            if at >= len(rows[number].completion):
                row = int(known["row"][number])
                raise ValueError(f"row {row}: the data collator's max_length cuts the label off, which this term reads")
            queries.append(Query(number, at, [token for token in known["candidates"][number].tolist() if token >= 0]))
    return build(rows, queries, len(rows), pad, shared=shared)
