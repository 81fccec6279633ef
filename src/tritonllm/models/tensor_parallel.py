"""The tensor-parallel group as layers see it: a rank, a size, and the two collectives they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonllm.errors import ConfigError


@dataclass(frozen=True)
class TPGroup:
    """A group of one rank, which every layer takes from the start; larger groups override the collectives.

    Attributes:
        rank: this process, `0 <= rank < size`.
        size: number of processes that hold one model together.
    """

    rank: int = 0
    size: int = 1

    def split(self, count: int, what: str) -> tuple[int, int]:
        """`(start, length)` of this rank's part of `count` items.

        Raises:
            ConfigError: `count` cannot be split evenly over the ranks.
        """
        if count % self.size:
            raise ConfigError(
                f"{what} = {count} cannot be split over world_size = {self.size}; use a divisor of {count}"
            )
        length = count // self.size
        return self.rank * length, length

    def split_kv_heads(self, count: int) -> tuple[int, int]:
        """As `split`, but with fewer heads than ranks each head is held by several ranks."""
        if count >= self.size or self.size % count:
            return self.split(count, "num_kv_heads")
        return self.rank // (self.size // count), 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; the tensor itself in a group of one."""
        return tensor
