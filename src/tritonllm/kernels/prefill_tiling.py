"""How the host cuts the queries of a prefill into the tiles that the programs of `prefill_attention` take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS, num_programs, serves_shape


@dataclass(frozen=True)
class PrefillTiling:
    """How many query rows a tile has, by which the host cuts the queries of a step.

    The Hopper form has tiles of 128 rows and one program an SM. It pays where there is enough to do for all of them,
    and with heads of 64, where its exponentials weigh as much as its products, in long prompts only: measured on one
    H200; `tritonllm kernels bench --op prefill_attention` has both forms.

    Attributes:
        num_heads: query heads of this rank.
        portable_rows: rows of a tile of the form that runs everywhere.
        hopper_tokens: new tokens of a step from which on the Hopper form serves; None for never.
        hopper_length: tokens that its longest chunk must have.
    """

    num_heads: int
    portable_rows: int
    hopper_tokens: int | None = None
    hopper_length: int = 0

    @classmethod
    def choose(
        cls,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        hopper: bool = True,
    ) -> PrefillTiling:
        """The tiling for a model's attention on a device; `block_size` is that of the cache.

        `hopper` False keeps to the portable form's tiles, for a model whose layers all have a window or a softcap.
        """
        portable_rows = 64 if dtype.itemsize <= 2 else 32 if head_dim <= 64 else 16
        if not hopper or not serves_shape(head_dim, dtype, block_size, device):
            return cls(num_heads, portable_rows)
        tokens = HOPPER_TILE_ROWS * num_programs(device) // num_heads
        return cls(num_heads, portable_rows, tokens, 2048 if head_dim <= 64 else 0)

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Every answer of `rows`: what has to be compiled before the first request."""
        return (self.portable_rows,) if self.hopper_tokens is None else (self.portable_rows, HOPPER_TILE_ROWS)

    def rows(self, query_lens: Sequence[int]) -> int:
        """Rows of a tile for the chunks of a step."""
        if self.hopper_tokens is None or sum(query_lens) < self.hopper_tokens:
            return self.portable_rows
        return HOPPER_TILE_ROWS if max(query_lens) >= self.hopper_length else self.portable_rows


def prefill_tiles(query_lens: Sequence[int], context_lens: Sequence[int], tile_rows: int) -> list[tuple[int, int]]:
    """Cut the queries of each sequence into tiles of `tile_rows`.

    Returns (sequence, first query row) of each tile, those with the most keys first: on a GPU the long programs must
    not start last.
    """
    tiles = [
        (min(context_len, context_len - query_len + row + tile_rows), sequence, row)
        for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True))
        for row in range(0, query_len, tile_rows)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return [(sequence, row) for _, sequence, row in tiles]


def key_tile(tile_rows: int, block_d: int, itemsize: int, limit: int, rdna: bool) -> tuple[int, int]:
    """Keys a step and pipeline stages: the first pair of the preference order that fits the shared memory."""
    if itemsize > 2:  # exact float32 products run on plain cores, and their operands fill the registers
        preferences = [(16, 2), (16, 1)]
    elif limit >= 227 * 1024:
        preferences = [(64, 3), (32, 3)]
    elif rdna and block_d > 64:  # tiles in flight wait in registers: more of them would spill
        preferences = [(16, 2)] if block_d <= 128 else [(16, 1)]
    else:  # tensor cores before Hopper's read operands from registers, and 64 keys would leave too few
        preferences = [(32, 3), (32, 2), (16, 2)]
    for keys, stages in preferences:
        if (tile_rows + 2 * keys * stages) * block_d * itemsize <= limit:
            return keys, stages
    return preferences[-1]
