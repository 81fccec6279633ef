"""The tensor-parallel group as layers see it: a rank, a size, and the collectives they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonllm.config import ModelConfig
from tritonllm.errors import ConfigError
from tritonllm.kernels.norm import add_rms_norm


@dataclass(frozen=True)
class TPGroup:
    """A group of one rank, which every layer takes from the start; larger groups override the collectives.

    Without that a larger group has the shapes of one of its ranks, for meta tensors.

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
        """Sum over the ranks, in place; the tensor itself in a group of one."""
        return tensor

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`add_rms_norm` of the sum of x over the ranks; every rank has the same residual, and keeps the same."""
        return add_rms_norm(x, residual, weight, eps)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, stacked in the order of the ranks: `[...]` to `[size, ...]`."""
        return tensor.expand(self.size, *tensor.shape)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return value

    def check(self) -> None:
        """Raise if a rank is known to be lost; for long work in which no collective would notice."""

    def close(self, failed: bool = False) -> None:
        """Leave the group. After a failure nobody is waited for."""


def vocab_shard(vocab_size: int, tp: TPGroup) -> tuple[int, int]:
    """`(start, length)` of this rank's rows of a vocabulary matrix.

    Over several ranks every shard starts at a multiple of 4 (one noise call of the sampler feeds four ids) and the
    last may be padded.
    """
    if tp.size == 1:
        return 0, vocab_size
    length = -(-vocab_size // (4 * tp.size)) * 4
    return tp.rank * length, length


def check_world_size(model: ModelConfig, world_size: int) -> None:
    """Refuse a number of ranks over which a model cannot be split, before any process starts.

    Raises:
        ConfigError: says which size of the model stands in the way, and which numbers of ranks do.
    """
    problem = _obstacle(model, world_size)
    if problem is not None:
        valid = [size for size in range(1, model.num_heads + 1) if _obstacle(model, size) is None]
        raise ConfigError(
            f"world_size={world_size} does not fit this model: {problem}; use one of {', '.join(map(str, valid))}."
        )


def _obstacle(model: ModelConfig, size: int) -> str | None:
    for name in ("num_heads", "intermediate_size"):
        if getattr(model, name) % size:
            return f"{name}={getattr(model, name)} cannot be split over {size} ranks"
    kv_heads = model.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"num_kv_heads={kv_heads} can neither be split over {size} ranks nor be copied to equally many of them"
    if vocab_shard(model.vocab_size, TPGroup(size - 1, size))[0] >= model.vocab_size:
        return f"vocab_size={model.vocab_size} leaves a rank of {size} without tokens"
    return None
