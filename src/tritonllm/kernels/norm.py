"""RMSNorm over the last axis, alone or after adding the residual stream.

    rms_norm:      y = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm:  residual <- residual + x;  y = rms_norm(residual)

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).

Rounding follows Hugging Face: the mean and the division are fp32, the quotient is rounded to the dtype of x, and only
then multiplied by the weight in that dtype. The sum with the residual is rounded before it is normalised. With a unit
offset (Gemma) the weight is 1 + weight, and the product with the quotient is fp32 and rounded once.

A program normalises ROWS whole rows in one tile: one row of a hidden state, several of a head. The tile depends on the
row length alone, so another number of rows is another grid and never another kernel.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.reference import elementwise

_TILE = 1024  # elements of a tile of short rows
_WARP_LOAD = 32 * 8  # elements that a warp loads at once: 16 bytes a thread of a 16-bit type
_MAX_COLUMNS = 32768  # one row has to fit into the registers of a program


@triton.jit
def inverse_rms(sum_of_squares, eps, COLUMNS: tl.constexpr):
    """1 / sqrt(mean + eps) of rows with these sums."""
    return tl.rsqrt(sum_of_squares / COLUMNS + eps)


@triton.jit
def scale_and_weigh(x, scale, weight, UNIT_OFFSET: tl.constexpr = False):
    """x * scale rounded to the dtype of x, then times the weight and rounded again.

    With UNIT_OFFSET x * scale * (1 + weight), rounded once.
    """
    if UNIT_OFFSET:
        return (x.to(tl.float32) * scale * (1.0 + weight.to(tl.float32))).to(x.dtype)
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_outer_stride,
    x_inner_stride,
    eps,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (row < num_rows) & (column < COLUMNS)
    start = row // INNER * x_outer_stride + row % INNER * x_inner_stride

    x = tl.load(x_ptr + start + column, mask=mask, other=0.0)  # [ROWS, BLOCK]
    # A tile of the shape of x, though every row is the same: a [1, BLOCK] tile would have to change threads.
    weight = tl.load(weight_ptr + row * 0 + column, mask=mask, other=0.0)  # [ROWS, BLOCK]
    squares = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1, keep_dims=True)  # [ROWS, 1]
    out = scale_and_weigh(x, inverse_rms(squares, eps, COLUMNS), weight, UNIT_OFFSET)
    tl.store(out_ptr + row * COLUMNS + column, out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    part_stride,
    x_stride,
    residual_stride,
    eps,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (row < num_rows) & (column < COLUMNS)
    residual_ptrs = residual_ptr + row * residual_stride + column

    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)  # [ROWS, BLOCK]
    for _ in tl.static_range(1, PARTS):
        x_ptr += part_stride
        x += tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)  # [ROWS, BLOCK]
    weight = tl.load(weight_ptr + row * 0 + column, mask=mask, other=0.0)  # [ROWS, BLOCK]
    total = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
    squares = tl.sum(total.to(tl.float32) * total.to(tl.float32), axis=1, keep_dims=True)  # [ROWS, 1]
    out = scale_and_weigh(total, inverse_rms(squares, eps, COLUMNS), weight, UNIT_OFFSET)
    tl.store(residual_ptrs, total, mask=mask)
    tl.store(out_ptr + row * COLUMNS + column, out, mask=mask)


@cache
def _tile(columns: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constexprs and compiler options for rows of this length: 16 bytes a thread and load where a row has them."""
    block = triton.next_power_of_2(columns)
    rows = max(1, _TILE // block)
    warps = min(16, max(1, rows * block // _WARP_LOAD))
    return {"COLUMNS": columns, "ROWS": rows, "BLOCK": block}, {"num_warps": warps}


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """x as [outer, inner, H], with inner 1 unless two strides are needed, as for heads [T, heads, D] inside qkv.

    The number of rows may change from call to call, inner is compiled in: so rows must not end up in inner.
    """
    one_stride = x.dim() != 3 or x.stride(0) == x.shape[1] * x.stride(1)
    return x.reshape(-1, 1, x.shape[-1]) if one_stride else x


def _check_row(op: str, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    columns = x.shape[-1] if x.dim() else 0
    check(0 < columns <= _MAX_COLUMNS, op, lambda: f"x must have 1 to {_MAX_COLUMNS} columns, not {shape_of(x)}")
    check(x.stride(-1) == 1, op, lambda: f"the last axis of x must have stride 1, not strides {x.stride()}")
    check(
        weight.shape == (columns,) and weight.dtype == dtype and weight.is_contiguous(),
        op,
        lambda: f"weight must be contiguous {dtype} of the last axis of x {shape_of(x)}, not {shape_of(weight)}",
    )


def plan_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, unit_offset: bool = False
) -> Launch:
    """Plan of `rms_norm` for x [..., H] into a contiguous out of the same shape."""
    _check_row("rms_norm", x, weight, x.dtype)
    columns = x.shape[-1]
    view = _as_heads(x)
    constexprs, options = _tile(columns)
    rows = view.shape[0] * view.shape[1]
    return Launch(
        kernel=_rms_norm_kernel,
        grid=(cdiv(rows, constexprs["ROWS"]),),
        args={
            "x_ptr": view,
            "weight_ptr": weight,
            "out_ptr": out,
            "num_rows": rows,
            "x_outer_stride": view.stride(0),
            "x_inner_stride": view.stride(1),
            "eps": eps,
        },
        constexprs={
            "INNER": view.shape[1],
            **constexprs,
            "UNIT_OFFSET": unit_offset,
            "PDL": supports_pdl(x.device),
        },
        options={**options, **pdl_options(x.device)},
    )


def plan_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> Launch:
    """Plan of `add_rms_norm` for x [T, H] or [S, T, H] and residual [T, H] into a contiguous out [T, H]."""
    _check_row("add_rms_norm", x, weight, residual.dtype)
    check(
        x.dim() == 2 or (x.dim() == 3 and x.shape[0] > 0 and x.dtype == torch.float32),
        "add_rms_norm",
        lambda: f"x must be [T, H], or parts of it in float32 [S, T, H], not {shape_of(x)}",
    )
    check(
        residual.shape == x.shape[-2:] and residual.stride(-1) == 1 and (x.dim() == 3 or residual.dtype == x.dtype),
        "add_rms_norm",
        lambda: f"residual must match x {shape_of(x)} with stride 1 along the last axis, not {shape_of(residual)}",
    )
    num_rows, columns = residual.shape
    constexprs, options = _tile(columns)
    return Launch(
        kernel=_add_rms_norm_kernel,
        grid=(cdiv(num_rows, constexprs["ROWS"]),),
        args={
            "x_ptr": x,
            "residual_ptr": residual,
            "weight_ptr": weight,
            "out_ptr": out,
            "num_rows": num_rows,
            "part_stride": x.stride(0) if x.dim() == 3 else 0,
            "x_stride": x.stride(-2),
            "residual_stride": residual.stride(0),
            "eps": eps,
        },
        constexprs={
            "PARTS": x.shape[0] if x.dim() == 3 else 1,
            **constexprs,
            "UNIT_OFFSET": unit_offset,
            "PDL": supports_pdl(x.device),
        },
        options={**options, **pdl_options(x.device)},
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Normalise the last axis of x.

    Args:
        x: [..., H], any strides with 1 along the last axis (so also heads [T, heads, D] viewed inside qkv).
        weight: [H], dtype of x.
        eps: added to the mean square.
        unit_offset: the weight is 1 + weight.

    Returns:
        A new contiguous tensor of the shape and dtype of x.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(x):
        return elementwise.rms_norm(x, weight, eps, unit_offset)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan_rms_norm(x, weight, out, eps, unit_offset).run()
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Add x to the residual stream in place and normalise the sum.

    Args:
        x: [T, H], the output of a sublayer, or float32 parts of it [S, T, H], added in order and rounded first.
        residual: [T, H], dtype of x; overwritten by residual + x.
        weight: [H], dtype of residual.
        eps: added to the mean square.
        unit_offset: the weight is 1 + weight.

    Returns:
        The normalised sum [T, H], contiguous.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(x):
        return elementwise.add_rms_norm(x, residual, weight, eps, unit_offset)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    plan_add_rms_norm(x, residual, weight, out, eps, unit_offset).run()
    return out
