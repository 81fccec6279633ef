"""Which kernels the layers of a decode step take. All paths compute the same; the fastest depends on the batch."""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum

import torch

from tritonllm.kernels.hopper_linear import serves_shape
from tritonllm.kernels.tuning import fused_rows_on


class DecodePath(Enum):
    """A decoder layer as a chain of kernels.

    SKINNY: five, with norms, SiLU and adds inside linear layers that read the weight for few rows.
    HOPPER: seven, with linear layers that load the weight before their input is there; two leave their sums in parts.
    SEPARATE: ten, the linear layers from PyTorch.
    """

    SKINNY = "skinny"
    HOPPER = "hopper"
    SEPARATE = "separate"


_HOPPER_PATHS = {
    1024: [(2, DecodePath.SKINNY), (256, DecodePath.HOPPER)],
    2048: [(4, DecodePath.SKINNY), (16, DecodePath.SEPARATE), (64, DecodePath.HOPPER)],
    4096: [(2, DecodePath.SKINNY)],
}
"""By hidden size, the largest batch of each path, ascending; above all of them SEPARATE. Measured on an H200."""


def decode_path(
    num_rows: int, in_features: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> DecodePath:
    """The fastest path of a kit's layer for `num_rows` rows, padding rows included.

    Args:
        num_rows: of the step.
        in_features: hidden size, heads * head_dim and intermediate size.
        dtype, device: of the hidden states.
    """
    hidden_size = in_features[0]
    if not all(serves_shape(size, dtype, device) for size in in_features):
        return DecodePath.SKINNY if num_rows <= fused_rows_on(device, hidden_size) else DecodePath.SEPARATE
    measured = sorted(_HOPPER_PATHS)
    paths = _HOPPER_PATHS[measured[min(bisect_left(measured, hidden_size), len(measured) - 1)]]
    return next((path for most, path in paths if num_rows <= most), DecodePath.SEPARATE)
