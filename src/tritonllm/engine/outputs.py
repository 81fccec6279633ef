"""What the engine gives back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tritonllm.engine.logprobs import TokenLogprobs
from tritonllm.engine.sequence import Sequence


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
        logprobs: an entry for each token, if they were asked for.
        prompt_logprobs: an entry for each token of the prompt, None for the first; if they were asked for.
    """

    seq_id: int
    token_ids: list[int]
    finish_reason: str
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __iter__(self) -> Iterator[int | list[int]]:
        return iter((self.seq_id, self.token_ids))

    @classmethod
    def of(cls, seq: Sequence) -> RequestOutput:
        return cls(
            seq.seq_id,
            seq.completion_token_ids,
            seq.finish_reason or "error",
            seq.error,
            seq.num_prompt_tokens,
            seq.num_cached_tokens,
            None if seq.sampling_params.logprobs is None else seq.logprobs,
            None if seq.sampling_params.prompt_logprobs is None else [None, *seq.prompt_logprobs],
        )

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
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None = None
