"""`tritonllm roofline`: predictions from a shape and two rates, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tritonllm.bench.limits import MEASURED, Limits, Rates
from tritonllm.bench.roofline import GPUS, find_gpu, predict, table
from tritonllm.bench.target import model_shape, shipped_shapes
from tritonllm.cli import make_app
from tritonllm.errors import ConfigError

QWEN = model_shape("Qwen3-0.6B")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["roofline", *arguments])
    return result.exit_code, result.output


class TestGpus:
    @pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx-4090", "RTX_4090"])
    def test_a_name_may_be_written_in_any_way(self, name: str) -> None:
        assert find_gpu(name).name == "RTX4090"

    def test_an_unknown_one_is_refused_with_those_that_are_known(self) -> None:
        with pytest.raises(ConfigError, match="no data sheet of 'tpu': give one of b200, h200") as error:
            find_gpu("tpu")
        assert "--memory-rate" in str(error.value)

    def test_the_h200_has_its_measured_rates_and_no_other_more_than_its_sheet(self) -> None:
        assert find_gpu("h200").rates == MEASURED["H200"]
        for gpu in GPUS.values():
            assert 0.5 * gpu.memory * 1e12 < gpu.rates.memory < gpu.memory * 1e12
            assert 0.5 * gpu.matrix * 1e12 < gpu.rates.matrix < gpu.matrix * 1e12


class TestPrediction:
    def test_a_window_bounds_what_a_step_reads(self) -> None:
        gpu = find_gpu("h200")
        whole, windowed = (
            predict(model, "bfloat16", gpu, gpu.rates, [64], [512, 8192], [8192])
            for model in (QWEN, replace(QWEN, sliding_window=512))
        )
        assert windowed["decode"][0] == whole["decode"][0]
        assert windowed["decode"][1]["ms"] == windowed["decode"][0]["ms"] < whole["decode"][1]["ms"] / 4
        assert windowed["prefill"][0]["ms"] < whole["prefill"][0]["ms"]
        assert windowed["cache_tokens"] == whole["cache_tokens"]

    def test_it_is_the_arithmetic_of_the_floors(self) -> None:
        h200 = find_gpu("h200")
        report = predict(QWEN, "bfloat16", h200, h200.rates, [1, 64], [1024], [128, 8192])
        limits = Limits(QWEN, "bfloat16", h200.rates)
        assert [row["ms"] for row in report["decode"]] == [
            pytest.approx(1e3 * limits.decode_seconds(batch, 1024), abs=1e-3) for batch in (1, 64)
        ]
        assert report["decode"][1]["tokens_per_second"] == pytest.approx(64 / limits.decode_seconds(64, 1024), rel=1e-3)
        assert [row["bound"] for row in report["prefill"]] == ["memory", "matrix"]
        assert report["prefill"][1]["ms"] == pytest.approx(1e3 * limits.prefill_seconds(8192), abs=1e-3)
        assert report["weights_gb"] == 1.192
        assert report["kv_bytes_per_token"] == 28 * 2 * 8 * 128 * 2

    def test_products_bound_a_large_batch_of_short_rows_on_a_slow_matrix_unit(self) -> None:
        slow = Rates(1e15, 1e12)
        report = predict(QWEN, "bfloat16", find_gpu("h200"), slow, [256], [1], [1])
        assert report["decode"][0]["bound"] == "matrix"

    def test_a_cache_that_does_not_fit_has_no_time(self) -> None:
        gpu = find_gpu("l4")
        fits = predict(QWEN, "bfloat16", gpu, gpu.rates, [1], [1], [1])["cache_tokens"]
        assert fits == int((0.9 * 24e9 - 2 * 595_984_384) // (28 * 2 * 8 * 128 * 2))
        report = predict(QWEN, "bfloat16", gpu, gpu.rates, [1], [fits, fits + 1], [1])
        assert [row["ms"] is None for row in report["decode"]] == [False, True]
        assert "the cache does not fit" in "\n".join(table("Qwen3-0.6B", report))

    def test_weights_that_do_not_fit_leave_no_room(self) -> None:
        gpu = find_gpu("l4")
        report = predict(model_shape("Qwen3-32B"), "bfloat16", gpu, gpu.rates, [1], [1], [1])
        assert report["cache_tokens"] == 0
        assert "no room beside the weights" in "\n".join(table("Qwen3-32B", report))


class TestCommand:
    @pytest.mark.parametrize("name", shipped_shapes())
    def test_every_shipped_shape_on_every_gpu(self, name: str) -> None:
        for gpu in GPUS:
            code, output = run(name, "--gpu", gpu, "--json")
            assert code == 0, output
            assert json.loads(output)["model"] == name

    def test_the_table_and_given_rates(self) -> None:
        code, output = run("Qwen3-0.6B", "--batches", "1", "--contexts", "1024", "--prompts", "128")
        assert code == 0
        assert "Qwen3-0.6B in bfloat16 on one H200 at 4.30 TB/s, 700 TFLOP/s" in output
        assert "room for 1,096,087 tokens" in output
        code, output = run("Qwen3-0.6B", "--memory-rate", "2", "--matrix-rate", "100", "--json")
        assert json.loads(output)["memory_rate"] == 2e12
        assert json.loads(output)["matrix_rate"] == 1e14

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--dtype", "int8"], "none of bfloat16"),
            (["--dtype", "float32"], "give --matrix-rate"),
            (["--batches", "none"], "no list of numbers"),
        ],
    )
    def test_wrong_usage(self, arguments: list[str], message: str) -> None:
        code, output = run("Qwen3-0.6B", *arguments)
        assert code == 2
        assert message in output

    def test_a_folder(self, tmp_path) -> None:
        shape = {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(shape))
        code, output = run(str(tmp_path), "--json")
        assert code == 0, output
        assert json.loads(output)["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 2

    def test_torch_is_not_imported(self) -> None:
        program = (
            "import sys\nfrom tritonllm.cli import make_app\n"
            "make_app()(['roofline', 'Qwen3-8B'], standalone_mode=False)\nassert 'torch' not in sys.modules"
        )
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
