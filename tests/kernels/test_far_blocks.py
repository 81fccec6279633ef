"""Cache blocks that lie more than 2^31 elements into the pool: every address is computed in 64 bits.

The pool is memory that is promised and never touched but for the blocks used, so this runs on a CPU too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tritonllm.kernels.decode_attention import DecodeWorkspace, decode_attention
from tritonllm.kernels.fused_decode_attention import fused_decode_attention
from tritonllm.kernels.kv_store import store_kv
from tritonllm.kernels.prefill_attention import prefill_attention
from tritonllm.kernels.prefill_tiling import prefill_tiles
from tritonllm.kernels.rope_store import rope_store_kv

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 16
STRIDE = 2**20  # elements from block to block, most of them never touched
NEAR, FAR = 1, 2**11 + 1  # FAR * STRIDE is past 2^31
DTYPE = torch.float16


@pytest.fixture
def pool(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches of FAR + 1 blocks; the rows of NEAR and FAR hold zeros."""
    size = (FAR + 1) * STRIDE
    if device.type == "cpu":
        try:
            memory = torch.from_numpy(np.zeros(size, dtype=np.float16))
        except MemoryError:
            pytest.skip(f"this machine does not promise {2 * size >> 30} GiB of memory")
    else:
        memory = torch.zeros(size, dtype=DTYPE, device=device)
    shape, strides = (FAR + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM), (STRIDE, KV_HEADS * HEAD_DIM, HEAD_DIM, 1)
    return memory.as_strided(shape, strides), memory.as_strided(shape, strides, STRIDE // 2)


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, DTYPE)


def tables(device: torch.device) -> torch.Tensor:
    return torch.tensor([[NEAR], [FAR]], dtype=torch.int32, device=device)


def fill(pool: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> None:
    """The same keys and values in both blocks, written by torch."""
    for cache, rows in zip(pool, normal(device, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), strict=True):
        cache[NEAR] = cache[FAR] = rows


def ints(device: torch.device, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_stores_reach_them(pool, device: torch.device) -> None:
    keys, values = normal(device, 1, KV_HEADS, HEAD_DIM), normal(device, 1, KV_HEADS, HEAD_DIM) + 1
    slots = ints(device, NEAR * BLOCK_SIZE + 3, FAR * BLOCK_SIZE + 3)
    store_kv(keys.repeat(2, 1, 1), values.repeat(2, 1, 1), *pool, slots)
    for cache, rows in zip(pool, (keys, values), strict=True):
        assert torch.equal(cache[NEAR, 3], rows[0])
        assert torch.equal(cache[FAR, 3], rows[0])
    qkv = normal(device, 1, (4 + 2 * KV_HEADS) * HEAD_DIM).repeat(2, 1)
    angles = torch.ones(8, HEAD_DIM, device=device)
    slots = slots + 1
    rope_store_kv(qkv, angles, ints(device, 2, 2), *pool, slots, 4)
    for cache in pool:
        assert cache[NEAR, 4].any()
        assert torch.equal(cache[FAR, 4], cache[NEAR, 4])


def test_decode_reads_them(pool, device: torch.device) -> None:
    fill(pool, device)
    q = normal(device, 1, 4, HEAD_DIM).repeat(2, 1, 1)
    workspace = DecodeWorkspace.allocate(2, 4, KV_HEADS, HEAD_DIM, device)
    out = decode_attention(q, *pool, tables(device), ints(device, 13, 13), 0.25, workspace)
    assert out[0].any()
    assert torch.equal(out[0], out[1])


def test_prefill_reads_them(pool, device: torch.device) -> None:
    fill(pool, device)
    q = normal(device, 5, 4, HEAD_DIM).repeat(2, 1, 1)
    tiles = torch.tensor(prefill_tiles([5, 5], [13, 13], 64), dtype=torch.int32, device=device)
    out = prefill_attention(q, *pool, tables(device), ints(device, 0, 5, 10), ints(device, 13, 13), tiles, 64, 0.25)
    assert out[:5].any()
    assert torch.equal(out[:5], out[5:])


def test_fused_decode_reads_and_writes_them(pool, device: torch.device) -> None:
    fill(pool, device)
    qkv = normal(device, 1, (4 + 2 * KV_HEADS) * HEAD_DIM).repeat(2, 1)
    workspace = DecodeWorkspace.allocate(2, 4, KV_HEADS, HEAD_DIM, device)
    slots = ints(device, NEAR * BLOCK_SIZE + 12, FAR * BLOCK_SIZE + 12)
    before = [cache[FAR, 12].clone() for cache in pool]
    out = fused_decode_attention(
        qkv, torch.ones(16, HEAD_DIM, device=device), ints(device, 12, 12), *pool, slots, tables(device),
        ints(device, 13, 13), 4, 0.25, workspace,
    )  # fmt: skip
    assert out[0].any()
    assert torch.equal(out[0], out[1])
    for cache, old in zip(pool, before, strict=True):
        assert not torch.equal(cache[FAR, 12], old)
        assert torch.equal(cache[FAR, 12], cache[NEAR, 12])
