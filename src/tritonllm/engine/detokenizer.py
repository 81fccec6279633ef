"""Token ids to text, all at once and as they come."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    """Text of a whole completion; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """Turns a growing completion into pieces of text that end on whole characters.

    A character may be spread over several tokens, and some tokenizers write a token differently after another one. So
    a piece is the difference of two decodings that start at the same earlier token, and it is held back while it ends
    in a replacement character. The pieces joined are the text of all ids decoded at once.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._anchor = 0  # both decodings start here
        self._emitted = 0  # tokens whose text is out

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """The text that `token_ids` complete; with `last`, whatever was held back as well."""
        if self._tokenizer is None:
            return ""
        self._token_ids += token_ids
        before = self._decode(self._anchor, self._emitted)
        after = self._decode(self._anchor, len(self._token_ids))
        if not last and (len(after) <= len(before) or after.endswith(REPLACEMENT)):
            return ""
        self._anchor, self._emitted = self._emitted, len(self._token_ids)
        return after[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return decode(self._tokenizer, self._token_ids[start:stop], self._skip_special_tokens)
