"""The user's keys against the checkpoint's: lengths, contradictions, dummy weights, end-of-text ids, dtype."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hf_dicts import LLAMA, engine, of

from tritonllm.config import ModelConfig, RopeConfig, resolve_dtype, resolve_max_model_length, resolve_model_config
from tritonllm.config.resolve import REQUIRED_KEYS
from tritonllm.errors import ConfigError, UnsupportedModelError


class TestLength:
    def test_default_is_the_checkpoints(self) -> None:
        assert resolve_max_model_length(engine(), resolve_model_config(engine(), LLAMA)) == 4096

    def test_above_the_positions(self) -> None:
        with pytest.raises(ConfigError, match=r"max_model_length=4097 .* 4096 positions"):
            resolve_model_config(engine(max_model_length=4097), LLAMA)

    def test_dynamic_rope(self) -> None:
        fields = of("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
        config = resolve_model_config(engine(max_model_length=4096), fields)
        assert config.max_length == 4096
        longer = ModelConfig(**{**vars(config), "max_position": 8192})
        assert longer.max_length == 4096
        with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*4096 tokens.*max_model_length=5000"):
            resolve_max_model_length(engine(max_model_length=5000), longer)

    def test_max_position_may_be_smaller(self) -> None:
        config = resolve_model_config(engine(max_position=512, max_model_length=512), LLAMA)
        assert (config.max_position, config.max_length) == (512, 512)
        with pytest.raises(ConfigError, match="max_position=4097 is above the checkpoint's 4096"):
            resolve_model_config(engine(max_position=4097), LLAMA)

    def test_a_smaller_max_position_changes_no_angle(self) -> None:
        fields = of("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0})
        small = resolve_model_config(engine(max_position=512), fields)
        assert small.rope == resolve_model_config(engine(), fields).rope


AGREEING: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "base": 500000,
    "rms_norm_epsilon": 1e-5,
    "scale": 1,
    "qkv_bias": False,
    "ffn_bias": False,
    "tie_word_embeddings": False,
}
CONTRADICTING: dict[str, Any] = {
    name: not value if isinstance(value, bool) else 2 * value for name, value in AGREEING.items()
}


class TestUserKeys:
    def test_agreement_changes_nothing(self) -> None:
        assert resolve_model_config(engine(**AGREEING), LLAMA) == resolve_model_config(engine(), LLAMA)

    @pytest.mark.parametrize("name", AGREEING)
    def test_contradiction_names_both_values(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"^{name}={CONTRADICTING[name]!r} contradicts .*{AGREEING[name]!r}"):
            resolve_model_config(engine(**{name: CONTRADICTING[name]}), LLAMA)

    def test_scale_is_compared_with_the_checkpoints(self) -> None:
        fields = of("x", attention_multiplier=0.25)
        assert resolve_model_config(engine(scale=0.25 * 32**0.5), fields).attention_scale == 0.25
        with pytest.raises(ConfigError, match="scale=1 contradicts"):
            resolve_model_config(engine(scale=1), fields)

    def test_nothing_to_read(self) -> None:
        with pytest.raises(ConfigError, match=r"'org/model'.*vocab_size"):
            resolve_model_config(engine(load_format="dummy"), None)
        with pytest.raises(ConfigError, match="Nothing describes"):
            resolve_model_config(engine(**AGREEING), None)


class TestDummy:
    minimal = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}

    def test_a_minimal_set_of_keys_suffices(self) -> None:
        config = resolve_model_config(engine(load_format="dummy", **self.minimal), None)
        assert set(self.minimal) == set(REQUIRED_KEYS)
        assert (config.num_kv_heads, config.head_dim, config.max_position) == (4, 16, 4096)
        assert config.rope == RopeConfig(16, 4096)
        assert config.attention_scale == 0.25
        biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
        assert (*biases, config.tie_word_embeddings) == (False,) * 4

    @pytest.mark.parametrize("missing", REQUIRED_KEYS)
    def test_a_missing_key_is_named(self, missing: str) -> None:
        keys = {name: value for name, value in self.minimal.items() if name != missing}
        with pytest.raises(ConfigError, match=f"need {missing} as well"):
            resolve_model_config(engine(load_format="dummy", **keys), LLAMA)

    def test_keys_are_the_whole_truth(self) -> None:
        keys = {
            **self.minimal,
            "num_kv_heads": 2,
            "head_dim": 32,
            "max_position": 128,
            "base": 1e6,
            "rms_norm_epsilon": 1e-5,
            "scale": 0.5,
            "qkv_bias": True,
            "ffn_bias": True,
            "tie_word_embeddings": True,
        }
        config = resolve_model_config(engine(load_format="dummy", eos=3, **keys), {**LLAMA, "logits_scaling": 8.0})
        assert (config.num_kv_heads, config.head_dim, config.max_position) == (2, 32, 128)
        assert config.rope == RopeConfig(32, 128, theta=1e6)
        assert config.attention_scale == pytest.approx(0.5 * 32**-0.5)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.tie_word_embeddings) == (
            True,
            False,
            True,
            True,
        )
        assert config.eos_token_ids == (3,)

    def test_positions_follow_the_length(self) -> None:
        config = resolve_model_config(engine(load_format="dummy", max_model_length=100, **self.minimal), None)
        assert config.max_position == 100

    def test_a_shipped_shape_is_used_without_keys(self) -> None:
        assert resolve_model_config(engine(load_format="dummy"), LLAMA) == ModelConfig.from_hf_dict(LLAMA)


class TestEndOfText:
    def test_union_of_all_that_the_checkpoint_says(self) -> None:
        config = resolve_model_config(engine(), LLAMA, generation_config={"eos_token_id": [7, 8, 9]}, tokenizer_eos=10)
        assert config.eos_token_ids == (7, 8, 9, 10)

    def test_only_in_the_generation_config(self) -> None:
        config = resolve_model_config(engine(), of("llama", eos_token_id=None), generation_config={"eos_token_id": 9})
        assert config.eos_token_ids == (9,)

    def test_a_strange_id_is_added_with_one_warning(self) -> None:
        with pytest.warns(UserWarning, match=r"eos=\(7, 11, 12\) is not among .*\[7\]") as caught:
            config = resolve_model_config(engine(eos=[7, 11, 12]), LLAMA)
        assert config.eos_token_ids == (7, 11, 12)
        assert len(caught) == 1

    def test_no_warning_where_nothing_disagrees(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resolve_model_config(engine(eos=7), LLAMA).eos_token_ids == (7,)
            assert resolve_model_config(engine(eos=5), of("llama", eos_token_id=None)).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("keys", "stored", "device", "dtype"),
    [
        ({}, "bfloat16", "cuda", "bfloat16"),
        ({}, "float16", "cuda", "float16"),
        ({}, None, "cuda", "bfloat16"),
        ({}, "bfloat16", "cpu", "float32"),
        ({"load_format": "dummy"}, "float32", "cuda", "bfloat16"),
        ({"load_format": "dummy"}, None, "cpu", "float32"),
        ({"dtype": "float16"}, "bfloat16", "cpu", "float16"),
    ],
)
def test_dtype(keys: dict[str, str], stored: str | None, device: str, dtype: str) -> None:
    model = ModelConfig.from_hf_dict({**LLAMA, "torch_dtype": stored})
    assert resolve_dtype(engine(**keys), model, device) == dtype
