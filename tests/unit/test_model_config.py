"""config.json of old and new transformers, and of each family, as a `ModelConfig`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from hf_dicts import LLAMA, of, without

from tritonllm.config import (
    ModelConfig,
    RopeConfig,
    gemma2_config,
    gemma3_config,
    llama_config,
    mistral_config,
    olmo2_config,
    phi3_config,
    qwen2_config,
    qwen3_config,
)
from tritonllm.errors import ConfigError, UnsupportedModelError


class TestReading:
    def test_every_field(self) -> None:
        assert ModelConfig.from_hf_dict(LLAMA) == ModelConfig(
            vocab_size=1000,
            hidden_size=256,
            intermediate_size=512,
            num_layers=4,
            num_heads=8,
            num_kv_heads=2,
            head_dim=32,
            max_position=4096,
            rms_norm_eps=1e-5,
            attention_scale=32**-0.5,
            rope=RopeConfig(32, 4096, theta=500000.0),
            eos_token_ids=(7,),
            architectures=("LlamaForCausalLM",),
            model_type="llama",
            dtype="bfloat16",
        )

    def test_new_shape_is_the_old_one(self) -> None:
        new = without("rope_theta", "torch_dtype", dtype="bfloat16")
        new["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default"}
        assert ModelConfig.from_hf_dict(new) == ModelConfig.from_hf_dict(LLAMA)

    @pytest.mark.parametrize("name", ["type", "rope_type"])
    def test_old_and_new_scaling(self, name: str) -> None:
        scaling = {name: "linear", "factor": 2.0}
        old = ModelConfig.from_hf_dict(of("llama", rope_scaling=scaling))
        new = ModelConfig.from_hf_dict(without("rope_theta", rope_parameters={"rope_theta": 500000.0, **scaling}))
        assert old == new
        assert old.rope == RopeConfig(32, 4096, rope_type="linear", theta=500000.0, factor=2.0)

    def test_a_rule_repeated_for_each_type_of_layer_is_one_rule(self) -> None:
        rule = {"rope_theta": 500000.0, "rope_type": "default"}
        parameters = {"full_attention": rule, "sliding_attention": dict(rule)}
        assert ModelConfig.from_hf_dict(without("rope_theta", rope_parameters=parameters)).rope.theta == 500000.0
        parameters["sliding_attention"]["rope_theta"] = 10000.0
        with pytest.raises(UnsupportedModelError, match="rope_parameters"):
            ModelConfig.from_hf_dict(without("rope_theta", rope_parameters=parameters))

    def test_original_length(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        assert ModelConfig.from_hf_dict(of("llama", rope_scaling=scaling)).rope.original_max_position == 1024
        outer = of("llama", rope_scaling=scaling, original_max_position_embeddings=2048)
        assert ModelConfig.from_hf_dict(outer).rope.original_max_position == 2048

    def test_yarn_never_multiplies_the_length(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        config = ModelConfig.from_hf_dict(of("llama", rope_scaling=scaling))
        assert (config.max_position, config.max_length) == (4096, 4096)

    def test_yarn_factor_may_follow_from_the_lengths(self) -> None:
        scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
        assert ModelConfig.from_hf_dict(of("llama", rope_scaling=scaling)).rope.factor == 4.0

    @pytest.mark.parametrize(
        ("stored", "ids"), [(None, ()), (7, (7,)), ([5, 6, 7], (5, 6, 7)), ([5, 5], (5,)), ([], ())]
    )
    def test_end_of_text_ids(self, stored: object, ids: tuple[int, ...]) -> None:
        assert ModelConfig.from_hf_dict(of("llama", eos_token_id=stored)).eos_token_ids == ids

    def test_scale_of_granite_and_gemma(self) -> None:
        assert ModelConfig.from_hf_dict(of("x", attention_multiplier=0.015625)).attention_scale == 0.015625
        assert ModelConfig.from_hf_dict(of("x", query_pre_attn_scalar=64)).attention_scale == 0.125

    def test_partial_rotation(self) -> None:
        assert ModelConfig.from_hf_dict(of("llama", partial_rotary_factor=0.25)).rope.rotary_dim == 8
        new = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        assert ModelConfig.from_hf_dict(of("llama", rope_parameters=new)).rope.rotary_dim == 16

    @pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
    def test_a_missing_field_is_named(self, field: str) -> None:
        with pytest.raises(ConfigError, match=f"lacks {field}"):
            ModelConfig.from_hf_dict(without(field))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("hidden_size", "256"),
            ("num_attention_heads", 8.0),
            ("vocab_size", True),
            ("num_hidden_layers", 0),
            ("rms_norm_eps", 0),
            ("tie_word_embeddings", 1),
            ("eos_token_id", -1),
            ("eos_token_id", [True]),
            ("rope_theta", -1.0),
            ("rope_scaling", "linear"),
            ("rope_scaling", {"type": "linear"}),
            ("rope_scaling", {"type": "linear", "factor": "2"}),
            ("rope_scaling", {"type": "llama3", "factor": 2.0}),
            ("architectures", "LlamaForCausalLM"),
            ("architectures", 5),
            ("architectures", [None]),
            ("layer_types", "full_attention"),
            ("layer_types", 5),
            ("layer_types", [["full_attention"]]),
        ],
    )
    def test_a_malformed_field_is_named(self, field: str, value: object) -> None:
        with pytest.raises(ConfigError, match=field):
            ModelConfig.from_hf_dict(of("llama", **{field: value}))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide num_heads=8"),
            ({"hidden_size": 250}, "hidden_size=250 is not a multiple of num_heads=8"),
            ({"hidden_size": 264}, "head_dim=33"),
        ],
    )
    def test_sizes_that_do_not_fit(self, fields: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_hf_dict(of("llama", **fields))


class TestFamilies:
    def test_llama_biases(self) -> None:
        config = llama_config(of("llama", attention_bias=True, mlp_bias=True))
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)

    def test_qwen2_has_biases_on_qkv_alone(self) -> None:
        for attention_bias in (True, False):
            config = qwen2_config(of("qwen2", attention_bias=attention_bias))
            assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)

    def test_qwen3(self) -> None:
        assert qwen3_config(of("qwen3")).head_dim == 128
        assert qwen3_config(of("qwen3", head_dim=64)).head_dim == 64
        config = qwen3_config(of("qwen3", attention_bias=True))
        assert (config.qkv_bias, config.o_bias) == (True, True)
        assert qwen3_config(of("qwen3", use_qk_norm=True)) == qwen3_config(of("qwen3"))

    def test_mistral(self) -> None:
        config = mistral_config(of("mistral", sliding_window=None))
        assert (config.qkv_bias, config.o_bias, config.sliding_window) == (False, False, None)
        assert mistral_config(without("num_key_value_heads", sliding_window=None)).num_kv_heads == 8

    def test_gemma_2(self) -> None:
        config = gemma2_config(without("hidden_act", "tie_word_embeddings", "num_key_value_heads"))
        assert (config.hidden_act, config.head_dim, config.num_kv_heads) == ("gelu_pytorch_tanh", 256, 4)
        assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
        assert (config.attention_scale, config.embedding_multiplier) == (256**-0.5, 256**0.5)
        assert (config.norm_unit_offset, config.tie_word_embeddings) == (True, True)
        windows = [config.of_layer(index).sliding_window for index in range(4)]
        assert windows == [4096, None, 4096, None]
        fields = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 64}
        config = gemma2_config({**LLAMA, **fields, "hidden_activation": "gelu"})
        assert (config.attention_softcap, config.logit_softcap, config.attention_scale) == (None, None, 0.125)
        assert config.hidden_act == "gelu"

    def test_gemma_3(self) -> None:
        fields = {"num_hidden_layers": 7, "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        config = gemma3_config({**without("rope_theta"), **fields, "sliding_window": 512})
        layers = [config.of_layer(index) for index in range(7)]
        assert [layer.sliding_window for layer in layers] == [512] * 5 + [None, 512]
        assert [(layer.rope.rope_type, layer.rope.theta) for layer in layers[4:6]] == [
            ("default", 10_000.0), ("linear", 1e6),
        ]  # fmt: skip
        assert all(layer.layer_types == () and layer.sliding_rope is None for layer in layers)
        assert config.has_plain_attention
        short = config.for_length(512)
        assert [short.of_layer(index).sliding_window for index in range(7)] == [None] * 7
        assert [short.of_layer(index).rope for index in range(7)] == [layer.rope for layer in layers]
        pattern = gemma3_config({**LLAMA, "sliding_window_pattern": 2})
        assert pattern.layer_types == ("sliding_attention", "full_attention") * 2

    def test_rotations_of_gemma_3(self) -> None:
        """A top-level rule is that of the layers without a window, over what `rope_parameters` says of them."""
        rules = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 70.0}}
        fields = without("rope_theta", rope_parameters=rules)
        config = gemma3_config(fields)
        assert (config.rope.factor, config.rope.theta, config.sliding_rope.theta) == (8.0, 1e6, 70.0)
        config = gemma3_config({**fields, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        assert (config.rope.factor, config.sliding_rope.rope_type) == (4.0, "default")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rope_parameters", {"rope_type": "linear", "factor": 8.0}),
            ("rope_parameters", {"full_attention": 8.0}),
            ("rope_scaling", {"full_attention": {"rope_type": "default"}}),
            ("attn_logit_softcapping", 50.0),
        ],
    )
    def test_what_gemma_3_does_not_say_is_refused(self, field: str, value: object) -> None:
        with pytest.raises(UnsupportedModelError, match=f"says {field}="):
            gemma3_config({**without("rope_theta"), field: value})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rope_parameters", 7),
            ("rope_scaling", ["linear"]),
            ("sliding_window_pattern", "LLG"),
            ("sliding_window_pattern", -1),
        ],
    )
    def test_malformed_fields_of_gemma_3_are_named(self, field: str, value: object) -> None:
        with pytest.raises(ConfigError, match=f"{field}="):
            gemma3_config({**LLAMA, field: value})

    def test_phi_3(self) -> None:
        scaling = {"type": "su", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        fields = {"rope_scaling": scaling, "max_position_embeddings": 131072, "sliding_window": 2047}
        config = phi3_config({**LLAMA, **fields})
        assert (config.sliding_window, config.layer_types) == (2047, ())
        assert (config.rope.rope_type, config.rope.factor, config.max_position) == ("longrope", 32.0, 131072)
        assert (config.max_length, config.for_length(4096).max_position) == (4096, 4096)
        assert phi3_config({**LLAMA, **fields, "original_max_position_embeddings": 8192}).max_length == 8192

    def test_olmo_2(self) -> None:
        config = olmo2_config(without("rms_norm_eps", "max_position_embeddings", attention_bias=True))
        assert (config.rms_norm_eps, config.max_position) == (1e-5, 2048)
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)

    def test_whether_some_layer_is_plain(self) -> None:
        assert llama_config(LLAMA).has_plain_attention
        assert not mistral_config(of("mistral")).has_plain_attention
        assert mistral_config(of("mistral")).for_length(4096).has_plain_attention
        assert not gemma2_config(LLAMA).has_plain_attention

    @pytest.mark.parametrize(
        ("reader", "field"),
        [
            (gemma2_config, "mlp_bias"),
            (gemma3_config, "mlp_bias"),
            (phi3_config, "attention_bias"),
            (phi3_config, "mlp_bias"),
            (olmo2_config, "mlp_bias"),
            (qwen2_config, "mlp_bias"),
            (qwen3_config, "mlp_bias"),
            (mistral_config, "mlp_bias"),
            (mistral_config, "attention_bias"),
        ],
    )
    def test_a_bias_the_family_has_not(self, reader: Any, field: str) -> None:
        with pytest.raises(UnsupportedModelError, match=f"{field}=True"):
            reader({**LLAMA, field: True})

    def test_dispatch_by_model_type(self) -> None:
        assert ModelConfig.from_hf_dict(of("qwen2")).qkv_bias
        assert not ModelConfig.from_hf_dict(of("unknown")).qkv_bias
        with pytest.raises(ConfigError, match="lacks rms_norm_eps"):
            ModelConfig.from_hf_dict({**without("rms_norm_eps"), "model_type": "unknown"})

    @pytest.mark.parametrize(
        ("kind", "reader"),
        [("Llama", llama_config), ("Qwen2", qwen2_config), ("Qwen3", qwen3_config), ("Mistral", mistral_config)],
    )
    def test_what_transformers_writes_is_read(self, kind: str, reader: Any) -> None:
        theirs = getattr(transformers, f"{kind}Config")(
            vocab_size=100,
            hidden_size=256,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            dtype="float16",
        )
        for written in (theirs.to_dict(), json.loads(theirs.to_json_string())):
            config = reader(written)
            assert config.num_kv_heads == 2
            assert config.head_dim == (getattr(theirs, "head_dim", None) or 32)
            assert config.max_position == theirs.max_position_embeddings
            assert config.rms_norm_eps == theirs.rms_norm_eps
            assert (
                config.sliding_window == theirs.sliding_window if kind == "Mistral" else config.sliding_window is None
            )
            assert config.rope.theta == theirs.rope_parameters["rope_theta"]
            assert config.dtype == "float16"
