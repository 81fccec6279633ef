"""Decode steps whose new tokens are still in qkv, over a paged cache where all that must not be read is poison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from paged import PagedBatch, Shape, paged_batch
from tensors import Draw

MAX_POSITION = 512


@dataclass(frozen=True)
class Rotary:
    """What a checkpoint fixes beside the cache: the rotated part of a head, as a divisor of it, and the head norms."""

    part: int
    normed: bool


@dataclass
class Step:
    """One decode step: a batch whose newest key and value are still in qkv alone, its cache place being poison."""

    shape: Shape
    batch: PagedBatch
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    norms: dict[str, Any] = field(default_factory=dict)

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(cache.clone(memory_format=torch.preserve_format) for cache in self.batch.cache[:2])

    def arguments(self, caches: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (
            self.qkv, self.cos_sin, self.positions, *caches, self.slots, self.batch.block_tables,
            self.batch.context_lens,
        )  # fmt: skip


def decode_step(
    shape: Shape,
    rotary: Rotary,
    contexts: list[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    layout_seed: int = 0,
) -> Step:
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
