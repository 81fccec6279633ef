"""How Toy's config.json is read, and the transformers model that computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonllm.config import ModelConfig, read_hf_config


def toy_config(config: Mapping[str, Any]) -> ModelConfig:
    """Toy's file has the usual fields, and leaves out those that all its checkpoints share."""
    return read_hf_config(config, defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6})


def reference() -> Any:
    """A tiny Qwen3, which is what Toy computes."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
