"""Decode rows on the device: loading, advancing, and the rows that must not move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER, TOKEN, advance_rows, load_rows
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.tensors import Draw

VOCAB_SIZE = 100
SEEDS = st.integers(0, 2**31)


def make_rows(seed: int, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Rows full of garbage but for what the kernels read; about a third hold no sequence, some hold a bad token."""
    draw = Draw(seed, device)
    rows = draw.integers(-(2**31), 2**31 - 1, num_rows, HEADER + max_blocks)
    rows[:, TOKEN] = draw.integers(-2, VOCAB_SIZE + 2, num_rows)
    context_lens = draw.integers(1, max_blocks * block_size + 1, num_rows)
    context_lens[draw.normal(num_rows) < -0.4] = 0
    rows[:, CONTEXT_LEN] = context_lens
    used = (context_lens + block_size - 1) // block_size
    inside = torch.arange(max_blocks, device=device) < used.unsqueeze(1)
    rows[:, HEADER:] = torch.where(inside, draw.integers(0, 1000, num_rows, max_blocks), rows[:, HEADER:])
    return rows


ROWS = st.integers(1, 70)
MAX_BLOCKS = st.sampled_from([1, 3, 16])
BLOCK_SIZES = st.sampled_from([1, 5, 16])


@given(data=st.data(), seed=SEEDS, num_rows=ROWS, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZES)
def test_load_matches_reference(data, seed, num_rows, max_blocks, block_size, device):
    rows = make_rows(seed, num_rows, max_blocks, block_size, device)
    count = data.draw(st.integers(0, num_rows))
    before = rows.clone()
    loaded = load_rows(rows, count, block_size, VOCAB_SIZE)
    expected = elementwise.load_rows(rows, count, block_size, VOCAB_SIZE)
    for output, reference in zip(loaded, expected, strict=True):
        assert output.dtype == torch.int32
        assert torch.equal(output, reference)
    assert torch.equal(rows, before)


@given(seed=SEEDS, num_rows=ROWS, max_blocks=MAX_BLOCKS, block_size=BLOCK_SIZES)
def test_load_by_the_definition(seed, num_rows, max_blocks, block_size, device):
    rows = make_rows(seed, num_rows, max_blocks, block_size, device)
    loaded = [output.tolist() for output in load_rows(rows, num_rows, block_size, VOCAB_SIZE)]
    for row, input_id, position, slot, context_len in zip(rows.tolist(), *loaded, strict=True):
        if row[CONTEXT_LEN] == 0:
            assert (input_id, position, slot, context_len) == (0, 0, -1, 0)
            continue
        assert context_len == row[CONTEXT_LEN]
        assert position == context_len - 1
        assert slot == row[HEADER + position // block_size] * block_size + position % block_size
        assert input_id == (row[TOKEN] if 0 <= row[TOKEN] < VOCAB_SIZE else 0)


@given(data=st.data(), seed=SEEDS, num_rows=ROWS)
def test_advance_moves_live_rows_only(data, seed, num_rows, device):
    rows = make_rows(seed, num_rows, 3, 4, device)
    count = data.draw(st.integers(1, num_rows))
    tokens = Draw(seed + 1, device).integers(-1, VOCAB_SIZE, count)
    before, expected = rows.clone(), rows.clone()
    elementwise.advance_rows(expected, tokens, tokens.clone())
    sampled = torch.full_like(tokens, -5)
    advance_rows(rows, tokens, sampled)
    assert torch.equal(rows, expected)
    assert torch.equal(sampled, tokens)

    live = torch.zeros(num_rows, dtype=torch.bool, device=device)
    live[:count] = before[:count, CONTEXT_LEN] > 0
    assert torch.equal(rows[~live], before[~live])
    assert torch.equal(rows[live, TOKEN], tokens[live[:count]])
    assert torch.equal(rows[live, CONTEXT_LEN], before[live, CONTEXT_LEN] + 1)
    others = [column for column in range(rows.shape[1]) if column not in (TOKEN, CONTEXT_LEN)]
    assert torch.equal(rows[:, others], before[:, others])


@given(seed=SEEDS, block_size=BLOCK_SIZES)
def test_steps_walk_through_the_table(seed, block_size, device):
    """Loading and advancing in turn visits the slots of the table in order, and then slot -1."""
    table = Draw(seed, device).integers(0, 50, 2)
    rows = torch.zeros(2, HEADER + 2, dtype=torch.int32, device=device)
    rows[0, HEADER:] = table
    rows[0, CONTEXT_LEN] = 1
    steps = min(2 * block_size, 6)
    visited = []
    for step in range(steps):
        _, _, slots, _ = load_rows(rows, 2, block_size, VOCAB_SIZE)
        visited.append(slots.tolist())
        tokens = torch.tensor([step, 7], dtype=torch.int32, device=device)
        advance_rows(rows, tokens, tokens.clone())
    blocks = table.tolist()
    expected = [blocks[position // block_size] * block_size + position % block_size for position in range(steps)]
    assert visited == [[slot, -1] for slot in expected]
    rows[0, CONTEXT_LEN] = 2 * block_size + 1
    assert load_rows(rows, 2, block_size, VOCAB_SIZE)[2].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("shape", "dtype", "num_rows"),
    [((2, HEADER), torch.int32, 1), ((2, HEADER + 1), torch.int64, 1), ((2, HEADER + 1), torch.int32, 3)],
)
def test_refuses_what_does_not_fit(shape, dtype, num_rows, device):
    rows = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(KernelError, match="load_rows: "):
        load_rows(rows, num_rows, 4, VOCAB_SIZE)
    tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
    with pytest.raises(KernelError, match="advance_rows: "):
        advance_rows(rows, tokens, tokens.clone())
