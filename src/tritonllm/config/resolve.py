"""From what the user asks and what the checkpoint says to one `ModelConfig`, refusing contradictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tritonllm.config.engine import EngineConfig
from tritonllm.config.hf import default_head_dim, read_token_ids
from tritonllm.config.model import ModelConfig
from tritonllm.config.rope import RopeConfig
from tritonllm.errors import ConfigError, UnsupportedModelError

REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")

# Positions of a model that is described by keys alone, when neither max_position nor max_model_length is given.
_DEFAULT_MAX_POSITION = 4096

# Architecture key -> the same fact in a ModelConfig. max_position has a rule of its own.
_FACTS: dict[str, Callable[[ModelConfig], Any]] = {
    "vocab_size": lambda model: model.vocab_size,
    "hidden_size": lambda model: model.hidden_size,
    "intermediate_size": lambda model: model.intermediate_size,
    "num_layers": lambda model: model.num_layers,
    "num_heads": lambda model: model.num_heads,
    "num_kv_heads": lambda model: model.num_kv_heads,
    "head_dim": lambda model: model.head_dim,
    "base": lambda model: model.rope.theta,
    "rms_norm_epsilon": lambda model: model.rms_norm_eps,
    "scale": lambda model: model.attention_scale * math.sqrt(model.head_dim),
    "qkv_bias": lambda model: model.qkv_bias,
    "ffn_bias": lambda model: model.mlp_bias,
    "tie_word_embeddings": lambda model: model.tie_word_embeddings,
}


def resolve_model_config(
    engine: EngineConfig,
    hf_config: Mapping[str, Any] | None,
    *,
    reader: Callable[[Mapping[str, Any]], ModelConfig] = ModelConfig.from_hf_dict,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_eos: int | None = None,
) -> ModelConfig:
    """The model that will run.

    The checkpoint's config decides, and every architecture key the user gives must agree with it, except that
    `max_position` may be smaller. With `load_format="dummy"` and any architecture key, the keys given are the whole
    truth and `hf_config` is not looked at: `REQUIRED_KEYS` must be there, `num_kv_heads` defaults to `num_heads`,
    `head_dim` to `hidden_size / num_heads`, `max_position` to `max_model_length` or 4096, `base` to 10000,
    `rms_norm_epsilon` to 1e-6, `scale` to 1, biases and tied embeddings to False.

    The ids that end a text are the union of the config's, the generation config's, the tokenizer's and the user's;
    a user's id that the checkpoint does not know gives one warning.

    Args:
        hf_config: config.json as a dict, or a shipped shape; None if there is neither.
        reader: the model family's own reader of such a dict.
        generation_config: generation_config.json as a dict.
        tokenizer_eos: the tokenizer's end-of-text id.

    Raises:
        ConfigError: keys are missing, contradict the checkpoint, or ask for more positions than it has.
        UnsupportedModelError: the model cannot be computed exactly up to `max_model_length`.
    """
    if engine.load_format == "dummy" and engine.architecture:
        model = _from_keys(engine)
    elif hf_config is None:
        raise ConfigError(
            f"Nothing describes the model {engine.model_name_or_path!r}: there is no config.json or shipped shape of "
            f"that name; for dummy weights give at least {', '.join(REQUIRED_KEYS)}."
        )
    else:
        model = _agreeing(engine, reader(hf_config))
    model = replace(model, eos_token_ids=_eos_token_ids(engine, model, generation_config or {}, tokenizer_eos))
    resolve_max_model_length(engine, model)
    return model


def resolve_max_model_length(engine: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of one request: the user's limit if it can be computed, else all that the model computes exactly."""
    length = engine.max_model_length
    if length is None:
        return model.max_length
    if length > model.max_position:
        raise ConfigError(
            f"max_model_length={length} is above the model's {model.max_position} positions: lower it to that."
        )
    if length > model.max_length and model.rope.rope_type == "dynamic":
        raise UnsupportedModelError(
            f"The checkpoint's config says rope_type='dynamic', whose angles change as a text grows beyond "
            f"{model.rope.max_length} tokens, which is not computed: lower max_model_length={length} to that."
        )
    return length


def resolve_dtype(engine: EngineConfig, model: ModelConfig, device: str) -> str:
    """Name of the dtype to compute in on `device` ("cuda" or "cpu"): the user's, or what "auto" means there."""
    if engine.dtype != "auto":
        return engine.dtype
    if device == "cpu":
        return "float32"
    return "bfloat16" if engine.load_format == "dummy" else model.dtype or "bfloat16"


def _from_keys(engine: EngineConfig) -> ModelConfig:
    keys = engine.architecture
    missing = [name for name in REQUIRED_KEYS if name not in keys]
    if missing:
        raise ConfigError(
            f"Dummy weights of a model described by keys need {', '.join(missing)} as well: "
            "give them, or no architecture key at all to use the shipped shape of that name."
        )
    num_heads = keys["num_heads"]
    head_dim = keys.get("head_dim") or default_head_dim(keys["hidden_size"], num_heads)
    max_position = keys.get("max_position") or engine.max_model_length or _DEFAULT_MAX_POSITION
    return ModelConfig(
        vocab_size=keys["vocab_size"],
        hidden_size=keys["hidden_size"],
        intermediate_size=keys["intermediate_size"],
        num_layers=keys["num_layers"],
        num_heads=num_heads,
        num_kv_heads=keys.get("num_kv_heads", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=keys.get("rms_norm_epsilon", 1e-6),
        attention_scale=keys.get("scale", 1.0) * head_dim**-0.5,
        rope=RopeConfig(head_dim, max_position, theta=keys.get("base", 10000.0)),
        qkv_bias=keys.get("qkv_bias", False),
        mlp_bias=keys.get("ffn_bias", False),
        tie_word_embeddings=keys.get("tie_word_embeddings", False),
    )


def _agreeing(engine: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The checkpoint's model, after every key the user gave was compared with it."""
    for name, given in engine.architecture.items():
        if name == "max_position":
            continue
        stored = _FACTS[name](model)
        same = math.isclose(given, stored, rel_tol=1e-6) if isinstance(stored, float) else given == stored
        if not same:
            raise ConfigError(
                f"{name}={given!r} contradicts the checkpoint, which says {stored!r}: correct the key or leave it out."
            )
    if engine.max_position is None:
        return model
    if engine.max_position > model.max_position:
        raise ConfigError(
            f"max_position={engine.max_position} is above the checkpoint's {model.max_position}: "
            "give at most that, or leave it out."
        )
    return replace(model, max_position=engine.max_position)


def _eos_token_ids(
    engine: EngineConfig, model: ModelConfig, generation_config: Mapping[str, Any], tokenizer_eos: int | None
) -> tuple[int, ...]:
    generation_ids = read_token_ids(generation_config, "eos_token_id")
    tokenizer_ids = () if tokenizer_eos is None else (tokenizer_eos,)
    known = dict.fromkeys((*model.eos_token_ids, *generation_ids, *tokenizer_ids))
    strangers = [token_id for token_id in engine.eos_token_ids if token_id not in known]
    if known and strangers:
        warnings.warn(
            f"eos={engine.eos!r} is not among the checkpoint's end-of-text ids {list(known)}: "
            "a text ends at any of them.",
            stacklevel=3,
        )
    return (*known, *strangers)
