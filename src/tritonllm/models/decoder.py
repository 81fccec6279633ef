"""The decoder-only transformer that most checkpoints share: embed, n layers, norm, LM head."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tritonllm.config import ModelConfig, RopeConfig
from tritonllm.models.decode_path import DecodePath, decode_path
from tritonllm.models.layers import (
    Attention,
    AttentionMetadata,
    ColumnLinear,
    DecodeMetadata,
    GatedMLP,
    KVCache,
    LayerCache,
    LMHead,
    MixedMetadata,
    PrefillMetadata,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
    TPGroup,
    VocabEmbedding,
)


class DecoderLayer(nn.Module):
    """Norm, attention, add, norm, MLP, add. Each add is fused into the norm that follows it.

    Submodules are named as in the checkpoint.

    Args:
        config: of this layer, see `ModelConfig.of_layer`.
        rotary: the angles of this layer.
        tp: the ranks that the layer is split over.

    Attributes:
        qk_norm: norms of queries and keys, as in `Attention`.
        stacked: the checkpoint holds `qkv_proj` and `gate_up_proj`, each in one tensor.
        norms: names of the RMSNorms over the hidden size.
    """

    qk_norm: ClassVar[QKNorm] = False
    stacked: ClassVar[bool] = False
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.self_attn = Attention(config, rotary, tp, qk_norm=self.qk_norm, stacked=self.stacked)
        self.mlp = GatedMLP(config, tp, stacked=self.stacked)
        for name in self.norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_unit_offset))

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: LayerCache,
        attn: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(hidden, residual)`, both `[T, hidden_size]`; their sum is the residual stream after this layer.

        Where attn wants N of the T tokens only, both come back as `[N, hidden_size]`; N may be 0.
        Without a residual hidden is the whole stream, as it is from the embedding on if `attn.path` is SKINNY. If that
        is HOPPER or MIXED, hidden comes back in parts, float32 `[S, T, hidden_size]`, as `RMSNorm` takes it. With
        `attn.fused_sums` it is this rank's term of what comes back otherwise, for a norm that is given the group.
        """
        decode = attn if isinstance(attn, DecodeMetadata) else None
        if decode is not None and decode.fused_sums:
            return self._fused_sums_step(hidden, residual, positions, cache, decode)
        if decode is not None and decode.path is DecodePath.SKINNY and residual is None:
            stream = self.self_attn.residual_step(hidden, self.input_layernorm, positions, cache, decode)
            return self.mlp.residual_step(stream, self.post_attention_layernorm), None
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden = self.input_layernorm(hidden, residual)
        if decode is not None and decode.path.leaves_parts:
            hidden = self.self_attn.parts_step(hidden, positions, cache, decode)
            hidden = self.post_attention_layernorm(hidden, residual)
            return self.mlp.parts_step(hidden, decode.path), residual
        hidden = self.self_attn(hidden, positions, cache, attn)
        residual = attn.wanted(residual)
        hidden = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual

    def _fused_sums_step(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: LayerCache,
        attn: DecodeMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step over several ranks, whose norms begin by adding up the ranks' terms."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden = self.input_layernorm(hidden, residual, self.tp)
        hidden = self.self_attn.term_step(hidden, positions, cache, attn)
        hidden = self.post_attention_layernorm(hidden, residual, self.tp)
        return self.mlp.term_step(hidden, attn.path), residual


class SandwichNormLayer(DecoderLayer):
    """A decoder layer with a norm before and a norm behind attention, and the same around the MLP (Gemma 2)."""

    norms = (*DecoderLayer.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: LayerCache,
        attn: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of `DecoderLayer`; `attn.path` is always SEPARATE."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden = self.input_layernorm(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(hidden, positions, cache, attn))
        stream = attn.wanted(residual)
        hidden = self.mlp(self.pre_feedforward_layernorm(hidden, stream))
        return self.post_feedforward_layernorm(hidden), stream


class PostNormLayer(DecoderLayer):
    """A decoder layer with norms behind attention and MLP alone, before what they give is added (OLMo 2)."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    post_feedforward_layernorm: RMSNorm

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cache: LayerCache,
        attn: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of `DecoderLayer`; `attn.path` is always SEPARATE."""
        stream = hidden if residual is None else residual.add_(hidden)
        attended = self.post_attention_layernorm(self.self_attn(stream, positions, cache, attn))
        stream = attn.wanted(stream).add_(attended)
        return self.post_feedforward_layernorm(self.mlp(stream)), stream


def _is_of_the_kit(layer: nn.Module) -> bool:
    """Whether a layer and its attention go by the kit's own methods: others need not know of paths or wanted tokens."""
    return (
        isinstance(layer, DecoderLayer)
        and type(layer).forward in (DecoderLayer.forward, SandwichNormLayer.forward, PostNormLayer.forward)
        and type(layer.self_attn).forward is Attention.forward
    )


def _may_fuse(layer: nn.Module) -> bool:
    """Whether a layer may take another path than SEPARATE, and fuse its sums: pre-norm, nothing of the kit replaced.

    The fused kernels know windows, softcaps and every activation, but only norms by the weight itself. Of parts they
    take the weight alone, so each needs the kit's own forward.
    """
    return (
        isinstance(layer, DecoderLayer)
        and _is_of_the_kit(layer)
        and type(layer).forward is DecoderLayer.forward
        and not layer.self_attn.unit_offset
        and not layer.self_attn.joint_norm
        and type(layer.mlp).forward is GatedMLP.forward
        and type(layer.input_layernorm) is type(layer.post_attention_layernorm) is RMSNorm
        and type(layer.self_attn.qkv_proj).forward is type(layer.mlp.gate_up_proj).forward is ColumnLinear.forward
        and type(layer.self_attn.o_proj).forward is type(layer.mlp.down_proj).forward is RowLinear.forward
    )


class DecoderModel(nn.Module):
    """Everything below the LM head, under the checkpoint's prefix `model.`.

    Attributes:
        in_features: row lengths of this rank's weights: hidden size, heads * head_dim, intermediate size.
        select_tokens: if True, `forward` returns the tokens alone that a prefill's `last` names, and the last layer
            computes no more than they need. False for all T tokens always.
    """

    def __init__(self, config: ModelConfig, tp: TPGroup, layer_class: type[DecoderLayer]) -> None:
        super().__init__()
        rotary: dict[RopeConfig, RotaryEmbedding] = {}
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, tp, config.embedding_multiplier)
        self.layers = nn.ModuleList()
        for own in map(config.of_layer, range(config.num_layers)):
            if own.rope not in rotary:
                rotary[own.rope] = RotaryEmbedding(own.rope, config.max_position)
            self.layers.append(layer_class(own, rotary[own.rope], tp))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_unit_offset)
        self.tp = tp
        self.in_features = (
            config.hidden_size,
            tp.split(config.num_heads, "num_heads")[1] * config.head_dim,
            tp.split(config.intermediate_size, "intermediate_size")[1],
        )
        self.select_tokens = False

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        if isinstance(attn, DecodeMetadata) and type(self.norm) is RMSNorm and all(map(_may_fuse, self.layers)):
            path = decode_path(attn.num_rows, self.in_features, hidden.dtype, hidden.device)
            attn = replace(attn, path=path, fused_sums=self.tp.size > 1)
        metadata = [attn] * len(self.layers)
        last = attn.last if isinstance(attn, PrefillMetadata | MixedMetadata) else None
        if last is not None and self.select_tokens and _is_of_the_kit(self.layers[-1]):
            metadata[-1] = last
        for layer, cache, seen in zip(self.layers, kv_cache, metadata, strict=True):
            hidden, residual = layer(hidden, residual, positions, cache, seen)
        if isinstance(attn, DecodeMetadata) and attn.fused_sums:
            return self.norm(hidden, residual, self.tp)
        return self.norm(hidden, residual)


class DecoderLM(nn.Module):
    """A causal language model. A family subclasses it and names its layer class.

    Attributes:
        layer_class: the decoder layer of this family.
        packed: checkpoint name segment to (fused parameter's segment, slot), matched by whole segments.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    packed: ClassVar[dict[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config, tp, self.layer_class)
        # A subclass with a forward of its own may go on with every token.
        self.model.select_tokens = type(self).forward is DecoderLM.forward
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tp, weight=tied, softcap=config.logit_softcap)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        """Final hidden states `[T, hidden_size]` of int32 or int64 ids `[T]` at int32 positions `[T]`.

        They are those of the wanted tokens alone, `[N, hidden_size]`, where attn is a prefill's and names N of them in
        `last`; so for a mixed step, whose decode rows come first.
        """
        return self.model(input_ids, positions, kv_cache, attn)

    @property
    def takes_mixed_steps(self) -> bool:
        """Whether `forward` may be given a `MixedMetadata`: everything that looks at one is the kit's own."""
        if type(self).forward is not DecoderLM.forward or type(self.model).forward is not DecoderModel.forward:
            return False
        # A wrong model may have its layers elsewhere, which is for the loader to say.
        return all(map(_is_of_the_kit, getattr(self.model, "layers", [None])))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]` of hidden states `[N, hidden_size]`."""
        return self.lm_head(hidden)
