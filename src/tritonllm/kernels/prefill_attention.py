"""Causal attention of packed prompts over the paged KV cache.

For query row i of a sequence, at position p = context_len - query_len + i, and key j:

    out_i = sum_j softmax_j(cap(scale * q_i . k_j)) v_j,   j = 0 .. p

With a window of W keys j starts at p - W + 1. cap(s) is softcap * tanh(s / softcap), or s without a softcap.

One path serves a fresh prompt, a cached prefix, a chunk and a resumed sequence: they differ only in how far
`context_len` exceeds `query_len`. Keys and values are always read through the block table, after they were stored.

    q, out          [T, Hq, D]   queries of all sequences, packed; query head h reads KV head h // (Hq / Hkv)
    k_cache/v_cache [num_blocks, block_size, Hkv, D]   any strides, the same for both, unit on D
    tiles           [N, 2]       (sequence, first query row) of each program's queries

Rounding: scores, softmax and sums in float32; the weights are rounded to the cache's dtype before they meet V, the sum
is rounded once at the end. Tiled as in FlashAttention-2 (arXiv:2307.08691). `prefill_hopper` is a second form of it.

Key tiles that every row may see are loaded by TMA where its tensor cores take operands from shared memory (compute
capability 9 and 10): the addresses of a tile's rows, 64 bits each, are a fifth of its instructions otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonllm.kernels.launch import Launch, check, gpu_of, nvidia_capability, runs_kernel, shape_of
from tritonllm.kernels.paged_attention import (
    LOG2_E,
    cap_scores,
    check_integers,
    check_paged,
    check_score_options,
    key_offsets,
    load_block_ids,
    online_softmax_step,
    shared_memory_limit,
)
from tritonllm.kernels.prefill_hopper import (
    HOPPER_TILE_ROWS,
    is_matrix_of_slots,
    lies_in_rows,
    plan_prefill_hopper,
    serves_shape,
)
from tritonllm.kernels.prefill_tiling import key_tile
from tritonllm.kernels.reference import attention as reference


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    tiles_ptr,
    k_desc,
    v_desc,
    scale_log2,
    q_token_stride,
    q_head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # Heads vary fastest: the programs in flight together share their keys in L2.
    head = tl.program_id(0) % NUM_HEADS
    tile = tl.program_id(0) // NUM_HEADS
    sequence = tl.load(tiles_ptr + 2 * tile)
    first_row = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(cu_seqlens_q_ptr + sequence)
    query_len = tl.load(cu_seqlens_q_ptr + sequence + 1) - query_start
    if first_row >= query_len:
        return
    context_len = tl.load(context_lens_ptr + sequence)

    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_mask = (rows < query_len)[:, None]
    q_mask = row_mask
    dim_mask = None
    if HEAD_DIM != BLOCK_D:
        dim_mask = (dims < HEAD_DIM)[None, :]
        q_mask = row_mask & dim_mask
    tokens = (query_start + rows).to(tl.int64)[:, None]
    q_offsets = tokens * q_token_stride + head.to(tl.int64) * q_head_stride + dims[None, :]
    query = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)  # [BLOCK_M, BLOCK_D]

    kv_head = (head // GROUP).to(tl.int64)
    column = head // GROUP * HEAD_DIM
    k_ptrs = k_cache_ptr + kv_head * cache_head_stride + dims[None, :]  # [1, BLOCK_D]
    v_ptrs = v_cache_ptr + kv_head * cache_head_stride + dims[None, :]
    table_row_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride

    positions = context_len - query_len + rows  # [BLOCK_M]
    first_position = context_len - query_len + first_row
    end = tl.minimum(context_len, first_position + BLOCK_M)  # no row of this tile sees a key from here on
    full = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, 0)  # every row may see every key before here
    begin = 0
    if WINDOW is not None:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)  # no row of this tile sees a key before here
        begin = first_key // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Ids are fetched one tile ahead by hand: an indirect load left to the pipeliner would take K's and V's stages.
    block_ids = load_block_ids(table_row_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin, full, BLOCK_N):
        block = block_ids
        block_ids = load_block_ids(table_row_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        if k_desc is None:
            kv_offsets = key_offsets(block, start, cache_block_stride, cache_token_stride, BLOCK_SIZE, BLOCK_N)
        if WINDOW is not None:
            key_positions = start + tl.arange(0, BLOCK_N)
            seen_mask = (key_positions >= first_key)[:, None]
            if HEAD_DIM != BLOCK_D:
                seen_mask = seen_mask & dim_mask
            keys = tl.load(k_ptrs + kv_offsets[:, None], mask=seen_mask, other=0.0)
            values = tl.load(v_ptrs + kv_offsets[:, None], mask=seen_mask, other=0.0)
        elif k_desc is not None:
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE
            keys = k_desc.load([slot, column])  # [BLOCK_N, BLOCK_D]
            values = v_desc.load([slot, column])
        elif HEAD_DIM == BLOCK_D:
            keys = tl.load(k_ptrs + kv_offsets[:, None])
            values = tl.load(v_ptrs + kv_offsets[:, None])
        else:
            keys = tl.load(k_ptrs + kv_offsets[:, None], mask=dim_mask, other=0.0)
            values = tl.load(v_ptrs + kv_offsets[:, None], mask=dim_mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if SOFTCAP is not None:
            scores = cap_scores(scores, scale_log2, SOFTCAP)
        if WINDOW is not None:
            scores = tl.where(key_positions[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))
        acc, total, peak = online_softmax_step(scores, values, scale_log2, acc, total, peak)

    # The diagonal. Cache rows past the context may hold NaN, which a weight of zero would not cancel: they load as 0.
    for start in tl.range(full, end, BLOCK_N, num_stages=1):
        kv_offsets = key_offsets(block_ids, start, cache_block_stride, cache_token_stride, BLOCK_SIZE, BLOCK_N)
        block_ids = load_block_ids(table_row_ptr, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key_positions = start + tl.arange(0, BLOCK_N)
        kv_mask = (key_positions < end)[:, None]
        if WINDOW is not None:
            kv_mask = kv_mask & (key_positions >= first_key)[:, None]
        if HEAD_DIM != BLOCK_D:
            kv_mask = kv_mask & dim_mask
        keys = tl.load(k_ptrs + kv_offsets[:, None], mask=kv_mask, other=0.0)
        values = tl.load(v_ptrs + kv_offsets[:, None], mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if SOFTCAP is not None:
            scores = cap_scores(scores, scale_log2, SOFTCAP)
        scores = tl.where(key_positions[None, :] <= positions[:, None], scores, float("-inf"))
        if WINDOW is not None:
            scores = tl.where(key_positions[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))
        acc, total, peak = online_softmax_step(scores, values, scale_log2, acc, total, peak)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = tokens * out_token_stride + head.to(tl.int64) * out_head_stride + dims[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def _tma_can_load(cache: torch.Tensor, keys: int) -> bool:
    """Whether a key tile is a box of a matrix of tokens: inside one block, heads side by side, 16-bit, whole rows."""
    _, block_size, _, head_dim = cache.shape
    return (
        cache.element_size() == 2
        and block_size % keys == 0
        and head_dim >= 16
        and head_dim == triton.next_power_of_2(head_dim)
        and is_matrix_of_slots(cache)
    )


def _rows_by_tma(cache: torch.Tensor, keys: int) -> TensorDescriptor:
    blocks, block_size, num_heads, head_dim = cache.shape
    rows = [blocks * block_size, num_heads * head_dim]
    return TensorDescriptor(cache, rows, [cache.stride(1), 1], [keys, head_dim])


def plan_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    scale: float,
    out: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    shared_memory: int | None = None,
    hopper: bool | None = None,
    by_tma: bool | None = None,
) -> Launch:
    """Plan `prefill_attention` into `out`.

    `shared_memory` (bytes) defaults to what q's device offers, and `hopper` (`prefill_hopper`, or the form here that
    runs everywhere) to whether the sizes, the device and the tiles allow it. A window or a softcap is computed here.
    `by_tma` lets the form here have key tiles loaded by TMA where tile, cache and dtype allow it; it defaults to
    whether that is faster on q's device.
    """
    op = "prefill_attention"
    check_paged(op, q, k_cache, v_cache, block_tables)
    batch = block_tables.shape[0]
    check(
        out.shape == q.shape and out.stride(2) == 1,
        op,
        lambda: f"out must be like q with unit stride on D, got {shape_of(out)}",
    )
    check_integers(op, "cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    check_integers(op, "context_lens", context_lens, (batch,))
    check_integers(op, "tiles", tiles, (tiles.shape[0], 2))
    check(
        tile_rows >= 16 and tile_rows & (tile_rows - 1) == 0,
        op,
        lambda: f"tile_rows must be a power of two of at least 16, got {tile_rows}",
    )
    check_score_options(op, scale, window, softcap)
    num_heads, head_dim = q.shape[1], q.shape[2]
    if hopper is None:
        plain = window is None and softcap is None
        hopper = plain and tile_rows == HOPPER_TILE_ROWS and serves_shape(head_dim, q.dtype, k_cache.shape[1], q.device)
    if hopper and lies_in_rows(q, k_cache, out):
        check(window is None and softcap is None, op, "the Hopper form has neither windows nor softcaps")
        return plan_prefill_hopper(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, tiles, scale, out)
    block_d = max(16, triton.next_power_of_2(head_dim))
    limit = shared_memory_limit(q.device) if shared_memory is None else shared_memory
    rdna = gpu_of(q.device).rdna
    block_n, stages = key_tile(tile_rows, block_d, q.element_size(), limit, rdna)
    if by_tma is None:
        by_tma = (9, 0) <= nvidia_capability(q.device) < (12, 0)
    by_tma = by_tma and window is None and _tma_can_load(k_cache, block_n)
    num_warps = 4 if block_d * q.element_size() <= 256 and tile_rows <= 64 else 8
    if rdna:
        num_warps = 8 if block_d <= 64 else 16
    return Launch(
        kernel=_prefill_attention_kernel,
        grid=(tiles.shape[0] * num_heads,),
        args={
            "q_ptr": q,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "out_ptr": out,
            "block_tables_ptr": block_tables,
            "cu_seqlens_q_ptr": cu_seqlens_q,
            "context_lens_ptr": context_lens,
            "tiles_ptr": tiles,
            "k_desc": _rows_by_tma(k_cache, block_n) if by_tma else None,
            "v_desc": _rows_by_tma(v_cache, block_n) if by_tma else None,
            "scale_log2": scale * LOG2_E,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "cache_block_stride": k_cache.stride(0),
            "cache_token_stride": k_cache.stride(1),
            "cache_head_stride": k_cache.stride(2),
            "out_token_stride": out.stride(0),
            "out_head_stride": out.stride(1),
            "table_stride": block_tables.stride(0),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // k_cache.shape[2],
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": k_cache.shape[1],
            "BLOCK_M": tile_rows,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "WINDOW": window,
            "SOFTCAP": softcap,
        },
        options={"num_warps": num_warps, "num_stages": stages},
    )


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    tile_rows: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every query over its sequence's keys, the queries' own keys included.

    Args:
        q: [T, Hq, D] float32, float16 or bfloat16, packed by sequence, unit stride on D.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's dtype, unit stride on D.
        block_tables: int32 [B, W]; entries past a context are never read.
        cu_seqlens_q: int32 [B + 1], cumulative query lengths.
        context_lens: int32 [B], keys of each sequence including its new tokens.
        tiles: int32 [N, 2] from `prefill_tiles`, covering every query once.
        tile_rows: from `PrefillTiling.rows`, the value the tiles were cut with.
        scale: factor of the scores before the softmax, positive.
        window: keys that a query sees, its own and those right before it; None for all. Keys that no query sees, and
            the entries of `block_tables` of blocks that hold no other, are never read.
        softcap: bound of the scaled scores, None for none.

    Returns:
        [T, Hq, D], new, contiguous, q's dtype. Raises `KernelError` on shapes or dtypes it cannot take.
    """
    if not runs_kernel(q):
        return reference.prefill_attention(
            q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, tiles, tile_rows, scale,
            window=window, softcap=softcap,
        )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    plan_prefill_attention(
        q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, tiles, tile_rows, scale, out,
        window=window, softcap=softcap,
    ).run()  # fmt: skip
    return out
