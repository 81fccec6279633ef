"""A plan is all that a rank gets: plain integers that survive the way to another process."""

from __future__ import annotations

import pickle

from fake_runner import FakeEngine, FakeRunner, expected_completion

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.plan import StepPlan, plan_of


def test_a_second_device_that_gets_pickled_plans_computes_the_same_tokens() -> None:
    """Through chunks, prefix hits, preemption and resumption, where half of a sequence is not enough."""
    engine = FakeEngine(rows=3, budget=8, blocks=6, block_size=4)
    other = FakeRunner(3, 6, 4)
    launch = engine.runner.launch

    def both(plan: StepPlan) -> None:
        copy = pickle.loads(pickle.dumps(plan))
        assert copy == plan
        launch(plan)
        other.launch(copy)

    engine.runner.launch = both
    engine.before_reading = lambda tokens: None if tokens == other.collect() else 1 / 0
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[1] * 7, [1] * 4 + [2] * 5, [3] * 6, [1] * 7]
    seqs = [engine.add(Sequence(prompt, params, block_size=4)) for prompt in prompts]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert [seq.completion_token_ids for seq in seqs] == [expected_completion(prompt, 8) for prompt in prompts]


def test_a_plan_for_sequences_scheduled_by_others_clears_the_rows_left_over() -> None:
    seqs = [Sequence([token, 4], block_size=4) for token in (1, 2)]
    for index, seq in enumerate(seqs):
        seq.block_table = [index]
    plan = plan_of(seqs, is_prefill=False, num_rows=5)
    assert (plan.num_decode_rows, plan.cleared_rows, plan.num_tokens) == (2, [2, 3, 4], 2)
    assert [(update.row, update.token, update.context_len) for update in plan.row_updates] == [(0, 4, 2), (1, 4, 2)]
    assert [chunk.token_ids for chunk in plan_of(seqs, is_prefill=True, num_rows=5).chunks] == [[1, 4], [2, 4]]
