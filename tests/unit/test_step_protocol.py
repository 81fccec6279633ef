"""`add_prompt` and `step`: one step behind, each request reported once; abort, failure and end of text on the way."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tritonllm import LLMEngine, RequestOutput, SamplingParams


def greedy(max_tokens: int | None = 5, **params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def drain(engine, limit: int = 500) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if engine.scheduler.is_finished():
            return outputs
        outputs += engine.step()[0]
    raise AssertionError(f"not finished after {limit} steps")


class TestStep:
    def test_the_first_call_reports_nobody_and_the_tokens_add_up(self, make_engine) -> None:
        engine = make_engine(max_num_batched_tokens=8)
        lengths, generated = [20, 3, 9], [4, 1, 6]
        seq_ids = [engine.add_prompt([5] * n, greedy(m)) for n, m in zip(lengths, generated, strict=True)]
        assert len(set(seq_ids)) == 3
        steps = [engine.step()]
        assert steps[0] == ([], 8, True)
        while not engine.scheduler.is_finished():
            steps.append(engine.step())
        outputs = [output for found, _, _ in steps for output in found]
        assert {output.seq_id: len(output.token_ids) for output in outputs} == dict(
            zip(seq_ids, generated, strict=True)
        )
        assert len(outputs) == 3
        # The last token of a completion is never computed with; cached tokens are not either.
        cached = sum(output.num_cached_tokens for output in outputs)
        assert sum(tokens for _, tokens, _ in steps) == sum(lengths) + sum(generated) - 3 - cached
        assert all(tokens <= 8 for _, tokens, _ in steps)
        assert steps[-1][1:] == (0, False)
        assert steps[-1][0] != []
        assert engine.stats()["processed_tokens"] == sum(tokens for _, tokens, _ in steps)
        assert engine.step() == ([], 0, False)

    def test_decode_steps_and_prompt_steps_are_told_apart(self, engine) -> None:
        engine.add_prompt([5] * 4, greedy(3))
        kinds = []
        while not engine.scheduler.is_finished():
            _, tokens, is_prefill = engine.step()
            kinds.append((tokens, is_prefill))
        assert kinds == [(4, True), (1, False), (1, False), (0, False)]

    def test_an_output_unpacks_as_id_and_tokens(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy(3))
        (output,) = drain(engine)
        got_id, tokens = output
        assert (got_id, tokens) == (seq_id, output.token_ids)
        assert len(tokens) == 3
        assert (output.finish_reason, output.error) == ("length", None)
        assert output.usage == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}

    def test_tokens_are_those_of_generate(self, engine) -> None:
        prompts = [[2, 3, 4], [9] * 20, [7], [11, 12], [13] * 40]
        seq_ids = [engine.add_prompt(prompt, greedy(9)) for prompt in prompts]
        found = {output.seq_id: output.token_ids for output in drain(engine)}
        assert [found[seq_id] for seq_id in seq_ids] == engine.generate(prompts, greedy(9))["token_ids"]

    def test_prompts_may_join_at_any_step(self, engine) -> None:
        alone = [engine.generate([[token] * 18], greedy(12))["token_ids"][0] for token in range(4, 8)]
        outputs, seq_ids = [], []
        for token in range(4, 8):
            seq_ids.append(engine.add_prompt([token] * 18, greedy(12)))
            for _ in range(3):
                outputs += engine.step()[0]
        outputs += drain(engine)
        found = {output.seq_id: output.token_ids for output in outputs}
        assert [found[seq_id] for seq_id in seq_ids] == alone

    def test_a_request_that_finishes_during_generate_is_returned_by_the_next_step(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy(3))
        alone = engine.generate([[5, 6]], greedy(3))["token_ids"][0]
        engine.generate([[9, 9]], greedy(20))
        assert not engine.scheduler.is_finished()
        outputs, tokens, is_prefill = engine.step()
        assert [(output.seq_id, output.token_ids) for output in outputs] == [(seq_id, alone)]
        assert (tokens, is_prefill) == (0, False)
        assert engine.scheduler.is_finished()
        assert engine.step() == ([], 0, False)

    def test_a_request_under_way_goes_on_after_generate(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy(40))
        engine.step()
        engine.generate([[9, 9]], greedy(3))
        (output,) = drain(engine)
        assert (output.seq_id, len(output.token_ids)) == (seq_id, 40)

    def test_generate_returns_only_its_own(self, engine) -> None:
        engine.add_prompt([5, 6], greedy(3))
        result = engine.generate([[9, 9], [8]], greedy(6))
        assert [len(tokens) for tokens in result["token_ids"]] == [6, 6]


class TestAbort:
    def test_while_waiting(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy())
        assert engine.abort(seq_id)
        assert not engine.scheduler.is_finished()
        outputs, _, _ = engine.step()
        assert [(output.seq_id, output.token_ids, output.finish_reason) for output in outputs] == [
            (seq_id, [], "abort")
        ]
        assert engine.scheduler.is_finished()

    def test_in_the_middle_of_the_prompt(self, make_engine) -> None:
        engine = make_engine(max_num_batched_tokens=8)
        seq_id = engine.add_prompt([5] * 40, greedy())
        engine.step()
        engine.step()
        self.check(engine, seq_id, 0)

    @pytest.mark.parametrize("steps", [1, 2, 5])
    def test_while_running(self, engine, steps: int) -> None:
        seq_id = engine.add_prompt([5, 6], greedy(30))
        for _ in range(steps):
            engine.step()
        self.check(engine, seq_id, steps - 1)

    def test_while_preempted(self, make_engine) -> None:
        engine = make_engine(max_cached_blocks=5)
        seq_ids = [engine.add_prompt([token] * 30, greedy(40)) for token in (5, 6)]
        while not engine.stats()["preemptions"]:
            engine.step()
        assert engine.stats()["waiting"] == 1
        assert engine.abort(seq_ids[1])
        outputs = drain(engine)
        assert [(output.seq_id, output.finish_reason) for output in outputs] == [
            (seq_ids[1], "abort"),
            (seq_ids[0], "length"),
        ]

    def test_when_it_is_over_or_was_never_there(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy(1))
        drain(engine)
        assert not engine.abort(seq_id)
        assert not engine.abort(10**9)

    def test_twice(self, engine) -> None:
        seq_id = engine.add_prompt([5, 6], greedy())
        engine.step()
        assert engine.abort(seq_id)
        assert not engine.abort(seq_id)
        assert len(drain(engine)) == 1

    @staticmethod
    def check(engine, seq_id: int, num_tokens: int) -> None:
        other = engine.add_prompt([9], greedy(6))
        assert engine.abort(seq_id)
        outputs, _, _ = engine.step()
        assert [(output.seq_id, output.finish_reason, len(output.token_ids)) for output in outputs] == [
            (seq_id, "abort", num_tokens)
        ]
        assert [(output.seq_id, len(output.token_ids)) for output in drain(engine)] == [(other, 6)]
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


class TestEndOfText:
    """Tokens of the tiny model are made end-of-text ids by writing them into the checkpoint's files."""

    PROMPT = [3, 50]

    @pytest.fixture
    def tokens(self, engine) -> list[int]:
        tokens = engine.generate([self.PROMPT], greedy(20))["token_ids"][0]
        assert len(set(tokens[:8])) == 8, "another prompt is needed, whose completion does not repeat itself so soon"
        return tokens

    @staticmethod
    def copy(llama: str, folder, config=None, generation=None) -> str:
        shutil.copytree(llama, folder)
        for name, ids in (("config.json", config), ("generation_config.json", generation)):
            fields = json.loads((folder / name).read_text())
            fields.pop("eos_token_id", None)
            (folder / name).write_text(json.dumps(fields if ids is None else {**fields, "eos_token_id": ids}))
        return str(folder)

    @pytest.mark.parametrize("at", [0, 1, 5])
    @pytest.mark.parametrize("where", ["config", "generation"])
    def test_one_id_or_several_in_either_file(self, make_engine, llama, tmp_path, tokens, where: str, at: int) -> None:
        for ids in (tokens[at], [511, tokens[at], tokens[at + 2]]):
            folder = self.copy(llama, tmp_path / str(type(ids)), **{where: ids})
            engine = make_engine(model_name_or_path=folder)
            result = engine.generate([self.PROMPT], greedy(20, ignore_eos=False))
            assert result["token_ids"] == [tokens[: at + 1]]
            assert result["finish_reason"] == ["stop"]
            assert engine.generate([self.PROMPT], greedy(20))["token_ids"] == [tokens]

    def test_the_union_of_both_files_and_the_user_s(self, make_engine, llama, tmp_path, tokens) -> None:
        folder = self.copy(llama, tmp_path / "both", config=511, generation=[tokens[6]])
        assert self.stop(make_engine(model_name_or_path=folder)) == tokens[:7]
        with pytest.warns(UserWarning, match="is not among the checkpoint's end-of-text ids"):
            engine = make_engine(model_name_or_path=folder, eos=tokens[3])
        assert self.stop(engine) == tokens[:4]
        assert engine.generate([self.PROMPT], greedy(20, stop_token_ids=(tokens[2],)))["token_ids"] == [tokens[:3]]

    def test_none_but_the_tokenizer_s(self, make_engine, llama, tmp_path, tokens) -> None:
        folder = self.copy(llama, tmp_path / "none")
        engine = make_engine(model_name_or_path=folder)
        assert engine.scheduler.eos_token_ids == {1}
        (tmp_path / "none" / "generation_config.json").unlink()
        assert make_engine(model_name_or_path=folder).scheduler.eos_token_ids == {1}

    def test_the_rest_of_the_generation_config_is_at_hand(self, make_engine, llama, tmp_path) -> None:
        folder = self.copy(llama, tmp_path / "more", generation=7)
        file = tmp_path / "more" / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.6, "top_k": 20}))
        engine = make_engine(model_name_or_path=folder)
        assert engine.generation_config["eos_token_id"] == 7
        expected = SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
        assert SamplingParams.from_checkpoint(engine, max_tokens=9) == expected
        assert SamplingParams.from_checkpoint(folder, max_tokens=9) == expected

    def test_the_last_token_allowed_may_be_end_of_text(self, make_engine, llama, tmp_path, tokens) -> None:
        engine = make_engine(model_name_or_path=self.copy(llama, tmp_path / "last", config=tokens[4]))
        assert engine.generate([self.PROMPT], greedy(5, ignore_eos=False))["finish_reason"] == ["stop"]
        assert engine.generate([self.PROMPT], greedy(4, ignore_eos=False))["finish_reason"] == ["length"]

    def stop(self, engine) -> list[int]:
        return engine.generate([self.PROMPT], greedy(20, ignore_eos=False))["token_ids"][0]


class TestNaN:
    """A checkpoint whose embedding of one id is NaN."""

    @pytest.fixture
    def engine(self, make_engine):
        engine = make_engine(max_cached_blocks=8)
        with torch.inference_mode():
            engine.runner.model.model.embed_tokens.weight[500] = torch.nan
        return engine

    def test_only_that_request_fails_and_its_sentence_is_given(self, engine) -> None:
        prompts = [[2] * 20, [3] * 20 + [500], [4] * 20]
        alone = [engine.generate([prompt], greedy(8))["token_ids"][0] for prompt in (prompts[0], prompts[2])]
        result = engine.generate(prompts, greedy(8))
        assert result["finish_reason"] == ["length", "error", "length"]
        assert [error is None for error in result["errors"]] == [True, False, True]
        assert "NaN" in result["errors"][1]
        assert [result["token_ids"][0], result["token_ids"][2]] == alone
        assert result["token_ids"][1] == []

    def test_its_blocks_are_clean_for_whoever_gets_them_next(self, engine) -> None:
        for _ in range(3):
            assert engine.generate([[500] * 60], greedy(8))["finish_reason"] == ["error"]
        prompts = [[token] * 40 for token in (2, 3)]
        assert engine.generate(prompts, greedy(8))["finish_reason"] == ["length"] * 2
        assert not engine.runner.pool.data.isnan().any()
        assert engine.stats()["free_blocks"] == 8

    def test_the_prefix_before_it_is_shared_and_stays_clean(self, engine) -> None:
        shared = list(range(10, 42))
        alone = engine.generate([shared + [7]], greedy(8))["token_ids"]
        seq_id = engine.add_prompt([*shared, 7], greedy(20))
        engine.step()
        assert engine.generate([shared + [500]], greedy(8))["finish_reason"] == ["error"]
        assert engine.generate([shared + [7]], greedy(8))["token_ids"] == alone
        (output,) = drain(engine)
        assert output.seq_id == seq_id
        assert output.token_ids[:8] == alone[0]

    def test_sampling_with_top_p_fails_alike(self, engine) -> None:
        params = SamplingParams(temperature=1, top_p=0.9, max_tokens=4, ignore_eos=True, seed=1)
        result = engine.generate([[500], [7]], params)
        assert result["finish_reason"] == ["error", "length"]


class TestSeeds:
    SAMPLED = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}

    def test_the_engine_s_seed_makes_a_whole_session_reproducible(self, make_engine) -> None:
        prompts = [[5, 6]] * 3
        params = SamplingParams(**self.SAMPLED)
        first, again, other = (make_engine(seed=seed).generate(prompts, params)["token_ids"] for seed in (3, 3, 4))
        assert first == again != other
        assert len({tuple(tokens) for tokens in first}) == 3

    def test_a_request_s_seed_decides_alone(self, engine) -> None:
        params = [SamplingParams(**self.SAMPLED, seed=seed) for seed in (7, 2**64 - 1, 0, 7)]
        first = engine.generate([[5, 6]] * 4, params)["token_ids"]
        again = engine.generate([[9] * 30] * 3 + [[5, 6]] * 4, params[:3] + params)["token_ids"][3:]
        assert first == again
        assert first[0] == first[3]
        assert len({tuple(tokens) for tokens in first}) == 3

    def test_greedy_and_sampled_rows_of_one_batch_do_not_disturb_each_other(self, engine) -> None:
        kinds = [greedy(16), SamplingParams(**self.SAMPLED, seed=5), SamplingParams(**self.SAMPLED, seed=6, top_k=9)]
        alone = [engine.generate([[5, 6]], params)["token_ids"][0] for params in kinds]
        assert engine.generate([[5, 6]] * 3, kinds)["token_ids"] == alone


def test_engines_end_with_the_interpreter(llama) -> None:
    import subprocess
    import sys

    code = (
        "from tritonllm import LLMEngine, SamplingParams\n"
        f"engine = LLMEngine({llama!r}, device='cpu', max_model_length=32)\n"
        "print(len(engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))['token_ids'][0]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "3\n"
    assert "Traceback" not in done.stderr


def test_an_engine_that_nobody_holds_gives_its_memory_back(llama) -> None:
    import gc

    engine = LLMEngine(llama, device="cpu", max_model_length=32)
    runner = engine.runner
    del engine
    gc.collect()
    assert not hasattr(runner, "model")
