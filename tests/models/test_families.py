"""Every built-in family against transformers on the CPU in float32: logits at every position, 24 greedy tokens."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritonllm.testing import (
    HEAD_SHAPES,
    ROPE_RULES,
    assert_engine_matches,
    assert_matches_hf,
    save_tiny_checkpoint,
    tiny_hf_config,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

# Every family, shape and head in `make test`; every combination in `make test-full`.
SAMPLE = [
    ("llama", "9/3x64", True),
    ("llama", "4/4x32", False),
    ("llama", "8/1x80", False),
    ("llama", "2/1x256", False),
    ("qwen2", "12/2x64", True),
    ("qwen2", "4/2x128", False),
    ("qwen2", "28/4x32", False),
    ("qwen3", "4/2x32", True),
    ("qwen3", "28/4x32", False),
    ("mistral", "8/1x80", True),
    ("mistral", "4/2x96", False),
    ("mistral", "12/2x64", False),
]
SHAPES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product(FAMILIES, HEAD_SHAPES, (True, False))
]
RULES = [
    pytest.param(family, rule, marks=() if family == "llama" else pytest.mark.slow)
    for family, rule in itertools.product(FAMILIES, [rule for rule in ROPE_RULES if rule != "default"])
]


@pytest.mark.parametrize(("family", "heads", "tied"), SHAPES)
def test_shapes(family: str, heads: str, tied: bool) -> None:
    assert_matches_hf(hf_config=tiny_hf_config(family, heads=heads, tie_word_embeddings=tied), device="cpu")


@pytest.mark.parametrize(("family", "rule"), RULES)
def test_rope_rules(family: str, rule: str) -> None:
    assert_matches_hf(hf_config=tiny_hf_config(family, rope=rule), chunks=[7], device="cpu")


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_partial_rotation(tmp_path, share: float) -> None:
    # Of the Llama-like models in transformers Phi-3 is the one that rotates a part of each head. It is a Llama whose
    # projections are stored stacked, so its weights taken apart are a Llama checkpoint.
    config = tiny_hf_config("phi3", heads="4/4x32", partial_rotary_factor=share)
    twin = save_tiny_checkpoint(config, tmp_path)
    stacked = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in stacked.items() if "qkv_proj" not in name and "gate_up" not in name}
    for name, tensor in stacked.items():
        if name.endswith("qkv_proj.weight"):
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
            tensors |= {name.replace("qkv", part): rows.clone() for part, rows in parts.items()}
        elif name.endswith("gate_up_proj.weight"):
            parts = dict(zip(("gate", "up"), tensor.chunk(2), strict=True))
            tensors |= {name.replace("gate_up", part): rows.clone() for part, rows in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_engine_matches(str(tmp_path), twin, list(range(5, 40)), chunks=[7], device="cpu")


def test_attention_and_mlp_biases_of_llama() -> None:
    config = tiny_hf_config("llama", attention_bias=True, mlp_bias=True)
    assert_matches_hf(hf_config=config, chunks=[], device="cpu")


def test_qwen2_has_a_bias_on_q_k_v_that_is_not_zero(tiny) -> None:
    _, twin = tiny("qwen2")
    biases = {name: tensor for name, tensor in twin.state_dict().items() if name.endswith("bias")}
    assert {name.split(".")[-2] for name in biases} == {"q_proj", "k_proj", "v_proj"}
    assert all(tensor.abs().min() > 0 for tensor in biases.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_computed_in_float32_on_a_cpu(tmp_path, dtype: torch.dtype) -> None:
    twin = save_tiny_checkpoint(tiny_hf_config("llama"), tmp_path, dtype=dtype)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_engine_matches(str(tmp_path), twin.float(), list(range(5, 25)), chunks=[], device="cpu")


def test_greedy_tokens_of_a_tiny_model_are_not_monotonous(tiny) -> None:
    # If they were, comparing them would prove little.
    for family in FAMILIES:
        _, twin = tiny(family)
        tokens = list(range(5, 25))
        for _ in range(24):
            tokens.append(int(twin(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert len(set(tokens[20:])) > 8, (family, tokens[20:])
