"""Random inputs for kernel tests: a seed and shapes are drawn, the numbers come from a torch.Generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritonllm.kernels.launch import interpreting


def kernel_device() -> torch.device:
    """Where ops run in this process: a GPU if there is one, else the CPU; in Triton's interpreter always the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu")


def exact_dtypes() -> tuple[torch.dtype, ...]:
    """Activation types that ops compute right in this process: Triton's interpreter does not do bfloat16."""
    exact = (torch.float32, torch.float16)
    return exact if interpreting() else (*exact, torch.bfloat16)


class Draw:
    """Tensors from one seed, the same on every device."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Standard normal values times `scale`."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, dtype)

    def rows(self, tokens: int, columns: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
        """Normal rows [tokens, columns] inside rows longer by `padding`, which holds NaN and must not be read."""
        wide = torch.full((tokens, columns + padding), float("nan"), device=self.device, dtype=dtype)
        wide[:, :columns] = self.normal(tokens, columns, dtype=dtype)
        return wide[:, :columns]

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int32 values in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, torch.int32)

    def slots(self, tokens: int, num_slots: int) -> torch.Tensor:
        """int32 [tokens]: distinct slots in random order, about a third of them -1."""
        slots = torch.randperm(num_slots, generator=self.generator)[:tokens]
        slots[torch.rand(tokens, generator=self.generator) < 0.3] = -1
        return slots.to(self.device, torch.int32)

    def caches(
        self, blocks: int, block_size: int, kv_heads: int, head_dim: int, heads_first: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V caches full of NaN in the logical layout, stored with tokens or heads outermost in a block."""
        shape = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        pool = torch.full((2, blocks, *shape, head_dim), float("nan"), device=self.device, dtype=dtype)
        k_cache, v_cache = pool.transpose(2, 3) if heads_first else pool
        return k_cache, v_cache


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaNs compare equal to themselves."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def rope_table(
    max_position: int, rotary_dim: int, theta: float = 10000.0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The `cos_sin` of the ops, float32 [max_position, rotary_dim]: cosines of a position, then its sines."""
    frequencies = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device)


@dataclass(frozen=True)
class StridedCase:
    """Rows [tokens, columns] of normal values that lie in rows longer by `padding`, which holds NaN."""

    tokens: int
    columns: int
    padding: int
    dtype: torch.dtype
    seed: int

    def build(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The rows: stride `columns + padding`, 1 along the last axis. Default device: `kernel_device()`."""
        return Draw(self.seed, device or kernel_device()).rows(self.tokens, self.columns, self.padding, self.dtype)


@dataclass(frozen=True)
class RopeCase:
    """Heads to rotate and the table to do it with; `rotary_dim` is even and at most `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    positions: tuple[int, ...]
    theta: float
    dtype: torch.dtype
    seed: int

    def build(
        self, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of `apply_rope`: q [T, Hq, D] and k [T, Hk, D], both views into one matrix of q, k and v
        heads as a QKV projection leaves them, positions int32 [T], and cos_sin float32 [max(positions) + 1, R].
        """
        draw = Draw(self.seed, device or kernel_device())
        tokens, last = len(self.positions), max(self.positions, default=0)
        heads = draw.normal(tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim, dtype=self.dtype)
        q, k, _ = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        positions = torch.tensor(self.positions, dtype=torch.int32, device=draw.device)
        return q, k, positions, rope_table(last + 1, self.rotary_dim, self.theta, draw.device)
