"""Random weights that depend on nothing but a seed and the names of the checkpoint tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from tritonllm.weights.targets import find_targets

STANDARD_DEVIATION = 0.02


def dummy_tensor(seed: int, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The whole, unsharded float32 tensor that stands for a checkpoint tensor: normal, or ones for a norm's weight."""
    owner, _, leaf = name.rpartition(".")
    if len(shape) == 1 and leaf == "weight" and "norm" in owner.rpartition(".")[2]:
        return torch.ones(shape, dtype=torch.float32, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, STANDARD_DEVIATION, generator=generator)


def dummy_weights(model: nn.Module, seed: int = 0, check: Callable[[], None] | None = None) -> None:
    """Fill a model with `dummy_tensor`s, made on each parameter's own device.

    Every tensor is made whole before it is sharded, so all world sizes hold the same model. `check` is called before
    each and may raise.
    """
    targets, _ = find_targets(model)
    for name, target in targets.items():
        if check is not None:
            check()
        target.load(dummy_tensor(seed, name, target.tensor.shape, target.parameter.device))
