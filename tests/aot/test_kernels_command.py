"""`tritonllm kernels`: what it prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tritonllm.cli import main
from tritonllm.cli.kernels import _table
from tritonllm.kernels import targets
from tritonllm.kernels.compile_matrix import Compiled, compile_all, compile_one
from tritonllm.kernels.recording import GPU
from tritonllm.kernels.targets import TARGETS, parse_targets, present_target
from tritonllm.kernels.variant import Variant
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

SMALL = ["--dtype", "bfloat16", "--max-num-sequences", "1", "--max-num-batched-tokens", "16", "--enforce-eager"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_checkpoint(tiny_hf_config("llama", heads="4/2x128"), folder, tokenizer=False)
    return str(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["kernels", *args])
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


def test_json_says_how_each_kernel_came_out(model: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("compile", "--model", model, "--target", "cuda:80", "--json", *SMALL)
    assert (code, err) == (0, "")
    results = json.loads(out)
    assert all(result["ok"] and result["target"] == "sm_80" and result["spills"] == 0 for result in results)
    assert all(0 < result["registers"] < 256 and result["shared_limit"] == 163 * 1024 for result in results)
    (attention,) = [result for result in results if result["kernel"] == "_prefill_attention_kernel"]
    assert attention["tensor_core"] == ["mma.sync"]
    assert attention["shared"] > 32 * 1024
    assert attention["shapes"].startswith("2x4x128 2x256x2x128")  # a prompt's token beside a decode row


def test_more_shared_memory_than_there_is_fails(
    model: str, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "sm_80", dataclasses.replace(TARGETS["sm_80"], shared_limit=1024))
    code, out, _ = run("compile", "--model", model, "--target", "cuda:80", *SMALL)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("FAIL ")]
    assert any("_prefill_attention_kernel" in line and line.endswith("of shared memory, of 1024") for line in lines)
    titles, *rows = out.splitlines()
    assert titles.split()[:2] == ["kernel", "first"]
    assert sum(" FAIL " in row for row in rows if not row.startswith("FAIL")) == len(lines)
    assert rows[-1] == f"{len(rows) - 1 - 2 * len(lines)} of {len(rows) - 1 - len(lines)} kernels are ok."


def test_spills_fail_on_request_alone(
    model: str, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spilling = Compiled("_norm_kernel", "sm_80", 0, 1024, 255, 16, ())
    monkeypatch.setattr("tritonllm.cli.kernels._compile", lambda *_: [(spilling, _NoLaunch())])
    assert run("compile", "--model", model)[0] == 0
    code, out, _ = run("compile", "--model", model, "--strict")
    assert code == 1
    assert "FAIL _norm_kernel (2x3) for sm_80: 16 spilled" in out


class _NoLaunch:
    args = {"x_ptr": torch.empty(2, 3), "scale": 1.0}


def test_a_kernel_that_does_not_compile_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one on which the compiler crashes; the others are not touched by it."""
    (tmp_path / "wrong_kernels.py").write_text("import os\nclass crash:\n    is_gluon = staticmethod(os.abort)\n")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = [Variant("wrong_kernels", name, GPUTarget("cuda", 80, 32), (), (), (), ()) for name in ("crash", "absent")]
    results = list(compile_all([(variant, TARGETS["sm_80"]) for variant in wrong], workers=1))
    assert [result.kernel for result in results] == ["crash", "absent"]
    assert not any(result.ok for result in results)
    assert results[0].error == "the compiler crashed"
    assert "no attribute 'absent'" in (results[1].error or "")
    assert compile_one(wrong[1], TARGETS["sm_80"]) == results[1]
    assert "FAIL absent" in _table([{**dataclasses.asdict(results[1]), "shapes": "", "ok": False}])


def test_targets_are_read_from_text() -> None:
    assert parse_targets([]) == list(TARGETS.values())
    assert [target.name for target in parse_targets(["cuda:90,86", "hip:gfx942", "cuda:90"])] == [
        "sm_90",
        "sm_86",
        "gfx942",
    ]
    assert [target.num_sms for target in parse_targets(["cuda:80"], 7)] == [7]


@pytest.mark.parametrize(("arch", "spelling"), [(90, r"mma\.sync|wgmma"), (103, "tcgen05")])
def test_the_gpu_at_hand_is_taken_as_it_is(arch: int, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own multiprocessors, and a family that is not in the list."""
    gpu = GPUTarget("cuda", arch, 32)
    active = SimpleNamespace(get_current_target=lambda: gpu)
    facts = GPU(divmod(arch, 10), 227 * 1024, 114)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(targets.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(targets, "gpu_of", lambda device: facts)
    target = present_target()
    assert target is not None
    assert (target.name, target.gpu, target.counts_as) == (f"sm_{arch}", gpu, facts)
    assert spelling in target.tensor_core


@pytest.mark.parametrize("text", ["cuda:75", "cuda:", "90", "hip:90", "cuda:gfx942", "cuda:80, 90", ""])
def test_an_unknown_target_is_wrong_usage(text: str, model: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run("compile", "--model", model, "--target", text)
    assert (code, out) == (2, "")
    assert "is no target; those known are cuda:80, cuda:86" in " ".join(err.split())


def test_precompiling_is_for_one_gpu(
    model: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("precompile", "--model", model, "--out", str(tmp_path))
    assert code == 2
    assert "there is no GPU here: name one with --target, such as --target cuda:90" in " ".join(err.split())
    code, _, err = run("precompile", "--model", model, "--out", str(tmp_path), "--target", "cuda:80,90")
    assert code == 2
    assert "names 2 GPUs" in " ".join(err.split())


def test_a_wrong_value_of_the_engine_is_wrong_usage(model: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("compile", "--model", model, "--dtype", "int4")
    assert code == 2
    assert "dtype" in err
