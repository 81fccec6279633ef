"""What both decode attentions share: the walk of one program over its key tiles, and the merge of all programs.

The keys of a (sequence, KV head) are dealt out in tiles: program `split` of `used` takes tiles split, split + used, ...
of those that hold a key the query sees: with a window, what lies before it is never read and costs nothing.
Each leaves an unnormalised output, the total of its weights and their peak; the last program to finish merges them in
split order, so the result does not depend on which one that is, and zeroes the counter for the next call.

Splits as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonllm.kernels.paged_attention import cap_scores, key_offsets, load_block_ids, online_softmax_step


@triton.jit
def sequence_at(order_ptr, place):
    """The sequence, int64, that a place in the grid stands for: its own number where there is no order."""
    if order_ptr is not None:
        place = tl.load(order_ptr + place)
    return place.to(tl.int64)


@triton.jit
def load_tile(
    k_ptrs,
    v_ptrs,
    block_ids,
    start,
    first_key,
    num_keys,
    cache_block_stride,
    cache_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys and values [BLOCK_N, BLOCK_D] of the tile at `start`, and which of them are seen [BLOCK_N].

    Those from `first_key` (None: from the start) to `num_keys` - 1. Other cache rows may hold NaN, which a weight of
    zero would not cancel: they load as 0.
    """
    offsets = key_offsets(block_ids, start, cache_block_stride, cache_token_stride, BLOCK_SIZE, BLOCK_N)
    key_mask = start + tl.arange(0, BLOCK_N) < num_keys
    if first_key is not None:
        key_mask = key_mask & (start + tl.arange(0, BLOCK_N) >= first_key)
    mask = key_mask[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    keys = tl.load(k_ptrs + offsets[:, None], mask=mask, other=0.0)
    values = tl.load(v_ptrs + offsets[:, None], mask=mask, other=0.0)
    return keys, values, key_mask


@triton.jit
def attend_tile(query, keys, values, key_mask, scale_log2, acc, total, peak, SOFTCAP: tl.constexpr):
    """Fold one tile of keys into the running output [BLOCK_G, BLOCK_D], total and peak [BLOCK_G]."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [BLOCK_G, BLOCK_N]
    if SOFTCAP is not None:
        scores = cap_scores(scores, scale_log2, SOFTCAP)
    scores = tl.where(key_mask[None, :], scores, float("-inf"))
    return online_softmax_step(scores, values, scale_log2, acc, total, peak)


@triton.jit
def add_key(heads, values, is_new, has_new, scale_log2, acc, total, peak, SOFTCAP: tl.constexpr):
    """A running output, total and peak that have seen no key yet, after one key, or as they are unless `has_new`.

    The key is the row `is_new` [BLOCK_G, 1] of the queries' own tile `heads` [BLOCK_G, BLOCK_D], and its value that of
    `values`. It is no product of tiles, whose operands would fill the registers.
    """
    key = tl.sum(tl.where(is_new, heads.to(tl.float32), 0.0), axis=0, keep_dims=True)  # [1, BLOCK_D]
    value = tl.sum(tl.where(is_new, values.to(tl.float32), 0.0), axis=0, keep_dims=True)
    scores = tl.sum(heads.to(tl.float32) * key, axis=1)  # [BLOCK_G]
    if SOFTCAP is not None:
        scores = cap_scores(scores, scale_log2, SOFTCAP)
    # Its score is the peak, so its weight is 1.
    return tl.where(has_new, value, acc), tl.where(has_new, 1.0, total), tl.where(has_new, scores * scale_log2, peak)


@triton.jit
def attend_tiles(
    query,
    k_ptrs,
    v_ptrs,
    table_row_ptr,
    block_ids,
    first_tile,
    end_tile,
    step,
    first_key,
    num_keys,
    scale_log2,
    cache_block_stride,
    cache_token_stride,
    acc,
    total,
    peak,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IDS_FIRST: tl.constexpr = False,
):
    """Fold every `step`-th tile from `first_tile` to `end_tile`; the caller has loaded the first one's `block_ids`.

    IDS_FIRST reads the ids of the next tile before the keys of this one. AMD's compiler makes a branch of that read,
    and behind it keys would have to be in registers as a whole before the product with the queries begins.
    """
    # Ids are fetched one tile ahead by hand: an indirect load left to the pipeliner would take K's and V's stages.
    for tile in tl.range(first_tile, end_tile, step):
        start = tile * BLOCK_N
        tile_ids = block_ids
        if IDS_FIRST:
            block_ids = load_block_ids(table_row_ptr, start + step * BLOCK_N, num_keys, BLOCK_SIZE, BLOCK_N)
        keys, values, key_mask = load_tile(
            k_ptrs, v_ptrs, tile_ids, start, first_key, num_keys, cache_block_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if not IDS_FIRST:
            block_ids = load_block_ids(table_row_ptr, start + step * BLOCK_N, num_keys, BLOCK_SIZE, BLOCK_N)
        acc, total, peak = attend_tile(query, keys, values, key_mask, scale_log2, acc, total, peak, SOFTCAP)
    return acc, total, peak


@triton.jit
def store_or_merge(
    acc,
    total,
    peak,
    out_ptr,
    out_head_stride,
    partial_out_ptr,
    partial_stats_ptr,
    counters_ptr,
    sequence,
    kv_head,
    split,
    used,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the heads of a group: at once if this program saw all keys, else by whichever program is the last.

    `out_ptr` points at the sequence. Partial results are [slot, GROUP, HEAD_DIM], and [slot, GROUP, 2] for total and
    peak. A group whose total is zero, as of a padding row, is written as zeros.
    """
    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    if used == 1:
        heads = (kv_head * GROUP + group).to(tl.int64)[:, None]
        head_mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + heads * out_head_stride + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=head_mask)
    else:
        head_mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        first_slot = (sequence * NUM_KV_HEADS + kv_head) * SPLITS
        partial_rows = (first_slot + split) * GROUP + group
        tl.store(partial_out_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=head_mask)
        tl.store(partial_stats_ptr + partial_rows * 2, total, mask=group < GROUP)
        tl.store(partial_stats_ptr + partial_rows * 2 + 1, peak, mask=group < GROUP)
        # All threads have stored before the one that counts the program releases their stores to the GPU.
        tl.debug_barrier()
        counter_ptr = counters_ptr + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
            splits = tl.arange(0, SPLITS)
            for first_head in tl.range(0, GROUP, MERGE_HEADS, num_stages=1):
                merged = first_head + tl.arange(0, MERGE_HEADS)
                rows = (first_slot + splits)[None, :] * GROUP + merged[:, None]  # [MERGE_HEADS, SPLITS]
                row_mask = (merged < GROUP)[:, None] & (splits < used)[None, :]
                # .cg: other programs wrote these, so the L1 of this one must not answer.
                totals = tl.load(partial_stats_ptr + rows * 2, mask=row_mask, other=0.0, cache_modifier=".cg")
                peaks = tl.load(partial_stats_ptr + rows * 2 + 1, mask=row_mask, other=-1.0e30, cache_modifier=".cg")
                parts = tl.load(
                    partial_out_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
                    mask=row_mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )  # [MERGE_HEADS, SPLITS, BLOCK_D]
                decay = tl.exp2(peaks - tl.max(peaks, 1)[:, None])
                merged_total = tl.sum(totals * decay, 1)
                merged_out = (
                    tl.sum(parts * decay[:, :, None], 1) / tl.where(merged_total == 0.0, 1.0, merged_total)[:, None]
                )
                merged_heads = (kv_head * GROUP + merged).to(tl.int64)[:, None]
                merged_offsets = merged_heads * out_head_stride + dims[None, :]
                merged_mask = (merged < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                tl.store(out_ptr + merged_offsets, merged_out.to(out_ptr.dtype.element_ty), mask=merged_mask)
            tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
