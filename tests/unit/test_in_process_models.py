"""Families registered in a notebook or a script: they serve at once, and reach other ranks or are refused before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from in_process_models import SIZES

import tritonllm
from tritonllm import LLMEngine, ModelSpec
from tritonllm.errors import PluginError
from tritonllm.models.llama import LlamaForCausalLM
from tritonllm.registry import ModelRegistry, check_ranks_can_import, default_registry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ModelRegistry:
    """A registry of the test's own in place of the process's."""
    made = ModelRegistry([])
    monkeypatch.setattr("tritonllm.engine.resolve.default_registry", lambda: made)
    monkeypatch.setattr("tritonllm.registry.default_registry", lambda: made)
    return made


def of_main(**fields: object) -> ModelSpec:
    return ModelSpec(**{"name": "mine", "model": "__main__:Mine", "checkpoints": ("mine",), **fields})


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`__main__` as a notebook has it: no file, and no module that could be imported elsewhere."""
    module = types.ModuleType("__main__")
    module.Mine = type("Mine", (LlamaForCausalLM,), {})
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_registered_family_serves_in_front_of_all_others(registry: ModelRegistry) -> None:
    mine = of_main(model="tritonllm.models.llama:LlamaForCausalLM", checkpoints=("Qwen3-0.6B",))
    tritonllm.register(mine)
    assert registry.resolve("Qwen3-0.6B") is mine
    with pytest.raises(PluginError, match="Only a ModelSpec can be added, got 'mine'"):
        tritonllm.register("mine")
    assert mine not in [spec for _, spec in ModelRegistry([]).specs()]
    assert default_registry() is not registry


def test_a_class_of_a_notebook_serves_on_one_rank_and_is_refused_on_two(registry, notebook, monkeypatch) -> None:
    tritonllm.register(of_main())
    with LLMEngine("mine", **SIZES) as engine:
        assert type(engine.runner.model) is notebook.Mine
    monkeypatch.setattr("tritonllm.engine.ranks.Ranks.__init__", lambda *args: pytest.fail("ranks were started"))
    with pytest.raises(PluginError, match="'__main__:Mine' is defined in this session, .* use world_size=1"):
        LLMEngine("mine", world_size=2, **SIZES)


def test_a_spec_may_be_given_to_the_engine_and_is_registered_nowhere(registry, notebook) -> None:
    with LLMEngine("any-name", spec=of_main(), **SIZES) as engine:
        assert engine.runner.resolved.spec == of_main()
    assert of_main() not in [spec for _, spec in registry.specs()]


def test_a_class_that_is_not_there_is_an_error_before_anything_is_allocated(notebook, monkeypatch) -> None:
    monkeypatch.setattr(
        "tritonllm.engine.llm_engine.ModelRunner", lambda *args, **keys: pytest.fail("a runner was made")
    )
    with pytest.raises(PluginError, match="'__main__:Absent' cannot be loaded: AttributeError"):
        LLMEngine("any-name", spec=of_main(model="__main__:Absent"), **SIZES)


class NotAModule:
    """Has the methods of a model class, and is none."""

    def __init__(self, config, tp) -> None:
        pass

    def forward(self, input_ids, positions, kv_cache, attn):
        pass

    def compute_logits(self, hidden):
        pass


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("__main__:Mine", "spec='__main__:Mine' is no ModelSpec"),
        (NotAModule, r"spec=<class '.*NotAModule'> is no ModelSpec: make one"),
        (of_main(model=f"{__name__}:NotAModule"), "'mine': '.*:NotAModule' is no torch.nn.Module: subclass it"),
        (of_main(config="builtins:dict"), "'builtins:dict' must return a ModelConfig, got <class 'dict'>"),
    ],
)
def test_what_is_no_spec_no_module_or_no_configuration_is_refused_in_words(notebook, spec, words) -> None:
    with pytest.raises(PluginError, match=words):
        # The shape of this one is shipped, so its config.json is read.
        LLMEngine("Qwen3-0.6B", load_format="dummy", device="cpu", max_model_length=64, spec=spec)


@pytest.mark.parametrize("where", ["a script", "python -m", "another module"])
def test_what_ranks_can_import_is_let_through(notebook: types.ModuleType, where: str) -> None:
    if where == "a script":
        notebook.__file__ = __file__
    elif where == "python -m":
        notebook.__spec__ = types.SimpleNamespace(name="package.module")
    check_ranks_can_import(of_main(model="package.module:Mine" if where == "another module" else "__main__:Mine"))


def test_a_class_of_a_script_reaches_the_ranks_unless_it_stands_below_the_main_guard() -> None:
    script = Path(__file__).parent / "in_process_models.py"
    env = {**os.environ, "PYTHONPATH": str(Path(tritonllm.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(set(found["one"])) > 1
    assert found["two"] == found["one"]
    assert found["refusal"].startswith("EngineError: rank 1 of 2 failed")
    assert "'__main__:Below' cannot be loaded" in found["refusal"]
    assert "so the class must stand above the script's main guard" in found["refusal"]
