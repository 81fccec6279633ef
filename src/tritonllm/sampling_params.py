"""How one request is sampled: `SamplingParams`, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tritonllm.config.checks import Rule, check_fields, flag, integer, integers, number, weights
from tritonllm.errors import RequestError

MAX_LOGPROBS = 20
"""Most tokens whose log probabilities are reported beside that of the chosen one."""

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38

# Dividing logits by less would overflow float32; such a temperature already means "the best token".
_SMALLEST_TEMPERATURE = 1e-6

_RULES: dict[str, Rule] = {
    "temperature": number(0, _FLOAT32_MAX),
    "max_tokens": integer(1).or_none(),
    "ignore_eos": flag(),
    "top_p": number(0, 1),
    "top_k": integer(-1, _INT32_MAX),
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": weights(-100, 100, _INT32_MAX),
    "allowed_token_ids": Rule(
        f"a sequence of at least one integer from 0 to {_INT32_MAX}",
        lambda value: integers(0, _INT32_MAX).accepts(value) and value != (),
    ).or_none(),
    "min_tokens": integer(0),
    "logprobs": integer(0, MAX_LOGPROBS).or_none(),
    "prompt_logprobs": integer(0, MAX_LOGPROBS).or_none(),
    "seed": integer(0, 2**64 - 1).or_none(),
    "max_model_length": integer(1).or_none(),
    "skip_special_tokens": flag(),
    "stop_token_ids": integers(0, _INT32_MAX),
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Immutable; `dataclasses.replace` gives a changed copy, checked again.

    A value of the wrong type or outside its range raises `RequestError` (a ValueError) that names the field, the
    value and the range. A bool is not a number, and nan and infinity are in no range.

    Attributes:
        temperature: >= 0. 0 is the exact argmax, lowest id among equals; below 1e-6 means, and is stored as, 0.
        max_tokens: tokens to generate, exactly, unless the text ends first or meets a length limit (the engine's, the
            request's, or the size of the KV cache): >= 1, or None for as many as the limits leave.
        ignore_eos: go on after an end-of-text id. `stop_token_ids` still stop.
        top_p: in [0, 1]. Sample from the smallest set of most probable tokens whose mass reaches it, after `top_k`;
            1 is off, 0 leaves the most probable token.
        top_k: sample from that many most probable tokens, at most 2**31 - 1. 0 and -1 are off (-1 is stored as 0);
            the vocabulary size or more is off as well.
        min_p: in [0, 1]. Tokens less than this times as likely as the likeliest are left out, before `top_p`; 0 is off.
        repetition_penalty: in [0.01, 100]. Logits of tokens of the prompt or the output are divided by it if they are
            positive and multiplied if not; 1 is off.
        presence_penalty: in [-2, 2]. Taken from the logits of all tokens of the output.
        frequency_penalty: in [-2, 2]. Taken from them once for each time the token is in the output.
        logit_bias: a mapping from token ids to what is added to their logits, in [-100, 100], before penalties; stored
            as a tuple of pairs.
        allowed_token_ids: all other tokens are forbidden; None allows all.
        min_tokens: no token that ends the text is chosen before so many others were: >= 0, at most `max_tokens`.
        logprobs: report the log probability of each chosen token and of so many likeliest ones, 0 to 20; None reports
            nothing. They are the model's own, without temperature, penalties and filters.
        prompt_logprobs: the same for each token of the prompt but the first. The prompt then takes nothing from the
            prefix cache.
        seed: in [0, 2**64). The same seed gives the same tokens, whatever else is in the batch; None draws from
            the engine's seed.
        max_model_length: most tokens of prompt and output together, >= 1; None is the engine's limit.
        skip_special_tokens: leave special tokens out of the text (never out of the token ids).
        stop_token_ids: further ids that end the text, each >= 0.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_model_length: int | None = None
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop_token_ids, (list, set, frozenset)):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if isinstance(self.allowed_token_ids, (list, set, frozenset, range)):
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        check_fields(self, _RULES, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; give at most as many."
            )
        if self.temperature < _SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)


def _pairs(value: object) -> object:
    """A mapping, or a list of pairs as JSON keeps it, as a tuple of pairs; anything else as it is."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, (list, tuple)):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return () if value is None else value
