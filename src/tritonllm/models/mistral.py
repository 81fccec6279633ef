"""Mistral 7B and its like: the plain decoder; a sliding window shorter than the context is refused when its config is read."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM


class MistralForCausalLM(DecoderLM):
    """The plain decoder."""
