"""The tokens that top-k, top-p and min-p keep, as one threshold a row: the smallest kept logit, or a bound below it.

    top-k: a token stays if fewer than k logits are larger than its own;
    min-p: a token stays if its probability is at least min-p times the largest one;
    top-p: a token stays if the mass of larger logits is less than p times the mass that top-k and min-p left.

So equal logits stay or go together, and the largest always stays. Mass is exp((x - max) / temperature) in fixed point
with 40 bits: sums of integers do not depend on their order, so neither does the result.

The search is radix selection on keys ordered as the logits, 8 bits a pass from the top, first counting tokens (top-k),
then adding mass (top-p). Each pass fills a histogram of the next digit over the tokens that share the digits found so
far, and the programs of the pass after it read the digit off that. A pass skips tiles whose maximum is below all that
is still in question. 16-bit logits need two passes a filter, 32-bit ones four; their number depends on nothing else,
so a CUDA graph can hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import Launch, runs_kernel
from tritonllm.kernels.logits import TILE, check_column, check_logits, tiling
from tritonllm.kernels.noise import MIN_TEMPERATURE
from tritonllm.kernels.reference import sampling as reference

_BINS = tl.constexpr(256)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASS_SCALE = tl.constexpr(reference.MASS_SCALE)


@triton.jit
def _order_key(x):
    """uint32 keys ordered as x; a 16-bit x fills the upper half. Both zeros have one key."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _logit_of_key(key, DTYPE: tl.constexpr):
    """The inverse of `_order_key` for logits of type DTYPE, as fp32."""
    bits = key.to(tl.int32, bitcast=True)
    bits = bits ^ tl.where(bits < 0, -2147483648, -1)
    if DTYPE.primitive_bitwidth == 16:
        return (bits >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _next_digit(histogram_ptr, prefix, needed, top_p):
    """Extend a prefix by the largest digit that, with those above it, reaches what is needed.

    `needed` 0 says that the histogram holds the whole mass, of which the share top_p is needed. Returns the longer
    prefix and what is needed within it.
    """
    digit = tl.arange(0, _BINS)
    amount = tl.load(histogram_ptr + digit)  # [_BINS]
    total = tl.sum(amount, axis=0)
    if needed == 0:
        share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        needed = tl.maximum(share, 1)
    reached = total - tl.cumsum(amount, axis=0) + amount
    chosen = tl.max(tl.where(reached >= needed, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > chosen, amount, 0), axis=0)
    return (prefix << 8) | chosen, needed - above


@triton.jit
def _search_result(histogram_ptr, state_ptr, top_p, PASSES: tl.constexpr):
    """Key found by a search, from the histogram and the state of its last pass."""
    prefix, _ = _next_digit(histogram_ptr, tl.load(state_ptr), tl.load(state_ptr + 1), top_p)
    return (prefix << (32 - 8 * PASSES)).to(tl.uint32)


@triton.jit
def _min_p_cut(largest, temperature, min_p):
    """The logit at which a token is min_p times as likely as the likeliest; -inf for a min_p not above 0."""
    cut = largest + temperature * tl.log(tl.minimum(tl.maximum(min_p, 1e-37), 1.0))
    return tl.where((min_p > 0.0) & (largest > float("-inf")), cut, float("-inf"))


@triton.jit
def _tile_max_kernel(
    logits_ptr, tile_max_ptr, histograms_ptr, logits_stride, vocab_size, TILE: tl.constexpr, PASSES: tl.constexpr
):
    """Maximum of each tile, NaN if it holds one; clears the row's histograms [2 * PASSES, 256]."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    tl.store(tile_max_ptr + row * tl.num_programs(0) + tile, tl.where(has_nan > 0, float("nan"), largest))
    if tile == 0:
        entry = tl.arange(0, 2 * PASSES * _BINS)
        tl.store(histograms_ptr + row * (2 * PASSES * _BINS) + entry, tl.zeros([2 * PASSES * _BINS], tl.int64))


@triton.jit(do_not_specialize=["step"])
def _narrow_kernel(
    logits_ptr,
    tile_max_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    histograms_ptr,
    states_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    step,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PASSES: tl.constexpr,
):
    """One pass: fills histogram `step` of the row, steps 0 .. PASSES-1 count tokens, the others add mass.

    State [2] of a step: the digits found before it, and the amount needed among the tokens that share them.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row * temperatures_stride)
    top_k = tl.load(top_ks_ptr + row * top_ks_stride)
    top_p = tl.load(top_ps_ptr + row * top_ps_stride)
    uses_top_k = (top_k > 0) & (top_k < vocab_size)
    uses_filter = (top_p < 1.0) if MASS else uses_top_k
    if not (uses_filter & (temperature >= MIN_TEMPERATURE)):
        return
    tiles = tl.num_programs(0)
    lane = tl.arange(0, TILES)
    maxima = tl.load(tile_max_ptr + row * tiles + lane, mask=lane < tiles, other=float("-inf"))  # [TILES]
    if tl.max((maxima != maxima).to(tl.int32), axis=0) > 0:
        return

    histogram_ptr = histograms_ptr + (row * (2 * PASSES) + step) * _BINS
    state_ptr = states_ptr + (row * (2 * PASSES) + step) * 2
    shift = 24 - 8 * (step % PASSES)
    prefix = tl.full([], 0, tl.int64)
    lowest = tl.full([], 0, tl.uint32)  # keys below it are out of the question
    if not FIRST:
        prefix, needed = _next_digit(histogram_ptr - _BINS, tl.load(state_ptr - 2), tl.load(state_ptr - 1), top_p)
        lowest = ((prefix << 8) << shift).to(tl.uint32)
    elif MASS:
        needed = tl.full([], 0, tl.int64)  # the total is not known yet
        if uses_top_k:
            lowest = _search_result(histogram_ptr - _BINS, state_ptr - 2, top_p, PASSES)
    else:
        needed = top_k.to(tl.int64)
    if tile == 0:
        tl.store(state_ptr, prefix)
        tl.store(state_ptr + 1, needed)
    tile_max = tl.load(tile_max_ptr + row * tiles + tile)
    if _order_key(tile_max.to(logits_ptr.dtype.element_ty)) < lowest:
        return

    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    key = _order_key(x)
    digit = ((key >> shift) & 255).to(tl.int32)
    inside = (token < vocab_size) & (((key >> shift) >> 8) == prefix.to(tl.uint32))  # all tokens in a first pass
    if MASS:
        largest = tl.max(maxima, axis=0)
        x = x.to(tl.float32)
        distance = tl.where(x == largest, 0.0, x - largest)
        mass = (tl.exp2(distance * (_LOG2_E / temperature)) * _MASS_SCALE).to(tl.int64)
        if FIRST:
            if min_ps_ptr is not None:
                inside = inside & (x >= _min_p_cut(largest, temperature, tl.load(min_ps_ptr + row * min_ps_stride)))
            # All tokens below the cut together hold less than (1 - p) of the mass, so the threshold is above it.
            # They count only for the total, in one sum: most tokens of a peaked row.
            inside = inside & (key >= lowest)
            cut = largest - temperature * (tl.log(vocab_size / (1.0 - tl.maximum(top_p, 0.0))) + 0.01)
            below = tl.sum(tl.where(inside & (x < cut), mass, 0), axis=0)
            if below > 0:
                tl.atomic_add(histogram_ptr, below, sem="relaxed")
            inside = inside & (x >= cut)
        tl.atomic_add(histogram_ptr + digit, mass, mask=inside, sem="relaxed")
    elif FIRST:
        counts = tl.histogram(digit, _BINS, mask=inside).to(tl.int64)
        tl.atomic_add(histogram_ptr + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")
    else:
        tl.atomic_add(histogram_ptr + digit, tl.full([TILE], 1, tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _threshold_kernel(
    logits_ptr,
    tile_max_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    histograms_ptr,
    states_ptr,
    out_ptr,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    tiles,
    TILES: tl.constexpr,
    PASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row * temperatures_stride)
    top_k = tl.load(top_ks_ptr + row * top_ks_stride)
    top_p = tl.load(top_ps_ptr + row * top_ps_stride)
    lane = tl.arange(0, TILES)
    maxima = tl.load(tile_max_ptr + row * tiles + lane, mask=lane < tiles, other=float("-inf"))  # [TILES]
    threshold = tl.full([], float("-inf"), tl.float32)
    if tl.max((maxima != maxima).to(tl.int32), axis=0) > 0:
        threshold = tl.full([], float("nan"), tl.float32)
    elif (temperature >= MIN_TEMPERATURE) & ((top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size))):
        step = row * (2 * PASSES) + tl.where(top_p < 1.0, 2 * PASSES - 1, PASSES - 1)
        key = _search_result(histograms_ptr + step * _BINS, states_ptr + step * 2, top_p, PASSES)
        threshold = _logit_of_key(key, logits_ptr.dtype.element_ty)
    if min_ps_ptr is not None:
        min_p = tl.load(min_ps_ptr + row * min_ps_stride)
        if (temperature >= MIN_TEMPERATURE) & (threshold == threshold):
            threshold = tl.maximum(threshold, _min_p_cut(tl.max(maxima, axis=0), temperature, min_p))
    tl.store(out_ptr + row, threshold)


def plan_kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    out: torch.Tensor,
    tile: int = TILE,
    *,
    min_ps: torch.Tensor | None = None,
) -> list[Launch]:
    """Plan of `kept_threshold` into out fp32 [B], with scratch of its own; the result does not depend on the tile."""
    op = "kept_threshold"
    check_logits(op, logits)
    batch, vocab_size = logits.shape
    check_column(op, "temperatures", temperatures, torch.float32, (batch,))
    check_column(op, "top_ks", top_ks, torch.int32, (batch,))
    check_column(op, "top_ps", top_ps, torch.float32, (batch,))
    if min_ps is not None:
        check_column(op, "min_ps", min_ps, torch.float32, (batch,))
    tile, tiles, lanes = tiling(vocab_size, tile)
    passes = logits.element_size()  # one for each 8 bits of a key
    tile_max = torch.empty((batch, tiles), dtype=torch.float32, device=logits.device)
    histograms = torch.empty((batch, 2 * passes, _BINS.value), dtype=torch.int64, device=logits.device)
    states = torch.empty((batch, 2 * passes, 2), dtype=torch.int64, device=logits.device)

    row_args = {
        "logits_ptr": logits,
        "tile_max_ptr": tile_max,
        "temperatures_ptr": temperatures,
        "top_ks_ptr": top_ks,
        "top_ps_ptr": top_ps,
        "min_ps_ptr": min_ps,
        "histograms_ptr": histograms,
        "states_ptr": states,
    }
    strides = {
        "temperatures_stride": temperatures.stride(0),
        "top_ks_stride": top_ks.stride(0),
        "top_ps_stride": top_ps.stride(0),
        "min_ps_stride": 0 if min_ps is None else min_ps.stride(0),
        "vocab_size": vocab_size,
    }
    merged = {"TILES": lanes, "PASSES": passes}
    clear = Launch(
        kernel=_tile_max_kernel,
        grid=(tiles, batch),
        args={
            "logits_ptr": logits,
            "tile_max_ptr": tile_max,
            "histograms_ptr": histograms,
            "logits_stride": logits.stride(0),
            "vocab_size": vocab_size,
        },
        constexprs={"TILE": tile, "PASSES": passes},
        options={"num_warps": 8},
    )
    narrow = [
        Launch(
            kernel=_narrow_kernel,
            grid=(tiles, batch),
            args={**row_args, "logits_stride": logits.stride(0), **strides, "step": step},
            constexprs={"MASS": step >= passes, "FIRST": step % passes == 0, "TILE": tile, **merged},
            options={"num_warps": 8},
        )
        for step in range(2 * passes)
    ]
    finish = Launch(
        kernel=_threshold_kernel,
        grid=(batch,),
        args={**row_args, "out_ptr": out, **strides, "tiles": tiles},
        constexprs=merged,
        options={"num_warps": 4},
    )
    return [clear, *narrow, finish]


def kept_threshold(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The smallest logit that each row keeps: token v of row b is kept if logits[b, v] >= threshold[b].

    Args:
        logits: [B, V] fp32, fp16 or bf16; rows may be strided.
        temperatures: fp32 [B], any stride, as the other parameters. Rows below `MIN_TEMPERATURE` use no filter.
        top_ks: int32 [B]; off where not in 1 .. V-1.
        top_ps: fp32 [B]; off where not below 1. At 0 or below only the largest logit stays (with its equals).
        min_ps: fp32 [B], or None for none; off where not above 0. At 1 only the largest logit stays.

    Returns:
        fp32 [B]: -inf for a row without a filter, NaN for a row that holds NaN; where min-p decides, the bound and not
        a logit.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(logits):
        return reference.kept_threshold(logits, temperatures, top_ks, top_ps, min_ps)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for launch in plan_kept_threshold(logits, temperatures, top_ks, top_ps, out, min_ps=min_ps):
        launch.run()
    return out
