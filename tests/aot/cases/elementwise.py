"""Norm, activation, rotary embedding, cache writes and decode rows at the shapes of shipped models, in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from harness import Case, meta

from tritonllm.kernels.activation import plan_gelu_and_mul, plan_silu_and_mul
from tritonllm.kernels.decode_rows import HEADER, plan_advance_rows, plan_load_rows
from tritonllm.kernels.kv_store import plan_store_kv
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.longest_first import plan_longest_first
from tritonllm.kernels.norm import plan_add_rms_norm, plan_rms_norm
from tritonllm.kernels.rope import plan_apply_rope
from tritonllm.kernels.rope_store import plan_rope_store_kv

_TOKENS = 64
_BLOCK_SIZE = 256
_EPS = 1e-6


@dataclass(frozen=True)
class _Heads:
    """What a checkpoint says about attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool = False
    unit_offset: bool = False


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _attention_ends(shape: _Heads) -> list[Launch]:
    """From the QKV projection to attention: per-head norm, rotation and cache writes, apart and fused."""
    d = shape.head_dim
    qkv = meta(_TOKENS, (shape.heads + 2 * shape.kv_heads) * d)
    q, k, v = qkv.unflatten(1, (-1, d)).split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    q_out = meta(_TOKENS, shape.heads, d)
    k_cache, v_cache = meta(2, 1024, _BLOCK_SIZE, shape.kv_heads, d)
    cos_sin = meta(32768, shape.rotary_dim, dtype=torch.float32)
    positions, slots = _int32(_TOKENS), _int32(_TOKENS)
    norm = meta(d) if shape.qk_norm else None
    return [
        plan_rms_norm(q, meta(d), q_out, _EPS),
        plan_apply_rope(q, k, positions, cos_sin),
        plan_store_kv(k, v, k_cache, v_cache, slots),
        plan_rope_store_kv(
            qkv, cos_sin, positions, k_cache, v_cache, slots, q_out, norm, norm, _EPS, shape.unit_offset
        ),
    ]


def _layer(hidden: int, intermediate: int, heads: _Heads) -> list[Launch]:
    """The elementwise ops of a whole layer."""
    x, weight = meta(_TOKENS, hidden), meta(hidden)
    return [
        plan_rms_norm(x, weight, x, _EPS, heads.unit_offset),
        plan_add_rms_norm(x, x, weight, x, _EPS, heads.unit_offset),
        plan_silu_and_mul(meta(_TOKENS, 2 * intermediate), meta(_TOKENS, intermediate)),
        *_attention_ends(heads),
    ]


def _gemma(hidden: int, intermediate: int, heads: _Heads) -> list[Launch]:
    """The same with gelu, exact and by tanh."""
    gate_up, out = meta(_TOKENS, 2 * intermediate), meta(_TOKENS, intermediate)
    gelus = [plan_gelu_and_mul(gate_up, out, tanh) for tanh in (False, True)]
    return [*_layer(hidden, intermediate, heads), *gelus]


def _decode_rows() -> list[Launch]:
    rows = _int32(256, HEADER + 128)
    return [
        plan_load_rows(rows, _int32(64), _int32(64), _int32(64), _int32(64), _BLOCK_SIZE, 151936),
        plan_advance_rows(rows, _int32(64), _int32(64)),
        plan_longest_first(_int32(64), _int32(64)),
    ]


CASES = [
    Case("qwen3-0.6b", partial(_layer, 1024, 3072, _Heads(16, 8, 128, 128, qk_norm=True))),
    Case("smollm2-135m", partial(_layer, 576, 1536, _Heads(9, 3, 64, 64))),
    Case("llama-3.1-70b", partial(_layer, 8192, 28672, _Heads(64, 8, 128, 128))),
    Case("partial-rotary-80", partial(_attention_ends, _Heads(32, 32, 80, 32))),
    Case("head-96", partial(_attention_ends, _Heads(32, 32, 96, 96))),
    Case("head-256", partial(_attention_ends, _Heads(28, 4, 256, 256, qk_norm=True))),
    Case("gemma-3-1b", partial(_gemma, 1152, 6912, _Heads(4, 1, 256, 256, qk_norm=True, unit_offset=True))),
    Case("decode-rows", _decode_rows),
]
