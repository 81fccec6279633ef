"""Families with windows, caps and other norms on a GPU: against transformers, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_twins import engine_logits

from tritonllm import LLMEngine
from tritonllm.testing import assert_matches_hf, save_tiny_checkpoint, tiny_hf_config

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "mistral": {"sliding_window": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_transformers(family: str) -> None:
    heads = "4/4x32" if family == "phi3" else "4/2x32"
    assert_matches_hf(hf_config=tiny_hf_config(family, heads=heads, **FAMILIES[family]), device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(tmp_path, family: str) -> None:
    """Longer than the window, whole, in chunks and token by token: at most twice transformers' own error."""
    fields = {**FAMILIES[family], "num_hidden_layers": 4, "max_position_embeddings": 1024}
    if family not in ("phi3", "olmo2"):
        fields["sliding_window"] = 200
    if family == "gemma3_text":
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = tiny_hf_config(family, heads="4/2x128", **fields)
    twin = save_tiny_checkpoint(config, tmp_path, dtype=torch.bfloat16).to("cuda")
    token_ids = torch.randint(512, (700,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return twin(torch.tensor([token_ids], device="cuda"), use_cache=False).logits[0].float()

    def error(found: torch.Tensor) -> float:
        return ((found - expected).abs().max() / expected.pow(2).mean().sqrt()).item()

    rounded = logits()
    twin.float()
    expected = logits()
    with LLMEngine(str(tmp_path), dtype="bfloat16", max_cached_blocks=8, max_num_batched_tokens=1024) as llm:
        for boundaries, decode_from in (([700], 700), ([1, 8, 300, 556, 700], 700), ([600], 600)):
            assert error(engine_logits(llm, token_ids, boundaries, decode_from)) <= 2 * error(rounded)
