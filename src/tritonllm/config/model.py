"""What a checkpoint is: `ModelConfig`, the one description of a decoder that models, kernels and loader read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.config.checks import Rule, check_fields, flag, integer, integers, number, one_of, text
from tritonllm.config.rope import RopeConfig
from tritonllm.errors import ConfigError, UnsupportedModelError

DTYPES = ("bfloat16", "float16", "float32")

_RULES: dict[str, Rule] = {
    "vocab_size": integer(1),
    "hidden_size": integer(1),
    "intermediate_size": integer(1),
    "num_layers": integer(1),
    "num_heads": integer(1),
    "num_kv_heads": integer(1),
    "head_dim": integer(1),
    "max_position": integer(1),
    "rms_norm_eps": number(0, above=True),
    "attention_scale": number(0, above=True),
    "hidden_act": text(),
    "tie_word_embeddings": flag(),
    "qkv_bias": flag(),
    "o_bias": flag(),
    "mlp_bias": flag(),
    "sliding_window": integer(1).or_none(),
    "eos_token_ids": integers(0, 2**31 - 1),
    "dtype": one_of(*DTYPES).or_none(),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-like decoder: pre-norm blocks of grouped-query attention with RoPE and a gated MLP.

    Sizes are those of the whole model, before any sharding. A plugin whose model needs more may subclass this.

    Attributes:
        num_kv_heads: divides `num_heads`.
        head_dim: even; need not be `hidden_size / num_heads`.
        max_position: rows of the RoPE table, hence the most tokens of one request.
        attention_scale: the factor on `q @ k` before the softmax.
        hidden_act: "silu", unless the model class handles another.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        sliding_window: keys each query sees in some layer, None if all of them; see `max_length`.
        eos_token_ids: ids that end a text.
        architectures, model_type: as in config.json; empty for a model described by keys alone.
        dtype: of the stored weights, None if unknown.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    attention_scale: float
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, _RULES, ConfigError)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}.")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim} is odd, but RoPE rotates pairs of dimensions.")
        if self.rope.rotary_dim > self.head_dim:
            raise UnsupportedModelError(
                f"rotary_dim={self.rope.rotary_dim} is larger than head_dim={self.head_dim}: lower it to that."
            )

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json with the reader of its `model_type`, or as a generic Llama-like model.

        Raises:
            ConfigError: a field is missing or malformed.
            UnsupportedModelError: a field asks for mathematics that this engine does not do.
        """
        from tritonllm.config.hf import READERS, read_hf_config  # the readers need this class

        return READERS.get(config.get("model_type", ""), read_hf_config)(config)

    @property
    def max_length(self) -> int:
        """Longest context that is computed exactly: every layer here attends to all keys through one RoPE table."""
        limits = (self.max_position, self.sliding_window, self.rope.max_length)
        return min(limit for limit in limits if limit is not None)
