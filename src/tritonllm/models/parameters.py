"""What a module with fused or sharded parameters tells the weight loader about itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class CheckpointTensor(NamedTuple):
    """One tensor of a checkpoint that fills a parameter, or one slot of a fused parameter.

    Fields:
        leaf: last component of its name, "weight" or "bias".
        slot: which part of a fused parameter it fills ("q", "gate", ...); None for a parameter of its own.
        shape: shape of the whole tensor as stored in the checkpoint, before any sharding.
    """

    leaf: str
    slot: str | None
    shape: tuple[int, ...]


@runtime_checkable
class HoldsCheckpointTensors(Protocol):
    """A module that maps checkpoint tensors to its own parameters, shard by shard."""

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Yield every checkpoint tensor that this module itself (not its children) needs."""

    def load_tensor(self, leaf: str, slot: str | None, tensor: torch.Tensor) -> None:
        """Copy this rank's shard of the whole `tensor` into the parameter, casting to the parameter's dtype.

        Raises:
            CheckpointError: the tensor has another shape than the one announced.
        """
