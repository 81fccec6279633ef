"""Whole models against transformers: real SmolLM2 weights, and random weights of full size."""

from __future__ import annotations

import pytest
import torch
from hf_twins import MODELS, engine_logits, make_engine, make_twin, twin_greedy, twin_logits

from tritonllm import SamplingParams


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 49000, (length,), generator=generator).tolist()


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the root mean square of the reference."""
    return ((logits - reference).abs().max() / reference.pow(2).mean().sqrt()).item()


@pytest.mark.parametrize("name", MODELS)
def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(name):
    """At most twice the error that transformers' own bfloat16 makes, however the text is computed."""
    token_ids = prompt(700)
    reference = twin_logits(make_twin(name, torch.bfloat16, torch.float32), token_ids)
    allowed = 2 * relative_error(twin_logits(make_twin(name, torch.bfloat16, torch.bfloat16), token_ids), reference)
    llm = make_engine(name, "bfloat16")
    paths = {
        "prefill": ([len(token_ids)], len(token_ids)),
        "chunked": ([1, 8, 300, 556, 600], 600),
        "decode": ([650], 650),
    }
    errors = {
        path: relative_error(engine_logits(llm, token_ids, *how), reference)
        for path, how in paths.items()
        if path != "chunked"
    }
    errors["chunked"] = relative_error(engine_logits(llm, token_ids[:600], *paths["chunked"]), reference[:600])
    llm.exit()
    assert max(errors.values()) <= allowed, (errors, allowed)


@pytest.mark.parametrize("name", MODELS)
def test_fp32_greedy_tokens_equal_those_of_transformers_for_64_steps(name):
    """Alone, in a batch, in chunks, after a prefix hit, with graphs and without."""
    twin = make_twin(name, torch.float32, torch.float32)
    prompts = [prompt(length, seed=length) for length in (5, 300, 256, 513)]
    expected = [twin_greedy(twin, token_ids, 64) for token_ids in prompts]
    del twin
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for keys in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 96}):
        with make_engine(name, "float32", **keys) as llm:
            batch = llm.generate(prompts, greedy)["token_ids"]
            assert batch == expected, keys
            hit = llm.generate(prompts, greedy)
            assert hit["token_ids"] == expected, keys
            assert hit["usage"][3]["cached_tokens"] == 512
            assert llm.generate(prompts[1], greedy)["token_ids"] == [expected[1]]
