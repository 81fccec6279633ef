"""RMSNorm alone and with the residual: against the reference, and one row against many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.norm import add_rms_norm, plan_rms_norm, rms_norm
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.tensors import Draw, bits
from tritonllm.testing.tolerances import tolerance

EPS = 1e-5
SEEDS = st.integers(0, 2**31)
COLUMNS = st.sampled_from([1, 16, 64, 80, 96, 128, 576, 1024, 1500])
TOKENS = st.integers(0, 9)
PADDING = st.sampled_from([0, 1, 16])


@given(data=st.data(), seed=SEEDS, tokens=TOKENS, columns=COLUMNS, padding=PADDING)
def test_rms_norm_matches_reference(data, seed, tokens, columns, padding, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    x = draw.rows(tokens, columns, padding, dtype)
    weight = draw.normal(columns, dtype=dtype)
    out = rms_norm(x, weight, EPS)
    assert out.is_contiguous()
    torch.testing.assert_close(out, elementwise.rms_norm(x, weight, EPS), **tolerance("rms_norm", dtype))


@given(
    data=st.data(),
    seed=SEEDS,
    tokens=st.integers(1, 5),
    heads=st.integers(1, 5),
    others=st.integers(0, 3),
    head_dim=st.sampled_from([16, 64, 80]),
)
def test_heads_inside_qkv(data, seed, tokens, heads, others, head_dim, device, dtypes):
    """Heads viewed inside qkv give what their copy gives, bit for bit, and the heads around them are not read."""
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    qkv = draw.rows(tokens, heads * head_dim, others * head_dim, dtype)
    view = qkv.unflatten(1, (heads, head_dim))
    weight = draw.normal(head_dim, dtype=dtype)
    out = rms_norm(view, weight, EPS)
    torch.testing.assert_close(out, rms_norm(view.clone(), weight, EPS), rtol=0, atol=0)
    torch.testing.assert_close(out, elementwise.rms_norm(view, weight, EPS), **tolerance("rms_norm", dtype))


@given(data=st.data(), seed=SEEDS, tokens=TOKENS, columns=COLUMNS, padding=PADDING)
def test_add_rms_norm_matches_reference(data, seed, tokens, columns, padding, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    x, residual = (draw.rows(tokens, columns, padding, dtype) for _ in range(2))
    weight = draw.normal(columns, dtype=dtype)
    expected_residual = residual.clone()
    expected = elementwise.add_rms_norm(x, expected_residual, weight, EPS)
    out = add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    torch.testing.assert_close(out, expected, **tolerance("add_rms_norm", dtype))


@given(data=st.data(), seed=SEEDS, tokens=st.integers(1, 5), columns=COLUMNS)
def test_a_unit_offset_is_added_to_the_weight_and_rounds_once(data, seed, tokens, columns, device, dtypes):
    """Alone and behind an addition; against Gemma's formula in fp32."""
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    x, residual = (draw.rows(tokens, columns, 16, dtype) for _ in range(2))
    weight = draw.normal(columns, dtype=dtype, scale=0.3)

    def gemma(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.float())).to(dtype)

    bound = tolerance("rms_norm", dtype)
    torch.testing.assert_close(rms_norm(x, weight, EPS, unit_offset=True), gemma(x), **bound)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, EPS, True), gemma(x), rtol=0, atol=0)
    total = residual + x
    torch.testing.assert_close(add_rms_norm(x, residual, weight, EPS, unit_offset=True), gemma(total), **bound)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)


@given(data=st.data(), seed=SEEDS, parts=st.integers(1, 8), tokens=st.integers(1, 9), columns=COLUMNS)
def test_parts_are_added_in_order_and_rounded_once(data, seed, parts, tokens, columns, device, dtypes):
    """The bits of the separate ops, which tells an order of sums from another."""
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    x = draw.normal(parts, tokens, columns, scale=3.0)
    residual, weight = draw.normal(tokens, columns, dtype=dtype), draw.normal(columns, dtype=dtype)
    total = torch.zeros(tokens, columns, device=device)
    for part in x:
        total += part
    expected_residual = residual.clone()
    expected = add_rms_norm(total.to(dtype), expected_residual, weight, EPS)
    out = add_rms_norm(x, residual, weight, EPS)
    assert out.dtype == dtype
    assert torch.equal(bits(residual), bits(expected_residual))
    assert torch.equal(bits(out), bits(expected))


@given(data=st.data(), seed=SEEDS, tokens=st.integers(2, 6), columns=COLUMNS)
def test_one_row_equals_many(data, seed, tokens, columns, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    draw = Draw(seed, device)
    x = draw.normal(tokens, columns, dtype=dtype)
    weight = draw.normal(columns, dtype=dtype)
    row = data.draw(st.integers(0, tokens - 1))
    assert torch.equal(bits(rms_norm(x, weight, EPS)[row]), bits(rms_norm(x[row], weight, EPS)))


@given(seed=SEEDS, columns=st.sampled_from([16, 96]), row=st.integers(0, 5))
def test_a_nan_stays_in_its_row(seed, columns, row, device):
    draw = Draw(seed, device)
    x = draw.normal(6, columns)
    x[row, seed % columns] = float("nan")
    bad = rms_norm(x, draw.normal(columns), EPS).isnan()
    assert bad[row].all()
    assert bad.sum() == columns


def test_zeros_and_large_values(device):
    """A zero row stays zero; squares are summed in fp32, where those of large fp16 values do not overflow."""
    weight = torch.ones(64, dtype=torch.float16, device=device)
    x = torch.stack([torch.zeros(64), torch.full((64,), 60000.0)]).to(device, torch.float16)
    out = rms_norm(x, weight, EPS)
    assert out[0].eq(0).all()
    assert out[1].eq(1).all()


def test_plan_depends_on_the_row_length_alone():
    """Any number of rows is the same compiled kernel."""
    weight = torch.empty(1024, dtype=torch.bfloat16, device="meta")
    plans = []
    for shape in ((1, 1024), (7, 1024), (3, 5, 1024), (1024,)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        plans.append(plan_rms_norm(x, weight, torch.empty_like(x), EPS))
    assert all((plan.constexprs, plan.options) == (plans[0].constexprs, plans[0].options) for plan in plans)


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "weight_dtype"),
    [((2, 8), (4,), torch.float32), ((2, 8), (8,), torch.float16), ((2, 0), (0,), torch.float32)],
)
def test_refuses_what_does_not_fit(x_shape, weight_shape, weight_dtype, device):
    x = torch.zeros(x_shape, device=device)
    weight = torch.zeros(weight_shape, dtype=weight_dtype, device=device)
    with pytest.raises(KernelError, match="rms_norm: "):
        rms_norm(x, weight, EPS)
    with pytest.raises(KernelError, match="add_rms_norm: "):
        add_rms_norm(x, x.clone(), weight, EPS)


def test_refuses_parts_that_are_rounded_already(device):
    x, residual = torch.zeros(4, 2, 8, dtype=torch.float16, device=device), torch.zeros(2, 8, device=device).half()
    with pytest.raises(KernelError, match=r"parts of it in float32 \[S, T, H\], not float16\[4, 2, 8\]"):
        add_rms_norm(x, residual, torch.zeros(8, device=device).half(), EPS)


def test_refuses_another_residual(device):
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(KernelError, match=r"residual must match x float32\[2, 8\]"):
        add_rms_norm(x, torch.zeros(3, 8, device=device), weight, EPS)
