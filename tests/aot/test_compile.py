"""Each plan compiles for each supported GPU, fits its shared memory, uses its tensor cores and does not spill.

By default a case is compiled for Hopper and for MI300, which has the least shared memory, and the first case of each
file for most targets; `--slow` compiles the whole product.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from concurrent.futures import Future

import pytest
import triton
from harness import all_cases, launches_on

import tritonllm.kernels
from tritonllm.kernels.compile_matrix import Compiled
from tritonllm.kernels.targets import TARGETS, Target

_ALWAYS = ("sm_90", "gfx942")
_ALIKE = ("sm_86", "gfx1100")  # have the shared memory of others
_OLDEST = triton.__version__.startswith("3.6.")


def _pairs() -> list:
    pairs = []
    files_seen: set[str] = set()
    for key, case in all_cases().items():
        file = key.split("-", 1)[0]
        targets = _ALWAYS if file in files_seen else tuple(name for name in TARGETS if name not in _ALIKE)
        files_seen.add(file)
        for name in case.only or TARGETS:
            marks = () if name in targets else pytest.mark.slow
            pairs.append(pytest.param(key, name, id=f"{key}-{name}", marks=marks))
    return pairs


def _allowed_spills(target: Target) -> int:
    """None, but with Triton 3.6 two registers, 8 bytes, of a few kernels for NVIDIA GPUs before and after Hopper."""
    return 8 if _OLDEST and target.gpu.backend == "cuda" and target.name != "sm_90" else 0


@pytest.mark.parametrize(("case_key", "target_name"), _pairs())
def test_compiles(case_key: str, target_name: str, compilations: dict[tuple[str, str], Future[list[Compiled]]]) -> None:
    case, target = all_cases()[case_key], TARGETS[target_name]
    results = compilations[case_key, target_name].result()
    assert results, "the case launches nothing"
    for result in results:
        assert result.shared <= target.shared_limit, f"{result.kernel}: shared memory {result.shared}"
        assert case.may_spill or result.spills <= _allowed_spills(target), f"{result.kernel}: {result.spills} spilled"
    assert not case.dot or all(result.tensor_core for result in results), "no tensor-core instruction"


def _jitted_kernels() -> set[str]:
    """`module.name` of every jitted function named like a kernel in the package."""
    found = set()
    package = tritonllm.kernels
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, triton.JITFunction) and re.fullmatch(r"_\w+_kernel", name):
                found.add(f"{value.fn.__module__}.{name}")
    return found


def test_every_kernel_has_a_case() -> None:
    reached = {
        f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}"
        for case in all_cases().values()
        for launch in case.build()
    }
    assert _jitted_kernels() - reached == set(), "add a case in tests/aot/cases for these kernels"


def test_a_family_is_compiled_for_by_the_table_that_ships_for_it() -> None:
    """Qwen3-0.6B's gate and up of one token: two warps in Hopper's table, four by the rules."""
    case = all_cases()["skinny_linear-qwen3-0.6b-1"]
    warps = {name: launches_on(case, target)[2].options["num_warps"] for name, target in TARGETS.items()}
    assert warps == {name: 2 if name == "sm_90" else 4 for name in TARGETS}
    skinny = [case for key, case in all_cases().items() if key.startswith("skinny_linear-")]
    assert all(case.sized and case.tuned for case in skinny)


def test_rdna_alone_gets_more_warps_and_fewer_keys() -> None:
    """A tile takes twice the registers there, and nothing may spill."""

    def choices(key: str, target: str) -> list[tuple[int, int]]:
        launches = launches_on(all_cases()[key], TARGETS[target])
        return [(launch.options["num_warps"], launch.constexprs["BLOCK_N"]) for launch in launches]

    assert choices("attention-llama-3.2-1b", "gfx942") == [(4, 32), (2, 64)]
    assert choices("attention-llama-3.2-1b", "gfx1100") == [(8, 32), (8, 32)]
    assert choices("attention-head-dim-80", "gfx942") == [(4, 32), (4, 64)]
    assert choices("attention-head-dim-80", "gfx1100") == [(16, 16), (16, 16)]
    assert choices("fused_attention-head-dim-256", "gfx942") == [(4, 16)]
    assert choices("fused_attention-head-dim-256", "gfx1100") == [(16, 16)]
    saving = {name: launches_on(all_cases()["fused_attention-qwen3-0.6b"], target) for name, target in TARGETS.items()}
    for name, launches in saving.items():
        assert {launch.constexprs["SAVE_REGISTERS"] for launch in launches} == {name == "gfx1100"}


def test_arguments_are_in_the_order_of_the_kernel() -> None:
    """A launch passes them by position once its kernel is compiled."""
    for case in all_cases().values():
        for launch in case.build():
            assert [*launch.args, *launch.constexprs] == launch.kernel.arg_names
