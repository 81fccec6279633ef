"""Sequences of tokens that must not come up, compared with the newest tokens of a row.

A bad word is a row of W token ids: its last one, then those before it from the last to the first, then -1. Its last
token is forbidden while the newest tokens are all its others. The newest tokens of a row are a ring of W: that of
position p is in place p mod W, or -1 there if it is not of the output. The newest of all is in the row itself, and -1
there if it is in the ring as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_WORDS = 32  # bad words that are looked at together


@triton.jit
def forbidden_by_words(
    row_ptr,
    words_ptr,
    recent_ptr,
    start,
    num_words,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN: tl.constexpr,
    CONTEXT_LEN: tl.constexpr,
):
    """Tokens [WORDS] that would complete the words from `start` on, -1 for words that they would not."""
    back = tl.arange(0, WIDTH)  # [WIDTH], before the token that is to be chosen
    position = tl.load(row_ptr + CONTEXT_LEN) - back
    recent = tl.load(recent_ptr + position % WIDTH, mask=(back > 0) & (position >= 0), other=-1)
    newest = tl.load(row_ptr + TOKEN)
    recent = tl.where((back == 1) & (newest >= 0), newest, recent)
    word = start + tl.arange(0, WORDS)  # [WORDS]
    token_ptrs = words_ptr + word[:, None] * WIDTH + back[None, :]
    token = tl.load(token_ptrs, mask=(word < num_words)[:, None], other=-1)  # [WORDS, WIDTH]
    differs = (back > 0)[None, :] & (token >= 0) & (token != recent[None, :])
    last = tl.sum(tl.where((back == 0)[None, :], token, 0), axis=1)
    return tl.where(tl.sum(differs.to(tl.int32), axis=1) == 0, last, -1)
