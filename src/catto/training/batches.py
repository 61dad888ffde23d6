"""Rows of token ids -> one batch for one forward: padded side by side, or with each prompt computed once.

Shared, the responses to one prompt follow it in a single sequence, [prompt | y1 | y2 | ...]: every response sees the
prompt and itself, and its positions go on from the prompt's end. The last prompt position then predicts the first
token of several responses, so tokens are not labels of positions: each names the position that predicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """A prompt and one response to it, as token ids."""

    prompt: list[int]
    completion: list[int]


class Query(NamedTuple):
    """Ask for the label probabilities where completion token `token` of row `row` is predicted."""

    row: int
    token: int
    candidates: list[int]


@dataclass(frozen=True)
class Batch:
    """What one forward takes, and where its numbers belong. N scored tokens, M queries, G sequences of S tokens."""

    input_ids: Tensor  # (G, S)
    segments: Tensor  # (G, S): 0 the prompt, k > 0 its k-th response, -1 padding
    position_ids: Tensor  # (G, S)
    shared: bool
    source: Tensor  # (N, 2): (sequence, position) that predicts each scored token
    targets: Tensor  # (N,)
    place: Tensor  # (N, 2): (row, index of the token in prompt + completion, minus one): TRL's shifted layout
    counts: Tensor  # (G, S): in how many of the balanced rows each token is
    query_source: Tensor  # (M, 2)
    query_labels: Tensor  # (M, K), padded with -100

    def to(self, device: torch.device) -> Batch:
        """Move every tensor."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    @property
    def attention_mask(self) -> Tensor:
        """1 on tokens, 0 on padding: (G, S)."""
        return (self.segments >= 0).long()


class _Seat(NamedTuple):
    """Where a row's completion lies: its sequence, its first position there, and the prompt's last position."""

    sequence: int
    start: int
    prompt_end: int


def build(
    rows: Sequence[Row],
    queries: Sequence[Query],
    scored: int,
    pad: int,
    *,
    shared: bool,
    balanced: int | None = None,
) -> Batch:
    """Lay out the rows; the tokens of the first `scored` rows are scored, the others only answer queries.

    balanced: how many of the first rows count in a mixture of experts' load balancing; None: all that are scored.
    """
    sequences, seats = _share(rows) if shared else _separate(rows)
    length = max(len(ids) for ids, _, _ in sequences)
    ids, segments, positions = zip(*sequences, strict=True)
    tokens = [(r, i) for r in range(scored) for i in range(len(rows[r].completion)) if rows[r].prompt or i]
    width = max((len(query.candidates) for query in queries), default=1)
    counts = torch.zeros(len(sequences), length, dtype=torch.long)
    for row, seat in zip(rows[: scored if balanced is None else balanced], seats, strict=False):
        counts[seat.sequence, : len(row.prompt)] += 1
        counts[seat.sequence, seat.start : seat.start + len(row.completion)] += 1
    return Batch(
        input_ids=padded(ids, length, pad),
        segments=padded(segments, length, -1),
        position_ids=padded(positions, length, 0),
        shared=shared,
        source=_pairs(_predictor(seats[r], i) for r, i in tokens),
        targets=torch.tensor([rows[r].completion[i] for r, i in tokens], dtype=torch.long),
        place=_pairs((r, len(rows[r].prompt) + i - 1) for r, i in tokens),
        counts=counts,
        query_source=_pairs(_predictor(seats[query.row], query.token) for query in queries),
        query_labels=padded([query.candidates for query in queries], width, -100),
    )


_Sequence = tuple[list[int], list[int], list[int]]  # ids, segments, positions


def _separate(rows: Sequence[Row]) -> tuple[list[_Sequence], list[_Seat]]:
    sequences, seats = [], []
    for number, (prompt, completion) in enumerate(rows):
        segments = [0] * len(prompt) + [1] * len(completion)
        sequences.append((prompt + completion, segments, list(range(len(segments)))))
        seats.append(_Seat(number, len(prompt), len(prompt) - 1))
    return sequences, seats


def _share(rows: Sequence[Row]) -> tuple[list[_Sequence], list[_Seat]]:
    """Rows of equal prompts become one sequence, in the order of their first appearance."""
    numbers: dict[tuple[int, ...], int] = {}
    sequences: list[_Sequence] = []
    seats = []
    for prompt, completion in rows:
        number = numbers.setdefault(tuple(prompt), len(sequences))
        if number == len(sequences):
            sequences.append((list(prompt), [0] * len(prompt), list(range(len(prompt)))))
        ids, segments, positions = sequences[number]
        seats.append(_Seat(number, len(ids), len(prompt) - 1))
        ids += completion
        segments += [max(segments, default=0) + 1] * len(completion)
        positions += range(len(prompt), len(prompt) + len(completion))
    return sequences, seats


def _predictor(seat: _Seat, index: int) -> tuple[int, int]:
    """(sequence, position) that predicts completion token `index`: the prompt's end for the first, else its left."""
    return seat.sequence, seat.prompt_end if index == 0 else seat.start + index - 1


def padded(rows: Sequence[Sequence[int]], width: int, value: int) -> Tensor:
    """Pad lists of ids on the right: (len(rows), width)."""
    table = [[*row, *[value] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=torch.long).view(-1, width)


def _pairs(pairs: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(pairs), dtype=torch.long).view(-1, 2)


def block_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask of shared sequences. segments: (G, S) -> (G, 1, S, S), 0 where a token may look.

    A token sees what stands before it in the prompt and in its own response. Additive and never boolean: eager
    attention adds the mask, and a boolean one would be silently wrong there. Padding sees itself, else its row of
    the softmax has nothing to sum.
    """
    length = segments.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    q, k = segments.unsqueeze(-1), segments.unsqueeze(-2)
    seen = before & ((k == 0) | (k == q)) & (k >= 0)
    seen |= torch.eye(length, dtype=torch.bool, device=segments.device)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
