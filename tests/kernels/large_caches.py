"""Caches of more than 2^31 elements: for a GPU alone."""

from __future__ import annotations

import torch


def two_large_caches(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches of 8194 blocks of 256 x 8 x 128, and tables [2, 4] of equal blocks: the first four and the last four.

    Block 8192 is the first whose element offset needs more than 31 bits.
    """
    caches = []
    for seed in (1, 2):
        generator = torch.Generator(device).manual_seed(seed)
        cache = torch.full((8194, 256, 8, 128), float("nan"), dtype=torch.bfloat16, device=device)
        cache[:4] = torch.randn(4, 256, 8, 128, generator=generator, device=device)
        cache[-4:] = cache[:4]
        caches.append(cache)
    tables = torch.tensor([[0, 1, 2, 3], [8190, 8191, 8192, 8193]], dtype=torch.int32, device=device)
    return caches[0], caches[1], tables
