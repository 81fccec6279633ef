"""Ranks as processes of one host, each with Triton's interpreter, whose buffers are memory that all of them map.

Each rank runs the same calls, with random pauses between and inside them, and compares with the sum that it makes by
itself. A buffer is laid out and used as it is on a GPU; what only a GPU has, loads and stores of other strength, is not
tested here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.multiprocessing as multiprocessing

from tritonllm.kernels import peer_all_reduce_kernels
from tritonllm.kernels.peer_all_reduce import Norm, plan_one_shot, plan_two_shot
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, PeerBuffer, buffer_bytes
from tritonllm.kernels.reference import elementwise
from tritonllm.testing.tensors import bits
from tritonllm.testing.tolerances import tolerance

PLANS = {"one_shot": plan_one_shot, "two_shot": plan_two_shot}
EPS = 1e-5


@dataclass(frozen=True)
class Call:
    """An all-reduce of `[rows, columns]`, in place and alone or with the norm; of `parts` float32 parts if above 0."""

    algorithm: str
    rows: int
    columns: int
    dtype: torch.dtype
    normed: bool = True
    parts: int = 0
    padding: int = 0


def view(memory: torch.Tensor, rank: int, num_channels: int = MAX_CHANNELS) -> PeerBuffer:
    """The buffer of a rank whose peers' buffers are the rows of `memory` in this process."""
    size = memory.shape[0]
    addresses = torch.tensor([memory[other].data_ptr() for other in range(size)])
    return PeerBuffer(rank, size, addresses, torch.zeros(MAX_CHANNELS + 1, dtype=torch.int32), num_channels, memory)


def terms(call: Call, number: int, rank: int) -> torch.Tensor:
    """What a rank brings to the call of that number."""
    draw = torch.Generator().manual_seed(1000 * number + rank)
    shape = (max(call.parts, 1), call.rows, call.columns + call.padding)
    x = torch.randn(shape, generator=draw)[..., : call.columns]
    return x if call.parts else x.to(call.dtype)[0]


def expected_sum(call: Call, number: int, size: int) -> torch.Tensor:
    """In fp32, in the order of the ranks, rounded once."""
    total = torch.zeros(call.rows, call.columns)
    for rank in range(size):
        x = terms(call, number, rank)
        if call.parts:
            first, *others = x
            x = first.clone()
            for part in others:
                x += part
        x = x.to(call.dtype).float()
        total = x if rank == 0 else total + x
    return total.to(call.dtype)


def check_call(call: Call, number: int, buffer: PeerBuffer) -> None:
    """Run a call and compare: the sum and the residual bit for bit, the norm within its tolerance."""
    x, total = terms(call, number, buffer.rank), expected_sum(call, number, buffer.size)
    plan = PLANS[call.algorithm]
    if not call.normed:
        out = torch.full_like(total, float("nan")) if call.parts or call.padding else x
        plan(x, out, None, buffer).run()
        assert torch.equal(bits(out), bits(total)), f"rank {buffer.rank}, call {number}: {call}"
        return
    draw = torch.Generator().manual_seed(number)
    residual = torch.randn(call.rows, call.columns + 8, generator=draw).to(call.dtype)[:, : call.columns]
    weight = torch.randn(call.columns, generator=draw).to(call.dtype)
    expected_residual = residual.clone()
    expected = elementwise.add_rms_norm(total, expected_residual, weight, EPS)
    out = torch.full_like(total, float("nan"))
    plan(x, out, Norm(residual, weight, EPS), buffer).run()
    assert torch.equal(bits(residual), bits(expected_residual)), f"rank {buffer.rank}, call {number}: {call}"
    torch.testing.assert_close(out, expected, **tolerance("add_rms_norm", call.dtype))


def _stall(name: str, pauses: random.Random) -> None:
    """Have a function of the kernels, which waits for other ranks, begin with a pause now and then."""
    function = getattr(peer_all_reduce_kernels, name)

    def stalled(*args: object) -> object:
        time.sleep(pauses.choice((0, 0, 0, 0.01)))
        return function(*args)

    setattr(peer_all_reduce_kernels, name, stalled)


def _rank_main(rank: int, memory: torch.Tensor, calls: Sequence[Call], num_channels: int, count: int) -> None:
    torch.set_num_threads(1)
    buffer = view(memory, rank, num_channels)
    buffer.state[:MAX_CHANNELS] = count
    pauses = random.Random(rank)
    _stall("_await_words", pauses)
    _stall("_meet", pauses)
    for number, call in enumerate(calls):
        time.sleep(pauses.choice((0, 0, 0, 0.01)))
        check_call(call, number, buffer)


def run_ranks(
    size: int, calls: Sequence[Call], num_channels: int = MAX_CHANNELS, count: int = 0, seconds: float = 120
) -> None:
    """All calls on all ranks, whose channels have counted up to `count`; raises what a rank raised.

    Ranks that are not done after so many seconds are ended, which is an error: one waits for what never comes.
    """
    memory = torch.zeros(size, buffer_bytes(size), dtype=torch.uint8).share_memory_()
    ranks = multiprocessing.spawn(_rank_main, (memory, calls, num_channels, count), nprocs=size, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not ranks.join(timeout=0.2):
            assert time.monotonic() < deadline, "a rank waits for what never comes"
    finally:
        for process in ranks.processes:
            process.kill()
