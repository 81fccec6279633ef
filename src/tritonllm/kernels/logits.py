"""What ops on rows of logits [B, V] share: the tile of a program, and the checks of logits and of their parameters."""

from __future__ import annotations

from functools import cache

import torch
import triton

from tritonllm.kernels.launch import cdiv, check, shape_of

TILE = 4096
"""Tokens of a program."""
MAX_VOCAB_SIZE = 2**22
"""So that the mass of a row, up to 2^40 a token, fits 63 bits."""


def check_logits(op: str, logits: torch.Tensor) -> None:
    """Raise `KernelError` unless logits are [B, V] of a type and layout that the kernels take."""
    check(logits.dim() == 2, op, lambda: f"logits must be [B, V], not {shape_of(logits)}")
    check(
        logits.dtype in (torch.float32, torch.float16, torch.bfloat16),
        op,
        lambda: f"logits must be float32, float16 or bfloat16, not {shape_of(logits)}",
    )
    check(
        0 < logits.shape[1] <= MAX_VOCAB_SIZE,
        op,
        lambda: f"logits must have 1 to {MAX_VOCAB_SIZE} columns: {shape_of(logits)}",
    )
    check(
        logits.stride(1) == 1, op, lambda: f"the last axis of logits must have stride 1, not strides {logits.stride()}"
    )


def check_column(op: str, name: str, column: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise `KernelError` unless a parameter has one entry (or one pair) a row; any strides will do."""
    check(
        column.dtype == dtype and column.shape == shape,
        op,
        lambda: f"{name} must be {str(dtype).removeprefix('torch.')}{list(shape)}, not {shape_of(column)}",
    )


@cache
def tiling(vocab_size: int, tile: int) -> tuple[int, int, int]:
    """Tokens of a program, a power of two that small vocabularies shrink; programs of a row; lanes to merge those."""
    tile = max(16, min(tile, triton.next_power_of_2(vocab_size)))
    tiles = cdiv(vocab_size, tile)
    return tile, tiles, triton.next_power_of_2(tiles)
