"""What a name means to the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_registry import FakeEntryPoint, plugin_module, spec

from tritonllm.conformance.subjects import Subject, load_spec, specs_named, subjects
from tritonllm.errors import CheckpointError, PluginError
from tritonllm.hookspecs import ModelSpec
from tritonllm.models import BUILTIN_SPECS
from tritonllm.registry import BUILTIN, ModelRegistry

SPEC = ModelSpec(name="mine", model="m:M", checkpoints=("mine",))


def test_a_spec_by_its_module() -> None:
    assert load_spec(f"{__name__}:SPEC") is SPEC
    with pytest.raises(PluginError, match="named like 'package.module:SPEC', got 'package.module'"):
        load_spec("package.module")
    with pytest.raises(PluginError, match="must be a ModelSpec, got tuple"):
        load_spec("tritonllm.models:BUILTIN_SPECS")
    with pytest.raises(PluginError, match="'no_such_package:SPEC' cannot be loaded"):
        load_spec("no_such_package:SPEC")


def test_distribution_entry_point_spec_checkpoint_architecture_and_folder(tmp_path: Path) -> None:
    toys = [spec(name, checkpoints=(f"{name}-1M",), architectures=(f"{name}LM",)) for name in ("a", "b", "c")]
    points = [
        FakeEntryPoint("first", plugin_module(*toys[:2]), "Tritonllm.Toys"),
        FakeEntryPoint("second", plugin_module(toys[2]), "Tritonllm.Toys"),
        FakeEntryPoint("broken", ImportError("gone"), "tritonllm-broken"),
    ]
    registry = ModelRegistry(points)
    (tmp_path / "config.json").write_text('{"architectures": ["bLM"]}')
    with pytest.warns(UserWarning, match="'broken' of tritonllm-broken"):
        assert specs_named("tritonllm-toys", registry) == toys
    assert specs_named("first", registry) == toys[:2]
    assert specs_named("c", registry) == toys[2:]
    assert specs_named("a-1M", registry) == specs_named("aLM", registry) == toys[:1]
    assert specs_named(str(tmp_path), registry) == toys[1:2]
    assert specs_named("Qwen3-0.6B", registry)[0].name == "qwen3"
    builtin = [spec for owner, spec in registry.specs() if owner == BUILTIN]
    assert specs_named("tritonllm-engine", registry) == specs_named("tritonllm", registry) == builtin
    for name in ("broken", "tritonllm-broken"):
        with pytest.raises(PluginError, match="Plugin 'broken' of tritonllm-broken 1.0 failed: ImportError: gone"):
            specs_named(name, registry)


def test_a_checkpoint_is_kept_with_its_family(tmp_path: Path) -> None:
    folder = str(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    qwen3 = next(spec for spec in BUILTIN_SPECS if spec.name == "qwen3")
    assert subjects([folder, "qwen3", "qwen3"]) == [Subject(qwen3, folder), Subject(qwen3)]
    assert subjects([], [f"{__name__}:SPEC"]) == [Subject(SPEC)]
    assert subjects([folder], [f"{__name__}:SPEC"]) == [Subject(SPEC, folder)]
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not readable as a config.json"):
        subjects([folder])
