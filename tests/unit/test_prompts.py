"""From prompts as callers pass them to checked token ids."""

from __future__ import annotations

import pytest
import torch

from tritonllm import SamplingParams
from tritonllm.engine.prompts import as_params_list, as_prompt_list, tokenize, tokenize_chat
from tritonllm.errors import RequestError
from tritonllm.testing import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_plain_text_gets_one_bos(tokenizer) -> None:
    ids = tokenize("The answer", tokenizer, 512)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "The answer"


def test_text_that_begins_with_bos_gets_no_second_one(tokenizer) -> None:
    assert tokenize("<s>The answer", tokenizer, 512) == tokenize("The answer", tokenizer, 512)
    assert tokenize("<s><s>", tokenizer, 512) == [0, 0]


def test_a_tokenizer_without_bos(tokenizer) -> None:
    bare = tiny_tokenizer()
    bare.bos_token = None
    assert tokenize("hi", bare, 512) == tokenizer.encode("hi")


def test_text_survives_the_round_trip(tokenizer) -> None:
    text = "The capital of 日本 is 東京 👩‍👩‍👧, ďábelské\n\tódy."
    assert tokenizer.decode(tokenize(text, tokenizer, 512), skip_special_tokens=True) == text


def test_ids_are_taken_as_they_are() -> None:
    assert tokenize((3, 511, 0), None, 512) == [3, 511, 0]
    assert tokenize(range(3), None, 512) == [0, 1, 2]


@pytest.mark.parametrize(
    "prompt",
    [[], (), [512], [-1], [1.0], [True], ["a"], [None], [[1]], None, 7, 1.5, b"abc", bytearray(b"a"), {1: 2}, {1, 2}],
)
def test_what_cannot_be_a_prompt(prompt) -> None:
    with pytest.raises(RequestError):
        tokenize(prompt, None, 512)


@pytest.mark.parametrize("given", [torch.tensor([5, 6]), torch.tensor([5, 6]).numpy(), iter([5, 6])])
def test_integers_of_other_libraries_are_ids(given) -> None:
    ids = tokenize(given, None, 512)
    assert ids == [5, 6]
    assert all(type(token_id) is int for token_id in ids)


def test_a_tensor_of_ids_is_one_prompt() -> None:
    assert len(as_prompt_list(torch.tensor([5, 6]))) == 1
    assert len(as_prompt_list([torch.tensor([5, 6]), torch.tensor([7])])) == 2


def test_an_empty_string_is_refused_even_where_the_tokenizer_would_write_bos(tokenizer) -> None:
    with pytest.raises(RequestError, match="empty"):
        tokenize("", tokenizer, 512)


def test_a_string_that_is_no_text_is_refused(tokenizer) -> None:
    with pytest.raises(RequestError, match="the tokenizer does not take this text"):
        tokenize("\udfff", tokenizer, 512)
    with pytest.raises(RequestError):
        tokenize_chat([{"role": "user", "content": "\ud800"}], tokenizer)


def test_a_conversation_is_one_list_of_messages(tokenizer) -> None:
    with pytest.raises(RequestError, match="a conversation is a list of messages"):
        tokenize_chat([[{"role": "user", "content": "hi"}]], tokenizer)


def test_the_ids_passed_in_are_not_kept() -> None:
    ids = [1, 2]
    assert tokenize(ids, None, 512) is not ids


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("hi", ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], "hi"], [[1], "hi"]),
        ([[]], [[]]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given, listed) -> None:
    assert as_prompt_list(given) == listed


@pytest.mark.parametrize("given", [None, 3, 0.5])
def test_what_cannot_be_prompts(given) -> None:
    with pytest.raises(RequestError, match=type(given).__name__):
        as_prompt_list(given)


def test_one_params_or_several() -> None:
    first, second = SamplingParams(), SamplingParams(temperature=0)
    assert as_params_list(None, 2) == [SamplingParams()] * 2
    assert as_params_list(first, 2) == [first, first]
    assert as_params_list([first, second], 2) == [first, second]
    assert as_params_list([], 0) == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "2 prompts but 1 sampling params"),
        ([SamplingParams(), None], "sampling params 1 is NoneType"),
        ([{"temperature": 0}, SamplingParams()], "sampling params 0 is dict"),
        ({"temperature": 0}, "not dict"),
        (0.7, "not float"),
    ],
)
def test_what_cannot_be_params(params, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        as_params_list(params, 2)
