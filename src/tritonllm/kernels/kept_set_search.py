"""Searching for a threshold: in the list of a row, or in all of its logits.

A list holds all tokens of its bracket, or all from its lower end on. It is believed once exact sums have shown that the
threshold is in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.kept_set_rules import (
    LISTED_AT_ONCE_16,
    LISTED_AT_ONCE_32,
    fixed_point,
    order_key,
    probability_ratio,
    share_of,
)

_ROW_TILE = tl.constexpr(1024)


@triton.jit
def _list_reaches(
    list_ptr, count, middle, lowest, largest, temperature, cut, MASS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Number of tokens of a list at or above the key middle, or mass of those that are not below `lowest` or the cut.

    Also the lowest key at or above the middle and the highest below it, 2^32 - 1 and 0 where there is none.
    """
    AT_ONCE: tl.constexpr = (
        LISTED_AT_ONCE_16 if list_ptr.dtype.element_ty.primitive_bitwidth == 16 else LISTED_AT_ONCE_32
    )
    reached = tl.zeros([AT_ONCE], tl.int64)
    at = tl.full([AT_ONCE], 2**32 - 1, tl.uint32)
    below = tl.zeros([AT_ONCE], tl.uint32)
    for start in range(0, count, AT_ONCE):
        lane = start + tl.arange(0, AT_ONCE)
        live = lane < count
        logit = tl.load(list_ptr + lane, mask=live, other=float("-inf"))
        key = order_key(logit)
        amount = live.to(tl.int64)
        if MASS:
            x = logit.to(tl.float32)
            ratio = probability_ratio(x, largest, temperature, HARDWARE)
            amount = fixed_point(tl.where(live & (key >= lowest) & (x >= cut), ratio, 0.0))
        upper = key >= middle
        reached += tl.where(upper, amount, 0)
        at = tl.minimum(at, tl.where(live & upper, key, 2**32 - 1))
        below = tl.maximum(below, tl.where(live & (key < middle), key, 0))
    return tl.sum(reached, axis=0), tl.min(at, axis=0), tl.max(below, axis=0)


@triton.jit
def _highest_of_list(
    list_ptr, count, needed, at_low, low, high, largest, temperature, cut, MASS: tl.constexpr, HARDWARE: tl.constexpr
):
    """The highest key of a list that reaches what is needed with those above it; low does, with `at_low`.

    No key of the list is above high. Each round takes an end to a key of the list further in, beside a guess by how
    the amount falls between them, or beside the middle.
    """
    lowest = low
    at_next = at_low * 0
    guesses = low <= high
    while low < high:
        steps = high - low - 1
        share = (at_low - needed).to(tl.float32) / (at_low - at_next).to(tl.float32)
        guess = tl.minimum((share * steps.to(tl.float32)).to(tl.uint32), steps)
        middle = low + 1 + tl.where(guesses, guess, steps >> 1)
        guesses = guesses == 0
        reached, at, below = _list_reaches(list_ptr, count, middle, lowest, largest, temperature, cut, MASS, HARDWARE)
        reaches = reached >= needed
        low, at_low = tl.where(reaches, at, low), tl.where(reaches, reached, at_low)
        high, at_next = tl.where(reaches, high, below), tl.where(reaches, at_next, reached)
    return low


@triton.jit
def _beyond_list(found, low_end, DTYPE: tl.constexpr):
    """The key of top-k by a list with fewer tokens: that of -inf, if the list holds all tokens above it."""
    return order_key(tl.full([], float("-inf"), DTYPE)), found & (low_end == float("-inf"))


@triton.jit
def _search_list(
    list_ptr, count, low_end, high_end, above, total, largest, temperature, top_k, top_p, cut, HARDWARE: tl.constexpr
):
    """Key of the threshold by the count tokens of a list, and whether they show that it is the row's."""
    high = order_key(tl.minimum(high_end, largest).to(list_ptr.dtype.element_ty))
    low = tl.full([], 0, tl.uint32)
    found = count > 0
    if top_k > 0:
        if count >= top_k:
            _, low, _ = _list_reaches(list_ptr, count, low, low, largest, temperature, cut, False, HARDWARE)
            low = _highest_of_list(
                list_ptr, count, top_k.to(tl.int64), count.to(tl.int64), low, high,
                largest, temperature, cut, False, HARDWARE,
            )  # fmt: skip
        else:
            low, found = _beyond_list(found, low_end, list_ptr.dtype.element_ty)
    if top_p < 1.0:
        listed, lowest, _ = _list_reaches(list_ptr, count, low, low, largest, temperature, cut, True, HARDWARE)
        if top_k > 0:
            total, above = listed, listed * 0
        needed = share_of(total, top_p) - above
        found = found & (needed > 0) & (needed <= listed)
        if found:
            low = _highest_of_list(
                list_ptr, count, needed, listed, lowest, high, largest, temperature, cut, True, HARDWARE
            )
    return low, found


@triton.jit
def _rank_list(
    list_ptr, count, low_end, above, total, largest, temperature, top_k, top_p, cut, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """`_search_list` for a short list: every token is compared with every other, and nothing is searched."""
    lane = tl.arange(0, SIZE)
    live = lane < count
    key = order_key(tl.load(list_ptr + lane, mask=live, other=float("-inf")))  # [SIZE]
    tokens = tl.zeros([SIZE], tl.int32)  # at or above each
    masses = tl.zeros([SIZE], tl.int64)
    for start in range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)
        logit = tl.load(list_ptr + other, mask=other < count, other=float("-inf"))  # [CHUNK]
        x = logit.to(tl.float32)
        ratio = probability_ratio(x, largest, temperature, HARDWARE)
        mass = fixed_point(tl.where((other < count) & (x >= cut), ratio, 0.0))
        reaches = (order_key(logit)[:, None] >= key[None, :]) & (other < count)[:, None]  # [CHUNK, SIZE]
        tokens += tl.sum(reaches.to(tl.int32), axis=0)
        masses += tl.sum(tl.where(reaches, mass[:, None], 0), axis=0)
    found = count > 0
    low = tl.full([], 0, tl.uint32)
    if top_k > 0:
        if count >= top_k:
            low = tl.max(tl.where(live & (tokens >= top_k), key, 0), axis=0)
        else:
            low, found = _beyond_list(found, low_end, list_ptr.dtype.element_ty)
        total = tl.max(tl.where(live & (key >= low), masses, 0), axis=0)
        above = tl.full([], 0, tl.int64)
    if top_p < 1.0:
        needed = share_of(total, top_p) - above
        reaches_needed = live & (key >= low) & (masses >= needed)
        found = found & (needed > 0) & (tl.max(reaches_needed.to(tl.int32), axis=0) > 0)
        low = tl.max(tl.where(reaches_needed, key, low), axis=0)
    return low, found


@triton.jit
def _reached(
    row_ptr,
    vocab_size,
    first,
    second,
    third,
    lowest,
    largest,
    temperature,
    cut,
    MASS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Number of tokens at or above each of three keys, or mass of those that are not below `lowest` or the cut."""
    lane = tl.arange(0, _ROW_TILE)
    at_first = tl.zeros([_ROW_TILE], tl.int64)
    at_second = tl.zeros([_ROW_TILE], tl.int64)
    at_third = tl.zeros([_ROW_TILE], tl.int64)
    for start in range(0, vocab_size, _ROW_TILE):
        mask = start + lane < vocab_size
        logit = tl.load(row_ptr + start + lane, mask=mask, other=float("-inf"))
        key = order_key(logit)
        amount = mask.to(tl.int64)
        if MASS:
            x = logit.to(tl.float32)
            # If the largest is infinite its equals count, and nothing else.
            ratio = tl.where(x == largest, 1.0, probability_ratio(x, largest, temperature, HARDWARE))
            amount = fixed_point(tl.where(mask & (key >= lowest) & (x >= cut), ratio, 0.0))
        at_first += tl.where(key >= first, amount, 0)
        at_second += tl.where(key >= second, amount, 0)
        at_third += tl.where(key >= third, amount, 0)
    return tl.sum(at_first, axis=0), tl.sum(at_second, axis=0), tl.sum(at_third, axis=0)


@triton.jit
def _highest_of_row(
    row_ptr,
    vocab_size,
    needed,
    low,
    high,
    first,
    second,
    largest,
    temperature,
    cut,
    MASS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The highest key of low .. high that reaches what is needed, four ways a round; `first` and `second` begin.

    Mass is that of tokens from the key low on.
    """
    lowest = low
    third = high
    while low < high:
        at_first, at_second, at_third = _reached(
            row_ptr, vocab_size, first, second, third, lowest, largest, temperature, cut, MASS, HARDWARE
        )
        new_low = tl.where(at_first >= needed, first, low)
        high = tl.where(at_first >= needed, high, first - 1)
        high = tl.where((at_second < needed) & (at_first >= needed), second - 1, high)
        high = tl.where((at_third < needed) & (at_second >= needed), third - 1, high)
        low = tl.where(at_third >= needed, third, tl.where(at_second >= needed, second, new_low))
        steps = tl.where(low < high, high - low - 1, 0)
        first = low + 1 + (steps >> 2)
        second = low + 1 + (steps >> 1)
        third = low + 1 + steps - (steps >> 2)
    return low


@triton.jit
def search_row(
    row_ptr, vocab_size, low_end, high_end, total, largest, temperature, top_k, top_p, cut, HARDWARE: tl.constexpr
):
    """Key of the threshold by the whole row. The ends of the bracket are where it is tried first."""
    DTYPE: tl.constexpr = row_ptr.dtype.element_ty
    low = order_key(tl.full([], float("-inf"), DTYPE))
    high = order_key(largest.to(DTYPE))
    # The ends are fp32: rounded they may lie beside the key that was meant.
    first = tl.minimum(tl.maximum(order_key(low_end.to(DTYPE)) - 1, low), high)
    second = tl.minimum(tl.maximum(order_key(high_end.to(DTYPE)), first) + 1, high)
    if top_k > 0:
        needed = top_k.to(tl.int64)
        low = _highest_of_row(
            row_ptr,
            vocab_size,
            needed,
            low,
            high,
            first,
            second,
            largest,
            temperature,
            cut,
            MASS=False,
            HARDWARE=HARDWARE,
        )
        first, second = low, low
    if top_p < 1.0:
        if (top_k > 0) | (largest == float("inf")):
            total, _, _ = _reached(row_ptr, vocab_size, low, low, low, low, largest, temperature, cut, True, HARDWARE)
        needed = share_of(total, top_p)
        low = _highest_of_row(
            row_ptr,
            vocab_size,
            needed,
            low,
            high,
            first,
            second,
            largest,
            temperature,
            cut,
            MASS=True,
            HARDWARE=HARDWARE,
        )
    return low


@triton.jit
def search_list(
    list_ptr, count, low_end, high_end, above, total, largest, temperature, top_k, top_p, cut, FEW: tl.constexpr,
    CAPACITY: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Key of the threshold by the list, and whether the list is believed; in a way that fits the count."""
    key = tl.full([], 0, tl.uint32)
    found = count < 0
    if (largest < float("inf")) & (count <= CAPACITY):
        if count <= FEW:
            key, found = _rank_list(
                list_ptr, count, low_end, above, total, largest, temperature, top_k, top_p, cut,
                FEW, min(FEW, 32), HARDWARE,
            )  # fmt: skip
        else:
            key, found = _search_list(
                list_ptr, count, low_end, high_end, above, total, largest, temperature, top_k, top_p, cut, HARDWARE
            )
    return key, found
