"""Decode steps whose new tokens are still in qkv, over a paged cache where all that must not be read is poison.

Poison is that of `paged`, and NaN in the places of the cache where the new keys and values will go, and behind each row
of qkv. A row of context 0 has slot -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonllm.testing.paged import PagedBatch, Shape, paged_batch
from tritonllm.testing.tensors import Draw, kernel_device

MAX_POSITION = 512
"""Rows of the table of angles; a context has at most as many tokens."""


@dataclass(frozen=True)
class Rotary:
    """What a checkpoint fixes beside the cache: the rotated part of a head, as a divisor of it, and the head norms."""

    part: int
    normed: bool


@dataclass
class Step:
    """One decode step: a batch whose newest key and value are still in qkv alone, its cache place being poison.

    Attributes:
        shape: heads and cache.
        batch: the earlier tokens. Its q, and the newest of its dense keys and values, belong to no token of this step.
        qkv: [B, (Hq + 2 Hk) * D], rows padded by 16 elements of NaN.
        cos_sin: float32 [MAX_POSITION, R] of any angles.
        positions: int32 [B], context - 1, or 0 where the context is 0.
        slots: int32 [B], where the new token goes, or -1 where the context is 0.
        norms: `q_norm`, `k_norm` [D] and `eps` as keywords, or nothing.
    """

    shape: Shape
    batch: PagedBatch
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    norms: dict[str, Any] = field(default_factory=dict)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of both caches, with their strides, for an op to write to."""
        k_cache, v_cache = (cache.clone(memory_format=torch.preserve_format) for cache in self.batch.cache[:2])
        return k_cache, v_cache

    def arguments(self, caches: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The first arguments of `fused_decode_attention`, up to the context lengths, over these caches."""
        return (
            self.qkv, self.cos_sin, self.positions, *caches, self.slots, self.batch.block_tables,
            self.batch.context_lens,
        )  # fmt: skip


def decode_step(
    shape: Shape,
    rotary: Rotary,
    contexts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    layout_seed: int = 0,
) -> Step:
    """A step with contents from `seed`; contexts count the new token, at most `MAX_POSITION`, 0 for a row without one.

    `layout_seed` only decides where the blocks lie.
    """
    batch = paged_batch(shape, [1] * len(contexts), contexts, dtype, device, seed, layout_seed)
    draw = Draw(seed + 1, device)
    angles = draw.normal(MAX_POSITION, shape.head_dim // rotary.part // 2, scale=3.0)
    slots = []
    for row, context in enumerate(contexts):
        if context == 0:
            slots.append(-1)
            continue
        block, offset = (
            int(batch.block_tables[row, (context - 1) // shape.block_size]),
            (context - 1) % shape.block_size,
        )
        slots.append(block * shape.block_size + offset)
        for cache in batch.cache[:2]:
            cache[block, offset] = float("nan")
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return Step(
        shape=shape,
        batch=batch,
        qkv=draw.rows(len(contexts), heads * shape.head_dim, 16, dtype),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        positions=torch.tensor([max(context - 1, 0) for context in contexts], dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        norms={
            "q_norm": 1 + draw.normal(shape.head_dim, dtype=dtype, scale=0.2),
            "k_norm": 1 + draw.normal(shape.head_dim, dtype=dtype, scale=0.2),
            "eps": 1e-6,
        }
        if rotary.normed
        else {},
    )


@dataclass(frozen=True)
class DecodeStepCase:
    """What a step is made from."""

    shape: Shape
    rotary: Rotary
    contexts: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    layout_seed: int = 0

    def build(self, device: torch.device | str | None = None) -> Step:
        """The step; default device: `kernel_device()`."""
        device = device or kernel_device()
        return decode_step(self.shape, self.rotary, self.contexts, self.dtype, device, self.seed, self.layout_seed)
