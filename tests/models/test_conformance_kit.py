"""The conformance kit: right families pass, and a planted bug is found, its layer named, in words that lead to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from tritonllm import ModelSpec, conformance
from tritonllm.config import ModelConfig, gemma2_config, qwen3_config
from tritonllm.conformance.candidate import (
    EPSILON,
    PROMPT_LENGTHS,
    ROPE_THETAS,
    WINDOW,
    Candidate,
    make_candidate,
    telling_config,
)
from tritonllm.conformance.checks import CHECKS
from tritonllm.errors import CheckpointError
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.gemma2 import Gemma2ForCausalLM
from tritonllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config


class WrongEpsilon(Qwen3ForCausalLM):
    """Has the epsilon of another model in its second layer."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        self.model.layers[1].input_layernorm.eps = 1e-5


class WrongLastEpsilon(Qwen3ForCausalLM):
    """Has the epsilon of another model in the last norm."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        self.model.norm.eps = 1e-5


class WithoutHeadNorms(DecoderLM):
    """Knows of no norm on query and key heads."""


class UnusedHeadNorms(Qwen3ForCausalLM):
    """Has norms of query and key heads, and leaves them out in the second layer."""

    def forward(self, input_ids, positions, kv_cache, attn):
        attention = self.model.layers[1].self_attn
        norms = attention.q_norm, attention.k_norm
        attention.q_norm = attention.k_norm = None
        try:
            return super().forward(input_ids, positions, kv_cache, attn)
        finally:
            attention.q_norm, attention.k_norm = norms


class SwappedGateAndUp(Qwen3ForCausalLM):
    """Takes the gate for the up projection."""

    packed = {
        **Qwen3ForCausalLM.packed,
        "gate_proj": ("gate_up_proj", "up"),
        "up_proj": ("gate_up_proj", "gate"),
    }


class ShortWindow(Gemma2ForCausalLM):
    """Sees one key less than it should where there is a window."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        for layer in self.model.layers:
            if layer.self_attn.window is not None:
                layer.self_attn.window -= 1


class ScaledEmbedding(Qwen3ForCausalLM):
    """Multiplies the embedding."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        self.model.embed_tokens.register_forward_hook(lambda module, args, output: output * 1.01)


class ForgottenResidual(Qwen3DecoderLayer):
    """Adds what comes after the attention twice."""

    def forward(self, hidden, residual, positions, cache, attn):
        hidden, residual = super().forward(hidden, residual, positions, cache, attn)
        return hidden * 2, residual


class WithForgottenResidual(DecoderLM):
    """Has such layers."""

    layer_class = ForgottenResidual


class WrongWhenDecoding(Qwen3ForCausalLM):
    """Is a position behind in decode steps."""

    def forward(self, input_ids, positions, kv_cache, attn):
        return super().forward(input_ids, positions - int(isinstance(attn, DecodeMetadata)), kv_cache, attn)


class MixesSequences(Qwen3ForCausalLM):
    """Adds what the first of several sequences has to all of them, when it decodes."""

    def forward(self, input_ids, positions, kv_cache, attn):
        hidden = super().forward(input_ids, positions, kv_cache, attn)
        return hidden + hidden[:1] * int(isinstance(attn, DecodeMetadata) and len(hidden) > 1)


class UnsummedRanks(Qwen3ForCausalLM):
    """Takes one rank's term of the MLP for the sum."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        for layer in self.model.layers:
            layer.mlp.down_proj.forward = layer.mlp.down_proj.term


class UnlistedLayers(Qwen3ForCausalLM):
    """Does not name its layers as the checkpoint does."""

    def __init__(self, config, tp) -> None:
        super().__init__(config, tp)
        self.model.blocks = self.model.layers
        del self.model.layers


def base_ignored(config: dict[str, Any]) -> ModelConfig:
    """Reads everything but the rotary base."""
    read = qwen3_config(config)
    return dataclasses.replace(read, rope=dataclasses.replace(read.rope, theta=10000.0))


def attention_scale_fixed(config: dict[str, Any]) -> ModelConfig:
    """Takes the scale of scores to be that of the reference."""
    return dataclasses.replace(gemma2_config(config), attention_scale=256**-0.5)


def attention_softcap_fixed(config: dict[str, Any]) -> ModelConfig:
    """Takes the cap of scores to be that of the reference."""
    return dataclasses.replace(gemma2_config(config), attention_softcap=50.0)


def reference() -> Any:
    """A tiny Qwen3."""
    return tiny_hf_config("qwen3")


def gemma_reference() -> Any:
    """A tiny Gemma 2, whose layers have a window in turns."""
    return tiny_hf_config("gemma2", sliding_window=64)


def few_positions() -> Any:
    """A reference that is too small for the kit's prompts."""
    return tiny_hf_config("qwen3", max_position_embeddings=64)


def family(model: type = Qwen3ForCausalLM, **fields: Any) -> ModelSpec:
    """A family that nobody has registered, with an architecture that transformers does not know."""
    return ModelSpec(
        name="planted",
        model=f"{model.__module__}:{model.__name__}",
        **{
            "architectures": ("PlantedForCausalLM",),
            "config": "tritonllm.config:qwen3_config",
            "reference": f"{__name__}:reference",
            **fields,
        },
    )


@pytest.fixture
def planted(tmp_path) -> Callable[..., Candidate]:
    """The family of a model class that is wrong in one place."""
    return lambda *args, **fields: make_candidate(family(*args, **fields), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            WrongEpsilon,
            r"layer 1 \(`model\.layers\.1`\) is the first .* 50 of 50 tokens, the first at position 0.*"
            r"inside it `input_layernorm` differs first; look at its epsilon",
        ),
        (WrongLastEpsilon, r"all layers agree, and the last norm \(`model\.norm`\) differs.* look at its epsilon"),
        (
            UnusedHeadNorms,
            r"layer 1 \(`model\.layers\.1`\) is the first .* the first at position 1, .*"
            r"inside it `input_layernorm` agrees, `self_attn` differs first; .* look at the norms of query and key",
        ),
        (
            SwappedGateAndUp,
            r"layer 0 \(`model\.layers\.0`\) is the first .* inside it `input_layernorm` and `self_attn` and "
            r"`post_attention_layernorm` agree, `mlp` differs first; look at the order of gate and up in `packed`",
        ),
        (ScaledEmbedding, r"what goes into the first layer .* differs .* look at the embedding, and at a factor"),
        (WithForgottenResidual, r"layer 0 .* `mlp` agree: look at how they are added, and at factors"),
        (UnlistedLayers, r"the model has no `model\.layers`: .* bear the names of the checkpoint"),
    ],
)
def test_the_first_layer_that_differs_is_named(planted, monkeypatch, model: type, message: str) -> None:
    if model is UnlistedLayers:
        # Its weights are not found either, which the check before tells.
        monkeypatch.setattr("tritonllm.engine.resolve.load_weights", lambda *args: None)
    with pytest.raises(AssertionError, match=message):
        CHECKS["layers"](planted(model))


def test_an_ignored_rotary_base_is_found_in_the_first_attention(planted) -> None:
    message = r"layer 0 .* first at position 1.* `self_attn` differs first; .* the rotary embedding and its base"
    with pytest.raises(AssertionError, match=message):
        CHECKS["layers"](planted(config=f"{__name__}:base_ignored"))


@pytest.mark.parametrize("field", ["attention_scale", "attention_softcap"])
def test_a_factor_that_is_fixed_in_code_is_found(planted, field: str) -> None:
    with pytest.raises(AssertionError, match=r"layer 0 .* `self_attn` differs first"):
        CHECKS["layers"](
            planted(Gemma2ForCausalLM, config=f"{__name__}:{field}_fixed", reference=f"{__name__}:gemma_reference")
        )


def test_a_window_that_is_off_by_one_is_found_where_it_ends(planted) -> None:
    message = (
        rf"layer 0 .* first at position {WINDOW - 1}, .* inside it `input_layernorm` agrees, `self_attn` differs "
        rf"first; the tokens before position {WINDOW - 1} agree: look at the sliding window"
    )
    fields = {"config": "tritonllm.config.hf_families:gemma2_config", "reference": f"{__name__}:gemma_reference"}
    CHECKS["layers"](planted(Gemma2ForCausalLM, **fields))
    with pytest.raises(AssertionError, match=message):
        CHECKS["layers"](planted(ShortWindow, **fields))


def test_weights_that_have_no_place_are_named(planted) -> None:
    candidate = planted(WithoutHeadNorms)
    assert isinstance(candidate.loading_error, CheckpointError)
    with pytest.raises(CheckpointError, match=r"unexpected \(4\): model\.layers\.0\.self_attn\.k_norm\.weight"):
        CHECKS["loads"](candidate)


def test_weights_that_nothing_reads_are_named(planted) -> None:
    with pytest.raises(
        AssertionError, match=r"never uses them, .*: model\.layers\.1\.self_attn\.k_norm\.weight, .*\.q_norm\.weight$"
    ):
        CHECKS["weights"](planted(UnusedHeadNorms))


class IgnoresTooMuch(Qwen3ForCausalLM):
    """Lets any norm in a checkpoint be something that it does not need."""

    ignored_weights = ("weight.extra",)


def test_ignored_weights_that_hide_surplus_tensors_are_found(planted) -> None:
    with pytest.raises(AssertionError, match=r"\.weight\.extra that no parameter takes: `ignored_weights` is too wide"):
        CHECKS["weights"](planted(IgnoresTooMuch))


def test_a_model_that_is_wrong_only_when_it_decodes_is_found_by_its_logits(planted) -> None:
    candidate = planted(WrongWhenDecoding)
    CHECKS["layers"](candidate)
    with pytest.raises(AssertionError, match="decoding one token at a time"):
        CHECKS["logits and tokens"](candidate)


@pytest.mark.parametrize(
    ("model", "check", "hint"),
    [
        (MixesSequences, "all in one batch, eager", "look at what mixes the tokens of several sequences"),
        (UnsummedRanks, "two ranks", "look at what is split by hand and at sums over the ranks"),
    ],
)
def test_a_way_that_differs_is_named_and_says_where_to_look(planted, model: type, check: str, hint: str) -> None:
    with pytest.raises(AssertionError, match=f"^{check}: prompt .* tokens differs from token .*; {hint}"):
        CHECKS[check](planted(model))


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_family_has_the_tensors_that_the_model_asks_for(planted, tmp_path, tied: bool) -> None:
    folder = tmp_path / "real"
    save_tiny_checkpoint(tiny_hf_config("qwen3", heads="9/3x64", tie_word_embeddings=tied), folder, shards=3)
    candidate = dataclasses.replace(planted(), checkpoint=str(folder))
    CHECKS["checkpoint"](candidate)
    wider = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**wider, "intermediate_size": 208}))
    with pytest.raises(CheckpointError, match=r"wrong shape \(6\): model\.layers\.0\.mlp\.\w+\.weight is \["):
        CHECKS["checkpoint"](candidate)


def test_a_checkpoint_with_more_than_the_model_knows_is_found(planted, tmp_path) -> None:
    folder = tmp_path / "real"
    save_tiny_checkpoint(tiny_hf_config("qwen3"), folder)
    candidate = dataclasses.replace(planted(WithoutHeadNorms), checkpoint=str(folder))
    with pytest.raises(CheckpointError, match=r"unexpected \(4\): model\.layers\.0\.self_attn\.k_norm\.weight"):
        CHECKS["checkpoint"](candidate)


def test_a_right_family_that_nobody_registered_passes_in_python() -> None:
    conformance.check(family(), device="cpu")


def test_check_stops_at_the_first_that_is_wrong() -> None:
    with pytest.raises(CheckpointError, match="k_norm"):
        conformance.check(family(WithoutHeadNorms), device="cpu")


def test_a_reference_of_few_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="max_position_embeddings=64 and vocab_size=512: the kit needs 88 positions"):
        conformance.check(family(reference=f"{__name__}:few_positions"), device="cpu")


def test_a_twin_has_an_epsilon_rotary_bases_and_factors_of_its_own() -> None:
    before = tiny_hf_config("qwen3")
    after = telling_config(before)
    assert after.rms_norm_eps == EPSILON
    assert (before.rms_norm_eps, before.rope_parameters["rope_theta"]) == (1e-6, 10000.0)
    assert after.rope_parameters["rope_theta"] == ROPE_THETAS[0]
    gemma = telling_config(tiny_hf_config("gemma2", query_pre_attn_scalar=32, final_logit_softcapping=None))
    assert (gemma.query_pre_attn_scalar, gemma.attn_logit_softcapping) == (48, 0.7)
    assert gemma.final_logit_softcapping is None
    two = telling_config(tiny_hf_config("gemma3_text"))
    thetas = [rope["rope_theta"] for rope in two.rope_parameters.values()]
    assert thetas == list(ROPE_THETAS)


@pytest.mark.parametrize(
    ("config", "window", "kinds"),
    [
        (tiny_hf_config("qwen3"), None, ["full_attention"] * 2),
        (tiny_hf_config("mistral"), None, None),
        (tiny_hf_config("mistral", sliding_window=64), WINDOW, None),
        (tiny_hf_config("mistral", sliding_window=8), 8, None),
        (tiny_hf_config("gemma2", sliding_window=None), WINDOW, ["sliding_attention", "full_attention"]),
        (tiny_hf_config("gemma3_text", sliding_window=512), WINDOW, ["sliding_attention", "full_attention"]),
    ],
)
def test_a_window_of_a_twin_is_short_enough_to_matter_and_not_in_every_kind_of_layer(config, window, kinds) -> None:
    after = telling_config(config)
    assert after.sliding_window == window
    assert getattr(after, "layer_types", None) == kinds
    assert max(PROMPT_LENGTHS) > WINDOW
