"""The collectives of real groups, of ranks in threads, and what groups need from the outside."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tritonllm.kernels.reference import elementwise
from tritonllm.models.collectives import DistributedGroup
from tritonllm.models.peer_memory import _NumberedStore, reaches_all
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
