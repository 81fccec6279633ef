"""What prefill and decode attention share: finding keys through a block table, the online softmax, and the checks.

A key tile is BLOCK_N consecutive keys of one sequence. Online softmax after Milakov and Gimelshein (arXiv:1805.02867),
in base 2: the caller scales by log2(e).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import check, gpu_of, shape_of

LOG2_E = math.log2(math.e)


@triton.jit
def load_block_ids(table_row_ptr, start, limit, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache block ids of the key tile at `start`: one scalar if a tile lies inside a block, else one id a key.

    Entries for keys at or past `limit` may be garbage, so they are not read; block 0 stands in for them.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_row_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=keys < limit, other=0)


@triton.jit
def key_offsets(block_ids, start, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [BLOCK_N] in elements of the rows of the key tile at `start`."""
    if BLOCK_SIZE % BLOCK_N == 0:
        tokens = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        tokens = (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
    return block_ids.to(tl.int64) * block_stride + tokens.to(tl.int64) * token_stride


@triton.jit
def online_softmax_step(scores, values, scale_log2, acc, total, peak):
    """Fold a tile of raw scores [M, N] and its values [N, D] into the running sum, total and peak.

    A masked score is -inf while the peak starts finite, so a row that has seen no key yet stays at zero instead of
    turning into inf - inf. The mask must not be a large finite number: times the scale it would lose its meaning.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def cap_scores(scores, scale_log2, SOFTCAP: tl.constexpr):
    """Raw scores s with `scale * s` squeezed into (-SOFTCAP, SOFTCAP): SOFTCAP * tanh(scale * s / SOFTCAP) / scale.

    They stay raw, so that the softmax behind them is the same with a cap and without. tanh(y) is 1 - 2 / (1 + e^2y),
    which has its limits where e^2y is 0 or infinite.
    """
    power = tl.exp2(scores * (2.0 * scale_log2 / SOFTCAP))
    return (1.0 - 2.0 / (1.0 + power)) * (SOFTCAP * 1.4426950408889634 / scale_log2)


def check_score_options(op: str, scale: float, window: int | None, softcap: float | None) -> None:
    """The checks of what attention ops do to scores. Raises `KernelError`."""
    check(scale > 0, op, lambda: f"scale must be positive, got {scale}")
    check(window is None or window >= 1, op, lambda: f"window must be at least 1 key or None, got {window}")
    check(softcap is None or softcap > 0, op, lambda: f"softcap must be positive or None, got {softcap}")


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory one program may use on a device; the smallest class where there is no GPU to ask."""
    return gpu_of(device).shared_memory


def check_paged(
    op: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> None:
    """The checks that paged attention ops share. Raises `KernelError`."""
    check(q.ndim == 3 and q.stride(2) == 1, op, f"q must be [T, heads, D] with unit stride on D, got {shape_of(q)}")
    check(
        k_cache.ndim == 4 and k_cache.shape == v_cache.shape,
        op,
        lambda: (
            f"k_cache and v_cache must be [blocks, block_size, kv_heads, D], got {shape_of(k_cache)}, "
            f"{shape_of(v_cache)}"
        ),
    )
    check(
        k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1,
        op,
        lambda: f"k_cache and v_cache must share strides, unit on D, got {k_cache.stride()} and {v_cache.stride()}",
    )
    check(
        q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16),
        op,
        lambda: (
            f"q and the caches must share a dtype of float32, float16 or bfloat16, got {shape_of(q)}, "
            f"{shape_of(k_cache)}, {shape_of(v_cache)}"
        ),
    )
    check(
        q.shape[2] == k_cache.shape[3] and q.shape[2] <= 256,
        op,
        lambda: f"q and the caches must share a head_dim of at most 256, got {shape_of(q)}, {shape_of(k_cache)}",
    )
    check(
        k_cache.shape[2] > 0 and q.shape[1] % k_cache.shape[2] == 0,
        op,
        lambda: f"query heads must be a multiple of KV heads, got {q.shape[1]} and {k_cache.shape[2]}",
    )
    check(
        block_tables.ndim == 2 and block_tables.dtype == torch.int32 and block_tables.stride(1) == 1,
        op,
        lambda: f"block_tables must be int32 [B, W] with unit stride on W, got {shape_of(block_tables)}",
    )


def check_integers(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `KernelError` unless a tensor is contiguous int32 of that shape."""
    check(
        tensor.dtype == torch.int32 and tensor.shape == shape and tensor.is_contiguous(),
        op,
        lambda: f"{name} must be contiguous int32 {list(shape)}, got {shape_of(tensor)}",
    )
