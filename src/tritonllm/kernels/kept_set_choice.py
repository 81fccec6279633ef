"""The last pass of `kept_set.py`: one program a row finds the exact threshold, and draws where a token is asked for.

It goes by the list that the passes before it made. Where exact sums do not show that the threshold is in it (more equal
tokens than a list holds, a larger top-k, an edge that rounding put wrong) it searches the whole row and draws from
that, which is slower by far and right whatever came before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import start_after_previous
from tritonllm.kernels.kept_set_collect import NO_TOKEN, better
from tritonllm.kernels.kept_set_passes import ABOVE, BOUNDS, HIGH, LARGEST, LISTED, LOW, SUMS, TOTAL
from tritonllm.kernels.kept_set_rules import (
    LISTED_AT_ONCE_16,
    LISTED_AT_ONCE_32,
    logit_of_key,
    min_p_cut,
    row_filters,
)
from tritonllm.kernels.kept_set_search import search_list, search_row
from tritonllm.kernels.noise import MIN_TEMPERATURE, gumbel_ids, gumbel_tile, perturb

_ROW_TILE = tl.constexpr(1024)


@triton.jit
def _best(score, token, kept):
    """The highest score of tokens that are kept, and the lowest id that has it."""
    best = tl.max(tl.where(kept, score, float("-inf")), axis=0)
    return best, tl.min(tl.where(kept & (score == best), token, NO_TOKEN), axis=0)


@triton.jit
def _best_of_parts(best_ptr, token_ptr, parts, PARTS: tl.constexpr):
    """The choice of `_collect_kernel`, whose programs drew from a part of the row each."""
    part = tl.arange(0, PARTS)
    scores = tl.load(best_ptr + part, mask=part < parts, other=float("-inf"))  # [PARTS]
    tokens = tl.load(token_ptr + part, mask=part < parts, other=NO_TOKEN)
    return _best(scores, tokens, part < parts)


@triton.jit
def _draw_from_list(
    list_ptr, ids_ptr, count, threshold, temperature, seed_low, seed_high, position, HARDWARE: tl.constexpr
):
    """The best score of the listed tokens that are kept, and its token."""
    AT_ONCE: tl.constexpr = (
        LISTED_AT_ONCE_16 if list_ptr.dtype.element_ty.primitive_bitwidth == 16 else LISTED_AT_ONCE_32
    )
    best = tl.full([AT_ONCE], float("-inf"), tl.float32)
    winner = tl.full([AT_ONCE], NO_TOKEN, tl.int32)
    for start in range(0, count, AT_ONCE):
        lane = start + tl.arange(0, AT_ONCE)
        x = tl.load(list_ptr + lane, mask=lane < count, other=float("-inf")).to(tl.float32)
        token = tl.load(ids_ptr + lane, mask=lane < count, other=NO_TOKEN)
        noise = gumbel_ids(seed_low, seed_high, position, token, HARDWARE)
        score = tl.where((lane < count) & (x >= threshold), perturb(x, temperature, noise), float("-inf"))
        best, winner = better(best, winner, score, tl.where(score > float("-inf"), token, NO_TOKEN))
    return _best(best, winner, winner < NO_TOKEN)


@triton.jit
def _draw_from_row(row_ptr, vocab_size, threshold, temperature, seed_low, seed_high, position, HARDWARE: tl.constexpr):
    """The token with the best score of all that are kept."""
    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
    for start in range(0, vocab_size, _ROW_TILE):
        token = start + tl.arange(0, _ROW_TILE)
        x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        kept = (token < vocab_size) & (x >= threshold)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            score = perturb(x, temperature, gumbel_tile(seed_low, seed_high, position, start, _ROW_TILE, HARDWARE))
            tile_best, tile_winner = _best(score, token, kept)
            best, winner = better(best, winner, tile_best, tile_winner)
    return winner


@triton.jit(do_not_specialize=["parts"])
def _choice_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    bounds_ptr,
    sums_ptr,
    list_ptr,
    ids_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    token_ptr,
    out_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    seeds_stride,
    seeds_word_stride,
    positions_stride,
    vocab_size,
    parts,
    PARTS: tl.constexpr,
    FEW: tl.constexpr,
    CAPACITY: tl.constexpr,
    HARDWARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The threshold of a row, by its list or else by its logits; with `best_ptr` the token drawn in its place."""
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    bounds_ptr += row * BOUNDS
    sums_ptr += row * SUMS
    list_ptr += row * CAPACITY
    row_ptr = logits_ptr + row * logits_stride
    largest = tl.load(bounds_ptr + LARGEST)
    threshold = tl.where(largest == largest, float("-inf"), float("nan"))
    cut = min_p_cut(largest, temperature, min_p)
    searches = searches & (largest > float("-inf"))
    found = largest == largest
    count = tl.load(sums_ptr + LISTED).to(tl.int32)  # at most a vocabulary
    if searches:
        low, high = tl.load(bounds_ptr + LOW), tl.load(bounds_ptr + HIGH)
        above, total = tl.load(sums_ptr + ABOVE), tl.load(sums_ptr + TOTAL)
        key, found = search_list(
            list_ptr, count, low, high, above, total, largest, temperature, top_k, top_p, cut, FEW, CAPACITY, HARDWARE
        )
        if not found:
            key = search_row(row_ptr, vocab_size, low, high, total, largest, temperature, top_k, top_p, cut, HARDWARE)
        threshold = logit_of_key(key, logits_ptr.dtype.element_ty)
    if (temperature >= MIN_TEMPERATURE) & (threshold == threshold):
        threshold = tl.maximum(threshold, cut)
    if best_ptr is None:
        tl.store(out_ptr + row, threshold)
    else:
        seed_low = tl.load(seeds_ptr + row * seeds_stride)
        seed_high = tl.load(seeds_ptr + row * seeds_stride + seeds_word_stride)
        position = tl.load(positions_ptr + row * positions_stride)
        winner = tl.full([], -1, tl.int32)
        if found:
            best, winner = _best_of_parts(best_ptr + row * parts, token_ptr + row * parts, parts, PARTS)
            if searches:
                listed_best, listed_token = _draw_from_list(
                    list_ptr, ids_ptr + row * CAPACITY, count, threshold, temperature,
                    seed_low, seed_high, position, HARDWARE,
                )  # fmt: skip
                best, winner = better(best, winner, listed_best, listed_token)
        elif searches:
            winner = _draw_from_row(
                row_ptr, vocab_size, threshold, temperature, seed_low, seed_high, position, HARDWARE
            )
        tl.store(out_ptr + row, winner)
