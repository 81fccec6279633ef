"""The two ends of the forward pass: straight to tokens, or logits and then a choice among them."""

from __future__ import annotations

import torch

from tritonllm.engine.inputs import SamplingRows
from tritonllm.kernels.sampling import pick_tokens, sample_tokens
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.layers import LMHead
from tritonllm.models.protocol import CausalLM


class TokenChoice:
    """Chooses the next tokens of a model; the same token comes out of both ends where both apply.

    Every rank chooses, and all choose alike: from the same full logits, or from the same best tokens of each shard.
    """

    def __init__(self, model: CausalLM) -> None:
        self._compute_logits = model.compute_logits
        # With a compute_logits of its own a model decides what a logit is, so its head is not bypassed.
        self._head: LMHead | None = None
        if isinstance(model, DecoderLM) and type(model).compute_logits is DecoderLM.compute_logits:
            self._head = model.lm_head

    def __call__(
        self, hidden: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor, plain: bool
    ) -> torch.Tensor:
        """Tokens int32 `[N]` of hidden states `[N, hidden_size]`.

        Args:
            positions: int32 `[N]`, those of the new tokens; they key the noise.
            plain: every row is greedy or of plain temperature.
        """
        if plain and self._head is not None:
            return self._head.pick_tokens(hidden, sampling.temperatures, sampling.seeds, positions)
        logits = self._compute_logits(hidden)
        if plain:
            return pick_tokens(logits, sampling.temperatures, sampling.seeds, positions)
        return sample_tokens(logits, sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.seeds, positions)
