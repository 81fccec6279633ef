"""Configuration of the engine and of the model: frozen values, and the only readers of foreign keys.

`EngineConfig` is what a user asks for, `ModelConfig` what a checkpoint is; `resolve_model_config` brings both together.
Nothing here imports torch.
"""

from tritonllm.config.engine import EngineConfig
from tritonllm.config.hf import read_hf_config
from tritonllm.config.hf_families import (
    gemma2_config,
    gemma3_config,
    llama_config,
    mistral_config,
    olmo2_config,
    phi3_config,
    qwen2_config,
    qwen3_config,
)
from tritonllm.config.model import ModelConfig
from tritonllm.config.resolve import resolve_dtype, resolve_max_model_length, resolve_model_config
from tritonllm.config.rope import RopeConfig

__all__ = [
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "gemma2_config",
    "gemma3_config",
    "llama_config",
    "mistral_config",
    "olmo2_config",
    "phi3_config",
    "qwen2_config",
    "qwen3_config",
    "read_hf_config",
    "resolve_dtype",
    "resolve_max_model_length",
    "resolve_model_config",
]
