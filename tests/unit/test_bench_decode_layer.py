"""`python -m tritonllm.bench.decode_layer` as far as it goes without a GPU: its layers, its check, what it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonllm import EngineConfig
from tritonllm.bench import decode_layer
from tritonllm.bench.decode_layer import Chain, chain_size, ragged_contexts
from tritonllm.config.model import FULL, SLIDING
from tritonllm.engine.resolve import ResolvedModel, resolve_model
from tritonllm.errors import KernelError
from tritonllm.kernels.skinny_form import gemv
from tritonllm.kernels.tuning_file import as_json, read_json
from tritonllm.kernels.tuning_table import LinearKey, PathLimit, Tuning
from tritonllm.models.decode_path import DecodePath

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
KEYS = {
    "hidden_size": 24, "intermediate_size": 40, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8,
    "vocab_size": 64, "max_position": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> ResolvedModel:
    """A tiny Qwen3 on the CPU, of which few bytes are rotated."""
    monkeypatch.setattr(decode_layer, "ROTATED_BYTES", 1)
    config = EngineConfig(model_name_or_path="Qwen3-0.6B", load_format="dummy", dtype="float32", device="cpu", **KEYS)
    return resolve_model(config)


class TestInputs:
    def test_contexts_are_ragged_and_the_same_each_time(self) -> None:
        contexts = ragged_contexts(256, 700)
        assert contexts == ragged_contexts(256, 700)
        assert 350 <= min(contexts) < 400
        assert 1000 < max(contexts) <= 1050
        assert abs(sum(contexts) / 256 - 700) < 30
        assert ragged_contexts(5, 1) == [1] * 5

    def test_a_chain_reads_more_than_the_cache_holds(self) -> None:
        shapes = {}
        for name in ("Qwen3-0.6B", "Qwen3-8B"):
            config = EngineConfig(model_name_or_path=name, load_format="dummy", dtype="bfloat16", device="cpu")
            shapes[name] = chain_size(resolve_model(config), [700])
        layers, layer_bytes = shapes["Qwen3-0.6B"]
        weights = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072
        assert layer_bytes == 2 * weights + 700 * 2 * 8 * 128 * 2
        assert layers * layer_bytes > 400 << 20 >= (layers - 1) * layer_bytes
        assert shapes["Qwen3-8B"][0] == 8

    def test_where_layers_differ_a_chain_has_those_like_the_first(self, resolved: ResolvedModel) -> None:
        config = replace(resolved.config, sliding_window=16, layer_types=(SLIDING, FULL))
        bytes_of_a_key = 2 * 2 * 8 * 4
        whole, windowed = (chain_size(replace(resolved, config=each), [700])[1] for each in (resolved.config, config))
        assert whole - windowed == (700 - 16) * bytes_of_a_key
        chain = Chain(replace(resolved, config=config), [40, 7])
        assert {layer.self_attn.window for layer in chain.decoder.layers} == {16}

    def test_the_new_key_of_a_row_is_its_last(self, resolved: ResolvedModel) -> None:
        contexts = [1, 256, 257, 700]
        chain = Chain(resolved, contexts)
        tables, slots = chain.attn.block_tables, chain.attn.slot_mapping
        owned = [tables[row, : -(-count // 256)].tolist() for row, count in enumerate(contexts)]
        assert sorted(sum(owned, [])) == list(range(1 + 1 + 2 + 3))
        assert chain.attn.context_lens.tolist() == contexts
        assert chain.positions.tolist() == [count - 1 for count in contexts]
        assert slots.tolist() == [
            blocks[-1] * 256 + (count - 1) % 256 for blocks, count in zip(owned, contexts, strict=True)
        ]


class TestChain:
    def test_paths_that_can_run(self, resolved: ResolvedModel, monkeypatch) -> None:
        assert Chain(resolved, [5] * 16).paths() == [DecodePath.SKINNY, DecodePath.SEPARATE]
        assert Chain(resolved, [5] * 17).paths() == [DecodePath.SEPARATE]
        monkeypatch.setattr(decode_layer, "serves_shape", lambda *_: True)
        assert Chain(resolved, [5] * 17).paths() == [DecodePath.HOPPER, DecodePath.MIXED, DecodePath.SEPARATE]
        monkeypatch.setattr(decode_layer, "serves_shape", lambda size, *_: size != 40)
        assert Chain(resolved, [5] * 17).paths() == [DecodePath.SEPARATE]

    def test_every_path_runs_every_layer_and_agrees(self, resolved: ResolvedModel) -> None:
        chain = Chain(resolved, [3, 300])
        assert len(chain.decoder.layers) == chain.num_layers == 8
        expected = chain.run(DecodePath.SEPARATE)
        assert not torch.allclose(chain.run(DecodePath.SEPARATE, 7), expected)
        for path in DecodePath:
            torch.testing.assert_close(chain.run(path), expected, atol=1e-5, rtol=1e-5)
            chain.check(path)

    @pytest.mark.parametrize("path", [DecodePath.SKINNY, DecodePath.HOPPER, DecodePath.MIXED])
    @pytest.mark.parametrize("fault", ["attention", "MLP", "NaN"])
    def test_the_check_sees_a_wrong_path(self, resolved: ResolvedModel, path: DecodePath, fault: str) -> None:
        chain = Chain(resolved, [3, 300])
        for parameter in chain.decoder.layers.parameters():
            if parameter.dim() == 2:
                parameter *= 10  # or so small a model would add next to nothing to its stream
        chain.check(path)
        name = "residual_step" if path is DecodePath.SKINNY else "parts_step"
        layer = chain.decoder.layers[1]
        module = layer.mlp if fault == "MLP" else layer.self_attn
        right = getattr(module, name)
        factor = float("nan") if fault == "NaN" else 1.2
        module.__dict__[name] = lambda *args: factor * right(*args)
        with pytest.raises(KernelError, match=f"the {path.value} path is wrong for 2 rows .*40"):
            chain.check(path)


class TestRun:
    @pytest.fixture(autouse=True)
    def _pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times by path instead of a GPU's."""
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**6))
        monkeypatch.setattr(
            decode_layer, "graph_microseconds", lambda run: {"skinny": 8, "separate": 16}[run.args[0].value]
        )

    def test_it_prints_what_it_times_and_returns_the_fastest(self, resolved: ResolvedModel, capsys) -> None:
        found = decode_layer.run([resolved], [1, 16, 17], 9)
        assert found == {24: (PathLimit(16, "skinny"),)}
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[0] == ["us", "a", "layer", "batch", "layers", "floor", "skinny", "hopper", "mixed", "separate"]
        assert [line[:3] + line[4:] for line in lines[1:4]] == [
            ["Qwen3-0.6B", "1", "8", "1.00", "-", "-", "2.00"],
            ["Qwen3-0.6B", "16", "8", "1.00", "-", "-", "2.00"],
            ["Qwen3-0.6B", "17", "8", "-", "-", "-", "2.00"],
        ]
        assert " ".join(lines[4]) == "Qwen3-0.6B, hidden size 24: skinny up to 16 rows, separate above"

    def test_a_batch_that_does_not_fit_is_left_out(self, resolved: ResolvedModel, capsys) -> None:
        assert decode_layer.run([resolved], [1, 1000], 200) == {24: (PathLimit(1, "skinny"),)}
        assert "not enough memory" in capsys.readouterr().out
        assert decode_layer.run([resolved], [1000], 200) == {}

    def test_a_wrong_path_is_not_timed(self, resolved: ResolvedModel, monkeypatch) -> None:
        monkeypatch.setattr(decode_layer, "LARGEST_ERROR", -1.0)
        with pytest.raises(KernelError, match="the skinny path is wrong"):
            decode_layer.run([resolved], [1], 9)


class TestCommand:
    @pytest.fixture(autouse=True)
    def _a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--models", "Qwen9"), "--models has 'Qwen9': the shapes are Llama-3.1-70B"),
            (("--batches", "1,two"), "--batches '1,two' must be numbers"),
            (("--batches", "4,0"), "--batches has 0, and a batch has at least 1 row"),
            (("--context", "0"), "--context 0 must be at least 1"),
            (("--context", "30000"), "--context 30000 is too long for Qwen3-0.6B, which has 40960 positions"),
            (
                ("--models", "Qwen3-8B,Llama-3.1-8B", "--write", "x"),
                "--write needs models of different hidden sizes, and that of Qwen3-8B and Llama-3.1-8B is 4096",
            ),
        ],
    )
    def test_refusals_before_anything_is_measured(self, arguments, message: str, monkeypatch, capsys) -> None:
        monkeypatch.setattr(decode_layer, "run", lambda *_: pytest.fail("measured"))
        with pytest.raises(SystemExit) as left:
            decode_layer.main(arguments)
        assert left.value.code == 2
        assert f"error: {message}" in capsys.readouterr().err

    def test_what_is_asked_for(self, monkeypatch) -> None:
        asked = []
        monkeypatch.setattr(decode_layer, "run", lambda *args: asked.append(args) or {})
        decode_layer.main(["--models", "Qwen3-8B,Llama-3.1-8B", "--batches", "64,1,64", "--context", "100"])
        ((models, batches, context),) = asked
        assert [model.engine.model_name_or_path for model in models] == ["Qwen3-8B", "Llama-3.1-8B"]
        assert {(model.engine.dtype, model.engine.device) for model in models} == {("bfloat16", "cuda")}
        assert (batches, context) == ([1, 64], 100)

    def test_a_new_file_holds_the_paths(self, monkeypatch, tmp_path: Path, capsys) -> None:
        found = {1024: (PathLimit(2, "skinny"), PathLimit(256, "hopper")), 2048: ()}
        monkeypatch.setattr(decode_layer, "run", lambda *_: found)
        file = tmp_path / "mine.json"
        decode_layer.main(["--write", str(file)])
        read = read_json(file.read_text(), str(file))
        assert (read.gpu, read.linears, read.decode_paths) == ("a GPU", {}, found)
        assert f"0 forms and paths of 2 hidden sizes are in {file}" in capsys.readouterr().out

    def test_what_else_is_in_the_file_stays(self, monkeypatch, tmp_path: Path) -> None:
        old = {512: (PathLimit(4, "skinny"),), 1024: (PathLimit(8, "skinny"),)}
        before = Tuning("a GPU", "2026-01-02", VERSIONS, {LinearKey(576, 960, False, False, 1): gemv(256, 4, 4)}, old)
        file = tmp_path / "mine.json"
        file.write_text(as_json(before))
        fresh = {1024: (PathLimit(2, "skinny"),), 4096: ()}
        monkeypatch.setattr(decode_layer, "run", lambda *_: fresh)
        decode_layer.main(["--write", str(file)])
        read = read_json(file.read_text(), str(file))
        assert (read.linears, read.decode_paths) == (before.linears, {**old, **fresh})
        assert as_json(replace(before, decode_paths=read.decode_paths, date=read.date, versions=read.versions)) == (
            file.read_text()
        )
