"""From what a caller passes as prompts to token ids, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as TokenIds
from typing import Any

from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

Prompt = str | TokenIds[int]


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
        ids = tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
    elif isinstance(prompt, Iterable):
        ids = list(prompt)
    else:
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise RequestError(f"token id {token_id!r} is not an integer in [0, {vocab_size}), the model's vocabulary")
    return ids


def tokenize_chat(messages: TokenIds[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, ending where the answer begins.

    Raises:
        RequestError: there is no tokenizer or no chat template, or the template refuses the messages.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("this checkpoint has no chat template; use generate() with a plain prompt")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the checkpoint and raise what they like
        raise RequestError(f"the chat template does not take these messages: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def as_prompt_list(prompts: Prompt | TokenIds[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several; a string or a list of ints is one prompt.

    Raises:
        RequestError: neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts are strings or lists of token ids, not {type(prompts).__name__}")
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
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
    check: Callable[[Prompt, SamplingParams], list[int]],
) -> list[tuple[list[int], SamplingParams]]:
    """Token ids and parameters of every prompt, once `check` has found that all of them can be served.

    Raises:
        RequestError: one cannot; names its index.
    """
    listed = as_prompt_list(prompts)
    checked = []
    for index, (prompt, param) in enumerate(zip(listed, as_params_list(params, len(listed)), strict=True)):
        try:
            checked.append((check(prompt, param), param))
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error
    return checked
