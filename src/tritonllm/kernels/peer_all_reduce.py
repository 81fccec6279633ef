"""Sums over the GPUs of one host, through memory that they can write into, alone or with the add and norm that follow.

    peer_all_reduce:               x <- sum of x over the ranks
    peer_all_reduce_add_rms_norm:  residual <- residual + sum of x;  y = rms_norm(residual)

`one_shot`: a rank sends its rows to all others, and each adds all of them. Values travel as 64-bit words, 32 bits of them
and the channel's count: a word is there once its count is, so nothing has to be fenced or flagged, and one way over the
link is all that is waited for. Twice the bytes, for few of them.

`two_shot`: a rank adds its part of the columns for all ranks, then sends the sums to all. Plain stores, and two flags.

Terms are added in fp32 in the order of the ranks and rounded once, by either algorithm and on any rank: all hold the same
bits. The words and flags are as `peer_buffer` lays them out. NVLink multicast is not used.

Sources: the LL protocol of NCCL; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), for the reduce-scatter and all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import (
    launch_dependents,
    pdl_options,
    start_after_previous,
    wait_for_previous,
)
from tritonllm.kernels.launch import Launch, cdiv, check, shape_of, supports_pdl
from tritonllm.kernels.norm import inverse_rms, scale_and_weigh
from tritonllm.kernels.peer_buffer import (
    MAX_CHANNELS,
    MAX_RANKS,
    ONE_SHOT_CHANNELS,
    SLOT_BYTES,
    PeerBuffer,
    words_bytes,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _load_terms(ptrs, mask, part_stride, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """This rank's terms, rounded: what is there, or the parts of it added up."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    for _ in tl.static_range(1, PARTS):
        ptrs += part_stride
        x += tl.load(ptrs, mask=mask, other=0.0)
    return x.to(DTYPE)


@triton.jit
def _add_and_norm(total, residual, residual_ptrs, weight, mask, eps, COLUMNS: tl.constexpr):
    """The norm of residual + total, for one row [N, L]; the sum goes into the residual."""
    total = (residual.to(tl.float32) + total.to(tl.float32)).to(total.dtype)
    tl.store(residual_ptrs, total, mask=mask)
    squares = tl.sum(tl.sum(total.to(tl.float32) * total.to(tl.float32), axis=1), axis=0)
    return scale_and_weigh(total, inverse_rms(squares, eps, COLUMNS), weight)


@triton.jit
def _as_words(x, count, UNITS: tl.constexpr):
    """Values [U, 8 bytes] as words [U, 2]: 32 bits of values in the lower half, the count in the upper."""
    if x.shape[1] == 4:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (UNITS, 2, 2)))  # [U, 2] each
        values = (low.to(tl.int64) & 0xFFFF) | ((high.to(tl.int64) & 0xFFFF) << 16)
    else:
        values = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return values | (count.to(tl.int64) << 32)


@triton.jit
def _as_values(words, DTYPE: tl.constexpr, UNITS: tl.constexpr):
    """The values in words [U, 2]: [U, 4] of a 16-bit type, [U, 2] of float32."""
    if DTYPE.primitive_bitwidth == 16:
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.reshape(tl.join(low, high), (UNITS, 4))
    else:
        values = words.to(tl.int32).to(DTYPE, bitcast=True)
    return values


@triton.jit
def _old(words, mask, count):
    """Whether a word has another count, as a number that is not 0."""
    return tl.max(tl.max((((words >> 32).to(tl.int32) != count) & mask).to(tl.int32), axis=1), axis=0)


@triton.jit
def _await_words(ptrs, mask, count, stop_ptr):
    """Words [U, 2] once all of them have this count."""
    words = tl.load(ptrs, mask=mask, other=0, volatile=True)
    waiting = _old(words, mask, count)
    while waiting != 0:
        words = tl.load(ptrs, mask=mask, other=0, volatile=True)
        stop = tl.load(stop_ptr, volatile=True)
        waiting = tl.where(stop == 0, _old(words, mask, count), 0)
    return words


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    addresses_ptr,
    state_ptr,
    rank,
    part_stride,
    x_stride,
    residual_stride,
    eps,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    STOP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, UNITS)[:, None]  # of 8 bytes: two words
    column = unit * UNIT + tl.arange(0, UNIT)[None, :]  # [U, UNIT]
    word = unit * 2 + tl.arange(0, 2)[None, :]  # [U, 2]
    mask = (unit < COLUMNS // UNIT) & (column >= 0)
    sent = (unit < COLUMNS // UNIT) & (word >= 0)
    own = tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)), 16)
    first = tl.multiple_of(tl.load(addresses_ptr + (rank + 1) % WORLD).to(tl.pointer_type(tl.int64)), 16)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    if PDL:
        wait_for_previous()

    count = tl.load(state_ptr + row) + 1
    x = _load_terms(x_ptr + row * x_stride + column, mask, part_stride, PARTS, DTYPE)
    if weight_ptr is not None:
        residual_ptrs = residual_ptr + row * residual_stride + column
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    slot = (row * 2 + (count & 1)) * WORLD * SLOT_WORDS
    words = _as_words(x, count, UNITS)
    tl.store(first + slot + rank * SLOT_WORDS + word, words, mask=sent, cache_modifier=".wt")
    if WORLD == 2:  # the sum of two has one order
        received = _await_words(own + slot + (1 - rank) * SLOT_WORDS + word, sent, count, state_ptr + STOP)
        total = x.to(tl.float32) + _as_values(received, DTYPE, UNITS).to(tl.float32)
    else:
        for step in tl.static_range(2, WORLD):
            peer = tl.load(addresses_ptr + (rank + step) % WORLD).to(tl.pointer_type(tl.int64))
            peer = tl.multiple_of(peer, 16) + slot + rank * SLOT_WORDS
            tl.store(peer + word, words, mask=sent, cache_modifier=".wt")
        total = x.to(tl.float32)
        for source in range(WORLD):
            awaited = sent & (word * 0 + source != rank)
            received = _await_words(own + slot + source * SLOT_WORDS + word, awaited, count, state_ptr + STOP)
            term = tl.where(source == rank, x, _as_values(received, DTYPE, UNITS)).to(tl.float32)
            total = tl.where(source == 0, term, total + term)
    out = total.to(DTYPE)
    if weight_ptr is not None:
        out = _add_and_norm(out, residual, residual_ptrs, weight, mask, eps, COLUMNS)
    tl.store(out_ptr + row * COLUMNS + column, out, mask=mask)
    tl.debug_barrier()  # every thread has read the count
    tl.store(state_ptr + row, count)


@triton.jit
def _meet(addresses_ptr, flags, rank, count, stop_ptr, WORLD: tl.constexpr, RANKS: tl.constexpr):
    """What this program stored is seen by those of the channel, and what they stored before they came here by it."""
    lane = tl.arange(0, RANKS)
    other = (lane < WORLD) & (lane != rank)
    theirs = (tl.load(addresses_ptr + lane, mask=other, other=0) + flags).to(tl.pointer_type(tl.int32)) + rank
    own = (tl.load(addresses_ptr + rank) + flags).to(tl.pointer_type(tl.int32)) + lane
    tl.debug_barrier()
    tl.atomic_xchg(theirs, lane * 0 + count, mask=other, sem="release", scope="sys")
    waiting = 1
    while waiting != 0:
        stop = tl.load(stop_ptr, volatile=True)
        # Another rank may be one all-reduce ahead, and counts begin again after the largest.
        behind = other & (tl.atomic_add(own, 0, mask=other, sem="acquire", scope="sys") - count < 0)
        waiting = tl.where(stop == 0, tl.max(behind.to(tl.int32), axis=0), 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "num_rows", "rows"])
def _two_shot_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    addresses_ptr,
    state_ptr,
    rank,
    num_rows,
    rows,
    part_stride,
    x_stride,
    residual_stride,
    eps,
    PARTS: tl.constexpr,
    WORLD: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_AT: tl.constexpr,
    SLOT: tl.constexpr,
    CHANNELS: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.program_id(0).to(tl.int64)
    first = channel * rows
    last = tl.minimum(first + rows, num_rows)
    count = tl.load(state_ptr + channel) + 1
    parts_at = PARTS_AT + (channel * 2 + (count & 1)) * SLOT
    sums_at = parts_at + CHANNELS * 2 * SLOT
    flags = PARTS_AT + 2 * CHANNELS * 2 * SLOT + channel * 2 * RANKS * 4
    place = tl.arange(0, SHARE_BLOCK)  # a column of a rank's share

    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        column = peer * SHARE + place
        mask = (place < SHARE) & (column < COLUMNS)
        target = (tl.load(addresses_ptr + peer) + parts_at).to(tl.pointer_type(DTYPE))
        target = tl.multiple_of(target, 16) + rank * rows * SHARE
        for row in range(first, last):
            x = _load_terms(x_ptr + row * x_stride + column, mask, part_stride, PARTS, DTYPE)
            tl.store(target + (row - first) * SHARE + place, x, mask=mask)
    _meet(addresses_ptr, flags, rank, count, state_ptr + CHANNELS, WORLD, RANKS)

    # What other ranks have written is read past the L1 cache, which may hold what was there before.
    own = tl.load(addresses_ptr + rank)
    parts = tl.multiple_of((own + parts_at).to(tl.pointer_type(DTYPE)), 16)
    column = rank * SHARE + place
    mask = (place < SHARE) & (column < COLUMNS)
    for row in range(first, last):
        x = _load_terms(x_ptr + row * x_stride + column, mask, part_stride, PARTS, DTYPE)
        for source in tl.static_range(WORLD):
            ptrs = parts + (source * rows + row - first) * SHARE + place
            received = tl.load(ptrs, mask=mask & (place * 0 + source != rank), other=0.0, cache_modifier=".cg")
            term = tl.where(source == rank, x, received).to(tl.float32)
            if source == 0:
                total = term
            else:
                total += term
        for step in tl.static_range(WORLD):
            target = (tl.load(addresses_ptr + (rank + step) % WORLD) + sums_at).to(tl.pointer_type(DTYPE))
            target = tl.multiple_of(target, 16) + (row - first) * WORLD * SHARE
            tl.store(target + column, total.to(DTYPE), mask=mask)
    _meet(addresses_ptr, flags + RANKS * 4, rank, count, state_ptr + CHANNELS, WORLD, RANKS)

    sums = tl.multiple_of((own + sums_at).to(tl.pointer_type(DTYPE)), 16)
    column = tl.arange(0, BLOCK)[:, None]
    mask = column < COLUMNS
    for row in range(first, last):
        out = tl.load(sums + (row - first) * WORLD * SHARE + column, mask=mask, other=0.0, cache_modifier=".cg")
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
            residual_ptrs = residual_ptr + row * residual_stride + column
            residual = tl.load(residual_ptrs, mask=mask, other=0.0)
            out = _add_and_norm(out, residual, residual_ptrs, weight, mask, eps, COLUMNS)
        tl.store(out_ptr + row * COLUMNS + column, out, mask=mask)
    tl.store(state_ptr + channel, count)


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


def one_shot_fits(rows: int, columns: int, dtype: torch.dtype, buffer: PeerBuffer) -> bool:
    """Whether `plan_one_shot` takes tensors of this size: few rows of whole 8 bytes, each of which fits a slot."""
    unit = 8 // dtype.itemsize
    fits = columns % unit == 0 and columns // unit * 16 <= SLOT_BYTES
    return dtype in _DTYPES and fits and rows <= min(ONE_SHOT_CHANNELS, buffer.num_channels)


def two_shot_fits(rows: int, columns: int, dtype: torch.dtype, buffer: PeerBuffer) -> bool:
    """Whether `plan_two_shot` takes tensors of this size: the rows of a program fit in a slot."""
    row_bytes = buffer.size * _share(columns, buffer.size) * dtype.itemsize
    return dtype in _DTYPES and cdiv(rows, buffer.num_channels) * row_bytes <= SLOT_BYTES


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
        options={"num_warps": _warps(units), **pdl_options(x.device)},
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
        options={"num_warps": _warps(triton.next_power_of_2(columns) // 4), **pdl_options(x.device)},
    )


@cache
def _warps(units: int) -> int:
    """Warps of a program with a row of so many times 8 bytes."""
    return min(16, max(1, units // 64))
