"""What a checkpoint is: `ModelConfig`, the one description of a decoder that models, kernels and loader read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tritonllm.config.checks import Rule, check_fields, flag, integer, integers, number, one_of, text
from tritonllm.config.rope import RopeConfig
from tritonllm.errors import ConfigError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers that `layer_types` of a config.json tells apart."""

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
    "layer_types": Rule(
        f"a tuple of {FULL!r} and {SLIDING!r}",
        lambda value: isinstance(value, tuple) and all(item in (FULL, SLIDING) for item in value),
    ),
    "attention_softcap": number(0, above=True).or_none(),
    "logit_softcap": number(0, above=True).or_none(),
    "embedding_multiplier": number(0, above=True),
    "norm_unit_offset": flag(),
    "eos_token_ids": integers(0, 2**31 - 1),
    "dtype": one_of(*DTYPES).or_none(),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-like decoder: blocks of grouped-query attention with RoPE and a gated MLP.

    Sizes are those of the whole model, before any sharding. A plugin whose model needs more may subclass this.

    Attributes:
        num_kv_heads: divides `num_heads`.
        head_dim: even; need not be `hidden_size / num_heads`.
        max_position: rows of the RoPE table, hence the most tokens of one request.
        attention_scale: the factor on `q @ k` before the softmax.
        hidden_act: activation of the MLP, as transformers names it.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        sliding_window: keys that a query sees, its own included, in the layers that have a window; None if none has.
        layer_types: one of `FULL` and `SLIDING` for each layer; empty if all layers are alike.
        sliding_rope: how the `SLIDING` layers rotate, None for as the others.
        attention_softcap: bound c of the scores, which become `c * tanh(score / c)`; None for none.
        logit_softcap: the same for logits.
        embedding_multiplier: factor on the embeddings.
        norm_unit_offset: whether norms multiply by `1 + weight`, as Gemma's do.
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
    layer_types: tuple[str, ...] = ()
    sliding_rope: RopeConfig | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    norm_unit_offset: bool = False
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
        for rope in (self.rope, self.sliding_rope):
            if rope is not None and rope.rotary_dim > self.head_dim:
                raise UnsupportedModelError(
                    f"rotary_dim={rope.rotary_dim} is larger than head_dim={self.head_dim}: lower it to that."
                )
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for num_layers={self.num_layers}: give one each."
            )

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json with the reader of its `model_type`, or as a generic Llama-like model.

        Raises:
            ConfigError: a field is missing or malformed.
            UnsupportedModelError: a field asks for mathematics that this engine does not do.
        """
        from tritonllm.config.hf import read_hf_config  # the readers need this class
        from tritonllm.config.hf_families import READERS

        return READERS.get(config.get("model_type", ""), read_hf_config)(config)

    @property
    def max_length(self) -> int:
        """Longest context that one RoPE table computes exactly, whatever the lengths of the texts."""
        limits = (self.max_position, self.rope.max_length)
        return min(limit for limit in limits if limit is not None)

    @property
    def has_plain_attention(self) -> bool:
        """Whether the attention of some layer has neither a window nor a softcap."""
        return self.attention_softcap is None and (self.sliding_window is None or FULL in self.layer_types)

    def of_layer(self, index: int) -> ModelConfig:
        """The configuration as one layer sees it: its own window and rotation, as if all layers were like it."""
        if not self.layer_types:
            return self
        sliding = self.layer_types[index] == SLIDING
        return replace(
            self,
            layer_types=(),
            sliding_window=self.sliding_window if sliding else None,
            rope=self.sliding_rope if sliding and self.sliding_rope is not None else self.rope,
            sliding_rope=None,
        )

    def for_length(self, length: int) -> ModelConfig:
        """The same model for texts of at most `length` tokens: a window that none outgrows is none.

        The table of longrope has as many positions, by which it chooses its frequencies.
        """
        idle = self.sliding_window is not None and self.sliding_window >= length
        longrope = self.rope.rope_type == "longrope"
        return replace(
            self,
            sliding_window=None if idle else self.sliding_window,
            max_position=length if longrope else self.max_position,
        )
