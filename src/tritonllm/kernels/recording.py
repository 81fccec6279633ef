"""A GPU that is not there: what plans ask about it, and a list that takes the launches in its place.

Inside `recording` the code of an engine runs on meta tensors, which have shapes and no memory. Every choice that
depends on the device is made for the GPU given, and what would be launched is noted: by construction it is what that
GPU's users run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tritonllm.kernels.launch import Launch


@dataclass(frozen=True)
class GPU:
    """What decides about a launch beside its shapes.

    Attributes:
        capability: compute capability of an NVIDIA GPU, (0, 0) for any other device.
        shared_memory: bytes that one program may use.
        num_sms: multiprocessors.
        rdna: an AMD GPU with waves of 32 threads. Its matrix instructions take an operand from both halves of a wave,
            so tiles cost twice the registers there.
    """

    capability: tuple[int, int]
    shared_memory: int
    num_sms: int
    rdna: bool = False

    def as_allowed(self) -> GPU:
        """This GPU, or with ``TRITONLLM_PORTABLE=1`` what every GPU has of it."""
        return replace(self, capability=(0, 0)) if os.environ.get("TRITONLLM_PORTABLE") == "1" else self


class _Recording(NamedTuple):
    gpu: GPU
    launches: list[Launch]


_active: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording(gpu: GPU) -> Iterator[list[Launch]]:
    """Inside, every device counts as this GPU, and launches go into the list that is given instead of to a device."""
    launches: list[Launch] = []
    token = _active.set(_Recording(gpu.as_allowed(), launches))
    try:
        yield launches
    finally:
        _active.reset(token)


def recorded_gpu() -> GPU | None:
    """The GPU that every device counts as, None outside a recording."""
    active = _active.get()
    return None if active is None else active.gpu


def recorded_launches() -> list[Launch] | None:
    """Where launches go, None outside a recording."""
    active = _active.get()
    return None if active is None else active.launches
