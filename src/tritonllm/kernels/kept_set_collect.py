"""The pass of `kept_set.py` that lists the tokens of the bracket, and draws from those above it.

With top-k a bracket has no upper end, and with top-p none where the list takes all tokens from its lower end on. A row
without a threshold to search for has no bracket: it is drawn from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import start_after_previous
from tritonllm.kernels.kept_set_passes import (
    ABOVE,
    BOUNDS,
    COARSE_HIGH,
    COARSE_LOW,
    FINE,
    FINE_EDGES,
    FINE_STEP,
    FINE_TOP,
    HIGH,
    LARGEST,
    LISTED,
    LOW,
    SUMS,
    TOTAL,
    bracket,
)
from tritonllm.kernels.kept_set_rules import fixed_point, min_p_cut, probability_ratio, row_filters, share_of
from tritonllm.kernels.noise import MIN_TEMPERATURE, gumbel_rows, perturb

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _last_bracket(bounds_ptr, sums_ptr, top_k, top_p, cut):
    """The bracket of the list: that of the fine edges, where there are some, within that of the coarse ones."""
    low, high = tl.load(bounds_ptr + COARSE_LOW), tl.load(bounds_ptr + COARSE_HIGH)
    step = tl.load(bounds_ptr + FINE_STEP)
    if step > 0.0:
        needed = tl.where(top_k > 0, top_k.to(tl.int64), share_of(tl.load(sums_ptr + TOTAL), top_p))
        fine_low, fine_high = bracket(sums_ptr + FINE, needed, tl.load(bounds_ptr + FINE_TOP), step, 0.0, FINE_EDGES)
        low = tl.maximum(low, fine_low)
        high = tl.where(top_k > 0, high, tl.minimum(high, fine_high))
    if top_k == 0:
        low, high = tl.maximum(low, cut), tl.maximum(high, cut)
    return low, high


@triton.jit
def _best_of_rows(score, token, allowed):
    """The highest score of each row of tokens [ROWS, VECTOR] and the lowest id that has it."""
    score = tl.where(allowed, score, float("-inf"))
    best = tl.max(score, axis=1)
    return best, tl.min(tl.where(allowed & (score == best[:, None]), token, NO_TOKEN), axis=1)


@triton.jit
def better(best, winner, score, token):
    """Of two choices, the one with the higher score, or the lower id."""
    is_better = (score > best) | ((score == best) & (token < winner))
    return tl.where(is_better, score, best), tl.where(is_better, token, winner)


@triton.jit
def _append(list_ptr, ids_ptr, listed_ptr, logit, token, listed, CAPACITY: tl.constexpr):
    """Put tokens [ROWS, VECTOR] on a list, in no order that matters."""
    counts = tl.sum(listed.to(tl.int32), axis=1)
    count = tl.sum(counts, axis=0)
    if count > 0:
        first = tl.atomic_add(listed_ptr, count.to(tl.int64), sem="relaxed")
        if first < CAPACITY:
            before = first.to(tl.int32) + tl.cumsum(counts, axis=0) - counts
            place = before[:, None] + tl.cumsum(listed.to(tl.int32), axis=1) - 1
            fits = listed & (place < CAPACITY)
            tl.store(list_ptr + place, logit, mask=fits)
            if ids_ptr is not None:
                tl.store(ids_ptr + place, token, mask=fits)


@triton.jit(do_not_specialize=["tiles", "span"])
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
    ids_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    token_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    seeds_stride,
    seeds_word_stride,
    positions_stride,
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
    """Lists the tokens of the last bracket and adds the exact mass above it; the best score above it and its token.

    Without `best_ptr` nothing is drawn.
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
    cut = min_p_cut(largest, temperature, min_p)
    draws = temperature >= MIN_TEMPERATURE
    searches = searches & (largest > float("-inf"))
    low, high = tl.full([], float("inf"), tl.float32), tl.where(draws, cut, largest)
    if searches:
        low, high = _last_bracket(bounds_ptr, sums_ptr, top_k, top_p, cut)
        if part == 0:
            tl.store(bounds_ptr + LOW, low)
            tl.store(bounds_ptr + HIGH, high)
    elif best_ptr is None:
        return

    row_ptr = logits_ptr + row * logits_stride
    within = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [ROWS, VECTOR]
    masses = tl.zeros([ROWS], tl.int64)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    winner = tl.full([ROWS], NO_TOKEN, tl.int32)
    for tile in range(part * span, tl.minimum((part + 1) * span, tiles)):
        tile_max = tl.load(extremes_ptr + row * 2 * tiles + tile)
        if tile_max >= tl.minimum(low, high):
            for start in tl.static_range(0, TILE, ROWS * VECTOR):
                token = tile * TILE + start + within
                inside = token < vocab_size
                logit = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
                x = logit.to(tl.float32)
                above = inside & (x >= high)
                if searches:
                    listed = (x >= low) & (x < high) & (x > float("-inf"))
                    _append(
                        list_ptr + row * CAPACITY,
                        ids_ptr + row * CAPACITY if ids_ptr is not None else None,
                        sums_ptr + LISTED,
                        logit,
                        token,
                        listed,
                        CAPACITY,
                    )
                if tile_max >= high:
                    if searches:
                        ratio = probability_ratio(x, largest, temperature, HARDWARE)
                        masses += tl.sum(tl.where(above, fixed_point(ratio), 0), axis=1)
                    if best_ptr is not None:
                        score = x
                        if draws:
                            noise = gumbel_rows(
                                tl.load(seeds_ptr + row * seeds_stride),
                                tl.load(seeds_ptr + row * seeds_stride + seeds_word_stride),
                                tl.load(positions_ptr + row * positions_stride),
                                tile * TILE + start, ROWS, VECTOR, HARDWARE,
                            )  # fmt: skip
                            score = perturb(x, temperature, noise)
                        best, winner = better(best, winner, *_best_of_rows(score, token, above))
    if searches & (high < float("inf")):
        tl.atomic_add(sums_ptr + ABOVE, tl.sum(masses, axis=0), sem="relaxed")
    if best_ptr is not None:
        place = row * tl.num_programs(0) + part
        score = tl.max(best, axis=0)
        tl.store(best_ptr + place, score)
        tl.store(token_ptr + place, tl.min(tl.where(best == score, winner, NO_TOKEN), axis=0))
