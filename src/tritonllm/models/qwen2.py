"""Qwen2 and Qwen2.5: the plain decoder; its config reader asks for a bias on the query, key and value projections."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM


class Qwen2ForCausalLM(DecoderLM):
    """The plain decoder."""
