"""What the engine gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property


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
    """

    seq_id: int
    token_ids: list[int]
    finish_reason: str
    error: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    stop_reason: int | str | None = None
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
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None = None
    stop_reason: int | str | None = None
