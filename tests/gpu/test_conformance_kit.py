"""The conformance kit on a GPU: every built-in family, and one of a package."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tritonllm import LLMEngine, ModelSpec, SamplingParams, conformance
from tritonllm.models import BUILTIN_SPECS
from tritonllm.plugin_scaffold import write_plugin
from tritonllm.testing import save_tiny_checkpoint
from tritonllm.testing.hf_comparison import reference_config

OVERLAY = Path(__file__).parents[1] / "plugins" / "exaone4"


@pytest.fixture
def exaone4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSpec]:
    """The family that tests/plugins installs, from a folder on the path."""
    source = write_plugin("exaone4", tmp_path) / "src"
    for file in OVERLAY.glob("*.py"):
        shutil.copy(file, source / "tritonllm_exaone4")
    monkeypatch.syspath_prepend(source)
    yield importlib.import_module("tritonllm_exaone4.plugin").SPEC
    for name in [name for name in sys.modules if name.startswith("tritonllm_exaone4")]:
        del sys.modules[name]


@pytest.mark.parametrize("spec", BUILTIN_SPECS, ids=lambda spec: spec.name)
def test_every_family_passes(spec: ModelSpec) -> None:
    conformance.check(spec, device="cuda")


def test_a_family_of_a_package_passes(exaone4: ModelSpec) -> None:
    conformance.check(exaone4, device="cuda")


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_generates_what_transformers_does(exaone4: ModelSpec, tmp_path: Path, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs two CUDA devices")
    twin = save_tiny_checkpoint(reference_config(exaone4), tmp_path / "tiny", tokenizer=False)
    prompt = list(range(5, 45))
    expected = list(prompt)
    for _ in range(24):
        expected.append(int(twin(torch.tensor([expected])).logits[0, -1].argmax()))
    keys = {"dtype": "float32", "device": "cuda", "max_model_length": 64, "max_cached_blocks": 8}
    with LLMEngine(str(tmp_path / "tiny"), spec=exaone4, world_size=world_size, **keys) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        assert llm.generate([prompt], greedy)["token_ids"] == [expected[40:]]
