"""The arithmetic of the benchmarks: workload, floors, names, medians. No engine runs."""

from __future__ import annotations

import json
import math
import random
import reprlib
from dataclasses import replace
from importlib import resources

import pytest

from tritonllm.bench.limits import MEASURED, Limits, Rates, find_rates, fraction
from tritonllm.bench.step_profile import covered
from tritonllm.bench.target import engine_config, shipped_shapes
from tritonllm.bench.throughput import workload
from tritonllm.bench.timing import median_run
from tritonllm.config import ModelConfig, RopeConfig
from tritonllm.config.model import FULL, SLIDING
from tritonllm.errors import CheckpointError, ConfigError, UnknownModelError, UnsupportedModelError

H200 = MEASURED["H200"]

# 2 layers; Q 32, K 16, V 16 and O 32 heads' columns of 24; MLP of 40: 2 * 24 * (96 + 120) = 10,368 weights.
TINY = ModelConfig(
    vocab_size=100,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-6,
    attention_scale=1.0,
    rope=RopeConfig(8, 64),
)


def shape(name: str) -> ModelConfig:
    file = resources.files("tritonllm.bench") / "configs" / f"{name}.json"
    return ModelConfig.from_hf_dict(json.loads(file.read_text()))


def lengths() -> list[tuple[int, int]]:
    return [(len(prompt), output) for prompt, output in workload(256, 100, 1024, 0)]


class TestWorkload:
    def test_totals_of_the_default(self) -> None:
        prompts, outputs = zip(*lengths(), strict=True)
        assert (len(prompts), sum(prompts), sum(outputs)) == (256, 142_827, 133_966)

    def test_the_draws_are_those_of_the_usual_script(self) -> None:
        random.seed(0)
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
        outputs = [random.randint(100, 1024) for _ in range(256)]
        assert workload(256, 100, 1024, 0) == list(zip(prompts, outputs, strict=True))


class TestLimits:
    def test_counts_by_hand(self) -> None:
        limits = Limits(TINY, "bfloat16", None)
        assert limits.linear_parameters == 10_368
        assert limits.head_parameters == 2_400
        assert limits.weight_bytes == 2 * 12_768
        assert limits.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
        # Of the last layer, 5,184 weights, all tokens need K and V, 768 weights, and one token the rest.
        assert limits.prefill_operations(3) == 2 * (3 * (5_184 + 768) + 4_416 + 2_400) + 4 * 4 * 8 * (6 + 3)
        assert Limits(TINY, "float32", None).weight_bytes == 4 * 12_768

    def test_times_by_hand(self) -> None:
        memory_bound = Limits(TINY, "bfloat16", Rates(memory=1e3, matrix=math.inf))
        assert memory_bound.decode_seconds(3, 10) == pytest.approx((25_536 + 30 * 128) / 1e3)
        assert memory_bound.prefill_seconds(3) == pytest.approx(25.536)
        # Requests of 5 and 7 tokens with 2 and 3 of output: 2 steps, over 6, and over 8 and 9 cached tokens.
        assert memory_bound.workload_seconds([(5, 2), (7, 3)]) == pytest.approx((2 * 25_536 + 23 * 128) / 1e3)
        matrix_bound = Limits(TINY, "bfloat16", Rates(memory=math.inf, matrix=1e3))
        assert matrix_bound.prefill_seconds(1) == pytest.approx((2 * 12_768 + 256) / 1e3)
        assert matrix_bound.decode_seconds(3, 10) == pytest.approx((3 * 2 * 12_768 + 256 * 30) / 1e3)
        prefill = (2 * (12 * (5_184 + 768) + 2 * (4_416 + 2_400)) + 128 * (15 + 5 + 28 + 7)) / 1e3
        assert matrix_bound.workload_seconds([(5, 2), (7, 3)]) == pytest.approx(prefill)

    def test_windows_by_hand(self) -> None:
        first = replace(TINY, sliding_window=4, layer_types=(SLIDING, FULL))
        memory_bound = Limits(first, "bfloat16", Rates(memory=1e3, matrix=math.inf))
        assert memory_bound.decode_seconds(3, 10) == pytest.approx((25_536 + 3 * (4 + 10) * 64) / 1e3)
        assert memory_bound.decode_seconds(3, 2) == Limits(TINY, "bfloat16", memory_bound.rates).decode_seconds(3, 2)
        # Contexts of 3, 4, 5 and 6 tokens.
        assert memory_bound.decoding_seconds(1, 2, 5) == pytest.approx((25_536 + 64 * (15 + 18) / 4) / 1e3)
        assert memory_bound.workload_seconds([(5, 2), (7, 3)]) == pytest.approx((2 * 25_536 + 64 * (12 + 23)) / 1e3)
        # Six queries of the first layer see 1, 2, 3, 4, 4 and 4 keys; of the last layer one is wanted.
        weights = 2 * (6 * (5_184 + 768) + 4_416 + 2_400)
        assert Limits(first, "bfloat16", None).prefill_operations(6) == weights + 4 * 4 * 8 * (18 + 6)
        last = replace(first, layer_types=(FULL, SLIDING))
        assert Limits(last, "bfloat16", None).prefill_operations(6) == weights + 4 * 4 * 8 * (21 + 4)
        both = Limits(replace(TINY, sliding_window=4), "bfloat16", None)
        assert (both.windows, both.keys_seen(9)) == ((4, 4), 8)

    def test_a_tied_head_is_read_all_the_same_and_once(self) -> None:
        model = shape("Qwen3-0.6B")
        assert model.tie_word_embeddings
        assert Limits(model, "bfloat16", H200).weight_bytes == 2 * 595_984_384

    @pytest.mark.parametrize(
        ("name", "token_ms", "rate"), [("Qwen3-0.6B", 0.287, 36_254), ("Llama-3.2-1B", 0.578, 70_863)]
    )
    def test_floors_of_an_h200(self, name: str, token_ms: float, rate: float) -> None:
        limits = Limits(shape(name), "bfloat16", H200)
        assert 1e3 * limits.decode_seconds(1, 128 + 256) == pytest.approx(token_ms, abs=1e-3)
        assert 133_966 / limits.workload_seconds(lengths()) == pytest.approx(rate, abs=1)

    def test_a_long_prompt_is_bound_by_operations_and_a_short_one_by_bytes(self) -> None:
        limits = Limits(shape("Qwen3-0.6B"), "bfloat16", H200)
        assert 1e3 * limits.prefill_seconds(8192) == pytest.approx(20.593, abs=1e-3)
        faster = Limits(shape("Qwen3-0.6B"), "bfloat16", Rates(4.3e12, 790e12))
        assert 1e3 * faster.prefill_seconds(8192) == pytest.approx(18.25, abs=0.01)
        assert limits.prefill_seconds(128) == limits.weight_bytes / H200.memory

    def test_without_rates_there_is_no_floor(self) -> None:
        limits = Limits(TINY, "bfloat16", None)
        assert limits.decode_seconds(1, 1) is limits.prefill_seconds(1) is limits.workload_seconds([(1, 2)]) is None
        assert fraction(None, 1.0) is None

    def test_fraction_is_floor_over_time(self) -> None:
        assert fraction(1.0, 4.0) == 0.25


class TestRates:
    def test_known_by_a_part_of_the_name(self) -> None:
        assert find_rates("NVIDIA H200", "bfloat16") == H200
        assert find_rates("NVIDIA H200", "float32") is None
        assert find_rates("NVIDIA A100", "bfloat16") is find_rates(None, "float32") is None

    def test_given_ones_come_first(self) -> None:
        assert find_rates("NVIDIA H200", "bfloat16", memory_rate=4.0) == Rates(4e12, 700e12)
        assert find_rates(None, "float32", 0.1, 2) == Rates(0.1e12, 2e12)

    @pytest.mark.parametrize(
        ("device", "given", "missing"),
        [
            (None, (1.0, None), "--matrix-rate"),
            ("NVIDIA A100", (None, 1.0), "--memory-rate"),
            ("NVIDIA H200", (1.0, None), "--matrix-rate"),
        ],
    )
    def test_one_alone_is_an_error(self, device: str | None, given: tuple, missing: str) -> None:
        with pytest.raises(ConfigError, match=f"give {missing} as well"):
            find_rates(device, "float32", *given)


class TestNames:
    # Billions of parameters as their model cards have them, embeddings included.
    @pytest.mark.parametrize(
        ("name", "billions"),
        [
            ("Llama-3.1-70B", 70.55),
            ("Llama-3.1-8B", 8.03),
            ("Llama-3.2-1B", 1.236),
            ("Qwen3-0.6B", 0.596),
            ("Qwen3-14B", 14.77),
            ("Qwen3-32B", 32.76),
            ("Qwen3-8B", 8.19),
            ("SmolLM2-135M", 0.1345),
        ],
    )
    def test_shipped_shapes_have_the_size_they_say(self, name: str, billions: float) -> None:
        model = shape(name)
        limits = Limits(model, "bfloat16", None)
        count = limits.linear_parameters + limits.head_parameters * (1 if model.tie_word_embeddings else 2)
        assert count / 1e9 == pytest.approx(billions, rel=1e-3)

    def test_every_shipped_shape_is_in_that_list(self) -> None:
        (mark,) = TestNames.test_shipped_shapes_have_the_size_they_say.pytestmark
        assert shipped_shapes() == [name for name, _ in mark.args[1]]

    @pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen/Qwen3-0.6B"])
    def test_a_shipped_shape(self, name: str, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        config = engine_config(name, "dummy", max_num_sequences=2)
        assert (config.model_name_or_path, config.load_format, config.max_num_sequences) == (name, "dummy", 2)
        assert config.architecture == {}

    def test_real_weights_are_the_engines_to_find(self) -> None:
        config = engine_config("Qwen/Qwen3-0.6B", "auto")
        assert (config.model_name_or_path, config.load_format, config.architecture) == ("Qwen/Qwen3-0.6B", "auto", {})

    def folder(self, tmp_path, name: str = "mine", **changes: object) -> str:
        file = resources.files("tritonllm.bench") / "configs" / "Llama-3.2-1B.json"
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return str(tmp_path / name)

    def test_a_folder_comes_before_the_shape_of_its_name_and_needs_no_weights(self, tmp_path) -> None:
        config = engine_config(self.folder(tmp_path, "Llama-3.2-1B", num_hidden_layers=3), "dummy")
        assert config.load_format == "dummy"
        assert (config.num_layers, config.vocab_size, config.head_dim) == (3, 128256, 64)
        assert (config.scale, config.base, config.tie_word_embeddings) == (1.0, 500000.0, True)

    def test_what_dummy_weights_cannot_be_given_is_refused(self, tmp_path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"has o_bias, .* --load-format auto"):
            engine_config(self.folder(tmp_path, attention_bias=True), "dummy")

    def test_a_folder_of_another_architecture(self, tmp_path) -> None:
        with pytest.raises(UnknownModelError):
            engine_config(self.folder(tmp_path, architectures=["OtherForCausalLM"], model_type="other"), "dummy")

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_a_broken_config(self, tmp_path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            engine_config(str(tmp_path), "dummy")

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("Qwen3-0.6", "did you mean 'Qwen3-0.6B'?"),
            ("zzz", "the shapes are Llama-3.1-70B, "),
            ("/no/such/folder", "the shapes are "),
            ("x" * 5000, "the shapes are "),
        ],
    )
    def test_a_name_that_nothing_has(self, name: str, hint: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            engine_config(name, "dummy")
        assert f"{reprlib.repr(name)} is no folder, no shipped shape and no hub id 'owner/name'" in str(caught.value)
        assert hint in str(caught.value)

    def test_a_hub_id_gives_its_config_alone(self, tmp_path, monkeypatch) -> None:
        folder = self.folder(tmp_path, num_hidden_layers=5)
        asked = []

        def download(*args: str) -> str:
            asked.append(args)
            return f"{folder}/config.json"

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        assert engine_config("somebody/else", "dummy").num_layers == 5
        assert asked == [("somebody/else", "config.json")]

    def test_a_hub_that_does_not_answer(self, monkeypatch) -> None:
        def fail(*_: str) -> str:
            raise OSError("no network")

        monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
        with pytest.raises(CheckpointError, match="'somebody/else' is no folder .* OSError: no network"):
            engine_config("somebody/else", "dummy")


def test_the_median_run_is_a_run() -> None:
    runs = [{"seconds": seconds} for seconds in (3.0, 1.0, 2.0)]
    assert median_run(runs, "seconds") is runs[2]
    assert median_run(runs[:2], "seconds") is runs[0]


def test_time_covered_counts_once_what_runs_side_by_side() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 2.5)]) == 4
    assert covered([]) == 0
