"""References of norm, activation, rotary embedding, cache writes and decode rows: signatures and layouts of the ops."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F

from tritonllm.kernels.row_layout import CONTEXT_LEN, HEADER, TOKEN


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """See `kernels.norm.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight).contiguous()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """See `kernels.norm.add_rms_norm`."""
    residual += reduce(torch.add, x).to(residual.dtype) if x.dim() == 3 else x
    return rms_norm(residual, weight, eps, unit_offset)


def longest_first(context_lens: torch.Tensor) -> torch.Tensor:
    """See `kernels.longest_first.longest_first`."""
    return context_lens.argsort(descending=True, stable=True).to(torch.int32)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.activation.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).to(gate.dtype) * up


def gelu_and_mul(gate_up: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """See `kernels.activation.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh" if tanh else "none").to(gate.dtype) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate heads [T, heads, D] in place by the angles of fp32 cos and sin [T, 1, half]."""
    half = cos.shape[-1]
    rotary = x[..., : 2 * half]
    first, second = rotary.float().chunk(2, dim=-1)
    rotary.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """See `kernels.rope.apply_rope`."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `kernels.kv_store.store_kv`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = k[kept]
    v_cache[block, offset] = v[kept]


def rope_store_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> torch.Tensor:
    """See `kernels.rope_store.rope_store_kv`."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    # Either branch copies: qkv itself must stay as it is.
    q = q.clone(memory_format=torch.contiguous_format) if q_norm is None else rms_norm(q, q_norm, eps, unit_offset)
    k = k.clone() if k_norm is None else rms_norm(k, k_norm, eps, unit_offset)
    apply_rope(q, k, positions, cos_sin)
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def load_rows(
    rows: torch.Tensor, num_rows: int, block_size: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.decode_rows.load_rows`."""
    rows = rows[:num_rows]
    context_lens = rows[:, CONTEXT_LEN].clamp(min=0)
    live = context_lens > 0
    positions = (context_lens - 1).clamp(min=0)
    entry = positions // block_size
    table = rows[:, HEADER:]
    block = table.gather(1, entry.clamp(max=table.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
    writes = live & (entry < table.shape[1]) & (block >= 0)
    slots = torch.where(writes, block * block_size + positions % block_size, -1)
    tokens = rows[:, TOKEN]
    input_ids = torch.where(live & (tokens >= 0) & (tokens < vocab_size), tokens, 0)
    return input_ids, positions, slots, context_lens


def advance_rows(rows: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
    """See `kernels.decode_rows.advance_rows`."""
    sampled.copy_(tokens)
    rows = rows[: tokens.shape[0]]
    live = rows[:, CONTEXT_LEN] > 0
    rows[:, TOKEN] = torch.where(live, tokens, rows[:, TOKEN])
    rows[:, CONTEXT_LEN] += live.int()
