"""The passes of `kept_set.py` over rows of logits: from the tiles' extremes to a short list that holds the threshold.

What a row passes on lies in two arrays that the first pass clears or a single program fills:
    sums int64 [SUMS]: mass of all tokens, mass above the bracket, tokens put on the list, and from 8 and 16 on what
        lies at or above each edge of the first and of the second bracket: mass, or tokens for a row with top-k;
    bounds fp32 [BOUNDS], by name below.
Sums of sums of fp32 are rough, but added as integers they do not depend on the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import start_after_previous
from tritonllm.kernels.kept_set_rules import (
    MASS_SCALE,
    fixed_point,
    min_p_cut,
    probability_ratio,
    row_filters,
    share_of,
)

COARSE_EDGES = tl.constexpr(8)
FINE_EDGES = tl.constexpr(16)

SUMS = tl.constexpr(32)
TOTAL, ABOVE, LISTED, COARSE, FINE = (tl.constexpr(place) for place in (0, 1, 2, 8, 16))

BOUNDS = tl.constexpr(16)
# The largest logit (NaN if there is one), the smallest above -inf, the steps of the coarse edges; the coarse bracket,
# the upper end and the step of the fine edges; the bracket of the list.
LARGEST, SMALLEST, LINEAR, GEOMETRIC = (tl.constexpr(place) for place in (0, 1, 2, 3))
COARSE_LOW, COARSE_HIGH, FINE_TOP, FINE_STEP = (tl.constexpr(place) for place in (4, 5, 6, 7))
LOW, HIGH = (tl.constexpr(place) for place in (8, 9))

_MANY = tl.constexpr(2**62)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of finite logits


@triton.jit
def _short(step):
    """A step of 12 bits less, rounded towards 0, so that its multiples are exact however they are computed."""
    return (step.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def _edge_sums(x, weight, top, linear, geometric, FIRST: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Sums [ROWS, COUNT] over the columns of weight [ROWS, COLUMNS] where x is at or above edges FIRST, + STRIDE, ...

    Edge i lies (i + 1) linear and 2^i geometric steps below the top; one of the two is 0.
    """
    if COUNT == 1:
        edge = top - (linear * (FIRST + 1) + geometric * (1 << FIRST))
        # A factor of 1 or 0 takes one instruction, a choice of the weight or 0 two.
        sums = tl.sum((x >= edge).to(tl.float32) * weight, axis=1)
    else:
        even = _edge_sums(x, weight, top, linear, geometric, FIRST, 2 * STRIDE, COUNT // 2)
        odd = _edge_sums(x, weight, top, linear, geometric, FIRST + STRIDE, 2 * STRIDE, COUNT // 2)
        sums = tl.reshape(tl.join(even, odd), [x.shape[0], COUNT])
    return sums


@triton.jit
def _tile_sums(
    row_ptr,
    tile,
    vocab_size,
    largest,
    temperature,
    top_k,
    lowest_counted,
    top,
    linear,
    geometric,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
):
    """What a tile adds to the amount at or above each edge [EDGES], and to the mass of all tokens; both int64.

    A thread keeps what it reads at once: one row of [ROWS, VECTOR] tokens.
    """
    sums = tl.zeros([ROWS, EDGES], tl.float32)
    masses = tl.zeros([ROWS], tl.int64)
    within = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [ROWS, VECTOR]
    for start in tl.static_range(0, TILE, ROWS * VECTOR):
        token = tile * TILE + start + within
        x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        ratio = tl.where(x >= lowest_counted, probability_ratio(x, largest, temperature), 0.0)
        masses += tl.sum(fixed_point(ratio), axis=1)
        sums += _edge_sums(x, tl.where(top_k > 0, 1.0, ratio), top, linear, geometric, 0, 1, EDGES)
    amount = tl.sum(sums, axis=0)
    return tl.where(top_k > 0, amount.to(tl.int64), fixed_point(amount)), tl.sum(masses, axis=0)


@triton.jit
def _bracket(sums_ptr, needed, top, linear, geometric, EDGES: tl.constexpr):
    """The highest edge that reaches what is needed and the lowest that does not, with the amounts at or above them.

    Without such an edge: -inf and a huge amount, inf and 0. The margin is for sums that were rounded.
    """
    edge = tl.arange(0, EDGES)
    logit = top - (linear * (edge + 1) + geometric * (1 << edge))  # [EDGES]
    amount = tl.load(sums_ptr + edge)
    margin = needed >> 18
    reaches = amount >= needed + margin
    fails = amount < needed - margin
    low, high = tl.where(reaches, logit, float("-inf")), tl.where(fails, logit, float("inf"))
    at_low, at_high = tl.where(reaches, amount, _MANY), tl.where(fails, amount, 0)
    return tl.max(low, axis=0), tl.min(high, axis=0), tl.min(at_low, axis=0), tl.max(at_high, axis=0)


@triton.jit
def _extremes_kernel(
    logits_ptr, extremes_ptr, sums_ptr, logits_stride, vocab_size, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Largest logit of each tile and smallest above -inf, -inf if it holds NaN: [2, tiles]; clears the row's sums."""
    start_after_previous(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    smallest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    tiles = tl.num_programs(0)
    tl.store(extremes_ptr + row * 2 * tiles + tile, largest)
    tl.store(extremes_ptr + (row * 2 + 1) * tiles + tile, tl.where(has_nan > 0, float("-inf"), smallest))
    if tile == 0:
        tl.store(sums_ptr + row * SUMS + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))


@triton.jit
def _coarse_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    extremes_ptr,
    bounds_ptr,
    sums_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mass of all tokens, and what lies above edges spread over where the threshold can be."""
    start_after_previous(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    tiles = tl.num_programs(0)
    lane = tl.arange(0, TILES)
    maxima = tl.load(extremes_ptr + row * 2 * tiles + lane, mask=lane < tiles, other=float("-inf"))  # [TILES]
    minima = tl.load(extremes_ptr + (row * 2 + 1) * tiles + lane, mask=lane < tiles, other=float("inf"))
    smallest = tl.min(minima, axis=0)
    largest = tl.where(smallest == float("-inf"), float("nan"), tl.max(maxima, axis=0))
    # Top-p: all tokens further down together hold less than (1 - p) of the mass, so the threshold is above.
    reach = temperature * (tl.log(vocab_size / (1.0 - tl.maximum(top_p, 0.0))) + 0.01)
    linear = _short(tl.minimum(reach, largest - smallest) / COARSE_EDGES)
    # Top-k: the spread of the tiles' maxima is that of the largest tokens, whatever the others are.
    spread = largest - tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), axis=0)
    geometric = tl.where(spread > 0.0, spread, largest - smallest) / COARSE_EDGES
    linear, geometric = tl.where(top_k > 0, 0.0, linear), tl.where(top_k > 0, geometric, 0.0)
    if tile == 0:
        bounds_ptr += row * BOUNDS
        tl.store(bounds_ptr + LARGEST, largest)
        tl.store(bounds_ptr + SMALLEST, smallest)
        tl.store(bounds_ptr + LINEAR, linear)
        tl.store(bounds_ptr + GEOMETRIC, geometric)
    if not (searches & (largest > float("-inf"))):
        return
    lowest_counted = tl.maximum(min_p_cut(largest, temperature, min_p), _LOWEST)
    amount, total = _tile_sums(
        logits_ptr + row * logits_stride, tile, vocab_size, largest, temperature, top_k,
        lowest_counted, largest, linear, geometric, TILE, ROWS, VECTOR, COARSE_EDGES,
    )  # fmt: skip
    sums_ptr += row * SUMS
    tl.atomic_add(sums_ptr + TOTAL, total, sem="relaxed")
    tl.atomic_add(sums_ptr + COARSE + tl.arange(0, COARSE_EDGES), amount, mask=amount > 0, sem="relaxed")


@triton.jit
def _fine_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    extremes_ptr,
    bounds_ptr,
    sums_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where the coarse bracket may hold more tokens than a list: what lies above edges within it."""
    start_after_previous(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    bounds_ptr += row * BOUNDS
    sums_ptr += row * SUMS
    largest = tl.load(bounds_ptr + LARGEST)
    if not (searches & (largest > float("-inf"))):
        return
    needed = tl.where(top_k > 0, top_k.to(tl.int64), share_of(tl.load(sums_ptr + TOTAL), top_p))
    linear, geometric = tl.load(bounds_ptr + LINEAR), tl.load(bounds_ptr + GEOMETRIC)
    low, high, at_low, at_high = _bracket(sums_ptr + COARSE, needed, largest, linear, geometric, COARSE_EDGES)
    # None of the tokens between is lighter than one at the lower end.
    lightest = tl.where(top_k > 0, 1.0, MASS_SCALE * probability_ratio(low, largest, temperature))
    tokens = tl.where(top_k > 0, at_low, at_low - at_high).to(tl.float32)
    fits = (tokens <= CAPACITY * lightest) | (vocab_size <= CAPACITY)
    bottom, top = tl.maximum(low, tl.load(bounds_ptr + SMALLEST)), tl.minimum(high, largest)
    step = tl.where(fits, 0.0, _short((top - bottom) / FINE_EDGES))
    if tile == 0:
        tl.store(bounds_ptr + COARSE_LOW, low)
        tl.store(bounds_ptr + COARSE_HIGH, high)
        tl.store(bounds_ptr + FINE_TOP, top)
        tl.store(bounds_ptr + FINE_STEP, step)
    if not ((step > 0.0) & (tl.load(extremes_ptr + row * 2 * tl.num_programs(0) + tile) >= bottom)):
        return
    lowest_counted = tl.maximum(min_p_cut(largest, temperature, min_p), _LOWEST)
    amount, _ = _tile_sums(
        logits_ptr + row * logits_stride, tile, vocab_size, largest, temperature, top_k,
        lowest_counted, top, step, 0.0, TILE, ROWS, VECTOR, FINE_EDGES,
    )  # fmt: skip
    tl.atomic_add(sums_ptr + FINE + tl.arange(0, FINE_EDGES), amount, mask=amount > 0, sem="relaxed")


@triton.jit
def _collect_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    extremes_ptr,
    bounds_ptr,
    sums_ptr,
    list_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists the tokens of the last bracket and adds the mass above it. With top-k the bracket has no upper end."""
    start_after_previous(PDL)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    bounds_ptr += row * BOUNDS
    sums_ptr += row * SUMS
    largest = tl.load(bounds_ptr + LARGEST)
    if not (searches & (largest > float("-inf"))):
        return
    low, high = tl.load(bounds_ptr + COARSE_LOW), tl.load(bounds_ptr + COARSE_HIGH)
    step = tl.load(bounds_ptr + FINE_STEP)
    if step > 0.0:
        needed = tl.where(top_k > 0, top_k.to(tl.int64), share_of(tl.load(sums_ptr + TOTAL), top_p))
        fine_top = tl.load(bounds_ptr + FINE_TOP)
        fine_low, fine_high, _, _ = _bracket(sums_ptr + FINE, needed, fine_top, step, 0.0, FINE_EDGES)
        low, high = tl.maximum(low, fine_low), tl.minimum(high, fine_high)
    if tile == 0:
        tl.store(bounds_ptr + LOW, low)
        tl.store(bounds_ptr + HIGH, high)
    tile_max = tl.load(extremes_ptr + row * 2 * tl.num_programs(0) + tile)
    if tile_max < low:
        return

    token = tile * TILE + tl.arange(0, TILE)  # [TILE]
    logit = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    x = logit.to(tl.float32)
    above = (x >= high) & (top_k == 0)
    if (tile_max >= high) & (top_k == 0):
        above_mass = fixed_point(probability_ratio(x, largest, temperature))
        tl.atomic_add(sums_ptr + ABOVE, tl.sum(tl.where(above, above_mass, 0), axis=0), sem="relaxed")
    listed = (x >= low) & (x > float("-inf")) & (above == 0)
    count = tl.sum(listed.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(sums_ptr + LISTED, count.to(tl.int64), sem="relaxed")
        if first < CAPACITY:
            place = first.to(tl.int32) + tl.cumsum(listed.to(tl.int32), axis=0) - 1
            tl.store(list_ptr + row * CAPACITY + place, logit, mask=listed & (place < CAPACITY))
