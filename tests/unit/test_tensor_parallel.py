"""Several ranks compute what one computes: logits, greedy tokens, draws; chunked, preempted, from real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonllm import EngineConfig, LLMEngine, ModelRunner, SamplingParams, Sequence
from tritonllm.engine.bad_words import tokenize_bad_words
from tritonllm.engine.resolve import resolve_model
from tritonllm.errors import ConfigError
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

PROMPTS = [list(range(40, 77)), [5, 6, 7], list(range(300, 333)), list(range(40, 70)), [9] * 20, [7, 7, 8]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1, top_k=20, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=1,
        seed=6,
        max_tokens=16,
        ignore_eos=True,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={7: 3.0, 8: -5.0},
        allowed_token_ids=tuple(range(0, 300, 2)) + (7,),
        bad_words=tuple("abcdefghijklmnopqrstuvwxyz") + ("of the",),
        logprobs=2,
        prompt_logprobs=1,
    ),
]
"""Greedy, plain temperature, and two that need whole logits; the prompts do not fit the pool all at once."""

LIMITS = {
    "device": "cpu",
    "block_size": 8,
    "max_model_length": 64,
    "max_num_sequences": 4,
    "max_num_batched_tokens": 24,
    "max_cached_blocks": 16,
}


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of a prompt at all positions, and of one decode step after it."""
    seq = Sequence(PROMPTS[0], PARAMS[0], block_size=8)
    seq.block_table = [3, 1, 4, 5, 9, 2]
    prompt = runner.run_model(runner.prepare_prefill([seq]), is_prefill=True, all_positions=True)
    seq.num_computed_tokens = len(seq)
    seq.append_token(8)
    return torch.cat([prompt, runner.run_model(runner.prepare_decode([seq]), is_prefill=False)])


CASES = [
    pytest.param("llama", "4/2x32", {}, 2, id="llama"),
    pytest.param("qwen2", "4/2x32", {}, 2, id="qwen2, with biases"),
    pytest.param("qwen3", "9/3x64", {"tie_word_embeddings": True, "vocab_size": 509}, 3, id="qwen3 of 509 ids, tied"),
    *(
        pytest.param(*case, id=name, marks=pytest.mark.slow)
        for name, case in {
            "llama, tied": ("llama", "4/2x32", {"tie_word_embeddings": True}, 2),
            "llama in three": ("llama", "9/3x64", {}, 3),
            "llama with biases": ("llama", "4/2x32", {"attention_bias": True, "mlp_bias": True}, 2),
            "gemma2, one key head for two ranks": ("gemma2", "8/1x80", {}, 2),
            "gemma3": ("gemma3_text", "4/2x32", {}, 2),
            "phi3 in three, stacked projections": ("phi3", "9/3x64", {}, 3),
            "olmo2, one key head for two ranks": ("olmo2", "8/1x80", {}, 2),
            "olmo2 in three": ("olmo2", "9/3x64", {"attention_bias": True}, 3),
            "qwen3, one key head for two ranks": ("qwen3", "8/1x80", {}, 2),
            "qwen2, key heads on two of four ranks each": ("qwen2", "12/2x64", {"vocab_size": 509}, 4),
        }.items()
    ),
]


@pytest.mark.parametrize(("family", "heads", "fields", "world_size"), CASES)
@pytest.mark.usefixtures("_one_thread")
def test_any_number_of_ranks_gives_the_same(tmp_path, family: str, heads: str, fields: dict, world_size: int) -> None:
    save_tiny_checkpoint(tiny_hf_config(family, heads=heads, **fields), tmp_path / "tiny")
    results = []
    for size in (1, world_size):
        with LLMEngine(str(tmp_path / "tiny"), world_size=size, **LIMITS) as engine:
            assert engine.config.max_cached_blocks == 16
            result = engine.generate(PROMPTS, PARAMS)
            tokens = result["token_ids"]
            assert [entry.token_id for entry in result["logprobs"][-1]] == tokens[-1]
            assert [entry.token_id for entry in result["prompt_logprobs"][-1][1:]] == PROMPTS[-1][1:]
            bad_words = tokenize_bad_words(PARAMS[-1].bad_words, engine.tokenizer)
            assert not {(token,) for token in tokens[-1]} & {*bad_words}
            assert engine.stats()["preemptions"] > 0
            results.append((tokens, logits_of(engine.runner)))
    (expected, expected_logits), (found, found_logits) = results
    assert found_logits.shape == (len(PROMPTS[0]) + 1, fields.get("vocab_size", 512))
    torch.testing.assert_close(found_logits, expected_logits, atol=1e-5, rtol=1e-5)
    assert found == expected


@pytest.mark.usefixtures("_one_thread")
def test_a_plugin_s_model_is_split_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugins" / "tritonllm-toy")
    shape = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
    results = []
    for size in (1, 2):
        config = EngineConfig("Qwen3-0.6B", load_format="dummy", world_size=size, num_kv_heads=2, **shape, **LIMITS)
        resolved = resolve_model(config)
        spec = replace(resolved.spec, model="tritonllm_toy.model:ToyForCausalLM")
        runner = ModelRunner(config, resolved=replace(resolved, spec=spec))
        results.append(logits_of(runner))
        runner.exit()
    assert results[0].std() > 0.01
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_one_thread")
def test_nan_on_one_shard_fails_the_request(tmp_path) -> None:
    model = save_tiny_checkpoint(tiny_hf_config("llama"), tmp_path / "tiny", tokenizer=False)
    with torch.no_grad():
        model.lm_head.weight[400] = torch.nan
    model.save_pretrained(tmp_path / "tiny")
    with LLMEngine(str(tmp_path / "tiny"), world_size=2, **LIMITS) as engine:
        head = engine.runner.model.lm_head
        assert (head.start, head.num_held) == (0, 256)
        assert not head.weight.isnan().any()  # rank 0 cannot know
        assert engine.generate(PROMPTS[:3], PARAMS[:3])["finish_reason"] == ["error"] * 3


def test_heads_that_cannot_be_split_are_refused(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"world_size=3 .* num_heads=4 .* use one of 1, 2, 4\.$"):
        LLMEngine(llama, world_size=3, device="cpu")
