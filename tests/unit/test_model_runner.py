"""The runner by itself, for callers with a scheduler of their own: inputs, logits, and `run`."""

from __future__ import annotations

import threading

import pytest
import torch

from tritonllm import EngineConfig, ModelRunner, SamplingParams, Sequence
from tritonllm.engine.inputs import prefill_inputs
from tritonllm.engine.plan import StepPlan, prefill_chunk
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_rows import CONTEXT_LEN

GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def runner(llama):
    config = EngineConfig(
        model_name_or_path=llama, device="cpu", block_size=8, max_model_length=96, max_num_sequences=3
    )
    runner = ModelRunner(config, 0, None)
    yield runner
    runner.exit()


def sequence(tokens: list[int], first_block: int = 0, computed: int = 0, params: SamplingParams = GREEDY) -> Sequence:
    seq = Sequence(tokens, params, block_size=8)
    seq.block_table = list(range(first_block, first_block + len(tokens) // 8 + 1))
    seq.num_computed_tokens = computed
    return seq


def logits(runner, seqs: list[Sequence], **options) -> torch.Tensor:
    return runner.run_model(runner.prepare_prefill(seqs), is_prefill=True, **options)


class TestInputs:
    def test_a_prefix_that_is_stored_is_cut_from_the_input_and_not_from_the_positions(self, runner) -> None:
        seqs = [sequence(list(range(20)), 3, computed=8), sequence(list(range(30, 35)), 7)]
        ids = runner.prepare_prefill(seqs)
        inputs = runner._thread.inputs
        assert ids.tolist() == [*range(8, 20), *range(30, 35)]
        assert inputs.positions.tolist() == [*range(8, 20), *range(5)]
        assert inputs.attn.cu_seqlens_q.tolist() == [0, 12, 17]
        assert inputs.attn.context_lens.tolist() == [20, 5]
        assert inputs.attn.slot_mapping.tolist() == [*range(4 * 8, 5 * 8), *range(5 * 8, 5 * 8 + 4), *range(56, 61)]
        assert inputs.attn.block_tables[:, :3].tolist() == [[3, 4, 5], [7, 0, 0]]
        assert inputs.last_tokens.tolist() == [11, 16]
        assert inputs.next_positions.tolist() == [20, 5]

    def test_slots_follow_a_table_in_any_order(self, runner) -> None:
        seq = sequence(list(range(20)))
        seq.block_table = [5, 0, 2]
        runner.prepare_prefill([seq])
        expected = [*range(40, 48), *range(8), *range(16, 20)]
        assert runner._thread.inputs.attn.slot_mapping.tolist() == expected

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 8), (7, 9), (8, 16), (5, 24), (23, 24)])
    def test_chunks_of_any_cut(self, start: int, stop: int) -> None:
        seq = sequence(list(range(100, 124)), 2, computed=start)
        chunk = prefill_chunk(seq, stop - start)
        inputs = prefill_inputs([chunk], 8, 16, torch.device("cpu"))
        assert inputs.input_ids.tolist() == list(range(100 + start, 100 + stop))
        assert inputs.attn.slot_mapping.tolist() == list(range(16 + start, 16 + stop))
        assert inputs.positions.tolist() == list(range(start, stop))
        assert (inputs.sampling is not None) == (stop == 24)

    def test_decode_inputs(self, runner) -> None:
        seqs = [sequence(list(range(9)), 2), sequence(list(range(50, 66)), 5)]
        ids = runner.prepare_decode(seqs)
        inputs = runner._thread.inputs
        assert ids.tolist() == [8, 65]
        assert inputs.positions.tolist() == [8, 15]
        assert inputs.attn.slot_mapping.tolist() == [3 * 8, 6 * 8 + 7]
        assert inputs.attn.context_lens.tolist() == [9, 16]


class TestLogits:
    PROMPT = list(range(40, 63))

    def test_last_positions_are_those_of_all_positions(self, runner) -> None:
        seqs = [sequence(self.PROMPT), sequence(self.PROMPT[:9], 5)]
        every = logits(runner, seqs, all_positions=True)
        last = logits(runner, seqs)
        assert every.shape == (23 + 9, 512)
        assert last.shape == (2, 512)
        torch.testing.assert_close(last, every[[22, 31]], atol=1e-4, rtol=0)

    def test_decode_continues_a_prefill(self, runner) -> None:
        whole = logits(runner, [sequence(self.PROMPT, 4)], all_positions=True)
        logits(runner, [sequence(self.PROMPT[:10])])
        for length in range(11, 24):
            seq = sequence(self.PROMPT[:length])
            step = runner.run_model(runner.prepare_decode([seq]), is_prefill=False)
            torch.testing.assert_close(step[0], whole[length - 1], atol=1e-4, rtol=0)

    def test_permuted_blocks_make_no_difference(self, runner) -> None:
        expected = logits(runner, [sequence(self.PROMPT)], all_positions=True)
        seq = sequence(self.PROMPT)
        seq.block_table = [7, 1, 4]
        assert torch.equal(logits(runner, [seq], all_positions=True), expected)

    def test_run_model_wants_what_was_prepared(self, runner) -> None:
        ids = runner.prepare_prefill([sequence([1, 2])])
        with pytest.raises(EngineError, match="call prepare_prefill or prepare_decode"):
            runner.run_model(ids, is_prefill=False)
        with pytest.raises(EngineError, match="call prepare_prefill or prepare_decode"):
            runner.run_model(ids, is_prefill=True)

    def test_what_one_thread_prepared_another_does_not_run(self, runner) -> None:
        ids = runner.prepare_prefill([sequence([1, 2])])
        caught: list[BaseException] = []

        def run() -> None:
            try:
                runner.run_model(ids, is_prefill=True)
            except EngineError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(caught) == 1
        assert runner.run_model(ids, is_prefill=True).shape == (1, 512)


class TestRun:
    def test_run_steps_sequences_as_the_engine_does(self, runner, make_engine) -> None:
        prompts = [[2, 3, 4], [9] * 20]
        expected = make_engine().generate(prompts, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        seqs = [sequence(prompt, 5 * index) for index, prompt in enumerate(prompts)]
        tokens = runner.run(seqs, is_prefill=True)
        for step in range(10):
            for seq, token in zip(seqs, tokens, strict=True):
                seq.append_token(token)
                seq.block_table = list(range(seq.block_table[0], seq.block_table[0] + len(seq) // 8 + 1))
            if step < 9:
                tokens = runner.run(seqs, is_prefill=False)
        assert [seq.completion_token_ids for seq in seqs] == expected["token_ids"]

    def test_fewer_sequences_than_before_leave_padding(self, runner) -> None:
        seqs = [sequence([7, 8, token], index) for index, token in enumerate((1, 2, 3))]
        for seq, token in zip(seqs, runner.run(seqs, is_prefill=True), strict=True):
            seq.append_token(token)
        three = runner.run(seqs, is_prefill=False)
        assert runner.run(seqs[1:], is_prefill=False) == three[1:]
        assert runner.rows[2, CONTEXT_LEN] == 0

    def test_both_ends_of_the_model_choose_the_same_token(self, runner) -> None:
        """A row decided from logits, because a neighbour wants top-k, gets the token it gets straight from the head."""
        plain = [SamplingParams(temperature=t, seed=5, max_tokens=9) for t in (0.0, 1.0)]
        filtered = SamplingParams(temperature=1, top_k=3, seed=9)
        for params in plain:
            seqs = [sequence([7, 8, 9], 0, params=params), sequence([5], 2, params=filtered)]
            alone, mixed = runner.run(seqs[:1], is_prefill=True), runner.run(seqs, is_prefill=True)
            assert mixed[0] == alone[0]
            for seq, token in zip(seqs, mixed, strict=True):
                seq.append_token(token)
            assert runner.run(seqs, is_prefill=False)[0] == runner.run(seqs[:1], is_prefill=False)[0]

    def test_steps_are_collected_in_order_and_once(self, runner) -> None:
        first, second = (StepPlan(chunks=[prefill_chunk(sequence([token, 4]), 2)]) for token in (1, 9))
        expected = [runner.run([sequence([token, 4])], True) for token in (1, 9)]
        runner.launch(first)
        runner.launch(second)
        assert [runner.collect(), runner.collect()] == expected
        with pytest.raises(EngineError, match=r"collect\(\) was called without a launched step"):
            runner.collect()


def test_exit_is_idempotent_and_frees_the_tensors(llama) -> None:
    runner = ModelRunner(EngineConfig(model_name_or_path=llama, device="cpu", max_model_length=32))
    assert runner.num_blocks == 16
    runner.call("exit")
    runner.exit()
    assert not any(isinstance(value, torch.Tensor) for value in vars(runner).values())
