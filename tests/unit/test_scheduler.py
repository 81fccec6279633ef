"""The scheduler against a fake device whose every token depends on all tokens before it."""

from __future__ import annotations

import pytest
from fake_runner import FakeEngine, expected_completion

from tritonllm import SamplingParams, Sequence
from tritonllm.errors import EngineError, RequestError


def sequence(prompt: list[int], max_tokens: int | None = 5, *, block_size: int = 4, ignore_eos: bool = True, **params):
    return Sequence(
        prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params), block_size=block_size
    )


def complete(engine: FakeEngine, prompts: list[list[int]], max_tokens: int = 5) -> list[list[int]]:
    sequences = [engine.add(sequence(prompt, max_tokens, block_size=engine.scheduler.block_size)) for prompt in prompts]
    engine.run()
    return [seq.completion_token_ids for seq in sequences]


def test_tokens_are_those_of_the_model_run_alone():
    prompts = [[1, 2, 3], [4] * 9, [5, 6], [7] * 17, [1, 2, 3]]
    engine = FakeEngine(blocks=32)
    assert complete(engine, prompts) == [expected_completion(prompt, 5) for prompt in prompts]
    assert engine.scheduler.block_manager.num_free_blocks == 32


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 16])
def test_exactly_max_tokens_come(max_tokens):
    engine = FakeEngine(blocks=16)
    assert [len(tokens) for tokens in complete(engine, [[1, 2, 3], [1] * 4], max_tokens)] == [max_tokens] * 2


def test_no_limit_on_tokens_runs_to_the_length_limit():
    engine = FakeEngine(blocks=16, max_model_length=20)
    seq = engine.add(sequence([1, 2, 3], None))
    engine.run()
    assert (len(seq), seq.finish_reason) == (20, "length")


def test_generation_stops_at_max_model_length():
    engine = FakeEngine(blocks=32, max_model_length=64)
    seq = engine.add(sequence([1] * 60, 100))
    engine.run()
    assert (len(seq), seq.finish_reason) == (64, "length")


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_at_max_model_length_is_refused(length):
    engine = FakeEngine(blocks=32, max_model_length=64)
    with pytest.raises(RequestError, match="max_model_length = 64"):
        engine.scheduler.add_sequence(sequence([1] * length))
    assert engine.scheduler.is_finished()


def test_a_request_can_lower_its_own_length_limit():
    engine = FakeEngine(blocks=32, max_model_length=64)
    seq = engine.add(sequence([1] * 10, 100, max_model_length=12))
    engine.run()
    assert len(seq) == 12
    with pytest.raises(RequestError, match="the request's own limit = 12"):
        engine.scheduler.add_sequence(sequence([1] * 12, 100, max_model_length=12))


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        FakeEngine().scheduler.add_sequence(sequence([]))


@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(length):
    engine = FakeEngine(budget=64, blocks=400)
    assert complete(engine, [[3] * length, [1, 2]]) == [
        expected_completion([3] * length, 5),
        expected_completion([1, 2], 5),
    ]
    assert engine.runner.max_tokens_in_a_step <= 64


@pytest.mark.parametrize(("length", "fits"), [(159, True), (160, True), (161, False)])
@pytest.mark.parametrize("max_tokens", [1, 2, 50])
def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_others_live_on(length, fits, max_tokens):
    engine = FakeEngine(budget=64, blocks=10, block_size=16)
    for _ in range(2):
        other = engine.add(sequence([1, 2, 3], 3, block_size=16))
        if fits:
            seq = engine.add(sequence([5] * length, max_tokens, block_size=16))
            engine.run()
            assert seq.finish_reason == "length"
            assert len(seq) == min(length + max_tokens, 161)
        else:
            with pytest.raises(RequestError, match=r"161 tokens and can never fit the KV cache of 160"):
                engine.scheduler.add_sequence(sequence([5] * length, max_tokens, block_size=16))
            engine.run()
        assert other.completion_token_ids == expected_completion([1, 2, 3], 3)


def test_the_only_sequence_stops_where_the_pool_ends():
    engine = FakeEngine(budget=64, blocks=4, block_size=16)
    seq = engine.add(sequence([1] * 60, 50, block_size=16))
    engine.run(limit=100)
    assert seq.finish_reason == "length"
    assert seq.num_completion_tokens == 5  # the last one needs no slot


def test_no_preemption_while_the_last_block_has_room_and_one_when_it_has_none():
    engine = FakeEngine(budget=16, blocks=3, block_size=4)
    first, second = (engine.add(sequence([token] * 3, 6)) for token in (1, 2))
    preemptions = []
    while not engine.scheduler.is_finished():
        engine.step()
        preemptions.append((max(first.length, second.length), engine.scheduler.num_preemptions))
    assert all(count == 0 for length, count in preemptions if length <= 4)
    assert engine.scheduler.num_preemptions > 0
    for seq, token in ((first, 1), (second, 2)):
        assert seq.completion_token_ids == expected_completion([token] * 3, 6)


def test_preemption_never_changes_the_tokens():
    prompts = [[index] * (3 + index % 5) for index in range(16)]
    engine = FakeEngine(rows=16, budget=32, blocks=9, block_size=4)
    assert complete(engine, prompts, 20) == [expected_completion(prompt, 20) for prompt in prompts]
    assert engine.scheduler.num_preemptions > 0


def test_preemption_with_shared_prefixes_never_changes_the_tokens():
    prompts = [[9] * 12 + [index, 1, 2] for index in range(32)]
    engine = FakeEngine(rows=16, budget=64, blocks=40, block_size=4)
    assert complete(engine, prompts, 24) == [expected_completion(prompt, 24) for prompt in prompts]
    assert engine.scheduler.num_preemptions > 0


def test_preempted_sequences_that_find_most_of_their_prompt_again_go_on_as_before():
    prompts = [[9] * 48 + [index] * 12 for index in range(32)]
    engine = FakeEngine(rows=32, budget=96, blocks=40, block_size=16)
    assert complete(engine, prompts, 100) == [expected_completion(prompt, 100) for prompt in prompts]
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.block_manager.num_free_blocks == 40


def test_a_small_pool_changes_neither_tokens_nor_counts_nor_reasons():
    prompts = [[index, 1, 2, 3] * (2 + index % 3) for index in range(16)]
    results = []
    for blocks in (2000, 70):
        engine = FakeEngine(rows=16, budget=64, blocks=blocks, block_size=4)
        seqs = [engine.add(sequence(prompt, 200)) for prompt in prompts]
        engine.run(20000)
        results.append([(seq.completion_token_ids, seq.finish_reason) for seq in seqs])
    assert engine.scheduler.num_preemptions > 0
    assert results[0] == results[1]
    assert all(len(tokens) == 200 for tokens, _ in results[0])


def test_a_preempted_sequence_is_computed_again_from_all_its_tokens():
    engine = FakeEngine(rows=2, budget=64, blocks=5, block_size=4)
    first, second = (engine.add(sequence([token] * 7, 30)) for token in (1, 2))
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert second in engine.scheduler.waiting
    assert second.num_completion_tokens > 0
    tokens = list(second.token_ids)
    engine.scheduler.abort(first)
    chunks = []
    while not chunks:
        plan = engine.step()
        chunks = plan.chunks if plan is not None else []
    assert tokens[: chunks[0].start] + chunks[0].token_ids == tokens
    assert second.num_prompt_tokens == 7


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_prompt_sent_again_hits_the_cache_and_recomputes_at_least_one_token(length):
    engine = FakeEngine(budget=64, blocks=16, block_size=16)
    expected = expected_completion([3] * length, 5)
    for round_ in range(3):
        seq = engine.add(sequence([3] * length, 5, block_size=16))
        twin = engine.add(sequence([3] * length, 5, block_size=16))
        engine.run()
        assert seq.completion_token_ids == twin.completion_token_ids == expected
        assert seq.num_cached_tokens == (0 if round_ == 0 else (length - 1) // 16 * 16)


def test_a_prompt_is_not_found_before_its_step_was_read():
    """It might turn out to be NaN, and whoever had found it by then would share that."""
    engine = FakeEngine(budget=64, blocks=16)
    engine.add(sequence([3] * 9))
    engine.step()
    early = engine.add(sequence([3] * 9))
    engine.step()
    late = engine.add(sequence([3] * 9))
    engine.step()
    assert (early.num_cached_tokens, late.num_cached_tokens) == (0, 8)


def test_cached_tokens_cost_no_budget():
    engine = FakeEngine(budget=16, blocks=64, block_size=4)
    complete(engine, [[3] * 40], 1)
    engine.add(sequence([3] * 40 + [1], 1))
    plan = engine.step()
    assert plan is not None
    assert plan.chunks[0].start == 40
    assert plan.chunks[0].sample


def test_a_flood_of_prompts_never_stops_the_running_sequence():
    engine = FakeEngine(rows=8, budget=64, blocks=2000, block_size=4)
    first = engine.add(sequence([1, 2, 3], 60))
    engine.step()
    for _ in range(50):
        for index in range(5):
            engine.add(sequence([index] * 60, 1))
        before = first.length
        engine.step()
        assert first.length == before + 1


def test_the_budget_may_be_smaller_than_the_number_of_rows():
    engine = FakeEngine(rows=8, budget=3, blocks=64)
    prompts = [[index] * 7 for index in range(8)]
    assert complete(engine, prompts, 9) == [expected_completion(prompt, 9) for prompt in prompts]


def test_end_of_text_ends_a_sequence_and_its_surplus_token_is_dropped():
    prompt = [1, 2, 3]
    eos = expected_completion(prompt, 4)[3]
    engine = FakeEngine(blocks=16, eos=eos)
    seq = engine.add(sequence(prompt, 20, ignore_eos=False))
    stubborn = engine.add(sequence(prompt, 20))
    engine.run()
    assert seq.completion_token_ids == expected_completion(prompt, 20, eos)
    assert seq.finish_reason == "stop"
    assert len(stubborn.completion_token_ids) == 20
    assert engine.scheduler.block_manager.num_free_blocks == 16


def test_a_stop_token_of_the_request_counts_even_when_end_of_text_does_not():
    prompt = [1, 2, 3]
    stop = expected_completion(prompt, 3)[2]
    engine = FakeEngine(blocks=16)
    seq = engine.add(sequence(prompt, 20, stop_token_ids=(stop,)))
    engine.run()
    assert (seq.completion_token_ids[-1], seq.finish_reason) == (stop, "stop")


def test_a_row_of_nan_fails_alone_and_its_blocks_are_zeroed_and_never_found():
    engine = FakeEngine(budget=64, blocks=16)
    bad, good = engine.add(sequence([1] * 9, 10)), engine.add(sequence([2] * 9, 10))
    engine.step()
    engine.runner.unread[0] = [-1, engine.runner.unread[0][1]]
    held = set()
    plans = []
    while not engine.scheduler.is_finished():
        plans.append(engine.step())
        held.update(bad.block_table)
    assert bad.finish_reason == "error"
    assert "NaN" in (bad.error or "")
    assert good.completion_token_ids == expected_completion([2] * 9, 10)
    zeroed = {block for plan in plans if plan is not None for block in plan.zero_blocks}
    assert zeroed == held
    again = engine.add(sequence([1] * 9, 2))
    engine.step()
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_gives_the_blocks_back_within_two_steps(steps: int):
    engine = FakeEngine(rows=2, budget=8, blocks=16)
    seqs = [engine.add(sequence([token] * 20, 30)) for token in (1, 2, 3)]
    for _ in range(steps):
        engine.step()
    for seq in seqs:
        assert engine.scheduler.abort(seq)
        assert not engine.scheduler.abort(seq)
    engine.step()
    engine.step()
    assert engine.scheduler.is_finished()
    assert engine.scheduler.block_manager.num_free_blocks == 16
    assert all(seq.finish_reason == "abort" for seq in seqs)
    for seq in seqs:
        assert not engine.scheduler.abort(seq)


def test_abort_of_a_preempted_sequence():
    engine = FakeEngine(rows=2, budget=64, blocks=5, block_size=4)
    first, second = (engine.add(sequence([token] * 7, 12)) for token in (1, 2))
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.abort(second)
    assert second.block_table == []
    engine.run()
    assert first.completion_token_ids == expected_completion([1] * 7, 12)
    assert (second.finish_reason, engine.scheduler.block_manager.num_free_blocks) == ("abort", 5)


def test_with_requests_and_nothing_to_run_the_scheduler_raises_with_its_state():
    scheduler = FakeEngine().scheduler
    scheduler.add_sequence(sequence([1, 2, 3]))
    scheduler.block_manager.can_allocate = lambda seq, reserve=0: False
    with pytest.raises(
        EngineError, match="1 waiting, 0 in their prompt, 0 running.* 8 of 8 blocks of 4 free.*16 tokens"
    ):
        scheduler.schedule()
