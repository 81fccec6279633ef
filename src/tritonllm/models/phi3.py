"""Phi-3 and Phi-4-mini: the plain decoder, its projections stored stacked; a part of each head may be rotated."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLayer, DecoderLM


class Phi3DecoderLayer(DecoderLayer):
    """A decoder layer whose checkpoint has `qkv_proj` and `gate_up_proj`."""

    stacked = True


class Phi3ForCausalLM(DecoderLM):
    """The plain decoder with Phi-3 layers."""

    layer_class = Phi3DecoderLayer
    packed = {}
