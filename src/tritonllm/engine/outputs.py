"""What the engine gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tritonllm.engine.logprobs import TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; unpacks as `(seq_id, token_ids)`.

    Attributes:
        seq_id: what `add_prompt` returned.
        token_ids: the completion, with the token that ended it.
        finish_reason: "stop", "length", "abort" or "error".
        error: one sentence if the reason is "error".
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: tokens of it that the prefix cache held when it was admitted.
        stop_reason: what stopped it if the reason is "stop": the token id, or the stop string.
        sample: which of the prompt's completions it is, 0 unless `SamplingParams.n` asks for several.
        logprobs: an entry for each token, if they were asked for.
        prompt_logprobs: an entry for each token of the prompt, None for the first; if they were asked for.
    """

    seq_id: int
    token_ids: list[int]
    finish_reason: str
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    stop_reason: int | str | None = None
    sample: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    _decode: Callable[[], str] = field(default=str, repr=False, compare=False)

    def __iter__(self) -> Iterator[int | list[int]]:
        return iter((self.seq_id, self.token_ids))

    @cached_property
    def text(self) -> str:
        """The completion as text; decoded when it is first asked for."""
        return self._decode()

    @property
    def usage(self) -> dict[str, int]:
        """Token counts: prompt, completion, and prompt tokens found in the prefix cache."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.num_cached_tokens,
        }


@dataclass(frozen=True)
class StreamOutput:
    """A piece of a completion, as it comes.

    Attributes:
        index: which prompt of the call.
        text: the text that became complete; "" while a character is not.
        token_ids: the tokens read since the last piece.
        finish_reason: None until the last piece of this prompt.
        error: one sentence if the reason is "error".
        stop_reason: what stopped it if the reason is "stop": the token id, or the stop string.
        sample: which completion of that prompt, 0 unless `SamplingParams.n` asks for several.
        logprobs: an entry for each of the tokens, if they were asked for.
        prompt_logprobs: in the first piece of a prompt's first completion an entry for each token of the prompt, None
            for the first; if they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None = None
    stop_reason: int | str | None = None
    sample: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def as_result(outputs: list[list[RequestOutput]]) -> dict[str, list[Any]]:
    """What `LLMEngine.generate` returns.

    Args:
        outputs: the samples of each prompt. Of several, an entry is their list, but for `usage`, which counts their
            tokens together and those of the prompt once, and `prompt_logprobs`, which are one prompt's.
    """
    return {
        "text": [_entry([output.text for output in samples]) for samples in outputs],
        "token_ids": [_entry([output.token_ids for output in samples]) for samples in outputs],
        "finish_reason": [_entry([output.finish_reason for output in samples]) for samples in outputs],
        "stop_reason": [_entry([output.stop_reason for output in samples]) for samples in outputs],
        "usage": [
            {**samples[0].usage, "completion_tokens": sum(len(output.token_ids) for output in samples)}
            for samples in outputs
        ],
        "errors": [_entry([output.error for output in samples]) for samples in outputs],
        "logprobs": [_entry([output.logprobs for output in samples]) for samples in outputs],
        "prompt_logprobs": [samples[0].prompt_logprobs for samples in outputs],
    }


def _entry(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
