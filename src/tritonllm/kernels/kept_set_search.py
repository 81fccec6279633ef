"""The last pass of `kept_set.py`: one program a row finds the exact threshold.

It searches the list that the passes before it made, once exact sums have shown that the threshold is in it. Where it
is not (more equal tokens than a list holds, a larger top-k, an edge that rounding put wrong) it searches the whole row,
which is slower by far and right whatever came before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import start_after_previous
from tritonllm.kernels.kept_set_passes import ABOVE, BOUNDS, HIGH, LARGEST, LISTED, LOW, SUMS, TOTAL
from tritonllm.kernels.kept_set_rules import (
    fixed_point,
    logit_of_key,
    min_p_cut,
    order_key,
    probability_ratio,
    row_filters,
    share_of,
)
from tritonllm.kernels.noise import MIN_TEMPERATURE

_ROW_TILE = tl.constexpr(4096)


@triton.jit
def _highest_reaching(key, amount, needed, low, high):
    """The highest of the keys low .. high that, with those above it, reaches what is needed, as low does."""
    while low < high:
        middle = high - ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle, amount, 0), axis=0) >= needed:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _search_list(list_ptr, count, low_end, above, total, largest, temperature, top_k, top_p, cut, SIZE: tl.constexpr):
    """Key of the threshold by the count tokens of a list, and whether they show that it is the row's."""
    lane = tl.arange(0, SIZE)
    live = lane < count
    x = tl.load(list_ptr + lane, mask=live, other=float("-inf"))  # [SIZE]
    key = order_key(x)
    high = tl.max(tl.where(live, key, 0), axis=0)
    low = tl.min(tl.where(live, key, high), axis=0)
    x = x.to(tl.float32)
    mass = fixed_point(tl.where(live & (x >= cut), probability_ratio(x, largest, temperature), 0.0))
    found = count > 0
    if top_k > 0:
        if count >= top_k:
            low = _highest_reaching(key, live.to(tl.int64), top_k.to(tl.int64), low, high)
            mass = tl.where(key >= low, mass, 0)
        else:
            # The list may hold all tokens above -inf: then the k-th largest logit is that.
            found = found & (low_end == float("-inf"))
            low = order_key(tl.full([], float("-inf"), list_ptr.dtype.element_ty))
        total = tl.sum(mass, axis=0)
        above = tl.full([], 0, tl.int64)
    if top_p < 1.0:
        needed = share_of(total, top_p) - above
        found = found & (needed > 0) & (needed <= tl.sum(mass, axis=0))
        if found:
            low = _highest_reaching(key, mass, needed, low, high)
    return low, found


@triton.jit
def _reached(row_ptr, vocab_size, first, second, third, lowest, largest, temperature, cut, MASS: tl.constexpr):
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
            ratio = tl.where(x == largest, 1.0, probability_ratio(x, largest, temperature))
            amount = fixed_point(tl.where(mask & (key >= lowest) & (x >= cut), ratio, 0.0))
        at_first += tl.where(key >= first, amount, 0)
        at_second += tl.where(key >= second, amount, 0)
        at_third += tl.where(key >= third, amount, 0)
    return tl.sum(at_first, axis=0), tl.sum(at_second, axis=0), tl.sum(at_third, axis=0)


@triton.jit
def _highest_of_row(
    row_ptr, vocab_size, needed, low, high, first, second, largest, temperature, cut, MASS: tl.constexpr
):
    """`_highest_reaching` for a row, among the keys low .. high, four ways a round, `first` and `second` to begin with.

    Mass is that of tokens from the key low on.
    """
    lowest = low
    third = high
    while low < high:
        at_first, at_second, at_third = _reached(
            row_ptr, vocab_size, first, second, third, lowest, largest, temperature, cut, MASS
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
def _search_row(row_ptr, vocab_size, low_end, high_end, largest, temperature, top_k, top_p, cut):
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
            row_ptr, vocab_size, needed, low, high, first, second, largest, temperature, cut, MASS=False
        )
        first, second = low, low
    if top_p < 1.0:
        total, _, _ = _reached(row_ptr, vocab_size, low, low, low, low, largest, temperature, cut, MASS=True)
        needed = share_of(total, top_p)
        low = _highest_of_row(
            row_ptr, vocab_size, needed, low, high, first, second, largest, temperature, cut, MASS=True
        )
    return low


@triton.jit
def _threshold_kernel(
    logits_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    bounds_ptr,
    sums_ptr,
    list_ptr,
    out_ptr,
    logits_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The threshold of a row, by its list or else by its logits."""
    start_after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, searches = row_filters(
        temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
        temperatures_stride, top_ks_stride, top_ps_stride, min_ps_stride, row, vocab_size,
    )  # fmt: skip
    bounds_ptr += row * BOUNDS
    sums_ptr += row * SUMS
    list_ptr += row * CAPACITY
    largest = tl.load(bounds_ptr + LARGEST)
    threshold = tl.where(largest == largest, float("-inf"), float("nan"))
    cut = min_p_cut(largest, temperature, min_p)
    if searches & (largest > float("-inf")):
        low, high = tl.load(bounds_ptr + LOW), tl.load(bounds_ptr + HIGH)
        count = tl.load(sums_ptr + LISTED)
        above, total = tl.load(sums_ptr + ABOVE), tl.load(sums_ptr + TOTAL)
        key = tl.full([], 0, tl.uint32)
        found = count < 0
        if largest == float("inf"):
            found = count < 0
        elif count <= FEW:
            key, found = _search_list(
                list_ptr, count, low, above, total, largest, temperature, top_k, top_p, cut, SIZE=FEW
            )
        elif count <= CAPACITY:
            key, found = _search_list(
                list_ptr, count, low, above, total, largest, temperature, top_k, top_p, cut, SIZE=CAPACITY
            )
        if not found:
            row_ptr = logits_ptr + row * logits_stride
            key = _search_row(row_ptr, vocab_size, low, high, largest, temperature, top_k, top_p, cut)
        threshold = logit_of_key(key, logits_ptr.dtype.element_ty)
    if (temperature >= MIN_TEMPERATURE) & (threshold == threshold):
        threshold = tl.maximum(threshold, cut)
    tl.store(out_ptr + row, threshold)
