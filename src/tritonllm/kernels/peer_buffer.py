"""Memory that every rank of one host can write into, and how all-reduces divide it.

An all-reduce runs as up to `MAX_CHANNELS` programs. Program c of a rank talks to the programs c of the other ranks and
to no other: they are a channel. A channel has slots of its own in every rank's buffer, and counts its all-reduces; the
count tells new data from old, so that nothing is ever reset and a replayed graph needs no input. There are two of each
slot, for even and for odd counts. That is enough: in an all-reduce a program hears from every other rank, so whoever is
in all-reduce n + 1 knows that all ranks have left n - 1, whose slots it writes.

Bytes of a rank's buffer, in this order:

    words    [ONE_SHOT_CHANNELS, 2, ranks, SLOT_BYTES]   one_shot: what each rank sent, a count beside every value
    parts    [MAX_CHANNELS, 2, SLOT_BYTES]               two_shot: other ranks' terms of this rank's share of columns
    sums     [MAX_CHANNELS, 2, SLOT_BYTES]               two_shot: every rank's sums
    flags    [MAX_CHANNELS, 2, MAX_RANKS]                two_shot, int32: the count up to which a rank has written
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_RANKS = 8
MAX_CHANNELS = 128
"""Programs of an all-reduce wait for each other, so all of them have to fit on the GPU at once."""

ONE_SHOT_CHANNELS = 64
SLOT_BYTES = 32 * 1024


def words_bytes(size: int) -> int:
    """Bytes before `parts` in a buffer of `size` ranks."""
    return ONE_SHOT_CHANNELS * 2 * size * SLOT_BYTES


def buffer_bytes(size: int) -> int:
    """Bytes of the buffer of each of `size` ranks."""
    return words_bytes(size) + 2 * MAX_CHANNELS * 2 * SLOT_BYTES + MAX_CHANNELS * 2 * MAX_RANKS * 4


@dataclass(frozen=True)
class PeerBuffer:
    """A rank's view of the buffers of all ranks. Zeroed on every rank before any rank uses it.

    Attributes:
        rank, size: its place.
        addresses: int64 `[size]` on the device: where each rank's buffer is, as this rank addresses it.
        state: int32 `[MAX_CHANNELS + 1]` on the device: the count of each channel; then what is not 0 once the ranks
            should stop waiting, since one of them is lost. Sums are anything from then on.
        num_channels: programs that an all-reduce may have, at most `MAX_CHANNELS`.
        memory: what has to live as long as this.
    """

    rank: int
    size: int
    addresses: torch.Tensor
    state: torch.Tensor
    num_channels: int
    memory: Any = None
