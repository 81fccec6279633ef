"""Llama 2 and 3.x, SmolLM2 and their like: the plain decoder, with whatever rotary scaling the checkpoint has."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM


class LlamaForCausalLM(DecoderLM):
    """The plain decoder."""
