"""The comparison itself: a model that is wrong in one place fails, and the message points there."""

from __future__ import annotations

import pytest
import torch

from tritonllm import LLMEngine, ModelSpec
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.llama import LlamaForCausalLM
from tritonllm.registry import process_registry
from tritonllm.testing import assert_matches_hf, assert_ways_agree, save_tiny_checkpoint, tiny_hf_config
from tritonllm.testing.hf_comparison import reference_config


class UnscaledLlama(LlamaForCausalLM):
    """Attends without the softmax scale."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        for layer in self.model.layers:
            layer.self_attn.scale = 1.0


class UnbiasedQwen2(LlamaForCausalLM):
    """Forgets the bias of the keys."""

    def forward(self, input_ids, positions, kv_cache, attn):
        for layer in self.model.layers:
            layer.self_attn.qkv_proj.bias[-64:] = 0
        return super().forward(input_ids, positions, kv_cache, attn)


class ForgetfulLlama(LlamaForCausalLM):
    """Decodes as if every token stood at position 0."""

    def forward(self, input_ids, positions, kv_cache, attn):
        if isinstance(attn, DecodeMetadata):
            positions = torch.zeros_like(positions)
        return super().forward(input_ids, positions, kv_cache, attn)


def spec(model: type, **fields) -> ModelSpec:
    return ModelSpec(name="broken", model=f"{__name__}:{model.__name__}", checkpoints=("broken",), **fields)


@pytest.fixture(autouse=True)
def _registry():
    yield
    process_registry.cache_clear()


def tiny_reference():
    return tiny_hf_config("llama")


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (UnscaledLlama, "llama", r"the whole prompt: .* first at position [1-9].*look at positions, rotary embedding"),
        (UnbiasedQwen2, "qwen2", r"the whole prompt: .* first at position 0.*look at weights, biases"),
        (ForgetfulLlama, "llama", r"decoding one token at a time: .*what the model does differently when it decodes"),
    ],
)
def test_a_wrong_model_is_found_and_the_message_points_at_the_place(model, config: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_matches_hf(spec(model), tiny_hf_config(config), device="cpu")


def test_a_right_model_passes_with_the_reference_of_its_spec() -> None:
    assert_matches_hf(spec(LlamaForCausalLM, reference=f"{__name__}:tiny_reference"), chunks=[], device="cpu")
    assert_matches_hf(spec(LlamaForCausalLM, architectures=("LlamaForCausalLM",)), chunks=[], device="cpu")


def test_what_is_compared_with_is_asked_for_when_it_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="needs a ModelSpec, a transformers config, or both"):
        assert_matches_hf()
    with pytest.raises(ValueError, match=r"no class named by architectures\[0\].*set `reference`"):
        reference_config(spec(LlamaForCausalLM, architectures=("NoSuchForCausalLM",)))


def test_a_broken_way_is_named(tiny, monkeypatch) -> None:
    folder, _ = tiny("llama")
    prompts = [[5] * 20, [6] * 20]
    generate = LLMEngine.generate

    def wrong(self, asked, params=None):
        result = generate(self, asked, params)
        if len(asked) > 1:
            result["token_ids"][1][2] += 1
        return result

    monkeypatch.setattr(LLMEngine, "generate", wrong)
    with pytest.raises(AssertionError, match="all in one batch: prompt 1 of 20 tokens differs from token 2 on"):
        assert_ways_agree(folder, prompts, 4, ["all in one batch"], device="cpu")
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="preempted: a pool of 2 blocks preempted nobody"):
        assert_ways_agree(folder, [[5]], 4, ["preempted"], device="cpu")


def test_a_twin_bounds_its_scores_whatever_transformers_would_choose(monkeypatch, tmp_path) -> None:
    """PyTorch's attention, the choice of some versions, knows no bound on scores."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    twin = save_tiny_checkpoint(tiny_hf_config("gemma2"), tmp_path)
    assert twin.config._attn_implementation == "eager"
