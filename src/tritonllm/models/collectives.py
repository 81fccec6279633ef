"""The collectives of a group of several ranks, through torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritonllm.models.tensor_parallel import TPGroup

_TIMEOUT = timedelta(minutes=30)
"""Longer than any step or load: a rank that died is noticed by its connection or its process, not by this."""


@dataclass(frozen=True)
class DistributedGroup(TPGroup):
    """Several ranks that hold one model together.

    The group stands by itself beside torch's default group, so one process can belong to many engines.

    Attributes:
        backend: torch's ProcessGroupNCCL or ProcessGroupGloo.
        device: where this rank computes.
        lost: raises if a rank is known to be lost.
    """

    backend: Any = None
    device: torch.device = torch.device("cpu")
    lost: Callable[[], None] | None = None

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store: dist.Store,
        device: torch.device,
        lost: Callable[[], None] | None = None,
    ) -> DistributedGroup:
        """Meet the other ranks in a store that all of them share; waits for them."""
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return cls(rank, size, dist.ProcessGroupNCCL(store, rank, size, options), device, lost)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        # The host's name need not resolve, and nothing listens to the network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options), device, lost)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self.backend.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        if tensor.numel():
            self.backend._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered.view(self.size, *tensor.shape)

    def minimum(self, value: int) -> int:
        held = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self.backend.allreduce([held], options).wait()
        return int(held.item())

    def check(self) -> None:
        if self.lost is not None:
            self.lost()

    def close(self, failed: bool = False) -> None:
        backend = self.backend
        if backend is not None and self.device.type == "cuda":
            name = "abort" if failed else "shutdown"
            # Before torch 2.7 these were private.
            leave = getattr(backend, name if hasattr(backend, name) else f"_{name}")
            leave()
        # Layers refer to the group until they are collected; threads and connections end now.
        object.__setattr__(self, "backend", None)
