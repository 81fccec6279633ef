"""Random inputs for kernel tests: hypothesis draws a seed and shapes, the numbers come from a torch.Generator."""

from __future__ import annotations

import torch


class Draw:
    """Tensors from one seed, the same on every device."""

    def __init__(self, seed: int, device: torch.device):
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Standard normal values times `scale`."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def rows(self, tokens: int, columns: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
        """Normal rows [tokens, columns] inside rows longer by `padding`, which holds NaN and must not be read."""
        wide = torch.full((tokens, columns + padding), float("nan"), device=self.device, dtype=dtype)
        wide[:, :columns] = self.normal(tokens, columns, dtype=dtype)
        return wide[:, :columns]

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 values in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, torch.int32)

    def slots(self, tokens: int, num_slots: int) -> torch.Tensor:
        """int32 [tokens]: distinct slots in random order, about a third of them -1."""
        slots = torch.randperm(num_slots, generator=self.generator)[:tokens]
        slots[torch.rand(tokens, generator=self.generator) < 0.3] = -1
        return slots.to(self.device, torch.int32)

    def caches(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, heads_first: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V caches full of NaN in the logical layout, stored with tokens or heads outermost in a block."""
        shape = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        pool = torch.full((2, blocks, *shape, head_dim), float("nan"), device=self.device, dtype=dtype)
        k_cache, v_cache = pool.transpose(2, 3) if heads_first else pool
        return k_cache, v_cache


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaNs compare equal to themselves."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
