"""Every built-in family against transformers on the CPU in float32: logits at every position, 24 greedy tokens."""

from __future__ import annotations

import itertools
import json
from typing import Any

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

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2")

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
    ("gemma2", "4/2x32", True),
    ("gemma2", "2/1x256", False),
    ("gemma3_text", "4/4x32", False),
    ("gemma3_text", "12/2x64", True),
    ("phi3", "4/2x96", False),
    ("phi3", "9/3x64", True),
    ("olmo2", "28/4x32", False),
    ("olmo2", "8/1x80", True),
]
SHAPES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product(FAMILIES, HEAD_SHAPES, (True, False))
]
RULES = [
    pytest.param(family, rule, marks=() if family == "llama" else pytest.mark.slow)
    for family, rule in itertools.product(FAMILIES, [rule for rule in ROPE_RULES if rule != "default"])
    if family != "phi3"  # whose only rule is longrope
]

# Behind which a prompt of 37 tokens and its completion see less than the whole context.
WINDOWS = [
    pytest.param(family, window, marks=() if window == 16 else pytest.mark.slow)
    for family, window in itertools.product(("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"), (1, 16, 37))
]


@pytest.mark.parametrize(("family", "heads", "tied"), SHAPES)
def test_shapes(family: str, heads: str, tied: bool) -> None:
    assert_matches_hf(hf_config=tiny_hf_config(family, heads=heads, tie_word_embeddings=tied), device="cpu")


@pytest.mark.parametrize(("family", "rule"), RULES)
def test_rope_rules(family: str, rule: str) -> None:
    assert_matches_hf(hf_config=tiny_hf_config(family, rope=rule), chunks=[7], device="cpu")


@pytest.mark.parametrize(("family", "window"), WINDOWS)
def test_sliding_windows(family: str, window: int) -> None:
    fields: dict[str, Any] = {"sliding_window": window, "num_hidden_layers": 3}
    if family.startswith("qwen"):
        fields |= {"use_sliding_window": True, "max_window_layers": 1}
    if family == "gemma3_text":
        fields["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    assert_matches_hf(hf_config=tiny_hf_config(family, **fields), chunks=[7], device="cpu")


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"query_pre_attn_scalar": 7, "hidden_activation": "gelu"},
        {"attention_bias": True, "hidden_activation": "silu"},
    ],
    ids=["low caps", "no caps", "another scale, exact gelu", "biases, silu"],
)
def test_gemma_2_without_its_usual_values(fields: dict[str, Any]) -> None:
    assert_matches_hf(hf_config=tiny_hf_config("gemma2", **fields), chunks=[], device="cpu")


@pytest.mark.parametrize("rules", ["one for each type", "of transformers 4"])
def test_gemma_3_rotates_its_types_of_layers_differently(tmp_path, rules: str) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
    sliding = {"rope_type": "default", "rope_theta": 100.0}
    config = tiny_hf_config("gemma3_text", rope_parameters={"full_attention": full, "sliding_attention": sliding})
    twin = save_tiny_checkpoint(config, tmp_path)
    if rules == "of transformers 4":
        fields = json.loads((tmp_path / "config.json").read_text())
        assert fields.pop("rope_parameters").keys() == {"full_attention", "sliding_attention"}
        fields |= {"rope_theta": 50000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
        fields["rope_local_base_freq"] = 100.0
        (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_engine_matches(str(tmp_path), twin, list(range(5, 42)), chunks=[7], device="cpu")


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("original", [32, 128], ids=["long", "short"])
def test_longrope_of_phi_3(share: float, original: int) -> None:
    # A prompt of 37 tokens and its completion are beyond 32 positions from the first step on, and never beyond 128.
    pairs = int(32 * share) // 2
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2 + 0.3 * pair for pair in range(pairs)],
    }
    config = tiny_hf_config(
        "phi3",
        heads="4/4x32",
        partial_rotary_factor=share,
        rope_scaling=scaling,
        original_max_position_embeddings=original,
    )
    assert_matches_hf(hf_config=config, chunks=[7], device="cpu")


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
