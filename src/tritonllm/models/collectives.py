"""The collectives of a group of several ranks: NCCL between GPUs, gloo between CPUs, and all-reduces of our own.

Those serve between GPUs of one host that NVLink joins, for the sizes at which they are faster than NCCL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from tritonllm.errors import EngineError
from tritonllm.kernels.norm import add_rms_norm
from tritonllm.kernels.peer_all_reduce import Norm
from tritonllm.models.peer_group import PeerGroup
from tritonllm.models.peer_memory import reaches_all, share_memory
from tritonllm.models.tensor_parallel import TPGroup

logger = logging.getLogger("tritonllm")
_TIMEOUT = timedelta(minutes=30)
"""Longer than any step or load: a rank that died is noticed by its connection or its process, not by this."""

_WATCHDOG_OFF = "TORCH_NCCL_BLOCKING_WAIT"


def _in_order(options: Any) -> Any:
    """Options of a collective that runs on the caller's stream, as every kernel around it does: no events, no hop."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _reduction(operation: Any) -> Any:
    options = _in_order(dist.AllreduceOptions())
    options.reduceOp = operation
    return options


_ON_CALLERS_STREAM = hasattr(dist.AllreduceOptions(), "asyncOp")  # torch 2.8 and newer
_SUM, _MIN = _reduction(dist.ReduceOp.SUM), _reduction(dist.ReduceOp.MIN)
_GATHER = _in_order(AllgatherOptions())


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
        address: str = "127.0.0.1",
        all_reduce: str = "auto",
    ) -> DistributedGroup:
        """Meet the other ranks in a store that all of them share; waits for them.

        The first collective makes NCCL's connections, and a rank that is lost meanwhile cannot be told to NCCL. So it
        happens here, where the caller still can walk away.

        Args:
            rank, size: this rank's place.
            store: empty, and of this group alone.
            device: where this rank computes.
            lost: raises if a rank is known to be lost.
            address: this host's own, at which other ranks reach it through gloo; NCCL finds its way by itself.
            all_reduce: as in `EngineConfig`, the same on every rank.
        """
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            with _without_watchdog():
                backend = dist.ProcessGroupNCCL(store, rank, size, options)
            group = cls(rank, size, backend, device, lost)
            group.minimum(0)
            return group._with_peers(store) if all_reduce == "auto" else group
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        # The host's name need not resolve, and on one host nothing listens to the network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options), device, lost)

    def _with_peers(self, store: dist.Store) -> DistributedGroup:
        """This group, with all-reduces through the memory of all ranks if every rank reaches it."""
        if not self.minimum(reaches_all(self.rank, self.size, store, self.device)):
            return self
        peers = None
        try:
            peers = PeerGroup(share_memory(self.rank, self.size, store, self.device))
        except EngineError:
            raise
        except RuntimeError as error:
            logger.warning("rank %d: sums go through NCCL, as GPUs cannot share memory here: %s", self.rank, error)
        # Then every rank has cleared its buffer and mapped the others.
        return replace(self, peers=peers) if self.minimum(peers is not None) else self

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() and not (self.peers is not None and self.peers.all_reduce(tensor, tensor)):
            _wait(self.backend.allreduce([tensor], _SUM))
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
            _wait(self.backend._allgather_base(gathered, tensor.contiguous(), _GATHER))
        return gathered.view(self.size, *tensor.shape)

    def minimum(self, value: int) -> int:
        held = torch.tensor([value], dtype=torch.int64, device=self.device)
        _wait(self.backend.allreduce([held], _MIN))
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


def _wait(work: Any) -> None:
    """Order what follows behind a collective; one on the caller's stream gives nothing to wait for."""
    if work is not None:
        work.wait()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL groups made inside have no watchdog of torch's.

    It would take the whole process down a minute after a peer was lost, while the engine raises an error and lives.
    The switch is an environment variable, read when a group is made; its other meaning, that the host waits for every
    collective, touches none that runs on the caller's stream.
    """
    before = os.environ.get(_WATCHDOG_OFF)
    if _ON_CALLERS_STREAM:
        os.environ[_WATCHDOG_OFF] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WATCHDOG_OFF, None)
        if before is not None:
            os.environ[_WATCHDOG_OFF] = before
