"""How one request is sampled: `SamplingParams`, checked when it is made."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonllm.config.checks import Rule, check_fields, flag, integer, integers, number, texts, weights
from tritonllm.errors import RequestError
from tritonllm.structured_outputs import StructuredOutputsParams

logger = logging.getLogger("tritonllm")

MAX_LOGPROBS = 20
"""Most tokens whose log probabilities are reported beside that of the chosen one."""

MAX_SAMPLES = 16_384
"""Most completions of one prompt: every one is a sequence that the host keeps from the start."""

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38

# Dividing logits by less would overflow float32; such a temperature already means "the best token".
_SMALLEST_TEMPERATURE = 1e-6

# What a generation_config.json may say about the choice of tokens, each with the value that means nothing. Those that
# are no field of SamplingParams are not computed here.
_CHECKPOINT_DEFAULTS: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# Those of them that `"do_sample": false` leaves without effect; the others change the best token as well.
_OF_DRAWS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

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
    "bad_words": texts(),
    "min_tokens": integer(0),
    "logprobs": integer(0, MAX_LOGPROBS).or_none(),
    "prompt_logprobs": integer(0, MAX_LOGPROBS).or_none(),
    "seed": integer(0, 2**64 - 1).or_none(),
    "max_model_length": integer(1).or_none(),
    "skip_special_tokens": flag(),
    "stop_token_ids": integers(0, _INT32_MAX),
    "stop": Rule(f"{texts().allowed}, in Unicode", lambda value: texts().accepts(value) and _is_unicode(value)),
    "include_stop_str_in_output": flag(),
    "n": integer(1, MAX_SAMPLES),
    "structured_outputs": Rule(
        "a StructuredOutputsParams", lambda value: isinstance(value, StructuredOutputsParams)
    ).or_none(),
}


def _is_unicode(strings: Any) -> bool:
    """Whether no string has half of a character, a lone surrogate, which no text of a tokenizer has."""
    return not any("\ud800" <= character <= "\udfff" for text in strings for character in text)


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
        bad_words: strings that must not come up in the output, none of them empty; one string will do. Each is taken as
            its tokens alone and behind a space: the last token is forbidden where the output ends with all
            before it, and the same text made of other tokens is not noticed. At most 512 such sequences, of at most 16
            tokens each. They need a tokenizer.
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
        stop: strings that end the text, none of them empty or with half a character; one string will do. Found across
            tokens as well; of several, the one that is complete first counts. They need a tokenizer.
        include_stop_str_in_output: leave in the text what stopped it, stop string or token. Its tokens are among the
            token ids in any case.
        n: completions of each prompt, from 1 to 16,384. They share the full blocks of the prompt and draw from noise
            of their own; the first is what n = 1 gives.
        structured_outputs: the form that each completion must have. Where it is complete the text may end, and where
            nothing can follow it does; `stop`, `stop_token_ids` and the limits of length end it anywhere. `min_tokens`
            counts as long as the form lets the text go on. Neither `ignore_eos` nor `allowed_token_ids` goes with it.
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
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_model_length: int | None = None
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, (list, set, frozenset, range)):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        check_fields(self, _RULES, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; give at most as many."
            )
        if self.structured_outputs is not None and (self.ignore_eos or self.allowed_token_ids is not None):
            name = "ignore_eos" if self.ignore_eos else "allowed_token_ids"
            raise RequestError(
                f"{name}={getattr(self, name)!r} does not go with structured_outputs, which decides what is allowed "
                "and where the text ends; give one of the two."
            )
        if self.temperature < _SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, **changes: Any) -> SamplingParams:
        """The sampling that a checkpoint's generation_config.json recommends.

        Taken over are temperature, top-k, top-p and what else of the choice of tokens is a field here;
        `"do_sample": false` is temperature 0. Lengths are the caller's, end-of-text ids the engine's. What the file
        asks for and is not computed here is left out with a warning that names it.

        Args:
            checkpoint: an `LLMEngine`, or a local folder.
            changes: fields that go before those of the file.

        Raises:
            RequestError: there is no such folder, its file is not readable, or a value is not valid.
        """
        config = getattr(checkpoint, "generation_config", None)
        if config is None:
            config = _read_generation_config(checkpoint)
        asked = {name: config[name] for name in _CHECKPOINT_DEFAULTS if config.get(name) is not None}
        if config.get("do_sample") is False:
            asked = {"temperature": 0} | {name: value for name, value in asked.items() if name not in _OF_DRAWS}
        unknown = {
            name: value
            for name, value in asked.items()
            if name not in cls.__dataclass_fields__ and value != _CHECKPOINT_DEFAULTS[name]
        }
        if unknown:
            words = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            logger.warning("the checkpoint's generation_config.json asks for %s, which is not computed here", words)
        known = {name: value for name, value in asked.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, **changes})


def _read_generation_config(folder: Any) -> Mapping[str, Any]:
    """generation_config.json of a local folder, empty if there is none."""
    if not isinstance(folder, (str, Path)) or not Path(folder).is_dir():
        raise RequestError(f"checkpoint={folder!r} is not valid: give an LLMEngine, or a checkpoint's local folder.")
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} is not readable as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise RequestError(f"{file} must hold a JSON object, not {type(config).__name__}.")
    return config


def _pairs(value: object) -> object:
    """A mapping, or a list of pairs as JSON keeps it, as a tuple of pairs; anything else as it is."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, (list, tuple)):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    return () if value is None else value
