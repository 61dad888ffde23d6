"""The layouts of a batch: a hand-worked shared one, and what every layout must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.token_ids import count_shared_beginning
from catto.training.batches import Batch, Query, Row, block_mask, dense_mask, lay_out_rows

PAD = 0
ROWS = [Row([1, 2, 3], [4, 5]), Row([7], [8]), Row([1, 2, 3], [6])]
QUERIES = [Query(2, 1, [21, 22, 23]), Query(0, 0, [31, 32])]


def test_shared_layout_worked_by_hand() -> None:
    """Rows 0 and 2 have one prompt, [1 2 3], and become [1 2 3 | 4 5 | 6]; row 1 is [7 | 8] and four of padding.

    Both responses go on from position 3. The prompt's end (0, 2) predicts 4 and 6; token 5 is predicted at its left,
    (0, 3). In TRL's layout a token of row r stands at its index in prompt + response, less one: 4 at (0, 2), 5 at
    (0, 3), 8 at (1, 0), 6 at (2, 2). Token 1 of row 2 would follow the 6: it is predicted at (0, 5).
    """
    batch = lay_out_rows(ROWS, QUERIES, 3, PAD, shared=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, -1, -1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [4, 5, 8, 6]
    assert batch.source.tolist() == [[0, 2], [0, 3], [1, 0], [0, 2]]
    assert batch.trl_index.tolist() == [[0, 2], [0, 3], [1, 0], [2, 2]]
    assert batch.query_source.tolist() == [[0, 5], [0, 2]]
    assert batch.query_labels.tolist() == [[21, 22, 23], [31, 32, -100]]


def test_separate_layout_worked_by_hand() -> None:
    batch = lay_out_rows(ROWS, QUERIES, 2, PAD, shared=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [7, 8, 0, 0, 0], [1, 2, 3, 6, 0]]
    assert batch.targets.tolist() == [4, 5, 8]  # the third row is there for its query only
    assert batch.source.tolist() == batch.trl_index.tolist() == [[0, 2], [0, 3], [1, 0]]
    assert batch.query_source.tolist() == [[2, 3], [0, 2]]


def test_packed_layout_worked_by_hand() -> None:
    """The two sequences of the shared layout in one line: row 1's prompt stands at column 6, its token at 7."""
    batch = lay_out_rows(ROWS, QUERIES, 3, PAD, shared=True, packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 0, 1]]
    assert batch.sequences.tolist() == [[1, 1, 1, 1, 1, 1, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1]]
    assert batch.targets.tolist() == [4, 5, 8, 6]
    assert batch.source.tolist() == [[0, 2], [0, 3], [0, 6], [0, 2]]
    assert batch.trl_index.tolist() == [[0, 2], [0, 3], [1, 0], [2, 2]]
    assert batch.query_source.tolist() == [[0, 5], [0, 2]]


def test_common_beginning_worked_by_hand() -> None:
    """Prompts [1 2 3] and [1 2 4] begin alike: [1 2 | 3 | 5 6 | 7 | 4 | 8], and 4 does not see what follows the first.

    The responses of the first prompt, [5 6] and [7], go on from position 3, as does [8] of the second.
    """
    rows = [Row([1, 2, 3], [5, 6]), Row([1, 2, 4], [8]), Row([1, 2, 3], [7])]
    batch = lay_out_rows(rows, [Query(1, 0, [31])], 3, PAD, shared=True, packed=True, num_balanced=2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 6, 7, 4, 8]]
    assert batch.sequences.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 2, 3]]
    assert batch.counts.tolist() == [[2, 2, 1, 1, 1, 0, 1, 1]]
    assert batch.source.tolist() == [[0, 2], [0, 3], [0, 6], [0, 2]]
    assert batch.trl_index.tolist() == [[0, 2], [0, 3], [1, 2], [2, 2]]
    assert batch.query_source.tolist() == [[0, 6]]
    seen = dense_mask(batch, torch.float32)[0, 0] == 0
    assert seen[6].int().tolist() == [1, 1, 0, 0, 0, 0, 1, 0]
    assert seen[5].int().tolist() == [1, 1, 1, 0, 0, 1, 0, 0]


def test_mask_worked_by_hand() -> None:
    """[p p | y1 y1 | y2 | pad]: y2 sees the prompt and itself, never y1; padding sees something."""
    rows = [Row([1, 2], [3, 4]), Row([1, 2], [5]), Row([6], [1, 2, 3, 4, 5])]
    seen = dense_mask(lay_out_rows(rows, [], 3, PAD, shared=True), torch.float32)[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_is_additive_and_finite(dtype: torch.dtype) -> None:
    mask = dense_mask(lay_out_rows([Row([1], [2]), Row([1], [3])], [], 2, PAD, shared=True), dtype)
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, 3, 3)
    assert mask.isfinite().all()
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


_ids = st.integers(1, 9)
_rows = st.lists(
    st.builds(Row, st.sampled_from([[1], [1, 2], [1, 2, 5], [2, 1, 3], [4, 4]]), st.lists(_ids, max_size=4)),
    min_size=1,
    max_size=6,
)


def _context(batch: Batch, source: list[int]) -> tuple[list[int], list[int]]:
    """The tokens that a column sees, and their positions, in order of position."""
    line, column = source
    seen = (dense_mask(batch, torch.float32)[line, 0, column] == 0).nonzero().flatten()
    return batch.input_ids[line, seen].tolist(), batch.position_ids[line, seen].tolist()


@settings(max_examples=60, deadline=None)
@given(rows=_rows, shared=st.booleans(), packed=st.booleans())
def test_every_token_is_predicted_from_exactly_what_stands_before_it(
    rows: list[Row], shared: bool, packed: bool
) -> None:
    queries = [Query(number, len(row.completion), [1, 2]) for number, row in enumerate(rows)]
    batch = lay_out_rows(rows, queries, len(rows), PAD, shared=shared, packed=packed)
    tokens = [(row, i) for row in rows for i in range(len(row.completion))]
    assert batch.targets.tolist() == [row.completion[i] for row, i in tokens]
    asked = [(row, len(row.completion)) for row in rows]
    for (row, i), source in zip(tokens + asked, batch.source.tolist() + batch.query_source.tolist(), strict=True):
        before = row.prompt + row.completion[:i]
        assert _context(batch, source) == (before, list(range(len(before))))


@settings(max_examples=30, deadline=None)
@given(rows=_rows)
def test_sharing_computes_each_prompt_once(rows: list[Row]) -> None:
    batch = lay_out_rows(rows, [], len(rows), PAD, shared=True)
    prompts = {tuple(row.prompt) for row in rows}
    assert batch.input_ids.shape[0] == len(prompts)
    tokens = sum(map(len, prompts)) + sum(len(row.completion) for row in rows)
    assert int(batch.attention_mask.sum()) == tokens


@settings(max_examples=30, deadline=None)
@given(rows=_rows, shared=st.booleans())
def test_packing_leaves_no_padding(rows: list[Row], shared: bool) -> None:
    """With sharing, all sequences but one also lose the beginning that all prompts have."""
    padded, packed = (lay_out_rows(rows, [], len(rows), PAD, shared=shared, packed=packed) for packed in (False, True))
    again = (len(padded.input_ids) - 1) * count_shared_beginning(row.prompt for row in rows) if shared else 0
    assert packed.input_ids.shape == (1, int(padded.attention_mask.sum()) - again)
    assert packed.attention_mask.all()


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
def test_masked_blocks_are_not_computed(shared: bool) -> None:
    """Four pairs of 160 + 64 + 64 tokens in one line: FlexAttention's list has the blocks that hold a visible pair.

    A block has 128 x 128 pairs of tokens: 30 of the 196 are listed for eight rows and 21 of the 81 with shared prompts,
    which also make the square less than half as large.
    """
    rows = [Row([pair + 1] * 160, [side + 5] * 64) for side in range(2) for pair in range(4)]
    batch = lay_out_rows(rows, [], len(rows), PAD, shared=shared, packed=True)
    mask = block_mask(batch)
    size = batch.input_ids.shape[1]
    assert size == (4 * (160 + 64 + 64) if shared else 8 * 224)
    edge = -(-size // 128)
    seen = torch.zeros(edge * 128, edge * 128, dtype=torch.bool)
    seen[:size, :size] = dense_mask(batch, torch.float32)[0, 0] == 0
    needed = seen.view(edge, 128, edge, 128).any(3).any(1)
    listed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert torch.equal(mask.to_dense()[0, 0].bool(), needed)
    assert (listed, edge**2) == ((21, 81) if shared else (30, 196))


def test_a_first_token_without_prompt_is_not_scored() -> None:
    """Nothing predicts it; TRL's shifted layout leaves it out too."""
    batch = lay_out_rows([Row([], [5, 6]), Row([], [7])], [], 2, PAD, shared=False)
    assert batch.targets.tolist() == [6]
    assert batch.trl_index.tolist() == [[0, 0]]
