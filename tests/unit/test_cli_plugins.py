"""The commands around plugins: the list, with what is wrong; a package to begin with; the kit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tritonllm
from tritonllm.cli import main
from tritonllm.registry import ModelRegistry

SOURCE = Path(tritonllm.__file__).parents[1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run(*args)`: exit code, standard output and standard error of the command line."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(args)
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`installed(name=fields)`: plugins with one spec of these fields, which must be Python source."""

    def install(**specs: str) -> None:
        for name, fields in specs.items():
            (tmp_path / f"installed_{name}.py").write_text(
                "from tritonllm import ModelSpec, hookimpl\n@hookimpl\ndef tritonllm_register_models(register):\n"
                f"    register(ModelSpec(name={name!r}, model='m:M', {fields}))\n"
            )
        points = [importlib.metadata.EntryPoint(name, f"installed_{name}", "tritonllm") for name in specs]
        found = ModelRegistry(points)
        monkeypatch.syspath_prepend(tmp_path)
        # In this order: a module that is imported behind the first would keep what stands in for it.
        monkeypatch.setattr("tritonllm.conformance.subjects.default_registry", lambda: found)
        monkeypatch.setattr("tritonllm.registry.default_registry", lambda: found)

    yield install
    for name in [name for name in sys.modules if name.startswith("installed_")]:
        del sys.modules[name]


class TestList:
    def test_everything_that_a_plugin_serves(self, run, installed) -> None:
        installed(good="checkpoints=('Good-1M', 'Good-2M'), architectures=('GoodForCausalLM',)")
        code, out, err = run("plugins")
        assert (code, err) == (0, "")
        assert out.startswith("good = installed_good  from an unknown distribution")
        assert "checkpoints: Good-1M, Good-2M" in out
        assert "architectures: GoodForCausalLM" in out
        (good,) = json.loads(run("plugins", "--json")[1])
        assert (good["checkpoints"], good["architectures"]) == (["Good-1M", "Good-2M"], ["GoodForCausalLM"])
        assert good["conflicts"] == []

    def test_two_claims_on_one_name_are_told_and_are_a_failure(self, run, installed) -> None:
        installed(mine="checkpoints=('Qwen3-0.6B',)", other="checkpoints=('Other-1M',)")
        code, out, _ = run("plugins")
        assert code == 1
        assert "conflict: 'Qwen3-0.6B' is claimed by 'mine' of an unknown distribution and by 'qwen3'" in out
        code, out, _ = run("plugins", "--json")
        assert code == 1
        assert "'Qwen3-0.6B' is claimed by" in json.loads(out)[0]["conflicts"][0]


class TestNew:
    def test_it_is_written_into_the_working_folder(self, run, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        code, out, err = run("plugins", "new", "lantern")
        assert (code, err) == (0, "Next: pip install -e ./lantern && tritonllm plugins check lantern\n")
        assert out.split() == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
        assert {"lantern/pyproject.toml", "lantern/src/tritonllm_lantern/model.py"} <= set(out.split())
        code, out, err = run("plugins", "new", "lantern")
        assert (code, out) == (1, "")
        assert "lantern exists already" in err

    @pytest.mark.parametrize(
        ("name", "taken"),
        [
            ("Qwen3-0.6B", "'Qwen3-0.6B'"),
            ("qwen3", "'qwen3'"),
            ("llama", "'llama'"),
            ("Mistral", "'MistralForCausalLM'"),
        ],
    )
    def test_names_that_are_served_already_are_refused(self, run, tmp_path, monkeypatch, name, taken) -> None:
        monkeypatch.chdir(tmp_path)
        code, _, err = run("plugins", "new", name)
        assert code == 1
        assert f"{taken} belongs to a family of tritonllm (built-in): choose another name" in err
        assert list(tmp_path.iterdir()) == []


class TestCheck:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """What pytest was started with, in place of starting it; it says that a test failed."""
        calls: list[list[str]] = []
        monkeypatch.setattr(pytest, "main", lambda args: calls.append(args) or pytest.ExitCode.TESTS_FAILED)
        return calls

    def test_the_kit_is_run_and_its_failure_is_the_command_s(self, run, started) -> None:
        assert run("plugins", "check", "qwen3", "--device", "cpu")[0] == 1
        (args,) = started
        assert args[args.index("--pyargs") + 1] == "tritonllm.conformance"
        assert {"--tritonllm-model=qwen3", "--tritonllm-device=cpu"} <= set(args)

    def test_the_configuration_of_the_folder_s_own_tests_has_no_effect(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "planted_families.py").write_text(PLANTED)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_functions = check_*\n")
        monkeypatch.setenv("PYTHONPATH", str(SOURCE))
        code = (
            "import sys, planted_families, tritonllm; from tritonllm.cli import main\n"
            "tritonllm.register(planted_families.NONE); sys.argv[1:] = ['plugins', 'check', 'none']; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 1
        assert "test_conformance.py::test_conformance[none-loads] FAILED" in done.stdout, done.stderr

    def test_success(self, run, monkeypatch) -> None:
        monkeypatch.setattr(pytest, "main", lambda args: pytest.ExitCode.OK)
        assert run("plugins", "check", "Qwen3-0.6B")[0] == 0

    def test_an_unknown_name_and_a_wrong_device_start_nothing(self, run, started) -> None:
        code, _, err = run("plugins", "check", "Qwen9")
        assert code == 1
        assert err.startswith("error: No model serves checkpoint 'Qwen9'")
        assert run("plugins", "check", "qwen3", "--device", "tpu")[0] == 2
        assert started == []

    def test_without_pytest_it_says_what_to_install(self, run, monkeypatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else find(name))
        code, _, err = run("plugins", "check", "qwen3")
        assert code == 1
        assert "pip install 'tritonllm-engine[testing]'" in err


PLANTED = """
from tritonllm import ModelSpec
from tritonllm.models.llama import LlamaForCausalLM
from tritonllm.testing import tiny_hf_config

class Raises(LlamaForCausalLM):
    def forward(self, input_ids, positions, kv_cache, attn):
        return None + input_ids

def gone():
    raise RuntimeError("boom")

def none():
    pass

def reference():
    return tiny_hf_config("llama")

def spec(name, reference):
    fields = {"architectures": ("LlamaForCausalLM",), "reference": f"planted_families:{reference}"}
    return ModelSpec(name=name, model="planted_families:Raises", **fields)

GONE, NONE, RAISES = spec("gone", "gone"), spec("none", "none"), spec("raises", "reference")
"""


class TestPytestPlugin:
    """The options of the kit, in pytest processes of their own."""

    def pytest(self, *args: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-p", "tritonllm.conformance.plugin", "-p", "no:cacheprovider"]
        return subprocess.run([*command, *args], capture_output=True, text=True, timeout=120, cwd=SOURCE.parent)

    def test_it_brings_nothing_heavy(self) -> None:
        code = (
            "import sys, pytest\nbefore = set(sys.modules)\nimport tritonllm.conformance.plugin\n"
            "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE)
        assert set(done.stdout.split()) <= {"tritonllm"}

    def test_the_entry_point_is_called_like_its_module(self) -> None:
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
        (point,) = project["entry-points"]["pytest11"].items()
        assert point == ("tritonllm.conformance.plugin", "tritonllm.conformance.plugin")
        assert {need.split(">")[0] for need in project["optional-dependencies"]["testing"]} == {"hypothesis", "pytest"}

    def test_a_name_that_means_nothing_is_wrong_usage(self) -> None:
        done = self.pytest("--pyargs", "tritonllm.conformance", "--tritonllm-model", "Qwen9")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert done.stderr.startswith("ERROR: No model serves checkpoint 'Qwen9'")
        done = self.pytest("--pyargs", "tritonllm.conformance", "--tritonllm-spec", "tritonllm.models:BUILTIN_SPECS")
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert "must be a ModelSpec, got tuple" in done.stderr

    def test_without_a_name_it_asks_for_one_and_fails(self) -> None:
        done = self.pytest("--pyargs", "tritonllm.conformance")
        assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        assert "no family is named: give --tritonllm-model NAME_OR_PATH or --tritonllm-spec" in done.stdout

    def test_an_error_in_a_family_s_own_code_is_told_once_and_with_its_place(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "planted_families.py").write_text(PLANTED)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SOURCE}")
        kit = ["--pyargs", "tritonllm.conformance", "-k", "loads or layers", "-rs"]
        specs = [
            part for name in ("GONE", "NONE", "RAISES") for part in ("--tritonllm-spec", f"planted_families:{name}")
        ]
        done = self.pytest(*kit, *specs, "--tritonllm-device", "cpu")
        assert "gone, loads: it raises RuntimeError: boom\n" in done.stdout
        assert "none, loads: 'planted_families:none' must return a transformers config, got None\n" in done.stdout
        assert "raises, layers: it raises TypeError: unsupported operand" in done.stdout
        assert done.stdout.count('planted_families.py", line ') == 2
        assert done.stdout.count("Traceback") == 2
        assert "3 failed, 1 passed, 2 skipped" in done.stdout

    def test_checks_are_listed_family_by_family(self) -> None:
        done = self.pytest(
            "--pyargs", "tritonllm.conformance", "--collect-only", "--tritonllm-model", "tritonllm-engine"
        )
        assert done.returncode == 0, done.stdout
        for spec in tritonllm.models.BUILTIN_SPECS:
            for check in ("loads", "layers", "logits and tokens", "preempted", "two ranks"):
                assert f"test_conformance[{spec.name}-{check}]" in done.stdout


def _processor_seconds(*args: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {"PYTHONPATH": str(SOURCE), "TRITONLLM_PLUGINS": "", "PATH": ""}
    subprocess.run([sys.executable, *args], env=env, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize(
    "args", [["-c", "import tritonllm"], ["-m", "tritonllm", "plugins"]], ids=["import", "plugins"]
)
def test_it_takes_less_than_0_3_seconds(args: list[str]) -> None:
    # Processor time, the best of some: the bound is for a quiet machine, and this one may be busy.
    assert any(_processor_seconds(*args) < 0.3 for _ in range(10))
