"""Steps in which nobody comes or goes: the same work as from looking at everybody, without looking at everybody."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from fake_runner import FakeEngine

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.steady_batch import SteadyBatch


def requests(seed: int) -> list[tuple[int, Sequence]]:
    """Sequences and the steps in which they arrive."""
    generator = random.Random(seed)
    arriving = []
    for index in range(12):
        prompt = [generator.randint(0, 96) for _ in range(generator.randint(1, 20))]
        params = SamplingParams(max_tokens=generator.randint(1, 40), stop_token_ids=(5,), seed=0, ignore_eos=True)
        arriving.append((generator.choice([0, 0, 0, 11 * index]), Sequence(prompt, params, block_size=4)))
    return arriving


def steps(seed: int, blocks: int) -> tuple[list, list[list[int]]]:
    """What each step decodes, writes and adds, and the completions."""
    engine = FakeEngine(rows=8, budget=16, blocks=blocks)
    arriving = requests(seed)
    done = []
    for step in range(400):
        for when, seq in arriving:
            if when == step:
                engine.add(seq)
        plan = engine.step()
        if plan is not None:
            grown = sorted((row, index) for row, index, _ in plan.new_blocks)  # which free block it is does not matter
            updates = [(update.row, update.context_len) for update in plan.row_updates]
            done.append((plan.num_decode_rows, updates, plan.cleared_rows, grown, len(plan.chunks), plan.choice))
    return done, [seq.completion_token_ids for _, seq in arriving]


@pytest.mark.parametrize("blocks", [12, 40, 200])
@pytest.mark.parametrize("seed", range(5))
def test_steps_are_those_of_looking_at_everybody(seed: int, blocks: int) -> None:
    ours = steps(seed, blocks)
    with patch.object(SteadyBatch, "next_step", lambda self, manager: None):
        expected = steps(seed, blocks)
    assert ours == expected


def test_a_long_stretch_looks_at_nobody_and_still_hands_out_blocks() -> None:
    engine = FakeEngine(rows=4, blocks=100, block_size=4)
    for _ in range(4):
        engine.add(Sequence([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True), block_size=4))
    for _ in range(3):
        engine.step()
    with patch.object(Scheduler, "_schedule_decode", side_effect=AssertionError("everybody was looked at")):
        plans = [engine.step() for _ in range(40)]
    assert sum(len(plan.new_blocks) for plan in plans) == 4 * 10
    engine.run()
    assert {seq.finish_reason for seq in engine.finished.values()} == {"length"}


def test_an_arrival_is_served_in_the_next_step() -> None:
    engine = FakeEngine(rows=4, blocks=100, block_size=4)
    engine.add(Sequence([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True), block_size=4))
    for _ in range(5):
        engine.step()
    engine.add(Sequence([4], SamplingParams(max_tokens=5, ignore_eos=True), block_size=4))
    plan = engine.step()
    assert (plan.num_decode_rows, len(plan.chunks)) == (1, 1)


def test_blocks_given_back_let_the_next_one_in() -> None:
    """The pool holds one of the two at a time; the second starts once the first has ended, steady or not."""
    engine = FakeEngine(rows=4, blocks=8, block_size=4)
    first = engine.add(Sequence([1] * 16, SamplingParams(max_tokens=12, ignore_eos=True), block_size=4))
    third = engine.add(Sequence([3] * 3, SamplingParams(max_tokens=4, ignore_eos=True), block_size=4))
    second = engine.add(Sequence([2] * 17, SamplingParams(max_tokens=8, ignore_eos=True), block_size=4))
    engine.run(limit=60)
    assert [len(seq.completion_token_ids) for seq in (first, second, third)] == [12, 8, 4]
