"""What is reported of a token."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """The model's own log probabilities where a token was chosen: without temperature, penalties or filters.

    Attributes:
        token_id: the chosen token.
        logprob: its log probability, base e.
        rank: its place among all tokens by probability, 1 for the likeliest; equal ones share the best place.
        top: `(token id, log probability)` of the likeliest tokens, as many as were asked for, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
