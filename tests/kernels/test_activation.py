"""act(gate) * up: against the reference, and what must hold for any row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.activation import gelu_and_mul, silu_and_mul
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.tensors import Draw, bits
from tritonllm.testing.tolerances import tolerance

# numpy, under the interpreter, says so when exp overflows, which silu wants.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

SEEDS = st.integers(0, 2**31)
COLUMNS = st.sampled_from([1, 7, 64, 1000, 1024, 1536, 2500])


@given(
    data=st.data(),
    seed=SEEDS,
    tokens=st.integers(0, 6),
    columns=COLUMNS,
    padding=st.sampled_from([0, 3, 16]),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_matches_reference(data, seed, tokens, columns, padding, scale, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    gate_up = Draw(seed, device).rows(tokens, 2 * columns, padding, dtype) * scale
    out = silu_and_mul(gate_up)
    assert out.is_contiguous()
    torch.testing.assert_close(out, elementwise.silu_and_mul(gate_up), **tolerance("silu_and_mul", dtype))


@given(data=st.data(), seed=SEEDS, tokens=st.integers(2, 5), columns=COLUMNS)
def test_one_row_equals_many(data, seed, tokens, columns, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    gate_up = Draw(seed, device).normal(tokens, 2 * columns, dtype=dtype)
    row = data.draw(st.integers(0, tokens - 1))
    assert torch.equal(bits(silu_and_mul(gate_up)[row]), bits(silu_and_mul(gate_up[row : row + 1])[0]))


@given(
    data=st.data(),
    seed=SEEDS,
    tokens=st.integers(0, 6),
    columns=COLUMNS,
    padding=st.sampled_from([0, 3, 16]),
    scale=st.sampled_from([1.0, 30.0]),
    tanh=st.booleans(),
)
def test_gelu_matches_reference(data, seed, tokens, columns, padding, scale, tanh, device, dtypes):
    """The bound is one of gelu itself, which up multiplies: only the gate is scaled."""
    dtype = data.draw(st.sampled_from(dtypes))
    gate_up = Draw(seed, device).rows(tokens, 2 * columns, padding, dtype)
    gate_up[:, :columns] *= scale
    out = gelu_and_mul(gate_up, tanh)
    assert out.is_contiguous()
    torch.testing.assert_close(out, elementwise.gelu_and_mul(gate_up, tanh), **tolerance("gelu_and_mul", dtype))


def test_the_three_activations_differ(device):
    gate_up = Draw(1, device).normal(4, 128)
    results = [silu_and_mul(gate_up), gelu_and_mul(gate_up), gelu_and_mul(gate_up, tanh=True)]
    apart = [(a - b).abs().max().item() for a, b in zip(results, results[1:] + results[:1], strict=True)]
    assert min(apart) > 1e-4
    assert apart[1] < 5e-3  # the approximation is one


@pytest.mark.parametrize("tanh", [False, True])
def test_extreme_gates_of_gelu(tanh, device):
    gate = torch.tensor([-1000.0, -90.0, 0.0, 1000.0, float("nan")], device=device)
    out = gelu_and_mul(torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0), tanh)[0]
    assert out[:4].tolist() == [0.0, 0.0, 0.0, 1000.0]
    assert out[4].isnan()


def test_extreme_gates(device):
    """exp overflows to infinity for a very negative gate: the product is 0 and not NaN; a NaN is kept."""
    gate = torch.tensor([-1000.0, -90.0, 0.0, 1000.0, float("nan")], device=device)
    out = silu_and_mul(torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0))[0]
    assert out[:4].tolist() == [0.0, 0.0, 0.0, 1000.0]
    assert out[4].isnan()


@pytest.mark.parametrize("shape", [(2, 7), (8,)])
def test_refuses_other_shapes(shape, device):
    with pytest.raises(KernelError, match=r"silu_and_mul: gate_up must be \[T, 2 \* I\]"):
        silu_and_mul(torch.zeros(shape, device=device))
    with pytest.raises(KernelError, match=r"gelu_and_mul: gate_up must be \[T, 2 \* I\]"):
        gelu_and_mul(torch.zeros(shape, device=device))
