"""The elementwise half of a gated MLP: an activation of one half of a row times the other half.

    y[t, i] = act(x[t, i]) * x[t, I + i]
    silu(g) = g / (1 + exp(-g))
    gelu(g) = g * (1 + erf(g / sqrt(2))) / 2
    gelu_tanh(g) = g * (1 + tanh(u)) / 2 = g / (1 + exp(-2 u)),    u = sqrt(2 / pi) * (g + 0.044715 g^3)

Sources: Shazeer, "GLU Variants Improve Transformer" (2020); Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).

Rounding follows Hugging Face: act is fp32 and rounded to the dtype of x, then multiplied in that dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.reference import elementwise

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""What a gated MLP can have."""

_BLOCK = 1024  # 8 elements a thread of four warps: one 16-byte load of each half


@triton.jit
def silu(x):
    """fp32 silu."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """fp32 activation, one of `ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return silu(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _activate_and_mul_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < COLUMNS
    gate_ptrs = gate_up_ptr + token * gate_up_stride + column

    gate = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = tl.load(gate_ptrs + COLUMNS, mask=mask, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + token * COLUMNS + column, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


def check_activation(op: str, activation: str) -> None:
    """Raise `KernelError` unless it is one of `ACTIVATIONS`."""
    check(activation in ACTIVATIONS, op, lambda: f"activation must be one of {ACTIVATIONS}, not {activation!r}")


def _plan(op: str, gate_up: torch.Tensor, out: torch.Tensor, activation: str) -> Launch:
    check(
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.stride(1) == 1,
        op,
        lambda: f"gate_up must be [T, 2 * I] with stride 1 along the last axis, not {shape_of(gate_up)}",
    )
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return Launch(
        kernel=_activate_and_mul_kernel,
        grid=(tokens, cdiv(columns, _BLOCK)),
        args={"gate_up_ptr": gate_up, "out_ptr": out, "gate_up_stride": gate_up.stride(0)},
        constexprs={
            "COLUMNS": columns,
            "BLOCK": _BLOCK,
            "ACTIVATION": activation,
            "PDL": supports_pdl(gate_up.device),
        },
        options={"num_warps": 4, **pdl_options(gate_up.device)},
    )


def plan_silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    """Plan of `silu_and_mul` for gate_up [T, 2 I] into a contiguous out [T, I]."""
    return _plan("silu_and_mul", gate_up, out, "silu")


def plan_gelu_and_mul(gate_up: torch.Tensor, out: torch.Tensor, tanh: bool = False) -> Launch:
    """Plan of `gelu_and_mul` for gate_up [T, 2 I] into a contiguous out [T, I]."""
    return _plan("gelu_and_mul", gate_up, out, "gelu_tanh" if tanh else "gelu")


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


def gelu_and_mul(gate_up: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """gelu(gate) * up; arguments, result and errors as of `silu_and_mul`.

    Args:
        gate_up: [T, 2 I].
        tanh: the approximation by tanh in place of the exact gelu.
    """
    if not runs_kernel(gate_up):
        return elementwise.gelu_and_mul(gate_up, tanh)
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    plan_gelu_and_mul(gate_up, out, tanh).run()
    return out
