"""Several samples of one prompt: each a sequence with a noise stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import TYPE_CHECKING

from tritonllm.engine.sequence import Sequence
from tritonllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tritonllm.engine.grammars import GrammarMatcher


def samples_of(
    token_ids: TokenIds[int],
    params: SamplingParams,
    block_size: int,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    matcher: Callable[[SamplingParams], GrammarMatcher | None] = lambda params: None,
) -> list[Sequence]:
    """The `params.n` sequences of a request; the first is what the request would be with n = 1.

    Args:
        token_ids: the prompt.
        params: of the request.
        block_size: tokens of one cache block.
        seed: of a request that brings none.
        bad_words: tokens of its bad words.
        matcher: makes what follows the grammar of one sequence.
    """

    def sequence(own_params: SamplingParams, seed: int = 0) -> Sequence:
        follower = matcher(own_params)
        return Sequence(token_ids, own_params, block_size=block_size, seed=seed, bad_words=bad_words, matcher=follower)

    own = seed if params.seed is None else params.seed
    # The first one reports on the prompt; to do so it takes nothing from the prefix cache, where the others find it.
    others = (replace(params, seed=sample_seed(own, i), prompt_logprobs=None) for i in range(1, params.n))
    return [sequence(params, own), *map(sequence, others)]


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of several samples of a prompt; that of sample 0 is `seed` itself.

    The finalizer of splitmix64, so that samples of one request share no seed with requests whose seeds are near.
    """
    if sample == 0:
        return seed
    mixed = (seed ^ (sample * 0xD1342543DE82EF95)) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)
