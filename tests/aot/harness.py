"""Compiling launches for GPUs that are not here, and reading what the compiler made of them."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tritonllm.kernels.launch import Launch
from tritonllm.kernels.tuning import shipped_tuning
from tritonllm.kernels.tuning_table import Tuning

CASES_FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    """One op at one shipped shape.

    Attributes:
        name: unique within its file, for example "qwen3-0.6b".
        build: makes the launches from meta tensors.
        sized: `build` takes `shared_memory`, the bytes that the target offers, and picks its tiles by it.
        tuned: `build` takes `tuning`, the table that the target's users run by.
        dot: the kernels must use tensor cores.
        only: the targets that the kernels exist for; empty for all.
        may_spill: registers may spill; only for shapes that ship with that on purpose (head_dim above 128).
    """

    name: str
    build: Callable[..., list[Launch]]
    dot: bool = False
    may_spill: bool = False
    sized: bool = False
    tuned: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A GPU family: its shared memory for one program in bytes, and how its tensor-core instructions are spelled."""

    name: str
    gpu: GPUTarget
    shared_limit: int
    tensor_core: str

    @property
    def tuning(self) -> Tuning:
        """The table shipped for this family; `UNTUNED` if there is none."""
        number = self.gpu.arch if self.gpu.backend == "cuda" else 0
        return shipped_tuning(divmod(number, 10))


def _nvidia(capability: int, shared_limit: int, tensor_core: str) -> Target:
    return Target(f"sm_{capability}", GPUTarget("cuda", capability, 32), shared_limit, tensor_core)


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 163 * 1024, r"mma\.sync"),
        _nvidia(89, 99 * 1024, r"mma\.sync"),
        _nvidia(90, 227 * 1024, r"mma\.sync|wgmma"),
        _nvidia(100, 227 * 1024, r"mma\.sync|tcgen05"),
        _nvidia(120, 99 * 1024, r"mma\.sync"),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, r"v_mfma"),
    )
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of this shape without storage: all that a plan reads."""
    return torch.empty(shape, dtype=dtype, device="meta")


@cache
def all_cases() -> dict[str, Case]:
    """Every case of every file in cases/, by "file-name"."""
    found: dict[str, Case] = {}
    for file in sorted(CASES_FOLDER.glob("*.py")):
        for case in importlib.import_module(f"{CASES_FOLDER.name}.{file.stem}").CASES:
            key = f"{file.stem}-{case.name}"
            if key in found:
                raise ValueError(f"{file} has two cases named {case.name!r}")
            found[key] = case
    return found


@dataclass(frozen=True)
class Compiled:
    """What the checks look at. `spills` counts bytes on NVIDIA, registers on AMD."""

    kernel: str
    shared: int
    uses_tensor_cores: bool
    spills: int


def launches_on(case: Case, target: Target) -> list[Launch]:
    """The launches of a case as the users of a GPU family get them."""
    device = {"shared_memory": target.shared_limit} if case.sized else {}
    table = {"tuning": target.tuning} if case.tuned else {}
    return case.build(**device, **table)


def compile_case(case_key: str, target_name: str) -> list[Compiled]:
    """Compile every launch of a case; runs in a worker process, so it takes and returns plain values."""
    case, target = all_cases()[case_key], TARGETS[target_name]
    return [_compile(launch, target) for launch in launches_on(case, target)]


def _compile(launch: Launch, target: Target) -> Compiled:
    compiled: Any = launch.aot(target.gpu)
    assembly = compiled.asm["amdgcn" if target.gpu.backend == "hip" else "ptx"]
    return Compiled(
        kernel=launch.kernel.fn.__name__,
        shared=compiled.metadata.shared,
        uses_tensor_cores=re.search(target.tensor_core, assembly) is not None,
        spills=_amd_spills(assembly) if target.gpu.backend == "hip" else _nvidia_spills(compiled.asm["cubin"]),
    )


def _amd_spills(assembly: str) -> int:
    """Vector registers spilled: those of a kernel go to memory (scalar ones go to vector registers)."""
    return sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly))


def _nvidia_spills(cubin: bytes) -> int:
    """Bytes of stack and local memory of one thread. Our kernels have no local arrays, so any of it is a spill."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
