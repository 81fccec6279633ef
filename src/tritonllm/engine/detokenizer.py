"""Token ids to text, all at once and as they come."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Tokens decoded together: enough that most calls decode once, few enough that one decoding stays cheap.
_WINDOW = 16

# A character has four bytes at most, so what is no character after that many tokens will not become one.
_MAX_HELD = 64


def decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    """Text of a whole completion, the same as a `Detokenizer` gives in pieces; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    text = _decode(tokenizer, token_ids, skip_special_tokens)
    # Tokenizers disagree on bytes that are no character: some replace good neighbours as well, which a piece may have
    # brought already.
    return Detokenizer(tokenizer, skip_special_tokens).add(token_ids, last=True) if REPLACEMENT in text else text


class Detokenizer:
    """Turns a growing completion into pieces of text that end on whole characters.

    A character may be spread over several tokens, and some tokenizers write a token differently after another one. So a
    piece is what a decoding, from the same earlier token on, gained since the last piece, and it is held back while it
    ends in a replacement character. The pieces do not depend on how many tokens come at a time.

    Args:
        tokenizer: a transformers tokenizer, or None, which makes every text empty.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the newest tokens; decodings start with the first of them
        self._shown = ""  # text of the window that is out
        self._num_shown = 0  # tokens of the window that it is made of

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """The text that `token_ids` complete; with `last`, whatever was held back as well."""
        if self._tokenizer is None:
            return ""
        pieces = [self._add(token_id) for token_id in token_ids]
        if last:
            pieces.append(self._gain(self._decode()))
        return "".join(pieces)

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_shown < _MAX_HELD:
            return ""
        piece = self._gain(text)
        if piece:
            if len(self._window) > _WINDOW:
                del self._window[: self._num_shown]
                text = self._decode()
            self._shown = text
            self._num_shown = len(self._window)
        elif self._shown and text == self._shown:  # a special token that is left out
            self._window.pop()
        return piece

    def _gain(self, text: str) -> str:
        """What the text of the window has that is not out."""
        if not text.startswith(self._shown):  # bytes that turned out to be no character, right after some that are one
            del self._window[: self._num_shown]
            self._shown, self._num_shown = "", 0
            text = self._decode()
        return text[len(self._shown) :]

    def _decode(self) -> str:
        return _decode(self._tokenizer, self._window, self._skip_special_tokens)


def _decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    # Cleaning up would take back spaces that a piece has brought.
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
