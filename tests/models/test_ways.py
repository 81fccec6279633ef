"""One answer, many ways: chunked, batched, cached, preempted, one after another, with the graph double and without."""

from __future__ import annotations

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.testing import assert_ways_agree

CASES = [
    ("llama", "9/3x64"),
    ("qwen2", "28/4x32"),
    pytest.param("qwen3", "4/2x32", marks=pytest.mark.slow),
    pytest.param("mistral", "8/1x80", marks=pytest.mark.slow),
]


def prompts() -> list[list[int]]:
    """Of many lengths, around the size of a block; the last three share 48 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 15, 16, 17, 33)
    shared = torch.randint(2, 512, (48,), generator=generator).tolist()
    apart = [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]
    return apart + [shared + tail for tail in ([7], [8, 9], [])]


@pytest.mark.parametrize(("family", "heads"), CASES)
def test_every_way_gives_the_tokens_of_a_prompt_alone(tiny, family: str, heads: str) -> None:
    folder, _ = tiny(family, heads=heads)
    assert_ways_agree(folder, prompts(), 24, device="cpu")


@pytest.mark.parametrize("limit", [3, 5, 8])
def test_a_shrinking_batch_gives_what_each_prompt_gives_alone(tiny, limit: int) -> None:
    folder, _ = tiny("llama")
    lengths = [5, 9, 17, 33, 2, 40, 11, 26]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    asked = prompts()
    with LLMEngine(folder, device="cpu", block_size=16, max_num_sequences=limit, max_model_length=96) as engine:
        together = engine.generate(asked, params)["token_ids"]
    with LLMEngine(folder, device="cpu", block_size=16, max_num_sequences=1, max_model_length=96) as engine:
        alone = [engine.generate(prompt, param)["token_ids"][0] for prompt, param in zip(asked, params, strict=True)]
    assert [len(tokens) for tokens in together] == lengths
    assert together == alone


def test_a_sampled_request_is_as_reproducible_as_a_greedy_one(tiny) -> None:
    folder, _ = tiny("llama")
    asked = prompts()
    params = [
        SamplingParams(temperature=0.8, top_p=top_p, top_k=top_k, seed=seed, max_tokens=28, ignore_eos=True)
        for seed, (top_p, top_k) in enumerate([(1.0, 0), (0.9, 0), (1.0, 20), (0.8, 50)] * 2)
    ]
    keys = {"model_name_or_path": folder, "device": "cpu", "block_size": 16, "max_model_length": 96}
    with LLMEngine({**keys, "max_num_sequences": 8}) as engine:
        together = engine.generate(asked, params)["token_ids"]
        backwards = engine.generate(asked[::-1], params[::-1])["token_ids"][::-1]
    with LLMEngine({**keys, "max_num_sequences": 8, "max_cached_blocks": 6}) as engine:
        preempted = engine.generate(asked, params)["token_ids"]
        assert engine.stats()["preemptions"] > 0
    with LLMEngine({**keys, "max_num_sequences": 8, "max_num_batched_tokens": 8}) as engine:
        chunked = engine.generate(asked, params)["token_ids"]
    with LLMEngine({**keys, "max_num_sequences": 1}) as engine:
        alone = [engine.generate([prompt], param)["token_ids"][0] for prompt, param in zip(asked, params, strict=True)]
    assert alone == together == backwards == preempted == chunked
