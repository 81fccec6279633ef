"""All that a decode step does between the QKV projection and the output projection, in one launch.

    q, k, v = heads of qkv [B, (Hq + 2 Hk) * D]
    q, k    = rms_norm(q), rms_norm(k)          only with norm weights [D] (Qwen3)
    q, k    = rope(q), rope(k)
    k_cache[slot], v_cache[slot] = k, v         where slot_mapping[b] = slot is not -1
    out_b   = sum_j softmax_j(cap(scale * q_b . k_j)) v_j,   j = 0 .. context_len_b - 1, the new token being the last

Layouts, windows, caps and rounding are those of `rope_store` and `decode_attention`, and so are the values, up to the
order of sums.
In particular the new key is rounded to the cache's dtype before it meets a query.

The new token is not read back from the cache that this launch writes it to: splits read keys 0 .. context_len - 2, and
the last split in use, which never has more tiles than another, folds the new token in from registers and writes it to
the cache. `split_attention` says how programs share the old keys and merge.

The queries of a group and its new key are rows of one tile, normalised and rotated together. Each head is loaded
twice, as it is and with the halves of its rotated part exchanged, so that whole heads stay rows for tensor cores.

Programmatic dependent launch, see `dependent_launch`: by default all is read after the wait. After it the previous
kernel has ended, and so has every older one as long as all kernels of the chain wait; BEFORE it neither need hold, for
the previous kernel may itself be waiting still, and so on back. With `early_reads` lengths, order, positions, slots and
block tables, and through them cosines and the keys of earlier steps, are read before the wait. That is right only if a
launch without PDL lies between whatever wrote them and this one (or a kernel that lets its dependents start only after
its own wait): then their writer had ended before this kernel could start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.decode_attention import DecodeWorkspace, check_decode_batch
from tritonllm.kernels.dependent_launch import launch_dependents, wait_for_previous
from tritonllm.kernels.fused_decode_table import FusedTile, fused_blocks, fused_tile
from tritonllm.kernels.kv_store import check_per_token, slot_offset
from tritonllm.kernels.launch import Launch, check, gpu_of, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.paged_attention import (
    LOG2_E,
    check_paged,
    check_score_options,
    load_block_ids,
    shared_memory_limit,
)
from tritonllm.kernels.reference import attention as reference
from tritonllm.kernels.rope import check_rotation, load_with_partners, norm_and_rotate
from tritonllm.kernels.split_attention import add_key, attend_tile, attend_tiles, load_tile, sequence_at, store_or_merge


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr", "block_tables_ptr", "context_lens_ptr"],
)
def _fused_decode_attention_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    block_tables_ptr,
    context_lens_ptr,
    order_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    partial_out_ptr,
    partial_stats_ptr,
    counters_ptr,
    scale_log2,
    eps,
    qkv_stride,
    cos_sin_stride,
    cache_block_stride,
    cache_token_stride,
    cache_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_START: tl.constexpr,
    SAVE_REGISTERS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_READS: tl.constexpr,
):
    if PDL:
        launch_dependents()
        if not EARLY_READS:
            wait_for_previous()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = sequence_at(order_ptr, tl.program_id(2))
    context_len = tl.load(context_lens_ptr + sequence)
    old_len = context_len - 1
    first_key, first_tile = None, 0
    if WINDOW is not None:
        first_key = tl.maximum(context_len - WINDOW, 0)
        first_tile = first_key // BLOCK_N
    num_tiles = tl.cdiv(old_len, BLOCK_N) - first_tile  # 0 for a context of 0, too
    # A short sequence uses fewer programs, so that each has MIN_TILES tiles of keys if there are as many.
    used = tl.minimum(tl.maximum(tl.cdiv(num_tiles, MIN_TILES), 1), SPLITS)
    if split >= used:  # with EARLY_READS it has not waited, but split 0 will
        return

    # What the kernel before has no part in: addresses, angles, norm weights, and the first tile of old keys.
    position = tl.load(positions_ptr + sequence).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + sequence).to(tl.int64)
    table_row_ptr = block_tables_ptr + sequence * table_stride
    tile = first_tile + split
    block_ids = load_block_ids(table_row_ptr, tile * BLOCK_N, old_len, BLOCK_SIZE, BLOCK_N)
    # Rows of the tile of heads: 0 .. GROUP - 1 are queries, GROUP is the new key. Angles and weights are read as tiles
    # of the same shape, so that no value changes threads.
    row = tl.arange(0, BLOCK_G)[:, None].to(tl.int64)
    dim = row * 0 + tl.arange(0, BLOCK_D)[None, :]  # [BLOCK_G, BLOCK_D]
    mask = (row <= GROUP) & (dim < HEAD_DIM)
    angle_ptrs = cos_sin_ptr + position * cos_sin_stride + tl.where(dim < HALF, dim, dim - HALF)
    cos = tl.load(angle_ptrs, mask=mask & (dim < 2 * HALF), other=0.0)
    sin = tl.load(angle_ptrs + HALF, mask=mask & (dim < 2 * HALF), other=0.0)
    weights, partner_weights = None, None
    if q_norm_ptr is not None:
        q_weights, q_partner_weights = load_with_partners(q_norm_ptr, dim, mask & (row < GROUP), HALF)
        k_weights, k_partner_weights = load_with_partners(k_norm_ptr, dim, mask & (row == GROUP), HALF)
        weights = tl.where(row < GROUP, q_weights, k_weights)
        partner_weights = tl.where(row < GROUP, q_partner_weights, k_partner_weights)
    cache_head = kv_head.to(tl.int64) * cache_head_stride
    k_ptrs = k_cache_ptr + cache_head + tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    v_ptrs = v_cache_ptr + cache_head + tl.arange(0, BLOCK_D)[None, :]
    if HEAD_START:
        keys, values, key_mask = load_tile(
            k_ptrs, v_ptrs, block_ids, tile * BLOCK_N, first_key, old_len, cache_block_stride, cache_token_stride,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        block_ids = load_block_ids(table_row_ptr, (tile + used) * BLOCK_N, old_len, BLOCK_SIZE, BLOCK_N)
    if PDL and EARLY_READS:
        wait_for_previous()

    qkv_ptr += sequence * qkv_stride
    head = tl.where(row < GROUP, kv_head * GROUP + row, NUM_KV_HEADS * GROUP + kv_head)
    heads, partners = load_with_partners(qkv_ptr + head * HEAD_DIM, dim, mask, HALF)
    value_ptr = qkv_ptr + (NUM_KV_HEADS * (GROUP + 1) + kv_head) * HEAD_DIM
    new_mask = mask & (row == GROUP)
    new_value = tl.load(value_ptr + dim, mask=new_mask, other=0.0)
    heads = norm_and_rotate(heads, partners, weights, partner_weights, cos, sin, eps, dim, HEAD_DIM, HALF)

    peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if SAVE_REGISTERS:
        has_new = (split == used - 1) & (context_len > 0)
        acc, total, peak = add_key(heads, new_value, row == GROUP, has_new, scale_log2, acc, total, peak, SOFTCAP)
    next_tile = tile + used if HEAD_START else tile
    acc, total, peak = attend_tiles(
        heads, k_ptrs, v_ptrs, table_row_ptr, block_ids, next_tile, first_tile + num_tiles, used, first_key, old_len,
        scale_log2, cache_block_stride, cache_token_stride, acc, total, peak, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        SOFTCAP, SAVE_REGISTERS,
    )  # fmt: skip
    if HEAD_START:
        acc, total, peak = attend_tile(heads, keys, values, key_mask, scale_log2, acc, total, peak, SOFTCAP)
    if (split == used - 1) & (context_len > 0):
        if slot >= 0:
            cache_offset = slot_offset(slot, cache_block_stride, cache_token_stride, BLOCK_SIZE) + cache_head
            tl.store(k_cache_ptr + cache_offset + dim, heads, mask=new_mask)
            tl.store(v_cache_ptr + cache_offset + dim, new_value, mask=new_mask)
        if not SAVE_REGISTERS:  # the tile of heads is a tile of keys as well, of which one exists
            is_new = tl.arange(0, BLOCK_G) == GROUP
            acc, total, peak = attend_tile(heads, heads, new_value, is_new, scale_log2, acc, total, peak, SOFTCAP)
    store_or_merge(
        acc, total, peak, out_ptr + sequence * out_token_stride, out_head_stride, partial_out_ptr, partial_stats_ptr,
        counters_ptr, sequence, kv_head, split, used, NUM_KV_HEADS, GROUP, HEAD_DIM, SPLITS, MERGE_HEADS, BLOCK_G,
        BLOCK_D,
    )  # fmt: skip


def plan_fused_decode_attention(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    order: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tile: FusedTile | None = None,
    shared_memory: int | None = None,
    pdl: bool | None = None,
    early_reads: bool = False,
) -> Launch:
    """Plan `fused_decode_attention` into `out` [B, Hq, D].

    `tile` defaults to `fused_tile`; `shared_memory` (bytes) and `pdl` (programmatic dependent launch) to what the
    device offers. `early_reads` matters with `pdl` alone and binds the caller to the rule at the top of this file.
    """
    op = "fused_decode_attention"
    check_paged(op, out, k_cache, v_cache, block_tables)  # out has the layout and dtype of q
    batch, num_heads, head_dim = out.shape
    num_kv_heads = k_cache.shape[2]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    check(
        qkv.shape == (batch, width) and qkv.stride(1) == 1 and qkv.dtype == k_cache.dtype,
        op,
        lambda: f"qkv must be {k_cache.dtype} [{batch}, {width}] with unit stride, not {shape_of(qkv)}",
    )
    check((q_norm is None) == (k_norm is None), op, "give q_norm and k_norm, or neither")
    for weight in (q_norm, k_norm):
        check(
            weight is None or (weight.shape == (head_dim,) and weight.dtype == qkv.dtype and weight.is_contiguous()),
            op,
            f"q_norm and k_norm must be contiguous {qkv.dtype} [{head_dim}]",
        )
    check_rotation(op, cos_sin, head_dim)
    check_per_token(op, "positions", positions, batch)
    check_per_token(op, "slot_mapping", slot_mapping, batch)
    if tile is None:
        limit = shared_memory_limit(qkv.device) if shared_memory is None else shared_memory
        heads = batch, num_heads, num_kv_heads, head_dim
        tile = fused_tile(*heads, qkv.element_size(), workspace.num_sms, limit, gpu_of(qkv.device).rdna)
    check_decode_batch(op, out, k_cache, block_tables, context_lens, order, workspace, tile.splits)
    check_score_options(op, scale, window, softcap)
    group = num_heads // num_kv_heads
    block_g, block_d = fused_blocks(group, head_dim)
    pdl = supports_pdl(qkv.device) if pdl is None else pdl
    return Launch(
        kernel=_fused_decode_attention_kernel,
        grid=(tile.splits, num_kv_heads, batch),
        args={
            "qkv_ptr": qkv,
            "cos_sin_ptr": cos_sin,
            "positions_ptr": positions,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "slot_mapping_ptr": slot_mapping,
            "block_tables_ptr": block_tables,
            "context_lens_ptr": context_lens,
            "order_ptr": order,
            "q_norm_ptr": q_norm,
            "k_norm_ptr": k_norm,
            "out_ptr": out,
            "partial_out_ptr": workspace.partial_out,
            "partial_stats_ptr": workspace.partial_stats,
            "counters_ptr": workspace.counters,
            "scale_log2": scale * LOG2_E,
            "eps": eps,
            "qkv_stride": qkv.stride(0),
            "cos_sin_stride": cos_sin.stride(0),
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
            "HALF": cos_sin.shape[1] // 2,
            "BLOCK_SIZE": k_cache.shape[1],
            "SPLITS": tile.splits,
            "MIN_TILES": tile.min_tiles,
            "MERGE_HEADS": tile.merge_heads,
            "BLOCK_G": block_g,
            "BLOCK_N": tile.keys,
            "BLOCK_D": block_d,
            "HEAD_START": tile.head_start,
            "SAVE_REGISTERS": tile.save_registers,
            "WINDOW": window,
            "SOFTCAP": softcap,
            "PDL": pdl,
            "EARLY_READS": pdl and early_reads,
        },
        options={"num_warps": tile.warps, "num_stages": tile.stages, **({"launch_pdl": True} if pdl else {})},
    )


def fused_decode_attention(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    num_heads: int,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    order: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    early_reads: bool = False,
) -> torch.Tensor:
    """Normalise and rotate the new token's heads, write its key and value, and attend to the whole context.

    Args:
        qkv: [B, (Hq + 2 Hk) * D] float32, float16 or bfloat16: q heads, then k heads, then v heads; rows may be
            strided. Left as it is.
        cos_sin: fp32 [max_position, rotary_dim], as in `apply_rope`.
        positions: int32 [B], each in [0, max_position).
        k_cache, v_cache: [num_blocks, block_size, Hk, D], qkv's dtype, the same strides, unit on D.
        slot_mapping: int32 [B], where the new token goes, which must be the place of key context_len - 1; -1 writes
            nothing, and the output of such a row means something only if its context is 0.
        block_tables: int32 [B, W]; entries past a context are never read.
        context_lens: int32 [B], keys with the new one; 0 marks a padding row: output exactly zero, nothing written.
        num_heads, scale: Hq, and the factor of the scores before the softmax, positive.
        workspace: from `DecodeWorkspace.allocate` on qkv's device, for at least this batch.
        q_norm, k_norm, eps: weights [D] and epsilon of the per-head RMSNorm; both weights or neither.
        order, window, softcap: as in `decode_attention`.
        early_reads: the caller keeps the rule at the top of this file.

    Returns:
        [B, Hq, D], new, contiguous, qkv's dtype. Raises `KernelError` where shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(qkv):
        return reference.fused_decode_attention(
            qkv, cos_sin, positions, k_cache, v_cache, slot_mapping, block_tables, context_lens, num_heads, scale,
            q_norm=q_norm, k_norm=k_norm, eps=eps, window=window, softcap=softcap,
        )  # fmt: skip
    out = torch.empty(qkv.shape[0], num_heads, k_cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    plan_fused_decode_attention(
        qkv, cos_sin, positions, k_cache, v_cache, slot_mapping, block_tables, context_lens, scale, workspace, out,
        q_norm, k_norm, eps, order=order, window=window, softcap=softcap, early_reads=early_reads,
    ).run()  # fmt: skip
    return out
