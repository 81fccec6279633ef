"""Linear layers of a decode step: few tokens, so the time is that of reading the weight once.

    y = f(x) W^T + b,  f(x) = x or rms_norm(x) * norm_weight
    gated: W stacks gate and up rows, y = act(gate) * up
    out = y + residual

Layouts: x [M, K] with 1 <= M <= 16, W [N, K] ([2 N, K] if gated), b one element a row of W, residual and out [M, N].

Rounding follows Hugging Face's separate ops: the norm is fp32 and rounded before its weight multiplies it, products are
summed in fp32 and rounded after the bias, act is fp32 and rounded, and so is each product and sum after it. So fused
and separate ops differ only by the order of the long sum.

Three forms (`skinny_table` says which runs where); none splits a sum over programs, so results do not depend on timing.
`gemv`, for one token, and `direct` read W straight into registers: many loads are in flight at once, and with
programmatic dependent launch they are issued before the wait for the kernel that computes x. `looped` streams through
shared memory.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonllm.kernels.activation import check_activation
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.paged_attention import shared_memory_limit
from tritonllm.kernels.reference import linear
from tritonllm.kernels.skinny_dot import _direct_kernel, _looped_kernel
from tritonllm.kernels.skinny_form import Form
from tritonllm.kernels.skinny_gemv import _gemv_kernel
from tritonllm.kernels.skinny_table import choose_form, statistics_columns, token_block
from tritonllm.kernels.tuning import tuning_of
from tritonllm.kernels.tuning_table import Tuning

MAX_ROWS = 16
"""Most tokens that `skinny_linear` takes."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check_shapes(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
) -> None:
    op = "skinny_linear"
    check(
        x.dim() == 2 and 1 <= x.shape[0] <= MAX_ROWS and x.shape[1] > 0 and x.stride(1) == 1 and x.dtype in _DTYPES,
        op,
        lambda: f"x must be [M, K], 1 <= M <= {MAX_ROWS}, of a float type, unit stride on K, not {shape_of(x)}",
    )
    check(
        weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.dtype == x.dtype and weight.is_contiguous(),
        op,
        lambda: f"weight must be contiguous [N, {x.shape[1]}] of the dtype of x {shape_of(x)}, not {shape_of(weight)}",
    )
    rows = weight.shape[0]
    check(not gated or rows % 2 == 0, op, lambda: f"a gated weight stacks gate and up, not {shape_of(weight)}")
    _check_vector("bias", bias, rows, x)
    _check_vector("norm_weight", norm_weight, x.shape[1], x)
    shape = (x.shape[0], rows // 2 if gated else rows)
    _check_matrix("residual", residual, shape, x)
    _check_matrix("out", out, shape, x)


def _check_vector(name: str, vector: torch.Tensor | None, length: int, x: torch.Tensor) -> None:
    if vector is not None:
        check(
            vector.shape == (length,) and vector.dtype == x.dtype and vector.is_contiguous(),
            "skinny_linear",
            lambda: f"{name} must be contiguous [{length}], {x.dtype} as x is, not {shape_of(vector)}",
        )


def _check_matrix(name: str, matrix: torch.Tensor | None, shape: tuple[int, int], x: torch.Tensor) -> None:
    if matrix is not None:
        check(
            matrix.shape == shape and matrix.dtype == x.dtype and matrix.stride(1) == 1,
            "skinny_linear",
            lambda: (
                f"{name} must be {list(shape)}, {x.dtype} as x is, unit stride on the last axis, not {shape_of(matrix)}"
            ),
        )


def plan_skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    pdl: bool | None = None,
    shared_memory: int | None = None,
    tuning: Tuning | None = None,
    form: Form | None = None,
) -> Launch:
    """Plan of `skinny_linear` into out [M, N].

    `pdl` (programmatic dependent launch), `shared_memory` (bytes) and `tuning` default to those of x's device, `form`
    to what `skinny_table` says by them.
    """
    _check_shapes(x, weight, out, bias, norm_weight, residual, gated)
    check_activation("skinny_linear", activation)
    tokens, columns = x.shape
    pdl = supports_pdl(x.device) if pdl is None else pdl
    limit = shared_memory_limit(x.device) if shared_memory is None else shared_memory
    if form is None:
        form = choose_form(
            tuning_of(x.device) if tuning is None else tuning,
            tokens,
            columns,
            weight.shape[0],
            x.element_size(),
            gated,
            norm_weight is not None,
            limit,
        )
    args: dict[str, Any] = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "norm_ptr": norm_weight,
        "residual_ptr": residual,
        "out_ptr": out,
    }
    constexprs: dict[str, Any] = {
        "N": out.shape[1],
        "K": columns,
        "BLOCK_N": form.block_n,
        "BLOCK_K": form.block_k,
    }
    block_m = token_block(tokens, limit)
    if form.kind == "gemv":
        check(tokens == 1, "skinny_linear", lambda: f"the gemv form takes one token, not {shape_of(x)}")
        kernel = _gemv_kernel
        constexprs |= {"TILES": form.tiles, "X_ROWS": form.x_rows}
    else:
        kernel = _looped_kernel if form.kind == "looped" else _direct_kernel
        args |= {
            "num_tokens": tokens,
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "out_stride": out.stride(0),
        }
        constexprs |= {"BLOCK_M": block_m, "SPLIT": form.split}
        if form.kind == "looped":
            constexprs["STATISTICS_K"] = statistics_columns(block_m, form.num_warps, limit)
        constexprs["STAGES"] = form.num_stages
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
    return Launch(
        kernel=kernel,
        grid=(cdiv(out.shape[1], form.block_n * form.tiles),),
        args=args | {"eps": eps},
        constexprs=constexprs | {"GATED": gated, "ACTIVATION": activation, "PDL": pdl},
        options=options | {"launch_pdl": True} if pdl else options,
    )


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer for at most 16 tokens, with the norm before it and the add after it.

    With programmatic dependent launch (CUDA capability 9.0 and newer) weight, norm_weight and bias are read before the
    previous kernel on the stream has ended: that kernel must not have written them.

    Args:
        x: [M, K], 1 <= M <= `MAX_ROWS`, float32, float16 or bfloat16; rows may be strided.
        weight: [N, K], contiguous; gated: [2 N, K], rows of the gate and then those of up.
        bias: one element a row of weight.
        norm_weight: [K]; x is normalised with it and `eps` first.
        residual: [M, N], added last; rows may be strided.
        gated: the result is act(gate) * up.
        activation: act, one of `activation.ACTIVATIONS`; without effect where it is not gated.
        out: [M, N], where to write; may be `residual` itself (each program reads the elements that it writes, and no
            others), must not overlap x.

    Returns:
        `out`, or a new contiguous tensor [M, N] in the dtype of x.

    Raises:
        KernelError: shapes, dtypes or strides do not fit, or the form that the tuning table has does not run here.
        ConfigError: `TRITONLLM_TUNING` names a file that is no tuning table.
    """
    if not runs_kernel(x):
        return linear.skinny_linear(
            x, weight, bias=bias, norm_weight=norm_weight, eps=eps, residual=residual, gated=gated,
            activation=activation, out=out,
        )  # fmt: skip
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0] // (2 if gated else 1), dtype=x.dtype, device=x.device)
    plan_skinny_linear(
        x, weight, out, bias=bias, norm_weight=norm_weight, eps=eps, residual=residual, gated=gated,
        activation=activation,
    ).run()  # fmt: skip
    return out
