"""Launching: which launches share a compiled kernel, with a pretend compiler in the place of Triton's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tritonllm.errors import KernelError
from tritonllm.kernels import launch
from tritonllm.kernels.launch import Launch


class PretendKernel:
    """Counts compilations; what it compiles notes the arguments it is run with."""

    hash = "the key in Triton's cache, which it has from the start"

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.fn = SimpleNamespace(__name__="pretend")
        self.compilations = 0
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(**arguments: Any) -> Any:
            self.compilations += 1
            self.runs.append((*grid, *(arguments[name] for name in self.arg_names)))
            return SimpleNamespace(
                function="function",
                packed_metadata="packed",
                launch_metadata=lambda grid, stream, *values: None,
                run=self._run,
            )

        return compile_and_run

    def _run(self, x: int, y: int, z: int, stream: int, function: str, packed: str, *rest: Any) -> None:
        assert (stream, function, packed, rest[0]) == (77, "function", "packed", None)
        self.runs.append((x, y, z, *rest[3:]))


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor's device
    active = SimpleNamespace(get_current_stream=lambda index: 77)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


TENSOR = torch.zeros(64)
KERNEL_ARGS = ["x_ptr", "scale", "stride", "weight_ptr", "BLOCK"]


def make(
    kernel: PretendKernel, grid: tuple[int, ...] = (5, 6, 7), block: int = 64, warps: int = 4, **args: Any
) -> Launch:
    values = {"x_ptr": TENSOR, "scale": 0.5, "stride": 32, "weight_ptr": None, **args}
    return Launch(kernel, grid, values, {"BLOCK": block}, {"num_warps": warps})


def test_the_second_launch_goes_straight_to_what_was_compiled() -> None:
    kernel = PretendKernel(KERNEL_ARGS)
    other = torch.ones(64)
    make(kernel).run()
    make(kernel, grid=(8,), x_ptr=other, scale=2.5, stride=48).run()
    assert kernel.compilations == 1
    assert kernel.runs[1][:3] == (8, 1, 1)
    assert kernel.runs[1][3] is other
    assert kernel.runs[1][4:] == (2.5, 48, None, 64)


@pytest.mark.parametrize(
    "changed",
    [
        {"x_ptr": TENSOR.half()},
        {"x_ptr": TENSOR[1:]},  # not aligned to 16 bytes
        {"stride": 1},
        {"stride": 33},
        {"stride": 2**31},
        {"weight_ptr": TENSOR},
        {"scale": 1},
        {"block": 128},
        {"warps": 8},
    ],
)
def test_arguments_of_another_kind_are_compiled_anew(changed: dict[str, Any]) -> None:
    kernel = PretendKernel(KERNEL_ARGS)
    for _ in range(2):
        make(kernel).run()
        make(kernel, **changed).run()
    assert kernel.compilations == 2
    assert len(kernel.runs) == 4


def test_kernels_do_not_share() -> None:
    kernels = [PretendKernel(KERNEL_ARGS) for _ in range(2)]
    for kernel in kernels:
        make(kernel).run()
    assert [kernel.compilations for kernel in kernels] == [1, 1]


def test_an_empty_grid_launches_nothing() -> None:
    kernel = PretendKernel(KERNEL_ARGS)
    make(kernel, grid=(3, 0)).run()
    assert kernel.runs == []


def test_arguments_out_of_order_are_refused() -> None:
    kernel = PretendKernel(["scale", "x_ptr", "stride", "weight_ptr", "BLOCK"])
    with pytest.raises(KernelError, match="pretend: arguments out of order"):
        make(kernel).run()


def test_on_amd_large_tensors_get_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton addresses a tensor below 2 GiB by 32-bit offsets there."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    kernel = PretendKernel(KERNEL_ARGS)
    large = torch.empty(2**31, dtype=torch.uint8, device="meta")
    small = torch.empty(2**31 - 1, dtype=torch.uint8, device="meta")
    for tensor in (small, large, small, large):
        make(kernel, weight_ptr=tensor).run()
    assert kernel.compilations == 2
