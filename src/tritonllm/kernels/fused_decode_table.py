"""Which tiles `fused_decode_attention` takes, from shapes and the device alone, so that a captured graph holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from tritonllm.kernels.decode_attention import key_tile
from tritonllm.kernels.decode_splits import decode_splits, tiles_before_split


@dataclass(frozen=True)
class FusedTile:
    """How the work is cut up. Every choice gives the same values up to the order of sums; they differ in speed.

    Attributes:
        splits: programs that may share one (sequence, KV head), a power of two.
        min_tiles: tiles of keys that a program gets before another one joins.
        keys: keys of a tile.
        stages: tiles in flight in the pipelined loop.
        warps: of a program.
        merge_heads: heads of a group that are merged at a time, a power of two.
        head_start: read the first tile into registers before the queries: shortens the chain of latencies, which is
            all that counts when there are few programs, at the price of registers.
    """

    splits: int
    min_tiles: int
    keys: int
    stages: int
    warps: int
    merge_heads: int
    head_start: bool


@cache
def fused_tile(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_sms: int,
    shared_memory: int,
) -> FusedTile:
    """The choice for a batch: by latency if its (sequence, KV head) pairs leave most SMs idle, else by bandwidth."""
    group = num_heads // num_kv_heads
    block_g, block_d = fused_blocks(group, head_dim)
    splits = decode_splits(max(batch, 1), num_kv_heads, num_sms)
    keys, stages = key_tile(block_g, block_d, itemsize, shared_memory)
    pairs = batch * num_kv_heads
    # With SMs to spare nothing speaks against a program a tile.
    min_tiles = 1 if 2 * pairs <= num_sms else tiles_before_split(pairs, splits, num_sms)
    latency_bound = 4 * pairs <= num_sms
    if latency_bound:
        # A program has a tile or two. Small ones, of which several fit on an SM, all run at once; and the first lies in
        # registers, 32 a thread.
        keys, stages = min(keys, max(4096 // block_d, 16)), min(stages, 3)
    elif pairs > num_sms:
        stages = min(stages, 3)  # so that two programs share an SM and one computes while the other waits
    return FusedTile(
        splits=splits,
        min_tiles=min_tiles,
        keys=keys,
        stages=stages,
        warps=4 if block_g * block_d <= 64 * 128 else 8,
        # At most 128 registers a thread for the merge, lest it decide the registers of the whole kernel.
        merge_heads=min(max(16384 // (splits * block_d), 1), max(triton.next_power_of_2(group), 4)),
        head_start=latency_bound,
    )


def fused_blocks(group: int, head_dim: int) -> tuple[int, int]:
    """BLOCK_G, for the queries of a group and their new key, and BLOCK_D: tensor cores take no fewer than 16."""
    return max(16, triton.next_power_of_2(group + 1)), max(16, triton.next_power_of_2(head_dim))
