"""The scheduler under any order of arrivals, floods, steps and aborts: its invariants hold after each of them."""

from __future__ import annotations

import pytest
from fake_runner import FakeEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.samples import samples_of
from tritonllm.errors import RequestError


class SchedulerMachine(RuleBasedStateMachine):
    """`FakeEngine.step` checks queues, budget, tables, tokens and delays; rules say what may happen in between."""

    @initialize(
        rows=st.integers(1, 6),
        budget=st.sampled_from([1, 2, 5, 16, 64, 600]),
        blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4, 16, 256]),
        eos=st.sampled_from([None, 5, 50]),
        max_model_length=st.sampled_from([None, None, 20]),
        limit=st.sampled_from([None, 1, 3, 16]),
    )
    def start(self, rows, budget, blocks, block_size, eos, max_model_length, limit):
        self.engine = FakeEngine(
            rows=rows,
            budget=budget,
            blocks=blocks,
            block_size=block_size,
            eos=eos,
            max_model_length=max_model_length,
            limit=limit,
        )

    def add_prompt(self, prompt: list[int], max_tokens: int, ignore_eos: bool, seed: int = 0, n: int = 1) -> None:
        scheduler = self.engine.scheduler
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, seed=seed, n=n)
        seq, *others = samples_of(prompt, params, scheduler.block_size, 0)
        pool = scheduler.block_manager.num_blocks * scheduler.block_size
        if len(prompt) > pool or len(prompt) >= (scheduler.max_model_length or len(prompt) + 1):
            waiting = list(scheduler.waiting)
            with pytest.raises(RequestError):
                scheduler.add_sequence(seq)
            assert list(scheduler.waiting) == waiting
        else:
            self.engine.add(seq, others)

    @rule(
        blocks=st.integers(0, 3),
        rest=st.floats(0, 1),
        token=st.integers(0, 2),
        tail=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 1),
        n=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def add(self, blocks, rest, token, tail, max_tokens, ignore_eos, seed, n):
        size = self.engine.scheduler.block_size
        self.add_prompt([token] * (blocks * size + int(rest * size)) + [tail], max_tokens, ignore_eos, seed, n)

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data(), extra=st.integers(0, 2), max_tokens=st.integers(1, 12))
    def add_what_continues_another(self, data, extra, max_tokens):
        """The text of another request as far as it has come, and perhaps more: the prefix cache may have it."""
        seq = self.draw(data)
        self.add_prompt(seq.token_ids + [3] * extra, max_tokens, True)

    @rule(count=st.integers(2, 6), token=st.integers(0, 2))
    def flood(self, count, token):
        size = self.engine.scheduler.block_size
        for index in range(count):
            self.add_prompt([token] * size + [index], 2, True)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data())
    def abort(self, data):
        seq = self.draw(data)
        finished = seq.is_finished
        assert self.engine.scheduler.abort(seq) == (not finished)
        assert seq.finish_reason == "abort" or finished
        self.engine.check()

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data())
    def stop(self, data):
        """A stop string is found in what was read."""
        seq = self.draw(data)
        if seq.completion_token_ids and seq.finish_reason != "abort":
            self.engine.scheduler.stop(seq, "x")
            assert (seq.finish_reason, seq.stop_reason) == ("stop", "x")
            self.engine.check()

    def draw(self, data) -> Sequence:
        return self.engine.sequences[data.draw(st.sampled_from(sorted(self.engine.sequences)))]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run(20_000)
        manager = self.engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        assert self.engine.finished.keys() == self.engine.sequences.keys()
        for seq in self.engine.sequences.values():
            assert seq.is_finished
            assert seq.finish_reason in ("stop", "length", "abort")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
