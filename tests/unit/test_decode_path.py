"""Decode paths: which one a batch takes, which kernels it launches, and that all of them compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tritonllm import ModelConfig, RopeConfig
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.tuning_table import UNTUNED, PathLimit, Tuning
from tritonllm.models import attention_metadata, layers, linear
from tritonllm.models import decode_path as paths
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.decode_path import DecodePath, decode_path
from tritonllm.models.decoder import DecoderLayer, DecoderLM
from tritonllm.models.gemma2 import Gemma2ForCausalLM
from tritonllm.models.layers import GatedMLP, RMSNorm, TPGroup
from tritonllm.models.olmo2 import Olmo2ForCausalLM
from tritonllm.models.qwen3 import Qwen3ForCausalLM

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    attention_scale=8**-0.5,
    rope=RopeConfig(8, 64),
)
BIASED = replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True)
BLOCK_SIZE = 8
CONTEXTS = (1, 9, 17, 0, 8, 0)  # two of them padding
TABLE = Tuning(
    "a GPU", "2026-01-02", {}, {}, {24: (PathLimit(2, "skinny"), PathLimit(4, "separate"), PathLimit(6, "hopper"))}
)
PATHS_OF_TABLE = {
    1: DecodePath.SKINNY,
    2: DecodePath.SKINNY,
    3: DecodePath.SEPARATE,
    4: DecodePath.SEPARATE,
    5: DecodePath.HOPPER,
    6: DecodePath.HOPPER,
    7: DecodePath.SEPARATE,
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch):
    """`use(table, serves)`: what the device's table is, and whether Hopper's kernels are there for a row length."""

    def use(table: Tuning, serves: Callable[[int], bool] = lambda in_features: True) -> None:
        paths._decode_path.cache_clear()
        monkeypatch.setattr(paths, "tuning_of", lambda device: table)
        monkeypatch.setattr(paths, "serves_shape", lambda in_features, dtype, device: serves(in_features))

    paths._decode_path.cache_clear()
    yield use
    paths._decode_path.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that layers call, in order."""
    calls: list[str] = []

    def spy(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: calls.append(name) or op(*args, **kwargs)

    for name in (
        "rms_norm", "add_rms_norm", "silu_and_mul", "rope_store_kv", "fused_decode_attention", "skinny_linear",
        "hopper_linear", "hopper_linear_parts", "gelu_and_mul", "apply_rope", "store_kv",
    ):  # fmt: skip
        monkeypatch.setattr(layers, name, spy(name, getattr(layers, name)))
    attend = attention_metadata.decode_attention
    monkeypatch.setattr(attention_metadata, "decode_attention", spy("decode_attention", attend))
    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=spy("F.linear", linear.F.linear)))
    return calls


def make_model(
    config: ModelConfig = CONFIG, model_class: type[DecoderLM] = DecoderLM, dtype: torch.dtype = torch.float32
) -> DecoderLM:
    generator = torch.Generator().manual_seed(1)
    model = model_class(config, TPGroup())
    for name, parameter in model.named_parameters():
        parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5, generator=generator)
        if "norm" in name:
            parameter += 1
    return model.to(dtype)


def step(model: DecoderLM, contexts: tuple[int, ...] = CONTEXTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of one decode step, and the cache behind it."""
    config, rows = model.config, len(contexts)
    dtype = model.lm_head.weight.dtype
    shape = (2, config.num_layers, 3 * rows, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    tables = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(3)).to(torch.int32).view(rows, 3)
    lens = torch.tensor(contexts, dtype=torch.int32)
    positions = (lens - 1).clamp(min=0)
    slots = tables.gather(1, positions.long()[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
    workspace = DecodeWorkspace.allocate(rows, config.num_heads, config.num_kv_heads, config.head_dim, CPU)
    attn = DecodeMetadata(torch.where(lens > 0, slots, -1), tables, lens, workspace)
    hidden = model(torch.arange(rows) % config.vocab_size, positions, list(zip(*cache, strict=True)), attn)
    return hidden, cache


def only(path: str) -> Tuning:
    return Tuning("a GPU", "2026-01-02", {}, {}, {24: (PathLimit(16, path),)})


class TestChoice:
    @pytest.mark.parametrize(("rows", "path"), PATHS_OF_TABLE.items())
    def test_the_table_decides(self, use, rows: int, path: DecodePath) -> None:
        use(TABLE)
        assert decode_path(rows, (24, 48, 40), torch.bfloat16, CPU) is path

    @pytest.mark.parametrize("unserved", [24, 48, 40])
    def test_where_hopper_has_no_kernel_for_a_row_length_it_is_separate(self, use, unserved: int) -> None:
        use(TABLE, lambda in_features: in_features != unserved)
        found = {rows: decode_path(rows, (24, 48, 40), torch.bfloat16, CPU) for rows in PATHS_OF_TABLE}
        assert found == {
            rows: DecodePath.SEPARATE if path is DecodePath.HOPPER else path for rows, path in PATHS_OF_TABLE.items()
        }

    def test_a_device_without_a_table(self) -> None:
        found = [decode_path(rows, (24, 48, 40), torch.float32, CPU) for rows in (1, 8, 9, 256)]
        assert found == [DecodePath.SKINNY] * 2 + [DecodePath.SEPARATE] * 2

    def test_dtype_and_device_are_asked_for(self, monkeypatch, use) -> None:
        use(TABLE)
        served = []
        monkeypatch.setattr(paths, "serves_shape", lambda *args: served.append(args) or args[1] == torch.bfloat16)
        meta = torch.device("meta")
        assert decode_path(6, (24, 48, 40), torch.bfloat16, meta) is DecodePath.HOPPER
        assert served == [(size, torch.bfloat16, meta) for size in (24, 48, 40)]
        assert decode_path(6, (24, 48, 40), torch.float32, meta) is DecodePath.SEPARATE

    def test_mixed_needs_the_kernels_of_hopper_too(self, use) -> None:
        use(only("mixed"))
        assert decode_path(6, (24, 48, 40), torch.bfloat16, CPU) is DecodePath.MIXED
        use(only("mixed"), lambda in_features: in_features != 48)
        assert decode_path(6, (24, 48, 40), torch.bfloat16, CPU) is DecodePath.SEPARATE

    def test_asking_again_looks_nothing_up(self, monkeypatch, use) -> None:
        use(TABLE)
        asked = []
        monkeypatch.setattr(paths, "tuning_of", lambda device: asked.append(device) or TABLE)
        for _ in range(3):
            decode_path(5, (24, 48, 40), torch.bfloat16, CPU)
        assert asked == [CPU]


OPTIONS = {
    "a window": {"sliding_window": 4},
    "a window in one layer": {
        "sliding_window": 1,
        "layer_types": ("full_attention", "sliding_attention", "full_attention"),
    },
    "a rotation of its own": {
        "sliding_window": 100,
        "layer_types": ("full_attention", "sliding_attention", "full_attention"),
        "sliding_rope": RopeConfig(8, 64, theta=3.0),
    },
    "a cap": {"attention_softcap": 0.3},
    "gelu": {"hidden_act": "gelu"},
    "gelu by tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "a multiplier": {"embedding_multiplier": 3.0},
}


def doubled(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(self).__base__.forward(self, x)


class AllHeadsLayer(DecoderLayer):
    qk_norm = "all_heads"


class AllHeadsForCausalLM(DecoderLM):
    layer_class = AllHeadsLayer


class TestModel:
    @pytest.mark.parametrize(("rows", "path"), PATHS_OF_TABLE.items())
    def test_every_layer_takes_the_path_of_the_table(self, use, monkeypatch, rows: int, path: DecodePath) -> None:
        use(TABLE)
        seen = []
        forward = DecoderLayer.forward
        monkeypatch.setattr(
            DecoderLayer, "forward", lambda self, *args: seen.append(args[-1].path) or forward(self, *args)
        )
        step(make_model(), (3,) * rows)
        assert seen == [path] * CONFIG.num_layers

    def test_it_asks_for_its_own_row_lengths(self, use) -> None:
        asked = []
        use(TABLE, lambda in_features: asked.append(in_features) or True)
        step(make_model(), (3,) * 5)
        assert asked == [24, 48, 40]

    def test_launches_of_a_layer(self, use, launched) -> None:
        def of(table: Tuning) -> list[str]:
            use(table)
            launched.clear()
            step(make_model())
            assert launched.pop() in ("rms_norm", "add_rms_norm")  # behind the last layer
            count = len(launched) // CONFIG.num_layers
            one = launched[-count:]
            assert [name.removeprefix("add_") for name in launched] == [
                name.removeprefix("add_") for name in one * CONFIG.num_layers
            ]
            return one

        skinny, hopper, parts, linear = "skinny_linear", "hopper_linear", "hopper_linear_parts", "F.linear"
        norm, attention = "add_rms_norm", "fused_decode_attention"
        assert of(only("skinny")) == [skinny, attention, skinny, skinny, skinny]
        assert of(only("hopper")) == [norm, hopper, attention, parts, norm, hopper, parts]
        assert of(only("mixed")) == [norm, linear, attention, parts, norm, linear, "silu_and_mul", parts]
        separate = [norm, linear, "rope_store_kv", "decode_attention", linear, norm, linear, "silu_and_mul", linear]
        assert of(only("separate")) == separate

    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
    @pytest.mark.parametrize("model_class", [DecoderLM, Qwen3ForCausalLM])
    @pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biases"])
    def test_all_paths_compute_the_same(self, use, config: ModelConfig, model_class, path: str) -> None:
        model = make_model(config, model_class)
        use(only("separate"))
        expected, expected_cache = step(model)
        use(only(path))
        hidden, cache = step(model)
        assert expected.isfinite().all()
        torch.testing.assert_close(hidden, expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(cache, expected_cache, atol=2e-6, rtol=2e-6)

    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
    @pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
    def test_windows_caps_and_activations_are_computed_on_every_path(self, use, changes, path: str) -> None:
        model, plain = make_model(replace(CONFIG, **changes)), make_model(CONFIG)
        use(only("separate"))
        expected, _ = step(model)
        assert not torch.allclose(expected, step(plain)[0], atol=1e-3)
        use(only(path))
        torch.testing.assert_close(step(model)[0], expected, atol=2e-6, rtol=2e-6)

    def test_launches_of_layers_with_other_norms(self, use, launched) -> None:
        use(only("skinny"))
        norm, add, linear, gelu = "rms_norm", "add_rms_norm", "F.linear", "gelu_and_mul"
        step(make_model(replace(CONFIG, num_layers=2, hidden_act="gelu"), Gemma2ForCausalLM))
        layer = [linear, "rope_store_kv", "decode_attention", linear, norm, add, linear, gelu, linear, norm]
        assert launched == [norm, *layer, add, *layer, add]
        launched.clear()
        step(make_model(replace(CONFIG, num_layers=2), Olmo2ForCausalLM))
        heads = [norm, norm, "apply_rope", "store_kv", "decode_attention"]
        assert launched == [linear, *heads, linear, norm, linear, "silu_and_mul", linear, norm] * 2 + [add]

    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
    def test_norms_that_no_fused_kernel_has_keep_to_separate(self, use, launched, path: str) -> None:
        use(only(path))
        step(make_model(replace(CONFIG, norm_unit_offset=True)))
        step(make_model(CONFIG, AllHeadsForCausalLM))
        assert "decode_attention" in launched
        assert not {"skinny_linear", "hopper_linear", "fused_decode_attention"} & set(launched)

    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
    @pytest.mark.parametrize("part", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"])
    def test_parts_with_a_forward_of_their_own_keep_to_separate(self, use, launched, part: str, path: str) -> None:
        """The fused kernels take the weight alone, so whatever else such a part does would be left out."""
        model, plain = make_model(), make_model()
        for layer in model.model.layers:
            replaced = layer.get_submodule(part)
            replaced.__class__ = type("Doubled", (type(replaced),), {"forward": doubled})
        use(only("separate"))
        expected, _ = step(model)
        assert not torch.allclose(expected, step(plain)[0], atol=1e-3)
        use(only(path))
        launched.clear()
        torch.testing.assert_close(step(model)[0], expected, atol=0, rtol=0)
        assert "decode_attention" in launched

    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
    def test_in_bfloat16_they_differ_by_roundings(self, use, path: str) -> None:
        model = make_model(dtype=torch.bfloat16)
        use(only("separate"))
        expected = step(model)[0].double()
        use(only(path))
        hidden = step(model)[0]
        assert hidden.dtype is torch.bfloat16
        assert (hidden.double() - expected).norm() < 2e-2 * expected.norm()


class Whole(TPGroup):
    """Rank 0 of two, which holds all of every layer, so that its terms are the sums."""

    summed: ClassVar[list[str]] = []

    def split(self, count: int, what: str) -> tuple[int, int]:
        return 0, count

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed.append("alone")
        return tensor

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        self.summed.append("with a norm")
        return super().all_reduce_add_rms_norm(x, residual, weight, eps)


class TestSeveralRanks:
    @pytest.mark.parametrize("path", ["skinny", "hopper", "mixed", "separate"])
    @pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biases"])
    def test_sums_go_into_the_norms_behind_them(self, use, config: ModelConfig, path: str) -> None:
        """Two a layer, each with the norm that follows; the embedding's has none. The result is that of one rank."""
        one = make_model(config)
        use(only("separate"))
        expected, expected_cache = step(one)
        model = DecoderLM(config, Whole(0, 2))
        weights = dict(one.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name][: len(parameter)])  # half of the vocabulary, where the ids of the step are
        Whole.summed.clear()
        use(only(path))
        hidden, cache = step(model)
        assert Whole.summed == ["alone"] + ["with a norm"] * 2 * config.num_layers
        torch.testing.assert_close(hidden, expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(cache, expected_cache, atol=2e-6, rtol=2e-6)

    def test_launches_of_a_layer(self, use, launched) -> None:
        """As on one rank, with add and norm apart where they were in a linear layer."""
        model = DecoderLM(CONFIG, Whole(0, 2))
        skinny, hopper, parts, linear = "skinny_linear", "hopper_linear", "hopper_linear_parts", "F.linear"
        attention, silu = "fused_decode_attention", "silu_and_mul"
        for path, layer in {
            "skinny": [skinny, attention, skinny, skinny, skinny],
            "hopper": [hopper, attention, parts, hopper, parts],
            "mixed": [linear, attention, parts, linear, silu, parts],
            "separate": [linear, "rope_store_kv", "decode_attention", linear, linear, silu, linear],
        }.items():
            use(only(path))
            launched.clear()
            step(model)
            assert launched == ["rms_norm", *layer * CONFIG.num_layers]

    def test_a_layer_of_somebody_else_gets_whole_sums(self, use) -> None:
        model = DecoderLM(CONFIG, Whole(0, 2))
        model.model.layers[1].mlp = OwnMLP(CONFIG, Whole(0, 2))
        Whole.summed.clear()
        use(only("hopper"))
        step(model)
        assert Whole.summed == ["alone"] * (1 + 2 * CONFIG.num_layers)


class OwnLayer(DecoderLayer):
    """Looks at its residual, as the kit promises it to a layer behind another."""

    def forward(self, hidden, residual, positions, cache, attn):
        assert residual is not None
        assert hidden.shape == residual.shape
        return super().forward(hidden, residual, positions, cache, attn)


class OwnAttention(layers.Attention):
    def forward(self, hidden, positions, cache, attn):
        return super().forward(hidden, positions, cache, attn)


class OwnMLP(GatedMLP):
    def forward(self, hidden):
        return super().forward(hidden)


class OwnNorm(RMSNorm):
    def forward(self, x, residual=None):
        return super().forward(x, residual)


def rotary(model: DecoderLM) -> Any:
    return model.model.layers[0].self_attn.rotary


def norm() -> nn.Module:
    return OwnNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps)


REPLACED = {
    "a layer": lambda model: model.model.layers.__setitem__(1, OwnLayer(CONFIG, rotary(model), TPGroup())),
    "an attention": lambda model: setattr(
        model.model.layers[1], "self_attn", OwnAttention(CONFIG, rotary(model), TPGroup())
    ),
    "an MLP": lambda model: setattr(model.model.layers[2], "mlp", OwnMLP(CONFIG, TPGroup())),
    "the norm before attention": lambda model: setattr(model.model.layers[0], "input_layernorm", norm()),
    "the norm before the MLP": lambda model: setattr(model.model.layers[1], "post_attention_layernorm", norm()),
    "the last norm": lambda model: setattr(model.model, "norm", norm()),
}


@pytest.mark.parametrize("part", REPLACED)
@pytest.mark.parametrize("path", ["skinny", "hopper", "mixed"])
def test_a_model_with_a_part_of_its_own_never_leaves_separate(use, launched, part: str, path: str) -> None:
    use(only(path))
    model = make_model()
    REPLACED[part](model)
    step(model)
    separate = {"rms_norm", "add_rms_norm", "F.linear", "rope_store_kv", "decode_attention", "silu_and_mul"}
    assert set(launched) == separate
    launched.clear()
    step(make_model())
    assert not set(launched) <= separate


def test_the_untuned_table_is_that_of_a_cpu() -> None:
    assert paths.tuning_of(CPU) is UNTUNED
