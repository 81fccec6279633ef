"""Gemma 2: four norms a layer, windows in every other one, capped scores and logits; its config reader says so."""

from __future__ import annotations

from tritonllm.models.decoder import DecoderLM, SandwichNormLayer


class Gemma2ForCausalLM(DecoderLM):
    """The decoder with a norm before and behind each sublayer."""

    layer_class = SandwichNormLayer
