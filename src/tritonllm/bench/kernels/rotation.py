"""Rotation and cache writes as cases: consecutive tokens in blocks that lie in random order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from tritonllm import kernels
from tritonllm.bench.kernels.case import EPS, Case, Heads, Place, Prepared, Timed, Work, different, worst_error
from tritonllm.kernels import reference
from tritonllm.testing.poison import poisoned_memory


@dataclass(frozen=True)
class ApplyRope(Case):
    """`apply_rope` of the tokens of one prompt."""

    op: ClassVar[str] = "apply_rope"
    heads: Heads
    tokens: int

    def work(self, itemsize: int) -> Work:
        heads = self.heads
        values = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        return Work(self.tokens * (2 * values * itemsize + 4 * heads.head_dim))

    def prepare(self, place: Place) -> Prepared:
        heads, copies = self.heads, place.copies(self.work(place.dtype.itemsize).bytes)
        q = place.normal(copies, self.tokens, heads.num_heads, heads.head_dim)
        k = place.normal(copies, self.tokens, heads.num_kv_heads, heads.head_dim)
        angles = _angles(heads, self.tokens, place)
        calls = [partial(kernels.apply_rope, *each, *angles) for each in zip(q, k, strict=True)]

        def error() -> float:
            exact = q[0].float(), k[0].float()
            reference.apply_rope(*exact, *angles)
            calls[0]()
            return max(map(worst_error, (q[0], k[0]), exact))

        return Prepared(Timed(calls, error, place.bound))


@dataclass(frozen=True)
class StoreKv(Case):
    """`store_kv` of the tokens of one prompt."""

    op: ClassVar[str] = "store_kv"
    heads: Heads
    tokens: int
    block_size: int = 256

    def work(self, itemsize: int) -> Work:
        return Work(self.tokens * 4 + 2 * self.heads.kv_bytes(self.tokens, itemsize))

    def prepare(self, place: Place) -> Prepared:
        heads, copies = self.heads, place.copies(self.work(place.dtype.itemsize).bytes)
        k, v = place.normal(2, copies, self.tokens, heads.num_kv_heads, heads.head_dim)
        caches, slots = _caches(heads, self.tokens, self.block_size, copies, place)
        calls = [
            partial(kernels.store_kv, keys, values, *caches, where)
            for keys, values, where in zip(k, v, slots, strict=True)
        ]

        def error() -> float:
            calls[0]()
            return _misplaced(caches, slots[0], (k[0], v[0]))

        return Prepared(Timed(calls, error, 0.0))


@dataclass(frozen=True)
class RopeStoreKv(Case):
    """`rope_store_kv` of the tokens of one prompt."""

    op: ClassVar[str] = "rope_store_kv"
    heads: Heads
    tokens: int
    normed: bool = False
    block_size: int = 256

    def work(self, itemsize: int) -> Work:
        heads = self.heads
        return Work(self.tokens * (2 * heads.width * itemsize + 4 * heads.head_dim))

    def prepare(self, place: Place) -> Prepared:
        heads, copies = self.heads, place.copies(self.work(place.dtype.itemsize).bytes)
        qkv = place.normal(copies, self.tokens, heads.width)
        caches, slots = _caches(heads, self.tokens, self.block_size, copies, place)
        positions, cos_sin = _angles(heads, self.tokens, place)
        norm = place.normal(heads.head_dim) if self.normed else None
        norms: dict[str, Any] = {"q_norm": norm, "k_norm": norm, "eps": EPS}
        calls = [
            partial(kernels.rope_store_kv, rows, cos_sin, positions, *caches, where, heads.num_heads, **norms)
            for rows, where in zip(qkv, slots, strict=True)
        ]

        def error() -> float:
            # With the op's own roundings: a rotation may cancel, and what was rounded before it then weighs more.
            exact_caches = caches[0].clone(), caches[1].clone()
            before = qkv[0], cos_sin, positions
            exact = reference.rope_store_kv(*before, *exact_caches, slots[0], heads.num_heads, **norms)
            with poisoned_memory():
                q = calls[0]()
            there = slots[0].long()
            written = [cache.flatten(0, 1)[there] for cache in (*caches, *exact_caches)]
            return max(worst_error(q, exact), *map(worst_error, written[:2], written[2:]), _misplaced(caches, slots[0]))

        return Prepared(Timed(calls, error, place.bound))


def _angles(heads: Heads, tokens: int, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a prompt and random angles for each."""
    angles = torch.rand(tokens, heads.head_dim // 2, device=place.device) * 6.3
    positions = torch.arange(tokens, dtype=torch.int32, device=place.device)
    return positions, torch.cat([angles.cos(), angles.sin()], 1)


def _caches(
    heads: Heads, tokens: int, block_size: int, copies: int, place: Place
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Caches of NaN, and slots int32 [copies, tokens]: consecutive in blocks of a random order."""
    blocks = -(-tokens // block_size)
    shape = copies * blocks, block_size, heads.num_kv_heads, heads.head_dim
    caches = [torch.full(shape, float("nan"), dtype=place.dtype, device=place.device) for _ in range(2)]
    order = torch.randperm(copies * blocks, device=place.device).view(copies, blocks, 1)
    slots = (order * block_size + torch.arange(block_size, device=place.device)).flatten(1)[:, :tokens]
    return (caches[0], caches[1]), slots.to(torch.int32).contiguous()


def _misplaced(
    caches: tuple[torch.Tensor, ...], slots: torch.Tensor, rows: tuple[torch.Tensor, ...] | None = None
) -> float:
    """0 if these slots of caches that held NaN alone are written and no others, and hold these rows if given."""
    for index, cache in enumerate(caches):
        flat = cache.flatten(0, 1)
        written = ~flat.isnan().flatten(1).all(1)
        if written.sum() != len(slots) or not written[slots.long()].all():
            return float("inf")
        if rows is not None and different((flat[slots.long()], rows[index])):
            return float("inf")
    return 0.0
