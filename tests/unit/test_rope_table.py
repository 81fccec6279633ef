"""The angles are those of transformers, for each rule, near and far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.configuration_phi import PhiConfig
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from tritonllm.config import ModelConfig, RopeConfig
from tritonllm.errors import ConfigError, UnsupportedModelError
from tritonllm.models.rope import inverse_frequencies, rope_table

POSITIONS = [0, 1, 1_000, 8_192, 60_000]
MAX_POSITION = 65_536

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "linear by three": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama 3.1": LLAMA3,
    "llama 3.2": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn original length implied": {"rope_type": "yarn", "factor": 4.0},
    "yarn attention_factor": {**YARN, "factor": 64.0, "attention_factor": 1.0},
    "yarn equal mscales": {**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn mscales": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn one mscale": {**YARN, "mscale": 0.707},
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn one beta": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn bounds past the last dimension": {**YARN, "rope_theta": 20.0, "beta_fast": 1000.0},
    "yarn bounds before the first dimension": {**YARN, "beta_fast": 20_000.0},
    "yarn factor below one": {**YARN, "factor": 0.5},
}


def hf_llama(rule: dict[str, Any], *, head_dim: int = 64, theta: float = 500_000.0) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": theta, **rule},
    )


def hf_table(rotary: torch.nn.Module) -> torch.Tensor:
    """`[positions, rotary_dim]` in our layout, from cos and sin that repeat each half."""
    cos, sin = rotary(torch.empty(1, dtype=torch.float32), torch.tensor([POSITIONS]))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_same_as_transformers(rule: dict[str, Any], head_dim: int) -> None:
    theirs = hf_llama(rule, head_dim=head_dim)
    rope = ModelConfig.from_hf_dict(theirs.to_dict()).rope
    table = rope_table(rope, MAX_POSITION, "cpu")
    assert table.dtype == torch.float32
    assert table.shape == (MAX_POSITION, head_dim)
    torch.testing.assert_close(table[POSITIONS], hf_table(LlamaRotaryEmbedding(theirs)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rule", ["linear", "llama 3.1", "yarn"])
def test_partial_rotation_by_a_rule(rule: str, head_dim: int, share: float) -> None:
    theirs = hf_llama({**RULES[rule], "partial_rotary_factor": share}, head_dim=head_dim)
    rope = ModelConfig.from_hf_dict(theirs.to_dict()).rope
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope.rope_type](theirs)
    assert rope.rotary_dim == int(head_dim * share)
    torch.testing.assert_close(inverse_frequencies(rope), frequencies, rtol=0, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_partial_rotation_without_a_rule(share: float) -> None:
    theirs = PhiConfig(
        hidden_size=160, num_attention_heads=2, partial_rotary_factor=share, max_position_embeddings=MAX_POSITION
    )
    rope = RopeConfig(int(80 * share), MAX_POSITION, theta=10_000.0)
    ours = rope_table(rope, MAX_POSITION, "cpu")[POSITIONS]
    torch.testing.assert_close(ours, hf_table(PhiRotaryEmbedding(theirs)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        ({"factor": 64.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 4.0}, 1.138629436),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_magnitude(scaling: dict[str, float], magnitude: float) -> None:
    rope = RopeConfig(64, 4096, rope_type="yarn", **scaling)  # type: ignore[arg-type]
    assert rope.magnitude == pytest.approx(magnitude)
    assert rope_table(rope, 1, "cpu")[0, 0].item() == pytest.approx(magnitude)


def test_only_yarn_has_a_magnitude() -> None:
    assert RopeConfig(64, 4096, rope_type="linear", factor=4.0, attention_factor=3.0).magnitude == 1.0


def test_dynamic_is_plain_up_to_the_original_length_and_refused_beyond() -> None:
    dynamic = RopeConfig(64, 128, rope_type="dynamic", factor=4.0)
    assert torch.equal(rope_table(dynamic, 128, "cpu"), rope_table(RopeConfig(64, 128), 128, "cpu"))
    with pytest.raises(ConfigError, match=r"max_position=129 .* 128 positions .*'dynamic'"):
        rope_table(dynamic, 129, "cpu")


@pytest.mark.parametrize("factor", [None, 4.0, 1.0])
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_longrope_takes_the_frequencies_for_the_length_of_the_table(share: float, factor: float | None) -> None:
    pairs = int(64 * share) // 2
    rule = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.02 * pair for pair in range(pairs)],
        "long_factor": [3 + 0.5 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": share,
    }
    if factor is not None:
        rule["factor"] = factor
    theirs = hf_llama(rule)
    rope = ModelConfig.from_hf_dict(theirs.to_dict()).rope
    assert rope.factor == (factor or MAX_POSITION / 4096)
    for positions in (4096, 4097):
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=positions)
        torch.testing.assert_close(inverse_frequencies(rope, positions), frequencies, rtol=0, atol=0)
        assert rope.magnitude == pytest.approx(magnitude)
        table = rope_table(rope, positions, "cpu")
        torch.testing.assert_close(table[1, :pairs], frequencies.cos() * magnitude)
    with pytest.raises(UnsupportedModelError, match=rf"needs {pairs} numbers in long_factor.*, not {pairs - 1}"):
        replace(rope, long_factor=rope.long_factor[1:])


def test_tables_differ_with_every_parameter_of_a_model() -> None:
    base = RopeConfig(64, 4096)
    tables = [rope_table(rope, 64, "cpu") for rope in (base, RopeConfig(64, 4096, theta=500_000.0), base)]
    assert torch.equal(tables[0], tables[2])
    assert not torch.equal(tables[0], tables[1])


def test_a_shorter_table_is_the_head_of_a_longer_one() -> None:
    rope = RopeConfig(64, 16384, rope_type="yarn", factor=4.0)
    assert torch.equal(rope_table(rope, 100, "cpu"), rope_table(rope, 1000, "cpu")[:100])


@pytest.mark.parametrize("rule", ["default", "llama 3.1", "yarn"])
def test_the_default_device_and_dtype_change_nothing(rule: str) -> None:
    rope = ModelConfig.from_hf_dict(hf_llama(RULES[rule]).to_dict()).rope
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            table = rope_table(rope, 100, "cpu")
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(table, rope_table(rope, 100, "cpu"))
