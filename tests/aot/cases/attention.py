"""Prefill and decode attention at the head shapes of shipped models, in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.decode_attention import DecodeWorkspace, plan_decode_attention
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.longest_first import FEW_ROWS
from tritonllm.kernels.prefill_attention import plan_prefill_attention
from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS
from tritonllm.kernels.prefill_tiling import PrefillTiling

_SEQUENCES, _TOKENS, _TABLE_WIDTH = 4, 64, 128
_WITH_TMA = ("sm_90", "sm_100")


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 256,
    batches: tuple[int, ...] = (8,),
    shared_memory: int = 64 * 1024,
    window: int | None = None,
    softcap: float | None = None,
    tile_rows: int | None = None,
    by_tma: bool = False,
) -> list[Launch]:
    """Prefill, and decode at each batch size, with the tiles that a device with this much shared memory gets."""
    scale = head_dim**-0.5
    k_cache, v_cache = meta(2, 1024, block_size, num_kv_heads, head_dim)
    q = meta(_TOKENS, num_heads, head_dim)
    launches = [
        plan_prefill_attention(
            q,
            k_cache,
            v_cache,
            _int32(_SEQUENCES, _TABLE_WIDTH),
            _int32(_SEQUENCES + 1),
            _int32(_SEQUENCES),
            _int32(_SEQUENCES, 2),
            tile_rows or PrefillTiling.choose(num_heads, head_dim, q.dtype, block_size, q.device).portable_rows,
            scale,
            torch.empty_like(q),
            window=window,
            softcap=softcap,
            shared_memory=shared_memory,
            by_tma=by_tma,
        )
    ]
    for batch in batches:
        q = meta(batch, num_heads, head_dim)
        workspace = DecodeWorkspace.allocate(batch, num_heads, num_kv_heads, head_dim, q.device)
        launches.append(
            plan_decode_attention(
                q,
                k_cache,
                v_cache,
                _int32(batch, _TABLE_WIDTH),
                _int32(batch),
                scale,
                workspace,
                torch.empty_like(q),
                order=_int32(batch) if batch > FEW_ROWS else None,
                window=window,
                softcap=softcap,
                shared_memory=shared_memory,
            )
        )
    return launches


def _hopper(num_heads: int, num_kv_heads: int, head_dim: int) -> list[Launch]:
    """Prefill as a Hopper device gets it."""
    k_cache, v_cache = meta(2, 1024, 256, num_kv_heads, head_dim)
    q = meta(_TOKENS, num_heads, head_dim)
    launch = plan_prefill_attention(
        q,
        k_cache,
        v_cache,
        _int32(_SEQUENCES, _TABLE_WIDTH),
        _int32(_SEQUENCES + 1),
        _int32(_SEQUENCES),
        _int32(_SEQUENCES, 2),
        HOPPER_TILE_ROWS,
        head_dim**-0.5,
        torch.empty_like(q),
        hopper=True,
    )
    return [launch]


CASES = [
    Case("qwen3-0.6b", partial(_attention, 16, 8, 128, batches=(1, 64)), dot=True, sized=True),
    Case("llama-3.2-1b", partial(_attention, 32, 8, 64, batches=(1,)), dot=True, sized=True),
    Case("smollm2-135m", partial(_attention, 9, 3, 64), dot=True, sized=True),
    Case("qwen3-8b-blocks-of-16", partial(_attention, 32, 8, 128, block_size=16), dot=True, sized=True),
    Case("qwen3-0.6b-tma", partial(_attention, 16, 8, 128, by_tma=True), dot=True, sized=True, only=_WITH_TMA),
    Case("llama-3.2-1b-tma", partial(_attention, 32, 8, 64, by_tma=True), dot=True, sized=True, only=_WITH_TMA),
    Case("head-dim-80", partial(_attention, 32, 32, 80), dot=True, sized=True),
    Case("head-dim-256", partial(_attention, 8, 1, 256), dot=True, sized=True, may_spill=True),
    Case("phi-3-window", partial(_attention, 32, 32, 96, window=2047), dot=True, sized=True),
    Case("mistral-window", partial(_attention, 32, 8, 128, window=4096), dot=True, sized=True),
    Case(
        "gemma-3-27b-window-128-rows",
        partial(_attention, 32, 16, 128, window=1024, tile_rows=128),
        dot=True,
        sized=True,
        only=("sm_90",),
    ),
    Case("gemma-2-27b", partial(_attention, 32, 16, 128, window=4096, softcap=50.0), dot=True, sized=True),
    Case(
        "gemma-2-9b", partial(_attention, 16, 8, 256, window=4096, softcap=50.0), dot=True, sized=True, may_spill=True
    ),
    Case("hopper-head-dim-128", partial(_hopper, 16, 8, 128), dot=True, only=("sm_90",)),
    Case("hopper-head-dim-64", partial(_hopper, 32, 8, 64), dot=True, only=("sm_90",)),
]
