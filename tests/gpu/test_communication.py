"""All-reduces through the memory of two GPUs: against sums in fp32, in graphs replayed under stalls, and stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hf_twins import make_engine

from tritonllm import SamplingParams
from tritonllm.bench.collectives import run_on_ranks
from tritonllm.engine.cuda_graphs import capture
from tritonllm.kernels.launch import Launch, compiling_ahead
from tritonllm.kernels.peer_all_reduce import Norm, Plan, one_shot_fits, plan_one_shot, plan_two_shot, two_shot_fits
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, PeerBuffer
from tritonllm.kernels.reference import elementwise
from tritonllm.models.collectives import DistributedGroup
from tritonllm.testing.tensors import bits
from tritonllm.testing.tolerances import tolerance

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

EPS = 1e-6
SIZES = [(1, 8192), (3, 4096), (8, 8192), (64, 4096), (5, 576), (100, 5120), (256, 8192), (129, 4096)]
FEW = {"max_num_sequences": 4, "max_num_batched_tokens": 512}
PLANS = [(plan_one_shot, one_shot_fits), (plan_two_shot, two_shot_fits)]


def draws(group: DistributedGroup, number: int) -> torch.Generator:
    return torch.Generator(group.device).manual_seed(100 * number + group.rank)


class Sum(NamedTuple):
    """What is added up: `parts` is 0 for terms as they are, else how many parts of each there are."""

    plan: Plan
    rows: int
    columns: int
    dtype: torch.dtype
    parts: int


def all_sums(buffer: PeerBuffer) -> Iterator[Sum]:
    """Every algorithm, dtype and form of input."""
    for (plan, fits), (rows, columns) in product(PLANS, SIZES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if fits(rows, columns, dtype, buffer):
                yield from (Sum(plan, rows, columns, dtype, parts) for parts in (0, 3))


def launches_of(sums: list[Sum], buffer: PeerBuffer, device: torch.device) -> Iterator[Launch]:
    """Of each, alone and with its norm, on tensors that hold nothing."""
    for plan, rows, columns, dtype, parts in sums:
        out = torch.empty(rows, columns, dtype=dtype, device=device)
        x = torch.empty(parts, rows, columns, device=device) if parts else out
        yield plan(x, out, None, buffer)
        yield plan(x, out, Norm(torch.empty_like(out), out.new_empty(columns), EPS), buffer)


def compile_side_by_side(group: DistributedGroup) -> None:
    """The kernels of `check_sums`: 80, which take minutes one after another. Each rank makes its share."""
    assert group.peers is not None
    buffer = group.peers.buffer
    kinds = {(one.plan, *one[2:]): one for one in all_sums(buffer)}  # no kernel is for a number of rows
    with compiling_ahead():
        for launch in launches_of(list(kinds.values())[group.rank :: group.size], buffer, group.device):
            launch.run()
    group.minimum(0)  # now they are on disk


def check_sums(group: DistributedGroup) -> int:
    """Compares every sum; returns their number."""
    assert group.peers is not None
    compile_side_by_side(group)
    buffer, nccl, compared = group.peers.buffer, replace(group, peers=None), 0
    for plan, rows, columns, dtype, parts in all_sums(buffer):
        compared += 1
        shape = (max(parts, 1), rows, columns)
        x = torch.randn(shape, generator=draws(group, compared), device=group.device)
        x = x if parts else x.to(dtype)[0]
        mine = x.clone() if not parts else (x[0] + x[1] + x[2]).to(dtype)
        total = nccl.all_reduce(mine.float()).to(dtype)  # of two terms: exact, whatever the order

        out = torch.full_like(total, float("nan"))
        plan(x, out, None, buffer).run()
        assert torch.equal(bits(out), bits(total)), (plan, rows, columns, dtype, parts)

        shared = torch.Generator(group.device).manual_seed(compared)
        residual = torch.randn(rows, columns, generator=shared, device=group.device).to(dtype)
        weight = torch.randn(columns, generator=shared, device=group.device).to(dtype)
        expected_residual = residual.clone()
        expected = elementwise.add_rms_norm(total, expected_residual, weight, EPS)
        plan(x, out, Norm(residual, weight, EPS), buffer).run()
        assert torch.equal(bits(residual), bits(expected_residual)), (plan, rows, columns, dtype, parts)
        torch.testing.assert_close(out, expected, **tolerance("add_rms_norm", dtype))
        both = nccl.all_gather(out)
        assert torch.equal(bits(both[0]), bits(both[1])), "the ranks differ"
    return compared


def replay_under_stalls(group: DistributedGroup, replays: int) -> int:
    """Wrong elements on the worst rank over many replays of one graph, whose terms change with every replay."""
    assert group.peers is not None
    buffer, device = group.peers.buffer, group.device
    stalls = random.Random(group.rank)
    step = torch.zeros((), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    sizes = [(1, 8192), (64, 4096), (256, 4096), (2, 8192), (8, 4096), (256, 8192)]

    def chain() -> None:
        step.add_(1).remainder_(100)  # small integers, which bfloat16 holds, and their sums too
        for index, (rows, columns) in enumerate(sizes * 2):
            if stalls.random() < 0.3:
                torch.cuda._sleep(stalls.randrange(100_000))
            offset = torch.arange(rows, device=device)[:, None] % 7 + torch.arange(columns, device=device) % 5
            x = (offset + step + (index + 1) * group.rank).bfloat16()
            plan = plan_one_shot if rows <= 64 and (index + rows) % 2 else plan_two_shot
            plan(x, x, None, buffer).run()
            wrong.add_((x.float() != 2 * (offset + step) + (index + 1)).sum())

    graph = capture(chain, None)
    for _ in range(replays):
        if stalls.random() < 0.02:
            time.sleep(stalls.random() * 0.01)
        graph.replay()
    return -group.minimum(-int(wrong.item()))


def stop_alone(group: DistributedGroup) -> float:
    """Seconds until a kernel ends that waits for a rank which never comes, once it is told."""
    assert group.peers is not None
    seconds, x = 0.0, torch.ones(4, 4096, device=group.device)
    launches = [plan(x, x, None, group.peers.buffer) for plan in (plan_one_shot, plan_two_shot)]
    for launch in launches:  # with the other rank; loading a kernel may wait for all that runs
        launch.run()
    torch.cuda.synchronize()
    if group.rank == 0:
        for launch in launches:
            launch.run()
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query()
        start = time.monotonic()
        group.peers.stop()
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
        assert group.peers.buffer.state[MAX_CHANNELS].item() == 1
    group.minimum(0)  # its memory is written into until then
    return seconds


class Outcome(NamedTuple):
    """What `check_sums`, `replay_under_stalls` and `stop_alone` return."""

    compared: int
    wrong: int
    seconds: float


def in_turn(group: DistributedGroup, replays: int) -> Outcome:
    return Outcome(check_sums(group), replay_under_stalls(group, replays), stop_alone(group))  # which is the end of it


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Of one pair of ranks, which take longer to start than to do it."""
    return run_on_ranks(2, in_turn, 3000)


def test_sums_and_norms_are_those_of_fp32_and_the_same_on_both_ranks(outcome: Outcome) -> None:
    assert outcome.compared >= 50


def test_thousands_of_replays_under_stalls(outcome: Outcome) -> None:
    assert outcome.wrong == 0


def test_a_kernel_that_waits_in_vain_is_stopped(outcome: Outcome) -> None:
    assert outcome.seconds < 1


def test_an_engine_gives_the_same_tokens_by_either_way() -> None:
    """In float32, where only the order differs in which a norm adds up squares."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True, seed=1, **kind) for kind in ({"temperature": 0}, {})]
    results = []
    for all_reduce in ("nccl", "auto"):
        with make_engine("Qwen3-0.6B", "float32", world_size=2, all_reduce=all_reduce, **FEW) as llm:
            assert (llm.runner.tp.peers is not None) == (all_reduce == "auto")
            results.append(llm.generate([[7, 8, 9], list(range(100, 160))], params)["token_ids"])
    assert results[0] == results[1]
