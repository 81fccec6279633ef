"""How a decode step is cut, from the batch and the device alone, so that a captured graph serves every length."""

from __future__ import annotations

from functools import cache
from math import inf
from typing import NamedTuple

MAX_SPLITS = 32  # beyond it the merge costs more than the splits save
_MIN_SPLITS = 4  # evens out a batch of mixed lengths; short sequences use fewer


class DecodeGrid(NamedTuple):
    """What the number of (sequence, KV head) pairs decides about a decode step.

    Attributes:
        splits: programs that may share a pair, a power of two.
        min_tiles: tiles of keys that a program gets before another one joins.
        tile_values: elements of a tile of keys at most, as far as that leaves 16 keys.
        stages: of the pipelined loop at most.
        latency_bound: whether most SMs idle, so that the chain of latencies in a program is all that counts.
    """

    splits: int
    min_tiles: int
    tile_values: int
    stages: int
    latency_bound: bool = False


class _Cut(NamedTuple):
    """`DecodeGrid` for up to `pairs` pairs an SM; `programs` are those of an SM, which the splits come from."""

    pairs: float
    programs: int
    min_tiles: int
    tile_values: int
    stages: int
    latency_bound: bool = False


_CUTS = (
    # Programs have a tile or two each, and should all run at once: small ones.
    _Cut(pairs=0.25, programs=2, min_tiles=1, tile_values=32 * 128, stages=3, latency_bound=True),
    # With SMs to spare nothing speaks against a program a tile.
    _Cut(pairs=0.5, programs=2, min_tiles=1, tile_values=64 * 256, stages=3),
    _Cut(pairs=3, programs=2, min_tiles=8, tile_values=64 * 256, stages=3),
    # The pairs alone fill the SMs several times over: splitting serves sequences far longer than the others, and would
    # only cost the rest a merge.
    _Cut(pairs=8, programs=2, min_tiles=16, tile_values=64 * 256, stages=3),
    _Cut(pairs=inf, programs=2, min_tiles=32, tile_values=64 * 256, stages=3),
)
"""By rising pairs; the first that reaches far enough holds."""


@cache
def decode_grid(batch: int, num_kv_heads: int, num_sms: int, num_splits: int | None = None) -> DecodeGrid:
    """The choice for a batch, with the splits of `decode_splits` unless others are given."""
    pairs = max(batch, 1) * num_kv_heads
    cut = next(cut for cut in _CUTS if pairs <= cut.pairs * num_sms)
    splits = num_splits or _splits(max(1, cut.programs * num_sms // pairs))
    return DecodeGrid(splits, cut.min_tiles, cut.tile_values, cut.stages, cut.latency_bound)


def decode_splits(batch: int, num_kv_heads: int, num_sms: int) -> int:
    """Programs that share the keys of one (sequence, KV head): enough to fill the SMs, from 4 to 32.

    A power of two that depends on no length, so that a captured graph holds and few variants are compiled.
    """
    return decode_grid(batch, num_kv_heads, num_sms).splits


def _splits(programs: int) -> int:
    return min(max(1 << (programs.bit_length() - 1), _MIN_SPLITS), MAX_SPLITS)


def distinct_batches(max_batch: int, num_kv_heads: int, num_sms: int) -> list[int]:
    """The smallest batch of each kernel that is compiled for batches from 1 to `max_batch`, ascending."""
    smallest: dict[DecodeGrid, int] = {}
    for batch in range(1, max_batch + 1):
        smallest.setdefault(decode_grid(batch, num_kv_heads, num_sms), batch)
    return list(smallest.values())
