"""EXAONE 4: norms stand behind attention and MLP, none before; query and key heads are normed."""

from __future__ import annotations

import torch
from torch import nn

from tritonllm.config import ModelConfig
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.layers import (
    Attention,
    AttentionMetadata,
    GatedMLP,
    LayerCache,
    RMSNorm,
    RotaryEmbedding,
    TPGroup,
)


class Exaone4Layer(nn.Module):
    """Attention, norm, add, MLP, norm, add. Submodules are named as in the checkpoint."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, tp: TPGroup) -> None:
        super().__init__()
        self.self_attn = Attention(config, rotary, tp, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, tp)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        stream: torch.Tensor,
        residual: None,
        positions: torch.Tensor,
        cache: LayerCache,
        attn: AttentionMetadata,
    ) -> tuple[torch.Tensor, None]:
        """The stream `[T, hidden_size]` after this layer, in one part."""
        stream = stream + self.post_attention_layernorm(self.self_attn(stream, positions, cache, attn))
        return stream + self.post_feedforward_layernorm(self.mlp(stream)), None


class Exaone4ForCausalLM(DecoderLM):
    """Embedding, layers, norm and head, with weights named as in the checkpoint."""

    layer_class = Exaone4Layer
