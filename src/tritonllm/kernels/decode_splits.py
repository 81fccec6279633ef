"""How a decode step is cut, from the batch and the device alone, so that a captured graph serves every length."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import NamedTuple


class DecodeGrid(NamedTuple):
    """How a decode step is cut. All but the splits are bounds: `key_tile` takes what fits into shared memory.

    Attributes:
        splits: programs that may share a (sequence, KV head) pair, a power of two.
        min_keys: keys that a program gets before another one joins.
        programs: how many share an SM, and with it its shared memory.
        tile_values: elements of a tile of keys, as far as that leaves 16 keys.
        stages: of the pipelined loop.
        few: whether most SMs idle, so that the chain of latencies in a program is all that counts.
    """

    splits: int
    min_keys: int
    programs: int
    tile_values: int
    stages: int
    few: bool = False


_CUTS = (
    # Two programs an SM, of three tiles each in flight, are what it takes to read as fast as memory can: as long as
    # there are few pairs, that is what splits are for. Programs of the smallest batches have a tile or two each.
    (1 / 16, DecodeGrid(splits=32, min_keys=1, programs=2, tile_values=32 * 128, stages=3, few=True)),
    (1 / 8, DecodeGrid(splits=16, min_keys=1, programs=2, tile_values=64 * 128, stages=4, few=True)),
    (1 / 4, DecodeGrid(splits=8, min_keys=1, programs=2, tile_values=64 * 128, stages=4)),
    # One large program does with fewer splits, whose merge such a short step feels.
    (1 / 2, DecodeGrid(splits=2, min_keys=1, programs=1, tile_values=128 * 128, stages=3)),
    (2.5, DecodeGrid(splits=2, min_keys=1, programs=2, tile_values=64 * 128, stages=4)),
    # From here on the pairs alone fill the SMs: splits serve a sequence far longer than the others, and would only cost
    # the rest a merge.
    (5, DecodeGrid(splits=4, min_keys=2048, programs=2, tile_values=64 * 128, stages=4)),
    (inf, DecodeGrid(splits=4, min_keys=2048, programs=3, tile_values=64 * 128, stages=3)),
)
"""By rising number of pairs an SM, in heads of 128; the first that reaches far enough holds."""


@cache
def decode_grid(
    batch: int, num_kv_heads: int, head_dim: int, num_sms: int, num_splits: int | None = None
) -> DecodeGrid:
    """The choice for a batch, with the splits of the table unless others are given.

    It depends on no length, so that a captured graph holds, and few kernels are compiled.
    """
    pairs = max(batch, 1) * num_kv_heads * head_dim / 128
    grid = next(grid for reach, grid in _CUTS if pairs <= reach * num_sms)
    return grid if num_splits is None else grid._replace(splits=num_splits)


def distinct_batches(max_batch: int, num_kv_heads: int, head_dim: int, num_sms: int) -> list[int]:
    """The smallest batch of each kernel that is compiled for batches from 1 to `max_batch`, ascending."""
    smallest: dict[DecodeGrid, int] = {}
    for batch in range(1, max_batch + 1):
        smallest.setdefault(decode_grid(batch, num_kv_heads, head_dim, num_sms), batch)
    return list(smallest.values())


def key_tile(
    grid: DecodeGrid, block_g: int, block_d: int, itemsize: int, limit: int, rdna: bool = False
) -> tuple[int, int]:
    """Keys a step and pipeline stages: the first pair of the preference order that fits the shared memory.

    `grid` bounds both. What has more than two stages leaves room for the other programs of its SM, since one computes
    while another waits; where that cannot be, at least the program itself must fit.
    """
    if itemsize > 2:  # exact float32 products run on plain cores, and their operands fill the registers
        preferences = [(16, 2), (16, 1)]
    elif rdna:  # tiles in flight wait in registers: more of them would spill
        preferences = [(32, 3) if block_g * block_d <= 1024 else (16, 2)]
    else:
        most = min(max(grid.tile_values // block_d, 16), 128 if grid.programs == 1 else 64)
        for keys in (most, min(64, most)):
            for stages in range(grid.stages, 2, -1):
                if _shared_bytes(block_g, block_d, keys, stages, itemsize) <= limit // grid.programs:
                    return keys, stages
        preferences = [(keys, stages) for keys, stages in ((64, 2), (32, 3), (32, 2), (16, 2)) if keys <= most]
    for keys, stages in preferences:
        if _shared_bytes(block_g, block_d, keys, stages, itemsize) <= limit:
            return keys, stages
    return preferences[-1]


def _shared_bytes(block_g: int, block_d: int, keys: int, stages: int, itemsize: int) -> int:
    """Of a program: keys and values of all stages but one, which computes, queries twice, and the weights of a tile.

    On NVIDIA GPUs the compiler takes that or, of the queries, one; on AMD's no more than that.
    """
    return (2 * keys * max(stages - 1, 1) * block_d + block_g * (2 * block_d + keys)) * itemsize


def decode_warps(block_g: int, block_d: int, keys: int, rdna: bool = False) -> int:
    """Warps of a program, by the size of its output and of a tile of keys."""
    if rdna:
        return 8 if block_d <= 64 and block_g <= 32 else 16
    return 4 if max(block_g, keys) * block_d <= 64 * 128 else 8
