"""What lies between the QKV projection and attention, in one pass: per-head norm, rotation, and the cache write.

    q, k, v = heads of qkv [T, (Hq + 2 Hk) * D]
    q, k    = rms_norm(q), rms_norm(k)      only with norm weights [D] (Qwen3), or 1 + these (Gemma 3)
    q, k    = rope(q), rope(k)
    k_cache[slot], v_cache[slot] = k, v     where slot_mapping[t] = slot is not -1
    returns q [T, Hq, D]

Rounding: `norm` and `rope` say how each step rounds; between the steps values are in the dtype of qkv, so the result
is that of the separate ops bit for bit, up to the order of the norm's sum.

Every element of qkv is read once, by a program that owns one token and a group of its q, its k or its v heads.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dependent_launch import pdl_options, start_after_previous
from tritonllm.kernels.kv_store import cache_strides, check_cache, check_per_token, slot_offset
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of, supports_pdl
from tritonllm.kernels.reference import elementwise
from tritonllm.kernels.rope import check_rotation, rotate_heads, rotation_tile


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rope_store_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    qkv_stride,
    cos_sin_stride,
    k_cache_block_stride,
    k_cache_token_stride,
    k_cache_head_stride,
    v_cache_block_stride,
    v_cache_token_stride,
    v_cache_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    start_after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    q_ptr = qkv_ptr + token * qkv_stride
    k_ptr = q_ptr + NUM_HEADS * HEAD_DIM
    v_ptr = k_ptr + NUM_KV_HEADS * HEAD_DIM
    cos_sin_ptr += tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)

    if group < Q_GROUPS:
        rotate_heads(
            q_ptr, HEAD_DIM, q_out_ptr + token * NUM_HEADS * HEAD_DIM, HEAD_DIM, cos_sin_ptr, q_norm_ptr, eps, group,
            NUM_HEADS, HEAD_DIM, HALF, HEADS, BLOCK_HALF, BLOCK_TAIL, UNIT_OFFSET,
        )  # fmt: skip
    elif slot >= 0:
        if group < Q_GROUPS + KV_GROUPS:
            k_cache_ptr += slot_offset(slot, k_cache_block_stride, k_cache_token_stride, BLOCK_SIZE)
            rotate_heads(
                k_ptr, HEAD_DIM, k_cache_ptr, k_cache_head_stride, cos_sin_ptr, k_norm_ptr, eps, group - Q_GROUPS,
                NUM_KV_HEADS, HEAD_DIM, HALF, HEADS, BLOCK_HALF, BLOCK_TAIL, UNIT_OFFSET,
            )  # fmt: skip
        else:
            v_cache_ptr += slot_offset(slot, v_cache_block_stride, v_cache_token_stride, BLOCK_SIZE)
            head = ((group - Q_GROUPS - KV_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)  # [HEADS, 1]
            dim = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
            mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
            v = tl.load(v_ptr + head * HEAD_DIM + dim, mask=mask)  # [HEADS, BLOCK_D]
            tl.store(v_cache_ptr + head * v_cache_head_stride + dim, v, mask=mask)


@cache
def _copied_tile(head_dim: int, half: int) -> dict[str, int]:
    """Constexprs BLOCK_TAIL, for what lies behind the rotated part (0: nothing), and BLOCK_D, for whole heads."""
    tail = head_dim - 2 * half
    return {
        "BLOCK_TAIL": triton.next_power_of_2(tail) if tail else 0,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }


def plan_rope_store_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Launch:
    """Plan of `rope_store_kv` into a contiguous q_out [T, Hq, D]."""
    op = "rope_store_kv"
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = k_cache.shape[2] if k_cache.dim() == 4 else 0
    check_cache(op, k_cache, v_cache, num_kv_heads, head_dim)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    check(
        qkv.shape == (tokens, width) and qkv.stride(1) == 1 and qkv.dtype == k_cache.dtype,
        op,
        lambda: (
            f"qkv must be [T, {width}] with stride 1 along the last axis, of the caches' dtype {k_cache.dtype}, "
            f"not {shape_of(qkv)}"
        ),
    )
    check((q_norm is None) == (k_norm is None), op, "give q_norm and k_norm, or neither")
    if q_norm is not None and k_norm is not None:
        check(
            q_norm.shape == k_norm.shape == (head_dim,) and q_norm.dtype == k_norm.dtype == qkv.dtype,
            op,
            lambda: (
                f"q_norm and k_norm must be vectors of {head_dim} values of the dtype of qkv {shape_of(qkv)}, "
                f"not {shape_of(q_norm)} and {shape_of(k_norm)}"
            ),
        )
        check(q_norm.is_contiguous() and k_norm.is_contiguous(), op, "q_norm and k_norm must be contiguous")
    check_rotation(op, cos_sin, head_dim)
    check_per_token(op, "positions", positions, tokens)
    check_per_token(op, "slot_mapping", slot_mapping, tokens)
    half = cos_sin.shape[1] // 2
    tile, options = rotation_tile(num_heads, head_dim, half)
    groups = cdiv(num_heads, tile["HEADS"]) + 2 * cdiv(num_kv_heads, tile["HEADS"])
    return Launch(
        kernel=_rope_store_kernel,
        grid=(tokens, groups),
        args={
            "qkv_ptr": qkv,
            "cos_sin_ptr": cos_sin,
            "positions_ptr": positions,
            "q_out_ptr": q_out,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "slot_mapping_ptr": slot_mapping,
            "q_norm_ptr": q_norm,
            "k_norm_ptr": k_norm,
            "eps": eps,
            "qkv_stride": qkv.stride(0),
            "cos_sin_stride": cos_sin.stride(0),
            **cache_strides(k_cache, v_cache),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": k_cache.shape[1],
            "HALF": half,
            **tile,
            **_copied_tile(head_dim, half),
            "UNIT_OFFSET": unit_offset,
            "PDL": supports_pdl(qkv.device),
        },
        options={**options, **pdl_options(qkv.device)},
    )


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
    """Normalise and rotate q and k, write k and v into their slots, and return q.

    Args:
        qkv: [T, (Hq + 2 Hk) * D], q heads, then k heads, then v heads; rows may be strided. Left as it is.
        cos_sin: fp32 [max_position, rotary_dim], as in `apply_rope`.
        positions: int32 [T], each in [0, max_position).
        k_cache, v_cache: [num_blocks, block_size, Hk, D], dtype of qkv, any strides with 1 along the last axis.
        slot_mapping: int32 [T], distinct slots; -1 writes nothing for that token (its q is still computed).
        num_heads: Hq.
        q_norm, k_norm: weights [D] of the per-head RMSNorm, both or neither.
        eps: of the norm.
        unit_offset: the norm's weights are 1 + q_norm and 1 + k_norm.

    Returns:
        q [T, Hq, D], contiguous.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(qkv):
        return elementwise.rope_store_kv(
            qkv, cos_sin, positions, k_cache, v_cache, slot_mapping, num_heads,
            q_norm=q_norm, k_norm=k_norm, eps=eps, unit_offset=unit_offset,
        )  # fmt: skip
    q_out = torch.empty(qkv.shape[0], num_heads, k_cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    plan_rope_store_kv(
        qkv, cos_sin, positions, k_cache, v_cache, slot_mapping, q_out,
        q_norm=q_norm, k_norm=k_norm, eps=eps, unit_offset=unit_offset,
    ).run()  # fmt: skip
    return q_out
