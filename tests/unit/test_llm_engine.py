"""What a caller of `generate`, `chat` and `stream` gets, and what is refused before anything is queued."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch

from tritonllm import EngineConfig, LLMEngine, SamplingParams
from tritonllm.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    RequestError,
    UnknownModelError,
    UnsupportedModelError,
)

PROMPTS = [[2, 3, 4], [9] * 20, [7]]


def greedy(max_tokens: int | None = 5, **params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})


class TestGenerate:
    def test_one_entry_a_prompt_under_every_key_in_the_order_of_the_prompts(self, engine) -> None:
        result = engine.generate(PROMPTS, [greedy(n) for n in (7, 1, 4)])
        assert list(result) == [
            "text", "token_ids", "finish_reason", "stop_reason", "usage", "errors", "logprobs", "prompt_logprobs",
        ]  # fmt: skip
        assert [len(tokens) for tokens in result["token_ids"]] == [7, 1, 4]
        assert result["finish_reason"] == ["length"] * 3
        assert result["errors"] == [None] * 3
        assert [usage["prompt_tokens"] for usage in result["usage"]] == [3, 20, 1]
        assert [usage["completion_tokens"] for usage in result["usage"]] == [7, 1, 4]
        assert result["text"] == [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in result["token_ids"]]

    def test_more_prompts_than_rows(self, engine) -> None:
        prompts = [[token, token + 1] for token in range(2, 20)]
        alone = [engine.generate([prompt], greedy(3))["token_ids"][0] for prompt in prompts]
        assert engine.generate(prompts, greedy(3))["token_ids"] == alone

    def test_one_prompt_need_not_be_in_a_list(self, engine) -> None:
        ids = engine.tokenizer.encode("The capital")
        results = [engine.generate(prompt, greedy()) for prompt in ("The capital", ["The capital"], ids, [ids])]
        assert all(result["token_ids"] == results[0]["token_ids"] for result in results)
        assert all(result["usage"][0]["prompt_tokens"] == len(ids) for result in results)

    def test_no_prompts_give_empty_lists(self, engine) -> None:
        assert engine.generate([], greedy()) == dict.fromkeys(
            ("text", "token_ids", "finish_reason", "stop_reason", "usage", "errors", "logprobs", "prompt_logprobs"), []
        )

    def test_sampling_params_default(self, engine) -> None:
        assert len(engine.generate([[5]])["token_ids"][0]) <= SamplingParams().max_tokens

    def test_an_idle_engine_holds_no_blocks(self, engine) -> None:
        eos = engine.generate([[5, 6]], greedy(1))["token_ids"][0][0]
        engine.generate([[5, 6], [8] * 40], greedy(30, stop_token_ids=(eos,)))
        assert engine.scheduler.is_finished()
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 16])
    @pytest.mark.parametrize("length", [14, 15, 16, 17])
    def test_exactly_max_tokens(self, engine, max_tokens: int, length: int) -> None:
        result = engine.generate([[3] * length], greedy(max_tokens))
        assert len(result["token_ids"][0]) == max_tokens

    def test_no_max_tokens_runs_to_the_length_limit(self, engine) -> None:
        result = engine.generate([[3] * 10], greedy(None))
        assert len(result["token_ids"][0]) == 96 - 10
        assert result["finish_reason"] == ["length"]

    def test_a_request_s_own_length_limit(self, engine) -> None:
        result = engine.generate([[3] * 10, [4] * 10], [greedy(50, max_model_length=20), greedy(50)])
        assert [len(tokens) for tokens in result["token_ids"]] == [10, 50]
        assert result["finish_reason"] == ["length", "length"]

    @pytest.mark.parametrize("length", [94, 95])
    def test_a_prompt_just_below_the_length_limit(self, engine, length: int) -> None:
        assert len(engine.generate([[3] * length], greedy(50))["token_ids"][0]) == 96 - length

    def test_the_prompt_sent_again_is_found_in_the_prefix_cache(self, make_engine) -> None:
        for length in (15, 16, 17, 32):
            engine = make_engine()
            prompt = [3] * length
            first, second, both = (engine.generate(prompts, greedy()) for prompts in ([prompt], [prompt], [prompt] * 2))
            assert first["token_ids"] == second["token_ids"]
            assert both["token_ids"] == first["token_ids"] * 2
            cached = (length - 1) // 16 * 16
            assert [r["usage"][0]["cached_tokens"] for r in (first, second, both)] == [0, cached, cached]

    def test_a_progress_bar_on_request(self, engine, capsys) -> None:
        expected = engine.generate(PROMPTS, greedy(9))["token_ids"]
        assert capsys.readouterr() == ("", "")
        assert engine.generate(PROMPTS, greedy(9), use_tqdm=True)["token_ids"] == expected
        out, err = capsys.readouterr()
        last = err.replace("\r", "\n").strip().splitlines()[-1]
        assert out == ""
        assert "generate: 100%" in last
        assert "3/3" in last
        assert re.search(r"prefill=[\d,]+ tokens/s, decode=[\d,]+ tokens/s", last)
        assert engine.generate([], greedy(9), use_tqdm=True)["token_ids"] == []


class TestText:
    def test_bos_comes_once_whether_the_template_wrote_it_or_not(self, engine) -> None:
        messages = [{"role": "user", "content": "What is it?"}]
        text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith("<s>")
        ids = engine.apply_chat_template(messages)
        assert ids.count(0) == 1
        from_text, from_ids, chat = (
            engine.generate([text], greedy()),
            engine.generate([ids], greedy()),
            engine.chat(messages, greedy()),
        )
        assert from_text["token_ids"] == from_ids["token_ids"] == chat["token_ids"]
        assert [r["usage"][0]["prompt_tokens"] for r in (from_text, from_ids, chat)] == [len(ids)] * 3
        plain = engine.generate(["What is it?"], greedy())
        assert plain["usage"][0]["prompt_tokens"] == 1 + len(
            engine.tokenizer.encode("What is it?", add_special_tokens=False)
        )

    def test_special_tokens_are_left_out_of_the_text_on_request_and_never_out_of_the_ids(self, engine) -> None:
        eos = engine.generate([[5, 6]], greedy(1))["token_ids"][0][0]
        name = engine.tokenizer.convert_ids_to_tokens(eos)
        engine.tokenizer.add_special_tokens({"additional_special_tokens": [name]})
        kept, left_out = engine.generate([[5, 6]] * 2, [greedy(1, skip_special_tokens=skip) for skip in (False, True)])[
            "text"
        ]
        assert left_out == ""
        assert kept == name

    def test_chat_without_a_template_says_what_to_do(self, engine) -> None:
        engine.tokenizer.chat_template = None
        with pytest.raises(RequestError, match=r"no chat template; use generate\(\)"):
            engine.chat([{"role": "user", "content": "hi"}])

    def test_pieces_of_a_stream_join_to_the_text(self, engine) -> None:
        prompts = ["The capital of", "日本語 👩‍👩‍👧", "Příliš žluťoučký kůň"]
        params = [SamplingParams(temperature=1, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]
        whole = engine.generate(prompts, params)
        pieces = list(engine.stream(prompts, params))
        for index in range(3):
            own = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in own) == whole["text"][index]
            assert [token for piece in own for token in piece.token_ids] == whole["token_ids"][index]
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]

    def test_a_stream_that_is_dropped_is_aborted_and_never_reported_by_step(self, engine) -> None:
        stream = engine.stream([[3] * 20, [4] * 20], greedy(60))
        next(stream)
        stream.close()
        while not engine.scheduler.is_finished():
            assert engine.step()[0] == []
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    def test_a_stream_that_nobody_reads_queues_nothing(self, engine) -> None:
        engine.stream([[3] * 20], greedy(60))
        assert engine.scheduler.is_finished()

    def test_two_streams_side_by_side(self, engine) -> None:
        alone = [engine.generate([prompt], greedy(12))["token_ids"][0] for prompt in ([5, 6], [8] * 18)]
        streams = [engine.stream([prompt], greedy(12)) for prompt in ([5, 6], [8] * 18)]
        tokens: list[list[int]] = [[], []]
        live = [0, 1]
        while live:
            for index in list(live):
                piece = next(streams[index], None)
                if piece is None:
                    live.remove(index)
                else:
                    tokens[index] += piece.token_ids
        assert tokens == alone


class TestRefusals:
    """A ValueError that names the index; nothing of the call is queued; requests already there go on."""

    BAD = {
        "empty text without BOS": ([[3], []], greedy(), r"prompt 1: the prompt is empty"),
        "empty ids": ([[]], greedy(), r"prompt 0: the prompt is empty"),
        "at the limit": ([[3], [3] * 96], greedy(), r"prompt 1: .* 96 tokens .* max_model_length = 96"),
        "own limit": ([[3] * 8], greedy(max_model_length=8), r"prompt 0: .* 8 tokens"),
        "id too large": ([[3], [4], [5, 512]], greedy(), r"prompt 2: token id 512 .* \[0, 512\)"),
        "id negative": ([[-1]], greedy(), r"prompt 0: token id -1"),
        "not an id": ([[3], ["a"]], greedy(), r"prompt 1: token id 'a'"),
        "a bool": ([[3, True]], greedy(), r"prompt 0: token id True"),
        "no prompt": ([[3], None], greedy(), r"prompt 1: a prompt is a string or a list"),
        "nothing like prompts": (None, greedy(), r"prompts are strings or lists"),
        "too few params": ([[3], [4]], [greedy()], r"2 prompts but 1 sampling params"),
        "not params": ([[3], [4]], [greedy(), 0.5], r"sampling params 1 is float"),
        "nothing like params": ([[3]], 0.5, r"sampling params are"),
    }

    @pytest.mark.parametrize("case", BAD)
    @pytest.mark.parametrize("method", ["generate", "stream"])
    def test_bad_arguments(self, engine, method: str, case: str) -> None:
        prompts, params, message = self.BAD[case]
        before = engine.add_prompt([5, 6], greedy(6))
        engine.step()
        with pytest.raises(ValueError, match=message):
            getattr(engine, method)(prompts, params)
        assert engine.stats()["requests"] == 1
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        assert [(output.seq_id, len(output.token_ids)) for output in outputs] == [(before, 6)]

    def test_add_prompt_refuses_the_same(self, engine) -> None:
        for prompt, params in (([], None), ([3] * 96, None), ([512], None), (None, None), ([3], 0.5), ([3], [])):
            with pytest.raises(ValueError):
                engine.add_prompt(prompt, params)
        assert engine.scheduler.is_finished()

    def test_an_empty_text_and_one_of_which_the_tokenizer_makes_nothing(self, engine) -> None:
        with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
            engine.generate([[3], ""], greedy())
        engine.tokenizer.encode = lambda text, add_special_tokens=True: []
        with pytest.raises(RequestError, match="prompt 0: the prompt is empty"):
            engine.generate([" "], greedy())

    @pytest.mark.parametrize(("length", "fits"), [(31, True), (32, True), (33, False)])
    def test_a_prompt_that_can_never_fit_the_pool(self, make_engine, length: int, fits: bool) -> None:
        engine = make_engine(max_cached_blocks=2)
        if not fits:
            with pytest.raises(RequestError, match=r"prompt 0: .* 33 tokens and can never fit the KV cache of 32"):
                engine.generate([[3] * length], greedy(50))
        for _ in range(2):
            kept = min(length, 32)
            result = engine.generate([[3] * kept, [4]], greedy(50))
            assert [len(tokens) for tokens in result["token_ids"]] == [33 - kept, 32]
            assert result["finish_reason"] == ["length", "length"]

    @pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": math.nan}, {"top_p": 1.1}, {"max_tokens": 0}])
    def test_bad_sampling_values_never_reach_the_engine(self, bad) -> None:
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)

    def test_a_string_without_a_tokenizer(self) -> None:
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2}
        keys = {"load_format": "dummy", "device": "cpu", "max_model_length": 32, "max_num_sequences": 2, **shape}
        with LLMEngine("Qwen3-0.6B", **keys) as engine:
            with pytest.raises(RequestError, match="prompt 0: a string prompt needs a tokenizer"):
                engine.generate(["hi"])
            result = engine.generate([[3, 4]], greedy(3))
        assert result["text"] == [""]
        assert len(result["token_ids"][0]) == 3


class TestStart:
    def test_an_unknown_key_names_the_closest(self, llama) -> None:
        with pytest.raises(ConfigError, match="did you mean 'max_num_sequences'"):
            LLMEngine({"model_name_or_path": llama, "max_num_sequence": 4})
        with pytest.raises(ConfigError, match="did you mean 'world_size'"):
            LLMEngine(llama, tensor_parallel_size=1)

    def test_a_contradiction_of_the_checkpoint(self, llama) -> None:
        with pytest.raises(ConfigError, match="hidden_size=256 contradicts the checkpoint, which says 128"):
            LLMEngine(llama, device="cpu", hidden_size=256)

    def test_a_limit_beyond_the_positions(self, llama) -> None:
        with pytest.raises(ConfigError, match="max_model_length=257 is above the model's 256 positions"):
            LLMEngine(llama, device="cpu", max_model_length=257)

    def test_a_file_that_is_not_there(self, tmp_path) -> None:
        with pytest.raises(CheckpointError, match="There is no file or folder"):
            LLMEngine(str(tmp_path / "nowhere"))

    def test_an_architecture_that_nobody_serves(self, tmp_path) -> None:
        from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

        save_tiny_checkpoint(tiny_hf_config("gemma"), tmp_path / "mine")
        with pytest.raises(UnknownModelError, match=r"No model serves checkpoint 'mine' .*GemmaForCausalLM"):
            LLMEngine(str(tmp_path / "mine"), device="cpu")

    def test_three_ways_to_configure(self, llama) -> None:
        keys = {"device": "cpu", "block_size": 16, "max_model_length": 64, "max_num_sequences": 3}
        asked = {"model_name_or_path": llama, **keys}
        config = EngineConfig.from_dict(asked)
        engines = [LLMEngine(asked), LLMEngine(config), LLMEngine(llama, **keys)]
        assert asked["max_cached_blocks"] == 3 * 4
        assert config.max_cached_blocks is None
        assert len({engine.config for engine in engines}) == 1
        assert engines[0].config.max_cached_blocks == engines[0].scheduler.block_manager.num_blocks == 12
        assert engines[0].config.dtype == "float32"
        for engine in engines:
            engine.exit()


class TestEnd:
    def test_exit_twice_and_use_after_it(self, engine) -> None:
        seq_id = engine.add_prompt([3], greedy())
        engine.exit()
        engine.exit()
        for use in (
            lambda: engine.generate([[3]]),
            lambda: engine.stream([[3]]),
            lambda: engine.add_prompt([3]),
            lambda: engine.step(),
            lambda: engine.chat([{"role": "user", "content": "hi"}]),
        ):
            with pytest.raises(EngineError, match=r"closed by exit\(\)"):
                use()
        assert engine.abort(seq_id)

    def test_a_context_manager_closes_even_when_its_body_fails(self, llama) -> None:
        with pytest.raises(KeyError), LLMEngine(llama, device="cpu", max_model_length=32) as engine:
            raise KeyError
        with pytest.raises(EngineError):
            engine.step()

    def test_memory_is_given_back(self, engine) -> None:
        engine.exit()
        assert not any(isinstance(value, torch.Tensor) for value in vars(engine.runner).values())

    def test_two_engines_take_turns(self, make_engine) -> None:
        alone = [make_engine().generate([prompt], greedy(8))["token_ids"][0] for prompt in ([5, 6], [8] * 18)]
        engines = [make_engine(), make_engine(block_size=8)]
        for engine, prompt in zip(engines, ([5, 6], [8] * 18), strict=True):
            engine.add_prompt(prompt, greedy(8))
        outputs: list[list] = [[], []]
        while not all(engine.scheduler.is_finished() for engine in engines):
            for engine, found in zip(engines, outputs, strict=True):
                found += engine.step()[0]
        assert [found[0].token_ids for found in outputs] == alone
        engines[0].exit()
        assert engines[1].generate([[5, 6]], greedy(8))["token_ids"] == [alone[0]]


def test_cached_tokens_are_those_of_other_requests_and_not_of_itself_before_a_preemption(make_engine) -> None:
    engine = make_engine(block_size=8, max_cached_blocks=12)
    prompts = [[10 + index] * 5 for index in range(4)]
    result = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert engine.stats()["preemptions"] > 0
    assert [usage["cached_tokens"] for usage in result["usage"]] == [0] * 4


def test_a_pool_smaller_than_the_length_limit_is_said_at_the_start(make_engine, caplog) -> None:
    engine = make_engine(block_size=8, max_cached_blocks=2)
    assert "the KV cache holds 16 tokens" in caplog.text
    result = engine.generate([[1] * 10], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert (len(result["token_ids"][0]), result["finish_reason"]) == (7, ["length"])


def test_a_folder_named_like_another_family_is_refused(llama, tmp_path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    shutil.copytree(llama, folder)
    with pytest.raises(UnsupportedModelError, match=r"'qwen3' serves.*architectures=\['LlamaForCausalLM'\]"):
        LLMEngine(str(folder), device="cpu")
