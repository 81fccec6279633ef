"""How the family's config.json is read, and the transformers model that computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonllm.config import ModelConfig, read_hf_config


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The usual fields, among them the window and which layers have it."""
    return read_hf_config(config, defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5})


def reference() -> Any:
    """A tiny EXAONE 4 with a window in every layer but the last, as in the 32B model."""
    from transformers import Exaone4Config

    return Exaone4Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=16,
        sliding_window_pattern=2,
    )
