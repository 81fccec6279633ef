"""The choice of tokens as cases: on logits as a language model gives them, and on flat ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from tritonllm import kernels
from tritonllm.bench.kernels.case import Case, Place, Prepared, Timed, Work, different
from tritonllm.errors import ConfigError
from tritonllm.kernels import reference
from tritonllm.kernels.reference.sampling import gumbel_noise
from tritonllm.testing.poison import poisoned_memory

LOGITS = ("peaked", "flat")

_PEAKS = 64
_REGRET = 1e-3  # a score is off by the rounding of two logs


@dataclass(frozen=True)
class _Choice(Case):
    """Rows of logits: a bell of width 2.5 with 64 peaks of 8 to 18 (`peaked`), or a bell of width 1 (`flat`)."""

    vocab_size: int
    batch: int
    logits: str = "peaked"
    float32: bool = False

    def __post_init__(self) -> None:
        if self.logits not in LOGITS:
            raise ConfigError(f"{self.op} has no logits {self.logits!r}, only {' and '.join(LOGITS)}.")

    def work(self, itemsize: int) -> Work:
        return Work(self.batch * self.vocab_size * (4 if self.float32 else itemsize) + 4 * self.batch)

    def draw(self, place: Place) -> torch.Tensor:
        """Logits [copies, B, V]."""
        if self.float32:
            place = Place(place.device, torch.float32, place.rotated_bytes)
        shape = place.copies(self.work(place.dtype.itemsize).bytes), self.batch, self.vocab_size
        if self.logits == "flat":
            return place.normal(*shape)
        logits = place.normal(*shape, scale=2.5)
        there = torch.randint(self.vocab_size, (*shape[:2], min(_PEAKS, self.vocab_size)), device=place.device)
        return logits.scatter_(2, there, (8 + 10 * torch.rand(there.shape, device=place.device)).to(logits.dtype))


class _Rows:
    """Parameters of sampled rows, or of greedy ones at temperature 0."""

    def __init__(self, batch: int, place: Place, temperature: float = 1.0, top_p: float = 1.0) -> None:
        device = place.device
        self.temperatures = torch.full((batch,), temperature, device=device)
        self.top_ks = torch.zeros(batch, dtype=torch.int32, device=device)
        self.top_ps = torch.full((batch,), top_p, device=device)
        self.seeds = torch.randint(-(2**31), 2**31, (batch, 2), device=device).to(torch.int32)
        self.positions = torch.arange(batch, dtype=torch.int32, device=device)

    @property
    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a draw takes beside logits."""
        return self.temperatures, self.seeds, self.positions

    @property
    def filters(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decides about the kept tokens."""
        return self.temperatures, self.top_ks, self.top_ps

    def regret(
        self, tokens: torch.Tensor, logits: torch.Tensor, kept_from: torch.Tensor | None = None, first_id: int = 0
    ) -> float:
        """By how much the best allowed token beats the one chosen, in the worst row; infinite if that is not allowed.

        Of two tokens with nearly equal scores either is right; so is the last one kept, or left out, by a rounding.
        """
        columns = tokens.long() - first_id
        if not ((columns >= 0) & (columns < logits.shape[1])).all():
            return math.inf
        scores = wide = logits.float()
        if self.temperatures.any():
            noise = gumbel_noise(self.seeds, self.positions, logits.shape[1], first_id)
            scores = wide + self.temperatures[:, None] * noise
        chosen = scores.gather(1, columns[:, None])[:, 0]
        if kept_from is not None:
            if (wide.gather(1, columns[:, None])[:, 0] < kept_from - 1e-3).any():
                return math.inf
            scores = scores.masked_fill(wide < kept_from[:, None], -math.inf)
        return (scores.amax(1) - chosen).amax().clamp(min=0.0).item()


@dataclass(frozen=True)
class PickTokens(_Choice):
    """`pick_tokens`: draws at temperature 1, or the most likely tokens."""

    op: ClassVar[str] = "pick_tokens"
    greedy: bool = False

    def prepare(self, place: Place) -> Prepared:
        logits, rows = self.draw(place), _Rows(self.batch, place, 0.0 if self.greedy else 1.0)
        calls = [partial(kernels.pick_tokens, each, *rows.draw) for each in logits]

        def error() -> float:
            with poisoned_memory():
                tokens = calls[0]()
            return rows.regret(tokens, logits[0])

        return Prepared(Timed(calls, error, _REGRET))


@dataclass(frozen=True)
class PickFromShard(_Choice):
    """`pick_from_shard`: draws from a part of the vocabulary behind a part of the same size."""

    op: ClassVar[str] = "pick_from_shard"

    def prepare(self, place: Place) -> Prepared:
        logits, rows, first_id = self.draw(place), _Rows(self.batch, place), self.vocab_size // 4 * 4
        calls = [partial(kernels.pick_from_shard, each, *rows.draw, first_id) for each in logits]

        def error() -> float:
            with poisoned_memory():
                scores, tokens = calls[0]()
            exact, _ = reference.pick_from_shard(logits[0], *rows.draw, first_id)
            off = (scores - exact).abs().amax().item()
            return max(rows.regret(tokens, logits[0], first_id=first_id), off if off == off else math.inf)

        return Prepared(Timed(calls, error, _REGRET))


@dataclass(frozen=True)
class KeptThreshold(_Choice):
    """`kept_threshold` of top-p."""

    op: ClassVar[str] = "kept_threshold"
    top_p: float = field(kw_only=True)

    def prepare(self, place: Place) -> Prepared:
        logits, rows = self.draw(place), _Rows(self.batch, place, top_p=self.top_p)
        calls = [partial(kernels.kept_threshold, each, *rows.filters) for each in logits]

        def error() -> float:
            """How far the mass above a threshold exceeds p, or that from it on falls short, in float64."""
            with poisoned_memory():
                thresholds = calls[0]()[:, None]
            wide = logits[0].double()
            if not (wide == thresholds).any(1).all():
                return math.inf
            mass = wide.softmax(1)
            above = torch.where(wide > thresholds, mass, 0.0).sum(1)
            reached = torch.where(wide >= thresholds, mass, 0.0).sum(1)
            return torch.maximum(above - self.top_p, self.top_p - reached).amax().clamp(min=0.0).item()

        return Prepared(Timed(calls, error, 1e-5))


@dataclass(frozen=True)
class SampleTokens(_Choice):
    """`sample_tokens` with top-p at temperature 1."""

    op: ClassVar[str] = "sample_tokens"
    top_p: float = field(kw_only=True)

    def prepare(self, place: Place) -> Prepared:
        logits, rows = self.draw(place), _Rows(self.batch, place, top_p=self.top_p)
        tail = rows.seeds, rows.positions
        calls = [partial(kernels.sample_tokens, each, *rows.filters, *tail) for each in logits]

        def error() -> float:
            with poisoned_memory():
                tokens = calls[0]()
            return rows.regret(tokens, logits[0], reference.kept_threshold(logits[0], *rows.filters))

        return Prepared(Timed(calls, error, _REGRET))


@dataclass(frozen=True)
class MergePicks(Case):
    """`merge_picks` over the parts of a vocabulary."""

    op: ClassVar[str] = "merge_picks"
    batch: int
    parts: int

    def work(self, itemsize: int) -> Work:
        return Work(4 * self.batch * (2 * self.parts + 1))

    def prepare(self, place: Place) -> Prepared:
        shape = place.copies(self.work(4).bytes), self.batch, self.parts
        scores = torch.randn(shape, device=place.device)
        tokens = torch.randint(0, 1 << 20, shape, dtype=torch.int32, device=place.device)
        calls = [partial(kernels.merge_picks, *each) for each in zip(scores, tokens, strict=True)]

        def error() -> float:
            with poisoned_memory():
                merged = calls[0]()
            return different((merged, reference.merge_picks(scores[0], tokens[0])))

        return Prepared(Timed(calls, error, 0.0))
