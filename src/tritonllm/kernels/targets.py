"""The GPU families that kernels are compiled for without having one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget

from tritonllm.errors import ConfigError
from tritonllm.kernels.launch import gpu_of
from tritonllm.kernels.recording import GPU
from tritonllm.kernels.tuning import shipped_tuning
from tritonllm.kernels.tuning_table import Tuning


@dataclass(frozen=True)
class Target:
    """A GPU, as far as it decides about kernels.

    Attributes:
        name: of the family, such as "sm_90" or "gfx942".
        gpu: what Triton compiles for.
        shared_limit: shared memory for one program in bytes.
        num_sms: multiprocessors.
        tensor_core: how the tensor-core instructions are spelled, as a regular expression.
    """

    name: str
    gpu: GPUTarget
    shared_limit: int
    num_sms: int
    tensor_core: str

    @property
    def counts_as(self) -> GPU:
        """What plans may know of it."""
        rdna = self.gpu.backend == "hip" and self.gpu.warp_size == 32
        return GPU(self._capability, self.shared_limit, self.num_sms, rdna)

    @property
    def tuning(self) -> Tuning:
        """The table shipped for this family; `UNTUNED` if there is none."""
        return shipped_tuning(self._capability)

    @property
    def _capability(self) -> tuple[int, int]:
        return divmod(self.gpu.arch, 10) if self.gpu.backend == "cuda" else (0, 0)


def _nvidia(capability: int, shared_limit: int, num_sms: int, tensor_core: str = r"mma\.sync") -> Target:
    return Target(f"sm_{capability}", GPUTarget("cuda", capability, 32), shared_limit, num_sms, tensor_core)


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 163 * 1024, 108),
        _nvidia(86, 99 * 1024, 82),
        _nvidia(89, 99 * 1024, 128),
        _nvidia(90, 227 * 1024, 132, r"mma\.sync|wgmma"),
        _nvidia(100, 227 * 1024, 148, r"mma\.sync|tcgen05"),
        _nvidia(120, 99 * 1024, 170),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, 304, r"v_mfma"),
        Target("gfx1100", GPUTarget("hip", "gfx1100", 32), 64 * 1024, 48, r"v_wmma"),
    )
}
"""By name, with the multiprocessors of A100, RTX 3090, RTX 4090, H100 (SXM) and H200, B200, RTX 5090, MI300X and
RX 7900 XTX: other GPUs of a family have other numbers."""


def parse_targets(texts: Sequence[str], num_sms: int | None = None) -> list[Target]:
    """Targets as they are given on the command line, each text such as `cuda:80,90` or `hip:gfx942`.

    Args:
        texts: none for all families.
        num_sms: multiprocessors, in place of the usual number.

    Raises:
        ConfigError: a family is not known.
    """
    known = {f"{target.gpu.backend}:{target.gpu.arch}": target for target in TARGETS.values()}
    wanted = []
    for text in texts:
        backend, _, architectures = text.partition(":")
        wanted += [f"{backend}:{architecture}" for architecture in architectures.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no target; those known are {', '.join(known)}.")
    targets = [known[name] for name in dict.fromkeys(wanted or known)]
    return [replace(target, num_sms=num_sms) for target in targets] if num_sms is not None else targets


def present_target() -> Target | None:
    """The GPU at hand as it is, None if there is none."""
    if not torch.cuda.is_available():
        return None
    gpu = triton.runtime.driver.active.get_current_target()
    facts = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    name = f"sm_{gpu.arch}" if gpu.backend == "cuda" else str(gpu.arch)
    family = TARGETS.get(name)
    spelling = family.tensor_core if family else r"mma\.sync|wgmma|tcgen05|v_mfma|v_wmma"
    return Target(name, gpu, facts.shared_memory, facts.num_sms, spelling)
