"""The layouts of a batch: a hand-worked shared one, and what every layout must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.training.batches import Batch, Query, Row, block_mask, build, flex_mask

PAD = 0
ROWS = [Row([1, 2, 3], [4, 5]), Row([7], [8]), Row([1, 2, 3], [6])]
QUERIES = [Query(2, 1, [21, 22, 23]), Query(0, 0, [31, 32])]


def test_shared_layout_worked_by_hand() -> None:
    """Rows 0 and 2 have one prompt, [1 2 3], and become [1 2 3 | 4 5 | 6]; row 1 is [7 | 8] and four of padding.

    Both responses go on from position 3. The prompt's end (0, 2) predicts 4 and 6; token 5 is predicted at its left,
    (0, 3). In TRL's layout a token of row r stands at its index in prompt + response, less one: 4 at (0, 2), 5 at
    (0, 3), 8 at (1, 0), 6 at (2, 2). Token 1 of row 2 would follow the 6: it is predicted at (0, 5).
    """
    batch = build(ROWS, QUERIES, 3, PAD, shared=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, -1, -1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [4, 5, 8, 6]
    assert batch.source.tolist() == [[0, 2], [0, 3], [1, 0], [0, 2]]
    assert batch.place.tolist() == [[0, 2], [0, 3], [1, 0], [2, 2]]
    assert batch.query_source.tolist() == [[0, 5], [0, 2]]
    assert batch.query_labels.tolist() == [[21, 22, 23], [31, 32, -100]]


def test_separate_layout_worked_by_hand() -> None:
    batch = build(ROWS, QUERIES, 2, PAD, shared=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [7, 8, 0, 0, 0], [1, 2, 3, 6, 0]]
    assert batch.targets.tolist() == [4, 5, 8]  # the third row is there for its query only
    assert batch.source.tolist() == batch.place.tolist() == [[0, 2], [0, 3], [1, 0]]
    assert batch.query_source.tolist() == [[2, 3], [0, 2]]


def test_block_mask_worked_by_hand() -> None:
    """[p p | y1 y1 | y2 | pad]: y2 sees the prompt and itself, never y1; padding sees something."""
    seen = block_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]), torch.float32)[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_mask_is_additive_and_finite(dtype: torch.dtype) -> None:
    mask = block_mask(torch.tensor([[0, 1, 2]]), dtype)
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, 3, 3)
    assert mask.isfinite().all()
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_flex_attention_has_the_same_mask() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 2, -1, -1], [0, 1, 1, 1, 2, 2, 3]])
    rule = flex_mask(segments).mask_mod
    g, q, k = torch.meshgrid(torch.arange(2), torch.arange(7), torch.arange(7), indexing="ij")
    assert torch.equal(rule(g, torch.zeros_like(g), q, k), block_mask(segments, torch.float32)[:, 0] == 0)


_ids = st.integers(1, 9)
_rows = st.lists(
    st.builds(Row, st.sampled_from([[1], [1, 2], [2, 1, 3], [4, 4]]), st.lists(_ids, max_size=4)),
    min_size=1,
    max_size=6,
)


def _context(batch: Batch, source: list[int]) -> tuple[list[int], list[int]]:
    """The tokens that a position sees, and their positions, in order of position."""
    sequence, position = source
    seen = (block_mask(batch.segments, torch.float32)[sequence, 0, position] == 0).nonzero().flatten()
    return batch.input_ids[sequence, seen].tolist(), batch.position_ids[sequence, seen].tolist()


@settings(max_examples=60, deadline=None)
@given(rows=_rows, shared=st.booleans())
def test_every_token_is_predicted_from_exactly_what_stands_before_it(rows: list[Row], shared: bool) -> None:
    queries = [Query(number, len(row.completion), [1, 2]) for number, row in enumerate(rows)]
    batch = build(rows, queries, len(rows), PAD, shared=shared)
    tokens = [(row, i) for row in rows for i in range(len(row.completion))]
    assert batch.targets.tolist() == [row.completion[i] for row, i in tokens]
    asked = [(row, len(row.completion)) for row in rows]
    for (row, i), source in zip(tokens + asked, batch.source.tolist() + batch.query_source.tolist(), strict=True):
        before = row.prompt + row.completion[:i]
        assert _context(batch, source) == (before, list(range(len(before))))


@settings(max_examples=30, deadline=None)
@given(rows=_rows)
def test_sharing_computes_each_prompt_once(rows: list[Row]) -> None:
    batch = build(rows, [], len(rows), PAD, shared=True)
    prompts = {tuple(row.prompt) for row in rows}
    assert batch.input_ids.shape[0] == len(prompts)
    tokens = sum(map(len, prompts)) + sum(len(row.completion) for row in rows)
    assert int(batch.attention_mask.sum()) == tokens


def test_a_first_token_without_prompt_is_not_scored() -> None:
    """Nothing predicts it; TRL's shifted layout leaves it out too."""
    batch = build([Row([], [5, 6]), Row([], [7])], [], 2, PAD, shared=False)
    assert batch.targets.tolist() == [6]
    assert batch.place.tolist() == [[0, 0]]
