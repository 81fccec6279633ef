"""OLMo 2: norms behind attention and MLP instead of before them, and over all query heads and all key heads."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM, PostNormLayer


class Olmo2DecoderLayer(PostNormLayer):
    """A post-norm layer whose queries and keys are normed before they are rotated, all heads of a token together."""

    qk_norm = "all_heads"


class Olmo2ForCausalLM(DecoderLM):
    """The decoder with OLMo 2 layers."""

    layer_class = Olmo2DecoderLayer
