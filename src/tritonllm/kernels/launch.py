"""A kernel launch as a value, and the one rule that decides between a kernel and its reference.

A `plan_<op>` function makes every choice (grid, tiles, warps) from shapes alone and returns a `Launch`. The same value
is launched on a GPU, run by the Triton interpreter, and compiled ahead of time for a GPU that is not there, so what
the tests compile is what users run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonllm.errors import KernelError
from tritonllm.kernels.recording import GPU, recorded_gpu, recorded_launches
from tritonllm.kernels.variant import Variant, settle_key, variant

# Triton 3.10 turns the fusion of multiply and add off by default; our numbers should not change with its version.
_OPTIONS = {"enable_fp_fusion": True}


def interpreting() -> bool:
    """True if this process runs Triton kernels in the interpreter (``TRITON_INTERPRET=1`` before the import)."""
    return bool(triton.knobs.runtime.interpret)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU, or stands for one that does in a recording."""
    return tensor.is_cuda or recorded_gpu() is not None


def runs_kernel(tensor: torch.Tensor) -> bool:
    """The dispatch rule: a GPU tensor always takes the kernel, a CPU tensor only in the interpreter.

    There is no fallback from a kernel that fails to its reference.
    """
    return on_gpu(tensor) or interpreting()


def gpu_of(device: torch.device) -> GPU:
    """What plans may know of a device; in a recording, of the GPU that every device counts as."""
    return recorded_gpu() or _present_gpu(device)


@cache
def _present_gpu(device: torch.device) -> GPU:
    """Where there is no GPU to ask: the smallest class of shared memory, and the multiprocessors of an H200."""
    if device.type != "cuda" or interpreting():
        return GPU(capability=(0, 0), shared_memory=64 * 1024, num_sms=132)
    properties = torch.cuda.get_device_properties(device)
    gpu = GPU(
        capability=torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0),
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        num_sms=properties.multi_processor_count,
        rdna=torch.version.hip is not None and properties.warp_size == 32,
    )
    return gpu.as_allowed()


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU, `(0, 0)` where kernels keep to what every GPU has.

    That is on other devices, in the interpreter, and with ``TRITONLLM_PORTABLE=1`` in the environment, which is there
    to measure that path and to tell a fault of the hardware's special ways from a fault of the rest.
    """
    return gpu_of(device).capability


def supports_pdl(device: torch.device) -> bool:
    """True if a kernel on this device may start before the one ahead of it ends: programmatic dependent launch."""
    return nvidia_capability(device) >= (9, 0)


def check(condition: bool, op: str, message: str | Callable[[], str]) -> None:
    """Raise `KernelError` naming the op unless the condition holds. For shapes and dtypes, never for device values.

    Plans run before every launch, so a message that formats shapes is better given as a function.
    """
    if not condition:
        raise KernelError(f"{op}: {message if isinstance(message, str) else message()}")


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up. (`triton.cdiv` takes ten microseconds outside a kernel.)"""
    return -(-dividend // divisor)


def shape_of(tensor: torch.Tensor) -> str:
    """`float32[3, 4]`: how a tensor is named in an error."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


_compiled: dict[tuple[Any, ...], Any] = {}
"""Triton's compiled kernels by what decides about them. It keeps them as well, under keys that take longer to make."""


_ahead: ContextVar[set[tuple[Any, ...]] | None] = ContextVar("ahead", default=None)
"""Inside `compiling_ahead`: what has been given to a thread, under keys as those of `_compiled`."""


def _make_launcher(kernel: Any) -> None:
    """Have the launcher of a compiled kernel on disk.

    Triton 3.6 runs a C compiler for each, and first launches would wait for one after another. It is thrown away, as a
    kernel takes its own when its first launch loads it: all launchers are modules of one name, of which Python keeps
    one object, so where two threads load some, each may find the other's function in it.
    """
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, kernels are compiled by threads, and launches do nothing.

    So the kernels of a program are compiled side by side by going through its launches once. All are compiled at
    the end. What they would have written is not there, and a kernel compiled before for another engine must
    not take what lies in its place for a count or an index: so none runs, but for those whose `Launch.makes_indices`
    says that the program itself looks things up by what they write.
    """
    with ThreadPoolExecutor() as threads:
        with triton.AsyncCompileMode(threads) as compiling:
            token = _ahead.set(set())
            try:
                yield
            finally:
                _ahead.reset(token)
            given = compiling.raw_futures  # which it forgets at its end
        # Only now that this thread loads nothing: a program may launch kernels in ways of its own.
        list(threads.map(_make_launcher, [future.result() for future in given]))


def compiles_ahead() -> bool:
    """True inside `compiling_ahead`, where what other ranks wait for must not be launched: they may skip theirs."""
    return _ahead.get() is not None


def _kind(value: Any) -> Any:
    """All that Triton looks at in a run-time argument when it chooses a compiled kernel, or more."""
    if isinstance(value, torch.Tensor):
        if torch.version.hip is not None:  # a tensor below 2 GiB is addressed by 32-bit offsets there
            return value.dtype, value.data_ptr() % 16, value.untyped_storage().nbytes() < 2**31
        return value.dtype, value.data_ptr() % 16
    if type(value) is int:
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, GluonTensorDescriptor):
        return value.base.dtype, *value.block_shape, id(value.layout)
    return value if value is None else type(value)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: everything that `kernel[grid](...)` needs, made from shapes and strides only.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: number of programs along each axis.
        args: run-time arguments by name, in the kernel's order: tensors, descriptors that TMA reads by, ints, floats,
            or None.
        constexprs: compile-time arguments by name.
        options: compiler options such as `num_warps` and `num_stages`.
        makes_indices: whether PyTorch looks things up by what it writes, so that it runs inside `compiling_ahead` too.
            It may not read what other kernels write, unless they do the same.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constexprs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    makes_indices: bool = False

    def run(self) -> None:
        """Launch on the current stream of the tensors' device, or in the interpreter; in a recording, be noted."""
        if 0 in self.grid:
            return
        recorded = recorded_launches()
        if recorded is not None:
            recorded.append(self)
            return
        if interpreting():
            self._interpret()
            return
        device = next(value.device for value in self.args.values() if isinstance(value, torch.Tensor))
        # Entering a device, even the current one, takes the host longer than all else here.
        if device.index == torch.cuda.current_device():
            self._launch(device.index)
        else:
            with torch.cuda.device(device):
                self._launch(device.index)

    def compile(self) -> None:
        """Compile what `run` would launch on the tensors' device, and launch nothing; in the interpreter nothing."""
        if interpreting() or recorded_launches() is not None:
            return
        device = next(value.device for value in self.args.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device(device):
            self._compile()

    def _compile(self) -> None:
        options = {**_OPTIONS, **self.options}
        settle_key(self.kernel)
        self.kernel.run(grid=self.grid, warmup=True, **self.args, **self.constexprs, **options)

    def _launch(self, device_index: int | None) -> None:
        """Through Triton's own launch, or straight into what that compiled before for arguments of the same kind.

        Prefills launch kernels one by one, and on a slow host Triton's way is what they would wait for.
        """
        args, constexprs = self.args.values(), self.constexprs.values()
        key = (id(self.kernel), device_index, *map(_kind, args), *constexprs, *self.options.items())
        compiled, ahead = _compiled.get(key), _ahead.get()
        if ahead is not None and not self.makes_indices:
            if compiled is None and key not in ahead:
                ahead.add(key)
                self._compile()
            return
        if compiled is None:
            names = [*self.args, *self.constexprs]
            check(
                names == list(self.kernel.arg_names),
                self.kernel.fn.__name__,
                lambda: f"arguments out of order: {names}",
            )
            options = {**_OPTIONS, **self.options}
            settle_key(self.kernel)
            _compiled[key] = self.kernel[self.grid](**self.args, **self.constexprs, **options)
            return
        x, y, z = (*self.grid, 1, 1)[:3]
        stream = triton.runtime.driver.active.get_current_stream(device_index)
        hooks = triton.knobs.runtime
        metadata = compiled.launch_metadata(self.grid, stream, *args, *constexprs)
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, metadata,
            hooks.launch_enter_hook, hooks.launch_exit_hook, *args, *constexprs,
        )  # fmt: skip

    def _interpret(self) -> None:
        for value in self.args.values():
            check(
                not isinstance(value, torch.Tensor) or value.dtype != torch.bfloat16,
                self.kernel.fn.__name__,
                "the Triton interpreter computes bfloat16 wrongly; use float32 or float16 there",
            )
        self.kernel[self.grid](**self.args, **self.constexprs)

    def variant(self, target: GPUTarget) -> Variant:
        """What Triton would compile for this launch on that GPU."""
        return variant(self.kernel, {**self.args, **self.constexprs}, {**_OPTIONS, **self.options}, target)

    def aot(self, target: GPUTarget) -> Any:
        """Compile for a GPU that need not be present, with the specialisation that a launch would choose.

        Returns Triton's compiled kernel: `.asm` holds the stages, `.metadata.shared` the bytes of shared memory.
        """
        return self.variant(target).compile()
