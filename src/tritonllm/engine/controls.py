"""What a request says about tokens, and what is reported of them, as plain numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

MAX_BIASES = 1024
"""Most tokens of one request that have a bias, those that end its text among them if it has a minimum length."""

Seen = tuple[list[int], list[int]]
"""Tokens of a prompt and tokens of the output behind it, as penalties count them."""


class RowControls(NamedTuple):
    """How the logits of a sequence are changed before the choice, and how many log probabilities it wants.

    Attributes:
        min_p: tokens less than this times as likely as the likeliest are left out.
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 are off.
        biases: `(token, added to its logit, length below which it is forbidden)`, tokens all different; the length is
            that of the prompt and the output so far.
        allowed_token_ids: all others are forbidden; None forbids none.
        num_logprobs: likeliest tokens to report beside the chosen one, -1 to report nothing.
        bad_words: sequences of tokens; the last one is forbidden where the output ends with all others.
        has_grammar: what is allowed changes with every token; its mask comes with each step.
    """

    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    biases: tuple[tuple[int, float, int], ...]
    allowed_token_ids: tuple[int, ...] | None
    num_logprobs: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    has_grammar: bool = False

    @property
    def has_mask(self) -> bool:
        """Whether some tokens are allowed and the others not."""
        return self.has_grammar or self.allowed_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens were there before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


_NONE = RowControls(0, 1, 0, 0, (), None, -1)


def controls_of(
    params: SamplingParams,
    num_prompt_tokens: int,
    end_token_ids: Collection[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> RowControls | None:
    """The controls of a request, None if it has none.

    Args:
        num_prompt_tokens: length of its prompt.
        end_token_ids: ids that end its text; none of them is chosen before `min_tokens`.
        bad_words: tokens of its bad words.
    """
    biases = {token: (bias, 0) for token, bias in dict(params.logit_bias).items()}
    if params.min_tokens and params.structured_outputs is None:  # else the grammar's masks see to it
        min_length = num_prompt_tokens + params.min_tokens
        biases |= {token: (biases.get(token, (0.0, 0))[0], min_length) for token in sorted(end_token_ids)}
    controls = RowControls(
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        biases=tuple((token, *entry) for token, entry in biases.items()),
        allowed_token_ids=params.allowed_token_ids,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        bad_words=bad_words,
        has_grammar=params.structured_outputs is not None,
    )
    return None if controls == _NONE else controls


def check_controls(
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: Collection[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Raise RequestError if a request's controls do not fit a model: nothing is queued then.

    Args:
        vocab_size: ids are below it.
        eos_token_ids: those of the model.
        bad_words: tokens of the request's bad words.
    """
    end_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    named = {name: tuple(getattr(params, name) or ()) for name in ("stop_token_ids", "allowed_token_ids")}
    named["logit_bias"] = tuple(dict(params.logit_bias))
    for name, tokens in named.items():
        if tokens and max(tokens) >= vocab_size:
            raise RequestError(
                f"{name} names token {max(tokens)}, but the model's vocabulary ends at {vocab_size - 1}; leave it out"
            )
    if params.min_tokens and params.allowed_token_ids and end_token_ids.issuperset(params.allowed_token_ids):
        raise RequestError(
            f"allowed_token_ids={params.allowed_token_ids} all end the text, which min_tokens={params.min_tokens} "
            "forbids; allow one more token"
        )
    # A row without any token left would get one that is forbidden.
    may_be_forbidden = {word[-1] for word in bad_words}.union(end_token_ids if params.min_tokens else ())
    if bad_words and params.allowed_token_ids and may_be_forbidden.issuperset(params.allowed_token_ids):
        raise RequestError(
            f"allowed_token_ids={params.allowed_token_ids} may all be forbidden by bad_words={params.bad_words} and "
            f"min_tokens={params.min_tokens}; allow a token that ends no bad word"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise RequestError(f"{name}={getattr(params, name)} is more than the model's {vocab_size} tokens")
    controls = controls_of(params, 0, end_token_ids)
    if controls is not None and len(controls.biases) > MAX_BIASES:
        raise RequestError(
            f"logit_bias and the ids that end the text are {len(controls.biases)} tokens together; "
            f"give at most {MAX_BIASES}"
        )
