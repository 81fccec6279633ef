"""The collectives of a group of several ranks, through torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from tritonllm.models.tensor_parallel import TPGroup

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
        address: str = "127.0.0.1",
    ) -> DistributedGroup:
        """Meet the other ranks in a store that all of them share; waits for them.

        The first collective makes NCCL's connections, and a rank that is lost meanwhile cannot be told to NCCL. So it
        happens here, where the caller still can walk away. `address` is this host's own, at which other ranks reach it
        through gloo; NCCL finds its way by itself.
        """
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            with _without_watchdog():
                backend = dist.ProcessGroupNCCL(store, rank, size, options)
            group = cls(rank, size, backend, device, lost)
            group.minimum(0)
            return group
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _TIMEOUT
        # The host's name need not resolve, and on one host nothing listens to the network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return cls(rank, size, dist.ProcessGroupGloo(store, rank, size, options), device, lost)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            _wait(self.backend.allreduce([tensor], _SUM))
        return tensor

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
        backend = self.backend
        if backend is not None and self.device.type == "cuda":
            name = "abort" if failed else "shutdown"
            # Before torch 2.7 these were private.
            leave = getattr(backend, name if hasattr(backend, name) else f"_{name}")
            leave()
        # Layers refer to the group until they are collected; threads and connections end now.
        object.__setattr__(self, "backend", None)


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
