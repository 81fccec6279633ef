"""Log probabilities of prompts and completions, against those of transformers."""

from __future__ import annotations

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probabilities_are_those_of_transformers(tiny, family: str) -> None:
    folder, twin = tiny(family, heads="4/2x32")
    prompt = torch.randint(2, 512, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(
        temperature=0.8, seed=1, repetition_penalty=1.3, top_k=50, max_tokens=9, ignore_eos=True,
        logprobs=5, prompt_logprobs=5,
    )  # fmt: skip
    with LLMEngine(folder, device="cpu", dtype="float32", max_model_length=96, max_num_batched_tokens=32) as engine:
        result = engine.generate([prompt], params)
    tokens = prompt + result["token_ids"][0]
    with torch.no_grad():
        exact = twin(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
    entries = result["prompt_logprobs"][0][1:] + result["logprobs"][0]
    assert len(entries) == len(tokens) - 1
    for entry, token, logprobs in zip(entries, tokens[1:], exact, strict=False):
        assert entry.token_id == token
        ids = torch.tensor([token, *(other for other, _ in entry.top)])
        values = torch.tensor([entry.logprob, *(value for _, value in entry.top)], dtype=torch.float64)
        torch.testing.assert_close(values, logprobs[ids], rtol=0, atol=2e-4)
        # Of logits that are nearly equal either may come first.
        torch.testing.assert_close(values[1:], logprobs.topk(5).values, rtol=0, atol=2e-4)
