"""What the engine asks of a model class, built-in or a plugin's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from tritonllm.models.attention_metadata import AttentionMetadata
    from tritonllm.models.layers import KVCache


class CausalLM(Protocol):
    """A `torch.nn.Module` made as `Class(config: ModelConfig, tp: TPGroup)`.

    Its parameters are named as in the checkpoint; an attribute `packed` maps the names of fused ones. `DecoderLM`
    implements all of it.
    """

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attn: AttentionMetadata
    ) -> torch.Tensor:
        """Final hidden states of int32 ids `[T]` at int32 positions `[T]`.

        Either of all tokens, `[T, hidden_size]`, or of the wanted ones alone, `[N, hidden_size]`, where attn is a
        prefill's and its `last` names N of them; N may be 0.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[N, vocabulary]`, all of them on every rank, of hidden states `[N, hidden_size]`."""
