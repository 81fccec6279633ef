"""EXAONE 4: norms stand behind attention and MLP, query and key heads are normed, and some layers do not rotate."""

from __future__ import annotations

from tritonllm.config import ModelConfig
from tritonllm.models.decoder import DecoderLM, PostNormLayer
from tritonllm.models.layers import RotaryEmbedding, TPGroup


class Exaone4Layer(PostNormLayer):
    """Attention, norm, add, MLP, norm, add."""

    qk_norm = True


class Unrotated(RotaryEmbedding):
    """Angles of zero at every position: cosines 1, sines 0."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.rope, config.max_position)
        cosines, sines = self.cos_sin.chunk(2, dim=1)
        cosines.fill_(1)
        sines.fill_(0)


class Exaone4ForCausalLM(DecoderLM):
    """Where some layers have a window, those that see everything leave positions out."""

    layer_class = Exaone4Layer

    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__(config, tp)
        unrotated = Unrotated(config) if "full_attention" in config.layer_types else None
        for kind, layer in zip(config.layer_types, self.model.layers, strict=False):
            if kind == "full_attention":
                layer.self_attn.rotary = unrotated
