"""The doctor: what a machine may lack is a finding with its fix, and never an exception."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tritonllm.cli import environment, main
from tritonllm.cli.environment import NOTE, OK, PROBLEM, Finding
from tritonllm.registry import ModelRegistry


def only(look: Any) -> Finding:
    (finding,) = look()
    return finding


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which an NVIDIA driver says its version."""
    file = tmp_path / "driver"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 1\nGCC version: 12\n")
    monkeypatch.setattr(environment, "_DRIVER", file)
    return file


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without one."""
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr("shutil.which", lambda name: None)


def fake_torch(cuda: str | None, *devices: tuple[int, int]) -> types.SimpleNamespace:
    """torch as built for this CUDA, on a machine with devices of these capabilities."""
    properties = [types.SimpleNamespace(name="GPU", major=a, minor=b, total_memory=80 << 30) for a, b in devices]
    return types.SimpleNamespace(
        __version__="2.13.0",
        version=types.SimpleNamespace(cuda=cuda, hip=None),
        cuda=types.SimpleNamespace(
            is_available=lambda: bool(devices),
            device_count=lambda: len(devices),
            get_device_properties=lambda index: properties[index],
        ),
    )


def test_everything_is_looked_at_and_only_problems_fail(monkeypatch, capsys) -> None:
    monkeypatch.setattr("tritonllm.registry.installed_plugins", list)
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert left.value.code == int(any(finding["status"] == PROBLEM for finding in findings))
    names = list(dict.fromkeys(finding["what"] for finding in findings))
    assert names == ["python", "torch", "triton", "driver", "gpu", "compiler", "cache", "interpreter", "plugins"]
    assert all(finding["fix"] for finding in findings if finding["status"] == PROBLEM)


@pytest.mark.parametrize("status", [OK, NOTE, PROBLEM])
def test_text_and_exit_code(monkeypatch, capsys, status: str) -> None:
    monkeypatch.setattr(environment, "examine", lambda: iter([Finding("torch", status, "is here", "Do something.")]))
    with pytest.raises(SystemExit) as left:
        main(["doctor"])
    assert left.value.code == (1 if status == PROBLEM else 0)
    out = capsys.readouterr().out
    assert out.split("\n")[0] == f"{status:8} torch        is here"
    assert out.split("\n")[1].endswith("-> Do something.")


class TestPackages:
    @pytest.mark.parametrize("package", ["torch", "triton"])
    def test_one_that_cannot_be_imported_is_named_with_the_reason(self, monkeypatch, package: str) -> None:
        def broken(name: str) -> None:
            raise OSError(f"lib{name}.so: wrong ELF class\nsecond line")

        monkeypatch.setattr(importlib, "import_module", broken)
        found = only(getattr(environment, f"_{package}"))
        assert (found.status, found.detail) == (PROBLEM, f"OSError: lib{package}.so: wrong ELF class")
        assert "pip install" in found.fix

    def test_a_build_for_cpus_beside_a_driver(self, monkeypatch, driver) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch(None))
        found = only(environment._torch)
        assert (found.status, found.fix) == (PROBLEM, "Install a CUDA build of torch.")
        monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0"))
        assert only(environment._torch).status == OK

    @pytest.mark.parametrize(
        ("version", "pinned", "status", "fix"),
        [
            ("3.5.1", None, PROBLEM, "pip install -U 'triton>=3.6'"),
            ("3.6.0", None, OK, ""),
            ("3.6.0", "triton==3.6.0; platform_system == 'Linux'", OK, ""),
            ("3.9.0", "triton==3.6.0; platform_system == 'Linux'", NOTE, "pip install 'triton==3.6.0'"),
        ],
    )
    def test_triton_s_version(self, monkeypatch, version: str, pinned: str | None, status: str, fix: str) -> None:
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["sympy", pinned] if pinned else None)
        found = only(environment._triton)
        assert found.status == status
        assert fix in found.fix

    @pytest.mark.parametrize(
        ("triton", "numpy", "on", "status"),
        [
            ("3.6.0", "2.4.6", "0", NOTE),
            ("3.6.0", "2.3.5", "0", OK),
            ("3.9.0", "2.4.6", "0", OK),
            ("3.9.0", "2.4.6", "1", NOTE),
            (None, "2.4.6", "0", NOTE),
        ],
    )
    def test_the_pair_that_interprets(self, monkeypatch, triton, numpy, on: str, status: str) -> None:
        monkeypatch.setattr(environment, "_version", {"triton": triton, "numpy": numpy}.get)
        monkeypatch.setenv("TRITON_INTERPRET", on)
        assert only(environment._interpreter).status == status


class TestGpu:
    def test_the_driver_s_version(self, driver: Path) -> None:
        assert only(environment._driver) == Finding("driver", OK, "NVIDIA 570.86.15")
        driver.write_text("something else\n")
        assert only(environment._driver).detail == "NVIDIA of an unknown version"

    @pytest.mark.usefixtures("no_driver")
    def test_no_driver_is_a_note_unless_its_tools_are_there(self, monkeypatch) -> None:
        assert only(environment._driver).status == NOTE
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        assert only(environment._driver).status == PROBLEM

    @pytest.mark.usefixtures("driver")
    def test_devices(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0", (9, 0), (7, 5)))
        hopper, turing = environment._gpu()
        assert (hopper.status, hopper.detail) == (OK, "0: GPU, sm_90, 80 GiB")
        assert (turing.status, turing.fix) == (PROBLEM, "The kernels are made for sm_80 and newer.")

    @pytest.mark.usefixtures("driver")
    def test_a_driver_and_no_device_is_a_problem(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0"))
        found = only(environment._gpu)
        assert found.status == PROBLEM
        assert "CUDA_VISIBLE_DEVICES" in found.fix

    @pytest.mark.usefixtures("no_driver")
    def test_no_gpu_at_all_is_a_note(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", fake_torch("13.0"))
        assert only(environment._gpu).status == NOTE


class TestCompiler:
    @pytest.mark.usefixtures("driver")
    def test_cc_that_is_no_program(self, monkeypatch) -> None:
        monkeypatch.setenv("CC", "/nonexistent")
        found = only(environment._compiler)
        assert (found.status, found.detail) == (PROBLEM, "CC=/nonexistent is no program")
        assert "Unset CC" in found.fix

    @pytest.mark.usefixtures("driver")
    def test_none_and_no_headers(self, monkeypatch, tmp_path) -> None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr("shutil.which", lambda name: None)
        assert "apt-get install gcc" in only(environment._compiler).fix
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        found = only(environment._compiler)
        assert found.status == PROBLEM
        assert "apt-get install python3-dev" in found.fix
        (tmp_path / "Python.h").touch()
        assert only(environment._compiler) == Finding("compiler", OK, "/usr/bin/gcc")

    @pytest.mark.usefixtures("no_driver")
    def test_without_a_gpu_it_is_a_note(self, monkeypatch) -> None:
        monkeypatch.delenv("CC", raising=False)
        assert only(environment._compiler).status == NOTE


class TestCache:
    def test_a_folder_that_is_not_there_yet(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a" / "b"))
        assert only(environment._cache).status == OK
        assert list(tmp_path.iterdir()) == []

    def test_a_file_in_its_place(self, monkeypatch, tmp_path) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
        found = only(environment._cache)
        assert found.status == PROBLEM
        assert f"{tmp_path / 'file'} is no folder" in found.detail
        assert "TRITON_CACHE_DIR" in found.fix

    def test_one_that_cannot_be_written_or_run_from_or_is_full(self, monkeypatch, tmp_path) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode: False)
            assert "cannot be written to" in only(environment._cache).detail
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
            assert "without execution" in only(environment._cache).detail
        monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=1 << 28))
        assert "has 0.2 GiB left" in only(environment._cache).detail


class TestPlugins:
    def test_failures_conflicts_and_names_that_are_not_there(self, monkeypatch) -> None:
        from test_registry import FakeEntryPoint, plugin_module, spec

        points = [
            FakeEntryPoint("bad", ImportError("gone"), "tritonllm-bad"),
            FakeEntryPoint("mine", plugin_module(spec(checkpoints=("Qwen3-0.6B",))), "tritonllm-mine"),
        ]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
        monkeypatch.setenv("TRITONLLM_PLUGINS", "bad,mine,absent")
        findings = list(environment._plugins())
        assert {finding.status for finding in findings} == {PROBLEM}
        failed, absent, conflict = (finding.detail for finding in findings)
        assert failed == "Plugin 'bad' of tritonllm-bad 1.0 failed: ImportError: gone"
        assert absent == "TRITONLLM_PLUGINS names no installed plugin: absent."
        assert conflict.startswith("'Qwen3-0.6B' is claimed by 'qwen3' of tritonllm")

    def test_good_and_slow_ones(self, monkeypatch) -> None:
        from test_registry import FakeEntryPoint, plugin_module, spec

        point = FakeEntryPoint("toy", plugin_module(spec()), "tritonllm-toy")
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
        monkeypatch.delenv("TRITONLLM_PLUGINS", raising=False)
        assert only(environment._plugins) == Finding("plugins", OK, "toy (tritonllm-toy 1.0)")

        def slow(self: ModelRegistry, plugin: Any, point: Any) -> Any:
            return type(plugin)(plugin.name, plugin.value, plugin.distribution, plugin.version, imports_torch=True)

        monkeypatch.setattr(ModelRegistry, "_loaded", slow)
        found = only(environment._plugins)
        assert (found.status, found.detail) == (NOTE, "'toy' of tritonllm-toy 1.0 imports torch when it is listed")
