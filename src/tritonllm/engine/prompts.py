"""From what a caller passes as prompts to token ids, checked before anything is queued."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from collections.abc import Sequence as TokenIds
from typing import Any, NamedTuple

from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

Prompt = str | TokenIds[int]


class Request(NamedTuple):
    """A prompt that can be served.

    Attributes:
        token_ids: the prompt.
        params: how it is sampled.
        bad_words: tokens of its bad words.
    """

    token_ids: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()


def tokenize(prompt: Prompt, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prompt.

    A text that already begins with the tokenizer's BOS, as a chat template writes it, gets no second one.

    Raises:
        RequestError: a string without a tokenizer, an empty prompt, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a string prompt needs a tokenizer; pass token ids, or set the tokenizer key")
        bos = getattr(tokenizer, "bos_token", None)
        # An empty string would be a lone BOS where the tokenizer writes one, and nothing where it does not.
        ids = _encode(tokenizer, prompt, add_special_tokens=not (bos and prompt.startswith(bos))) if prompt else []
    elif _is_listing(prompt):
        ids = list(prompt)
    else:
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    if _are_ints(ids) and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    numbers = [_as_int(token_id) for token_id in ids]
    for token_id, number in zip(ids, numbers, strict=True):
        if number is None or not 0 <= number < vocab_size:
            raise RequestError(f"token id {token_id!r} is not an integer in [0, {vocab_size}), the model's vocabulary")
    return numbers  # type: ignore[return-value]


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeError) as error:  # a lone surrogate: a string that is no text
        raise RequestError(f"the tokenizer does not take this text: {error}") from error


def _is_listing(prompt: object) -> bool:
    """Whether the items of an object have an order and are meant as items: no set, no mapping, no bytes."""
    return isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set))


def _are_ints(items: list[Any]) -> bool:
    """Whether there are items and all are Python's own ints; long prompts make a call an item too slow."""
    return set(map(type, items)) == {int}


def _as_int(item: object) -> int | None:
    """An integer of any library as an int; None for what is none, and for a bool."""
    if isinstance(item, (bool, str)):
        return None
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return None


def tokenize_chat(messages: TokenIds[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, ending where the answer begins.

    Raises:
        RequestError: there is no tokenizer or no chat template, or the template refuses the messages.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("this checkpoint has no chat template; use generate() with a plain prompt")
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(
                f"a conversation is a list of messages, dicts of role and content, and {message!r} is none"
            )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the checkpoint and raise what they like
        raise RequestError(f"the chat template does not take these messages: {error}") from error
    return _encode(tokenizer, text, add_special_tokens=False)


def as_prompt_list(prompts: Prompt | TokenIds[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several; a string or a list of ints is one prompt.

    Raises:
        RequestError: neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_listing(prompts):
        raise RequestError(f"prompts are strings or lists of token ids, not {type(prompts).__name__}")
    listed = list(prompts)
    if _are_ints(listed) or listed and all(_as_int(item) is not None or isinstance(item, bool) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def as_params_list(params: SamplingParams | TokenIds[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts.

    Raises:
        RequestError: a list of another length, or something that is not a `SamplingParams`.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, TokenIds):
        raise RequestError(f"sampling params are a SamplingParams or a list of them, not {type(params).__name__}")
    listed = list(params)
    if len(listed) != count:
        raise RequestError(f"{count} prompts but {len(listed)} sampling params; give one, or one for each prompt")
    for index, item in enumerate(listed):
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling params {index} is {type(item).__name__}, not a SamplingParams")
    return listed


def as_requests(
    prompts: Prompt | TokenIds[Prompt],
    params: SamplingParams | TokenIds[SamplingParams] | None,
    check: Callable[[Prompt, SamplingParams], Request],
) -> list[Request]:
    """A request for every prompt, once `check` has found that all of them can be served.

    Raises:
        RequestError: one cannot; names its index.
    """
    listed = as_prompt_list(prompts)
    checked = []
    for index, (prompt, param) in enumerate(zip(listed, as_params_list(params, len(listed)), strict=True)):
        try:
            checked.append(check(prompt, param))
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error
    return checked


def as_continued(
    prompts: Prompt | TokenIds[Prompt], continuations: TokenIds[Any], tokenizer: Any, vocab_size: int
) -> list[tuple[list[int], list[int]]]:
    """Token ids of every prompt and of its continuation, given as token ids.

    Raises:
        RequestError: there are more of one than of the other, or one is no list of tokens; names its index.
    """
    listed, continued = as_prompt_list(prompts), as_prompt_list(continuations)
    if len(listed) != len(continued):
        raise RequestError(f"{len(listed)} prompts but {len(continued)} continuations; give one for each prompt")
    pairs = []
    for index, (prompt, continuation) in enumerate(zip(listed, continued, strict=True)):
        if not isinstance(continuation, str) and _is_listing(continuation):
            continuation = list(continuation)  # an array has no truth value of its own
        if isinstance(continuation, str) or continuation == []:
            raise RequestError(f"continuation {index} is {continuation!r}; give at least one token id")
        try:
            pairs.append((tokenize(prompt, tokenizer, vocab_size), tokenize(continuation, None, vocab_size)))
        except RequestError as error:
            raise RequestError(f"prompt {index} or its continuation: {error}") from error
    return pairs
