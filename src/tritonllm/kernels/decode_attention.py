"""Attention of one new token a sequence over the paged KV cache, with the keys of a sequence split over programs.

    out_b = sum_j softmax_j(cap(scale * q_b . k_j)) v_j,   j = 0 .. context_len_b - 1;   context_len 0 gives exactly 0

With a window of W keys j starts at context_len_b - W. cap(s) is softcap * tanh(s / softcap), or s without a softcap.

    q, out          [B, Hq, D]   query head h reads KV head h // (Hq / Hkv)
    k_cache/v_cache [num_blocks, block_size, Hkv, D]   any strides, the same for both, unit on D

Every program reads its share of the keys once, for all heads of a group: they are the rows of one matrix product. The
grid (splits, Hkv, B) follows from the batch alone and each program finds its keys from the length on the device, so a
captured CUDA graph serves every length. `split_attention` says how programs share the keys and merge.

Rounding: as in `prefill_attention`; partial results stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tritonllm.kernels.decode_splits import decode_grid, decode_warps, key_tile
from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.launch import Launch, check, gpu_of, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.longest_first import check_order
from tritonllm.kernels.paged_attention import (
    LOG2_E,
    check_paged,
    check_score_options,
    load_block_ids,
    shared_memory_limit,
)
from tritonllm.kernels.reference import attention as reference
from tritonllm.kernels.split_attention import attend_tiles, sequence_at, store_or_merge


@triton.jit(do_not_specialize=["table_stride"])
def _decode_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    context_lens_ptr,
    order_ptr,
    partial_out_ptr,
    partial_stats_ptr,
    counters_ptr,
    scale_log2,
    q_token_stride,
    q_head_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait_for_previous()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = sequence_at(order_ptr, tl.program_id(2))
    context_len = tl.load(context_lens_ptr + sequence)
    first_key, first_tile = None, 0
    if WINDOW is not None:
        first_key = tl.maximum(context_len - WINDOW, 0)
        first_tile = first_key // BLOCK_N
    num_tiles = tl.cdiv(context_len, BLOCK_N) - first_tile
    # A short sequence uses fewer programs, so that each has MIN_TILES tiles of keys if there are as many.
    used = tl.minimum(tl.maximum(tl.cdiv(num_tiles, MIN_TILES), 1), SPLITS)
    if split >= used:
        return

    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = (kv_head * GROUP + group).to(tl.int64)[:, None]
    head_mask = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = sequence * q_token_stride + heads * q_head_stride + dims[None, :]
    query = tl.load(q_ptr + q_offsets, mask=head_mask, other=0.0)  # [BLOCK_G, BLOCK_D]
    k_ptrs = k_cache_ptr + kv_head.to(tl.int64) * cache_head_stride + dims[None, :]  # [1, BLOCK_D]
    v_ptrs = v_cache_ptr + kv_head.to(tl.int64) * cache_head_stride + dims[None, :]
    table_row_ptr = block_tables_ptr + sequence * table_stride

    peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    block_ids = load_block_ids(table_row_ptr, (first_tile + split) * BLOCK_N, context_len, BLOCK_SIZE, BLOCK_N)
    acc, total, peak = attend_tiles(
        query, k_ptrs, v_ptrs, table_row_ptr, block_ids, first_tile + split, first_tile + num_tiles, used, first_key,
        context_len, scale_log2, cache_block_stride, cache_token_stride, acc, total, peak, HEAD_DIM, BLOCK_SIZE,
        BLOCK_N, BLOCK_D, SOFTCAP,
    )  # fmt: skip
    if PDL:  # Earlier, programs of the next kernel would take room and bandwidth from those that read keys.
        launch_dependents()
    store_or_merge(
        acc, total, peak, out_ptr + sequence * out_token_stride, out_head_stride, partial_out_ptr, partial_stats_ptr,
        counters_ptr, sequence, kv_head, split, used, NUM_KV_HEADS, GROUP, HEAD_DIM, SPLITS, MERGE_HEADS, BLOCK_G,
        BLOCK_D,
    )  # fmt: skip


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of both decode attentions, allocated once for the largest batch.

    Calls that follow each other on one stream share it: each leaves the counters at zero.

    Attributes:
        partial_out: float32 [rows * D], unnormalised outputs of each split.
        partial_stats: float32 [rows * 2], total and peak of each split.
        counters: int32 [max_batch * Hkv], programs that are done, zero between calls.
        num_sms: multiprocessors of the device, which decide on the splits.
    """

    partial_out: torch.Tensor
    partial_stats: torch.Tensor
    counters: torch.Tensor
    num_sms: int

    @classmethod
    def allocate(
        cls, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """Workspace for batches up to `max_batch`; about max_batch * 4 * Hq * D floats for large ones."""
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        num_sms = gpu_of(device).num_sms
        slots = max(
            batch * decode_grid(batch, num_kv_heads, head_dim, num_sms).splits for batch in range(1, max_batch + 1)
        )
        rows = slots * num_heads
        return cls(
            partial_out=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
            partial_stats=torch.empty(rows * 2, dtype=torch.float32, device=device),
            counters=torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device),
            num_sms=num_sms,
        )


def check_decode_batch(
    op: str,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    order: torch.Tensor | None,
    workspace: DecodeWorkspace,
    splits: int,
) -> None:
    """The checks of a batch of one query a sequence that both decode attentions share. Raises `KernelError`."""
    batch, num_heads, head_dim = out.shape
    num_kv_heads = k_cache.shape[2]
    check(
        block_tables.shape[0] == batch,
        op,
        lambda: f"block_tables must have a row for each of {batch} queries, got {shape_of(block_tables)}",
    )
    check(
        context_lens.dtype == torch.int32 and context_lens.shape == (batch,) and context_lens.is_contiguous(),
        op,
        lambda: f"context_lens must be contiguous int32 [{batch}], got {shape_of(context_lens)}",
    )
    check_order(op, order, batch)
    check(splits & (splits - 1) == 0, op, lambda: f"num_splits must be a power of two, got {splits}")
    rows = batch * splits * num_heads
    check(
        rows * head_dim <= workspace.partial_out.numel()
        and rows * 2 <= workspace.partial_stats.numel()
        and batch * num_kv_heads <= workspace.counters.numel(),
        op,
        lambda: (
            f"the workspace is too small for queries {shape_of(out)} with {splits} splits; "
            "allocate it for this batch and heads"
        ),
    )


def plan_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    shared_memory: int | None = None,
    pdl: bool | None = None,
) -> Launch:
    """Plan `decode_attention` into `out`.

    `num_splits` (a power of two) defaults to those of `decode_grid`; `shared_memory` (bytes) and `pdl` (programmatic
    dependent launch) to what q's device offers.
    """
    op = "decode_attention"
    check_paged(op, q, k_cache, v_cache, block_tables)
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    check(
        out.shape == q.shape and out.stride(2) == 1,
        op,
        f"out must be like q with unit stride on D, got {shape_of(out)}",
    )
    grid = decode_grid(batch, num_kv_heads, head_dim, workspace.num_sms, num_splits)
    splits = grid.splits
    check_decode_batch(op, out, k_cache, block_tables, context_lens, order, workspace, splits)
    check_score_options(op, scale, window, softcap)
    block_d = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // num_kv_heads
    block_g = max(16, triton.next_power_of_2(group))
    limit = shared_memory_limit(q.device) if shared_memory is None else shared_memory
    pdl = supports_pdl(q.device) if pdl is None else pdl
    rdna = gpu_of(q.device).rdna
    block_n, stages = key_tile(grid, block_g, block_d, q.element_size(), limit, rdna)
    warps = decode_warps(block_g, block_d, block_n, rdna)
    if grid.tile_values <= 32 * 128 and block_d <= 128 and group <= 4 and not rdna:
        warps = 2  # that wait for each other for less time; more heads than that take longer to merge
    return Launch(
        kernel=_decode_attention_kernel,
        grid=(splits, num_kv_heads, batch),
        args={
            "q_ptr": q,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "out_ptr": out,
            "block_tables_ptr": block_tables,
            "context_lens_ptr": context_lens,
            "order_ptr": order,
            "partial_out_ptr": workspace.partial_out,
            "partial_stats_ptr": workspace.partial_stats,
            "counters_ptr": workspace.counters,
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
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": k_cache.shape[1],
            "SPLITS": splits,
            "MIN_TILES": max(1, grid.min_keys // block_n),
            "BLOCK_G": block_g,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            # At most 128 registers a thread for the merge, lest it decide the registers of the whole kernel.
            "MERGE_HEADS": min(max(16384 // (splits * block_d), 1), triton.next_power_of_2(group)),
            "WINDOW": window,
            "SOFTCAP": softcap,
            "PDL": pdl,
        },
        options={
            "num_warps": warps,
            "num_stages": stages,
            **({"launch_pdl": True} if pdl else {}),
        },
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    order: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence over all its keys, the query's own key included.

    Args:
        q: [B, Hq, D] float32, float16 or bfloat16, unit stride on D.
        k_cache, v_cache: [num_blocks, block_size, Hkv, D], q's dtype, unit stride on D.
        block_tables: int32 [B, W]; entries past a context are never read.
        context_lens: int32 [B]; 0 marks a padding row, whose output is exactly zero.
        scale: factor of the scores before the softmax, positive.
        workspace: from `DecodeWorkspace.allocate` on q's device, for at least this batch.
        order: int32 [B], a permutation: the order in which sequences are taken, as `longest_first` gives it.
        window: keys that a query sees, its own and those right before it; None for all. Other keys, and the entries of
            `block_tables` of blocks without a key in the window, are never read.
        softcap: bound of the scaled scores, None for none.

    Returns:
        [B, Hq, D], new, contiguous, q's dtype. Raises `KernelError` on shapes or dtypes it cannot take.
    """
    if not runs_kernel(q):
        return reference.decode_attention(
            q, k_cache, v_cache, block_tables, context_lens, scale, workspace, window=window, softcap=softcap
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    plan_decode_attention(
        q, k_cache, v_cache, block_tables, context_lens, scale, workspace, out,
        order=order, window=window, softcap=softcap,
    ).run()  # fmt: skip
    return out
