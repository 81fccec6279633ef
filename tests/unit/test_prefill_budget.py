"""Prompts beside decoding sequences: few tokens a step of few prompts, all that fit of a flood, in order of arrival."""

from __future__ import annotations

import pytest
from fake_runner import FakeEngine, expected_completion
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.prefill_budget import prefill_budget

ROOM = {"rows": 16, "budget": 4096, "blocks": 4000, "block_size": 4}


def sequence(prompt: list[int], max_tokens: int = 5) -> Sequence:
    return Sequence(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), block_size=4)


def taken(engine: FakeEngine) -> tuple[int, int]:
    """Rows that the next step decodes, and prompt tokens that it takes."""
    plan = engine.step()
    assert plan is not None
    return plan.num_decode_rows, plan.num_tokens - plan.num_decode_rows


def decoding(limit: int | None, count: int = 3, **room: int) -> FakeEngine:
    """An engine in which sequences decode that will go on for long."""
    engine = FakeEngine(**{**ROOM, **room}, limit=limit)
    for token in range(count):
        engine.add(sequence([token], 500))
    engine.step()
    return engine


class TestTheRule:
    def test_nothing_limits_prompts_while_nobody_decodes(self) -> None:
        assert prefill_budget(4096, 0, 1, 512) == 4096

    def test_one_prompt_adds_the_limit_and_each_of_many_as_much(self) -> None:
        assert [prefill_budget(4096, 64, count, 512) for count in (0, 1, 2, 100)] == [0, 512, 1024, 4032]

    def test_without_a_limit_prompts_take_what_is_left(self) -> None:
        assert prefill_budget(4096, 64, 1, None) == 4032

    def test_the_budget_holds_in_any_case(self) -> None:
        assert prefill_budget(100, 64, 1, 512) == 36


def test_a_long_prompt_beside_streams_comes_in_chunks_of_the_limit() -> None:
    engine = decoding(limit=16)
    engine.add(sequence([7] * 100, 2))
    assert [taken(engine) for _ in range(7)] == [(3, 16)] * 6 + [(3, 4)]


def test_a_long_prompt_alone_comes_at_once() -> None:
    engine = FakeEngine(**ROOM, limit=16)
    engine.add(sequence([7] * 100, 2))
    assert taken(engine) == (0, 100)


def test_a_prompt_that_is_alone_again_comes_at_once() -> None:
    engine = FakeEngine(**ROOM, limit=16)
    engine.add(sequence([1], 3))
    engine.step()
    engine.add(sequence([7] * 100, 2))
    assert [taken(engine) for _ in range(3)] == [(1, 16), (1, 16), (0, 68)]


def test_only_prompts_that_there_is_a_place_for_count() -> None:
    """A long queue behind full rows must not let the one that gets in stop the others."""
    engine = decoding(limit=16, count=15)
    for _ in range(30):
        engine.add(sequence([7] * 100, 2))
    assert taken(engine) == (15, 16)


def test_prompts_that_wait_for_blocks_do_not_count() -> None:
    """They cannot be admitted, so longer chunks of the prompt under way would bring them nothing."""
    engine = decoding(limit=16, count=1, blocks=60)
    engine.add(sequence([7] * 200, 2))
    assert taken(engine) == (1, 16)
    for _ in range(8):
        engine.add(sequence([8] * 100, 2))
    assert [taken(engine) for _ in range(5)] == [(1, 16)] * 5


def test_a_flood_is_computed_as_without_a_limit() -> None:
    plans = []
    for limit in (None, 16):
        engine = decoding(limit, rows=64, budget=256)
        for token in range(60):
            engine.add(sequence([token] * 15, 50))
        plans.append([taken(engine) for _ in range(3)])
    assert plans[0] == plans[1] == [(3, 253), (19, 237), (35, 221)]


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12),
    arrivals=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    limit=st.integers(1, 40),
    blocks=st.integers(30, 200),
)
@settings(max_examples=30, deadline=None)
def test_everybody_finishes_in_order_with_the_tokens_of_no_limit(lengths, arrivals, limit, blocks) -> None:
    """`FakeEngine.step` checks the limit, and that whoever decodes gets a token in every step."""
    engine = FakeEngine(rows=6, budget=64, blocks=blocks, limit=limit)
    arriving = sorted(zip(arrivals, ([index] * length for index, length in enumerate(lengths)), strict=False))
    seqs: list[Sequence] = []
    first_tokens: list[int] = []
    for step in range(3000):
        while arriving and arriving[0][0] <= step:
            seqs.append(engine.add(sequence(arriving.pop(0)[1], 9)))
        if not arriving and engine.scheduler.is_finished():
            break
        plan = engine.step()
        if not engine.scheduler.num_preemptions and plan is not None:
            ended = [chunk.token_ids[0] for chunk in plan.chunks if chunk.sample]
            first_tokens += ended
    assert [seq.completion_token_ids for seq in seqs] == [expected_completion(seq.token_ids[:-9], 9) for seq in seqs]
    order = [seq.token_ids[0] for seq in seqs]
    assert first_tokens == order[: len(first_tokens)]


@pytest.mark.parametrize("limit", [1, 5, 64, None])
def test_the_tokens_are_the_same_under_every_limit(limit: int | None) -> None:
    prompts = [[index, 3, 1] * (1 + 7 * (index % 4)) for index in range(14)]
    engine = FakeEngine(rows=5, budget=64, blocks=60, limit=limit)
    seqs = []
    for prompt in prompts:
        seqs.append(engine.add(sequence(prompt, 12)))
        engine.step()
    engine.run()
    assert [seq.completion_token_ids for seq in seqs] == [expected_completion(prompt, 12) for prompt in prompts]
