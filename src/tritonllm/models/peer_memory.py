"""A buffer on each GPU of a group that all its GPUs write into, through torch's symmetric memory, without multicast."""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import Any

import torch
import torch.distributed as dist

from tritonllm.errors import EngineError
from tritonllm.kernels.launch import gpu_of
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, MAX_RANKS, PeerBuffer, buffer_bytes

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver


def reaches_all(rank: int, size: int, store: dist.Store, device: torch.device) -> bool:
    """Whether a rank's GPU writes into the memory of all others, with atomics: GPUs of one host, linked by NVLink.

    Every rank asks, and each answers for itself.
    """
    usable = device.type == "cuda" and torch.version.hip is None and size <= MAX_RANKS and _without_multicast(device)
    store.set(f"gpu/{rank}", _uuid(device) if usable else "")
    gpus = [store.get(f"gpu/{other}").decode() for other in range(size)]
    if not all(gpus) or len(set(gpus)) < size:  # ranks on one GPU would take turns to wait for each other
        return False
    here = {_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    others = [gpu for other, gpu in enumerate(gpus) if other != rank]
    return all(gpu in here and _has_atomics(device, here[gpu]) for gpu in others)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _without_multicast(device: torch.device) -> bool:
    """Have torch make no multicast object beside the buffers: True if it heeds that, and has symmetric memory."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
    except (ImportError, AttributeError):
        return False


def _has_atomics(device: torch.device, other: int) -> bool:
    value = ctypes.c_int(0)
    failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
        ctypes.byref(value), _NATIVE_ATOMICS, device.index, other
    )
    return not failed and bool(value.value)


def share_memory(rank: int, size: int, store: dist.Store, device: torch.device) -> PeerBuffer:
    """Allocate the buffers of a group and map them all; every rank calls it, and waits for the others.

    No rank may use its buffer before all have returned.

    Raises:
        EngineError: torch made a multicast object all the same.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    # torch finds the store by the name of a group, and reads the rank from it.
    numbered = _NumberedStore(store)
    group = dist.ProcessGroup(numbered, rank, size)
    name: Any = f"tritonllm {uuid.uuid4()}"  # torch keeps what it learned by a name, beyond the life of a group
    memory = _SymmetricMemory.empty_strided_p2p((buffer_bytes(size),), (1,), torch.uint8, device)
    memory.zero_()
    torch.cuda.synchronize(device)
    _register_process_group(name, group)
    try:
        try:
            handle = _SymmetricMemory.rendezvous(memory, name)
        except RuntimeError as error:
            if "group info" not in str(error):
                raise
            # Before torch looked for groups by name, they had to be announced.
            _SymmetricMemory.set_group_info(name, rank, size, numbered)
            handle = _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)
    if handle.multicast_ptr:
        raise EngineError(
            "torch set up NVLink multicast though TORCH_SYMM_MEM_DISABLE_MULTICAST=1; set all_reduce='nccl'"
        )
    return PeerBuffer(
        rank=rank,
        size=size,
        addresses=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        state=torch.zeros(MAX_CHANNELS + 1, dtype=torch.int32, device=device),
        num_channels=min(MAX_CHANNELS, gpu_of(device).num_sms),
        memory=(memory, handle),
    )


class _NumberedStore(dist.Store):
    """A store for one rendezvous of symmetric memory.

    torch numbers the exchanges of a process, over all groups: a process that has made one before and a new one would
    wait for each other under different keys. Here they are numbered from 0 for each group.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._exchanges: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, _, rank = key.rpartition("/")
        return f"peers/{self._exchanges.setdefault(prefix, len(self._exchanges))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)
