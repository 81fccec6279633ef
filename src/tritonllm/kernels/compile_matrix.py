"""Compiling many kernels side by side for GPUs that are not here, and reading what the compiler made of them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from tritonllm.kernels.launch import Launch
from tritonllm.kernels.targets import Target
from tritonllm.kernels.variant import Variant


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel. `spills` counts bytes on NVIDIA, vector registers on AMD.

    Attributes:
        kernel: its name.
        target: name of the GPU family.
        shared, shared_limit: bytes of shared memory it takes, and what the family offers.
        registers: of a thread.
        tensor_core: kinds of tensor-core instructions in it.
        error: why it did not compile, None if it did.
    """

    kernel: str
    target: str
    shared: int
    shared_limit: int
    registers: int
    spills: int
    tensor_core: tuple[str, ...]
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it compiled and fits."""
        return self.error is None and self.shared <= self.shared_limit


def distinct(launches: Iterable[Launch], target: Target) -> dict[Variant, Launch]:
    """What Triton compiles for these launches on a target, each with the first launch that needs it."""
    variants: dict[Variant, Launch] = {}
    for launch in launches:
        variants.setdefault(launch.variant(target.gpu), launch)
    return variants


def compile_all(
    jobs: Iterable[tuple[Variant, Target]], workers: int | None = None, cache: Path | None = None
) -> Iterator[Compiled]:
    """Compile in processes, and give the results in the order of the jobs, each as soon as it is there.

    Args:
        jobs: kernels, with the targets that they are for; compiling starts with the first.
        workers: processes; None for one a core.
        cache: the folder of Triton's cache; None for the usual one.
    """
    with _pool(workers or os.cpu_count() or 1, cache) as pool:
        submitted = [(job, pool.submit(compile_one, *job)) for job in jobs]
        for job, future in submitted:
            yield _result(future, job, cache)


def _result(future: Future[Compiled], job: tuple[Variant, Target], cache: Path | None) -> Compiled:
    try:
        return future.result()
    except BrokenProcessPool:  # a compiler that crashes takes the others of its pool with it
        pass
    with _pool(1, cache) as pool:
        try:
            return pool.submit(compile_one, *job).result()
        except BrokenProcessPool:
            return _failed(*job, "the compiler crashed")


def _pool(workers: int, cache: Path | None) -> ProcessPoolExecutor:
    # Spawned, not forked: this process may hold the thread pools of PyTorch and LLVM.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (cache,))


def _start_worker(cache: Path | None) -> None:
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)
    # At exit Triton's bindings list what the interpreter did not free, which is nobody's concern.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))


def compile_one(variant: Variant, target: Target) -> Compiled:
    """Compile in this process."""
    try:
        return read(variant.compile(), target)
    except Exception as error:  # each stage of the compiler has its own
        lines = str(error).strip().splitlines()
        return _failed(variant, target, f"{type(error).__name__}: {lines[-1] if lines else ''}")


def _failed(variant: Variant, target: Target, error: str) -> Compiled:
    return Compiled(variant.kernel, target.name, 0, target.shared_limit, 0, 0, (), error)


def read(compiled: Any, target: Target) -> Compiled:
    """The facts in what Triton compiled for a target."""
    amd = target.gpu.backend == "hip"
    assembly = compiled.asm["amdgcn" if amd else "ptx"]
    registers, spills = _amd_usage(assembly) if amd else _nvidia_usage(compiled.asm["cubin"])
    return Compiled(
        kernel=compiled.src.fn.__name__,
        target=target.name,
        shared=compiled.metadata.shared,
        shared_limit=target.shared_limit,
        registers=registers,
        spills=spills,
        tensor_core=tuple(sorted(set(re.findall(target.tensor_core, assembly)))),
    )


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers used, and those spilled: they go to memory (scalar ones go to vector registers)."""

    def count(name: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{name}:\s*(\d+)", assembly))

    return count("vgpr_count"), count("vgpr_spill_count")


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory of a thread. No kernel has local arrays, so those are spills."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout

    def total(names: str) -> int:
        return sum(int(size) for size in re.findall(rf"\b(?:{names}):(\d+)", usage))

    return total("REG"), total("STACK|LOCAL")
