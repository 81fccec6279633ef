"""Attention over a paged KV cache in plain PyTorch: what the kernels are tested against, and the CPU path."""

from __future__ import annotations

import torch

from tritonllm.kernels.reference.elementwise import rope_store_kv

_ROWS_AT_ONCE = 256  # bounds the score matrix of a long prompt, and skips most keys above the causal diagonal


def _context(cache: torch.Tensor, block_table: torch.Tensor, first: int, length: int) -> torch.Tensor:
    """The cached rows `first` to `length` - 1 of one sequence, [Hkv, length - first, D] in float32.

    Nothing else is touched: not the rest of the table, not the unwritten rows of the last block.
    """
    block_size = cache.shape[1]
    start = first // block_size
    blocks = block_table[start : -(-length // block_size)]
    rows = slice(first - start * block_size, length - start * block_size)
    if len(blocks) == 1:
        return cache[int(blocks[0]), rows].transpose(0, 1).float()
    return cache.index_select(0, blocks).flatten(0, 1)[rows].transpose(0, 1).float()


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _first_key(position: int, window: int | None) -> int:
    """The first key that a query at a position sees."""
    return 0 if window is None else max(position - window + 1, 0)


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
    """As `kernels.prefill_attention`. `tiles` and `tile_rows` only cut the work of a GPU and are not read here."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = cu_seqlens_q.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        start, stop = starts[sequence], starts[sequence + 1]
        if start == stop:
            continue
        begin = _first_key(context_len - (stop - start), window)  # what the first query sees
        keys = _context(k_cache, block_tables[sequence], begin, context_len).transpose(1, 2)
        values = _context(v_cache, block_tables[sequence], begin, context_len)
        for first in range(start, stop, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, stop)
            rows, end = last - first, context_len - (stop - last)
            seen = slice(_first_key(end - rows, window) - begin, end - begin)
            num_keys = seen.stop - seen.start
            # [Hkv, G * rows, D]: the heads that share keys are rows of one matrix product.
            query = q[first:last].float().view(rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
            query = query.reshape(num_kv_heads, group * rows, head_dim) * scale
            scores = _capped(query @ keys[:, :, seen], softcap).view(num_kv_heads, group, rows, num_keys)
            # Only the last `rows` keys can lie in the future of one of these rows.
            future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
            scores[..., num_keys - rows :].masked_fill_(future, float("-inf"))
            if window is not None:
                distance = torch.arange(end - rows, end)[:, None] - torch.arange(end - num_keys, end)
                scores.masked_fill_((distance >= window).to(q.device), float("-inf"))
            weights = scores.softmax(-1).view(num_kv_heads, group * rows, num_keys)
            attended = (weights @ values[:, seen]).view(num_kv_heads, group, rows, head_dim)
            out[first:last] = attended.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
    return out


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    workspace: object = None,
    order: torch.Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `kernels.decode_attention`. `workspace` and `order` only steer the programs of a GPU and are not read here."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    queries = (q.float() * scale).view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for sequence, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        begin = _first_key(context_len - 1, window)
        keys = _context(k_cache, block_tables[sequence], begin, context_len)
        values = _context(v_cache, block_tables[sequence], begin, context_len)
        weights = _capped(queries[sequence] @ keys.transpose(1, 2), softcap).softmax(-1)  # [Hkv, G, keys]
        out[sequence] = (weights @ values).view(num_heads, head_dim)
    return out


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
    workspace: object = None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    order: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    early_reads: bool = False,
) -> torch.Tensor:
    """As `kernels.fused_decode_attention`: the two ops that it fuses, one after the other.

    `workspace`, `order` and `early_reads` only steer the programs of a GPU and are not read here.
    """
    q = rope_store_kv(
        qkv, cos_sin, positions, k_cache, v_cache, slot_mapping, num_heads, q_norm=q_norm, k_norm=k_norm, eps=eps
    )
    return decode_attention(q, k_cache, v_cache, block_tables, context_lens, scale, window=window, softcap=softcap)
