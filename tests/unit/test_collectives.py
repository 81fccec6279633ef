"""The collectives of real groups, of ranks in threads, and what groups need from the outside."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tritonllm.errors import EngineError
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, PeerBuffer, buffer_bytes
from tritonllm.kernels.reference import elementwise
from tritonllm.models import collectives
from tritonllm.models.collectives import DistributedGroup
from tritonllm.models.peer_memory import _NumberedStore, reaches_all, share_memory
from tritonllm.testing.tensors import Draw

CPU = torch.device("cpu")


def on_ranks(size: int, function: Callable[[DistributedGroup], Any]) -> list[Any]:
    """What a function gives on each rank of a gloo group."""
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        group = DistributedGroup.connect(rank, size, store, CPU)
        result = function(group)
        group.close()
        return result

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(rank_main, range(size)))


@pytest.mark.parametrize("parts", [0, 3])
def test_a_sum_with_its_norm_is_both_one_after_the_other(parts: int) -> None:
    """Also of terms that come in parts, which are added up before the ranks'."""
    draw = Draw(3, CPU)
    terms = [draw.normal(max(parts, 1), 4, 16) for _ in range(2)]
    residual, weight = draw.normal(4, 16), draw.normal(16)

    def step(group: DistributedGroup) -> tuple[torch.Tensor, torch.Tensor]:
        mine, kept = terms[group.rank].clone(), residual.clone()
        return group.all_reduce_add_rms_norm(mine if parts else mine[0], kept, weight, 1e-6), kept

    kept = residual.clone()
    expected = elementwise.add_rms_norm(terms[0].sum(0) + terms[1].sum(0), kept, weight, 1e-6)
    for out, after in on_ranks(2, step):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(after, kept)


def test_on_a_cpu_no_memory_is_shared() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(lambda rank: reaches_all(rank, 2, store, CPU), range(2))) == [False, False]
    assert on_ranks(2, lambda group: group.peers) == [None, None]


def test_a_process_that_shared_memory_before_meets_one_that_did_not() -> None:
    """torch counts the exchanges of a process; the keys of a group must not depend on that."""
    store = dist.HashStore()
    numbered = [_NumberedStore(store) for _ in range(2)]
    old, new = (dist.PrefixStore("Memory", one) for one in numbered)  # which calls as torch does, from C++
    for first, exchange in ((7, 0), (8, 1)):
        old.set(f"{first}/0", "old")
        new.set(f"{exchange}/1", "new")
        new.wait([f"{exchange}/0"])
        assert new.get(f"{exchange}/0") == b"old"
        assert old.get(f"{first}/1") == b"new"


class SymmetricMemory:
    """torch's, on a CPU: one buffer for all ranks. It keeps what it learned by the name of a group, as torch does."""

    def __init__(self, multicast_ptr: int = 0) -> None:
        self.stores: dict[str, dist.Store] = {}
        self.multicast_ptr = multicast_ptr

    def empty_strided_p2p(self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.ones(size, dtype=dtype)

    def set_group_info(self, name: str, rank: int, size: int, store: dist.Store) -> None:
        assert name not in self.stores
        self.stores[name] = store

    def rendezvous(self, memory: torch.Tensor, name: str) -> Any:
        if name not in self.stores:
            raise RuntimeError(f"get_group_info: no group info associated with the group name {name}")
        self.stores[name].set("exchange/0", "0")
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * 2, multicast_ptr=self.multicast_ptr)


@pytest.fixture
def symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> SymmetricMemory:
    memory = SymmetricMemory()
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", memory, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return memory


def test_groups_one_after_the_other_have_names_of_their_own(symmetric_memory: SymmetricMemory) -> None:
    """torch keeps the store of a name, while that of an ended group answers no more."""
    for _ in range(3):
        buffer = share_memory(0, 2, dist.HashStore(), CPU)
        memory, _ = buffer.memory
        assert memory.numel() == buffer_bytes(2)
        assert not memory.any()
        assert buffer.addresses.tolist() == [memory.data_ptr()] * 2
    assert len(symmetric_memory.stores) == 3


def test_a_multicast_object_is_refused(symmetric_memory: SymmetricMemory) -> None:
    symmetric_memory.multicast_ptr = 1
    with pytest.raises(EngineError, match="set all_reduce='nccl'"):
        share_memory(0, 2, dist.HashStore(), CPU)


@pytest.mark.parametrize("failing", [{0, 1}, {1}, set()])
def test_where_memory_cannot_be_shared_no_rank_uses_it(
    failing: set[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def share(rank: int, size: int, store: dist.Store, device: torch.device) -> PeerBuffer:
        if rank in failing:
            raise RuntimeError("CUDA driver error: not permitted")
        return PeerBuffer(rank, size, torch.zeros(size, dtype=torch.int64), torch.zeros(MAX_CHANNELS + 1), 2)

    monkeypatch.setattr(collectives, "reaches_all", lambda *place: True)
    monkeypatch.setattr(collectives, "share_memory", share)
    peers = on_ranks(2, lambda group: group._with_peers(dist.HashStore()).peers)
    assert [there is None for there in peers] == [bool(failing)] * 2
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [
        f"rank {rank}: sums go through NCCL, as GPUs cannot share memory here: CUDA driver error: not permitted"
        for rank in sorted(failing)
    ]
