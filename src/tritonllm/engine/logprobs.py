"""What is reported of a token."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """The model's own log probabilities where a token stands: without temperature, penalties or filters.

    Attributes:
        token_id: the token, chosen or of the prompt.
        logprob: its log probability, base e.
        rank: its place among all tokens by probability, 1 for the likeliest; equal ones share the best place.
        top: `(token id, log probability)` of the likeliest tokens, as many as were asked for, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]

    def cut(self, num_top: int) -> TokenLogprobs:
        """The same with fewer of the likeliest."""
        return self._replace(top=self.top[:num_top])


class StepLogprobs(NamedTuple):
    """What a step reports, each entry with all the tokens that the device reports.

    Attributes:
        sampled: an entry for each token of the step, None if nobody asked.
        prompts: an entry for each token of a prompt that was asked for, chunk by chunk.
    """

    sampled: list[TokenLogprobs] | None
    prompts: list[TokenLogprobs]
