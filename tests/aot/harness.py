"""The launches that are compiled for GPUs that are not here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tritonllm.kernels.compile_matrix import Compiled, read
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.recording import recording
from tritonllm.kernels.targets import TARGETS, Target

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


def launches_on(case: Case, target: Target) -> list[Launch]:
    """The launches of a case as the users of a GPU family get them."""
    device = {"shared_memory": target.shared_limit} if case.sized else {}
    table = {"tuning": target.tuning} if case.tuned else {}
    with recording(target.counts_as) if target.gpu.backend == "hip" else nullcontext():  # it has no special forms
        return case.build(**device, **table)


def compile_case(case_key: str, target_name: str) -> list[Compiled]:
    """Compile every launch of a case; runs in a worker process, so it takes and returns plain values."""
    case, target = all_cases()[case_key], TARGETS[target_name]
    return [read(launch.aot(target.gpu), target) for launch in launches_on(case, target)]
