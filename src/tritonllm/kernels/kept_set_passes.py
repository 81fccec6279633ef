"""The passes of `kept_set.py` over rows of logits: from the tiles' extremes to the bracket of a threshold.

A program takes `span` tiles of a row, a thread of it one vector of tokens at a time.

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
def _pair_sum(x):
    """Sums [R] over the columns of x [R, C] in an order that no layout changes."""
    if x.shape[1] == 1:
        sums = tl.reshape(x, [x.shape[0]])
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        sums = _pair_sum(even + odd)
    return sums


@triton.jit
def _span_sums(
    row_ptr,
    maxima_ptr,
    first_tile,
    last_tile,
    vocab_size,
    largest,
    temperature,
    top_k,
    lowest_counted,
    bottom,
    top,
    linear,
    geometric,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
    CUTS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """What tiles that reach the bottom add to the amount at or above each edge [EDGES], and to the mass; both int64.

    The mass of a row is the sum over its vectors, each rounded once: sums of tokens that no filter takes apart.
    """
    sums = tl.zeros([ROWS, EDGES], tl.float32)
    masses = tl.zeros([ROWS], tl.int64)
    within = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [ROWS, VECTOR]
    of_mass, of_count = tl.where(top_k > 0, 0.0, 1.0), tl.where(top_k > 0, 1.0, 0.0)
    for tile in range(first_tile, last_tile):
        if tl.load(maxima_ptr + tile) >= bottom:
            for start in tl.static_range(0, TILE, ROWS * VECTOR):
                token = tile * TILE + start + within
                x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
                ratio = probability_ratio(x, largest, temperature, HARDWARE)
                if CUTS:
                    ratio = tl.where(x >= lowest_counted, ratio, 0.0)
                masses += fixed_point(_pair_sum(ratio))
                sums += _edge_sums(x, ratio * of_mass + of_count, top, linear, geometric, 0, 1, EDGES)
    amount = tl.sum(sums, axis=0)
    return tl.where(top_k > 0, amount.to(tl.int64), fixed_point(amount)), tl.sum(masses, axis=0)


@triton.jit
def bracket(sums_ptr, needed, top, linear, geometric, EDGES: tl.constexpr):
    """The highest edge that reaches what is needed and the lowest that does not; -inf and inf without such an edge.

    The margin is for sums that were rounded.
    """
    edge = tl.arange(0, EDGES)
    logit = top - (linear * (edge + 1) + geometric * (1 << edge))  # [EDGES]
    amount = tl.load(sums_ptr + edge)
    margin = needed >> 18
    low = tl.where(amount >= needed + margin, logit, float("-inf"))
    high = tl.where(amount < needed - margin, logit, float("inf"))
    return tl.max(low, axis=0), tl.min(high, axis=0)


@triton.jit
def _most_tokens(sums_ptr, low, high, largest, linear, geometric, temperature, top_k, HARDWARE: tl.constexpr):
    """How many tokens there may be at or above the edge low, and how many of them below the edge high; fp32.

    Between two edges no token is lighter than one at the lower.
    """
    edge = tl.arange(0, COARSE_EDGES)
    logit = largest - (linear * (edge + 1) + geometric * (1 << edge))  # [COARSE_EDGES]
    amount = tl.load(sums_ptr + COARSE + edge) - tl.load(sums_ptr + COARSE + edge - 1, mask=edge > 0, other=0)
    lightest = MASS_SCALE * probability_ratio(logit, largest, temperature, HARDWARE)
    tokens = amount.to(tl.float32) / tl.where(top_k > 0, 1.0, lightest)
    tokens = tl.where(logit >= low, tokens, 0.0)
    unknown = tl.where(low > float("-inf"), 0.0, float("inf"))
    return tl.sum(tokens, axis=0) + unknown, tl.sum(tl.where(logit < high, tokens, 0.0), axis=0) + unknown


@triton.jit(do_not_specialize=["tiles"])
def _extremes_kernel(
    logits_ptr,
    extremes_ptr,
    sums_ptr,
    logits_stride,
    vocab_size,
    tiles,
    TILE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest logit of each tile and smallest above -inf, -inf if it holds NaN: [2, tiles]; clears the row's sums."""
    start_after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * TILES_AT_ONCE + tl.arange(0, TILES_AT_ONCE)
    largest = tl.full([TILES_AT_ONCE, WIDTH], float("-inf"), tl.float32)
    smallest = tl.full([TILES_AT_ONCE, WIDTH], float("inf"), tl.float32)
    for start in tl.static_range(0, TILE, WIDTH):
        token = tile[:, None] * TILE + start + tl.arange(0, WIDTH)[None, :]  # [TILES_AT_ONCE, WIDTH]
        x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        smallest = tl.minimum(smallest, tl.where(x > float("-inf"), x, float("inf")))
    has_nan = tl.max((largest != largest).to(tl.int32), axis=1)
    largest = tl.max(tl.where(largest == largest, largest, float("-inf")), axis=1)
    smallest = tl.min(smallest, axis=1)
    extremes_ptr += row * 2 * tiles
    tl.store(extremes_ptr + tile, largest, mask=tile < tiles)
    tl.store(extremes_ptr + tiles + tile, tl.where(has_nan > 0, float("-inf"), smallest), mask=tile < tiles)
    if tl.program_id(0) == 0:
        tl.store(sums_ptr + row * SUMS + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))


@triton.jit(do_not_specialize=["tiles", "span"])
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
    tiles,
    span,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mass of all tokens, and what lies above edges spread over where the threshold can be."""
    start_after_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    extremes_ptr += row * 2 * tiles
    lane = tl.arange(0, TILES)
    maxima = tl.load(extremes_ptr + lane, mask=lane < tiles, other=float("-inf"))  # [TILES]
    minima = tl.load(extremes_ptr + tiles + lane, mask=lane < tiles, other=float("inf"))
    smallest = tl.min(minima, axis=0)
    largest = tl.where(smallest == float("-inf"), float("nan"), tl.max(maxima, axis=0))
    # Top-p: all tokens further down together hold less than (1 - p) of the mass, so the threshold is above.
    reach = temperature * (tl.log(vocab_size / (1.0 - tl.maximum(top_p, 0.0))) + 0.01)
    linear = _short(tl.minimum(reach, largest - smallest) / COARSE_EDGES)
    # Top-k: the spread of the tiles' maxima is that of the largest tokens, whatever the others are.
    spread = largest - tl.min(tl.where(maxima > float("-inf"), maxima, float("inf")), axis=0)
    geometric = tl.where(spread > 0.0, spread, largest - smallest) / COARSE_EDGES
    linear, geometric = tl.where(top_k > 0, 0.0, linear), tl.where(top_k > 0, geometric, 0.0)
    if part == 0:
        bounds_ptr += row * BOUNDS
        tl.store(bounds_ptr + LARGEST, largest)
        tl.store(bounds_ptr + SMALLEST, smallest)
        tl.store(bounds_ptr + LINEAR, linear)
        tl.store(bounds_ptr + GEOMETRIC, geometric)
    if not (searches & (largest > float("-inf"))):
        return
    amount, total = _span_sums(
        logits_ptr + row * logits_stride, extremes_ptr, part * span, tl.minimum((part + 1) * span, tiles),
        vocab_size, largest, temperature, top_k, min_p_cut(largest, temperature, min_p), _LOWEST,
        largest, linear, geometric, TILE, ROWS, VECTOR, COARSE_EDGES, min_ps_ptr is not None, HARDWARE,
    )  # fmt: skip
    sums_ptr += row * SUMS
    tl.atomic_add(sums_ptr + TOTAL, total, sem="relaxed")
    tl.atomic_add(sums_ptr + COARSE + tl.arange(0, COARSE_EDGES), amount, mask=amount > 0, sem="relaxed")


@triton.jit(do_not_specialize=["tiles", "span"])
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
    tiles,
    span,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    CAPACITY: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where the coarse bracket may hold more tokens than a list: what lies above edges within it.

    Where all tokens from its lower end on fit the list, it has no upper end.
    """
    start_after_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    low, high = bracket(sums_ptr + COARSE, needed, largest, linear, geometric, COARSE_EDGES)
    from_low, between = _most_tokens(sums_ptr, low, high, largest, linear, geometric, temperature, top_k, HARDWARE)
    all_fit = (from_low <= CAPACITY) | (vocab_size <= CAPACITY)
    between = tl.where(top_k > 0, from_low, between)
    bottom, top = tl.maximum(low, tl.load(bounds_ptr + SMALLEST)), tl.minimum(high, largest)
    step = tl.where(all_fit | (between <= CAPACITY), 0.0, _short((top - bottom) / FINE_EDGES))
    if part == 0:
        tl.store(bounds_ptr + COARSE_LOW, low)
        tl.store(bounds_ptr + COARSE_HIGH, tl.where(all_fit | (top_k > 0), float("inf"), high))
        tl.store(bounds_ptr + FINE_TOP, top)
        tl.store(bounds_ptr + FINE_STEP, step)
    if not (step > 0.0):
        return
    amount, _ = _span_sums(
        logits_ptr + row * logits_stride, extremes_ptr + row * 2 * tiles, part * span,
        tl.minimum((part + 1) * span, tiles), vocab_size, largest, temperature, top_k,
        min_p_cut(largest, temperature, min_p), bottom, top, step, 0.0,
        TILE, ROWS, VECTOR, FINE_EDGES, min_ps_ptr is not None, HARDWARE,
    )  # fmt: skip
    tl.atomic_add(sums_ptr + FINE + tl.arange(0, FINE_EDGES), amount, mask=amount > 0, sem="relaxed")
