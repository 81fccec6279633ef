"""The documented way to use the engine, word for word: one dict with every key, chat template by the caller, two loops.

On a random Qwen3 of tiny width, in a folder named like the real one and with the real vocabulary size.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from tritonllm import LLMEngine, SamplingParams


@pytest.fixture(scope="module")
def model_path(_one_thread, tmp_path_factory: pytest.TempPathFactory) -> str:
    from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

    folder = tmp_path_factory.mktemp("models") / "Qwen3-0.6B"
    hf_config = tiny_hf_config(
        "qwen3",
        heads="4/2x32",
        vocab_size=151936,
        hidden_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_theta=1000000,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    save_tiny_checkpoint(hf_config, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    return str(folder)


def engine_config(model_path: str) -> dict[str, Any]:
    return {
        "model_name_or_path": model_path,
        "world_size": 1,
        "max_num_sequences": 16,
        "max_num_batched_tokens": 1024,
        "max_cached_blocks": 64,
        "block_size": 256,
        "eos": 151645,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.9,
        "max_num_batch_tokens": 4096,
        "max_num_seqs": 16,
        "max_model_length": 128,
        "vocab_size": 151936,
        "hidden_size": 64,
        "num_heads": 4,
        "head_dim": 32,
        "num_kv_heads": 2,
        "intermediate_size": 192,
        "num_layers": 2,
        "tie_word_embeddings": True,
        "base": 1000000,
        "rms_norm_epsilon": 1e-6,
        "qkv_bias": False,
        "scale": 1,
        "max_position": 32768,
        "ffn_bias": False,
        # On a machine with a GPU too, this lane tests the references.
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def config(model_path: str) -> dict[str, Any]:
    return engine_config(model_path)


@pytest.fixture(scope="module")
def llm(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLMEngine(config)
    yield llm
    llm.exit()


@pytest.fixture(scope="module")
def prompts(llm) -> list[str]:
    questions = ["introduce yourself", "list all prime numbers within 100", "introduce yourself"]
    return [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for question in questions
    ]


SAMPLING = SamplingParams(temperature=0.6, max_tokens=256, max_model_length=128)


def test_the_caller_s_dict_gets_the_blocks_in_effect(llm, config, model_path) -> None:
    assert config["max_cached_blocks"] == llm.config.max_cached_blocks == llm.scheduler.block_manager.num_blocks == 64
    assert {**config, "max_cached_blocks": 64} == engine_config(model_path)
    assert llm.config.max_num_batched_tokens == 1024
    assert llm.config.warm_up_tokens == 4096
    assert llm.scheduler.eos_token_ids >= {151645, 151643}
    without = {key: value for key, value in engine_config(model_path).items() if key != "max_cached_blocks"}
    with LLMEngine(without) as engine:
        assert without["max_cached_blocks"] == engine.config.max_cached_blocks == 16


def test_generate(llm, prompts) -> None:
    outputs = llm.generate(prompts, SAMPLING)
    assert len(outputs["text"]) == len(outputs["token_ids"]) == 3
    for prompt, text, token_ids in zip(prompts, outputs["text"], outputs["token_ids"], strict=True):
        length = len(llm.tokenizer.encode(prompt, add_special_tokens=False))
        assert text == llm.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert length + len(token_ids) == 128 or token_ids[-1] in llm.scheduler.eos_token_ids


def test_the_step_loop(llm, prompts, capsys) -> None:
    for prompt in prompts:
        llm.add_prompt(prompt, SAMPLING)
    finished: dict[int, list[int]] = {}
    total = 0
    while not llm.scheduler.is_finished():
        outputs, num_processed_tokens, is_prefill = llm.step()
        print(f"{'prefill' if is_prefill else 'decode'}: {num_processed_tokens} tokens")  # noqa: T201
        total += num_processed_tokens
        for seq_id, token_ids in outputs:
            finished[seq_id] = token_ids
    assert len(finished) == 3
    lines = capsys.readouterr().out.splitlines()
    lengths = [len(llm.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    assert lines[0] == f"prefill: {sum(lengths)} tokens"
    assert lines[1] == "decode: 3 tokens"
    assert lines[-1] == "decode: 0 tokens"
    # Every token but each last one was computed with; an end of text is followed by one surplus step at most.
    needed = sum(lengths) + sum(len(tokens) - 1 for tokens in finished.values())
    assert needed <= total <= needed + 3


def test_both_ways_give_the_same_tokens_for_the_same_seed(llm, prompts) -> None:
    params = [SamplingParams(temperature=0.6, max_tokens=20, max_model_length=128, seed=seed) for seed in range(3)]
    ids = [llm.add_prompt(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    finished: dict[int, list[int]] = {}
    while not llm.scheduler.is_finished():
        finished.update(dict(tuple(output) for output in llm.step()[0]))
    assert [finished[seq_id] for seq_id in ids] == llm.generate(prompts, params)["token_ids"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 1024), ("num_layers", 28), ("head_dim", 128), ("base", 10000), ("scale", 2), ("qkv_bias", True)],
)
def test_a_key_that_contradicts_the_checkpoint_is_refused(model_path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}={value!r} contradicts the checkpoint"):
        LLMEngine({**engine_config(model_path), key: value})


def test_the_two_names_of_one_key_must_agree(model_path) -> None:
    with pytest.raises(ValueError, match="max_num_sequences=16 and max_num_seqs=8 are two names of one key"):
        LLMEngine({**engine_config(model_path), "max_num_seqs": 8})
