"""Sums over the GPUs of one host, through memory that they can write into, alone or with the add and norm that follow.

    out = sum of x over the ranks
    residual <- residual + sum of x over the ranks;  out = rms_norm(residual)

`one_shot`: a rank sends its rows to all others, and each adds all of them. Values travel as 64-bit words, 32 bits of
them and the channel's count: a word is there once its count is. So nothing has to be fenced or flagged, and one way
over the link is all that is waited for. That is twice the bytes, for few of them.

`two_shot`: a rank adds its share of the columns for all ranks, then sends the sums to all. Plain stores, and two flags.

Terms are added in fp32 in the order of the ranks and rounded once, by either algorithm and on any rank: all hold the
same bits. `peer_buffer` says how the memory is divided. NVLink multicast is not used.

Sources: the LL protocol of NCCL; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
in MPICH" (2005), for the reduce-scatter and all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from tritonllm.kernels.dependent_launch import pdl_options
from tritonllm.kernels.launch import Launch, cdiv, check, shape_of, supports_pdl
from tritonllm.kernels.peer_all_reduce_kernels import _one_shot_kernel, _two_shot_kernel
from tritonllm.kernels.peer_buffer import (
    MAX_CHANNELS,
    MAX_RANKS,
    ONE_SHOT_CHANNELS,
    SLOT_BYTES,
    PeerBuffer,
    words_bytes,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ONE_SHOT_BYTES = 2**20  # that a rank sends, counts aside; above, the second half of the words takes longer than a flag


@dataclass(frozen=True)
class Norm:
    """What follows the sum: `residual <- residual + sum`, and the norm of that.

    Attributes:
        residual: [T, H].
        weight: [H], dtype of residual.
        eps: added to the mean square.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float


Plan = Callable[[torch.Tensor, torch.Tensor, Norm | None, PeerBuffer], Launch]


def one_shot_fits(rows: int, columns: int, dtype: torch.dtype, buffer: PeerBuffer) -> bool:
    """Whether `plan_one_shot` takes tensors of this size: few rows of whole 8 bytes, each of which fits a slot."""
    unit = 8 // dtype.itemsize
    fits = columns % unit == 0 and columns // unit * 16 <= SLOT_BYTES
    return dtype in _DTYPES and fits and rows <= min(ONE_SHOT_CHANNELS, buffer.num_channels)


def two_shot_fits(rows: int, columns: int, dtype: torch.dtype, buffer: PeerBuffer) -> bool:
    """Whether `plan_two_shot` takes tensors of this size: the rows of a program fit in a slot."""
    row_bytes = buffer.size * _share(columns, buffer.size) * dtype.itemsize
    return dtype in _DTYPES and cdiv(rows, buffer.num_channels) * row_bytes <= SLOT_BYTES


def choose_plan(rows: int, columns: int, dtype: torch.dtype, buffer: PeerBuffer) -> Plan | None:
    """The plan that is fastest for tensors of this size, None where torch's own all-reduce is.

    The limits are estimates from the speed of the link.
    """
    sent = rows * columns * dtype.itemsize * (buffer.size - 1)
    if sent <= _ONE_SHOT_BYTES and one_shot_fits(rows, columns, dtype, buffer):
        return plan_one_shot
    return plan_two_shot if two_shot_fits(rows, columns, dtype, buffer) else None


@cache
def _share(columns: int, size: int) -> int:
    """Columns that a rank adds up: a multiple of 8, so that its share begins where 16 bytes do."""
    return cdiv(cdiv(columns, size), 8) * 8


def _check(op: str, fits: bool, x: torch.Tensor, out: torch.Tensor, norm: Norm | None, buffer: PeerBuffer) -> None:
    check(fits, op, lambda: f"x {shape_of(x)} of {buffer.size} ranks does not fit the slots of the buffer")
    check(1 < buffer.size <= MAX_RANKS, op, lambda: f"the buffer must have 2 to {MAX_RANKS} ranks, not {buffer.size}")
    parts = x.dim() == 3 and x.shape[0] > 0 and x.dtype == torch.float32
    check(
        x.shape[-2:] == out.shape and x.stride(-1) == 1 and (parts or (x.dim() == 2 and x.dtype == out.dtype)),
        op,
        lambda: f"x must be [T, H] with rows in one piece, or parts of it in float32 [S, T, H], not {shape_of(x)}",
    )
    check(out.is_contiguous(), op, lambda: f"out must be contiguous, not strides {out.stride()}")
    if norm is None:
        return
    check(
        norm.residual.shape == out.shape and norm.residual.dtype == out.dtype and norm.residual.stride(-1) == 1,
        op,
        lambda: f"residual must match x {shape_of(x)} with rows in one piece, not {shape_of(norm.residual)}",
    )
    check(
        norm.weight.shape == out.shape[-1:] and norm.weight.dtype == out.dtype and norm.weight.is_contiguous(),
        op,
        lambda: f"weight must be contiguous, of the last axis of x {shape_of(x)}, not {shape_of(norm.weight)}",
    )


def _tensors(x: torch.Tensor, out: torch.Tensor, norm: Norm | None, buffer: PeerBuffer) -> dict[str, Any]:
    return {
        "x_ptr": x,
        "residual_ptr": norm.residual if norm is not None else None,
        "weight_ptr": norm.weight if norm is not None else None,
        "out_ptr": out,
        "addresses_ptr": buffer.addresses,
        "state_ptr": buffer.state,
        "rank": buffer.rank,
    }


def _strides(x: torch.Tensor, norm: Norm | None) -> dict[str, Any]:
    return {
        "part_stride": x.stride(0) if x.dim() == 3 else 0,
        "x_stride": x.stride(-2),
        "residual_stride": norm.residual.stride(0) if norm is not None else 0,
        "eps": norm.eps if norm is not None else 0.0,
    }


def plan_one_shot(x: torch.Tensor, out: torch.Tensor, norm: Norm | None, buffer: PeerBuffer) -> Launch:
    """Plan of the sum of x over the ranks into out, by words that every rank sends to every other.

    All ranks of the buffer launch it, one after the other, with the same sizes.

    Args:
        x: [T, H], this rank's terms, or float32 parts of them [S, T, H], added in order and rounded first.
        out: [T, H], contiguous; the sum, or its norm. May be x.
        norm: what follows the sum, None for nothing.
        buffer: of the ranks.

    Raises:
        KernelError: shapes, dtypes or strides do not fit, among themselves or in the slots of the buffer.
    """
    rows, columns = out.shape
    _check("one_shot", one_shot_fits(rows, columns, out.dtype, buffer), x, out, norm, buffer)
    unit = 8 // out.dtype.itemsize
    units = triton.next_power_of_2(columns // unit)
    return Launch(
        kernel=_one_shot_kernel,
        grid=(rows,),
        args={**_tensors(x, out, norm, buffer), **_strides(x, norm)},
        constexprs={
            "PARTS": x.shape[0] if x.dim() == 3 else 1,
            "WORLD": buffer.size,
            "COLUMNS": columns,
            "UNIT": unit,
            "UNITS": units,
            "SLOT_WORDS": SLOT_BYTES // 8,
            "STOP": MAX_CHANNELS,
            "PDL": supports_pdl(x.device),
        },
        options={"num_warps": _warps(units), "maxnreg": 128, **pdl_options(x.device)},
    )


def plan_two_shot(x: torch.Tensor, out: torch.Tensor, norm: Norm | None, buffer: PeerBuffer) -> Launch:
    """Plan of the same sum, of which every rank makes a part of the columns and sends it to the others.

    All ranks of the buffer launch it, one after the other, with the same sizes. Arguments and errors are those of
    `plan_one_shot`.
    """
    num_rows, columns = out.shape
    _check("two_shot", two_shot_fits(num_rows, columns, out.dtype, buffer), x, out, norm, buffer)
    rows = cdiv(num_rows, buffer.num_channels)
    share = _share(columns, buffer.size)
    return Launch(
        kernel=_two_shot_kernel,
        grid=(cdiv(num_rows, rows) if rows else 0,),
        args={**_tensors(x, out, norm, buffer), "num_rows": num_rows, "rows": rows, **_strides(x, norm)},
        constexprs={
            "PARTS": x.shape[0] if x.dim() == 3 else 1,
            "WORLD": buffer.size,
            "COLUMNS": columns,
            "SHARE": share,
            "SHARE_BLOCK": triton.next_power_of_2(share),
            "BLOCK": triton.next_power_of_2(columns),
            "PARTS_AT": words_bytes(buffer.size),
            "SLOT": SLOT_BYTES,
            "CHANNELS": MAX_CHANNELS,
            "RANKS": MAX_RANKS,
            "PDL": supports_pdl(x.device),
        },
        options={"num_warps": _warps(triton.next_power_of_2(columns) // 4), "maxnreg": 128, **pdl_options(x.device)},
    )


@cache
def _warps(units: int) -> int:
    """Warps of a program with a row of so many times 8 bytes."""
    return min(16, max(1, units // 64))
