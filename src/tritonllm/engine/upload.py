"""Integers from the host to the device: many short lists, one copy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16
"""Integers: a section starts at a multiple of 64 bytes, so that every kernel sees an aligned pointer."""


def on_host(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """int32 `[len(values)]` on the host, pinned if it is meant for a GPU."""
    tensor = torch.from_numpy(np.asarray(values, dtype=np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """int32 `[len(values)]` on the device, in a transfer that the host does not wait for."""
    return on_host(values, device).to(device, non_blocking=True)


def upload(sections: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy lists of 32-bit integers to the device in one transfer that the host does not wait for.

    Returns:
        One int32 tensor `[len(section)]` for each section, 64-byte aligned within one buffer.
    """
    flat: list[int] = []
    starts = []
    for section in sections:
        flat.extend([0] * (-len(flat) % ALIGNMENT))
        starts.append(len(flat))
        flat.extend(section)
    buffer = to_device(flat, device)
    return [buffer[start : start + len(section)] for start, section in zip(starts, sections, strict=True)]


def float_bits(value: float) -> int:
    """A float32 as the signed 32-bit integer of the same bits."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two signed 32-bit integers, low word first."""
    return struct.unpack("<ii", struct.pack("<Q", seed % 2**64))
