"""The kit that model files are built from. A model states its structure; which kernel runs is decided here.

Layers take the configuration, the tensor-parallel group, and at run time their inputs: positions, the KV cache of
their layer and the attention metadata. Nothing is read from a global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from tritonllm.config import ModelConfig, RopeConfig
from tritonllm.errors import UnsupportedModelError
from tritonllm.kernels.activation import gelu_and_mul, silu_and_mul
from tritonllm.kernels.fused_decode_attention import fused_decode_attention
from tritonllm.kernels.hopper_linear import hopper_linear, hopper_linear_parts
from tritonllm.kernels.kv_store import store_kv
from tritonllm.kernels.norm import add_rms_norm, rms_norm
from tritonllm.kernels.rope import apply_rope
from tritonllm.kernels.rope_store import rope_store_kv
from tritonllm.kernels.skinny_linear import skinny_linear
from tritonllm.models.attention_metadata import AttentionMetadata, DecodeMetadata, MixedMetadata, PrefillMetadata
from tritonllm.models.decode_path import DecodePath
from tritonllm.models.linear import (
    ColumnLinear,
    GateUpLinear,
    Part,
    QKVLinear,
    RowLinear,
)
from tritonllm.models.rope import rope_table
from tritonllm.models.tensor_parallel import TPGroup
from tritonllm.models.vocabulary import LMHead, VocabEmbedding

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "AttentionMetadata",
    "ColumnLinear",
    "DecodeMetadata",
    "GateUpLinear",
    "GatedMLP",
    "KVCache",
    "LMHead",
    "LayerCache",
    "MixedMetadata",
    "Part",
    "PrefillMetadata",
    "QKNorm",
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


QKNorm = bool | Literal["all_heads"]
"""Norms of queries and keys before they are rotated: none (False), each head by itself (True), or all heads of a token
together, `"all_heads"`."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations of `GatedMLP`, from their names in a config.json to those of the kernels."""


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        size: of the last dimension.
        eps: added to the mean.
        unit_offset: multiply by `1 + weight`, as Gemma does.
    """

    def __init__(self, size: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None, tp: TPGroup | None = None) -> torch.Tensor:
        """Norm of x `[T, size]`; with a residual, x is added to it in place first and the sum is normed.

        Then x may also be parts of that sum, float32 `[S, T, size]`, and with a group this rank's term of it; that
        norm has no unit offset.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.unit_offset)
        if tp is not None:
            if self.unit_offset:
                raise ValueError("RMSNorm: a sum over ranks cannot be normed with unit_offset=True; reduce it first")
            return tp.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset)


class RotaryEmbedding(nn.Module):
    """The cosine and sine table, float32 `[max_position, rotary_dim]`, shared by the layers that rotate alike.

    Args:
        rope: which scaling rule, over how many dimensions of a head.
        max_position: rows of the table.
    """

    cos_sin: torch.Tensor

    def __init__(self, rope: RopeConfig, max_position: int) -> None:
        super().__init__()
        device = torch.empty(0).device  # where parameters are being made
        self.register_buffer("cos_sin", rope_table(rope, max_position, device), persistent=False)


class Attention(nn.Module):
    """Grouped-query attention over the paged cache, with optional norms of the query and key heads.

    The normed, rotated keys and the values are written to the cache before any query reads it, so a fresh prompt, a
    chunk, a cached prefix and a decode step are one path.

    Args:
        config: of this layer (`ModelConfig.of_layer`): heads, biases, `attention_scale`, `sliding_window`,
            `attention_softcap`, and epsilon and offset of the norms.
        rotary: the angles.
        tp: the ranks that the heads are split over.
        qk_norm: norms of queries and keys, with weights `q_norm` and `k_norm`.
        stacked: the checkpoint has the three projections in one tensor, `qkv_proj`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryEmbedding,
        tp: TPGroup,
        qk_norm: QKNorm = False,
        stacked: bool = False,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rotary = rotary
        self.scale = config.attention_scale
        self.window = config.sliding_window
        self.softcap = config.attention_softcap
        self.head_dim = config.head_dim
        self.num_heads = tp.split(config.num_heads, "num_heads")[1]
        self.num_kv_heads = tp.split_kv_heads(config.num_kv_heads)[1]
        self.eps = config.rms_norm_eps
        self.unit_offset = config.norm_unit_offset
        self.qkv_proj = QKVLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias, tp, stacked
        )
        self.o_proj = RowLinear(config.num_heads * config.head_dim, config.hidden_size, config.o_bias, tp)
        self.joint_norm = qk_norm == "all_heads"
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm:
            q_size, k_size = (config.num_heads, config.num_kv_heads) if self.joint_norm else (1, 1)
            self.q_norm = RMSNorm(q_size * config.head_dim, config.rms_norm_eps, config.norm_unit_offset)
            self.k_norm = RMSNorm(k_size * config.head_dim, config.rms_norm_eps, config.norm_unit_offset)

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
        qkv = self.qkv_proj(hidden)
        if self.joint_norm:
            q = self._joint_norm_rope_store(qkv, positions, cache, attn)
        else:
            q = rope_store_kv(
                qkv,
                self.rotary.cos_sin,
                positions,
                k_cache,
                v_cache,
                attn.slot_mapping,
                self.num_heads,
                q_norm=self.q_norm.weight if self.q_norm is not None else None,
                k_norm=self.k_norm.weight if self.k_norm is not None else None,
                eps=self.eps,
                unit_offset=self.unit_offset,
            )
        return attn.attend(q, k_cache, v_cache, self.scale, self.window, self.softcap).flatten(1)

    def _joint_norm_rope_store(
        self, qkv: torch.Tensor, positions: torch.Tensor, cache: LayerCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        """What `rope_store_kv` does, `[T, heads, head_dim]`, with norms over all heads: those of other ranks, too."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.split([count * self.head_dim for count in heads], dim=1)
        q, k = _norm_over_ranks(q, self.q_norm, self.tp), _norm_over_ranks(k, self.k_norm, self.tp)
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        apply_rope(q, k, positions, self.rotary.cos_sin)
        store_kv(k, v, *cache, attn.slot_mapping)
        return q

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
            window=self.window,
            softcap=self.softcap,
            # What it reads early was written before the embedding, which is launched without overlap.
            early_reads=True,
        ).flatten(1)


def _norm_over_ranks(x: torch.Tensor, norm: RMSNorm | None, tp: TPGroup) -> torch.Tensor:
    """Norm of x `[T, this rank's heads * head_dim]` over the heads of all ranks, of which some may hold equal ones."""
    if norm is None:
        return x
    if tp.size == 1:
        return norm(x)
    width = x.shape[1]
    copies = tp.size * width // norm.weight.shape[0]
    whole = tp.all_gather(x)[::copies].transpose(0, 1).flatten(1)
    return norm(whole).narrow(1, tp.rank // copies * width, width)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer, "GLU variants improve Transformer", 2020).

    Args:
        config: sizes, biases, and `hidden_act`, a key of `ACTIVATIONS`.
        tp: the ranks that the intermediate size is split over.
        stacked: the checkpoint has gate and up in one tensor, `gate_up_proj`.

    Raises:
        UnsupportedModelError: another activation.
    """

    def __init__(self, config: ModelConfig, tp: TPGroup, stacked: bool = False) -> None:
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"hidden_act={config.hidden_act!r} is not computed by GatedMLP, only {', '.join(ACTIVATIONS)}: "
                "use a layer of your own."
            )
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = GateUpLinear(config.hidden_size, config.intermediate_size, config.mlp_bias, tp, stacked)
        self.down_proj = RowLinear(config.intermediate_size, config.hidden_size, config.mlp_bias, tp)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activate(self.gate_up_proj(hidden)))

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up `[T, 2 * intermediate_size]` to `[T, intermediate_size]`, of this rank."""
        if self.activation == "silu":
            return silu_and_mul(gate_up)
        return gelu_and_mul(gate_up, tanh=self.activation == "gelu_tanh")

    def residual_step(self, stream: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`stream + self(norm(stream))` in two kernels, for decode batches of few rows on one rank."""
        gate_up, down = self.gate_up_proj, self.down_proj
        activated = skinny_linear(
            stream, gate_up.weight, bias=gate_up.bias, norm_weight=norm.weight, eps=norm.eps, gated=True,
            activation=self.activation,
        )  # fmt: skip
        return skinny_linear(activated, down.weight, bias=down.bias, residual=stream)

    def term_step(self, hidden: torch.Tensor, path: DecodePath) -> torch.Tensor:
        """This rank's term `[T, hidden_size]` of `self(hidden)`, or parts of it, by the kernels of a path."""
        if path.leaves_parts:
            return self.parts_step(hidden, path)
        gate_up, down = self.gate_up_proj, self.down_proj
        if path is DecodePath.SKINNY:
            activated = skinny_linear(hidden, gate_up.weight, bias=gate_up.bias, gated=True, activation=self.activation)
            return skinny_linear(activated, down.weight, bias=down.own_bias)
        return down.term(self._activate(gate_up(hidden)))

    def parts_step(self, hidden: torch.Tensor, path: DecodePath) -> torch.Tensor:
        """This rank's term of `self(hidden)` as parts `[S, T, hidden_size]`, on Hopper.

        Two kernels on the path HOPPER; three on MIXED, with gate and up from PyTorch.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if path is DecodePath.HOPPER:
            activated = hopper_linear(hidden, gate_up.weight, bias=gate_up.bias, gated=True, activation=self.activation)
        else:
            activated = self._activate(gate_up(hidden))
        return hopper_linear_parts(activated, down.weight, bias=down.own_bias)
