"""The kit that model files are built from. A model states its structure; which kernel runs is decided here.

Layers take the configuration, the tensor-parallel group, and at run time their inputs: positions, the KV cache of
their layer and the attention metadata. Nothing is read from a global.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tritonllm.config import ModelConfig, RopeConfig
from tritonllm.kernels.activation import silu_and_mul
from tritonllm.kernels.fused_decode_attention import fused_decode_attention
from tritonllm.kernels.hopper_linear import hopper_linear, hopper_linear_parts
from tritonllm.kernels.norm import add_rms_norm, rms_norm
from tritonllm.kernels.rope_store import rope_store_kv
from tritonllm.kernels.sampling import merge_picks, pick_from_shard, pick_tokens
from tritonllm.kernels.skinny_linear import MAX_ROWS, skinny_linear
from tritonllm.models.attention_metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from tritonllm.models.decode_path import DecodePath
from tritonllm.models.linear import (
    ColumnLinear,
    GateUpLinear,
    Part,
    QKVLinear,
    RowLinear,
    VocabMatrix,
)
from tritonllm.models.rope import rope_table
from tritonllm.models.tensor_parallel import TPGroup

__all__ = [
    "Attention",
    "AttentionMetadata",
    "ColumnLinear",
    "DecodeMetadata",
    "GateUpLinear",
    "GatedMLP",
    "KVCache",
    "LMHead",
    "LayerCache",
    "Part",
    "PrefillMetadata",
    "QKVLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowLinear",
    "TPGroup",
    "VocabEmbedding",
]

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""

KVCache = Sequence[LayerCache]
"""One entry a layer."""


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, tp: TPGroup | None = None) -> torch.Tensor:
        """Norm of x `[T, size]`; with a residual, x is added to it in place first and the sum is normed.

        Then x may also be parts of that sum, float32 `[S, T, size]`, and with a group this rank's term of it.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        if tp is not None:
            return tp.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """The cosine and sine table, float32 `[max_position, rotary_dim]`, shared by the layers that rotate alike."""

    cos_sin: torch.Tensor

    def __init__(self, rope: RopeConfig, max_position: int) -> None:
        super().__init__()
        device = torch.empty(0).device  # where parameters are being made
        self.register_buffer("cos_sin", rope_table(rope, max_position, device), persistent=False)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, with optional norms of the query and key heads.

    The normed, rotated keys and the values are written to the cache before any query reads it, so a fresh prompt, a
    chunk, a cached prefix and a decode step are one path.
    """

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, tp: TPGroup, qk_norm: bool = False) -> None:
        super().__init__()
        self.rotary = rotary
        self.scale = config.attention_scale
        self.head_dim = config.head_dim
        self.num_heads = tp.split(config.num_heads, "num_heads")[1]
        self.eps = config.rms_norm_eps
        self.qkv_proj = QKVLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias, tp
        )
        self.o_proj = RowLinear(config.num_heads * config.head_dim, config.hidden_size, config.o_bias, tp)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        """hidden `[T, hidden_size]` and int32 positions `[T]` to `[T, hidden_size]`, or `[N, ...]` if attn wants N."""
        return self.o_proj(self._attend(hidden, positions, cache, attn))

    def term_step(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: DecodeMetadata
    ) -> torch.Tensor:
        """This rank's term `[T, hidden_size]` of `self(hidden)`, or parts of it, by the kernels of the step's path."""
        if attn.path.leaves_parts:
            return self.parts_step(hidden, positions, cache, attn)
        if attn.path is DecodePath.SKINNY:
            heads = skinny_linear(hidden, self.qkv_proj.weight, bias=self.qkv_proj.bias)
            attended = self._attend_fused(heads, positions, cache, attn)
            return skinny_linear(attended, self.o_proj.weight, bias=self.o_proj.own_bias)
        return self.o_proj.term(self._attend(hidden, positions, cache, attn))

    def _attend(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        """Everything before the output projection, `[T, heads * head_dim]`, in separate kernels."""
        k_cache, v_cache = cache
        q = rope_store_kv(
            self.qkv_proj(hidden),
            self.rotary.cos_sin,
            positions,
            k_cache,
            v_cache,
            attn.slot_mapping,
            self.num_heads,
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            eps=self.eps,
        )
        return attn.attend(q, k_cache, v_cache, self.scale).flatten(1)

    def residual_step(
        self, stream: torch.Tensor, norm: RMSNorm, positions: torch.Tensor, cache: LayerCache, attn: DecodeMetadata
    ) -> torch.Tensor:
        """`stream + self(norm(stream))` in three kernels, for decode batches of few rows on one rank."""
        qkv, o = self.qkv_proj, self.o_proj
        heads = skinny_linear(stream, qkv.weight, bias=qkv.bias, norm_weight=norm.weight, eps=norm.eps)
        attended = self._attend_fused(heads, positions, cache, attn)
        return skinny_linear(attended, o.weight, bias=o.bias, residual=stream)

    def parts_step(
        self, hidden: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: DecodeMetadata
    ) -> torch.Tensor:
        """This rank's term of `self(hidden)` in three kernels, as parts `[S, T, hidden_size]`, on Hopper.

        The first of them is PyTorch's if `attn.path` is MIXED.
        """
        qkv, o = self.qkv_proj, self.o_proj
        in_hopper = attn.path is DecodePath.HOPPER
        heads = hopper_linear(hidden, qkv.weight, bias=qkv.bias) if in_hopper else qkv(hidden)
        return hopper_linear_parts(self._attend_fused(heads, positions, cache, attn), o.weight, bias=o.own_bias)

    def _attend_fused(
        self, qkv: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: DecodeMetadata
    ) -> torch.Tensor:
        """Everything between the two projections in one kernel, `[T, heads * head_dim]`."""
        k_cache, v_cache = cache
        return fused_decode_attention(
            qkv,
            self.rotary.cos_sin,
            positions,
            k_cache,
            v_cache,
            attn.slot_mapping,
            attn.block_tables,
            attn.context_lens,
            self.num_heads,
            self.scale,
            attn.workspace,
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            eps=self.eps,
            order=attn.order,
            # What it reads early was written before the embedding, which is launched without overlap.
            early_reads=True,
        ).flatten(1)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, "GLU variants improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__()
        self.gate_up_proj = GateUpLinear(config.hidden_size, config.intermediate_size, config.mlp_bias, tp)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, config.mlp_bias, tp)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))

    def residual_step(self, stream: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`stream + self(norm(stream))` in two kernels, for decode batches of few rows on one rank."""
        gate_up, down = self.gate_up_proj, self.down_proj
        activated = skinny_linear(
            stream, gate_up.weight, bias=gate_up.bias, norm_weight=norm.weight, eps=norm.eps, gated=True
        )
        return skinny_linear(activated, down.weight, bias=down.bias, residual=stream)

    def term_step(self, hidden: torch.Tensor, path: DecodePath) -> torch.Tensor:
        """This rank's term `[T, hidden_size]` of `self(hidden)`, or parts of it, by the kernels of a path."""
        if path.leaves_parts:
            return self.parts_step(hidden, path)
        gate_up, down = self.gate_up_proj, self.down_proj
        if path is DecodePath.SKINNY:
            activated = skinny_linear(hidden, gate_up.weight, bias=gate_up.bias, gated=True)
            return skinny_linear(activated, down.weight, bias=down.own_bias)
        return down.term(silu_and_mul(gate_up(hidden)))

    def parts_step(self, hidden: torch.Tensor, path: DecodePath) -> torch.Tensor:
        """This rank's term of `self(hidden)` as parts `[S, T, hidden_size]`, on Hopper.

        Two kernels on the path HOPPER; three on MIXED, with gate and up from PyTorch.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if path is DecodePath.HOPPER:
            activated = hopper_linear(hidden, gate_up.weight, bias=gate_up.bias, gated=True)
        else:
            activated = silu_and_mul(gate_up(hidden))
        return hopper_linear_parts(activated, down.weight, bias=down.own_bias)


class VocabEmbedding(VocabMatrix):
    """Token embedding; ids `[T]` to `[T, hidden_size]`. Ids of other ranks' shards contribute zero here."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        return self.tp.all_reduce(F.embedding(local * mine, self.weight) * mine[:, None])


class LMHead(VocabMatrix):
    """Hidden states to logits, and hidden states to tokens; with tied embeddings it shares their parameter."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[N, hidden_size]` to logits `[N, vocab_size]` in the model's dtype, the same on every rank."""
        logits = self.shard_logits(hidden)
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[N, hidden_size]` to logits `[N, rows of this rank's weight]`; those of padding mean nothing."""
        if 0 < hidden.shape[0] <= MAX_ROWS:
            return skinny_linear(hidden, self.weight)
        return F.linear(hidden, self.weight)

    def pick_tokens(
        self, hidden: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The token end of the forward pass, for rows that are greedy or use plain temperature.

        The point where the matrix product and the choice may be fused; the token is the one that `forward` followed by
        the sampler gives. int32 `[N]`, the same on every rank. Ranks exchange a score and an id a row, not logits.
        """
        logits = self.shard_logits(hidden)
        if self.tp.size == 1:
            return pick_tokens(logits, temperatures, seeds, positions)
        scores, tokens = pick_from_shard(logits[:, : self.num_held], temperatures, seeds, positions, self.start)
        pairs = self.tp.all_gather(torch.stack([scores.view(torch.int32), tokens]))  # [ranks, 2, N]
        scores, tokens = pairs.permute(1, 2, 0).contiguous()
        return merge_picks(scores.view(torch.float32), tokens)
