"""Cache blocks of any size, shared between equal prompts, give the tokens of a prompt alone."""

from __future__ import annotations

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(2, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_engine(folder: str, **keys) -> LLMEngine:
    return LLMEngine({"model_name_or_path": folder, "device": "cpu", "max_num_sequences": 2, **keys})


@pytest.mark.parametrize("length", [255, 256, 257, 300, 512])
def test_long_equal_prompts_share_blocks_of_256_and_agree(tiny, length: int) -> None:
    """In one batch, one after another, and beside a longer one that begins alike."""
    folder, _ = tiny("llama", max_position_embeddings=1024)
    asked = prompt(length)
    keys = {"block_size": 256, "max_model_length": 1024, "max_num_batched_tokens": 1024}
    with make_engine(folder, **keys) as engine:
        first = engine.generate([asked], GREEDY)
        again = engine.generate([asked], GREEDY)
        longer = engine.generate([asked + [7, 8], asked], GREEDY)
    with make_engine(folder, **keys) as engine:
        twice = engine.generate([asked, asked], GREEDY)
    with make_engine(folder, **keys) as engine:
        longer_alone = engine.generate([asked + [7, 8]], GREEDY)
    (tokens,) = first["token_ids"]
    assert twice["token_ids"] == [tokens, tokens]
    assert again["token_ids"] == [tokens]
    assert longer["token_ids"] == [longer_alone["token_ids"][0], tokens]
    assert again["usage"][0]["cached_tokens"] == (length - 1) // 256 * 256


@pytest.mark.parametrize("block_size", [1, 8, 12, 16, 24, 48, 256, 544])
def test_every_block_size_gives_the_same_tokens(tiny, block_size: int) -> None:
    folder, _ = tiny("llama")
    asked = [prompt(length) for length in (1, 12, 47, 48, 49)]
    with make_engine(folder, block_size=16, max_model_length=64) as engine:
        expected = engine.generate(asked, GREEDY)["token_ids"]
    with make_engine(folder, block_size=block_size, max_model_length=64) as engine:
        assert engine.generate(asked, GREEDY)["token_ids"] == expected
        assert engine.generate(asked, GREEDY)["token_ids"] == expected


def test_a_pool_of_one_block(tiny) -> None:
    folder, _ = tiny("llama")
    asked = [prompt(length) for length in (1, 9, 30)]
    with make_engine(folder, block_size=64, max_model_length=64) as engine:
        expected = engine.generate(asked, GREEDY)["token_ids"]
    with make_engine(folder, block_size=64, max_model_length=64, max_cached_blocks=1) as engine:
        assert engine.generate(asked, GREEDY)["token_ids"] == expected
        assert engine.stats()["free_blocks"] == 1
