"""config.json of the built-in families to `ModelConfig`: what transformers assumes, and what the model classes fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tritonllm.config.checks import integer
from tritonllm.config.hf import read_hf_config, refuse_unsupported_fields, unsupported
from tritonllm.config.hf_rope import read_rope
from tritonllm.config.model import FULL, SLIDING, ModelConfig
from tritonllm.errors import ConfigError

# What transformers assumes when a file lacks the field: it can differ from what the other fields suggest.
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_PHI3_DEFAULTS = {
    **_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
_OLMO2_DEFAULTS = {**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2_DEFAULTS = {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def llama_config(config: Mapping[str, Any]) -> ModelConfig:
    """Llama 1 to 3 and what shares their code, such as SmolLM2: `attention_bias` and `mlp_bias` place the biases."""
    return read_hf_config(config, defaults={**_DEFAULTS, "max_position_embeddings": 2048})


def qwen2_config(config: Mapping[str, Any]) -> ModelConfig:
    """Qwen2 and Qwen2.5: q, k and v always have a bias, nothing else does."""
    _refuse_bias(config, "mlp_bias")
    return read_hf_config(config, defaults=_QWEN_DEFAULTS, qkv_bias=True, o_bias=False)


def qwen3_config(config: Mapping[str, Any]) -> ModelConfig:
    """Dense Qwen3: q and k are normalised per head, and `head_dim` is 128 unless the file says otherwise."""
    _refuse_bias(config, "mlp_bias")
    qk_norm = ("use_qk_norm", "qk_norm", "qk_layernorm")
    return read_hf_config(config, defaults={**_QWEN_DEFAULTS, "head_dim": 128}, handled=qk_norm)


def mistral_config(config: Mapping[str, Any]) -> ModelConfig:
    """Mistral: no biases, and a sliding window, where there is one, in every layer."""
    _refuse_bias(config, "attention_bias", "mlp_bias")
    return read_hf_config(config, defaults=_MISTRAL_DEFAULTS, layer_windows=False)


def phi3_config(config: Mapping[str, Any]) -> ModelConfig:
    """Phi-3 and Phi-4-mini: no biases, a sliding window in every layer, and longrope under its older names too."""
    _refuse_bias(config, "attention_bias", "mlp_bias")
    fields = {**_PHI3_DEFAULTS, **config}
    for source in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(source)
        if isinstance(scaling, Mapping) and (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
            fields[source] = {**scaling, "rope_type": "longrope", "type": "longrope"}
    return read_hf_config(fields, layer_windows=False)


def olmo2_config(config: Mapping[str, Any]) -> ModelConfig:
    """OLMo 2: `attention_bias` places biases on all four projections of attention."""
    _refuse_bias(config, "mlp_bias")
    return read_hf_config(config, defaults=_OLMO2_DEFAULTS)


def gemma2_config(config: Mapping[str, Any]) -> ModelConfig:
    """Gemma 2: capped scores and logits; every other layer has a window, beginning with the first."""
    fields = {**_GEMMA_DEFAULTS, **_GEMMA2_DEFAULTS, **config}
    return _gemma_config(fields, lambda index: index % 2 == 0)


def gemma3_config(config: Mapping[str, Any]) -> ModelConfig:
    """Gemma 3, text only: five layers of six have a window and a rotation of their own; scores are not capped."""
    fields = {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072, **config}
    refuse_unsupported_fields({"attn_logit_softcapping": fields.get("attn_logit_softcapping")})
    pattern = fields.get("sliding_window_pattern") or 6
    integer(1).check("sliding_window_pattern", pattern, ConfigError)
    full, sliding = _gemma3_rotations(fields)
    apart = {**fields, "rope_scaling": None, "rope_theta": None}
    model = _gemma_config({**apart, "rope_parameters": full}, lambda index: (index + 1) % pattern != 0)
    rope = read_rope({**apart, "rope_parameters": sliding}, model.head_dim, model.max_position)
    return replace(model, sliding_rope=rope)


def _gemma_config(fields: dict[str, Any], is_sliding: Callable[[int], bool]) -> ModelConfig:
    """What all Gemmas share: gelu, norms with `1 + weight`, embeddings multiplied by the root of the hidden size."""
    _refuse_bias(fields, "mlp_bias")
    fields["hidden_act"] = fields.pop("hidden_activation", None) or "gelu_pytorch_tanh"
    num_layers, hidden_size = fields.get("num_hidden_layers"), fields.get("hidden_size")
    if fields.get("layer_types") is None and isinstance(num_layers, int):
        fields["layer_types"] = [SLIDING if is_sliding(index) else FULL for index in range(num_layers)]
    handled = ("hidden_act", "attn_logit_softcapping", "final_logit_softcapping")
    multiplier = hidden_size**0.5 if isinstance(hidden_size, int) else 1.0
    return read_hf_config(fields, handled=handled, norm_unit_offset=True, embedding_multiplier=multiplier)


def _gemma3_rotations(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rope_parameters` of the layers without a window and of those with one, from both forms of the file.

    As in transformers, `rope_scaling` is for the layers without a window, over what `rope_parameters` says of them.
    """
    rules, scaling = (fields.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, value in {"rope_parameters": rules, "rope_scaling": scaling}.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} is not valid: give a mapping or null.")
    by_kind = {kind: rules.get(kind) or {} for kind in (FULL, SLIDING)}
    if rules.keys() - by_kind.keys() or not all(isinstance(rule, Mapping) for rule in by_kind.values()):
        raise unsupported("rope_parameters", rules, f"Gemma 3 has one rule for {FULL} and one for {SLIDING} there")
    if scaling.keys() & by_kind.keys():
        raise unsupported("rope_scaling", scaling, "rules for each type of layer belong in rope_parameters")
    return (
        {"rope_theta": fields.get("rope_theta") or 1_000_000.0, **by_kind[FULL], **scaling},
        {"rope_theta": fields.get("rope_local_base_freq") or 10_000.0, **by_kind[SLIDING]},
    )


def _refuse_bias(config: Mapping[str, Any], *names: str) -> None:
    for field in names:
        if config.get(field):
            raise unsupported(field, config[field], f"a {config.get('model_type')} model has no such bias")


READERS: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "gemma2": gemma2_config,
    "gemma3_text": gemma3_config,
    "llama": llama_config,
    "mistral": mistral_config,
    "olmo2": olmo2_config,
    "phi3": phi3_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
}
