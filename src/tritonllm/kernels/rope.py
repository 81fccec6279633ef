"""Rotary position embedding on heads, in place.

With R = rotary_dim and half = R / 2, a head x at position p becomes, for i < half,

    y[i]        = x[i] * cos[p, i] - x[half + i] * sin[p, i]
    y[half + i] = x[half + i] * cos[p, i] + x[i] * sin[p, i]

and elements from R on stay as they are. This is the pairing of halves that Hugging Face's Llama uses; the source is
Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

Layouts: q [T, Hq, D] and k [T, Hk, D]; cos_sin fp32 [max_position, R], row p holding cos[p] and then sin[p].

Rounding: fp32 arithmetic with fp32 cos and sin, rounded once to the dtype of x. (Hugging Face rounds cos, sin and each
product to that dtype, which is less exact.)

A program takes one token and a group of its heads, so cos and sin are read once for the group, and another number of
tokens is only another grid.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tritonllm.kernels.kv_store import check_per_token
from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of
from tritonllm.kernels.norm import inverse_rms, scale_and_weigh
from tritonllm.kernels.reference import elementwise

_TILE = 1024  # elements of a group of heads


@triton.jit
def rotate(first, second, cos, sin):
    """Both halves of heads, rotated in fp32 and rounded to their dtype.

    Each fused multiply-add is written out, so that every kernel that rotates computes the same bits.
    """
    x, y = first.to(tl.float32), second.to(tl.float32)
    return tl.fma(x, cos, -y * sin).to(first.dtype), tl.fma(y, cos, x * sin).to(first.dtype)


@triton.jit
def rotate_heads(
    source_ptr,
    source_head_stride,
    target_ptr,
    target_head_stride,
    cos_sin_ptr,
    norm_ptr,
    eps,
    group,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Read one group of a token's heads, normalise them if there is a norm weight, rotate and write them.

    Source and target point at the token's first head, cos_sin at the row of its position. BLOCK_TAIL = 0 leaves out
    what lies behind the rotated part: there is none, or source and target are the same heads.
    """
    head = (group * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)  # [HEADS, 1]
    # Tables and weights are read as tiles of the heads' own shape, so that no value changes threads.
    dim = head * 0 + tl.arange(0, BLOCK_HALF)[None, :]  # [HEADS, BLOCK_HALF]
    mask = (head < NUM_HEADS) & (dim < HALF)
    source_ptrs = source_ptr + head * source_head_stride + dim
    first = tl.load(source_ptrs, mask=mask, other=0.0)  # [HEADS, BLOCK_HALF]
    second = tl.load(source_ptrs + HALF, mask=mask, other=0.0)
    if BLOCK_TAIL > 0:
        tail_dim = head * 0 + 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]  # [HEADS, BLOCK_TAIL]
        tail_mask = (head < NUM_HEADS) & (tail_dim < HEAD_DIM)
        tail = tl.load(source_ptr + head * source_head_stride + tail_dim, mask=tail_mask, other=0.0)
    cos = tl.load(cos_sin_ptr + dim, mask=mask, other=0.0)  # [HEADS, BLOCK_HALF]
    sin = tl.load(cos_sin_ptr + HALF + dim, mask=mask, other=0.0)

    if norm_ptr is not None:
        x, y = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(x * x + y * y, axis=1, keep_dims=True)  # [HEADS, 1]
        if BLOCK_TAIL > 0:
            squares += tl.sum(tail.to(tl.float32) * tail.to(tl.float32), axis=1, keep_dims=True)
        scale = inverse_rms(squares, eps, HEAD_DIM)
        first = scale_and_weigh(first, scale, tl.load(norm_ptr + dim, mask=mask, other=0.0), UNIT_OFFSET)
        second = scale_and_weigh(second, scale, tl.load(norm_ptr + HALF + dim, mask=mask, other=0.0), UNIT_OFFSET)
        if BLOCK_TAIL > 0:
            weight = tl.load(norm_ptr + tail_dim, mask=tail_mask, other=0.0)
            tail = scale_and_weigh(tail, scale, weight, UNIT_OFFSET)

    first, second = rotate(first, second, cos, sin)
    target_ptrs = target_ptr + head * target_head_stride + dim
    tl.store(target_ptrs, first, mask=mask)
    tl.store(target_ptrs + HALF, second, mask=mask)
    if BLOCK_TAIL > 0:
        tl.store(target_ptr + head * target_head_stride + tail_dim, tail, mask=tail_mask)


@triton.jit
def load_with_partners(row_ptrs, dim, mask, HALF: tl.constexpr):
    """Elements `dim` of rows, and the elements they are rotated with (behind the rotated part: themselves)."""
    partner = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
    return tl.load(row_ptrs + dim, mask=mask, other=0.0), tl.load(row_ptrs + partner, mask=mask, other=0.0)


@triton.jit
def norm_and_rotate(
    x, partners, weight, partner_weight, cos, sin, eps, dim, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """Heads x [rows, BLOCK_D] normalised, if there is a weight, and rotated: the bits of `rotate`."""
    first = dim < HALF
    rotated = dim < 2 * HALF
    if weight is not None:
        wide, wide_partners = x.to(tl.float32), partners.to(tl.float32)
        pairs = tl.where(first, wide * wide + wide_partners * wide_partners, 0.0)
        squares = tl.sum(pairs, axis=1, keep_dims=True)  # [rows, 1]
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(tl.where(rotated, 0.0, wide * wide), axis=1, keep_dims=True)
        scale = inverse_rms(squares, eps, HEAD_DIM)
        x = scale_and_weigh(x, scale, weight)
        partners = scale_and_weigh(partners, scale, partner_weight)
    turned = tl.fma(x.to(tl.float32), cos, partners.to(tl.float32) * tl.where(first, -sin, sin))
    return tl.where(rotated, turned.to(x.dtype), x)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _apply_rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos_sin_ptr += tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    q_ptr += token * q_token_stride
    k_ptr += token * k_token_stride
    if group < Q_GROUPS:
        rotate_heads(
            q_ptr, q_head_stride, q_ptr, q_head_stride, cos_sin_ptr, None, 0.0, group,
            NUM_HEADS, HEAD_DIM, HALF, HEADS, BLOCK_HALF, 0, False,
        )  # fmt: skip
    else:
        rotate_heads(
            k_ptr, k_head_stride, k_ptr, k_head_stride, cos_sin_ptr, None, 0.0, group - Q_GROUPS,
            NUM_KV_HEADS, HEAD_DIM, HALF, HEADS, BLOCK_HALF, 0, False,
        )  # fmt: skip


@cache
def rotation_tile(num_heads: int, head_dim: int, half: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constexprs HEADS and BLOCK_HALF and the compiler options: 16-byte loads of 16-bit heads in two warps."""
    block_d = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, _TILE // block_d))
    return {"HEADS": heads, "BLOCK_HALF": triton.next_power_of_2(half)}, {"num_warps": max(1, heads * block_d // 512)}


def check_rotation(op: str, cos_sin: torch.Tensor, head_dim: int) -> None:
    """Raise `KernelError` unless cos_sin is fp32 [max_position, R] with even R of at most head_dim."""
    check(
        cos_sin.dim() == 2
        and cos_sin.dtype == torch.float32
        and cos_sin.stride(1) == 1
        and 0 < cos_sin.shape[1] <= head_dim
        and cos_sin.shape[1] % 2 == 0,
        op,
        lambda: (
            f"cos_sin must be float32[max_position, R] with an even R of at most {head_dim}, not {shape_of(cos_sin)}"
        ),
    )


def plan_apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Launch:
    """Plan of `apply_rope`."""
    check(
        q.dim() == k.dim() == 3 and q.stride(2) == k.stride(2) == 1,
        "apply_rope",
        lambda: f"q and k must be [T, heads, D] with stride 1 along the last axis, not {shape_of(q)} and {shape_of(k)}",
    )
    tokens, num_heads, head_dim = q.shape
    check(
        (k.shape[0], k.shape[2], k.dtype) == (tokens, head_dim, q.dtype),
        "apply_rope",
        lambda: f"k {shape_of(k)} must have the tokens, head_dim and dtype of q {shape_of(q)}",
    )
    check_rotation("apply_rope", cos_sin, head_dim)
    check_per_token("apply_rope", "positions", positions, tokens)
    num_kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    tile, options = rotation_tile(num_heads, head_dim, half)
    return Launch(
        kernel=_apply_rope_kernel,
        grid=(tokens, cdiv(num_heads, tile["HEADS"]) + cdiv(num_kv_heads, tile["HEADS"])),
        args={
            "q_ptr": q,
            "k_ptr": k,
            "positions_ptr": positions,
            "cos_sin_ptr": cos_sin,
            "q_token_stride": q.stride(0),
            "q_head_stride": q.stride(1),
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
            "cos_sin_stride": cos_sin.stride(0),
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": half,
            **tile,
        },
        options=options,
    )


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate q and k in place.

    Args:
        q, k: [T, Hq, D] and [T, Hk, D] of one dtype, any strides with 1 along the last axis.
        positions: int32 [T], each in [0, max_position).
        cos_sin: fp32 [max_position, rotary_dim], cos in the first half of a row, sin in the second.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(q):
        elementwise.apply_rope(q, k, positions, cos_sin)
        return
    plan_apply_rope(q, k, positions, cos_sin).run()
