"""Mistral 7B and its like: the plain decoder; a window shorter than the context is refused with the config."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM


class MistralForCausalLM(DecoderLM):
    """The plain decoder."""
