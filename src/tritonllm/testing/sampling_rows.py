"""Rows of logits and their sampling parameters.

Poison: rows of logits lie in a wider matrix whose other columns hold infinity, which would win. Parameters are columns
of one matrix of words, so none of them is contiguous by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.kernels import kept_threshold, pick_tokens, sample_tokens
from tritonllm.testing.tensors import kernel_device


def generator(seed: int) -> torch.Generator:
    """A generator on the CPU: the same numbers whatever device they go to."""
    return torch.Generator().manual_seed(seed)


class Rows:
    """Parameters of B rows.

    Attributes:
        temperatures, top_ps: float32 [B].
        top_ks: int32 [B].
        min_ps: float32 [B]; only where given, and without it ops are called without it.
        seeds: int32 [B, 2], low and high word, any bits.
        positions: int32 [B], at most 0x7FFF.
    """

    def __init__(
        self,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        device: torch.device | str,
        seed: int = 0,
        min_p: Sequence[float] | None = None,
    ) -> None:
        batch = len(temperature)
        words = torch.randint(-(2**31), 2**31 - 1, (batch, 9), generator=generator(seed), dtype=torch.int32)
        if min_p is not None:
            words[:, 4] = torch.tensor(min_p).view(torch.int32)
        words[:, 0] = torch.tensor(temperature).view(torch.int32)
        words[:, 3] = torch.tensor(top_p).view(torch.int32)
        words[:, 5] = torch.tensor(top_k, dtype=torch.int32)
        words[:, 8] &= 0x7FFF
        words = words.to(device)
        self.temperatures, self.top_ps = words.view(torch.float32)[:, 0], words.view(torch.float32)[:, 3]
        if min_p is not None:
            self.min_ps = words.view(torch.float32)[:, 4]
        self.top_ks, self.seeds, self.positions = words[:, 5], words[:, 6:8], words[:, 8]

    def pick(self, logits: torch.Tensor) -> list[int]:
        """Tokens by `pick_tokens`."""
        return pick_tokens(logits, self.temperatures, self.seeds, self.positions).tolist()

    def sample(self, logits: torch.Tensor) -> list[int]:
        """Tokens by `sample_tokens`."""
        parameters = (self.temperatures, self.top_ks, self.top_ps, self.seeds, self.positions)
        return sample_tokens(logits, *parameters, vars(self).get("min_ps")).tolist()

    def threshold(self, logits: torch.Tensor) -> torch.Tensor:
        """Thresholds by `kept_threshold`."""
        return kept_threshold(logits, self.temperatures, self.top_ks, self.top_ps, vars(self).get("min_ps"))

    def on_cpu(self) -> Rows:
        """The same parameters on the CPU, each contiguous."""
        other = Rows.__new__(Rows)
        for name, value in vars(self).items():
            setattr(other, name, value.cpu())
        return other


def strided(logits: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same logits as rows of a wider matrix whose other columns would win."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 3), torch.inf, dtype=logits.dtype, device=device)
    wide[:, : logits.shape[1]] = logits.to(device)
    return wide[:, : logits.shape[1]]


def kept_by_sort(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> torch.Tensor:
    """Kept tokens of one row [V], from the definition and a sort, in float64."""
    x = logits.double().cpu()
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < len(x):
        kept = x >= x.sort(descending=True).values[top_k - 1]
    if min_p > 0:
        kept &= ((x - x.max()) / temperature).exp() >= min_p
    if top_p < 1:
        ordered = x[kept].sort(descending=True).values
        mass = ((ordered - ordered[0]) / temperature).exp()
        before = mass.cumsum(0) - mass
        # The mass before an element is that before the first of its equals.
        first = torch.searchsorted(-ordered, -ordered)
        stays = before[first] < top_p * mass.sum()
        stays[0] = True
        kept &= x >= ordered[stays].min()
    return kept


DISTRIBUTIONS: tuple[str | float, ...] = (0.41, 0.9, 0.999, "zipf", "equal", "two-level", "halving", "normal", "flat")
"""What language models give (0.9: one token holds that share of the mass; zipf; normal; flat), and the odd cases."""


def logits_row(distribution: str | float, size: int, seed: int = 0) -> torch.Tensor:
    """One row of logits, float32 [size], in random order.

    Args:
        distribution: of `DISTRIBUTIONS`; any number in (0, 1) is the share of one token, the rest being normal.
        size: the vocabulary.
        seed: of the order and of random values.
    """
    shuffled = torch.randperm(size, generator=generator(seed))
    normal = torch.randn(size, generator=generator(seed + 1))
    if distribution == "zipf":
        return -(shuffled + 1.0).log()
    if distribution == "equal":
        return torch.full((size,), 2.5)
    if distribution == "two-level":
        return torch.where(shuffled < size // 10, 1.0, -2.0)
    if distribution == "halving":
        return -0.6931471805599453 * shuffled.clamp(max=60).float()
    if distribution == "normal":
        return normal * 2.5
    if distribution == "flat":
        return normal * 0.02
    share = float(distribution)
    normal[shuffled[0]] = -torch.inf
    row = normal.log_softmax(0) + torch.tensor(1 - share).log()
    row[shuffled[0]] = torch.tensor(share).log()
    return row


@dataclass(frozen=True)
class LogitsCase:
    """Rows of one distribution each."""

    distributions: tuple[str | float, ...]
    vocab_size: int
    dtype: torch.dtype
    seed: int

    def build(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Logits [B, V], strided; default device: `kernel_device()`."""
        rows = [logits_row(name, self.vocab_size, self.seed + 2 * row) for row, name in enumerate(self.distributions)]
        return strided(torch.stack(rows).to(self.dtype), device or kernel_device())


@dataclass(frozen=True)
class SamplingCase:
    """Logits and the parameters of their rows."""

    logits: LogitsCase
    temperatures: tuple[float, ...]
    top_ks: tuple[int, ...]
    top_ps: tuple[float, ...]
    seed: int

    def build(self, device: torch.device | str | None = None) -> tuple[torch.Tensor, Rows]:
        """Logits [B, V] and the parameters of their B rows; default device: `kernel_device()`."""
        device = device or kernel_device()
        return self.logits.build(device), Rows(self.temperatures, self.top_ks, self.top_ps, device, self.seed)
