"""SwiGLU's elementwise half: silu of one half of a row times the other half.

    y[t, i] = silu(x[t, i]) * x[t, I + i],    silu(g) = g / (1 + exp(-g))

Source: Shazeer, "GLU Variants Improve Transformer" (2020).

Rounding follows Hugging Face: silu is fp32 and rounded to the dtype of x, then multiplied in that dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.reference import elementwise

_BLOCK = 1024  # 8 elements a thread of four warps: one 16-byte load of each half


@triton.jit
def silu(x):
    """fp32 silu."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < COLUMNS
    gate_ptrs = gate_up_ptr + token * gate_up_stride + column

    gate = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = tl.load(gate_ptrs + COLUMNS, mask=mask, other=0.0)
    activated = silu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * COLUMNS + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


def plan_silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    """Plan of `silu_and_mul` for gate_up [T, 2 I] into a contiguous out [T, I]."""
    check(
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.stride(1) == 1,
        "silu_and_mul",
        lambda: f"gate_up must be [T, 2 * I] with stride 1 along the last axis, not {shape_of(gate_up)}",
    )
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return Launch(
        kernel=_silu_and_mul_kernel,
        grid=(tokens, cdiv(columns, _BLOCK)),
        args={"gate_up_ptr": gate_up, "out_ptr": out, "gate_up_stride": gate_up.stride(0)},
        constexprs={"COLUMNS": columns, "BLOCK": _BLOCK, "PDL": supports_pdl(gate_up.device)},
        options={"num_warps": 4, **pdl_options(gate_up.device)},
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [T, 2 I]: the gate in the first I columns, up in the others; rows may be strided.

    Returns:
        [T, I], contiguous, in the dtype of gate_up.

    Raises:
        KernelError: the shape or the strides do not fit.
    """
    if not runs_kernel(gate_up):
        return elementwise.silu_and_mul(gate_up)
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    plan_silu_and_mul(gate_up, out).run()
    return out
