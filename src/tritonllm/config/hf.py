"""config.json to `ModelConfig`: the fields of old and new transformers, and the refusal of what is not computed here.

A plugin's own reader calls `read_hf_config`, naming in `handled` the fields that its model implements itself.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from tritonllm.config.checks import Rule, flag, integer, number, strings, text
from tritonllm.config.hf_rope import read_rope
from tritonllm.config.model import DTYPES, FULL, SLIDING, ModelConfig
from tritonllm.errors import ConfigError, UnsupportedModelError

_ModelConfig = TypeVar("_ModelConfig", bound=ModelConfig)

_OFF = (False, 0)
_ONE = (1,)

# Fields that change the mathematics -> the values under which they do not. Absence and null never do.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    # activation
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    # caps and multipliers
    "attn_logit_softcapping": _OFF,
    "final_logit_softcapping": _OFF,
    "attention_logit_cap": _OFF,
    "logits_soft_cap": _OFF,
    "output_logit_soft_cap": _OFF,
    "logit_scale": _ONE,
    "logits_scaling": _ONE,
    "residual_multiplier": _ONE,
    "embedding_multiplier": _ONE,
    "embedding_scale": _ONE,
    "lm_head_multiplier": _ONE,
    "key_multiplier": _ONE,
    "attention_in_multiplier": _ONE,
    "attention_out_multiplier": _ONE,
    "mlp_multipliers": ([1, 1],),
    "output_multiplier": _ONE,
    "scale_emb": _ONE,
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": _OFF,
    # experts
    "num_experts": _OFF,
    "num_local_experts": _OFF,
    "n_routed_experts": _OFF,
    "moe_num_experts": _OFF,
    # other attention
    "alibi": _OFF,
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
    "use_qk_norm": _OFF,
    "qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "attention_chunk_size": _OFF,
    "attn_temperature_tuning": _OFF,
    "use_bidirectional_attention": _OFF,
    "is_causal": (True,),
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "scale_attn_by_inverse_layer_idx": _OFF,
    "position_embedding_type": ("rope", "rotary"),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": _OFF,
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "v_head_dim": (),
    "layers_block_type": (),
    "block_configs": (),
    "attn_type_list": (),
    # biases with no place in a Llama-like block
    "bias": _OFF,
    "use_bias": _OFF,
    "lm_head_bias": _OFF,
    # another form of weights, or more than a language model
    "quantization_config": ({},),
    "compression_config": ({},),
    "vision_config": (),
    "audio_config": (),
}


def read_hf_config(
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    handled: Collection[str] = (),
    layer_windows: bool = True,
    config_class: type[_ModelConfig] = ModelConfig,  # type: ignore[assignment]
    **overrides: Any,
) -> _ModelConfig:
    """Read a config.json, given as a dict, of a Llama-like model.

    Args:
        config: the fields as stored, of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) or 5
            (`rope_parameters`, `dtype`).
        defaults: fields to assume when the file lacks them (one that is null stays null).
        handled: fields that the caller's model computes, and that are therefore not refused. The layers of
            `tritonllm.models.layers` compute `hidden_act`, `attn_logit_softcapping`, `final_logit_softcapping` and
            `embedding_multiplier` if they are named here.
        layer_windows: whether `layer_types` and `use_sliding_window` say which layers have the sliding window; else all
            of them have it, where its size is given.
        config_class: what to make, `ModelConfig` or a subclass with fields of the caller's own.
        overrides: fields of that class that the caller fixes whatever the file says.

    Raises:
        ConfigError: a field is missing or malformed.
        UnsupportedModelError: a field asks for mathematics that this engine does not do; names field and value.
    """
    fields = {**(defaults or {}), **config}
    refuse_unsupported_fields(fields, handled)

    num_heads = _take(fields, "num_attention_heads", integer(1))
    hidden_size = _take(fields, "hidden_size", integer(1))
    head_dim = _take(fields, "head_dim", integer(1), None) or default_head_dim(hidden_size, num_heads)
    max_position = _take(fields, "max_position_embeddings", integer(1))
    attention_bias = _take(fields, "attention_bias", flag(), False)
    hidden_act = _take(fields, "hidden_act", text())
    num_layers = _take(fields, "num_hidden_layers", integer(1))
    window, layer_types = _sliding_window(fields, num_layers, layer_windows)
    pattern = fields.get("sliding_window_pattern")
    if window is not None and pattern is not None and not layer_types and "sliding_window_pattern" not in handled:
        raise unsupported("sliding_window_pattern", pattern, "there are no layer_types that say which layers it means")
    positive = number(0, above=True)
    values: dict[str, Any] = {
        "vocab_size": _take(fields, "vocab_size", integer(1)),
        "hidden_size": hidden_size,
        "intermediate_size": _take(fields, "intermediate_size", integer(1)),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _take(fields, "num_key_value_heads", integer(1), None) or num_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "rms_norm_eps": _take(fields, "rms_norm_eps", number(0, above=True)),
        "hidden_act": "silu" if hidden_act == "swish" else hidden_act,
        "tie_word_embeddings": _take(fields, "tie_word_embeddings", flag(), False),
        "qkv_bias": attention_bias or _take(fields, "qkv_bias", flag(), False),
        "o_bias": attention_bias,
        "mlp_bias": _take(fields, "mlp_bias", flag(), False),
        "attention_scale": _attention_scale(fields, head_dim),
        "rope": read_rope(fields, head_dim, max_position),
        "sliding_window": window,
        "layer_types": layer_types,
        "attention_softcap": _take(fields, "attn_logit_softcapping", positive.or_off(), 0) or None,
        "logit_softcap": _take(fields, "final_logit_softcapping", positive.or_off(), 0) or None,
        "embedding_multiplier": _take(fields, "embedding_multiplier", positive, 1.0),
        "eos_token_ids": read_token_ids(fields, "eos_token_id"),
        "architectures": read_architectures(fields),
        "model_type": fields.get("model_type") or "",
        "dtype": _dtype(fields),
    }
    return config_class(**{**values, **overrides})


def refuse_unsupported_fields(fields: Mapping[str, Any], handled: Collection[str] = ()) -> None:
    """Raise `UnsupportedModelError` for the first field that changes the mathematics in a way not computed here."""
    for field, neutral in _NEUTRAL_VALUES.items():
        value = fields.get(field)
        if value is not None and value not in neutral and field not in handled:
            raise unsupported(field, value)


def unsupported(field: str, value: object, reason: str = "this engine does not compute that") -> UnsupportedModelError:
    """The refusal of one field of a config.json."""
    return UnsupportedModelError(
        f"The checkpoint's config says {field}={reprlib.repr(value)}, and {reason}: "
        "use another checkpoint, or a plugin whose model handles the field."
    )


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """`hidden_size / num_heads`, which must be whole and even."""
    if hidden_size % num_heads:
        raise ConfigError(f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}: give head_dim.")
    head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise UnsupportedModelError(
            f"hidden_size={hidden_size} / num_heads={num_heads} makes head_dim={head_dim}, which is odd: "
            "RoPE rotates pairs of dimensions."
        )
    return head_dim


def read_token_ids(fields: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """One id, a list of ids or null, as a tuple without repetitions."""
    value = fields.get(field)
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for token_id in ids:
        integer(0).check(field, token_id, ConfigError)
    return tuple(dict.fromkeys(ids))


def read_architectures(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the model's classes in transformers, empty if the file tells none."""
    return tuple(_take(fields, "architectures", strings(), ()))


_REQUIRED = object()


def _take(fields: Mapping[str, Any], field: str, rule: Rule, default: Any = _REQUIRED) -> Any:
    value = fields.get(field)
    if value is None:
        if default is _REQUIRED:
            raise ConfigError(f"The checkpoint's config lacks {field}: it is not one of a Llama-like model.")
        return default
    rule.check(field, value, ConfigError)
    return value


def _attention_scale(fields: Mapping[str, Any], head_dim: int) -> float:
    """Granite gives the softmax scale itself, Gemma the number whose inverse root it is."""
    positive = number(0, above=True)
    multiplier = _take(fields, "attention_multiplier", positive, None)
    if multiplier is not None:
        return float(multiplier)
    return float(_take(fields, "query_pre_attn_scalar", positive, head_dim)) ** -0.5


def _sliding_window(
    fields: Mapping[str, Any], num_layers: int, layer_windows: bool
) -> tuple[int | None, tuple[str, ...]]:
    """The window of the layers that have one (None if none has), and the type of each layer if they differ."""
    layer_types = _take(fields, "layer_types", strings(), ()) if layer_windows else ()
    for layer_type in layer_types:
        if layer_type not in (FULL, SLIDING):
            raise unsupported("layer_types", layer_type)
    window = _take(fields, "sliding_window", integer(1), None)
    enabled = _take(fields, "use_sliding_window", flag(), True) if layer_windows else True
    if SLIDING in layer_types:
        if window is None or not enabled:
            raise unsupported("layer_types", SLIDING, "the size of the window is not given")
        return window, tuple(layer_types[:num_layers])
    if layer_types or not enabled:
        return None, ()
    first = _take(fields, "max_window_layers", integer(0), 0) if layer_windows else 0
    if window is None or first >= num_layers:
        return None, ()
    return window, (FULL,) * first + (SLIDING,) * (num_layers - first) if first else ()


def _dtype(fields: Mapping[str, Any]) -> str | None:
    for field in ("dtype", "torch_dtype"):
        value = fields.get(field)
        if value is not None:
            name = str(value).removeprefix("torch.")
            if name not in DTYPES:
                raise unsupported(field, value, f"only {', '.join(DTYPES)} are computed")
            return name
    return None
