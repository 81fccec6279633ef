"""Copies new keys and values into the paged cache, bit for bit.

    k_cache[slot // block_size, slot % block_size] = k[t]    with slot = slot_mapping[t]; likewise v

A slot of -1 is skipped: padded rows of a CUDA graph have one. Slots other than -1 must be distinct.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import Launch, cdiv, check, runs_kernel, shape_of
from tritonllm.kernels.reference import elementwise

_TILE = 1024  # elements of one tile of heads


@triton.jit
def slot_offset(slot, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Offset of a slot's first head in a cache, in elements; slot is int64, and not negative."""
    return slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_block_stride,
    k_cache_token_stride,
    k_cache_head_stride,
    v_cache_block_stride,
    v_cache_token_stride,
    v_cache_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)  # [HEADS, 1]
        dim = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
        mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)  # [HEADS, BLOCK_D]
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        k_offset = slot_offset(slot, k_cache_block_stride, k_cache_token_stride, BLOCK_SIZE)
        v_offset = slot_offset(slot, v_cache_block_stride, v_cache_token_stride, BLOCK_SIZE)
        tl.store(k_cache_ptr + k_offset + head * k_cache_head_stride + dim, k, mask=mask)
        tl.store(v_cache_ptr + v_offset + head * v_cache_head_stride + dim, v, mask=mask)


def check_cache(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    """Raise `KernelError` unless both caches are [num_blocks, block_size, kv_heads, head_dim], unit last stride."""
    check(
        k_cache.dim() == 4 and k_cache.shape[2:] == (kv_heads, head_dim) and k_cache.stride(3) == 1,
        op,
        lambda: (
            f"k_cache must be [num_blocks, block_size, {kv_heads}, {head_dim}] with stride 1 along the last axis, "
            f"not {shape_of(k_cache)}"
        ),
    )
    check(
        v_cache.shape == k_cache.shape and v_cache.dtype == k_cache.dtype and v_cache.stride(3) == 1,
        op,
        lambda: f"v_cache must be like k_cache {shape_of(k_cache)}, not {shape_of(v_cache)}",
    )


def check_per_token(op: str, name: str, values: torch.Tensor, tokens: int) -> None:
    """Raise `KernelError` unless `values` is a contiguous int32 tensor with one entry a token."""
    check(
        values.shape == (tokens,) and values.dtype == torch.int32 and values.is_contiguous(),
        op,
        lambda: f"{name} must be a contiguous int32[{tokens}], one entry a token, not {shape_of(values)}",
    )


def cache_strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, int]:
    """The strides of both caches in elements, as kernel arguments."""
    k_block, k_token, k_head, _ = k_cache.stride()
    v_block, v_token, v_head, _ = v_cache.stride()
    return {
        "k_cache_block_stride": k_block,
        "k_cache_token_stride": k_token,
        "k_cache_head_stride": k_head,
        "v_cache_block_stride": v_block,
        "v_cache_token_stride": v_token,
        "v_cache_head_stride": v_head,
    }


@cache
def _tile(kv_heads: int, head_dim: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constexprs HEADS and BLOCK_D and the compiler options: one 16-byte load a thread of 16-bit heads."""
    block_d = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(kv_heads), max(1, _TILE // block_d))
    return {"HEADS": heads, "BLOCK_D": block_d}, {"num_warps": max(1, heads * block_d // 256)}


def plan_store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> Launch:
    """Plan of `store_kv`; the tile depends on the heads alone, tokens only on the grid."""
    check(
        k.dim() == 3 and k.stride(2) == 1,
        "store_kv",
        lambda: f"k must be [T, Hk, D] with unit last stride: {shape_of(k)}",
    )
    tokens, kv_heads, head_dim = k.shape
    check(
        v.shape == k.shape and v.stride(2) == 1 and v.dtype == k.dtype == k_cache.dtype,
        "store_kv",
        lambda: f"v and the caches must match k {shape_of(k)}, not v {shape_of(v)} and caches {shape_of(k_cache)}",
    )
    check_cache("store_kv", k_cache, v_cache, kv_heads, head_dim)
    check_per_token("store_kv", "slot_mapping", slot_mapping, tokens)
    tile, options = _tile(kv_heads, head_dim)
    return Launch(
        kernel=_store_kv_kernel,
        grid=(tokens, cdiv(kv_heads, tile["HEADS"])),
        args={
            "k_ptr": k,
            "v_ptr": v,
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "slot_mapping_ptr": slot_mapping,
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
            "v_token_stride": v.stride(0),
            "v_head_stride": v.stride(1),
            **cache_strides(k_cache, v_cache),
        },
        constexprs={
            "NUM_KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": k_cache.shape[1],
            **tile,
        },
        options=options,
    )


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write one key and one value a token into their slots.

    Args:
        k, v: [T, Hk, D], any strides with 1 along the last axis.
        k_cache, v_cache: [num_blocks, block_size, Hk, D], dtype of k, any strides with 1 along the last axis.
        slot_mapping: int32 [T], block id * block_size + offset in the block; -1 skips the token.

    Raises:
        KernelError: shapes, dtypes or strides do not fit.
    """
    if not runs_kernel(k):
        elementwise.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    plan_store_kv(k, v, k_cache, v_cache, slot_mapping).run()
