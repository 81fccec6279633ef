"""Fused decode attention at the head shapes of shipped models, in bfloat16: few rows and many."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.fused_decode_attention import plan_fused_decode_attention
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.longest_first import FEW_ROWS

_HOPPER = 227 * 1024  # bytes of shared memory: targets that offer it have programmatic dependent launch as well


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _fused(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    normed: bool = False,
    block_size: int = 256,
    batches: tuple[int, ...] = (1,),
    shared_memory: int = 64 * 1024,
    window: int | None = None,
    softcap: float | None = None,
) -> list[Launch]:
    """A launch for each batch, with the tiles that a device with this much shared memory gets."""
    pdl = shared_memory >= _HOPPER
    k_cache, v_cache = meta(2, 1024, block_size, num_kv_heads, head_dim)
    norm = meta(head_dim) if normed else None
    return [
        plan_fused_decode_attention(
            meta(batch, (num_heads + 2 * num_kv_heads) * head_dim),
            meta(4096, rotary_dim or head_dim, dtype=torch.float32),
            _int32(batch),
            k_cache,
            v_cache,
            _int32(batch),
            _int32(batch, 128),
            _int32(batch),
            head_dim**-0.5,
            DecodeWorkspace.allocate(batch, num_heads, num_kv_heads, head_dim, "meta"),
            meta(batch, num_heads, head_dim),
            norm,
            norm,
            order=_int32(batch) if batch > FEW_ROWS else None,
            window=window,
            softcap=softcap,
            shared_memory=shared_memory,
            pdl=pdl,
            early_reads=pdl,
        )
        for batch in batches
    ]


CASES = [
    Case("qwen3-0.6b", partial(_fused, 16, 8, 128, normed=True, batches=(1, 4, 64)), dot=True, sized=True),
    Case("llama-3.2-1b", partial(_fused, 32, 8, 64), dot=True, sized=True),
    Case("smollm2-135m", partial(_fused, 9, 3, 64, batches=(64,)), dot=True, sized=True),
    Case("blocks-of-16", partial(_fused, 32, 8, 128, normed=True, block_size=16), dot=True, sized=True),
    Case("half-rotated", partial(_fused, 32, 32, 80, rotary_dim=40), dot=True, sized=True),
    Case("mistral-window", partial(_fused, 32, 8, 128, batches=(1, 64), window=4096), dot=True, sized=True),
    Case("window-and-softcap", partial(_fused, 32, 16, 128, window=4096, softcap=50.0), dot=True, sized=True),
    Case("head-dim-256", partial(_fused, 8, 1, 256, normed=True), dot=True, sized=True),
]
