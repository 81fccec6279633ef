"""How many programs share the keys of a decode step, from the batch and the device alone, so that a graph holds."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

MAX_SPLITS = 32  # beyond it the merge costs more than the splits save
_MIN_SPLITS = 4  # evens out a batch of mixed lengths; short sequences use fewer


class DecodeGrid(NamedTuple):
    """What the number of (sequence, KV head) pairs decides about a decode step.

    Attributes:
        splits: programs that may share a pair, a power of two.
        min_tiles: tiles of keys that a program gets before another one joins.
        latency_bound: whether most SMs idle, so that the chain of latencies in a program is all that counts.
    """

    splits: int
    min_tiles: int
    latency_bound: bool


@cache
def decode_grid(batch: int, num_kv_heads: int, num_sms: int, num_splits: int | None = None) -> DecodeGrid:
    """The choice for a batch, with the splits of `decode_splits` unless others are given."""
    splits = num_splits or decode_splits(max(batch, 1), num_kv_heads, num_sms)
    pairs = batch * num_kv_heads
    # With SMs to spare nothing speaks against a program a tile.
    min_tiles = 1 if 2 * pairs <= num_sms else tiles_before_split(pairs, splits, num_sms)
    return DecodeGrid(splits, min_tiles, latency_bound=4 * pairs <= num_sms)


def decode_splits(batch: int, num_kv_heads: int, num_sms: int) -> int:
    """Programs that share the keys of one (sequence, KV head): about two for each SM, from 4 to 32.

    A power of two that depends on no length, so that a captured graph holds and few variants are compiled.
    """
    programs = max(1, 2 * num_sms // (batch * num_kv_heads))
    return min(max(1 << (programs.bit_length() - 1), _MIN_SPLITS), MAX_SPLITS)


def tiles_before_split(pairs: int, splits: int, num_sms: int) -> int:
    """Tiles of keys that a program of a (sequence, KV head) pair gets before another one joins it.

    Many splits go with few pairs, where latency counts: let each have little to do. Where the pairs alone fill the SMs
    several times over, splitting serves sequences far longer than the others, and would only cost the rest a merge.
    """
    if pairs >= 8 * num_sms:
        return 32
    if pairs >= 3 * num_sms:
        return 16
    return min(max(64 // splits, 2), 8)


def distinct_batches(max_batch: int, num_kv_heads: int, num_sms: int) -> list[int]:
    """The smallest batch of each kernel that is compiled for batches from 1 to `max_batch`, ascending."""
    smallest: dict[DecodeGrid, int] = {}
    for batch in range(1, max_batch + 1):
        smallest.setdefault(decode_grid(batch, num_kv_heads, num_sms), batch)
    return list(smallest.values())
