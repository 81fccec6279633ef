"""Kernels compiled side by side, through a driver that pretends to be a Hopper GPU: nothing can be launched here."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading
from concurrent.futures import wait
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, driver

made_launchers = []
passing = True


class Pretended:
    def launcher_cls(self, source, metadata):
        made_launchers.append((source.fn, threading.current_thread() is threading.main_thread() or passing))

        def launched(*args):
            raise RuntimeError("there is no GPU")

        return launched

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


driver.set_active(Pretended())

from tritonllm.kernels import launch
from tritonllm.kernels.hopper_linear import plan_hopper_linear
from tritonllm.kernels.norm import plan_rms_norm


def made(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


launches = [plan_rms_norm(made(4, columns), made(columns), made(4, columns), 1e-6) for columns in (256, 512)]
launches.append(plan_hopper_linear(made(64, 1024), made(4096, 1024), made(64, 4096)))
with launch.compiling_ahead():
    for each in launches * 2:
        each._launch(0)
    wait(_async_compile.active_mode.get().raw_futures)
    passing = False
compiled = [kernel for each in launches[1:] for kernel in each.kernel.device_caches[0][0].values()]
assert [bool(kernel.asm["cubin"]) for kernel in compiled] == [True] * 3, compiled
assert sorted(map(str, made_launchers)) == sorted(str((kernel.src.fn, False)) for kernel in compiled), made_launchers
assert all(kernel.module is None for kernel in compiled), "a launcher that a thread made may be another kernel's"
assert not launch._compiled, "nothing was launched"
BROKEN
print("all compiled")
"""


def run(broken: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("BROKEN", broken)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)


def test_every_kernel_is_there_at_the_end_and_none_was_launched() -> None:
    done = run()
    assert done.stdout.endswith("all compiled\n"), done.stderr


def test_what_another_engine_compiled_is_not_launched_inside_either() -> None:
    """It might take for an index what kernels that are not compiled yet would have written."""
    inside = "with launch.compiling_ahead():\n    launches[0]._launch(1)\n"
    known = "launch._compiled = type('Known', (), {'get': lambda self, key: 'what launched it before'})()\n"
    done = run(inside + known + inside)
    assert done.stdout.endswith("all compiled\n"), done.stderr


@pytest.mark.parametrize("stage", ["inside", "indices", "outside"])
def test_an_error_of_the_compiler_is_raised_and_what_makes_indices_is_launched(stage: str) -> None:
    """With this driver a launch fails."""
    broken = {
        "inside": "launches[2].constexprs['WARPS'] = 3\nwith launch.compiling_ahead():\n    launches[2]._launch(0)",
        "indices": "with launch.compiling_ahead():\n    replace(launches[0], makes_indices=True)._launch(0)",
        "outside": "launches[0]._launch(0)",
    }[stage]
    done = run(broken)
    assert done.returncode != 0
    assert "all compiled" not in done.stdout
