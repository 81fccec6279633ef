"""A config.json as Llama checkpoints store it, and copies of it with some fields changed."""

from __future__ import annotations

from typing import Any

from tritonllm.config import EngineConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def of(model_type: str, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "model_type": model_type, **fields}


def without(*names: str, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**LLAMA, **fields}.items() if name not in names}


def engine(**keys: Any) -> EngineConfig:
    return EngineConfig(model_name_or_path="org/model", **keys)
