"""Which kernels the layers of a decode step take. All paths compute the same; the fastest depends on the batch."""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch

from tritonllm.kernels.hopper_linear import serves_shape
from tritonllm.kernels.launch import gpu_of
from tritonllm.kernels.recording import GPU
from tritonllm.kernels.tuning import tuning_of


class DecodePath(Enum):
    """A decoder layer as a chain of kernels.

    SKINNY: five, with norms, SiLU and adds inside linear layers that read the weight for few rows.
    HOPPER: seven, with linear layers that load the weight before their input is there; two leave their sums in parts.
    MIXED: eight, the linear layers behind a norm from PyTorch, those before one as in HOPPER.
    SEPARATE: nine, the linear layers from PyTorch.
    """

    SKINNY = "skinny"
    HOPPER = "hopper"
    MIXED = "mixed"
    SEPARATE = "separate"

    @property
    def leaves_parts(self) -> bool:
        """Whether a layer's output comes in parts that the next norm adds; such layers run on Hopper alone."""
        return self in (DecodePath.HOPPER, DecodePath.MIXED)


def decode_path(
    num_rows: int, in_features: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> DecodePath:
    """The fastest path of a kit's layer for `num_rows` rows, by the tuning table of the device.

    Where the table says HOPPER or MIXED and there are no such kernels for the shape or dtype, that is SEPARATE.

    Args:
        num_rows: of the step, padding rows included.
        in_features: hidden size, heads * head_dim and intermediate size.
        dtype, device: of the hidden states.
    """
    return _decode_path(num_rows, in_features, dtype, device, gpu_of(device))


@cache
def _decode_path(
    num_rows: int, in_features: tuple[int, int, int], dtype: torch.dtype, device: torch.device, gpu: GPU
) -> DecodePath:
    """The same; what the device counts as, which a recording changes, is part of the key."""
    path = DecodePath(tuning_of(device).path(num_rows, in_features[0]))
    if path.leaves_parts and not all(serves_shape(size, dtype, device) for size in in_features):
        return DecodePath.SEPARATE
    return path
