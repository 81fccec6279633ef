"""References of the linear layers: the separate ops that they fuse, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonllm.kernels.reference.elementwise import gelu_and_mul, rms_norm, silu_and_mul


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.skinny_linear.skinny_linear`."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_and_mul(y) if activation == "silu" else gelu_and_mul(y, tanh=activation == "gelu_tanh")
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)


def hopper_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
) -> torch.Tensor:
    """See `kernels.hopper_linear.hopper_linear`."""
    return skinny_linear(x, weight, bias=bias, gated=gated, activation=activation)


def hopper_linear_parts(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.hopper_linear.hopper_linear_parts`; all in one part."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())[None]
