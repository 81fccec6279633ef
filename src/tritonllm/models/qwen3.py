"""Qwen3, dense: the plain decoder with an RMSNorm on every query and key head."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLayer, DecoderLM


class Qwen3DecoderLayer(DecoderLayer):
    """A decoder layer whose query and key heads are normed before they are rotated."""

    qk_norm = True


class Qwen3ForCausalLM(DecoderLM):
    """The plain decoder with Qwen3 layers."""

    layer_class = Qwen3DecoderLayer
