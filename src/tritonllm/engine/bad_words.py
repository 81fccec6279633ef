"""Strings that must not come up, as sequences of tokens, and the newest tokens that those are compared with."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Any

from tritonllm.errors import RequestError

MAX_BAD_WORDS = 512
"""Most sequences of one request; a string makes two where a space in front changes its tokens."""

MAX_BAD_WORD_TOKENS = 16
"""Most tokens of one sequence. A power of two, since it is also the size of a ring."""


def tokenize_bad_words(words: tuple[str, ...], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The tokens of each string as it begins a text and as it follows a space, every sequence once.

    Raises:
        RequestError: there is no tokenizer, or there are too many sequences, or too many tokens in one, or none.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError(f"bad_words={words!r} needs a tokenizer; use logit_bias, or set the tokenizer key")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            try:
                token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except (TypeError, UnicodeError) as error:  # a lone surrogate: a string that is no text
                raise RequestError(f"the tokenizer does not take the bad word {word!r}: {error}") from error
            if not 0 < len(token_ids) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"the bad word {word!r} is {len(token_ids)} tokens; give words of 1 to {MAX_BAD_WORD_TOKENS}"
                )
            sequences[token_ids] = None
    if len(sequences) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words make {len(sequences)} sequences of tokens, with and without a space in front; "
            f"give words that make at most {MAX_BAD_WORDS}"
        )
    return tuple(sequences)


def ring_of(token_ids: TokenIds[int], start: int, stop: int) -> tuple[int, ...]:
    """The last of the tokens from `start` to `stop - 1`, each at its position modulo the ring's size; -1 elsewhere."""
    ring = [-1] * MAX_BAD_WORD_TOKENS
    for position in range(max(start, stop - MAX_BAD_WORD_TOKENS), stop):
        ring[position % MAX_BAD_WORD_TOKENS] = token_ids[position]
    return tuple(ring)
