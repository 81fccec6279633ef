"""A plugin to begin with: names that become packages, and a family that is right from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tritonllm import conformance
from tritonllm.conformance.subjects import load_spec
from tritonllm.errors import PluginError
from tritonllm.plugin_scaffold import plugin_files, write_plugin


@pytest.mark.parametrize(
    ("name", "distribution", "package", "architecture"),
    [
        ("lantern", "tritonllm-lantern", "tritonllm_lantern", "LanternForCausalLM"),
        ("Lantern", "tritonllm-Lantern", "tritonllm_lantern", "LanternForCausalLM"),
        ("tritonllm-lantern", "tritonllm-lantern", "tritonllm_lantern", "LanternForCausalLM"),
        ("Lantern-1.5B", "tritonllm-Lantern-1.5B", "tritonllm_lantern_1_5b", "Lantern15BForCausalLM"),
        ("my_model", "tritonllm-my_model", "tritonllm_my_model", "MyModelForCausalLM"),
    ],
)
def test_names(name: str, distribution: str, package: str, architecture: str) -> None:
    tomllib = pytest.importorskip("tomllib")
    files = plugin_files(name)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == distribution
    assert project["entry-points"] == {"tritonllm": {name: f"{package}.plugin"}}
    space: dict = {}
    exec(files[f"src/{package}/plugin.py"], space)
    spec = space["SPEC"]
    assert (spec.name, spec.checkpoints, spec.architectures) == (name, (name,), (architecture,))
    assert all(reference.startswith(f"{package}.") for reference in (spec.model, spec.config, spec.reference))
    assert not any("$" in path + text for path, text in files.items())


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "../a", "a--b", "-a", "a-", "ä"])
def test_names_that_no_package_can_have_are_refused(name: str) -> None:
    with pytest.raises(PluginError, match="letters and digits"):
        plugin_files(name)


@pytest.mark.parametrize("name", ["engine", "Engine", "tritonllm-engine", "tritonllm"])
def test_a_plugin_never_takes_the_place_of_the_engine(name: str) -> None:
    with pytest.raises(PluginError, match=f"cannot be called '{name}': that is this engine's own name"):
        plugin_files(name)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "lantern").mkdir()
    with pytest.raises(PluginError, match="lantern exists already: choose another name"):
        write_plugin("lantern", tmp_path)
    assert list((tmp_path / "lantern").iterdir()) == []


@pytest.fixture
def lantern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a new plugin, whose package can be imported."""
    folder = write_plugin("lantern", tmp_path)
    monkeypatch.syspath_prepend(folder / "src")
    yield folder
    for name in [name for name in sys.modules if name.startswith("tritonllm_lantern")]:
        del sys.modules[name]


def test_it_is_tidy(lantern: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--isolated", "--line-length", "120", "--target-version", "py310"]
    for command in (["check", "--select", "E,F,I,UP,B,SIM,W"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *config, "."], cwd=lantern, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("_one_thread")
def test_its_model_is_right(lantern: Path) -> None:
    conformance.check(load_spec("tritonllm_lantern.plugin:SPEC"), device="cpu")


def test_its_own_test_is_that_check(lantern: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(conformance, "check", checked.append)
    space: dict = {}
    exec((lantern / "tests" / "test_conformance.py").read_text(), space)
    space["test_the_model_computes_what_its_reference_does"]()
    assert checked == [load_spec("tritonllm_lantern.plugin:SPEC")]
