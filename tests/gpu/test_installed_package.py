"""A package of somebody's own on a GPU, installed by pip beside tritonllm and beside two broken ones."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from clean_environment import Environment, make_environment, what_is_missing

pytestmark = pytest.mark.skipif(what_is_missing() is not None, reason=what_is_missing() or "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_found_by_name_and_by_architecture(environment: Environment, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs two CUDA devices")
    done = environment.generate("cuda", world_size)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(set(result["expected"])) > 3
    assert result["found"] == [["exaone4", "cuda", result["expected"]]] * 2


def test_the_kit_passes_on_it(environment: Environment) -> None:
    done = environment.check("cuda")
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


def test_the_broken_ones_are_named(environment: Environment) -> None:
    listed = environment.run("-m", "tritonllm", "plugins").stdout
    folder = environment.checkpoints / "nobodys"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"]}))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    refused = environment.run("-m", "tritonllm", "generate", str(folder), "Hello").stderr
    for name in ("gone", "misspelled"):
        assert f"from tritonllm-{name} 0.1.0" in listed
        assert f"Plugin '{name}' of tritonllm-{name} 0.1.0 failed" in refused
