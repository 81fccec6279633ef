"""Starts of tiny models, recorded for GPUs that are not here: which kernels each family of GPUs gets."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tritonllm import EngineConfig, ModelSpec
from tritonllm.engine import recorded_start as module
from tritonllm.engine.controls import RowControls
from tritonllm.engine.cuda_graphs import bucket_sizes
from tritonllm.engine.device_steps import CAPTURED
from tritonllm.engine.inputs import chunk_inputs
from tritonllm.engine.model_runner import ModelRunner
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.prefill_graphs import PrefillGraphs
from tritonllm.engine.recorded_start import recorded_start
from tritonllm.engine.resolve import resolve_model
from tritonllm.engine.sequence import Choice, RowSampling
from tritonllm.errors import ConfigError
from tritonllm.kernels.compile_matrix import distinct
from tritonllm.kernels.decode_splits import distinct_batches
from tritonllm.kernels.launch import Launch, gpu_of, nvidia_capability
from tritonllm.kernels.norm import rms_norm
from tritonllm.kernels.recording import recording
from tritonllm.kernels.targets import TARGETS
from tritonllm.models.decoder import DecoderLM
from tritonllm.registry import ModelRegistry
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_position": 512,
    "tie_word_embeddings": False,
    "base": 10000.0,
    "rms_norm_epsilon": 1e-6,
}
HOPPER_ONLY = {"_hopper_linear_kernel", "_prefill_hopper_kernel"}
EVERYWHERE = {
    "_load_rows_kernel",
    "_advance_rows_kernel",
    "_longest_first_kernel",
    "_fused_decode_attention_kernel",
    "_decode_attention_kernel",
    "_prefill_attention_kernel",
    "_rope_store_kernel",
    "_activate_and_mul_kernel",
    "_add_rms_norm_kernel",
    "_rms_norm_kernel",
    "_gemv_kernel",
    "_extremes_kernel",
    "_coarse_kernel",
    "_fine_kernel",
    "_collect_kernel",
    "_choice_kernel",
    "_pick_kernel",
    "_merge_kernel",
}


def config(name: str = "Llama-3.2-1B", **keys: object) -> EngineConfig:
    return EngineConfig(name, load_format="dummy", **{"max_num_sequences": 24, **SHAPE, **keys})


def start(target: str, name: str = "Llama-3.2-1B", **keys: object) -> list[Launch]:
    return recorded_start(config(name, **keys), TARGETS[target].counts_as)


def names(launches: list[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


def of(launches: list[Launch], kernel: str) -> list[Launch]:
    return [launch for launch in launches if launch.kernel.fn.__name__ == kernel]


@pytest.mark.parametrize("target", TARGETS)
def test_a_family_gets_its_kernels(target: str) -> None:
    launches = start(target)
    hopper = target == "sm_90"
    assert names(launches) >= EVERYWHERE | (HOPPER_ONLY if hopper else set())
    assert any(launch.kernel.is_gluon() for launch in launches) == hopper
    if not hopper:
        assert not names(launches) & HOPPER_ONLY
    newer = target in ("sm_90", "sm_100", "sm_120")
    assert any(launch.options.get("launch_pdl") for launch in launches) == newer
    nvidia = target.startswith("sm")
    assert {launch.constexprs["HARDWARE_LOG"] for launch in of(launches, "_pick_kernel")} == {nvidia}
    assert {launch.constexprs["HARDWARE"] for launch in of(launches, "_collect_kernel")} == {nvidia}


def test_a_start_of_several_ranks_launches_what_rank_0_does() -> None:
    launches = start("sm_90", world_size=2)
    (columns,) = {launch.args["vocab_size"] for launch in of(launches, "_pick_kernel")}
    assert columns == SHAPE["vocab_size"] // 2
    assert {launch.args["vocab_size"] for launch in of(launches, "_choice_kernel")} == {SHAPE["vocab_size"]}
    assert {launch.args["tiles"] for launch in of(launches, "_merge_kernel")} >= {2}  # the best of the ranks
    assert names(launches) >= EVERYWHERE | HOPPER_ONLY  # decode steps take the paths of one rank


def test_the_shared_memory_of_the_family_decides_on_tiles() -> None:
    keys = {target: of(start(target), "_prefill_attention_kernel")[0].constexprs["BLOCK_N"] for target in TARGETS}
    assert keys == {target: 64 if TARGETS[target].shared_limit >= 227 * 1024 else 32 for target in TARGETS}


def test_its_number_of_multiprocessors_decides_on_splits() -> None:
    gpu = TARGETS["sm_80"].counts_as
    for num_sms, splits in ((108, 32), (8, 16)):
        launches = recorded_start(config(), dataclasses.replace(gpu, num_sms=num_sms))
        assert max(launch.constexprs["SPLITS"] for launch in of(launches, "_decode_attention_kernel")) == splits


def test_every_bucket_of_a_decode_step_is_there_with_every_end() -> None:
    launches = start("sm_80")
    heads = SHAPE["num_kv_heads"], SHAPE["head_dim"]
    beside_prompts = distinct_batches(24, *heads, TARGETS["sm_80"].counts_as.num_sms)
    # 2 pools x a forward pass and 3 ends, each of which reads the rows anew.
    for kernel, times in (("_load_rows_kernel", 8), ("_advance_rows_kernel", 6)):
        sizes = Counter(launch.args["num_rows"] for launch in of(launches, kernel))
        sizes.subtract(2 * beside_prompts)
        assert +sizes == dict.fromkeys(bucket_sizes(24), times)
    for kernel in ("_adjust_kernel", "_list_kernel"):
        assert {launch.args["logits_ptr"].shape[0] for launch in of(launches, kernel)} >= {*bucket_sizes(24)}
    # Of rows of a decode step, of the prompts that end in a prefill, and of a prompt's own tokens.
    strides = {launch.args["wanted_stride"] for launch in of(launches, "_tile_kernel")}
    assert len(strides) == 3
    # With min-p, of adjusted logits, and without.
    assert {launch.args["min_ps_ptr"] is None for launch in of(launches, "_choice_kernel")} == {True, False}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_halves_of_a_step_launch_all_that_is_captured(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture runs nothing first: a kernel that only a whole step launches would be compiled in the middle of it."""
    monkeypatch.setattr(ModelRunner, "_prefill_every_kernel", lambda self: None)
    monkeypatch.setattr(PrefillGraphs, "run_every_layout", lambda self: None)
    halves = distinct(start(target), TARGETS[target])
    monkeypatch.setattr("tritonllm.engine.model_runner.HALVES", CAPTURED)
    captured = distinct(start(target), TARGETS[target])
    assert set(captured) == set(halves)


class TestWindowsAndCaps:
    """Which kernels a model gets whose layers have windows or softcaps."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> Callable[..., list[Launch]]:
        def started(family: str, **fields: object) -> list[Launch]:
            hf_config = tiny_hf_config(family, heads="4/2x128", **fields)
            save_tiny_checkpoint(hf_config, tmp_path, tokenizer=False)
            config = EngineConfig(str(tmp_path), dtype="bfloat16", max_num_sequences=24, max_model_length=200)
            return recorded_start(config, TARGETS["sm_90"].counts_as)

        return started

    def test_hopper_s_prefill_is_for_plain_layers_and_the_other_form_takes_its_tiles(self, started) -> None:
        # Not in the last layer, whose attention is that of the sampled tokens.
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        launches = started("gemma3_text", num_hidden_layers=3, layer_types=types)
        assert of(launches, "_prefill_hopper_kernel")
        portable = of(launches, "_prefill_attention_kernel")
        forms = {(launch.constexprs["BLOCK_M"], launch.constexprs["WINDOW"]) for launch in portable}
        assert forms == {(64, None), (64, 16), (128, 16)}

    def test_without_a_plain_layer_no_tile_is_cut_for_hopper(self, started) -> None:
        for family, fields in (("gemma2", {}), ("mistral", {"sliding_window": 16})):
            launches = started(family, **fields)
            assert not of(launches, "_prefill_hopper_kernel")
            portable = of(launches, "_prefill_attention_kernel")
            assert {launch.constexprs["BLOCK_M"] for launch in portable} == {64}

    def test_layers_of_four_norms_take_the_separate_kernels(self, started) -> None:
        launches = started("gemma2")
        assert not names(launches) & {"_fused_decode_attention_kernel", "_hopper_linear_kernel"}
        options = {
            (launch.constexprs["WINDOW"], launch.constexprs["SOFTCAP"])
            for launch in of(launches, "_decode_attention_kernel")
        }
        assert options == {(16, 50.0), (None, 50.0)}

    def test_pre_norm_layers_with_a_window_take_the_fused_ones(self, started) -> None:
        launches = started("mistral", sliding_window=16)
        assert names(launches) == names(start("sm_90")) - {"_prefill_hopper_kernel"}
        for kernel in ("_fused_decode_attention_kernel", "_decode_attention_kernel", "_prefill_attention_kernel"):
            assert {launch.constexprs["WINDOW"] for launch in of(launches, kernel)} == {16}

    def test_a_window_that_no_request_outgrows_is_none(self, started) -> None:
        launches = started("mistral", sliding_window=200)
        assert names(launches) == names(start("sm_90"))
        assert {launch.constexprs.get("WINDOW") for launch in launches} == {None}


def test_short_prefills_are_there_as_graphs_run_them_and_not_without_graphs() -> None:
    tokens = Counter(launch.grid[0] for launch in of(start("sm_80"), "_activate_and_mul_kernel"))
    eager = Counter(launch.grid[0] for launch in of(start("sm_80", enforce_eager=True), "_activate_and_mul_kernel"))
    # 8 rows are what a padded prefill samples, and its last layer works for.
    assert (tokens - eager).keys() == {8, 16, 32, 64, 128, 256, 512}
    assert not eager - tokens


SAMPLINGS = [
    RowSampling(0.0, 0, 1.0, 0),
    RowSampling(1.0, 5, 0.9, 0),
    RowSampling(1.0, 5, 0.9, 0, RowControls(0.1, 2.0, 0.0, 0.0, (), None, 1)),
]


@pytest.mark.parametrize(("family", "target"), [("llama", "sm_80"), ("gemma3_text", "sm_90")])
def test_a_mixed_step_launches_nothing_that_the_start_did_not(tmp_path: Path, family: str, target: str) -> None:
    """Of any number of rows and chunks, whether they end a prompt or not; with windows in some layers and in none."""
    fields = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    save_tiny_checkpoint(tiny_hf_config(family, heads="4/2x128", **fields), tmp_path, tokenizer=False)
    limits = {"dtype": "bfloat16", "max_num_sequences": 24, "max_model_length": 200, "max_num_batched_tokens": 4096}
    resolved = resolve_model(EngineConfig(str(tmp_path), **limits), recorded=True)
    with recording(TARGETS[target].counts_as) as launches, torch.inference_mode():
        runner = module._RecordedRunner(resolved.engine, resolved=resolved)
        of_the_start = len(launches)
        for num_rows, lengths, ends in itertools.product(range(1, 25), [(1,), (40, 7), (3,) * 12], [True, False]):
            sampling = SAMPLINGS[num_rows % 3]
            chunks = [PrefillChunk([0] * length, 0, [0], ends, sampling) for length in lengths]
            inputs = chunk_inputs(chunks, runner.block_size, runner.tiling, runner.device, num_rows)
            runner._steps.decode_and_prefill(num_rows, list(Choice)[num_rows // 3 % 3], inputs)
    later = distinct(launches[of_the_start:], TARGETS[target])
    assert "_decode_attention_kernel" in names(launches[of_the_start:])
    assert later.keys() <= distinct(launches[:of_the_start], TARGETS[target]).keys()


def test_the_structure_of_the_family_of_models_shows() -> None:
    for name, normed in (("Llama-3.2-1B", False), ("Qwen3-0.6B", True)):
        for kernel in ("_rope_store_kernel", "_fused_decode_attention_kernel"):
            assert {launch.args["q_norm_ptr"] is not None for launch in of(start("sm_90", name), kernel)} == {normed}


class NormedHead(DecoderLM):
    """Another norm before its head, and so logits of its own."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(rms_norm(hidden, self.model.norm.weight, 0.5))


def test_a_model_of_a_plugin_is_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ModuleType("plugin_of_this_test")
    plugin.NormedHead = NormedHead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    registry = ModelRegistry([])
    registry.add(ModelSpec(name="normed", model="plugin_of_this_test:NormedHead", checkpoints=("Normed-1M",)))
    monkeypatch.setattr("tritonllm.engine.resolve.default_registry", lambda: registry)
    own = [launch for launch in of(start("sm_80", "Normed-1M"), "_rms_norm_kernel") if launch.args["eps"] == 0.5]
    assert {launch.args["x_ptr"].shape[0] for launch in own} >= set(bucket_sizes(24))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_meta_tensors_are_aligned_as_memory_is(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels are compiled for real tensors, here on the CPU, under the same driver's rules."""
    keys = {"max_cached_blocks": 4, "max_num_batched_tokens": 64}
    on_meta = distinct(start(target, **keys), TARGETS[target])
    resolve = module.resolve_model

    def resolve_on_cpu(config: EngineConfig, *, recorded: bool) -> object:
        return dataclasses.replace(resolve(config, recorded=recorded), device=torch.device("cpu"))

    make: Callable = ModelRunner.make_prefill_graphs
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what no kernel writes is looked up by
    monkeypatch.setattr(module, "resolve_model", resolve_on_cpu)
    monkeypatch.setattr(ModelRunner, "make_prefill_graphs", lambda self, padded: make(self, True))
    on_cpu = distinct(start(target, **keys), TARGETS[target])
    assert all(tensor.device.type == "cpu" for launch in on_cpu.values() for tensor in _tensors(launch))
    assert on_cpu.keys() == on_meta.keys()
    columns = [dict(variant.attributes).get((1,)) for variant in on_meta if variant.kernel == "_pick_kernel"]
    assert columns
    assert ("tt.divisibility", 16) not in columns, "temperatures lie 8 bytes into a row"


def _tensors(launch: Launch) -> list[torch.Tensor]:
    return [value for value in launch.args.values() if isinstance(value, torch.Tensor)]


def test_the_portable_path_is_recorded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONLLM_PORTABLE", "1")
    launches = start("sm_90")
    assert not names(launches) & HOPPER_ONLY
    assert not any("launch_pdl" in launch.options for launch in launches)


def test_one_recording_leaves_nothing_for_the_next() -> None:
    cpu, before = torch.device("cpu"), gpu_of(torch.device("cpu"))
    first = distinct(start("sm_90"), TARGETS["sm_90"])
    assert (gpu_of(cpu), nvidia_capability(cpu)) == (before, (0, 0))
    start("sm_80")
    assert distinct(start("sm_90"), TARGETS["sm_90"]).keys() == first.keys()
    x, weight = torch.ones(2, 64), torch.ones(64)
    with recording(TARGETS["sm_80"].counts_as) as launches:
        rms_norm(x, weight, 1e-6)
    assert names(launches) == {"_rms_norm_kernel"}
    rms_norm(x, weight, 1e-6)
    assert len(launches) == 1


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interpreting", lambda: True)
    with pytest.raises(ConfigError, match="unset TRITON_INTERPRET"):
        start("sm_80")
