"""Rotary embedding: against the reference, and as a rotation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.reference import elementwise
from tritonllm.kernels.rope import apply_rope
from tritonllm.testing.tensors import Draw
from tritonllm.testing.tolerances import tolerance

MAX_POSITION = 50
SEEDS = st.integers(0, 2**31)
# (head_dim, rotary_dim): whole and partial rotation, halves that are no power of two.
DIMS = st.sampled_from([(16, 16), (64, 64), (64, 16), (80, 80), (80, 32), (96, 96), (128, 128), (256, 64), (32, 20)])
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (12, 2)])


def angles_table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    """cos_sin of the plain theta = 10000 table."""
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(MAX_POSITION).double().unsqueeze(1) * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


@given(data=st.data(), seed=SEEDS, tokens=st.integers(0, 5), heads=HEADS, dims=DIMS, spare=st.integers(0, 2))
def test_matches_reference(data, seed, tokens, heads, dims, spare, device, dtypes):
    """On views of q and k inside wider rows; what is not rotated keeps its bits."""
    dtype = data.draw(st.sampled_from(dtypes))
    (num_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
    draw = Draw(seed, device)
    wide = draw.normal(tokens, num_heads + num_kv_heads + spare, head_dim, dtype=dtype)
    positions = draw.integers(0, MAX_POSITION, tokens)
    table = angles_table(rotary_dim, device)
    before, expected = wide.clone(), wide.clone()
    for tensor, rope in ((expected, elementwise.apply_rope), (wide, apply_rope)):
        q, k, _ = tensor.split((num_heads, num_kv_heads, spare), dim=1)
        rope(q, k, positions, table)
    torch.testing.assert_close(wide, expected, **tolerance("apply_rope", dtype))
    assert torch.equal(wide[..., rotary_dim:], before[..., rotary_dim:])
    assert torch.equal(wide[:, num_heads + num_kv_heads :], before[:, num_heads + num_kv_heads :])


@given(seed=SEEDS, dims=DIMS)
def test_scores_depend_on_the_distance_alone(seed, dims, device):
    """The defining property: the product of a rotated query and key is that of the same pair moved together."""
    head_dim, rotary_dim = dims
    draw = Draw(seed, device)
    q, k = draw.normal(1, 1, head_dim), draw.normal(1, 1, head_dim)
    table = angles_table(rotary_dim, device)
    scores = []
    for shift in (0, 17):
        here, there = q.repeat(2, 1, 1), k.repeat(2, 1, 1)
        apply_rope(here, there, torch.tensor([3 + shift, 11 + shift], dtype=torch.int32, device=device), table)
        scores.append((here[0] * there[1]).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4 * head_dim**0.5)


@given(seed=SEEDS, dims=DIMS)
def test_position_zero_changes_nothing(seed, dims, device):
    head_dim, rotary_dim = dims
    draw = Draw(seed, device)
    q, k = draw.normal(2, 3, head_dim), draw.normal(2, 1, head_dim)
    rotated_q, rotated_k = q.clone(), k.clone()
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    apply_rope(rotated_q, rotated_k, zeros, angles_table(rotary_dim, device))
    torch.testing.assert_close((rotated_q, rotated_k), (q, k), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rotary_dim", "positions_dtype", "message"),
    [(24, torch.int32, "cos_sin must be"), (16, torch.int64, "positions must be a contiguous int32")],
)
def test_refuses_what_does_not_fit(rotary_dim, positions_dtype, message, device):
    q, k = torch.zeros(2, 2, 16, device=device), torch.zeros(2, 1, 16, device=device)
    positions = torch.zeros(2, dtype=positions_dtype, device=device)
    with pytest.raises(KernelError, match=message):
        apply_rope(q, k, positions, angles_table(rotary_dim, device))
