"""Programmatic dependent launch: what the compiled kernels ask for, and in which order, on the GPUs that have it."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from harness import meta

from tritonllm.kernels.compile_matrix import read
from tritonllm.kernels.kept_set import plan_kept_threshold, plan_sample_tokens
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.recording import recording
from tritonllm.kernels.targets import TARGETS

_skinny = importlib.import_module("cases.skinny_linear")
_LAUNCH, _WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
_WEIGHT_LOAD = r"ld\.global\S*evict_first\S*"


def _launches(target: str, tokens: int, model: str = "qwen3-0.6b") -> list[Launch]:
    tuning, shared_memory = TARGETS[target].tuning, TARGETS[target].shared_limit
    return _skinny.linears(_skinny.MODELS[model], tokens, shared_memory, pdl=True, tuning=tuning)


@pytest.mark.parametrize("tokens", [1, 8])
def test_weights_are_requested_before_the_wait(tokens: int) -> None:
    for launch in _launches("sm_90", tokens):
        ptx = launch.aot(TARGETS["sm_90"].gpu).asm["ptx"]
        assert ptx.count(_LAUNCH) == ptx.count(_WAIT) == 1
        before, after = ptx.split(_WAIT)
        assert _LAUNCH in before
        assert not re.search(r"st\.global", before)
        if "looped" not in launch.kernel.fn.__name__:
            loads = re.findall(_WEIGHT_LOAD, before)
            assert loads
            assert not re.findall(_WEIGHT_LOAD, after)
            assert all(".v4.b32" in load for load in loads), "not 16 bytes a thread"


@pytest.mark.parametrize("tokens", [8, 16])
def test_the_first_steps_of_a_long_row_are_requested_before_the_wait(tokens: int) -> None:
    """Two of the four of Llama's down projection, or of its eight for more tokens."""
    launch = _launches("sm_90", tokens, "llama-3.2-1b")[3]
    constexprs = launch.constexprs
    step = constexprs["SPLIT"] * constexprs["BLOCK_K"]
    assert constexprs["STAGES"] * step < constexprs["K"]
    before, after = launch.aot(TARGETS["sm_90"].gpu).asm["ptx"].split(_WAIT)
    first, rest = (len(re.findall(_WEIGHT_LOAD, part)) for part in (before, after))
    assert first * constexprs["K"] == (first + rest) * constexprs["STAGES"] * step


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_newer_gpus_compile_it_too(target: str) -> None:
    for tokens in (1, 8):
        compiled = _launches(target, tokens)[0].aot(TARGETS[target].gpu)
        assert _WAIT in compiled.asm["ptx"]
        assert read(compiled, TARGETS[target]).spills == 0


def test_without_it_the_instructions_are_not_there() -> None:
    launch = _skinny.linears(_skinny.MODELS["qwen3-0.6b"], 1, TARGETS["sm_90"].shared_limit)[0]
    assert "launch_pdl" not in launch.options
    assert "griddepcontrol" not in launch.aot(TARGETS["sm_90"].gpu).asm["ptx"]


def test_a_search_for_thresholds_reads_nothing_early() -> None:
    target = TARGETS["sm_90"]
    logits, top_ks = meta(64, 151936), meta(64, dtype=torch.int32)
    temperatures, top_ps, out = (meta(64, dtype=torch.float32) for _ in range(3))
    seeds, positions, tokens = meta(64, 2, dtype=torch.int32), *(meta(64, dtype=torch.int32) for _ in range(2))
    with recording(target.counts_as):
        plan = plan_kept_threshold(logits, temperatures, top_ks, top_ps, out)
        plan += plan_sample_tokens(logits, temperatures, top_ks, top_ps, seeds, positions, tokens)
    for launch in plan:
        compiled = launch.aot(target.gpu)
        assert launch.options["launch_pdl"]
        assert read(compiled, target).spills == 0
        before, _ = compiled.asm["ptx"].split(_WAIT)
        assert before.count(_LAUNCH) == 1
        assert not re.search(r"(ld|st|atom|red)\.\S*global", before)
