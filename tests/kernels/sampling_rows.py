"""Rows of logits and their sampling parameters, for the tests of both sampling modules."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tritonllm.kernels.kept_set import kept_threshold
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.sampling import pick_tokens, sample_tokens

ON_GPU = not interpreting()
LARGE = 151936 if ON_GPU else 1503
SIZES = (1, 2, 5, 17, 129, 4096, 4099, 50257) if ON_GPU else (1, 5, 17, 129, 4099)  # 4099: more than one tile

sizes = st.sampled_from(SIZES)
seeds_of_tests = st.integers(0, 2**31 - 1)
# A row of `sample_tokens` is a dozen programs, each 10 to 20 ms in the interpreter.
few_examples = settings(max_examples=50 if ON_GPU else 4)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Rows:
    """Parameters of B rows, stored as columns of wider matrices so that nothing is contiguous by chance."""

    def __init__(
        self, temperature: list[float], top_k: list[int], top_p: list[float], device: torch.device, seed: int = 0
    ) -> None:
        batch = len(temperature)
        words = torch.randint(-(2**31), 2**31 - 1, (batch, 9), generator=generator(seed), dtype=torch.int32)
        words[:, 0] = torch.tensor(temperature).view(torch.int32)
        words[:, 3] = torch.tensor(top_p).view(torch.int32)
        words[:, 5] = torch.tensor(top_k, dtype=torch.int32)
        words[:, 8] &= 0x7FFF
        words = words.to(device)
        self.temperatures, self.top_ps = words.view(torch.float32)[:, 0], words.view(torch.float32)[:, 3]
        self.top_ks, self.seeds, self.positions = words[:, 5], words[:, 6:8], words[:, 8]

    def pick(self, logits: torch.Tensor) -> list[int]:
        return pick_tokens(logits, self.temperatures, self.seeds, self.positions).tolist()

    def sample(self, logits: torch.Tensor) -> list[int]:
        parameters = (self.temperatures, self.top_ks, self.top_ps, self.seeds, self.positions)
        return sample_tokens(logits, *parameters).tolist()

    def threshold(self, logits: torch.Tensor) -> torch.Tensor:
        return kept_threshold(logits, self.temperatures, self.top_ks, self.top_ps)

    def on_cpu(self) -> Rows:
        other = Rows.__new__(Rows)
        for name, value in vars(self).items():
            setattr(other, name, value.cpu())
        return other


def strided(logits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same logits as rows of a wider matrix whose other columns would win."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 3), torch.inf, dtype=logits.dtype, device=device)
    wide[:, : logits.shape[1]] = logits.to(device)
    return wide[:, : logits.shape[1]]


def kept_by_sort(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Kept tokens of one row [V], from the definition and a sort, in float64."""
    x = logits.double().cpu()
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < len(x):
        kept = x >= x.sort(descending=True).values[top_k - 1]
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
