"""What changes the mathematics and is not computed is refused, naming field and value; what changes nothing is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hf_dicts import LLAMA, engine, of

from tritonllm.config import ModelConfig, read_hf_config, resolve_max_model_length, resolve_model_config
from tritonllm.config.hf import _NEUTRAL_VALUES
from tritonllm.errors import ConfigError, UnsupportedModelError

REFUSED: list[tuple[str, object]] = [
    ("hidden_act", "gelu"),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("attention_logit_cap", 50.0),
    ("logits_soft_cap", 30.0),
    ("output_logit_soft_cap", 30.0),
    ("logit_scale", 0.0625),
    ("logits_scaling", 8.0),
    ("residual_multiplier", 0.22),
    ("embedding_multiplier", 12.0),
    ("embedding_scale", 2.0),
    ("lm_head_multiplier", 0.1),
    ("key_multiplier", 0.5),
    ("attention_in_multiplier", 0.5),
    ("attention_out_multiplier", 0.5),
    ("mlp_multipliers", [1.0, 0.5]),
    ("output_multiplier", 0.5),
    ("scale_emb", 12),
    ("scale_depth", 1.4),
    ("dim_model_base", 256),
    ("clip_qkv", 8.0),
    ("num_experts", 64),
    ("num_local_experts", 8),
    ("n_routed_experts", 64),
    ("moe_num_experts", 64),
    ("alibi", True),
    ("parallel_attn", True),
    ("use_parallel_residual", True),
    ("use_qk_norm", True),
    ("qk_norm", True),
    ("qk_layernorm", True),
    ("attention_chunk_size", 8192),
    ("attn_temperature_tuning", True),
    ("use_bidirectional_attention", True),
    ("is_causal", False),
    ("add_cross_attention", True),
    ("is_encoder_decoder", True),
    ("scale_attn_by_inverse_layer_idx", True),
    ("position_embedding_type", "absolute"),
    ("no_rope_layers", [1, 1, 1, 0]),
    ("no_rope_layer_interval", 4),
    ("kv_lora_rank", 512),
    ("q_lora_rank", 1536),
    ("v_head_dim", 128),
    ("layers_block_type", ["attention", "mamba"]),
    ("block_configs", [{"attention": {"no_op": True}}]),
    ("attn_type_list", [0, 1]),
    ("bias", True),
    ("use_bias", True),
    ("lm_head_bias", True),
    ("quantization_config", {"quant_method": "awq", "bits": 4}),
    ("compression_config", {"format": "pack-quantized"}),
    ("vision_config", {"depth": 32}),
    ("audio_config", {"depth": 32}),
    ("layer_types", ["full_attention", "linear_attention"]),
    ("layer_types", ["chunked_attention"]),
    ("layer_types", ["sliding_attention", "full_attention"]),
    ("head_dim", 33),
    ("rotary_dim", 33),
    ("rotary_dim", 64),
    ("rotary_dim", 0),
    ("partial_rotary_factor", 0.35),
    ("partial_rotary_factor", 2.0),
    ("partial_rotary_factor", 0.01),
    ("dtype", "float8_e4m3fn"),
    ("torch_dtype", "float64"),
]

REFUSED_ROPE: list[tuple[str, dict[str, Any]]] = [
    ("rope_type='longrope'", {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
    ("rope_type='su'", {"type": "su"}),
    ("rope_type='mrope'", {"type": "mrope", "mrope_section": [16, 24, 24]}),
    ("rope_type='proportional'", {"rope_type": "proportional"}),
    ("mrope_section", {"rope_type": "default", "mrope_section": [16, 24, 24]}),
    ("alpha", {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}),
    ("attn_factor", {"type": "yarn", "factor": 4.0, "attn_factor": 1.1}),
    ("llama_4_scaling_beta", {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}),
]

HARMLESS: list[tuple[str, object]] = [
    ("hidden_act", "swish"),
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("residual_multiplier", 1),
    ("embedding_multiplier", 1.0),
    ("mlp_multipliers", [1.0, 1.0]),
    ("num_experts", 0),
    ("num_local_experts", None),
    ("alibi", False),
    ("clip_qkv", None),
    ("is_causal", True),
    ("position_embedding_type", "rope"),
    ("quantization_config", None),
    ("pretraining_tp", 2),
    ("attention_dropout", 0.1),
    ("layer_types", ["full_attention"] * 4),
    ("rope_scaling", None),
    ("rope_scaling", {}),
    ("partial_rotary_factor", 1.0),
    ("some_field_of_tomorrow", 3),
]


@dataclass(frozen=True, kw_only=True)
class WithMultiplier(ModelConfig):
    residual_multiplier: float = 1.0


class TestRefusal:
    def test_every_field_has_a_case(self) -> None:
        assert set(_NEUTRAL_VALUES) <= {field for field, _ in REFUSED}

    @pytest.mark.parametrize(("field", "value"), REFUSED)
    def test_field_and_value_are_named(self, field: str, value: object) -> None:
        with pytest.raises(UnsupportedModelError) as caught:
            ModelConfig.from_hf_dict(of("llama", **{field: value}))
        message = str(caught.value)
        assert field in message
        shown = value if not isinstance(value, (list, dict)) else next(iter(value))
        assert str(shown) in message or field == "layer_types"

    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "unknown"])
    def test_in_every_family(self, family: str) -> None:
        with pytest.raises(UnsupportedModelError, match="logits_scaling=8.0"):
            ModelConfig.from_hf_dict(of(family, logits_scaling=8.0))

    @pytest.mark.parametrize(("named", "scaling"), REFUSED_ROPE)
    @pytest.mark.parametrize("source", ["rope_scaling", "rope_parameters"])
    def test_rope(self, named: str, scaling: dict[str, Any], source: str) -> None:
        with pytest.raises(UnsupportedModelError, match=named):
            ModelConfig.from_hf_dict(of("llama", **{source: scaling}))

    @pytest.mark.parametrize(("field", "value"), HARMLESS)
    def test_harmless_values(self, field: str, value: object) -> None:
        assert ModelConfig.from_hf_dict(of("llama", **{field: value})) == ModelConfig.from_hf_dict(LLAMA)

    def test_a_plugin_may_handle_a_field(self) -> None:
        fields = of("granite", embedding_multiplier=12.0, hidden_act="gelu")
        config = read_hf_config(fields, handled=("embedding_multiplier", "hidden_act"), o_bias=True)
        assert (config.hidden_act, config.o_bias) == ("gelu", True)
        with pytest.raises(UnsupportedModelError, match="hidden_act"):
            read_hf_config(fields, handled=("embedding_multiplier",))

    def test_a_field_of_a_family_of_ones_own(self) -> None:
        fields = of("granite", residual_multiplier=0.22)
        own = {"residual_multiplier": fields["residual_multiplier"]}
        config = read_hf_config(fields, handled=("residual_multiplier",), config_class=WithMultiplier, **own)
        assert isinstance(config, WithMultiplier)
        assert config.of_layer(0).residual_multiplier == config.for_length(64).residual_multiplier == 0.22


class TestSlidingWindow:
    @pytest.mark.parametrize(
        ("family", "fields", "window"),
        [
            ("mistral", {"sliding_window": 1024}, 1024),
            ("mistral", {}, 4096),
            ("mistral", {"sliding_window": 1024, "use_sliding_window": False}, 1024),
            ("mistral", {"sliding_window": 1024, "layer_types": ["full_attention"] * 4}, 1024),
            ("llama", {"sliding_window": 1024}, 1024),
            ("llama", {"sliding_window": 1024, "use_sliding_window": False}, None),
            ("qwen2", {"sliding_window": 1024}, None),
            ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, 1024),
            ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 4}, None),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
            (
                "qwen3",
                {
                    "use_sliding_window": True,
                    "sliding_window": 512,
                    "layer_types": ["full_attention", "sliding_attention"] * 2,
                },
                512,
            ),
            ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"]}, None),
        ],
    )
    def test_the_window_in_force(self, family: str, fields: dict[str, Any], window: int | None) -> None:
        assert ModelConfig.from_hf_dict(of(family, **fields)).sliding_window == window

    def test_a_window_no_request_can_outgrow_is_fine(self) -> None:
        fields = of("mistral", sliding_window=1024)
        for length in (64, 1024):
            assert resolve_model_config(engine(max_model_length=length), fields).sliding_window == 1024

    def test_a_smaller_window_stops_no_request(self) -> None:
        config = resolve_model_config(engine(), of("mistral", sliding_window=1024))
        assert resolve_max_model_length(engine(), config) == LLAMA["max_position_embeddings"]
        assert config.for_length(1025).sliding_window == 1024
        assert config.for_length(1024).sliding_window is None

    def test_layers_with_a_window_and_layers_without(self) -> None:
        fields = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}
        config = ModelConfig.from_hf_dict(of("qwen2", **fields))
        assert [config.of_layer(index).sliding_window for index in range(4)] == [None, 512, 512, 512]
        config = ModelConfig.from_hf_dict(of("mistral", sliding_window=1024))
        assert config.of_layer(0) is config

    def test_a_pattern_without_types_of_layers_is_refused(self) -> None:
        fields = of("unknown", sliding_window=512, sliding_window_pattern=4)
        with pytest.raises(UnsupportedModelError, match="sliding_window_pattern=4, and there are no layer_types"):
            read_hf_config(fields)
        types = ["sliding_attention"] * 3 + ["full_attention"]
        assert read_hf_config({**fields, "layer_types": types}).layer_types == tuple(types)
        assert read_hf_config(fields, handled=("sliding_window_pattern",)).sliding_window == 512
        assert read_hf_config({**fields, "sliding_window": None}).sliding_window is None

    @pytest.mark.parametrize("layer_types", [["sliding_attention"], ["sliding_attention", "full_attention"]])
    def test_too_few_types_of_layers_are_refused(self, layer_types: list[str]) -> None:
        fields = {"use_sliding_window": True, "layer_types": layer_types}
        with pytest.raises(ConfigError, match=rf"layer_types has {len(layer_types)} entries for num_layers=4"):
            ModelConfig.from_hf_dict(of("qwen3", **fields))
