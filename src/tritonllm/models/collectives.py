"""The collectives of a group of several ranks: NCCL between GPUs, gloo between CPUs, and all-reduces of our own.

Those serve between GPUs of one host that NVLink joins, for the sizes at which they are faster than NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritonllm.kernels.norm import add_rms_norm
from tritonllm.kernels.peer_all_reduce import Norm
from tritonllm.models.peer_group import PeerGroup
from tritonllm.models.peer_memory import reaches_all, share_memory
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
        peers: the all-reduces through the memory of all ranks, None where all of them are torch's.
    """

    backend: Any = None
    device: torch.device = torch.device("cpu")
    lost: Callable[[], None] | None = None
    peers: PeerGroup | None = None

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        store: dist.Store,
        device: torch.device,
        lost: Callable[[], None] | None = None,
        all_reduce: str = "auto",
    ) -> DistributedGroup:
        """Meet the other ranks in a store that all of them share; waits for them.

        Args:
            rank, size: this rank's place.
            store: empty, and of this group alone.
            device: where this rank computes.
            lost: raises if a rank is known to be lost.
            all_reduce: as in `EngineConfig`, the same on every rank.
        """
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            group = cls(rank, size, dist.ProcessGroupNCCL(store, rank, size, options), device, lost)
            return group._with_peers(store) if all_reduce == "auto" else group
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        # The host's name need not resolve, and nothing listens to the network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options), device, lost)

    def _with_peers(self, store: dist.Store) -> DistributedGroup:
        """This group, with all-reduces through the memory of all ranks if every rank reaches it."""
        if not self.minimum(reaches_all(self.rank, self.size, store, self.device)):
            return self
        peers = PeerGroup(share_memory(self.rank, self.size, store, self.device))
        self.minimum(0)  # every rank has cleared its buffer and mapped the others
        return replace(self, peers=peers)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() and not (self.peers is not None and self.peers.all_reduce(tensor, tensor)):
            self.backend.allreduce([tensor]).wait()
        return tensor

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if self.peers is not None:
            out = torch.empty_like(residual, memory_format=torch.contiguous_format)
            if self.peers.all_reduce(x, out, Norm(residual, weight, eps)):
                return out
        if x.dim() == 3:
            x = x.sum(0).to(residual.dtype)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

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
        backend, peers = self.backend, self.peers
        if peers is not None and failed:
            peers.stop()
        if backend is not None and self.device.type == "cuda":
            name = "abort" if failed else "shutdown"
            # Before torch 2.7 these were private.
            leave = getattr(backend, name if hasattr(backend, name) else f"_{name}")
            leave()
        # Layers refer to the group until they are collected; threads and connections end now.
        object.__setattr__(self, "backend", None)
        if not failed:  # otherwise kernels may still be on their way through that memory
            object.__setattr__(self, "peers", None)
