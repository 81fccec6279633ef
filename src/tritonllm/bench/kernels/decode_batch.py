"""A decode batch over as many caches as it takes to read past the L2 cache, for every benchmark of decode attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonllm.bench.kernels.case import MAX_CALLS, Heads, Place
from tritonllm.kernels.decode_attention import DecodeWorkspace


class DecodeBatch:
    """Inputs of decode attention, a set of cache blocks for each call. What lies behind the last key is NaN.

    Args:
        heads: of the model.
        contexts: keys of each row, the new one counted.
        place: device and dtype.
        block_size: tokens of a cache block.
        normed: whether queries and keys have a norm, as in Qwen3.
        window: keys that a query sees at most, None for all.
        calls: how many sets; default: as many as it takes, up to `MAX_CALLS`.
        max_batch: rows that the workspace is for; default: those of the batch.

    Attributes:
        bytes: keys and values that a call reads.
        k_cache, v_cache: [calls * blocks, block_size, Hk, D].
        tables: int32 [B, W] of each call, blocks in random order.
        lens, positions: int32 [B].
        slots: int32 [B] of each call, where the new keys go.
        qkv, q: [B, width] and [B, Hq, D].
        norm: [D] or None.
    """

    def __init__(
        self,
        heads: Heads,
        contexts: Sequence[int],
        place: Place,
        block_size: int = 256,
        *,
        normed: bool = False,
        window: int | None = None,
        calls: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        self.heads, self.contexts = heads, list(contexts)
        batch, device = len(contexts), place.device
        blocks = batch * -(-max(contexts) // block_size)
        self.bytes = heads.kv_bytes(sum(min(each, window or each) for each in contexts), place.dtype.itemsize)
        self.calls = calls or min(place.copies(self.bytes), MAX_CALLS)
        shape = (self.calls * blocks, block_size, heads.num_kv_heads, heads.head_dim)
        self.k_cache, self.v_cache = place.normal(*shape), place.normal(*shape)
        order = torch.randperm(shape[0], device=device).to(torch.int32)
        tables = order.view(self.calls, batch, blocks // batch)
        for row, context in enumerate(contexts):
            if behind := context % block_size:
                last_blocks = tables[:, row, context // block_size].long()
                for cache in (self.k_cache, self.v_cache):
                    cache[last_blocks, behind:] = float("nan")
        self.lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        self.positions = self.lens - 1
        last = (self.positions // block_size).long()[None, :, None].expand(self.calls, -1, -1)
        slots = tables.gather(2, last)[:, :, 0] * block_size + self.positions % block_size
        # Tensors of their own, as aligned as an engine's are, not slices: or other kernels would be compiled for some.
        self.tables, self.slots = [table.clone() for table in tables], [each.clone() for each in slots]
        self.qkv = place.normal(batch, heads.width)
        self.q = place.normal(batch, heads.num_heads, heads.head_dim)
        angles = torch.rand(max(contexts), heads.head_dim // 2, device=device) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.norm = torch.ones(heads.head_dim, dtype=place.dtype, device=device) if normed else None
        self.scale = heads.head_dim**-0.5
        self.workspace = DecodeWorkspace.allocate(
            max_batch or batch, heads.num_heads, heads.num_kv_heads, heads.head_dim, device
        )

    def poison_new_keys(self, call: int) -> None:
        """NaN where the new tokens of a call go, so that a key or value which is not written shows."""
        for cache in (self.k_cache, self.v_cache):
            cache.flatten(0, 1)[self.slots[call].long()] = float("nan")

    def new_keys(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values [B, Hk, D] at the slots of a call."""
        slots = self.slots[call].long()
        return self.k_cache.flatten(0, 1)[slots], self.v_cache.flatten(0, 1)[slots]
