"""How many programs share the keys of a decode step, from the batch and the device alone, so that a graph holds."""

from __future__ import annotations

MAX_SPLITS = 32  # beyond it the merge costs more than the splits save
_MIN_SPLITS = 4  # evens out a batch of mixed lengths; short sequences use fewer


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
    smallest: dict[tuple[int, int], int] = {}
    for batch in range(1, max_batch + 1):
        splits = decode_splits(batch, num_kv_heads, num_sms)
        smallest.setdefault((splits, tiles_before_split(batch * num_kv_heads, splits, num_sms)), batch)
    return list(smallest.values())
