"""All-reduces through shared memory: between processes that interpret the kernels, and by one rank on its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peer_ranks import EPS, Call, check_call, run_ranks, terms, view

from tritonllm.errors import KernelError
from tritonllm.kernels import peer_buffer
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.peer_all_reduce import (
    Norm,
    choose_plan,
    one_shot_fits,
    plan_one_shot,
    plan_two_shot,
    two_shot_fits,
)
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, SLOT_BYTES, PeerBuffer, buffer_bytes, words_bytes
from tritonllm.models.peer_group import PeerGroup

interpreted = pytest.mark.skipif(not interpreting(), reason="between GPUs, tests/gpu/test_communication.py")

F16, F32 = torch.float16, torch.float32
CALLS = [
    Call("one_shot", 3, 64, F16),
    Call("two_shot", 3, 64, F16),
    Call("one_shot", 2, 36, F32, normed=False, padding=4),
    Call("one_shot", 3, 64, F16, parts=3),
    Call("two_shot", 7, 100, F32, normed=False),
    Call("two_shot", 7, 36, F16, parts=2, padding=4),
    Call("one_shot", 1, 96, F16, normed=False),
    Call("one_shot", 1, 96, F16, normed=False),
    Call("two_shot", 1, 20, F16),
]


def meta_buffer(size: int, num_channels: int = MAX_CHANNELS) -> PeerBuffer:
    addresses = torch.empty(size, dtype=torch.int64, device="meta")
    state = torch.empty(MAX_CHANNELS + 1, dtype=torch.int32, device="meta")
    return PeerBuffer(0, size, addresses, state, num_channels)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arrivals(call: Call, memory: torch.Tensor) -> list[Callable[[], None]]:
    """What rank 0 of two sends to rank 1 in the first all-reduce, put where the layout has it, in the order of time."""
    sent, mine = terms(call, 0, 0), terms(call, 0, 1)
    columns, share = call.columns, -(-call.columns // 16) * 8
    words = memory[1, : words_bytes(2)].view(torch.int64).view(-1, 2, SLOT_BYTES // 8)
    parts, sums = memory[1, words_bytes(2) : -MAX_CHANNELS * 64].view(F32).view(2, -1, SLOT_BYTES // 4)
    flags = memory[1, -MAX_CHANNELS * 64 :].view(torch.int32).view(-1, 2, peer_buffer.MAX_RANKS)
    slots = [(row, 2 * row + 1) for row in range(call.rows)]  # the first all-reduce has count 1, which is odd

    def send_words() -> None:
        for row, slot in slots:
            words[slot, 0, :columns] = (sent[row].view(torch.int32).long() & 0xFFFFFFFF) | (1 << 32)

    def send_parts() -> None:
        for row, slot in slots:
            parts[slot, : columns - share] = sent[row, share:]
            flags[row, 0, 0] = 1

    def send_sums() -> None:
        for row, slot in slots:
            sums[slot, :share] = sent[row, :share] + mine[row, :share]
            flags[row, 1, 0] = 1

    return [send_words] if call.algorithm == "one_shot" else [send_parts, send_sums]


@interpreted
@pytest.mark.parametrize(
    ("algorithm", "late"), [("one_shot", 0), ("one_shot", 1), *(("two_shot", n) for n in range(3))]
)
@pytest.mark.parametrize("columns", [64, 100])
def test_a_rank_reads_and_writes_what_the_layout_says(algorithm: str, late: int, columns: int) -> None:
    """Rank 1 of two on its own. Of what rank 0 would have sent the last comes late, and is waited for."""
    call = Call(algorithm, 2, columns, F32)
    memory = torch.zeros(2, buffer_bytes(2), dtype=torch.uint8)
    buffer = view(memory, 1)
    sends = arrivals(call, memory)
    on_time, delayed = sends[: len(sends) - late], sends[len(sends) - late :]
    for send in on_time:
        send()
    timers = [threading.Timer(0.5 * (1 + place), send) for place, send in enumerate(delayed)]
    timers.append(threading.Timer(20, PeerGroup(buffer).stop))  # it waits in vain
    for timer in timers:
        timer.start()
    check_call(call, 0, buffer)
    timers[-1].cancel()
    assert not any(timer.is_alive() for timer in timers[:-1])
    assert buffer.state.tolist() == [1, 1] + [0] * (MAX_CHANNELS - 1)


@interpreted
@pytest.mark.parametrize(
    ("size", "rounds"),
    [(2, 4), (3, 2), *(pytest.param(size, 4, marks=pytest.mark.slow) for size in (3, 4, 5, 8))],
)
def test_ranks_add_up_in_their_order(size: int, rounds: int) -> None:
    """Bit for bit, on every rank, over calls of other sizes one after the other, of fewer channels than rows."""
    run_ranks(size, CALLS * rounds, num_channels=3, seconds=60 + 60 * rounds)


@interpreted
def test_counts_begin_again_after_the_largest() -> None:
    run_ranks(2, CALLS[:2] * 3, count=2**31 - 3)


@interpreted
@pytest.mark.parametrize("plan", [plan_one_shot, plan_two_shot])
def test_a_rank_that_is_stopped_waits_no_longer(plan) -> None:
    buffer = view(torch.zeros(3, buffer_bytes(3), dtype=torch.uint8), 0)
    group = PeerGroup(buffer)
    group.stop()
    x = torch.ones(2, 64)
    plan(x, x, None, buffer).run()
    assert buffer.state[:3].tolist() == [1, 1, 0]


@interpreted
def test_a_group_takes_what_a_plan_takes() -> None:
    buffer = view(torch.zeros(2, buffer_bytes(2), dtype=torch.uint8), 0)
    group = PeerGroup(buffer)
    group.stop()  # nobody else is there
    for refused in (torch.ones(64), torch.ones(2, 64).t(), torch.ones(0, 64), torch.ones(2, 64, dtype=torch.int32)):
        assert not group.all_reduce(refused, refused)
    large = torch.ones(3 * MAX_CHANNELS, 8192)
    assert not group.all_reduce(large, large)
    assert not buffer.state[:MAX_CHANNELS].any()
    assert group.all_reduce(torch.ones(2, 64), torch.ones(2, 64))
    assert buffer.state[:3].tolist() == [1, 1, 0]


@pytest.mark.parametrize("size", range(2, 9))
def test_slots_are_apart_and_inside_the_buffer(size: int) -> None:
    """Sizes that fit stay inside a slot, and the regions follow each other."""
    buffer = meta_buffer(size)
    assert buffer_bytes(size) % 16 == words_bytes(size) % 16 == 0
    for dtype in (torch.bfloat16, F32):
        for columns in (64, 576, 1000, 4096, 5120, 8192, 8200, 16384):
            for rows in (1, 64, 65, 128, 129, 256, 1000):
                if one_shot_fits(rows, columns, dtype, buffer):
                    launch = plan_one_shot(
                        meta(rows, columns, dtype=dtype), meta(rows, columns, dtype=dtype), None, buffer
                    )
                    assert launch.grid[0] <= peer_buffer.ONE_SHOT_CHANNELS
                    assert columns * dtype.itemsize * 2 <= SLOT_BYTES
                if two_shot_fits(rows, columns, dtype, buffer):
                    launch = plan_two_shot(
                        meta(rows, columns, dtype=dtype), meta(rows, columns, dtype=dtype), None, buffer
                    )
                    assert launch.grid[0] <= MAX_CHANNELS
                    assert launch.grid[0] * launch.args["rows"] >= rows
                    assert launch.args["rows"] * size * launch.constexprs["SHARE"] * dtype.itemsize <= SLOT_BYTES
                    assert size * launch.constexprs["SHARE"] >= columns


def test_a_plan_has_no_more_programs_than_the_gpu_has_multiprocessors() -> None:
    """They wait for each other's peers, so all have to run at once."""
    buffer = meta_buffer(2, num_channels=30)
    assert not one_shot_fits(31, 64, F32, buffer)
    assert plan_two_shot(meta(31, 64), meta(31, 64), None, buffer).grid == (16,)


def test_small_sums_are_one_shot_larger_ones_two_and_the_largest_for_others() -> None:
    two, eight = meta_buffer(2), meta_buffer(8)
    choice = {
        (rows, buffer.size): choose_plan(rows, 8192, torch.bfloat16, buffer)
        for buffer in (two, eight)
        for rows in (1, 8, 64, 65, 256, 257, 4096)
    }
    assert [choice[rows, 2] for rows in (1, 8, 64)] == [plan_one_shot] * 3
    assert [choice[rows, 2] for rows in (65, 256)] == [plan_two_shot] * 2
    assert choice[257, 2] is None
    assert [choice[rows, 8] for rows in (1, 8, 64, 4096)] == [plan_one_shot, plan_one_shot, plan_two_shot, None]
    assert choose_plan(8, 8192, torch.float64, two) is None
    assert choose_plan(1, 32768, torch.bfloat16, two) is None


def test_any_number_of_rows_is_the_same_kernel() -> None:
    for plan, counts in ((plan_one_shot, (1, 7, 64)), (plan_two_shot, (1, 7, 128, 256))):
        launches = [plan(meta(rows, 4096), meta(rows, 4096), None, meta_buffer(2)) for rows in counts]
        assert all((one.constexprs, one.options) == (launches[0].constexprs, launches[0].options) for one in launches)


@pytest.mark.parametrize("plan", [plan_one_shot, plan_two_shot])
def test_refuses_what_does_not_fit(plan) -> None:
    buffer, x = meta_buffer(2), meta(2, 64)
    norm = Norm(meta(2, 64), meta(64), EPS)
    for bad, message in [
        ((meta(2, 65536), meta(2, 65536), None, buffer), "does not fit the slots"),
        ((meta(2, 64, dtype=torch.int16),) * 2 + (None, buffer), "does not fit the slots"),
        ((x, x, None, meta_buffer(9)), "2 to 8 ranks, not 9"),
        ((x, x, None, meta_buffer(1)), "2 to 8 ranks, not 1"),
        ((meta(3, 64), x, None, buffer), "x must be"),
        ((meta(4, 2, 64), x, None, buffer), r"parts of it in float32 \[S, T, H\], not bfloat16\[4, 2, 64\]"),
        ((x, meta(64, 2).t(), None, buffer), "out must be contiguous"),
        ((x, x, replace(norm, residual=meta(3, 64)), buffer), "residual must match"),
        ((x, x, replace(norm, weight=meta(63)), buffer), "weight must be contiguous"),
    ]:
        with pytest.raises(KernelError, match=message):
            plan(*bad)
