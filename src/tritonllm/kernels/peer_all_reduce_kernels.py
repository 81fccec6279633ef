"""The two kernels of `peer_all_reduce`, which says what they compute; `peer_buffer` says where they write."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import launch_dependents, start_after_previous, wait_for_previous
from tritonllm.kernels.norm import inverse_rms, scale_and_weigh


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
