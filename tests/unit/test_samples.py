"""Several completions of one prompt: shared blocks, noise of their own, and the first is what one alone would be."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from fake_runner import FakeEngine, expected_completion

from tritonllm import AsyncLLMEngine, SamplingParams
from tritonllm.engine.samples import sample_seed, samples_of

PROMPTS = [[2, 3, 4], [9] * 37, [7] * 16]
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True, n=3)


def one(params: SamplingParams, sample: int) -> SamplingParams:
    """What sample `sample` would be as a request of its own."""
    return dataclasses.replace(params, n=1, seed=sample_seed(params.seed, sample))


def alone(engine, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    singles = [[one(params, sample) for sample in range(params.n)] for _ in prompts]
    return [
        [engine.generate([prompt], single)["token_ids"][0] for single in own]
        for prompt, own in zip(prompts, singles, strict=True)
    ]


class TestSeeds:
    def test_the_first_keeps_the_seed_and_all_differ(self) -> None:
        for seed in (0, 1, 7, 2**64 - 1):
            seeds = [sample_seed(seed, sample) for sample in range(100)]
            assert seeds[0] == seed
            assert len(set(seeds)) == 100
            assert all(0 <= it < 2**64 for it in seeds)

    def test_requests_with_near_seeds_share_none(self) -> None:
        seeds = [sample_seed(seed, sample) for seed in range(100) for sample in range(20)]
        assert len(set(seeds)) == 2000

    def test_sequences_of_a_request(self) -> None:
        sequences = samples_of([1, 2], SamplingParams(n=3), 4, 11)
        assert [seq.sampling.seed for seq in sequences] == [sample_seed(11, sample) for sample in range(3)]
        own = samples_of([1, 2], SamplingParams(n=3, seed=6), 4, 11)
        assert [seq.sampling.seed for seq in own] == [sample_seed(6, sample) for sample in range(3)]


class TestScheduler:
    def samples(self, engine: FakeEngine, prompt: list[int], count: int, max_tokens: int) -> list:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=count)
        sequences = samples_of(prompt, params, engine.runner.block_size, 0)
        engine.add(sequences[0], sequences[1:])
        return sequences

    @pytest.mark.parametrize("length", [3, 8, 9, 21])
    def test_full_blocks_of_the_prompt_are_shared_and_the_rest_is_computed_again(self, length: int) -> None:
        engine = FakeEngine(rows=4, budget=64, blocks=40, block_size=4)
        sequences = self.samples(engine, list(range(length)), 4, 6)
        tokens = 0
        shared = False
        while not engine.scheduler.is_finished():
            plan = engine.step()
            tokens += plan.num_tokens if plan else 0
            tables = [seq.block_table for seq in sequences if seq.block_table]
            full = (length - 1) // 4
            if len(tables) == 4:
                shared = True
                assert len({tuple(table[:full]) for table in tables}) == 1
                assert len({block for table in tables for block in table[full:]}) == sum(
                    len(table) - full for table in tables
                )
        assert shared
        assert tokens == length + 3 * (length - (length - 1) // 4 * 4) + 4 * 5
        assert all(len(seq.completion_token_ids) == 6 for seq in sequences)
        assert sequences[0].completion_token_ids == expected_completion(list(range(length)), 6)

    def test_more_samples_than_rows_and_a_small_pool(self) -> None:
        engine = FakeEngine(rows=2, budget=8, blocks=6, block_size=4)
        sequences = self.samples(engine, list(range(9)), 5, 7)
        engine.run()
        assert {seq.finish_reason for seq in sequences} == {"length"}
        assert engine.scheduler.block_manager.num_free_blocks == 6

    def test_they_go_before_whoever_came_later(self) -> None:
        engine = FakeEngine(rows=1, budget=32, blocks=20, block_size=4)
        sequences = self.samples(engine, [1, 2, 3], 3, 2)
        later = self.samples(engine, [5, 6], 1, 2)
        engine.run()
        assert list(engine.finished) == [seq.seq_id for seq in [*sequences, *later]]

    @pytest.mark.parametrize("victims", [[0], [1], [2], [0, 1, 2], [2, 1, 0], [1, 2]])
    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_any_of_them_may_be_aborted_at_any_time(self, victims: list[int], steps: int) -> None:
        engine = FakeEngine(rows=4, budget=4, blocks=20, block_size=4)
        sequences = self.samples(engine, list(range(6)), 3, 5)
        for _ in range(steps):
            engine.step()
        for index in victims:
            assert engine.scheduler.abort(sequences[index])
            engine.check()
        engine.run()
        assert [seq.finish_reason for seq in sequences] == [
            "abort" if index in victims else "length" for index in range(3)
        ]
        assert engine.scheduler.block_manager.num_free_blocks == 20


class TestEngine:
    def test_each_is_what_it_would_be_alone(self, make_engine) -> None:
        expected = alone(make_engine(), PROMPTS, SAMPLED)
        engine = make_engine()
        result = engine.generate(PROMPTS, SAMPLED)
        assert result["token_ids"] == expected
        assert [own[0] for own in result["token_ids"]] == (
            engine.generate(PROMPTS, dataclasses.replace(SAMPLED, n=1))["token_ids"]
        )
        assert all(len({tuple(tokens) for tokens in own}) == 3 for own in expected)
        assert result["finish_reason"] == [["length"] * 3] * 3
        assert result["text"] == [[engine.tokenizer.decode(tokens) for tokens in own] for own in expected]
        assert [usage["prompt_tokens"] for usage in result["usage"]] == [3, 37, 16]
        assert [usage["completion_tokens"] for usage in result["usage"]] == [24, 24, 24]
        assert [usage["cached_tokens"] for usage in result["usage"]] == [0, 0, 0]

    def test_streamed(self, make_engine) -> None:
        whole = make_engine().generate(PROMPTS, SAMPLED)
        texts = [[""] * 3 for _ in PROMPTS]
        ends = []
        engine = make_engine()
        for piece in engine.stream(PROMPTS, SAMPLED):
            texts[piece.index][piece.sample] += piece.text
            if piece.finish_reason is not None:
                ends.append((piece.index, piece.sample))
        assert texts == whole["text"]
        assert sorted(ends) == [(index, sample) for index in range(3) for sample in range(3)]

    def test_one_count_beside_another_and_without_a_seed(self, make_engine) -> None:
        params = [dataclasses.replace(SAMPLED, n=n, seed=None) for n in (2, 1, 3)]
        result = make_engine().generate([[5, 6]] * 3, params)["token_ids"]
        singles = make_engine().generate([[5, 6]] * 3, [dataclasses.replace(it, n=1) for it in params])["token_ids"]
        assert [result[0][0], result[1], result[2][0]] == singles
        assert len({tuple(tokens) for tokens in [*result[0], result[1], *result[2]]}) == 6

    def test_steps_report_each_under_the_id_of_the_request(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], SAMPLED)
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        outputs.sort(key=lambda output: output.sample)
        assert [(output.seq_id, output.sample) for output in outputs] == [(seq_id, sample) for sample in range(3)]
        assert [output.token_ids for output in outputs] == engine.generate([[5, 6]], SAMPLED)["token_ids"][0]

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    def test_abort_ends_them_all(self, engine, steps: int) -> None:
        seq_id = engine.add_prompt([5, 6], dataclasses.replace(SAMPLED, max_tokens=50))
        for _ in range(steps):
            engine.step()
        assert engine.abort(seq_id)
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        assert [(output.seq_id, output.finish_reason) for output in outputs] == [(seq_id, "abort")] * 3
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]
        assert not engine.abort(seq_id)

    def test_a_stream_closed_early(self, engine) -> None:
        stream = engine.stream([[3] * 20], dataclasses.replace(SAMPLED, max_tokens=60))
        next(stream)
        stream.close()
        assert engine.scheduler.is_finished()
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    def test_a_stop_string_ends_each_for_itself(self, make_engine) -> None:
        engine = make_engine()
        texts = engine.generate([[5, 6]], SAMPLED)["text"][0]
        stop = texts[1][4:6]
        stopped = engine.generate([[5, 6]], dataclasses.replace(SAMPLED, stop=stop))
        assert stopped["text"][0] == [text.partition(stop)[0] for text in texts]

    def test_in_coroutines(self, llama, make_engine) -> None:
        whole = make_engine().generate([[5, 6]], SAMPLED)["token_ids"][0]
        found: list[list[int]] = [[], [], []]
        sized = {"block_size": 16, "max_model_length": 96, "max_num_sequences": 2}

        async def main() -> None:
            async with AsyncLLMEngine(llama, device="cpu", **sized) as engine:
                async for piece in engine.generate([5, 6], SAMPLED):
                    found[piece.sample] += piece.token_ids
                async for _ in engine.generate([5, 6], dataclasses.replace(SAMPLED, max_tokens=60)):
                    break
                while engine.stats()["waiting"] + engine.stats()["running"]:
                    await asyncio.sleep(0.001)
                assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

        asyncio.run(asyncio.wait_for(main(), 60))
        assert found == whole
