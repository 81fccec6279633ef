"""The fused pass between the QKV projection and attention: against the reference and against the separate ops."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.kv_store import store_kv
from tritonllm.kernels.norm import rms_norm
from tritonllm.kernels.reference import elementwise
from tritonllm.kernels.rope import apply_rope
from tritonllm.kernels.rope_store import plan_rope_store_kv, rope_store_kv
from tritonllm.testing.tensors import Draw, bits
from tritonllm.testing.tolerances import tolerance

BLOCK_SIZE = 4
BLOCKS = 4
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """What a checkpoint fixes."""

    heads: tuple[int, int]
    dims: tuple[int, int]  # head_dim, rotary_dim
    normed: bool
    heads_first: bool
    unit_offset: bool = False


SEEDS = st.integers(0, 2**31)
SHAPES = st.builds(
    Shape,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (12, 2), (16, 8)]),
    dims=st.sampled_from([(16, 16), (64, 64), (64, 16), (80, 80), (80, 32), (96, 96), (128, 128), (256, 256)]),
    normed=st.booleans(),
    heads_first=st.booleans(),
    unit_offset=st.booleans(),
)


@dataclass
class Inputs:
    """Arguments of one call; `caches()` gives a new pool full of NaN."""

    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    shape: Shape
    norms: dict[str, torch.Tensor]
    draw: Draw

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        kv_heads, head_dim = self.shape.heads[1], self.shape.dims[0]
        return self.draw.caches(BLOCKS, BLOCK_SIZE, kv_heads, head_dim, self.shape.heads_first, self.qkv.dtype)

    def run(self, op, caches, rows=slice(None)) -> torch.Tensor:
        return op(
            self.qkv[rows],
            self.cos_sin,
            self.positions[rows],
            *caches,
            self.slots[rows],
            self.shape.heads[0],
            eps=EPS,
            unit_offset=self.shape.unit_offset,
            **self.norms,
        )


def make_inputs(seed: int, tokens: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    (num_heads, kv_heads), (head_dim, rotary_dim) = shape.heads, shape.dims
    draw = Draw(seed, device)
    angles = draw.normal(20, rotary_dim // 2, scale=3.0)
    return Inputs(
        qkv=draw.rows(tokens, (num_heads + 2 * kv_heads) * head_dim, seed % 2 * 16, dtype),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        positions=draw.integers(0, 20, tokens),
        slots=draw.slots(tokens, BLOCKS * BLOCK_SIZE),
        shape=shape,
        norms={name: draw.normal(head_dim, dtype=dtype) for name in ("q_norm", "k_norm")} if shape.normed else {},
        draw=draw,
    )


@given(data=st.data(), seed=SEEDS, tokens=st.integers(0, 5), shape=SHAPES)
def test_matches_reference(data, seed, tokens, shape, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    inputs = make_inputs(seed, tokens, shape, dtype, device)
    before = bits(inputs.qkv.clone())
    caches, expected_caches = inputs.caches(), inputs.caches()
    q = inputs.run(rope_store_kv, caches)
    expected = inputs.run(elementwise.rope_store_kv, expected_caches)

    assert q.is_contiguous()
    assert torch.equal(bits(inputs.qkv), before), "qkv must be left as it is"
    bounds = tolerance("rope_store_kv", dtype)
    torch.testing.assert_close(q, expected, **bounds)
    torch.testing.assert_close(caches[0], expected_caches[0], equal_nan=True, **bounds)
    assert torch.equal(bits(caches[1]), bits(expected_caches[1])), "values are copied"
    written = int((inputs.slots >= 0).sum())
    for cache in caches:
        assert int(cache.isnan().all(dim=-1).sum()) == (BLOCKS * BLOCK_SIZE - written) * shape.heads[1]


@given(data=st.data(), seed=SEEDS, tokens=st.integers(1, 3), shape=SHAPES)
def test_equals_the_separate_ops(data, seed, tokens, shape, device, dtypes):
    """Norm, rotation and store as three kernels; exact without the norm, whose sum has another order."""
    dtype = data.draw(st.sampled_from(dtypes))
    inputs = make_inputs(seed, tokens, shape, dtype, device)
    (num_heads, kv_heads), (head_dim, _) = shape.heads, shape.dims
    caches, separate = inputs.caches(), inputs.caches()
    fused_q = inputs.run(rope_store_kv, caches)

    heads = inputs.qkv.unflatten(1, (-1, head_dim)).clone()
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if shape.normed:
        q, k = (rms_norm(x, inputs.norms[n], EPS, shape.unit_offset) for x, n in ((q, "q_norm"), (k, "k_norm")))
    apply_rope(q, k, inputs.positions, inputs.cos_sin)
    store_kv(k, v, *separate, inputs.slots)

    bounds = tolerance("rope_store_kv", dtype) if shape.normed else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(fused_q, q, **bounds)
    torch.testing.assert_close(caches[0], separate[0], equal_nan=True, **bounds)
    assert torch.equal(bits(caches[1]), bits(separate[1]))


@given(data=st.data(), seed=SEEDS, tokens=st.integers(2, 4), shape=SHAPES)
def test_one_row_equals_many(data, seed, tokens, shape, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    inputs = make_inputs(seed, tokens, shape, dtype, device)
    row = data.draw(st.integers(0, tokens - 1))
    together, alone = inputs.caches(), inputs.caches()
    q = inputs.run(rope_store_kv, together)[row]
    assert torch.equal(bits(q), bits(inputs.run(rope_store_kv, alone, slice(row, row + 1))[0]))
    slot = int(inputs.slots[row])
    if slot >= 0:
        at = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        for left, right in zip(together, alone, strict=True):
            assert torch.equal(bits(left[at]), bits(right[at]))
    else:
        assert all(cache.isnan().all() for cache in alone), "slot -1 must write nothing"


def test_plan_depends_on_the_checkpoint_alone():
    """Any number of tokens is the same compiled kernel."""
    plans = []
    for tokens in (1, 5, 300):
        qkv = torch.empty(tokens, 32 * 128, dtype=torch.bfloat16, device="meta")
        per_token = torch.empty(tokens, dtype=torch.int32, device="meta")
        cache = torch.empty(9, 256, 8, 128, dtype=torch.bfloat16, device="meta")
        cos_sin = torch.empty(64, 128, device="meta")
        q_out = torch.empty(tokens, 16, 128, dtype=torch.bfloat16, device="meta")
        plans.append(plan_rope_store_kv(qkv, cos_sin, per_token, cache, cache, per_token, q_out))
    assert all((plan.constexprs, plan.options) == (plans[0].constexprs, plans[0].options) for plan in plans)
    assert [plan.grid[0] for plan in plans] == [1, 5, 300]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_norm": torch.ones(16)}, "q_norm and k_norm, or neither"),
        ({"q_norm": torch.ones(8), "k_norm": torch.ones(8)}, "q_norm and k_norm must be vectors of 16"),
        ({"num_heads": 3}, r"qkv must be \[T, 112\]"),
        ({"cos_sin": torch.zeros(20, 32)}, "cos_sin must be"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, r"positions must be a contiguous int32\[3\]"),
    ],
)
def test_refuses_what_does_not_fit(change, message, device):
    arguments = {
        "qkv": torch.zeros(3, 4 * 16),
        "cos_sin": torch.zeros(20, 16),
        "positions": torch.zeros(3, dtype=torch.int32),
        "k_cache": torch.zeros(2, 4, 2, 16),
        "v_cache": torch.zeros(2, 4, 2, 16),
        "slot_mapping": torch.zeros(3, dtype=torch.int32),
        "num_heads": 4,
        **change,
    }
    if "num_heads" not in change:
        arguments["qkv"] = torch.zeros(3, 8 * 16)
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(KernelError, match=message):
        rope_store_kv(**moved)
