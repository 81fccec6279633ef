"""Which tiles `fused_decode_attention` takes, from shapes and the device alone, so that a captured graph holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from tritonllm.kernels.decode_splits import decode_grid, decode_warps, key_tile


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
        save_registers: order the work so that few values are alive at once: the new token before all others, and the
            ids of a tile's successor before its keys.
    """

    splits: int
    min_tiles: int
    keys: int
    stages: int
    warps: int
    merge_heads: int
    head_start: bool
    save_registers: bool = False


@cache
def fused_tile(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_sms: int,
    shared_memory: int,
    rdna: bool = False,
) -> FusedTile:
    """The choice for a batch: by latency if its (sequence, KV head) pairs leave most SMs idle, else by bandwidth.

    For RDNA (`GPU.rdna`) what counts first is that no register spills.
    """
    group = num_heads // num_kv_heads
    block_g, block_d = fused_blocks(group, head_dim)
    grid = decode_grid(batch, num_kv_heads, head_dim, num_sms)
    keys, stages = key_tile(grid, block_g, block_d, itemsize, shared_memory, rdna)
    few = grid.few and stages > 2 and not rdna
    if rdna and block_d > 128:
        stages = 1  # a tile in flight waits in registers, and queries and keys take them all
    if few:  # the tile in registers takes the place of one in shared memory
        stages -= 1
    return FusedTile(
        splits=grid.splits,
        min_tiles=max(1, grid.min_keys // keys),
        keys=keys,
        stages=stages,
        warps=decode_warps(block_g, block_d, keys, rdna),
        # At most 128 registers a thread for the merge, lest it decide the registers of the whole kernel.
        merge_heads=min(max(16384 // (grid.splits * block_d), 1), max(triton.next_power_of_2(group), 4)),
        head_start=few,
        save_registers=rdna,
    )


def fused_blocks(group: int, head_dim: int) -> tuple[int, int]:
    """BLOCK_G, for the queries of a group and their new key, and BLOCK_D: tensor cores take no fewer than 16."""
    return max(16, triton.next_power_of_2(group + 1)), max(16, triton.next_power_of_2(head_dim))
