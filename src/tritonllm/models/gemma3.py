"""Gemma 3, text only: Gemma 2 with normed query and key heads in place of caps, and a RoPE for each type of layer."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM, SandwichNormLayer


class Gemma3DecoderLayer(SandwichNormLayer):
    """A layer of four norms whose query and key heads are normed before they are rotated."""

    qk_norm = True


class Gemma3ForCausalLM(DecoderLM):
    """The decoder with Gemma 3 layers."""

    layer_class = Gemma3DecoderLayer
